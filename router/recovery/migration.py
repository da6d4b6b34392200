"""Requests that run in another cell: those for which this one has no worker, and in overload some that it holds.

A request leaves its cell by a job in WORK, as for a worker: message id ``<request>:<attempt>``, under the name of the
other cell. From then on no router of this cell places it, and what earlier attempts still stream is void. A gateway
takes the job there, and stores here what comes of it (``penstock.gateway.service.migration``). If nothing does, it
returns the attempt as a worker would, and the next one is placed here or leaves again.

A request that came from another cell does not leave for a third. If this one has no worker for it either, it ends here,
which returns it to its own.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.router.held.held_requests import HeldRequests
from penstock.router.placement.pending import PendingRequest, Standing
from penstock.router.recovery.terminal_events import TerminalPublisher
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.target_loads import serves
from penstock.schemas.cells import RoomAnswer, RoomQuestion, decode_room_answer, is_cell
from penstock.schemas.errors import Code
from penstock.schemas.fleet import Registration, run_together
from penstock.schemas.wire import encode

log = structlog.get_logger("router")

LOOK_S = 0.25
LOOK_SHARE = 0.05  # of the router's time, at most: 100,000 held requests take 20 ms or more to look through
ASK_S = 0.5
AT_ONCE = 32  # requests of a model that leave at one look, so that other cells' loads are known again before the next
HELD_S = 1.0  # in overload, what was held for less is about to be placed here
APART = ("image", "video")  # outputs whose files are in the store of the cell where they were made


def can_run(registrations: Sequence[Registration], model: str, revision: str = "") -> bool:
    """Whether a cell has ready workers that together run requests of a model, full or not. Pure.

    Args:
        revision: of the model, that alone can continue what the client has; "": any.
    """
    return run_together(each for each in registrations if serves(each, model) and revision in ("", each.revision))


class _Needed(NamedTuple):
    """What a cell must have to run a request. ``revision``: of the model; "": any."""

    model: str
    revision: str


class Migration:
    """Call ``run``.

    Args:
        after_s: for so long a request must have had no worker.
        several: whether there are several cells, as reported by gateways.
        owns: whether this router places the requests of a model.
        send: gives a request to a cell, by its number within the deployment.
    """

    def __init__(
        self,
        bus: Bus,
        after_s: float,
        *,
        several: Callable[[], bool],
        cluster: ClusterState,
        held: HeldRequests,
        terminal: TerminalPublisher,
        owns: Callable[[str], bool],
        send: Callable[[PendingRequest, int, str], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._after_s = after_s
        self._several = several
        self._cluster = cluster
        self._held = held
        self._terminal = terminal
        self._owns = owns
        self._send = send
        self._since: dict[_Needed, float] = {}  # monotonic; since when it has had no worker
        self._pause = LOOK_S

    async def run(self) -> None:
        """Look several times a second, until it is cancelled."""
        while True:
            await asyncio.sleep(self._pause)
            if not (self._bus.connected and self._several()):
                self._since.clear()  # leases run out unseen
            elif len(self._held) or self._since:
                try:
                    await self._look(time.monotonic())
                except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                    log.debug("room_unknown", error=repr(error))

    async def _look(self, now: float) -> None:
        by_need: dict[_Needed, list[PendingRequest]] = {}
        for pending in self._held:
            need = _Needed(pending.request.model, pending.pinned_revision if pending.streaming else "")
            by_need.setdefault(need, []).append(pending)
        self._pause = max(LOOK_S, (time.monotonic() - now) / LOOK_SHARE)
        registrations = self._cluster.registrations()
        self._since = {need: self._since.get(need, now) for need in by_need if not can_run(registrations, *need)}
        for need, waiting in by_need.items():
            since = self._since.get(need)
            if not self._owns(need.model) or (since is not None and now - since < self._after_s):
                continue
            if since is not None:
                self._give_back(waiting)
            await self._offer(need, waiting, stranded=since is not None)

    def _give_back(self, waiting: Sequence[PendingRequest]) -> None:
        """End here what came from other cells."""
        for pending in waiting:
            if pending.request.origin and self._held.remove(pending.request.id) is not None:
                message = f"this cell has no worker for {pending.request.model!r}: the request goes back to its own"
                self._terminal.end(pending, Code.model_unavailable, message)

    async def _offer(self, need: _Needed, waiting: Sequence[PendingRequest], *, stranded: bool) -> None:
        now_ns = self._bus.clock.now_ns()
        held_since = now_ns - int(HELD_S * 1e9)
        back_since = now_ns - int(self._after_s * 1e9)
        movable = [
            each
            for each in waiting
            if may_leave(each, back_since) and (stranded or (each.attempt == 1 and each.since_ns <= held_since))
        ]
        if not movable:
            return
        movable = heapq.nsmallest(
            AT_ONCE, movable, key=lambda each: (each.request.priority.rank, each.request.created_ns)
        )
        question = RoomQuestion(need.model, tuple(each.prompt_tokens for each in movable), stranded, need.revision)
        answer = await self._ask(question)
        why = f"no worker in this cell for {self._after_s:g} s" if stranded else "another cell has room"
        moved = 0
        for pending, cell in zip(movable, answer.cells, strict=False):
            if self._held.remove(pending.request.id) is not None:  # it may have been placed, or ended, meanwhile
                await self._send(pending, cell, why)
                moved += 1
        if moved:
            log.info("requests_migrated", model=need.model, requests=moved, cells=sorted(set(answer.cells)), why=why)

    async def _ask(self, question: RoomQuestion) -> RoomAnswer:
        """
        Raises:
            nats.errors.Error, TimeoutError: no gateway answers.
        """
        reply = await self._bus.nc.request(self._bus.subjects.room, encode(question), timeout=ASK_S)
        return decode_room_answer(reply.data)


def may_leave(pending: PendingRequest, back_since_ns: int) -> bool:
    """Whether another cell may run a request. Pure.

    Args:
        back_since_ns: what a cell has returned later does not leave again yet, since that takes a job and a fence.
    """
    request = pending.request
    if request.origin or request.worker or request.output in APART:
        return False
    if pending.earlier_workers and is_cell(pending.earlier_workers[-1].worker) and pending.since_ns > back_since_ns:
        return False
    return pending.suspect not in (Standing.unknown, Standing.poisonous)
