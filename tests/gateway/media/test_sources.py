"""Which URLs name a medium, and where it is: pure rules."""

import base64
import os
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.settings import GatewaySettings
from penstock.gateway.media.download import check_address
from penstock.gateway.media.sources import (
    BASE64_CHARACTERS,
    InlineSource,
    LocalSource,
    MediaLimits,
    MediaRejected,
    RemoteSource,
    decode_inline,
    parse_redirect,
    parse_source,
    path_below,
)
from penstock.schemas.errors import Code
from tests.properties import examples

LIMITS = MediaLimits(1000, 10_000, 1.0)
OPEN = LIMITS._replace(root="/srv/media", private=True)


def refusal(url: str, limits: MediaLimits = LIMITS) -> MediaRejected:
    with pytest.raises(MediaRejected) as caught:
        parse_source(url, limits)
    return caught.value


def test_limits_are_those_of_the_settings() -> None:
    settings_ = GatewaySettings(
        max_media_bytes=1,
        max_image_pixels=2,
        media_timeout_s=3.0,
        allowed_local_media_path="/m",
        allow_private_media_addresses=True,
        max_video_frames=4,
    )
    assert MediaLimits.of(settings_) == MediaLimits(1, 2, 3.0, "/m", True, 4)
    assert MediaLimits.of(GatewaySettings())[3:] == ("", False, 9_000)


FOUND: list[tuple[str, object]] = [
    ("data:image/png;base64,AAAA", InlineSource("AAAA")),
    ("DATA:;base64,", InlineSource("")),
    ("data:text/html;charset=x;BASE64,AAAA", InlineSource("AAAA")),
    ("http://example.org", ("http", "example.org", 80, "/")),
    ("HTTPS://Example.org/a%20b?q=1&r=%41#part", ("https", "example.org", 443, "/a%20b?q=1&r=%41")),
    ("https://bücher.example/ü", ("https", "xn--bcher-kva.example", 443, "/%C3%BC")),
    ("http://[2606:4700::1]:80/x", ("http", "2606:4700::1", 80, "/x")),
    ("https://example.org:80/", ("https", "example.org", 80, "/")),
    ("file:///srv/media/a%20b.png", LocalSource("/srv/media/a b.png")),
    ("file://localhost/srv/media/a.png", LocalSource("/srv/media/a.png")),
    ("/srv/media/a%20b.png", LocalSource("/srv/media/a%20b.png")),
    ("/srv/media/../../etc/passwd", LocalSource("/srv/media/../../etc/passwd")),  # judged when it is resolved
]


@pytest.mark.parametrize(("url", "where"), FOUND)
def test_a_url_is_inline_remote_or_local(url: str, where: object) -> None:
    found = parse_source(url, LIMITS._replace(root="/srv/media"))
    assert (found[:4] if isinstance(found, RemoteSource) else found) == where


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "must begin with data:, http:, https:, file: or /"),
        ("ftp://example.org/x", "must begin"),
        ("gopher://example.org", "must begin"),
        ("javascript:alert(1)", "must begin"),
        ("image.png", "must begin"),
        ("../image.png", "must begin"),
        (" /etc/passwd", "must begin"),
        ("data:image/png,AAAA", "not base64"),
        ("data:image/png;base64", "not base64"),
        ("data:image/png;base64," + "A" * 2000, "larger than 1000 bytes"),
        ("http://", "without a host"),
        ("http:///x", "without a host"),
        ("http://user:secret@example.org/", "password"),
        ("http://user@example.org/", "user name"),
        ("http://example.org:22/", "port 22"),
        ("http://example.org:8080/", "port 8080"),
        ("http://example.org:99999/", "malformed"),
        ("http://[::1", "malformed"),
        ("http://[fe80::1%25eth0]/", "malformed"),
        ("http://exa mple.org/", "spaces"),
        ("http://example.org\t/", "control"),
        ("http://example.org\r\nX: y/", "control"),
        ("http://example.org\\@evil.example/", "backslashes"),
        ("http://" + "a" * 64 + ".example/", "malformed"),
        ("http://example.org/" + "a" * 9000, "limit is 8192"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("/etc/passwd", "--allowed-local-media-path"),
        ("file://server/share/x.png", "on host"),
    ],
)
def test_what_is_not_served_is_refused(url: str, reason: str) -> None:
    error = refusal(url)
    assert reason in str(error)
    assert len(str(error)) < 300
    assert "secret" not in str(error)


def test_a_relative_file_or_one_with_a_zero_byte_is_refused() -> None:
    assert "not an absolute path" in str(refusal("file:a.png", OPEN))
    assert "not an absolute path" in str(refusal("/srv/media/a\0b", OPEN))
    assert "not an absolute path" in str(refusal("file:///srv/media/a%00b", OPEN))


def test_any_port_may_be_asked_where_any_address_may() -> None:
    found = parse_source("http://127.0.0.1:9000/x", OPEN)
    assert isinstance(found, RemoteSource)
    assert (found.port, found.authority) == (9000, "127.0.0.1:9000")
    six = parse_source("http://[::1]:9000/x", OPEN)
    assert isinstance(six, RemoteSource)
    assert six.authority == "[::1]:9000"


@examples(200)
@given(st.sampled_from(["http://", "https://", "data:", "file:", "/", ""]), st.text(max_size=60))
def test_any_url_is_found_or_refused(head: str, rest: str) -> None:
    try:
        found = parse_source(head + rest, OPEN)
    except MediaRejected:
        return
    if isinstance(found, RemoteSource):  # what goes onto the wire is plain ASCII without blanks
        assert f"{found.authority}{found.target}".isascii()
        assert not set(f"{found.authority}{found.target}") & set(" \r\n\t\0\\")


def test_base64_is_decoded_and_its_size_is_exact() -> None:
    data = os.urandom(1000)
    text = base64.b64encode(data).decode()
    assert decode_inline(InlineSource(text), LIMITS) == data
    assert decode_inline(InlineSource(text.replace("+", "%2B").replace("=", "%3D")), LIMITS) == data
    larger = InlineSource(base64.b64encode(bytes(1001)).decode())
    with pytest.raises(MediaRejected, match="larger than 1000 bytes") as caught:
        decode_inline(larger, LIMITS)
    assert caught.value.code is Code.body_too_large
    long = LIMITS._replace(max_bytes=1 << 20)
    data = os.urandom(BASE64_CHARACTERS + 1)
    text = base64.b64encode(data).decode()
    assert decode_inline(InlineSource(text), long) == data
    for cut in (BASE64_CHARACTERS - 2, BASE64_CHARACTERS - 1, BASE64_CHARACTERS):
        with pytest.raises(MediaRejected, match="malformed"):
            decode_inline(InlineSource(text[:cut] + "=" + text[cut + 1 :]), long)
    for text in ("AAA", "A===", "AA AA", "AAAA\n", "_-_-", "ä"):
        with pytest.raises(MediaRejected, match="malformed"):
            decode_inline(InlineSource(text), LIMITS)


PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e"]
NOT_PUBLIC = [
    *("0.0.0.0", "0.1.2.3", "127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255"),
    *("192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.9", "224.0.0.1"),
    *("239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1"),
    *("ff02::1", "fec0::1", "2001:db8::1", "100::1", "4000::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:808:808::", "2001:0:1::1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_asked(address: str) -> None:
    check_address(address, LIMITS)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_other_addresses_are_not(address: str) -> None:
    with pytest.raises(MediaRejected, match="private, local or reserved"):
        check_address(address, LIMITS)
    check_address(address, OPEN)


def test_a_refusal_does_not_reveal_the_address() -> None:
    with pytest.raises(MediaRejected) as caught:
        check_address("10.11.12.13", LIMITS)
    assert "10.11" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "where"),
    [
        ("/other", "http://example.org:80/other"),
        ("b.png", "http://example.org:80/a/b.png"),
        ("//cdn.example/x", "http://cdn.example:80/x"),
        ("https://cdn.example/x", "https://cdn.example:443/x"),
    ],
)
def test_a_redirect_is_relative_to_what_was_asked(location: str, where: str) -> None:
    source = parse_source("http://example.org/a/a.png", LIMITS)
    assert isinstance(source, RemoteSource)
    found = parse_redirect(source, location, LIMITS)
    assert f"{found.scheme}://{found.host}:{found.port}{found.target}" == where


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "ftp://x/",
        "http://user:pw@x/",
        "http://x:22/",
        "http://[::1",
    ],
)
def test_a_redirect_leads_nowhere_that_a_url_may_not(location: str) -> None:
    source = parse_source("http://example.org/a.png", LIMITS._replace(root="/"))
    assert isinstance(source, RemoteSource)
    with pytest.raises(MediaRejected):
        parse_redirect(source, location, LIMITS._replace(root="/"))


@pytest.mark.parametrize(
    ("path", "root", "names"),
    [
        ("/srv/media/a", "/srv/media", ("a",)),
        ("/srv/media/b/c", "/srv/media", ("b", "c")),
        ("/a", "/", ("a",)),
        ("/srv/media", "/srv/media", None),
        ("/srv/media2/a", "/srv/media", None),
        ("/srv/media/../x", "/srv/media", None),
        ("/etc/passwd", "/srv/media", None),
        ("/", "/", None),
    ],
)
def test_only_what_is_below_the_folder_is_below_it(path: str, root: str, names: tuple[str, ...] | None) -> None:
    if names is None:
        with pytest.raises(MediaRejected):
            path_below(path, root)
    else:
        assert path_below(path, root) == names
        assert PurePosixPath(root, *names) == PurePosixPath(path)
