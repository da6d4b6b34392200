"""Generated traces whose requests share prefixes in different ways. Lengths are log-normal, arrivals Poisson.

Each shape is a function of a random generator, a number of requests and a rate; equal seeds give equal traces.
"""

import math
import random
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from penstock.measure.simulation.trace import UNIT_TOKENS, RequestTrace, TraceRow
from penstock.schemas.requests import Priority

_MAX_PROMPT = 100_000


class TraceWorkload(NamedTuple):
    """
    Attributes:
        saturation: requests per second and worker at which round robin saturates 8 simulated workers of 16,384 blocks.
    """

    rows: Callable[[random.Random, int, float], list[TraceRow]]
    about: str
    saturation: float


def generate(name: str, seed: int, requests: int, rate: float) -> RequestTrace:
    """
    Args:
        rate: requests per second.

    Raises:
        KeyError: there is no such workload.
    """
    rows = WORKLOADS[name].rows(random.Random(f"{name} {seed}"), requests, rate)
    return RequestTrace(name, tuple(sorted(rows, key=lambda row: row.timestamp)[:requests]), UNIT_TOKENS)


class _Units:
    """New ids for prompt units."""

    def __init__(self) -> None:
        self._ids = count()

    def new(self, tokens: float) -> list[int]:
        return [next(self._ids) for _ in range(max(1, round(tokens / UNIT_TOKENS)))]


class _Conversation:
    """A prompt that grows turn by turn: each turn sends everything before it again."""

    def __init__(self, units: _Units, prefix: list[int]) -> None:
        self._units = units
        self._ids = list(prefix)
        self._tokens = len(prefix) * UNIT_TOKENS

    def turn(self, at_ms: float, added: float, output: float, most_output: int = 2000) -> TraceRow | None:
        """The next request, with ``added`` tokens of prompt; None: the prompt would be too long."""
        tokens = self._tokens + max(8, round(added))
        if tokens > _MAX_PROMPT:
            return None
        answer = min(most_output, max(1, round(output)))
        del self._ids[self._tokens // UNIT_TOKENS :]  # a block that was not full differs from now on
        missing = -(-tokens // UNIT_TOKENS) - len(self._ids)
        self._ids += self._units.new(missing * UNIT_TOKENS) if missing > 0 else []
        self._tokens = tokens + answer
        return TraceRow(at_ms, tokens, answer, tuple(self._ids))


class _Turns(NamedTuple):
    """A kind of conversation. Lengths are (median, sigma) of log-normal distributions, in tokens."""

    prefixes: int
    prefix_tokens: tuple[int, int]  # smallest, largest
    turns: float  # mean
    added: tuple[float, float]
    output: tuple[float, float]
    pause_s: float
    hot: float = 0.0  # share of conversations with the first prefix, beyond their common share

    def rows(self, rng: random.Random, requests: int, rate: float) -> list[TraceRow]:
        units = _Units()
        prefixes = [units.new(rng.uniform(*self.prefix_tokens)) for _ in range(self.prefixes)]
        weights = [1 / (rank + 1) for rank in range(self.prefixes)]
        span = requests / rate * 1e3
        rows: list[TraceRow] = []
        while len(rows) < requests:
            at = rng.uniform(0, span)
            prefix = prefixes[0] if rng.random() < self.hot else rng.choices(prefixes, weights)[0]
            conversation = _Conversation(units, prefix)
            for _ in range(1 + int(rng.expovariate(1 / (self.turns - 1))) if self.turns > 1 else 1):
                row = conversation.turn(at, _length(rng, *self.added), _length(rng, *self.output))
                if row is None or at > span:
                    break
                rows.append(row)
                at += row.output_length * 15 + rng.expovariate(1 / self.pause_s) * 1e3
        return rows


def _length(rng: random.Random, median: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(median), sigma)


def _documents(rng: random.Random, requests: int, rate: float) -> list[TraceRow]:
    units = _Units()
    span = requests / rate * 1e3
    rows: list[TraceRow] = []
    while len(rows) < requests:
        at = rng.uniform(0, span)
        document = units.new(min(60_000, _length(rng, 12_000, 0.7)))
        for _ in range(rng.randint(1, 6)):
            if at > span:
                break
            question = _Conversation(units, document)
            row = question.turn(at, _length(rng, 60, 0.5), _length(rng, 180, 0.6))
            if row is not None:
                rows.append(row)
            at += rng.expovariate(1 / 20) * 1e3
    return rows


def _mixed(rng: random.Random, requests: int, rate: float) -> list[TraceRow]:
    units, rows = _Units(), []
    for _ in range(requests):
        long = rng.random() < 0.12
        tokens = rng.uniform(15_000, 60_000) if long else _length(rng, 600, 0.9)
        row = _Conversation(units, []).turn(rng.uniform(0, requests / rate * 1e3), tokens, _length(rng, 150, 0.9))
        if row is not None:
            rows.append(row)
    return rows


def _bursts(rng: random.Random, requests: int, rate: float) -> list[TraceRow]:
    """Chats, four fifths of which come in a tenth of the time: bursts of 4 s every 40 s."""
    rows = []
    for row in _CHAT.rows(rng, requests, rate):
        at = row.timestamp
        if rng.random() < 0.8:
            at = at // 40e3 * 40e3 + at % 40e3 / 10
        rows.append(TraceRow(at, row.input_length, row.output_length, row.hash_ids))
    return rows


def _images(rng: random.Random, requests: int, rate: float) -> list[TraceRow]:
    """Single questions, two of three with an image; few images are asked about often."""
    units, rows = _Units(), []
    for _ in range(requests):
        at = rng.uniform(0, requests / rate * 1e3)
        image = 1 + int(min(1e6, rng.paretovariate(0.6))) if rng.random() < 2 / 3 else 0
        tokens = _length(rng, 1500, 0.9) + (576 if image else 0)
        row = _Conversation(units, []).turn(at, tokens, _length(rng, 150, 0.7))
        assert row is not None
        rows.append(TraceRow(row.timestamp, row.input_length, row.output_length, row.hash_ids, image))
    return rows


def _classes(rng: random.Random, requests: int, rate: float) -> list[TraceRow]:
    """Chats, and as many questions about documents that come in bursts: for 8 s every 90 s."""
    chats = _CHAT.rows(rng, requests // 2, rate / 2)
    fresh = 1 + max(max(row.hash_ids) for row in chats)
    rows = list(chats)
    for row in _documents(rng, requests - len(chats), rate / 2):
        at = row.timestamp // 90e3 * 90e3 + row.timestamp % 90e3 * 8 / 90
        ids = tuple(fresh + each for each in row.hash_ids)
        rows.append(TraceRow(at, row.input_length, row.output_length, ids, priority=Priority.batch))
    return rows


def _tenants(rng: random.Random, requests: int, rate: float) -> list[TraceRow]:
    """Nothing is shared. Four of five requests are those of one tenant, and come in bursts: for 10 s every 40 s."""
    rows = []
    for row in _UNIQUE.rows(rng, requests, rate):
        tenant, at = rng.choices("abc", (8, 1, 1))[0], row.timestamp
        if tenant == "a":
            at = at // 40e3 * 40e3 + at % 40e3 / 4
        rows.append(TraceRow(at, row.input_length, row.output_length, row.hash_ids, tenant=tenant))
    return rows


_UNIQUE = _Turns(1, (64, 64), 1, (5000, 1.0), (200, 0.9), 1)
_CHAT = _Turns(8, (500, 4000), 6, (500, 1.3), (400, 0.7), 8)
WORKLOADS = {
    "chat": TraceWorkload(_CHAT.rows, "conversations of about 6 turns behind 8 system prompts", 7.0),
    "agents": TraceWorkload(
        _Turns(40, (1000, 7000), 8, (1500, 1.1), (90, 0.9), 4).rows, "tool loops over long, growing contexts", 1.8
    ),
    "documents": TraceWorkload(_documents, "1 to 6 questions about each of many long documents", 2.3),
    "unique": TraceWorkload(_UNIQUE.rows, "nothing is shared", 4.1),
    "bursts": TraceWorkload(_bursts, "chats that come in bursts", 1.9),
    "hot": TraceWorkload(
        _Turns(40, (3000, 9000), 2, (1500, 1.0), (200, 0.9), 8, 0.8).rows, "80 % behind one system prompt", 8.4
    ),
    "mixed": TraceWorkload(_mixed, "short prompts among long ones, nothing is shared", 6.5),
    "classes": TraceWorkload(_classes, "interactive chats beside documents of class batch", 0.8),
    "tenants": TraceWorkload(_tenants, "three tenants, of which one asks most, in bursts", 2.0),
    "images": TraceWorkload(_images, "single questions, two of three with an image", 14.0),
}
