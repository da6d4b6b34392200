"""Plays a recording: the tokens that another engine generated, at the times at which it did.

A request is recognised by its prompt's tokens, then by the recorded request's id in its ``X-Request-Id`` header. Of
several recorded answers to a prompt the one with the same seed is played, else they take turns.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from blake3 import blake3

from penstock.schemas.tokens import Logprob
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence

LONGEST_WAIT_S = 0.005  # then new requests are looked at


class Answer(NamedTuple):
    """One recorded choice. ``due_s``: of each token, seconds after the engine began with the request."""

    tokens: Seq[int]
    due_s: Seq[float]
    logprobs: Seq[Logprob] = ()


class Played(NamedTuple):
    """A recorded request: one answer for each choice."""

    id: str
    prompt: bytes  # token ids, packed u32
    seed: int
    answers: tuple[Answer, ...]


class Playing(NamedTuple):
    """A sequence that plays ``answer``, which began at ``began`` of the player's clock. None: it is not recorded."""

    answer: Answer | None
    began: float


class Player:
    """
    Args:
        speedup: how many times faster than recorded; 0: without waiting.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        recorded: Iterable[Played],
        *,
        speedup: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._by_prompt: dict[bytes, list[Played]] = {}
        self._by_id: dict[str, Played] = {}
        self._turns: dict[bytes, int] = {}
        self._speedup = speedup
        self._clock = clock
        self._sleep = sleep
        for each in recorded:
            self._by_prompt.setdefault(_digest(each.prompt), []).append(each)
            self._by_id[each.id] = each

    def hold(self, plan: Seq[ScheduledSequence]) -> list[ScheduledSequence]:
        """The sequences of a plan whose token is not due yet. If those are all, it waits for the first, or a while."""
        now = self._clock()
        waiting: list[ScheduledSequence] = []
        first = LONGEST_WAIT_S
        for scheduled in plan:
            sequence = scheduled.sequence
            playing = sequence.playing
            if not isinstance(playing, Playing):
                playing = sequence.playing = self._begin(sequence, now)
            answer, position = playing.answer, sequence.output_len
            if answer is None or not scheduled.samples or not self._speedup or position >= len(answer.tokens):
                continue
            left = playing.began + answer.due_s[position] / self._speedup - now
            if left > 0:
                waiting.append(scheduled)
                first = min(first, left)
        if waiting and len(waiting) == len(plan):
            self._sleep(first)
        return waiting

    def _begin(self, sequence: Sequence, now: float) -> Playing:
        answer = self._find(sequence)
        if answer is None:
            return Playing(None, now)
        position = min(sequence.output_len, len(answer.tokens))
        before = answer.due_s[position - 1] / self._speedup if position and self._speedup else 0.0
        return Playing(answer, now - before)

    def _find(self, sequence: Sequence) -> Answer | None:
        prompt = _digest(pack_tokens(sequence.tokens[: sequence.prompt_len]))
        answers = self._by_prompt.get(prompt)
        if answers is None:
            named = self._by_id.get(sequence.client_request_id)
            answers = [named] if named is not None else []
        answers = [each for each in answers if sequence.choice < len(each.answers)]
        if not answers:
            return None
        same = [each for each in answers if each.seed == sequence.sampling.seed]
        named = next((each for each in same or answers if each.id == sequence.client_request_id), None)
        if named is None:
            turn = self._turns[prompt] = self._turns.get(prompt, -1) + 1
            named = same[0] if same else answers[turn % len(answers)]
        return named.answers[sequence.choice]


def recorded_token(sequence: Sequence) -> tuple[int, Logprob | None] | None:
    """The next token of a sequence that plays, and its log-probabilities, if those were recorded; None: none."""
    playing = sequence.playing
    if not isinstance(playing, Playing) or playing.answer is None:
        return None
    answer, position = playing.answer, sequence.output_len
    if position >= len(answer.tokens):
        return None
    return answer.tokens[position], answer.logprobs[position] if position < len(answer.logprobs) else None


def is_played(scheduled: ScheduledSequence) -> bool:
    """Whether the recording says how long its step takes."""
    playing = scheduled.sequence.playing
    return isinstance(playing, Playing) and playing.answer is not None


def _digest(prompt: bytes) -> bytes:
    return blake3(prompt).digest(length=16)
