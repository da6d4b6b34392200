"""Plays a recording: the tokens that another engine generated, at the times at which it did.

A request is recognised by its prompt's tokens, then by the recorded request's id in its ``X-Request-Id`` header. Of
several recorded answers to a prompt the one with the same seed is played, else they take turns.
"""

import gzip
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from blake3 import blake3

from penstock.infra.bus.direct_get import parse_time
from penstock.schemas.done import Done, Outcome
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import Logprob, TokenBatch
from penstock.schemas.wire import pack_tokens, unpack_tokens
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence

LONGEST_WAIT_S = 0.005  # then new requests are looked at


class RecordedChoice(NamedTuple):
    """One recorded choice. ``due_s``: of each token, seconds after the engine began with the request."""

    tokens: Seq[int]
    due_s: Seq[float]
    logprobs: Seq[Logprob] = ()


class Played(NamedTuple):
    """A recorded request: one answer for each choice."""

    id: str
    prompt: bytes  # token ids, packed u32
    seed: int
    answers: tuple[RecordedChoice, ...]


class Playing(NamedTuple):
    """A sequence that plays ``answer``, which began at ``began`` of the player's clock. None: it is not recorded."""

    answer: RecordedChoice | None
    began: float


class Player:
    """
    Args:
        speedup: how many times faster than recorded; 0: without waiting.
        sleep: waits this many seconds.
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

    def _find(self, sequence: Sequence) -> RecordedChoice | None:
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


log = structlog.get_logger("engine")

FORMAT = "penstock-export"
VERSION = 2
_WANTED = (b'"stream":"TOKENS"', b'"stream":"DONE"', b'"stream":"REQUESTS"')


class _Header(msgspec.Struct):
    format: str
    version: int


class _Line(msgspec.Struct):
    stream: str
    time: str
    body: msgspec.Raw = msgspec.Raw()
    request: msgspec.Raw = msgspec.Raw()


_read_header = msgspec.json.Decoder(_Header).decode
_read_line = msgspec.json.Decoder(_Line).decode
_read_request = msgspec.json.Decoder(GenerateRequest).decode
_read_batch = msgspec.json.Decoder(TokenBatch).decode
_read_done = msgspec.json.Decoder(Done).decode

Stored = dict[tuple[str, int], list[tuple[float, int, int]]]  # by request and choice: (seconds, first, count)


def read_recording(path: str, vocab_size: int, *, skip_bad: bool = False) -> list[Played]:
    """The requests of an export that have ended with tokens, in the order in which they did.

    Args:
        skip_bad: leave damaged lines out, and what is after the damage of a compressed file.
    Raises:
        ValueError: it cannot be read, has none, or its tokens are not this vocabulary's.
    """
    requests: dict[str, GenerateRequest] = {}
    stored: Stored = {}
    ended: list[Done] = []
    bad: list[str] = []
    number = 0
    try:
        for number, line in enumerate(_lines(path), 1):
            try:
                _add(line, number, requests, stored, ended)
            except (msgspec.MsgspecError, ValueError) as error:
                if not skip_bad or number == 1:
                    hint = "; --skip-bad leaves damaged lines out" if number > 1 else ""
                    raise ValueError(f"--play {path}, line {number}: {error}{hint}") from None
                bad.append(f"line {number}: {error}")
    except (OSError, EOFError, zlib.error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        if not skip_bad or not number:
            raise ValueError(f"--play {path} cannot be read: {reason}") from error
        bad.append(f"after line {number}: {reason}")
    if bad:
        log.warning("recording_lines_skipped", file=path, lines=len(bad), first=bad[0])
    played = [read for event in ended if (read := _played(event, requests.get(event.request), stored)) is not None]
    if not played:
        raise ValueError(f"--play {path}: it has no answer to play; export whole requests, with their records")
    largest = max((max(answer.tokens, default=0) for each in played for answer in each.answers), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"--play {path}: its tokens go up to {largest}, and the model has {vocab_size}: name the recorded model's "
            "directory with --model"
        )
    return played


def _lines(path: str) -> Iterator[bytes]:
    with gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb") as file:
        yield from file


def _add(line: bytes, number: int, requests: dict[str, GenerateRequest], stored: Stored, ended: list[Done]) -> None:
    if number == 1:
        header = _read_header(line)
        if header.format != FORMAT or header.version > VERSION:
            raise ValueError(f"not an export of format {VERSION}: it is {header.format} {header.version}")
        return
    if not line.startswith(b'{"stream":"') or not any(name in line[:40] for name in _WANTED):
        return
    record = _read_line(line)
    body = bytes(record.body)
    if not body:
        return  # a message of another build
    if record.stream == "REQUESTS":
        request = _read_request(body)
        requests[request.id] = request
    elif record.stream == "TOKENS":
        at = parse_time(record.time) / 1e9
        for item in _read_batch(body).items:
            if item.choice >= 0 and item.tokens:
                stored.setdefault((item.request, item.choice), []).append((at, item.first, len(item.tokens) >> 2))
    elif b'"type":"done"' in body[:40]:
        event = _read_done(body)
        ended.append(event)
        text = bytes(record.request)
        if text and not text.isdigit() and event.request not in requests:  # a number is a line of REQUESTS
            requests[event.request] = _read_request(text)


def _played(event: Done, request: GenerateRequest | None, stored: Stored) -> Played | None:
    if request is None or not request.prompt or not any(choice.tokens for choice in event.choices):
        return None
    answers = tuple(
        _answer(event, choice, stored.get((event.request, index), [])) for index, choice in enumerate(event.choices)
    )
    return Played(event.request, request.prompt, request.sampling.seed, answers)


def _answer(event: Done, choice: Outcome, stored: list[tuple[float, int, int]]) -> RecordedChoice:
    """The choice with its times: from its token batches, else at equal steps to the end."""
    tokens, times = unpack_tokens(choice.tokens), event.timings
    count = len(tokens)
    start = times.started_ns or times.created_ns
    first = max(0.0, (times.first_token_ns - start) / 1e9) if times.first_token_ns else 0.0
    duration = max(first, (times.ended_ns - start) / 1e9) if times.ended_ns else first
    due = [first + (duration - first) * position / max(1, count - 1) for position in range(count)]
    if stored:
        began = min(stored)[0]
        latest = first
        for at, position, size in sorted(stored, key=lambda item: item[1]):
            latest = max(latest, first + at - began)
            due[position : position + size] = [latest] * len(due[position : position + size])
    return RecordedChoice(tokens, due, choice.logprobs)
