"""Image embeddings of a request: encoded here, or fetched from the encode worker.

Whatever is missing is encoded here; a request never fails because a transfer did.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.infra.bus.clock import steady_ns
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory_storage import MemoryStreams, fetch_medium
from penstock.schemas import wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Media
from penstock.schemas.transfer import Encoded, Ticket
from penstock.workers.disagg.block_reserver import BlockReserver
from penstock.workers.disagg.owner import Owner
from penstock.workers.disagg.reader import BlockReader
from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engines.engine_protocol import Engine, MediaReservation, RequestError, VisionEngine, vision_of
from penstock.workers.kv_transfer.transport_protocol import TransferError
from penstock.workers.session.request_runner import SessionContext
from penstock.workers.session.requests import RunningRequest, next_job, stamps, ticket_id

DECODERS = 2  # one decoded image can take 160 MB (40 M pixels)
VIDEO_DECODERS = 1  # each with a process of its own; images do not wait for them


class _Decoders:
    """Threads that decode, and which of them are free."""

    def __init__(self, count: int, name: str) -> None:
        self.pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self.free = asyncio.Semaphore(count)


class JobMediaLoader:
    """``close`` cancels what has not begun to be decoded."""

    def __init__(self, bus: Bus, memory: MemoryStreams, vision: VisionEngine) -> None:
        self._bus = bus
        self._memory = memory
        self._vision = vision
        self._images = _Decoders(DECODERS, "media")
        self._videos = _Decoders(VIDEO_DECODERS, "videos")

    async def load(
        self, request: GenerateRequest, media: Mapping[int, Media], is_wanted: Callable[[], bool]
    ) -> dict[int, object]:
        """Each medium, by number, as the engine encodes it.

        Args:
            is_wanted: asked when a decoder is free, before a medium is fetched and again before it is decoded. A video
                may take a minute, which others wait for. None stands for a medium that is no longer wanted.

        Raises:
            RequestError: one cannot be decoded, or its content does not match its digest.
            ServingError: the object store does not answer, or no longer has it.
        """
        numbers = list(media)
        prepared = await asyncio.gather(*(self._one(request, media[number], is_wanted) for number in numbers))
        return dict(zip(numbers, prepared, strict=True))

    async def _one(self, request: GenerateRequest, medium: Media, is_wanted: Callable[[], bool]) -> object:
        decoders = self._videos if medium.kind.startswith("video/") else self._images
        await decoders.free.acquire()  # so that memory has the bytes of as many media as are decoded at once
        decoding: asyncio.Future[object] | None = None
        try:
            if not is_wanted():
                return None
            if medium.private:
                raw = await fetch_medium(self._bus, self._memory, request, medium)
            else:
                raw = await object_store.get(self._bus, "media", medium.digest.hex(), limit=medium.size)
            loop = asyncio.get_running_loop()
            decoding = loop.run_in_executor(decoders.pool, self._prepare, raw, medium, is_wanted)
            return await decoding
        finally:
            if decoding is None or decoding.done():
                decoders.free.release()
            else:  # its request has ended, but not its thread
                decoding.add_done_callback(lambda done: decoders.free.release())

    def _prepare(self, raw: bytes, medium: Media, is_wanted: Callable[[], bool]) -> object:
        if not is_wanted():
            return None
        if blake3(raw).digest() != medium.digest:
            raise RequestError(Code.invalid_request, f"object {medium.digest.hex()} does not match its digest")
        return self._vision.prepare(raw, medium.kind)

    def close(self) -> None:
        for decoders in (self._images, self._videos):
            decoders.pool.shutdown(wait=False, cancel_futures=True)


class EmbeddingStage:
    """
    Args:
        vision: of the engine, if its model takes images.
        owner: leases slots to the next worker; None: no handoff.
        reader: fetches slots of the encode worker; None: no handoff.
    """

    def __init__(
        self,
        context: SessionContext,
        engine: EngineLoop,
        vision: VisionEngine | None,
        reserver: BlockReserver,
        owner: Owner | None,
        reader: BlockReader | None,
    ) -> None:
        self._clock = context.bus.clock
        self._requests = context.requests
        self._terminal = context.terminal
        self._engine = engine
        self._vision = vision
        self._reserver = reserver
        self._owner = owner
        self._reader = reader
        self._loader = JobMediaLoader(context.bus, context.memory, vision) if vision is not None else None

    async def encode(self, running: RunningRequest) -> Encoded | None:
        """Encode all media and lease the embeddings to the next stage; None: the request was ended."""
        assert self._owner is not None
        running.started_ns = steady_ns()
        reservation = await self._reserve_slots(running)
        if reservation is None or not await self._encode_missing(running, reservation):
            return None
        generations = await asyncio.wrap_future(
            self._engine.call(lambda engine: vision_of(engine).generations(reservation))
        )
        job = msgspec.Raw(wire.encode(next_job(running)))
        running.media = None  # from here on the lease holds the slots
        slots = [slot for of in reservation.slots for slot in of]
        stage = running.route[0]
        free, offset_ns = _free(reservation), self._clock.offset_ns
        ticket = self._owner.offer(ticket_id(running, stage), stage.worker, "embeds", slots, generations, free)
        return Encoded(
            running.request.id,
            running.attempt,
            job,
            ticket,
            running.times(offset_ns)[0],
            stamps(running, offset_ns),
        )

    async def load(self, running: RunningRequest, encoded: Encoded | None) -> bool:
        """Get the embeddings of all media: cached, fetched, or encoded; False: the request was ended."""
        if self._vision is None:
            await self._terminal.end(running, Code.unsupported, "this worker's model takes no images")
            return False
        try:
            reservation = await self._reserve_slots(running)
            if reservation is not None and encoded is not None and not all(reservation.have):
                reservation = await self._fetch(running, encoded.ticket, reservation)
        finally:
            if encoded is not None and self._reader is not None:
                self._reader.release(encoded.ticket)
        encoded_all = reservation is not None and await self._encode_missing(running, reservation)
        return encoded_all and self._requests.is_current(running)

    async def _reserve_slots(self, running: RunningRequest) -> MediaReservation | None:
        """Slots for all media, kept in ``running.media``; None: the request was ended."""
        media = [(medium.digest, medium.tokens) for medium in running.request.media]
        try:
            reservation = await self._reserver.reserve(
                running,
                (running.request.deadline_ns - self._clock.now_ns()) / 1e9,
                "embeds",
                lambda engine: vision_of(engine).reserve(media),
                lambda engine, slots: vision_of(engine).release(slots),
            )
        except RequestError as error:
            await self._terminal.end(running, Code(error.code), error.message)
            return None
        running.media = reservation or running.media
        return reservation

    async def _fetch(
        self, running: RunningRequest, ticket: Ticket, reservation: MediaReservation
    ) -> MediaReservation | None:
        """The reservation with all slots filled, or a new one to encode into; None: the request was ended."""
        positions: list[int] = []
        local: list[int] = []
        at = 0
        for slots, have in zip(reservation.slots, reservation.have, strict=True):
            if not have:
                positions += range(at, at + len(slots))
                local += slots
            at += len(slots)
        free = _free(reservation)
        try:
            with self._reserver.freed_if_it_fails(free):
                if self._reader is None or at * 4 != len(ticket.blocks):
                    raise TransferError("refused", f"the ticket names {len(ticket.blocks) // 4} slots, {at} are needed")
                running.media = None  # slots that are being written must not be freed
                await self._reader.fetch(ticket, positions, local)
        except TransferError:
            return await self._reserve_slots(running) if self._requests.is_current(running) else None
        if not self._requests.is_current(running):
            self._reserver.free(free)
            return None
        running.media = reservation
        reservation.have = [True] * len(reservation.have)
        self._engine.call(lambda engine: vision_of(engine).adopt(reservation))
        return reservation

    async def _encode_missing(self, running: RunningRequest, reservation: MediaReservation) -> bool:
        """Load, decode and encode the media that have no embeddings yet; False: the request was ended."""
        media = running.request.media
        missing = {number: media[number] for number, have in enumerate(reservation.have) if not have}
        if not missing:
            return True
        assert self._loader is not None
        try:
            is_wanted = partial(self._requests.is_current, running)
            prepared = await self._loader.load(running.request, missing, is_wanted)
            if not self._requests.is_current(running):
                return False
            await asyncio.wrap_future(self._engine.call(lambda engine: vision_of(engine).encode(reservation, prepared)))
        except RequestError as error:
            await self._terminal.end(running, Code(error.code), error.message)
            return False
        except ServingError as error:
            await self._terminal.end(
                running, error.code, f"an image or video of the request cannot be read: {error.message}"
            )
            return False
        reservation.have = [True] * len(reservation.have)
        return self._requests.is_current(running)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


def _free(reservation: MediaReservation) -> Callable[[Engine], object]:
    """Frees the slots, in the engine thread."""
    return lambda engine: vision_of(engine).release(reservation)
