"""One sequence in an external engine, and the updates that its follower reports."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from penstock.schemas.done import Usage
from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.engine_protocol import MediaSpan, Scored, SequenceRequest
from penstock.workers.engines.external.runtime import EngineFailed, EngineRuntime

MISSING = -9999.0  # log-probability of a token for which the engine returned none; the API's value for "very unlikely"
NO_REASON = "the engine ended the output without a reason"


class Token(NamedTuple):
    """One new token; fields as in ``penstock.workers.engines.engine_protocol.Output``."""

    token: int
    finish: str = ""
    logprob: Logprob | None = None
    stop_token: int | None = None


class SequenceFailure(NamedTuple):
    """The sequence ended with an error of its own instead of a last token."""

    code: str
    message: str


def last_token(
    new: list[Token], finish: str, stop_token: int | None = None
) -> tuple[list[Token], SequenceFailure | None]:
    """End an output with the last of its new tokens; without new tokens, it fails.

    Args:
        stop_token: default: the last one, if it was stopped.
    """
    if not new:
        return [], SequenceFailure(Code.engine_error, f"the engine ended the output ({finish}) without a last token")
    token = new[-1]
    stopped = (token.token if stop_token is None else stop_token) if finish == "stop" else None
    return [*new[:-1], token._replace(finish=finish, stop_token=stopped)], None


def logprob_at(entries: Seq[Any] | None, at: int, token: int, top: int | None) -> Logprob | None:
    """The log-probability of a token in the engine's list; None if ``top`` is None: none was requested."""
    if top is None:
        return None
    return logprob_of(entries[at], token, top) if entries and 0 <= at < len(entries) else Logprob(MISSING)


def logprob_of(entry: Any, token: int, top: int) -> Logprob:
    """Convert one entry of the engine's list: a number, or a mapping of token id to an object with ``logprob``."""
    if not isinstance(entry, Mapping):
        return Logprob(float(entry))
    values = {int(token_id): float(value.logprob) for token_id, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: -pair[1])[:top]
    return Logprob(values.get(token, MISSING), tuple(best))


def scores(entries: Seq[Any], prompt: Seq[int], first: int, top: int) -> list[Logprob]:
    """Log-probabilities of the prompt's tokens from ``first`` on.

    Args:
        entries: for each prompt token but the first, token id → object with ``logprob`` and ``rank``.
        top: number of alternatives per token.
    Returns: an empty list if entries are missing: they could not be assigned to tokens.
    """
    if len(entries) < len(prompt) - 1:
        return []
    return [_score(entries[at - 1], prompt[at], top) for at in range(first, len(prompt))]


def _score(entry: Mapping[int, Any], token: int, top: int) -> Logprob:
    values = {int(token_id): float(value.logprob) for token_id, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: -pair[1])[:top]
    own = entry.get(token)
    return Logprob(MISSING, tuple(best)) if own is None else Logprob(float(own.logprob), tuple(best), own.rank or 0)


def collapse(tokens: Seq[int], spans: Seq[MediaSpan], placeholder: int) -> list[int]:
    """The tokens with a single placeholder for each medium."""
    out: list[int] = []
    at = 0
    for span in spans:
        out += [*tokens[at : span.position], placeholder]
        at = span.position + span.tokens
    return [*out, *tokens[at:]]


log = structlog.get_logger("engine")


A = TypeVar("A")
C = TypeVar("C")


class ActiveSequence(Generic[C]):
    """One sequence.

    ``started``, ``request``, ``generated`` and ``stale`` belong to the engine thread, the rest to the loop thread;
    ``cancelled`` is set once, by either.

    Args:
        call: what the adapter needs to call its engine for this sequence.
    """

    __slots__ = (
        "call",
        "cancelled",
        "generated",
        "key",
        "pin",
        "prompt",
        "prompt_len",
        "request",
        "responded",
        "score",
        "scored_top",
        "stale",
        "started",
        "task",
        "trace",
    )

    def __init__(self, request: SequenceRequest, call: C) -> None:
        self.call = call
        self.request = request
        self.key = request.key
        self.prompt = request.prompt
        self.prompt_len = len(request.prompt)
        self.score = request.score if request.score < len(request.prompt) else 0  # 0: nothing (more) to score
        self.scored_top = request.sampling.prompt_logprobs or 0
        self.pin = request.pin
        self.trace = request.trace
        self.generated: list[int] = []  # tokens that were returned
        self.stale = False  # ``call`` is of another root, or lacks ``generated``
        self.started = False  # its ``Started`` has been returned
        self.responded = False  # the engine has produced a first output
        self.cancelled = False  # its outputs are discarded
        self.task: asyncio.Task[None] | None = None

    def first_output(self, cached: Any) -> int | None:
        """Cached tokens of its prompt, as the engine reports with the first output; None: this is a later output."""
        if self.responded:
            return None
        self.responded = True
        return min(max(0, int(cached or 0)), self.prompt_len)

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
    ``usage``: set on the last, where a server counted.
    """

    sequence: ActiveSequence[Any]
    cached: int | None = None
    tokens: Seq[Token] = ()
    failure: SequenceFailure | None = None
    opaque: bytes | None = None
    scored: Scored | None = None
    measured: Mapping[str, float] | None = None
    handed: bool = False
    usage: Usage | None = None


class Follower(Generic[A, C]):
    """What the followers of all engines share: each submits sequences and queues what becomes of them.

    Belongs to the loop thread.
    """

    def __init__(self, runtime: EngineRuntime[A]) -> None:
        self._llm = runtime.llm
        self._api = runtime.api
        self._loop = runtime.loop
        self._emit = runtime.inbox.put
        self._broken = False

    def launch(self, sequence: ActiveSequence[C]) -> None:
        """Submit a sequence."""
        if not sequence.cancelled and not self._broken:
            sequence.task = self._loop.task(self._follow(sequence), f"sequence {sequence.key!r:.60}")

    async def _follow(self, sequence: ActiveSequence[C]) -> None:
        """Submit a sequence and follow its outputs."""
        raise NotImplementedError

    def abort(self, sequence: ActiveSequence[C]) -> None:
        """Abort a sequence: engines abort requests whose stream is no longer iterated, in any phase."""
        if sequence.task is not None:
            sequence.task.cancel()

    async def stop(self, sequences: Seq[ActiveSequence[C]]) -> None:
        """Abort sequences, and return once nothing more comes of them."""
        tasks = [each.task for each in sequences if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, check: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Check the engine periodically, since it can fail while it has no requests. Call it from any thread.

        Args:
            check: raises an error if the engine has failed.
        """

        async def watch() -> None:
            while not self._broken:
                await asyncio.sleep(every_s)
                try:
                    await check()
                except Exception as error:
                    self.broken(error)

        self._loop.post(lambda: self._loop.task(watch(), "health"))

    def _fail(self, sequence: ActiveSequence[C], code: Code, message: str) -> None:
        """End a sequence with an error of its own."""
        self._emit(SequenceUpdate(sequence, failure=SequenceFailure(code, message)))

    def _failed(self, sequence: ActiveSequence[C], error: Exception, code: Code | None) -> None:
        """Report that a call for a sequence has failed.

        Args:
            code: of the sequence's error; None: the whole engine has failed.
        """
        if code is None:
            self.broken(error)
        elif not sequence.cancelled:
            self._fail(sequence, code, str(error) or type(error).__name__)

    def broken(self, error: BaseException) -> None:
        """The engine has failed, and with it all of its sequences."""
        self._broken = True
        self._emit(EngineFailed(error))
