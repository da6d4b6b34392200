"""Media of a request on their way to the engine: fetched, checked and decoded in a few threads."""

import asyncio
import threading
from typing import Any

import pytest
from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.schemas.requests import Media
from penstock.workers.disagg.embedding_stage import VIDEO_DECODERS, JobMediaLoader


class Vision:
    """Decodes once it may."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.began = threading.Semaphore(0)
        self.goes_on = threading.Event()

    def prepare(self, raw: bytes, kind: str) -> object:
        self.begun.append(raw)
        self.began.release()
        assert self.goes_on.wait(30)
        return raw


async def test_a_video_whose_request_has_ended_is_not_decoded_before_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    films = {blake3(raw).digest(): raw for raw in (b"one", b"two", b"three")}

    fetched: list[bytes] = []

    async def get(bus: Any, bucket: str, name: str, *, limit: int) -> bytes:
        fetched.append(films[bytes.fromhex(name)])
        return films[bytes.fromhex(name)]

    monkeypatch.setattr(object_store, "get", get)
    vision = Vision()
    engine: Any = vision
    nothing: Any = None
    loader = JobMediaLoader(nothing, nothing, engine)
    gone = threading.Event()
    one, two, three = ({0: Media(digest, "video/mp4", 5)} for digest in films)
    assert VIDEO_DECODERS == 1
    try:
        async with asyncio.timeout(20):
            first = asyncio.create_task(loader.load(nothing, one, lambda: True))
            await asyncio.to_thread(vision.began.acquire)
            second = asyncio.create_task(loader.load(nothing, two, lambda: not gone.is_set()))
            third = asyncio.create_task(loader.load(nothing, three, lambda: True))
            await asyncio.sleep(0)
            assert fetched == [b"one"], "the others wait for a decoder, not in memory"
            gone.set()
            vision.goes_on.set()
            assert [*await asyncio.gather(first, second, third)] == [{0: b"one"}, {0: None}, {0: b"three"}]
        assert vision.begun == fetched == [b"one", b"three"]
    finally:
        vision.goes_on.set()
        loader.close()
