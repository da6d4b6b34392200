"""Collects the inputs of a decision from the cluster state, and decides."""

import random
from collections.abc import Sequence

import structlog

from configs.settings import RouterSettings
from router.cluster_state import ClusterState
from router.metrics import Metrics
from router.pending import PendingRequest, required_revision, routing_request
from router.policy import decide
from router.routing import RoutingContext, RoutingDecision, Weights

log = structlog.get_logger("router")


class Decider:
    def __init__(self, cluster: ClusterState, settings: RouterSettings, metrics: Metrics) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._mode = settings.mode
        self._weights = Weights(
            settings.overlap_weight,
            settings.prefill_weight,
            settings.temperature,
            settings.transfer_weight,
            settings.local_prefill_tokens,
        )
        self._rng = random.Random(settings.seed or None)
        self._decisions = 0

    def decide(self, pending: PendingRequest, keys: Sequence[int], now_ns: int) -> RoutingDecision:
        """
        Args:
            keys: of the prompt's full blocks.
        """
        request, tracker = pending.request, self._cluster.tracker
        pinned = pending.pinned_revision
        revision = required_revision(pending, tracker.revisions(request.model, request.tokenizer))
        if revision is not None and pinned and pinned != revision:
            log.info("request_moved_to_revision", request=request.id, before=pinned, revision=revision)
            self._metrics.revision_moves.inc()
            pending.revision = revision
        self._decisions += 1
        return decide(
            RoutingContext(
                routing_request(pending, keys, avoid=self._cluster.suspects(), revision=revision),
                tracker.targets(now_ns, request.model),
                {} if pending.computes_whole_prompt else self._cluster.overlaps(keys),
                self._mode,
                self._weights,
                self._rng,
                self._decisions,
            )
        )
