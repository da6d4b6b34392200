"""Loads the media that a body names: fetched, checked, named by content, and stored for the workers.

A slot holds one medium at a time, and only until it is stored, so memory does not grow with the number of images.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from blake3 import blake3

from penstock.configs.settings import GatewaySettings
from penstock.gateway.base.metrics import Metrics
from penstock.gateway.media.contents import EMBEDDING, check_image, embedding_tokens
from penstock.gateway.media.fetch import Fetcher
from penstock.gateway.media.limits import MediaLimits, MediaRejected
from penstock.gateway.media.sources import MediaPart
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.object_store import put
from penstock.infra.model.modeldir import Vision
from penstock.schemas.requests import Media

BUCKET = "media"
SLOTS = 8
LARGE = 128 * 1024  # bytes; larger media are hashed in a thread
MAX_KNOWN = 4096  # media remembered as stored
TRUST_S = 300.0  # for this long; then the store is checked again, which takes 0.2 ms


class MediaLoader:
    """
    Args:
        keep: stores a medium in memory, for one request with ``no_store``: its id, the digest, the data, and for how
            many seconds.
    """

    def __init__(
        self,
        bus: Bus,
        settings: GatewaySettings,
        metrics: Metrics,
        keep: Callable[[str, bytes, bytes, float], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep = keep
        self._bus = bus
        self._limits = MediaLimits.of(settings)
        self._fetcher = Fetcher(self._limits)
        self._metrics = metrics
        self._clock = clock
        self._slots = asyncio.Semaphore(SLOTS)
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (checked, expires), monotonic

    async def load(self, parts: Sequence[MediaPart], vision: Vision, keep_s: float, owner: str = "") -> list[Media]:
        """Load and store media for at least ``keep_s`` seconds. Equal URLs are fetched once.

        Args:
            owner: id of the request for which alone they are stored; "": for every request.

        Returns: in the order of ``parts``; positions are not set.

        Raises:
            ServingError: a medium is rejected (names its field and the limit) or cannot be stored.
        """
        tasks: dict[tuple[str, bool], asyncio.Task[Media]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    key = part.url, part.embedding
                    if key not in tasks:
                        tasks[key] = group.create_task(self._load_one(part, vision, keep_s, owner), name="medium")
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [tasks[part.url, part.embedding].result() for part in parts]

    async def _load_one(self, part: MediaPart, vision: Vision, keep_s: float, owner: str) -> Media:
        async with self._slots:
            try:
                data = await self._fetcher.fetch(part.url)
                if len(data) > LARGE:
                    medium = await asyncio.to_thread(inspect_medium, data, part, vision, self._limits)
                else:
                    medium = inspect_medium(data, part, vision, self._limits)
            except MediaRejected as rejected:
                raise rejected.to_error(part.field) from None
            self._metrics.media.labels(medium.kind).inc()
            if owner:
                await self._keep(owner, medium.digest, data, keep_s)
                return msgspec.structs.replace(medium, private=owner)
            await self._store(medium.digest.hex(), data, keep_s)
            return medium

    async def _store(self, name: str, data: bytes, keep_s: float) -> None:
        now = self._clock()
        checked, expires = self._known.get(name, (0.0, 0.0))
        if expires - now < keep_s or now - checked > TRUST_S:
            left_s = await put(self._bus, BUCKET, name, data, keep_s=keep_s)
            self._known[name] = now, now + left_s
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(name)


def inspect_medium(data: bytes, part: MediaPart, vision: Vision, limits: MediaLimits) -> Media:
    """Check a medium and name it by the digest of its bytes; nothing is decoded.

    Raises:
        MediaRejected: not an image or embedding file (whichever the part names), or beyond a limit.
    """
    digest = blake3(data).digest()
    if part.embedding:
        return Media(digest, EMBEDDING, len(data), tokens=embedding_tokens(data, vision.hidden))
    kind, height, width = check_image(data, limits)
    return Media(digest, kind, len(data), tokens=vision.tokens_of(height, width))
