"""Collects the inputs of a decision from the cluster state, and decides."""

import random
from collections.abc import Sequence

import msgspec
import structlog

from penstock.configs.settings import RouterSettings
from penstock.router.placement.decisions import Decisions, array_decisions
from penstock.router.placement.pairs import with_pairs
from penstock.router.placement.pending import PendingRequest, required_revision, routing_request
from penstock.router.placement.routing import ALONE, ModelPart, RoutingDecision, RoutingRequest, Weights
from penstock.router.placement.sessions import SessionId
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.load import ENCODE
from penstock.router.state.metrics import Metrics
from penstock.router.state.suspects import crowded
from penstock.schemas.jobs import DecisionInputs, Stage
from penstock.schemas.requests import GenerateRequest

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
        part: ModelPart = ALONE,
    ) -> tuple[RoutingDecision, DecisionInputs]:
        """
        Args:
            keys: of the prompt's full blocks.
            held: number of requests held, for the record.
            waited_s: since its arrival, if it was held.
            part: this router's, if several place the model's requests.
        """
        tracker = self._cluster.tracker
        request = self.request(pending, keys, now_ns)
        if self.arrays is None and not self._many_targets:
            self._warn_of_many_targets(request.model)
        self._decisions += 1
        reusable: Sequence[int] = () if pending.computes_whole_prompt else keys
        shared = self._policy.shared_blocks(request.model, reusable, part.routers)
        if shared:
            request = msgspec.structs.replace(request, shared_blocks=shared)
        if pending.request.session:
            targets = self._policy.sessions.targets(session_of(pending.request), pending.request.id)
            request = msgspec.structs.replace(request, session=targets)
        inputs = DecisionInputs(
            self._seeds.getrandbits(32),
            self._decisions,
            held,
            tracker.loads.learned.samples,
            shared,
            next((each.block_size for each in tracker.serving(request.model)), 0),
            session=request.session,
        )
        decision = self._policy.decide(
            request,
            reusable,
            self._cluster.caches.depths(reusable),
            now_ns=now_ns,
            seed=inputs.seed,
            number=inputs.number,
            waited_s=waited_s,
            part=part,
        )
        if decision.how:  # there are workers for some stages only
            workers = [tracker.worker(each.worker) for each in decision.candidates]
            inputs = with_pairs(inputs, workers)
        return decision, inputs

    def sent(self, request: GenerateRequest, route: Sequence[Stage]) -> None:
        """A decision was taken: the session's next request may follow it."""
        if request.session:
            targets = [(stage.worker, stage.rank) for stage in route if stage.role != ENCODE]
            self._policy.sessions.sent(session_of(request), request.id, targets)

    def request(self, pending: PendingRequest, keys: Sequence[int], now_ns: int) -> RoutingRequest:
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
        return routing_request(pending, keys, avoid=avoid, revision=revision)

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


def session_of(request: GenerateRequest) -> SessionId:
    return SessionId(request.tenant, request.model, request.salt, request.session)
