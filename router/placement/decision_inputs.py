"""Collects the inputs of a decision from the cluster state, and decides in the cheaper of two ways.

A loop over the targets decides every request (``decide``). For more than a few targets array operations come to the
same decision faster (``arrays``), where numpy is installed.

The target of a session's last request is a hint for its next one. The prefix index has the cached part of a prompt,
so the hint has little weight. It helps if the index lacks the conversation: if the target's KV events are late, or the
new prompt continues the old one in other tokens. Concurrent requests show that a session is not a conversation: while
one of them is unfinished there is no hint, so that requests which share a name do not gather at one target.

Every target will have a prefix that many prompts share, such as a system prompt, before long. A request that happens to
compute it first is not charged for it: otherwise all its traffic would stay at the targets that have it, while others
are idle. A prefix is shared once ``USES`` prompts for each target went on differently after it, among the last
prompts. The turns of one conversation continue in one way, so they stay where they are. Prefixes are counted at some
lengths, sixteen for each doubling. A prompt adds at most ``ADDED`` of them, the shortest that are not known, so memory
is bounded by the number of prompts remembered.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from penstock.configs.settings import RouterMode, RouterSettings
from penstock.infra.bounded import ByteCache
from penstock.router.placement.cost import FEW, are_many, loading_tokens, lower_tiers, tier_costs
from penstock.router.placement.decide import TransferKind, decide, prefix_move, transfer_kind
from penstock.router.placement.pending import PendingRequest, crowded, required_revision, routing_request
from penstock.router.placement.routing import RoutingContext, RoutingDecision, RoutingRequest, Weights
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.holders import TargetId, TierDepths, as_dict
from penstock.router.state.load_tracker import MODELS_CACHED, LoadTracker
from penstock.router.state.router_metrics import Metrics
from penstock.router.state.target_loads import ENCODE
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import Candidate, DecisionInputs, Link, LowerTiers, Stage
from penstock.schemas.requests import GenerateRequest

if TYPE_CHECKING:
    from penstock.router.placement.arrays import ArrayDecisions

SESSIONS_BYTES = 16 << 20  # remembered, some 30,000; those used longest ago are forgotten first


class SessionId(NamedTuple):
    """The identity of a session. Sessions of different tenants, models or cache salts are separate."""

    tenant: str
    model: str
    salt: str
    name: str


class _Last(NamedTuple):
    request: str
    targets: tuple[TargetId, ...]


class Sessions:
    """
    Args:
        is_active: whether a request is unfinished.
    """

    def __init__(self, is_active: Callable[[str], bool], most_bytes: int = SESSIONS_BYTES) -> None:
        self._is_active = is_active
        self._last: ByteCache[SessionId, _Last] = ByteCache(most_bytes, _size)

    def __len__(self) -> int:
        return len(self._last)

    def targets(self, session: SessionId, request: str) -> tuple[TargetId, ...]:
        """The targets of the session's last request; empty: unknown, or another request of it is unfinished."""
        last = self._last.get(session)
        if last is None or (last.request != request and self._is_active(last.request)):
            return ()
        return last.targets

    def sent(self, session: SessionId, request: str, targets: Sequence[TargetId]) -> None:
        """A request of the session was sent to these targets, one for each stage."""
        self._last.put(session, _Last(request, tuple(targets)))


def _size(session: SessionId, last: _Last) -> int:
    """Bytes, of which a character may take four: clients choose names and salts."""
    return 4 * sum(map(len, session)) + len(last.request) + 128 * len(last.targets)


def session_of(request: GenerateRequest) -> SessionId:
    return SessionId(request.tenant, request.model, request.salt, request.session)


USES = 8  # by each target, from which on a prefix is shared; with 4, bursts make theirs free too early
PROMPTS = 128  # for each target, until the older generation is dropped
MOST_PROMPTS = 1 << 14
ADDED = 8
LENGTHS = [*range(1, 16), *(step << octave for octave in range(16) for step in range(16, 32))]


class SharedPrefixes:
    """Branches after prefixes, in two generations: when the younger one is full, the older one is forgotten."""

    def __init__(self) -> None:
        self._branches: dict[int, int] = {}  # by the key of a prefix' last block: prompts that went on differently
        self._older: dict[int, int] = {}
        self._prompts = 0  # in the younger generation

    def blocks(self, keys: Sequence[int], targets: int) -> int:
        """Leading blocks of a prompt that are shared; this prompt counts from now on.

        Looking at the same prompt again adds its longer lengths, and counts at most one for ``ADDED`` of them.

        Args:
            targets: among which the prompts of its model are distributed.
        """
        branches, older = self._branches, self._older
        enough, shared, last = USES * targets, 0, None
        lengths = LENGTHS[: bisect_right(LENGTHS, len(keys))]
        for at, length in enumerate(lengths):
            key = keys[length - 1]
            count = branches.get(key)
            if count is None:
                count = older.pop(key, None)
                if count is None:
                    self._add([keys[each - 1] for each in lengths[at : at + ADDED]], last, targets)
                    break
                branches[key] = count = count // 2
            if count >= enough:
                shared = length
            last = key
        return shared

    def _add(self, new: Sequence[int], behind: int | None, targets: int) -> None:
        self._branches.update(dict.fromkeys(new, 0))
        if behind is not None:
            self._branches[behind] += 1
        self._prompts += 1
        if self._prompts >= min(PROMPTS * targets, MOST_PROMPTS):
            self._older, self._branches, self._prompts = self._branches, {}, 0


def array_decisions(tracker: LoadTracker) -> "ArrayDecisions | None":
    """None: numpy is not installed."""
    if find_spec("numpy") is None:
        return None
    from penstock.router.placement.arrays import ArrayDecisions

    return ArrayDecisions(tracker)


class Decisions:
    """A decision is a function of the tracker's state and of the arguments of ``decide``.

    Args:
        arrays: of the same tracker; None: a loop decides everything.
        few: targets, up to which a loop over them is cheaper.
    """

    def __init__(
        self,
        tracker: LoadTracker,
        arrays: "ArrayDecisions | None",
        mode: RouterMode,
        weights: Weights,
        *,
        few: int = FEW,
    ) -> None:
        self._arrays = arrays
        self._few = few
        self._tracker = tracker
        self._mode: RouterMode = mode
        self._weights = weights
        self._shared: dict[str, SharedPrefixes] = {}  # by model
        self.sessions = Sessions(lambda request: tracker.request(request) is not None)

    def shared_blocks(self, model: str, keys: Sequence[int]) -> int:
        """Leading blocks of a prompt that many prompts begin with, for ``RoutingRequest``; it counts from now on."""
        serving = self._tracker.serving(model)
        if self._mode != "kv" or not serving or not len(keys):
            return 0
        prefixes = self._shared.get(model)
        if prefixes is None:
            if len(self._shared) >= MODELS_CACHED:
                self._shared.clear()
            prefixes = self._shared[model] = SharedPrefixes()
        return prefixes.blocks(keys, len(serving) * serving[0].dp_size)

    def _are_many(self, model: str) -> bool:
        """Whether a loop over the model's targets costs more than array operations."""
        return are_many(self._tracker.serving(model), self._few)

    def decide(
        self,
        request: RoutingRequest,
        keys: Sequence[int],
        overlaps: Mapping[TargetId, int],
        *,
        now_ns: int,
        seed: int,
        number: int = 0,
        waited_s: float | None = None,
    ) -> RoutingDecision:
        """
        Args:
            keys: of the full blocks of its prompt, as far as they may be reused.
            overlaps, seed, number, waited_s: as in ``RoutingContext``.
        """
        tracker, weights = self._tracker, self._weights
        leading: Mapping[TargetId, int] = tracker.loads.prefixes(keys) if self._mode == "kv" else {}
        if self._arrays is not None and self._mode == "kv" and self._are_many(request.model):
            decision = self._arrays.decide(
                request, overlaps, leading, weights, now_ns=now_ns, seed=seed, waited_s=waited_s
            )
            if decision is not None:
                return self._with_move(decision, request, overlaps, seed)
        targets, active = tracker.targets(now_ns, request.model), as_dict(leading)
        cached = overlaps if isinstance(overlaps, TierDepths) else as_dict(overlaps)
        context = RoutingContext(request, targets, cached, self._mode, weights, seed, number, active, waited_s)
        return self._with_move(decide(context), request, overlaps, seed)

    def _with_move(
        self, decision: RoutingDecision, request: RoutingRequest, overlaps: Mapping[TargetId, int], seed: int
    ) -> RoutingDecision:
        """The decision with what its worker reads from another one."""
        reader = self._tracker.worker(decision.route[0].worker) if decision.route else None
        if reader is None or not reader.moves_prefixes:
            return decision
        worker, weight = self._tracker.worker, self._weights.transfer
        move = prefix_move(request, reader, decision.overlap_blocks, overlaps, worker, weight, seed)
        if move is None:
            return decision
        first, *later = decision.route
        return msgspec.structs.replace(decision, route=(msgspec.structs.replace(first, move=move), *later))


MANY = 12  # targets, above which the array operations take less than half as long

log = structlog.get_logger("router")


class Decider:
    def __init__(self, cluster: ClusterState, settings: RouterSettings, metrics: Metrics) -> None:
        self._cluster = cluster
        self._metrics = metrics
        weights = Weights(
            settings.overlap_weight,
            settings.prefill_weight,
            settings.temperature,
            settings.transfer_weight,
            settings.local_prefill_tokens,
            settings.prefill_queue_tokens,
        )
        self.arrays = array_decisions(cluster.tracker)
        self._policy = Decisions(cluster.tracker, self.arrays, settings.mode, weights)
        self._many_targets = False  # seen, without arrays
        self._seeds = random.Random(settings.seed or None)
        self._decisions = 0

    def decide(
        self,
        pending: PendingRequest,
        keys: Sequence[int],
        now_ns: int,
        *,
        held: int = 0,
        waited_s: float | None = None,
    ) -> tuple[RoutingDecision, DecisionInputs]:
        """
        Args:
            keys: of the prompt's full blocks.
            held: number of requests held, for the record.
            waited_s: since its arrival.
        """
        tracker, model = self._cluster.tracker, pending.request.model
        if self.arrays is None and not self._many_targets:
            self._warn_of_many_targets(model)
        self._decisions += 1
        reusable: Sequence[int] = () if pending.computes_whole_prompt else keys
        shared = self._policy.shared_blocks(model, reusable)
        session: tuple[TargetId, ...] = ()
        if pending.request.session:
            session = self._policy.sessions.targets(session_of(pending.request), pending.request.id)
        request = self._request(pending, keys, now_ns, shared, session)
        serving = tracker.serving(model)
        inputs = DecisionInputs(
            self._seeds.getrandbits(32),
            self._decisions,
            held,
            tracker.loads.learned.samples,
            shared,
            serving[0].block_size if serving else 0,
            session=session,
        )
        overlaps = self._cluster.caches.depths(reusable)
        decision = self._policy.decide(
            request, reusable, overlaps, now_ns=now_ns, seed=inputs.seed, number=inputs.number, waited_s=waited_s
        )
        if decision.how:  # there are workers for some stages only
            workers = [tracker.worker(each.worker) for each in decision.candidates]
            inputs = with_pairs(inputs, workers)
        if isinstance(overlaps, TierDepths):
            brought = brought_back(tracker, decision.candidates, overlaps, reusable)
            inputs = msgspec.structs.replace(inputs, lower_tiers=tuple(brought))
        if request.adapter:
            found = ((each.worker, tracker.worker(each.worker)) for each in decision.candidates)
            lacking = (name for name, each in found if each is not None and loading_tokens(request.adapter, each))
            inputs = msgspec.structs.replace(inputs, unloaded=tuple(dict.fromkeys(lacking)))
        return decision, inputs

    def sent(self, request: GenerateRequest, route: Sequence[Stage]) -> None:
        """A decision was taken: the session's next request may follow it."""
        if request.session:
            targets = [(stage.worker, stage.rank) for stage in route if stage.role != ENCODE]
            self._policy.sessions.sent(session_of(request), request.id, targets)

    def _request(
        self,
        pending: PendingRequest,
        keys: Sequence[int],
        now_ns: int,
        shared_blocks: int,
        session: tuple[TargetId, ...],
    ) -> RoutingRequest:
        """What routing depends on; a request whose revision has no worker may move to another one."""
        request, tracker = pending.request, self._cluster.tracker
        pinned = pending.pinned_revision
        revision = required_revision(pending, tracker.revisions(request.model, request.tokenizer))
        if revision is not None and pinned and pinned != revision:
            log.info("request_moved_to_revision", request=request.id, before=pinned, revision=revision)
            self._metrics.revision_moves.inc()
            pending.revision = revision
        avoid = self._cluster.suspects()
        if pending.suspect:
            avoid |= crowded(tracker, request.model, pending.suspect, now_ns)
        if pending.gone:
            avoid |= {pending.gone}
        return routing_request(
            pending, keys, avoid=avoid, revision=revision, shared_blocks=shared_blocks, session=session
        )

    def _warn_of_many_targets(self, model: str) -> None:
        targets = sum(each.dp_size for each in self._cluster.tracker.serving(model))
        if targets > MANY:
            self._many_targets = True
            log.warning(
                "numpy_not_installed",
                targets=targets,
                effect=f"above {MANY} targets decisions are slower without it",
                fix="pip install 'penstock[router]'",
            )


def brought_back(
    tracker: LoadTracker, candidates: Sequence[Candidate], overlaps: TierDepths, keys: Sequence[int]
) -> Iterator[LowerTiers]:
    """What the candidates of a decision that was made now have on lower tiers of their caches."""
    leading = tracker.loads.prefixes(keys)
    for each in candidates:
        target, worker = (each.worker, each.rank), tracker.worker(each.worker)
        blocks = lower_tiers(overlaps.tiers(target), leading.get(target), each.overlap_blocks)
        if worker is not None and any(blocks):
            yield LowerTiers(*target, *blocks, *tier_costs(worker))


def links(registrations: Iterable[Registration | None]) -> tuple[Link, ...]:
    """The workers of a score table as its record has them, so that pairs can be decided again. None: it has left."""
    kinds: dict[TransferKind, int] = {}
    hosts: dict[str, int] = {}
    links = []
    for each in registrations:
        endpoint, kind = (each.transfer, transfer_kind(each)) if each is not None else (None, None)
        role = each.role if each is not None else ""
        if endpoint is None or kind is None:
            links.append(Link(role))
            continue
        host = hosts.setdefault(endpoint.host, len(hosts) + 1) if endpoint.host else 0
        links.append(Link(role, kinds.setdefault(kind, len(kinds) + 1), host, endpoint.rdma))
    return tuple(links)


def with_pairs(inputs: DecisionInputs, registrations: Sequence[Registration | None]) -> DecisionInputs:
    """The inputs of a decision with what decides about pairs, for the workers of its score table."""
    present = [(at, each) for at, each in enumerate(registrations) if each is not None]
    return msgspec.structs.replace(
        inputs,
        links=links(registrations),
        pair_only=tuple(at for at, each in present if each.pair_only),
        on_gpu=tuple(at for at, each in present if each.transfer is not None and each.transfer.gpu),
    )
