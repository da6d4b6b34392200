"""From the media that a body names to those that a request carries: fetched, checked, named and stored.

One medium at a time is held per slot, and only until it is stored: a gateway's memory does not grow with the number
of images in its requests.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from blake3 import blake3

from configs.settings import GatewaySettings
from gateway.media.fetch import Fetcher
from gateway.media.media import EMBEDDING, MediaLimits, MediaPart, MediaRejected, check_image, embedding_tokens
from gateway.metrics import Metrics
from infra.bus.connection import Bus
from infra.bus.object_store import put
from infra.model.modeldir import Vision
from schemas.requests import Media

SLOTS = 8
LARGE = 128 * 1024  # bytes from which hashing leaves the event loop
KNOWN = 4096  # names remembered as stored
TRUST_S = 300.0  # how long; then the store is asked again, which costs a fifth of a millisecond


class MediaLoader:
    """Of one gateway."""

    def __init__(
        self, bus: Bus, settings: GatewaySettings, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._limits = MediaLimits.of(settings)
        self._fetcher = Fetcher(self._limits)
        self._metrics = metrics
        self._clock = clock
        self._slots = asyncio.Semaphore(SLOTS)
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name: (asked, gone), monotonic

    async def load(self, parts: Sequence[MediaPart], vision: Vision, keep_s: float) -> list[Media]:
        """All of them, stored for at least ``keep_s`` seconds; their positions are still open.

        Raises:
            ServingError: one is refused (names its field and the limit), or cannot be stored.
        """
        tasks: dict[tuple[str, bool], asyncio.Task[Media]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    key = part.url, part.embedding
                    if key not in tasks:
                        tasks[key] = group.create_task(self._one(part, vision, keep_s), name="medium")
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [tasks[part.url, part.embedding].result() for part in parts]

    async def _one(self, part: MediaPart, vision: Vision, keep_s: float) -> Media:
        async with self._slots:
            try:
                data = await self._fetcher.fetch(part.url)
                if len(data) > LARGE:
                    medium = await asyncio.to_thread(examine, data, part, vision, self._limits)
                else:
                    medium = examine(data, part, vision, self._limits)
            except MediaRejected as refused:
                raise refused.at(part.field) from None
            self._metrics.media.labels(medium.kind).inc()
            await self._store(medium.digest.hex(), data, keep_s)
            return medium

    async def _store(self, name: str, data: bytes, keep_s: float) -> None:
        now = self._clock()
        asked, gone = self._known.get(name, (0.0, 0.0))
        if gone - now < keep_s or now - asked > TRUST_S:
            left = await put(self._bus, "media", name, data, keep_s=keep_s)
            self._known[name] = now, now + left
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(name)


def examine(data: bytes, part: MediaPart, vision: Vision, limits: MediaLimits) -> Media:
    """A medium's name and kind. The name is the digest of the bytes as they came: nothing is decoded.

    Raises:
        MediaRejected: neither an image nor an embedding file, whichever it should be, or too large a one.
    """
    digest = blake3(data).digest()
    if part.embedding:
        return Media(digest, EMBEDDING, len(data), tokens=embedding_tokens(data, vision.hidden))
    return Media(digest, check_image(data, limits), len(data), tokens=vision.image_tokens)
