"""Fetching media from files and from a local web server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from penstock.gateway.media import download, loader
from penstock.gateway.media.loader import Fetcher, read_below
from penstock.gateway.media.sources import MediaLimits, MediaRejected
from penstock.schemas.errors import Code
from tests.gateway.media.support import Site, data_url

LIMITS = MediaLimits(100_000, 1000, 5.0, private=True)
PUBLIC = "93.184.216.34"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site().opened() as site:
        yield site


async def refusal(url: str, limits: MediaLimits = LIMITS) -> MediaRejected:
    with pytest.raises(MediaRejected) as caught:
        await Fetcher(limits).fetch(url)
    assert len(str(caught.value)) < 400
    return caught.value


async def test_bytes_come_as_they_are_sent(site: Site) -> None:
    body = os.urandom(100_000)
    assert await Fetcher(LIMITS).fetch(site.serve("/a", body, "Content-Type: text/html")) == body
    assert await Fetcher(LIMITS).fetch(site.serve("/b?x=1&y=%20", body, length=False)) == body
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    site.answers["/c"] = chunked
    assert await Fetcher(LIMITS).fetch(site.url("/c")) == b"abcde"
    assert await Fetcher(LIMITS).fetch(data_url(body)) == body


async def test_a_request_reveals_no_more_than_it_must(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    site.serve("/", b"x", "Set-Cookie: a=b")
    fetcher = Fetcher(LIMITS)
    await fetcher.fetch(site.url("/#secret"))
    await fetcher.fetch(site.url(""))
    lines = site.asked[1].strip().split("\r\n")
    assert site.asked[0] == site.asked[1]
    assert lines[0] == "GET / HTTP/1.1"
    assert {line.split(":")[0] for line in lines[1:]} == {
        "Host",
        "User-Agent",
        "Accept",
        "Accept-Encoding",
        "Connection",
    }
    assert f"Host: 127.0.0.1:{site.port}" in lines


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(10_000))
        await writer.drain()


async def test_an_oversized_body_is_refused_before_it_has_come(site: Site) -> None:
    announced = asyncio.Event()

    async def announce(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100001\r\n\r\n")
        await announced.wait()  # nothing of the body is ever sent

    site.answers |= {"/announced": announce, "/endless": endless}
    for path in ("/announced", "/endless"):
        began = time.monotonic()
        error = await refusal(site.url(path))
        assert "larger than 100000 bytes (--max-media-bytes)" in str(error)
        assert error.code is Code.body_too_large
        assert time.monotonic() - began < 3


async def test_a_slow_answer_ends_at_the_limit_of_time(site: Site) -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def trickle(writer: asyncio.StreamWriter) -> None:  # never silent for long, never done
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def headers(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X: y\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    site.answers |= {"/never": never, "/trickle": trickle, "/headers": headers}
    for path in site.answers:
        began = time.monotonic()
        assert "within 0.3 s (--media-timeout-s)" in str(await refusal(site.url(path), LIMITS._replace(timeout_s=0.3)))
        assert 0.2 < time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answered 404"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 5\r\n\r\nx", "answered 500"),
        (b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\nx", "answered 206"),
        (b"HTTP/1.1 302 Found\r\n\r\n", "answered 302"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", "not requested"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000, "RemoteProtocolError"),
    ],
)
async def test_what_is_no_whole_answer_is_refused(site: Site, answer: bytes, reason: str) -> None:
    site.answers["/x"] = answer
    error = await refusal(site.url("/x"))
    assert reason in str(error)
    assert error.code is Code.invalid_request


async def test_a_server_that_is_not_there_is_an_error_with_its_name(site: Site) -> None:
    assert "127.0.0.1: ConnectError" in str(await refusal("http://127.0.0.1:1/x"))
    assert "could not be fetched from no-such-host.invalid" in str(await refusal("http://no-such-host.invalid/x"))


async def test_three_redirects_are_followed_and_not_four(site: Site) -> None:
    site.serve("/0", b"found")
    for number in range(1, 5):
        site.redirect(f"/{number}", f"/{number - 1}" if number % 2 else site.url(f"/{number - 1}"))
    assert await Fetcher(LIMITS).fetch(site.url("/3")) == b"found"
    assert site.paths == ["/3", "/2", "/1", "/0"]
    assert "more than 3 times" in str(await refusal(site.url("/4")))
    assert site.paths[4:] == ["/4", "/3", "/2", "/1"]


@pytest.fixture
def net(site: Site, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Names of a make-believe internet: each look-up takes the next list. Its public address is ``site``."""
    names: dict[str, list[list[str]]] = {}
    real = httpcore2.AnyIOBackend.connect_tcp

    async def resolve(host: str, port: int) -> list[str]:
        answers = names.get(host, [[host]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect_tcp(self: Any, host: str, port: int, *rest: Any, **options: Any) -> Any:
        assert host == PUBLIC, f"connected to {host}"
        return await real(self, "127.0.0.1", site.port, *rest, **options)

    monkeypatch.setattr(download, "resolve", resolve)
    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    return names


CLOSED = LIMITS._replace(private=False)


async def test_a_name_that_means_a_public_address_is_asked(site: Site, net: dict[str, list[list[str]]]) -> None:
    net["public.test"] = [[PUBLIC]]
    site.serve("/x", b"found")
    assert await Fetcher(CLOSED).fetch("http://public.test/x") == b"found"
    assert "Host: public.test\r\n" in site.asked[0]


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["169.254.169.254"], ["::1"], [PUBLIC, "10.0.0.1"], ["fd00::1"]])
async def test_a_name_that_means_another_address_is_not(
    site: Site, net: dict[str, list[list[str]]], addresses: list[str]
) -> None:
    net["inside.test"] = [addresses]
    assert "private, local or reserved" in str(await refusal("http://inside.test/x", CLOSED))
    assert site.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "0", "[::1]", "[::ffff:127.0.0.1]"])
async def test_every_way_to_write_this_machine_is_refused(site: Site, host: str) -> None:
    """With the system's own resolver."""
    error = str(await refusal(f"http://{host}/x", CLOSED))
    assert "private, local or reserved" in error or "could not be fetched" in error
    assert site.asked == []


async def test_a_name_that_changes_its_mind_is_asked_once(site: Site, net: dict[str, list[list[str]]]) -> None:
    """DNS rebinding: checked as one address, connected to as another."""
    net["rebind.test"] = [[PUBLIC], ["127.0.0.1"]]
    site.serve("/x", b"found")
    assert await Fetcher(CLOSED).fetch("http://rebind.test/x") == b"found"
    assert net["rebind.test"] == [["127.0.0.1"]]  # one look-up for check and connection
    assert "private" in str(await refusal("http://rebind.test/x", CLOSED))


@pytest.mark.parametrize(
    "to",
    [
        *("http://127.0.0.1/secret", "http://[::1]/secret", "http://metadata.test/latest", "//127.0.0.1/secret"),
        *("file:///etc/passwd", "http://public.test:22/", "gopher://public.test/"),
    ],
)
async def test_a_redirect_to_a_forbidden_address_is_refused(
    site: Site, net: dict[str, list[list[str]]], to: str
) -> None:
    net |= {"public.test": [[PUBLIC]], "metadata.test": [["169.254.169.254"]]}
    site.redirect("/x", to)
    await refusal("http://public.test/x", CLOSED)
    assert site.paths == ["/x"]


# --- files ---


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.png").write_bytes(b"a")
    (folder / "deep" / "er" / "b c.png").write_bytes(b"b")
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "served2").mkdir()
    (tmp_path / "served2" / "x").write_bytes(b"s")
    return folder


async def test_files_below_the_folder_are_read(root: Path) -> None:
    fetcher = Fetcher(LIMITS._replace(root=str(root)))
    assert await fetcher.fetch(f"{root}/a.png") == b"a"
    assert await fetcher.fetch(f"file://{root}/deep/er/b%20c.png") == b"b"
    assert await fetcher.fetch(f"{root}/deep/../a.png") == b"a"
    (root / "link.png").symlink_to(root / "a.png")
    assert await fetcher.fetch(f"{root}/link.png") == b"a"  # within
    through = root.parent / "alias"
    through.symlink_to(root)
    assert await Fetcher(LIMITS._replace(root=str(through))).fetch(f"{through}/a.png") == b"a"


async def test_nothing_outside_is_read_by_any_path(root: Path) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    (root / "up").symlink_to("..")
    (root / "abs").symlink_to("/etc")
    for path in (
        *(f"{root}/../secret", f"{root}/deep/../../secret", f"{root}/out", f"{root}/up/secret", f"{root}/abs/passwd"),
        *(
            f"{root.parent}/served2/x",
            str(root.parent / "secret"),
            "/etc/passwd",
            "//etc/passwd",
            str(root),
            f"{root}/",
        ),
        *(f"{root}/up/served/../secret", f"/proc/self/root{root.parent}/secret", "/proc/self/environ", "/dev/zero"),
        *(f"file://{root}/%2e%2e/secret", f"file://{root}/..%2fsecret", f"file:{root}/../secret"),
    ):
        error = await refusal(path, LIMITS._replace(root=str(root)))
        assert "the folder that --allowed-local-media-path allows" in str(error), path
    for path in (f"{root}/a.png", f"file://{root}/a.png"):
        assert "local files are not enabled" in str(await refusal(path))


async def test_only_regular_files_within_the_limit_are_read(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "exact").write_bytes(bytes(100_000))
    (root / "large").write_bytes(bytes(100_001))
    (root / "closed").write_bytes(b"x")
    limits = LIMITS._replace(root=str(root))
    assert len(await Fetcher(limits).fetch(f"{root}/exact")) == 100_000
    assert (await refusal(f"{root}/large", limits)).code is Code.body_too_large
    assert "not a file" in str(await refusal(f"{root}/deep", limits))
    assert "not a file" in str(await refusal(f"{root}/pipe", limits))  # and does not wait for a writer
    assert "No such file" in str(await refusal(f"{root}/gone", limits))
    assert "cannot be read" in str(await refusal(f"{root}/a.png/x", limits))


def test_a_file_that_becomes_a_link_while_it_is_opened_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path was resolved a moment ago; then somebody replaced a folder, or the file, by a link."""
    (root / "swap").symlink_to(root.parent)
    (root / "out").symlink_to(root.parent / "secret")
    monkeypatch.setattr(loader.os.path, "realpath", lambda path: path)
    for path in (f"{root}/swap/secret", f"{root}/out"):
        with pytest.raises(MediaRejected, match="cannot be read"):
            read_below(str(root), path, 100)
    assert read_below(str(root), f"{root}/a.png", 100) == b"a"


async def test_nothing_stays_open(site: Site, root: Path) -> None:
    fetcher = Fetcher(LIMITS._replace(root=str(root), timeout_s=0.2))
    site.serve("/ok", b"x")
    site.answers["/endless"] = endless
    before = len(os.listdir("/proc/self/fd"))
    for url in (site.url("/ok"), site.url("/endless"), f"{root}/a.png", f"{root}/gone", f"{root}/deep"):
        try:
            await fetcher.fetch(url)
        except MediaRejected:
            pass
    for _ in range(200):
        if len(os.listdir("/proc/self/fd")) <= before:
            break
        await asyncio.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
