"""Loads the media that a body names: fetched, checked, named by content, and stored for the workers.

A slot holds one medium at a time, and only until it is stored, so memory does not grow with the number of images.

Clients choose the URL but the gateway's position in the network applies, so each step is checked where it is taken: a
connection goes to the very address that was checked, whatever the name resolves to a moment later.
"""

import asyncio
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from penstock.configs.settings import GatewaySettings
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.media.contents import EMBEDDING, check_image, embedding_tokens
from penstock.gateway.media.sources import (
    InlineSource,
    LocalSource,
    MediaLimits,
    MediaPart,
    MediaRejected,
    RemoteSource,
    decode_inline,
    parse_source,
    path_below,
    too_large,
)
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.object_store import put
from penstock.infra.model import video
from penstock.infra.model.modeldir import Vision
from penstock.infra.model.patch_grid import BadGrid
from penstock.schemas.errors import Code
from penstock.schemas.requests import Media

if TYPE_CHECKING:
    from penstock.gateway.media.download import Downloader

# Characters of base64 from which decoding leaves the event loop: they hold it for 65 µs, and a thread costs 25 of
# CPU (``python -m tests.perf.tuning threads``). 10 MB would hold it for 15 ms.
LARGE_INLINE = 64 * 1024


class Fetcher:
    """Keeps no state between two fetches: no connections, cookies, proxies or credentials."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._root = os.path.realpath(limits.root) if limits.root else ""
        self._downloader: Downloader | None = None

    async def fetch(self, url: str) -> bytes:
        """
        Raises:
            MediaRejected: not allowed, not found, too large or too slow.
        """
        match parse_source(url, self._limits):
            case InlineSource() as inline:
                if len(inline.text) > LARGE_INLINE:
                    return await asyncio.to_thread(decode_inline, inline, self._limits)
                return decode_inline(inline, self._limits)
            case LocalSource(path):
                return await asyncio.to_thread(read_below, self._root, path, self._limits.max_bytes)
            case remote:
                return await (await self._remote()).download(remote)

    async def check(self, url: str) -> None:
        """Whether a client may have another server fetch it.

        Raises:
            MediaRejected: it may not.
        """
        source = parse_source(url, self._limits)
        if isinstance(source, RemoteSource) and not self._limits.private:
            await (await self._remote()).check(source)

    async def _remote(self) -> "Downloader":
        if self._downloader is None:
            self._downloader = await asyncio.to_thread(_downloader, self._limits)
        return self._downloader


def _downloader(limits: MediaLimits) -> "Downloader":
    """Imported when first needed: the HTTP client is an eighth of what a gateway takes to start."""
    from penstock.gateway.media.download import Downloader

    return Downloader(limits)


def read_below(root: str, path: str, limit: int) -> bytes:
    """Read a regular file below ``root``, a path free of symbolic links; safe if links change meanwhile.

    Raises:
        MediaRejected: outside of the root, not found, not a regular file, or too large.
    """
    names = path_below(os.path.realpath(path), root)
    try:
        at = _open_below(root, names)
    except OSError as error:
        raise MediaRejected(f"names a file that cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(at)
        if not stat.S_ISREG(status.st_mode):
            raise MediaRejected("is not a file")
        if status.st_size > limit:
            raise too_large(limit)
        with open(at, "rb", closefd=False) as file:
            data = file.read(limit + 1)  # it may have grown
    finally:
        os.close(at)
    if len(data) > limit:
        raise too_large(limit)
    return data


def _open_below(root: str, names: tuple[str, ...]) -> int:
    """Open one component at a time: none may have become a symbolic link since the path was resolved."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        # opening a pipe must not wait for its writer
        return os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)


BUCKET = "media"
SLOTS = 8
VIDEOS = 2  # likewise for videos, each read in a separate process, so that images do not wait for a slow one
# Bytes from which a medium is hashed in a thread, which costs 25 µs of CPU: they hold the event loop for 0.1 ms
# (``python -m tests.perf.tuning threads``), 100 MB for 10.
LARGE = 1 << 20
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
        metrics: GatewayMetrics,
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
        self._video_slots = asyncio.Semaphore(VIDEOS)
        self._videos = ThreadPoolExecutor(VIDEOS, "videos")
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (checked, expires), monotonic

    async def load(self, parts: Sequence[MediaPart], vision: Vision, keep_s: float, owner: str = "") -> list[Media]:
        """Load and store media for at least ``keep_s`` seconds. Equal URLs are fetched once.

        Args:
            owner: id of the request for which alone they are stored; "": for every request.

        Returns: in the order of ``parts``; positions are not set.

        Raises:
            ServingError: a medium is rejected (names its field and the limit) or cannot be stored.
        """
        tasks: dict[tuple[str, bool, bool], asyncio.Task[Media]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    key = part.url, part.embedding, part.video
                    if key not in tasks:
                        tasks[key] = group.create_task(self._load_one(part, vision, keep_s, owner), name="medium")
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [tasks[part.url, part.embedding, part.video].result() for part in parts]

    async def _load_one(self, part: MediaPart, vision: Vision, keep_s: float, owner: str) -> Media:
        slots = self._video_slots if part.video else self._slots
        await slots.acquire()
        reading: asyncio.Future[Media] | None = None
        decoder = video.Decoder()
        try:
            try:
                data = await self._fetcher.fetch(part.url)
                if part.video:
                    inspect = partial(inspect_medium, data, part, vision, self._limits, decoder)
                    reading = asyncio.get_running_loop().run_in_executor(self._videos, inspect)
                    await asyncio.wait([reading])
                    medium = reading.result()
                elif len(data) > LARGE:
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
        finally:
            if reading is None or reading.done():
                slots.release()
            else:  # its client has gone. Until its process has, too, others would pile up before the threads
                decoder.end()
                reading.add_done_callback(partial(_release, slots))

    async def _store(self, name: str, data: bytes, keep_s: float) -> None:
        now = self._clock()
        checked, expires = self._known.get(name, (0.0, 0.0))
        if expires - now < keep_s or now - checked > TRUST_S:
            left_s = await put(self._bus, BUCKET, name, data, keep_s=keep_s)
            self._known[name] = now, now + left_s
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(name)


def _release(slots: asyncio.Semaphore, reading: "asyncio.Future[Media]") -> None:
    if not reading.cancelled():
        reading.exception()  # no request waits for it any more
    slots.release()


def inspect_medium(
    data: bytes, part: MediaPart, vision: Vision, limits: MediaLimits, decoder: video.Decoder | None = None
) -> Media:
    """Check a medium and name it by the digest of its bytes. Only of a video is the first frame decoded, in a separate
    process.

    Args:
        decoder: by which another thread ends that process.

    Raises:
        MediaRejected: not an image, embedding file or video (whichever the part names), or beyond a limit.
    """
    digest = blake3(data).digest()
    if part.embedding:
        return Media(digest, EMBEDDING, len(data), tokens=embedding_tokens(data, vision.hidden))
    try:
        if part.video:
            assert vision.patches is not None
            sample = vision.patches.video(*video.probe(data, limits.max_frames, decoder))
            grid, seconds = sample.grid, sample.seconds
            return Media(digest, video.kind_of(data), len(data), tokens=grid.tokens, grid=grid, seconds=seconds)
        kind, height, width = check_image(data, limits)
        if vision.patches is None:
            return Media(digest, kind, len(data), tokens=vision.tokens_of(height, width))
        grid = vision.patches.image(height, width)
        return Media(digest, kind, len(data), tokens=grid.tokens, grid=grid)
    except (BadGrid, video.BadVideo) as error:
        code = Code.invalid_request if video.available() or not part.video else Code.unsupported
        raise MediaRejected(str(error), code) from None
