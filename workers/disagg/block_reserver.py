"""Reserves engine blocks and slots for data from other workers, in turn, and frees them once nothing writes to them.

A prefill worker announces a prompt while it computes its last part, and blocks are reserved here meanwhile. Their
leading layers are read while the others are computed, and the others right afterwards, while the message with the
request is still on its way.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import structlog

from penstock.infra.bus.tasks import Tasks
from penstock.schemas import block_hashes
from penstock.schemas.control import Reserve
from penstock.schemas.transfer import Ticket
from penstock.workers.disagg.reader import NO_LAYERS, BlockReader
from penstock.workers.engine_loop.loop import BlockWait, EngineLoop
from penstock.workers.engines.engine_protocol import BlockReservation, Engine, RequestError, kv_transfer_of
from penstock.workers.kv_transfer.transport_protocol import TransferError
from penstock.workers.session.requests import RequestTable, RunningRequest

T = TypeVar("T")
log = structlog.get_logger("handoff")


class BlockReserver:
    """
    Args:
        quarantine_s: the longest time that a transfer of unknown state may still write.
    """

    def __init__(self, engine: EngineLoop, requests: RequestTable, quarantine_s: float) -> None:
        self._engine = engine
        self._requests = requests
        self._quarantine_s = quarantine_s

    async def reserve(
        self,
        running: RunningRequest,
        within_s: float,
        pool: str,
        take: Callable[[Engine], T | None],
        undo: Callable[[Engine, T], object],
    ) -> T | None:
        """What ``take`` returns once there are blocks, in turn. Who removes the request cancels its ``block_wait``.

        Returns: None if there were none within that time or the request ended meanwhile.

        Raises:
            RequestError: raised by ``take``; there can never be enough.
        """
        running.block_wait = wait = self._engine.wait(pool, take)
        timer = asyncio.get_running_loop().call_later(max(0.0, within_s), self._engine.cancel_wait, wait)

        def undo_answer(answer: "Future[T | None]") -> None:
            reserved = None if answer.exception() else answer.result()
            if reserved is not None:
                self._engine.call(lambda engine: undo(engine, reserved))

        try:
            result = await asyncio.shield(asyncio.wrap_future(wait.answer))
        except asyncio.CancelledError:
            self._engine.cancel_wait(wait)
            wait.answer.add_done_callback(undo_answer)
            raise
        finally:
            timer.cancel()
            running.block_wait = None
        if result is not None and not self._requests.is_current(running):
            undo_answer(wait.answer)
            return None
        return result

    def free(self, free: Callable[[Engine], object]) -> None:
        self._engine.call(free)

    @contextmanager
    def freed_if_it_fails(self, free: Callable[[Engine], object]) -> Iterator[None]:
        """Free the blocks of a failed transfer: once it has ended, or after the quarantine if its state is unknown."""
        try:
            yield
        except TransferError as error:
            error.settled.add_done_callback(lambda _: self._engine.call(free))
            raise
        except BaseException:
            asyncio.get_running_loop().call_later(self._quarantine_s, self._engine.call, free)
            raise


def freeing(reservation: BlockReservation) -> Callable[[Engine], object]:
    """Frees the blocks, in the engine thread."""
    return lambda engine: kv_transfer_of(engine).release(reservation)


ANNOUNCED_S = 5.0  # from the announcement of a prompt to its end if that is unknown, and from there to its request
LATE_S, MOST_LATE_S = 1.0, 30.0  # from when it should have ended, for slow steps and links; from the announcement
MOST_ANNOUNCED = 256  # prompts
# From a prompt's last layers to its request: the longest time that counts, and the weight of the last one. From its
# leading layers to the last: the largest share of the time that these took.
MOST_BEHIND_S, BEHIND_SHARE, MOST_REST = 0.01, 0.2, 1.0
SUBMIT_S = 0.0005  # from taking the blocks of a request to its submission


class _Announced:
    """A prompt whose request has not come."""

    __slots__ = (
        "began", "leading_at", "order", "reading", "reserved_at", "ticket", "timer", "wait", "whole", "whole_at",
    )  # fmt: skip

    def __init__(self, order: Reserve, wait: BlockWait[BlockReservation], timer: asyncio.TimerHandle) -> None:
        self.order = order
        self.wait = wait
        self.timer = timer
        self.ticket: Ticket | None = None  # once the prompt is computed
        # The same ticket, for the task that reads the leading layers until then; None: it must not read the others.
        self.whole: asyncio.Future[Ticket | None] = asyncio.get_running_loop().create_future()
        self.reading: asyncio.Task[BlockReservation | None] | None = None
        self.began = False  # whether reading began, which frees the blocks itself if it fails
        # When its last step began and had computed the leading layers, and all, of a prompt that is read in two parts;
        # monotonic.
        self.reserved_at, self.leading_at, self.whole_at = time.monotonic(), 0.0, 0.0


class AnnouncedPrompts:
    """Prompts for which blocks are reserved or read. Used from the event loop.

    Each reservation ends: its request takes it, its owner withdraws it or leaves, or its time is up.
    """

    def __init__(self, engine: EngineLoop, reserver: BlockReserver, tasks: Tasks, reader: BlockReader) -> None:
        self._engine = engine
        self._reserver = reserver
        self._tasks = tasks.group("announced")
        self._reader = reader
        self._open: dict[str, _Announced] = {}  # by ticket
        # How long after its last layers a long prompt's request came lately, and after its leading layers these, as a
        # share of the time of the leading ones; 0: unknown.
        self._behind_s = self._rest = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, order: Reserve) -> None:
        """Reserve blocks if there are enough now; otherwise, the request waits in turn."""
        if order.ticket in self._open or len(self._open) >= MOST_ANNOUNCED:
            return
        names = block_hashes.split(order.digests)
        wait = self._engine.wait(
            "kv", lambda engine: kv_transfer_of(engine).reserve(names, order.tails, order.users, order.tokens)
        )
        self._engine.cancel_wait(wait)
        self._open[order.ticket] = _Announced(order, wait, self._timer(order.ticket, order.ends_s))

    def fetch(self, ticket: Ticket, layers: int = 0) -> None:
        """Read the KV of a computed prompt, or of this many leading layers (0: all)."""
        announced = self._open.get(ticket.id)
        if announced is None or announced.ticket is not None or announced.order.owner != ticket.worker:
            return
        if layers and announced.reading is not None:
            return
        now = time.monotonic()
        if layers:
            announced.leading_at = now
            if self._rest and self._behind_s:
                self._expect(announced, self._rest * (now - announced.reserved_at) + self._behind_s)
        else:
            announced.timer.cancel()
            announced.timer = self._timer(ticket.id)
            if announced.leading_at:
                announced.whole_at = now
                if (leading_s := announced.leading_at - announced.reserved_at) > 0:
                    rest = min((now - announced.leading_at) / leading_s, MOST_REST)
                    self._rest += (BEHIND_SHARE if self._rest else 1.0) * (rest - self._rest)
                if self._behind_s:
                    self._expect(announced, self._behind_s)
        self._read(announced, ticket, layers)

    def _expect(self, announced: _Announced, within_s: float) -> None:
        self._engine.expect(announced.order.ticket.rsplit(":", 2)[0], within_s + SUBMIT_S)

    async def take(self, ticket: Ticket, names: list[bytes], tails: int, users: int) -> BlockReservation | None:
        """Hand over the blocks of a prompt, filled with its KV, to its request; None: none are reserved for it.

        Raises:
            TransferError: the KV could not be read. The blocks are freed.
        """
        announced = self._open.pop(ticket.id, None)
        if announced is None:
            return None
        announced.timer.cancel()
        if announced.whole_at and announced.reading is not None and announced.reading.done():
            behind_s = min(time.monotonic() - announced.whole_at, MOST_BEHIND_S)
            self._behind_s += (BEHIND_SHARE if self._behind_s else 1.0) * (behind_s - self._behind_s)
            self._expect(announced, 0.0)
        order, known = announced.order, announced.ticket
        if (order.owner, order.digests, order.tails, order.users) != (ticket.worker, b"".join(names), tails, users) or (
            known is not None and _content(known) != _content(ticket)
        ):
            self._free(announced)
            return None
        reading = announced.reading if known is not None else None
        try:
            return await asyncio.shield(reading or self._read(announced, ticket))
        except asyncio.CancelledError:
            self._free(announced)
            raise

    def drop(self, ticket: str) -> bool:
        """Free the blocks of a request that does not come, or needs no KV; False: none was announced."""
        announced = self._open.pop(ticket, None)
        if announced is not None:
            announced.timer.cancel()
            self._free(announced)
        return announced is not None

    def lost(self, owner: str) -> None:
        """Drop the prompts of a prefill worker that has left: the next attempt has another ticket."""
        for ticket in [ticket for ticket, each in self._open.items() if each.order.owner == owner]:
            self.drop(ticket)

    async def close(self) -> None:
        for ticket in list(self._open):
            self.drop(ticket)
        await self._tasks.aclose()

    def _timer(self, ticket: str, ends_s: float = 0.0) -> asyncio.TimerHandle:
        within_s = min(ends_s + LATE_S, MOST_LATE_S) if ends_s > 0 else ANNOUNCED_S
        return asyncio.get_running_loop().call_later(within_s, self.drop, ticket)

    def _read(self, announced: _Announced, ticket: Ticket, layers: int = 0) -> "asyncio.Task[BlockReservation | None]":
        if not layers:
            announced.ticket = ticket
            announced.whole.set_result(ticket)
        reading = announced.reading
        if reading is None:
            work = self._read_blocks(announced, ticket, layers)
            announced.reading = reading = self._tasks.spawn(work, name="announced", on_failure=_not_read)
        return reading

    async def _read_blocks(self, announced: _Announced, ticket: Ticket, layers: int) -> BlockReservation | None:
        """Read the leading layers of a ticket, if any, and the rest once the whole prompt is computed."""
        answer = announced.wait.answer
        try:
            reserved = answer.result() if answer.done() else await asyncio.shield(asyncio.wrap_future(answer))
        except RequestError:  # there will never be room
            return None
        announced.began = True
        if reserved is None:
            return None
        reservation = reserved
        positions, local = to_read(reservation)

        free, leading = freeing(reservation), NO_LAYERS
        if layers and positions and not announced.whole.done():
            with self._reserver.freed_if_it_fails(free):
                leading = await self._reader.fetch_leading(ticket, positions, local, layers)
        try:
            whole = await announced.whole
        except asyncio.CancelledError:  # no transfer is running
            self._reserver.free(free)
            raise
        if whole is not None and (positions or reservation.fills):
            if _content(whole) != _content(ticket):  # it was computed again, into other blocks
                leading = NO_LAYERS
            with self._reserver.freed_if_it_fails(free):
                await self._reader.fetch(whole, positions, local, reservation.fills, leading=leading)
        return reservation

    def _free(self, announced: _Announced) -> None:
        """Free the blocks, once nothing writes to them."""
        if not announced.whole.done():
            announced.whole.set_result(None)

        def free(answer: "Future[BlockReservation | None] | asyncio.Task[BlockReservation | None]") -> None:
            if answer.cancelled() and not announced.began:
                announced.wait.answer.add_done_callback(free)
                return
            reservation = None if answer.cancelled() or answer.exception() else answer.result()
            if reservation is not None:
                self._engine.call(freeing(reservation))

        (announced.reading or announced.wait.answer).add_done_callback(free)


def _content(ticket: Ticket) -> tuple[bytes, bytes]:
    return ticket.blocks, ticket.generations


def to_read(reservation: BlockReservation) -> tuple[list[int], list[int]]:
    """The positions in a ticket of what is to be read, and the blocks into which it is read.

    The prompt's last block, if it is not full, comes once per choice: each writes its own tokens after it.
    """
    full = len(reservation.digests)
    positions = [*range(reservation.have, full), *[full] * len(reservation.tails)]
    return positions, reservation.blocks[reservation.have :] + reservation.tails


def _not_read(error: BaseException) -> None:
    if not isinstance(error, TransferError):  # those are logged, and raised to the request that takes the blocks
        log.warning("reader_task_failed", error=repr(error))
