"""One sequence on its way through an external engine, and the updates that its follower reports."""

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from penstock.workers.engines.base import Scored, SequenceRequest
from penstock.workers.engines.external.outputs import SequenceFailure, Token
from penstock.workers.engines.external.prompt_logprobs import scores

log = structlog.get_logger("engine")


C = TypeVar("C")


class ActiveSequence(Generic[C]):
    """One sequence.

    ``started`` belongs to the engine thread, the rest to the loop thread; ``cancelled`` is set once, by either.

    Args:
        call: what the adapter needs to call its engine for this sequence.
    """

    __slots__ = (
        "call",
        "cancelled",
        "hold",
        "key",
        "prompt",
        "prompt_len",
        "responded",
        "score",
        "scored_top",
        "started",
        "task",
        "trace",
    )

    def __init__(self, request: SequenceRequest, call: C) -> None:
        self.call = call
        self.key = request.key
        self.prompt = request.prompt
        self.prompt_len = len(request.prompt)
        self.score = request.score if request.score < len(request.prompt) else 0  # 0: nothing (more) to score
        self.scored_top = request.sampling.prompt_logprobs or 0
        self.hold = request.hold
        self.trace = request.trace
        self.started = False  # its ``Started`` has been returned
        self.responded = False  # the engine has produced a first output
        self.cancelled = False  # its outputs are discarded
        self.task: asyncio.Task[None] | None = None

    def scored(self, entries: Seq[Any] | None) -> Scored | None:
        """The prompt's log-probabilities, once: ``entries`` has one for each token but the first."""
        if not self.score or not entries:
            return None
        first, self.score = self.score, 0
        values = scores(entries, self.prompt, first, self.scored_top)
        if not values:
            log.warning("prompt_logprobs_incomplete", entries=len(entries), tokens=self.prompt_len)
            return None
        return Scored(self.key, first, values)


class SequenceUpdate(NamedTuple):
    """New outputs of one sequence. ``cached``: set on the first; ``opaque``: state for the next worker's engine.

    ``measured``: set on the last, if the request is traced. ``handed``: the next worker's engine draws its tokens.
    """

    sequence: ActiveSequence[Any]
    cached: int | None = None
    tokens: Seq[Token] = ()
    failure: SequenceFailure | None = None
    opaque: bytes | None = None
    scored: Scored | None = None
    measured: Mapping[str, float] | None = None
    handed: bool = False
