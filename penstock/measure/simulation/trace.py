"""Traces of requests: when they arrive, how long they are, and which prefixes they share.

A trace names the prompt in units of ``block_tokens`` (512 in Mooncake's files): equal ids at the same place mean equal
prefixes. ``RequestTrace.requests`` cuts it into the blocks of an engine.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.schemas.requests import Priority

MOONCAKE_BLOCK_TOKENS = 512
UNIT_TOKENS = 64  # of prompt per id, in generated traces


class TraceError(Exception):
    """A trace cannot be read."""


class TraceRow(msgspec.Struct, frozen=True):
    """One request, as a line of Mooncake's JSON Lines. ``timestamp`` in ms."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    # Extensions.
    media: int = 0  # digest of an image, 0: none
    priority: Priority = Priority.interactive
    tenant: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """A request of a simulation. ``keys`` of its full prompt blocks."""

    index: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]
    media: int = 0
    priority: Priority = Priority.interactive
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    name: str
    rows: tuple[TraceRow, ...]  # sorted by timestamp
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def requests(self, block_size: int, speed: float = 1.0) -> list[Request]:
        """The requests, cut into blocks of an engine. With ``speed`` 2 they arrive twice as fast."""
        if self.block_tokens % block_size:
            raise TraceError(
                f"trace {self.name}: blocks of {self.block_tokens} tokens cannot be cut into blocks of {block_size}"
            )
        cut = self.block_tokens // block_size
        start = self.rows[0].timestamp if self.rows else 0.0
        requests = []
        for index, row in enumerate(self.rows):
            full = row.input_length // block_size
            ids = row.hash_ids
            keys = ids[:full] if cut == 1 else [unit * cut + part for unit in ids for part in range(cut)][:full]
            arrival = round((row.timestamp - start) / speed * 1e6)
            requests.append(
                Request(index, arrival, row.input_length, row.output_length, keys, row.media, row.priority, row.tenant)
            )
        return requests

    def limited(self, requests: int) -> "RequestTrace":
        """The first ``requests``; 0: all."""
        return replace(self, rows=self.rows[:requests]) if requests else self


class Multipliers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to stretch a trace: settings that several commands have."""

    prefix_multiplier: Annotated[float, Meta(gt=0, description="of a trace: length of shared prefixes")] = 1.0
    root_multiplier: Annotated[int, Meta(ge=1, description="of a trace: copies of the tree of prefixes")] = 1
    prompt_multiplier: Annotated[float, Meta(gt=0, description="of a trace: length after shared prefixes")] = 1.0
    max_prompt_tokens: Annotated[int, Meta(ge=0, description="of a trace: leave longer prompts out; 0: none")] = 0


def read(path: Path) -> RequestTrace:
    """Read a trace in Mooncake's format.

    Raises:
        TraceError: with the line that is wrong.
    """
    decode = msgspec.json.Decoder(TraceRow).decode
    rows = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = decode(line)
                except msgspec.DecodeError as error:
                    raise TraceError(f"{path}:{number}: {error}") from None
                if row.input_length < 1 or row.output_length < 1:
                    raise TraceError(f"{path}:{number}: input_length and output_length must be at least 1")
                rows.append(row)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not rows:
        raise TraceError(f"{path}: no requests")
    return RequestTrace(path.stem, tuple(sorted(rows, key=lambda row: row.timestamp)))


def multiplied(trace: RequestTrace, by: Multipliers) -> RequestTrace:
    """Stretch prefixes and prompts, and grow more trees of prefixes, among which the requests are dealt out in turn."""
    if all(getattr(by, name) == getattr(Multipliers(), name) for name in Multipliers.__struct_fields__):
        return trace
    counts = Counter(unit for row in trace.rows for unit in row.hash_ids)
    namer = _Namer()
    rows = []
    for turn, row in enumerate(trace.rows):
        shared = 0
        while shared < len(row.hash_ids) and counts[row.hash_ids[shared]] > 1:
            shared += 1
        shared_tokens = min(shared * trace.block_tokens, row.input_length)
        units = [
            namer(turn % by.root_multiplier, row.hash_ids[at], part)
            for at in range(shared)
            for part in range(round((at + 1) * by.prefix_multiplier) - round(at * by.prefix_multiplier))
        ]
        own_tokens = max(1, round((row.input_length - shared_tokens) * by.prompt_multiplier))
        tokens = len(units) * trace.block_tokens + own_tokens
        if by.max_prompt_tokens and tokens > by.max_prompt_tokens:
            continue
        missing = math.ceil(tokens / trace.block_tokens) - len(units)
        units += [namer(turn, None, part) for part in range(missing)]
        rows.append(msgspec.structs.replace(row, input_length=tokens, hash_ids=tuple(units)))
    if not rows:
        raise TraceError(f"trace {trace.name}: no prompt has at most {by.max_prompt_tokens} tokens")
    return replace(trace, rows=tuple(rows))


class _Namer:
    """Numbers for units: equal arguments, equal number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | None, int], int] = {}

    def __call__(self, root: int, unit: int | None, part: int) -> int:
        return self._numbers.setdefault((root, unit, part), len(self._numbers))
