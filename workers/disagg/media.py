"""Loads a request's media from the object store, checks them, and decodes them in a small thread pool."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory import MemoryStreams, fetch_medium
from penstock.schemas.errors import Code
from penstock.schemas.requests import GenerateRequest, Media
from penstock.workers.engines.base import RequestError, VisionEngine

DECODERS = 2  # one decoded image can take 160 MB (40 M pixels)


class MediaLoader:
    """``close`` cancels what has not begun to be decoded."""

    def __init__(self, bus: Bus, memory: MemoryStreams, vision: VisionEngine) -> None:
        self._bus = bus
        self._memory = memory
        self._vision = vision
        self._pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="media")

    async def load(self, request: GenerateRequest, media: Mapping[int, Media]) -> dict[int, object]:
        """Each medium, by number, as the engine encodes it.

        Raises:
            RequestError: one cannot be decoded, or its content does not match its digest.
            ServingError: the object store does not answer, or no longer has it.
        """
        numbers = list(media)
        prepared = await asyncio.gather(*(self._one(request, media[number]) for number in numbers))
        return dict(zip(numbers, prepared, strict=True))

    async def _one(self, request: GenerateRequest, medium: Media) -> object:
        if medium.private:
            raw = await fetch_medium(self._bus, self._memory, request, medium)
        else:
            raw = await object_store.get(self._bus, "media", medium.digest.hex(), limit=medium.size)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare, raw, medium)

    def _prepare(self, raw: bytes, medium: Media) -> object:
        if blake3(raw).digest() != medium.digest:
            raise RequestError(Code.invalid_request, f"object {medium.digest.hex()} does not match its digest")
        return self._vision.prepare(raw, medium.kind)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
