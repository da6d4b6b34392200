"""The workers of a gateway's model: which it uses, which stand by, and which it refuses with a logged error.

A worker is used if it has the gateway's own tokenizer and runs the serving revision (``penstock.schemas.revisions``).
Workers of another revision stand by until the serving one has no worker left. A worker with another tokenizer is never
used: the same token ids mean different text to it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import structlog

from penstock.gateway.base.metrics import ModelMetrics
from penstock.schemas.fleet import Registration, State
from penstock.schemas.revisions import NO_TOKENS, reads, revisions

log = structlog.get_logger("gateway")


class WorkerSelection(NamedTuple):
    """
    Attributes:
        revision: "": no worker is there, or none names its revision.
        ready: one takes requests, alone or together with another.
        lacks: the role of a worker without which those that are there run no request; "": none.
    """

    used: list[Registration]
    revision: str
    ready: bool
    lacks: str = ""


def lacking(workers: Iterable[Registration]) -> str:
    """The role of the worker that workers of pairs need to run requests; "": some run them, or none is ready."""
    ready = [each for each in workers if each.state is State.ready and each.role not in NO_TOKENS]
    alone = {each.role for each in ready if each.pair_only}
    if len(alone) != 1 or not all(each.pair_only for each in ready):
        return ""
    return "decode" if "prefill" in alone else "prefill"


class Roster:
    """Selects again whenever a worker registers, changes or leaves, and logs what changed."""

    def __init__(self, model: str, metrics: ModelMetrics) -> None:
        self._model = model
        self._tokenizer = ""
        self._metrics = metrics
        self._refused: dict[str, str] = {}  # worker -> its tokenizer
        self._serving: str | None = None
        self._standing_by: frozenset[str] = frozenset()

    def select(self, workers: Iterable[Registration], tokenizer: str) -> WorkerSelection:
        """
        Args:
            workers: that serve the model's name.
            tokenizer: digest of the gateway's own; "": unknown, and all are used.
        """
        if tokenizer != self._tokenizer:
            self._refuse([])
            self._tokenizer = tokenizer
        compatible: list[Registration] = []
        refused: list[Registration] = []
        for worker in workers:
            (compatible if reads(worker, self._tokenizer) else refused).append(worker)
        candidates = revisions(compatible, self._tokenizer)
        serving = self._serving if candidates.serving is None else candidates.serving  # all are leaving: as it was
        self._refuse(refused)
        self._report_revisions(serving, candidates.present, compatible)
        used = [worker for worker in compatible if worker.revision == serving]
        lacks = lacking(used)
        return WorkerSelection(used or compatible, serving or "", candidates.serving is not None and not lacks, lacks)

    def _refuse(self, refused: list[Registration]) -> None:
        gauge = self._metrics.refused
        tokenizers = {worker.worker: worker.tokenizer for worker in refused}
        for name, tokenizer in self._refused.items():
            if tokenizers.get(name) != tokenizer:
                gauge.remove(name, tokenizer, self._tokenizer)
        for name, tokenizer in tokenizers.items():
            if self._refused.get(name) != tokenizer:
                gauge.labels(name, tokenizer, self._tokenizer).set(1)
                log.error(
                    "worker_refused",
                    worker=name,
                    model=self._model,
                    tokenizer=tokenizer,
                    expected=self._tokenizer,
                    reason="it serves this model's name with another tokenizer; give it the gateway's model directory, "
                    "or a --served-model-name of its own",
                )
        self._refused = tokenizers

    def _report_revisions(self, serving: str | None, present: frozenset[str], workers: list[Registration]) -> None:
        if serving != self._serving:
            log.info("revision_serving", model=self._model, revision=serving, before=self._serving)
            self._serving = serving
        standing_by = present - {serving}
        for revision in sorted(standing_by - self._standing_by):
            log.warning(
                "revision_stands_by",
                model=self._model,
                revision=revision,
                serving=serving,
                workers=sorted(worker.worker for worker in workers if worker.revision == revision),
                action="it takes over when the last worker of the serving revision drains or ends",
            )
        self._standing_by = standing_by
        gauge = self._metrics.workers
        gauge.clear()
        for worker in workers:
            gauge.labels("serving" if worker.revision == serving else "standby", worker.revision).inc()
