"""One router without log, clock or tasks: the cores that a router decides with, driven by calls.

Everything that happens is a call, with its time as an argument; decisions are return values. The same calls in the
same order give the same decisions:

    join, leave      a worker registered, changed or left; each of its ranks is a target
    arrive           a request arrived: a ``Placed``, or None: it is held
    stored           KV events: a target holds further blocks. Call it after the index has folded them. A prompt counts
                     as computed when its last full block is stored, so the first token needs no message of its own
    moved            the prefill stage of a pair ended: the request leaves its prefill target
    ended            a request ended
    pump             after any of these: the held requests that are placed now, next first
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.configs.settings import RouterMode
from penstock.router.held.held_order import Held, HeldOrder, Overlaps
from penstock.router.placement.decisions import Decisions, array_decisions
from penstock.router.placement.routing import ALONE, ModelPart, RoutingDecision, RoutingRequest, Weights
from penstock.router.placement.sessions import SessionId
from penstock.router.state.depths import TargetId
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import LoadHeader


class Arrival(NamedTuple):
    """A request to be placed.

    Attributes:
        keys: of the full blocks of its prompt.
        rank: of its priority class; 0 is served first.
        seed: breaks ties.
        session: its name; "": none.
        model: "": that of the first worker.
    """

    id: str
    keys: Sequence[int]
    prompt_tokens: int
    arrived_ns: int
    deadline_ns: int = 1 << 62
    sequences: int = 1
    rank: int = 0
    seed: int = 0
    model: str = ""
    max_tokens: int = 1
    tenant: str = ""
    session: str = ""

    @property
    def session_id(self) -> SessionId:
        return SessionId(self.tenant, self.model, "", self.session)


class Placed(NamedTuple):
    """A decision: ``arrival`` goes to ``target``, and from there to ``decode`` unless that is None."""

    arrival: Arrival
    target: TargetId
    decision: RoutingDecision
    decode: TargetId | None = None


class SimulatedRouter:
    """
    Args:
        overlaps: leading blocks of a prompt that each target caches (``PrefixIndex.match``); absent: none.
        kv_events: False: ``stored`` is not called, so the backlog of prompts is estimated.
        part: this router's, if several place the requests.
    """

    def __init__(
        self,
        overlaps: Overlaps,
        *,
        mode: RouterMode = "kv",
        weights: Weights = Weights(),  # noqa: B008  # frozen
        kv_events: bool = True,
        part: ModelPart = ALONE,
    ) -> None:
        self.tracker = LoadTracker(kv_events=kv_events)
        self._overlaps = overlaps
        self._part = part
        arrays = array_decisions(self.tracker)
        self._decisions = Decisions(self.tracker, arrays, mode, weights)
        self._order: HeldOrder[Arrival] = HeldOrder(self.tracker, arrays, overlaps, by_size=mode == "kv")
        self._number = 0
        self._changed = False  # since the last ``pump`` that placed nothing

    def __len__(self) -> int:
        """Number of held requests."""
        return len(self._order.queue)

    def join(self, registration: Registration) -> None:
        """A worker registered, or its registration changed."""
        self.tracker.put_worker(registration)
        self._changed = True

    def leave(self, worker: str) -> list[str]:
        """A worker left. Returns the requests that were placed there: they have to arrive again."""
        lost = self.tracker.remove_worker(worker)
        for entry in lost:
            self.tracker.release(entry.request, entry.attempt)
        self._changed = True
        return [entry.request for entry in lost]

    def arrive(self, arrival: Arrival, now_ns: int) -> Placed | None:
        """Place a request at once, if none is held and a target has room; hold it otherwise."""
        request = self._request(arrival)
        if not len(self):
            decision = self._decide(arrival, request, self._overlaps(arrival.keys), now_ns, None)
            if decision.route:
                return self._place(arrival, decision, now_ns)
        held = Held(arrival, request, arrival.keys)
        self._order.push(
            arrival.id,
            held,
            rank=arrival.rank,
            arrived_ns=arrival.arrived_ns,
            deadline_ns=arrival.deadline_ns,
            now_ns=now_ns,
            tenant=arrival.tenant,
        )
        self._changed = True
        return None

    def stored(self, target: TargetId, keys: Sequence[int], now_ns: int = 0) -> None:
        """KV events: ``target`` now holds these blocks; ``now_ns`` 0: unknown, no costs are learnt."""
        if self.tracker.stored(target, keys, now_ns):
            self._changed = True

    def moved(self, request: str, now_ns: int) -> None:
        """A request left its prefill target for its decode target."""
        entry = self.tracker.request(request)
        if entry is not None and entry.later:
            load = LoadHeader(entry.prompt_tokens, entry.cached_tokens, "", 1 << 62, "", entry.n, entry.later)
            first = entry.later[0]
            self.tracker.admit(request, entry.attempt, first.worker, load, now_ns=now_ns, echoed=True, handed=True)
            self._changed = True

    def ended(self, request: str, now_ns: int = 0) -> None:
        """A request ended; unknown requests are ignored. ``now_ns`` 0: unknown, no costs are learnt."""
        if self.tracker.finish(request, now_ns) is not None:
            self._changed = True

    def pump(self, now_ns: int) -> Iterator[Placed]:
        """The held requests that have a target now. Each is placed before the next one is considered."""
        if not len(self):
            return
        self._order.refresh(now_ns)
        while self._changed:
            self._changed = False
            for entry in self._order.candidates("", now_ns):
                held = entry.item
                waited_s = (now_ns - entry.arrived_ns) / 1e9
                decision = self._decide(held.item, held.request, held.cached, now_ns, waited_s)
                if decision.route:
                    self._order.queue.take(entry.id)
                    self._changed = True
                    yield self._place(held.item, decision, now_ns)
                    break

    def _request(self, arrival: Arrival) -> RoutingRequest:
        workers = self.tracker.workers()
        model = arrival.model or (workers[0].model if workers else "")
        return RoutingRequest(
            model,
            arrival.prompt_tokens,
            arrival.max_tokens,
            prompt_blocks=len(arrival.keys),
            n=arrival.sequences,
            shared_blocks=self._decisions.shared_blocks(model, arrival.keys, self._part.routers),
        )

    def _decide(
        self,
        arrival: Arrival,
        request: RoutingRequest,
        cached: Mapping[TargetId, int],
        now_ns: int,
        waited_s: float | None,
    ) -> RoutingDecision:
        self._number += 1
        if arrival.session:
            targets = self._decisions.sessions.targets(arrival.session_id, arrival.id)
            request = msgspec.structs.replace(request, session=targets)
        return self._decisions.decide(
            request,
            arrival.keys,
            cached,
            now_ns=now_ns,
            seed=arrival.seed,
            number=self._number,
            waited_s=waited_s,
            part=self._part,
        )

    def _place(self, arrival: Arrival, decision: RoutingDecision, now_ns: int) -> Placed:
        route = decision.route
        first = route[0]
        size = self.tracker.block_size(arrival.model or self.tracker.workers()[0].model)
        load = LoadHeader(
            arrival.prompt_tokens, decision.overlap_blocks * size, "", 1 << 62, "", arrival.sequences, route
        )
        self.tracker.admit(arrival.id, 1, first.worker, load, now_ns=now_ns, keys=arrival.keys)
        if arrival.session:
            targets = [(stage.worker, stage.rank) for stage in route]
            self._decisions.sessions.sent(arrival.session_id, arrival.id, targets)
        decode = (route[-1].worker, route[-1].rank) if len(route) > 1 else None
        return Placed(arrival, (first.worker, first.rank), decision, decode)
