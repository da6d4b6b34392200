"""Metrics of a router; names end in their unit."""

from collections.abc import Iterable

from penstock.infra.metrics.scope import MetricScope
from penstock.schemas.fleet import Registration
from penstock.schemas.pace import compare
from penstock.schemas.routers import LostLeases
from penstock.schemas.streams import LONGEST_DEADLINE_S as LONGEST

STAGES = ("aggregated", "encode", "prefill", "decode")
DECISION_BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
WAIT_BUCKETS = (0.001, 0.01, 0.1, 1, 1.5, 3, 10, 60, 600, LONGEST)


class Metrics:
    """
    Args:
        scope: of the process, with the prefix of a router's metrics.
    """

    def __init__(self, scope: MetricScope) -> None:
        self.scope = scope
        self.registry = scope.registry
        self._losing: set[str] = set()
        self._paced: set[str] = set()
        self.decisions = scope.thread_counter("decisions", "jobs published", ["reason"])
        self.routes = scope.thread_counter("routes", "jobs published, by kind of route", ["kind", "encode"])
        self.overlap = scope.thread_counter("overlap_tokens", "prompt tokens cached at the chosen worker")
        self.prompt = scope.thread_counter("prompt_tokens", "prompt tokens placed")
        self.wait = scope.thread_histogram("wait_seconds", "time from arrival to decision", buckets=WAIT_BUCKETS)
        self.decision = scope.thread_histogram(
            "decision_seconds", "computing where a request goes: match, scores and choice", buckets=DECISION_BUCKETS
        )
        self.ended = scope.counter("ended", "requests ended by the router", ["code"])
        self.revision_moves = scope.counter(
            "revision_moves", "requests moved to another revision before their first token"
        )
        self.fallbacks = scope.counter(
            "fallbacks", "requests moved to another model before their first token (--fallback)", ["model", "fallback"]
        )
        self.stalled = scope.counter(
            "stalled_requests", "requests whose worker's engine made no step for --stalled-after-s", ["stage"]
        )
        for stage in STAGES:  # an alert sees the first one only if the series exists before it
            self.stalled.labels(stage)
        self.lost = scope.counter("workers_lost", "workers declared dead")
        self.lease_losses = scope.gauge(
            "lease_losses", "times in ten minutes that the worker of this name lost its lease on its own", ["worker"]
        )
        self.lease_losses_together = scope.gauge(
            "lease_losses_together",
            "times in ten minutes that all workers lost their leases at once, or while the broker was away",
        )
        self.slowness = scope.gauge(
            "worker_slowness",
            "how many times slower than its peers (of its model, role, engine and device) the worker of this name is",
            ["worker"],
        )
        self.waiting = scope.gauge("waiting_requests", "requests without a worker")
        self.workers = scope.gauge("workers", "registered workers")
        self.blocks = scope.gauge("index_blocks", "distinct blocks in the prefix index")
        self.index_sequence = scope.gauge(
            "index_sequence",
            "KV stream sequence that penstock_router_index_checksum is of: every 4,096th, and the last when it rests",
        )
        self.index_checksum = scope.gauge(
            "index_checksum", "48 bits of what is known of all caches: equal in routers that show the same sequence"
        )
        self.tasks = scope.gauge("tasks", "asyncio tasks")

    def lost_leases(self, lost: Iterable[LostLeases]) -> None:
        """Names without a loss have no series, so that there are no more than a router reports."""
        lost = list(lost)
        self.lease_losses_together.set(max((each.together for each in lost), default=0))
        counts = {each.worker: each.count for each in lost if each.count}
        for worker in self._losing - counts.keys():
            self.lease_losses.remove(worker)
        for worker, count in counts.items():
            self.lease_losses.labels(worker).set(count)
        self._losing = set(counts)

    def paces(self, workers: Iterable[Registration]) -> None:
        """Workers without a known pace, or without a peer that has one, have no series."""
        workers = list(workers)
        found = compare(workers)
        slowness = {each.name or each.worker: found[each.worker].slowness for each in workers if each.worker in found}
        for worker in self._paced - slowness.keys():
            self.slowness.remove(worker)
        for worker, factor in slowness.items():
            self.slowness.labels(worker).set(factor)
        self._paced = set(slowness)
