"""Bodies as clients and proxies send them: compressed, with a byte order mark, larger than they look."""

import contextlib
import gzip
import random
import zlib
from collections.abc import MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.asgi import decompress, read_body
from penstock.schemas.errors import Code, ServingError

BODY = b'{"model": "demo"}'


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # the same in every process, as tests are named after it


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


async def read(body: bytes, *encodings: str, limit: int = 1000, parts: int = 1) -> bytes:
    size = max(1, -(-len(body) // parts))
    pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]

    async def receive() -> MutableMapping[str, Any]:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    headers = [(b"content-encoding", each.encode()) for each in encodings]
    return await read_body({"headers": headers}, receive, limit)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("body", "encodings"),
    [
        (BODY, ()),
        (BODY, ("identity",)),
        (packed(BODY), ("gzip",)),
        (packed(BODY), (" GZIP ",)),
        (packed(BODY), ("x-gzip",)),
        (packed(BODY[:5]) + packed(BODY[5:]), ("gzip",)),
        (zlib.compress(BODY), ("deflate",)),
        (raw_deflate(BODY), ("deflate",)),
        (b"\xef\xbb\xbf" + BODY, ()),
        (packed(b"\xef\xbb\xbf" + BODY), ("gzip",)),
    ],
)
async def test_a_body_is_read_however_it_is_encoded(body: bytes, encodings: tuple[str, ...], parts: int) -> None:
    assert await read(body, *encodings, parts=parts) == BODY


@pytest.mark.parametrize("encodings", [("br",), ("zstd",), ("gzip", "gzip"), ("gzip, deflate",), ("nosuch",)])
async def test_another_encoding_is_named(encodings: tuple[str, ...]) -> None:
    with pytest.raises(ServingError, match="use gzip or deflate") as caught:
        await read(BODY, *encodings)
    assert (caught.value.code, caught.value.code.status) == (Code.unsupported_encoding, 415)
    assert caught.value.param == "Content-Encoding"


@pytest.mark.parametrize("body", [BODY, packed(BODY)[:-1], packed(BODY) + b"x", b"\x1f\x8b"])
async def test_a_damaged_body_is_refused(body: bytes) -> None:
    with pytest.raises(ServingError) as caught:
        await read(body, "gzip")
    assert (caught.value.code, caught.value.param) == (Code.invalid_request, "Content-Encoding")


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, raw_deflate])
async def test_a_small_body_that_becomes_a_large_one_is_refused(pack: Any) -> None:
    assert await read(pack(b"a" * 1000), "gzip", limit=1000) == b"a" * 1000
    for size in (1001, 50_000_000):
        with pytest.raises(ServingError, match="1000 bytes") as caught:
            await read(pack(b"a" * size), "gzip", limit=1000)
        assert caught.value.code is Code.body_too_large
    members = gzip.compress(b"a" * 600) * 2
    with pytest.raises(ServingError, match="1000 bytes"):
        await read(members, "gzip", limit=1000)


@pytest.mark.parametrize("member", [gzip.compress(b"", mtime=0), raw_deflate(b"")], ids=["gzip", "deflate"])
async def test_a_body_of_very_many_members_is_refused_in_time_that_is_linear_in_its_size(member: bytes) -> None:
    assert await read(member * 4_095 + gzip.compress(b"{}"), "gzip", limit=100_000) == b"{}"
    with pytest.raises(ServingError, match="more than 4096 compressed members; compress it as one") as caught:
        await read(member * 200_000, "gzip", limit=64 << 20)
    assert (caught.value.code, caught.value.param) == (Code.invalid_request, "Content-Encoding")


async def test_members_may_be_larger_than_the_parts_in_which_they_are_read() -> None:
    data = [random.Random(size).randbytes(size) for size in (1, 65_536, 200_000, 3)]
    whole = b"".join(data)
    assert await read(b"".join(map(gzip.compress, data)), "gzip", limit=2 * len(whole)) == whole


@given(st.binary(max_size=300), st.sampled_from([gzip.compress, zlib.compress, raw_deflate]), st.integers(0, 320))
def test_any_bytes_come_back_or_are_refused(data: bytes, pack: Any, cut: int) -> None:
    small = pack(data)
    assert decompress(small, 1000) == data
    damaged = small[: cut % len(small)] + b"\x07" + small[cut % len(small) :]
    with contextlib.suppress(ServingError):  # and nothing else
        decompress(damaged, 1000)
