"""What a scheduler reports besides tokens: admissions, failures, measurements of single sequences, and totals. Pure."""

from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.base import Failure, Measured, Output, Started
from penstock.workers.engines.core.config import SequenceLimits
from penstock.workers.engines.core.sequence import Sequence


class StepReport:
    """Events of sequences since the last step was committed.

    Attributes:
        preemptions, hit_tokens, prompt_tokens: totals, see ``EngineStats``.
    """

    def __init__(self) -> None:
        self.preemptions = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self._started: list[Started] = []
        self._failures: list[Failure] = []
        self._measured: list[Measured] = []

    def __bool__(self) -> bool:
        """Whether there is something that the next commit must return."""
        return bool(self._started or self._failures)

    def admitted(self, sequence: Sequence, cached: int) -> None:
        """A sequence was admitted with this many cached tokens; only its first admission is reported."""
        if sequence.started:
            return
        sequence.started = True
        sequence.cached = min(cached, sequence.prompt_len)
        self.hit_tokens += sequence.cached
        self.prompt_tokens += sequence.prompt_len
        self._started.append(Started(sequence.key, sequence.cached))

    def preempted(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._measured.append(Measured(sequence.key, {}, preemptions=1))

    def ended(self, sequence: Sequence, token: int, logprob: Logprob | None, limits: SequenceLimits) -> Output:
        """The last output of a sequence. If the pool is too small for it to continue, it fails as well."""
        if token in sequence.stops and len(sequence.tokens) > sequence.stoppable:
            return Output(sequence.key, token, "stop", logprob, token)
        if len(sequence.tokens) >= min(sequence.prompt_len + sequence.stop.max_tokens, limits.max_model_len):
            return Output(sequence.key, token, "length", logprob)
        # Its next token needs more blocks than there are, even if it had the pool to itself.
        text = f"prompt and output outgrew the worker: {limits.pool_limit}"
        self._failures.append(Failure(sequence.key, Code.out_of_blocks, text))
        return Output(sequence.key, token, "", logprob)

    def take(self) -> tuple[list[Started], list[Failure], list[Measured]]:
        """All events since the last call."""
        taken = self._started, self._failures, self._measured
        self._started, self._failures, self._measured = [], [], []
        return taken
