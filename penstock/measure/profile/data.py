"""The file of a profile: which points of a configuration are measured, their figures, and figures between them.

Points are kept as parallel arrays. Their names are those of NVIDIA Dynamo's profiler; its files have the arrays alone.
Between two prompt lengths, and between two levels of concurrency, TTFT and ITL are on a straight line. For a step whose
time grows with batch and context together, that is exact. Nothing is guessed beyond the points.
"""

import itertools
import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import Struct

from penstock.measure.simulation.engine import MAX_SEQUENCES, EngineSequence, SimulatedEngine, decode_ns
from penstock.measure.sweep.figures import RequestRecord

FILE = "profile.json"
SUGGESTION = "suggestion.yaml"  # of `penstock profile sla`, with a folder of its own for each profile
_SLUG = re.compile(r"[^a-z0-9]+")


class BadProfile(ValueError):
    """A file or folder that cannot be used as a profile; the text says why."""


class Setup(Struct, frozen=True, kw_only=True):
    """The configuration that was measured. A profile can be continued with an equal setup only.

    Attributes:
        gpus: number of GPUs of the endpoint.
        attention_dp: ranks with attention data parallelism; 1: none.
        osl: tokens per answer while decode was measured.
        max_context: longest prompt and answer together, tokens.
        max_kv_tokens: that the KV caches hold; 0: unknown, as when prefill alone is measured.
        max_batch: sequences that decode at once, at most; 0: unknown.
        up: flags of `penstock up` that start such an engine, without its number of workers.
    """

    model: str
    api: Literal["chat", "completions"]
    gpus: int
    attention_dp: int
    osl: int
    max_context: int
    max_kv_tokens: int
    max_batch: int
    up: str = ""

    def decode_point(self, isl: int, concurrency: int, itl_ms: float) -> "DecodePoint":
        """Of ``concurrency`` requests at once with prompts of ``isl`` tokens, in the middle of their answers."""
        context = isl + self.osl / 2
        return DecodePoint(
            isl=isl,
            concurrency=concurrency,
            kv_usage=round(min(1.0, context * concurrency / self.max_kv_tokens), 5),
            context=context,
            itl_ms=round(itl_ms, 4),
            throughput=round(concurrency / itl_ms * 1e3 / self.gpus, 3),
        )


class Prefill(Struct, frozen=True):
    """One entry per prompt length: tokens, TTFT in ms, prompt tokens per second and GPU."""

    prefill_isl: tuple[int, ...] = ()
    prefill_ttft: tuple[float, ...] = ()
    prefill_thpt_per_gpu: tuple[float, ...] = ()

    def added(self, isl: int, ttft_ms: float, throughput: float) -> "Prefill":
        """Return the arrays with a further point, ordered by length."""
        columns = (self.prefill_isl, self.prefill_ttft, self.prefill_thpt_per_gpu)
        rows = sorted({*zip(*columns, strict=True), (isl, ttft_ms, throughput)})
        return Prefill(*zip(*rows, strict=True))


class Decode(Struct, frozen=True):
    """One entry per prompt length and concurrency.

    Attributes:
        x_kv_usage: share of the KV cache in use, 0 to 1, at the middle of the answers.
        y_context_length: tokens of prompt and half an answer.
        z_itl: time per token while all requests decode, ms.
        z_thpt_per_gpu: output tokens per second and GPU in that time.
        decode_isl: prompt tokens of the point.
        decode_concurrency: sequences that decoded at once.
    """

    x_kv_usage: tuple[float, ...] = ()
    y_context_length: tuple[float, ...] = ()
    z_itl: tuple[float, ...] = ()
    z_thpt_per_gpu: tuple[float, ...] = ()
    decode_isl: tuple[int, ...] = ()
    decode_concurrency: tuple[int, ...] = ()
    max_kv_tokens: int = 0

    def added(self, point: "DecodePoint") -> "Decode":
        """Return the arrays with a further point, ordered by prompt length and concurrency."""
        columns = (
            self.decode_isl, self.decode_concurrency, self.x_kv_usage, self.y_context_length, self.z_itl,
            self.z_thpt_per_gpu,
        )  # fmt: skip
        own = (point.isl, point.concurrency, point.kv_usage, point.context, point.itl_ms, point.throughput)
        isl, concurrency, usage, context, itl, throughput = zip(
            *sorted({*zip(*columns, strict=True), own}), strict=True
        )
        return Decode(usage, context, itl, throughput, isl, concurrency, self.max_kv_tokens)


class DecodePoint(Struct, frozen=True, kw_only=True):
    """One entry of ``Decode``."""

    isl: int
    concurrency: int
    kv_usage: float  # share of the KV cache, 0 to 1
    context: float
    itl_ms: float
    throughput: float


class Profile(Struct, frozen=True, kw_only=True):
    """``profile.json``. ``url`` and ``warnings`` are for its reader."""

    setup: Setup
    url: str
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    warnings: tuple[str, ...] = ()
    schema: Literal[1] = 1


def save(folder: Path, profile: Profile) -> None:
    """Write the file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{FILE}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    partial.replace(folder / FILE)


def file_of(configuration: str) -> str:
    """The profile of a configuration, in the folder of ``penstock profile sla``."""
    return f"{_SLUG.sub('-', configuration)}/{FILE}"


def load(folder: Path, role: str = "") -> Profile:
    """Read a profile: a file, a folder of ``penstock profile endpoint``, or one of ``penstock profile sla``.

    Args:
        role: of the workers, for a suggestion whose pools have profiles of their own.
    Raises:
        BadProfile: no profile, one of another schema, or one whose arrays differ in length.
    """
    path = folder if folder.suffix == ".json" else folder / FILE
    if not path.exists() and (folder / SUGGESTION).exists():
        path = folder / _suggested(folder / SUGGESTION, role)
        if not path.exists():
            raise BadProfile(f"{folder} is of measured profiles and has none itself: name those of `--data`")
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        raise BadProfile(f"{path}: there is none; `penstock profile endpoint --out {folder}` makes one") from None
    except (OSError, msgspec.DecodeError) as error:
        raise BadProfile(f"{path}: {error}") from None
    for part in (profile.prefill, profile.decode):
        columns = {len(value) for name in part.__struct_fields__ if isinstance(value := getattr(part, name), tuple)}
        if len(columns) != 1:
            raise BadProfile(f"{path}: the arrays of {type(part).__name__.lower()} differ in length")
    return profile


class _Pool(Struct):
    role: str
    configuration: str


class _Best(Struct):
    pools: tuple[_Pool, ...]


class _Suggestion(Struct):
    best: _Best


def _suggested(path: Path, role: str) -> str:
    """The file, beside a suggestion, of its workers of a role; of any role if all are alike."""
    try:
        pools = msgspec.convert(yaml.safe_load(path.read_bytes()), _Suggestion).best.pools
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise BadProfile(f"{path}: {error}") from None
    by_role = {pool.role: pool.configuration for pool in pools}
    if role in by_role:
        return file_of(by_role[role])
    if len(set(by_role.values())) == 1:
        return file_of(pools[0].configuration)
    names = ", ".join(str(path.parent / file_of(name)) for name in by_role.values())
    raise BadProfile(
        f"{path.parent} suggests {' and '.join(by_role)} workers, no {role or 'others'}; name one: {names}"
    )


def between(x: float, at: Sequence[float], values: Sequence[float]) -> float | None:
    """Interpolate linearly between the two nearest points. None: ``x`` is outside the range.

    Args:
        at: ascending, without repetitions.
    """
    if not at or not at[0] <= x <= at[-1]:
        return None
    right = bisect_left(at, x)
    if at[right] == x:
        return values[right]
    left = right - 1
    share = (x - at[left]) / (at[right] - at[left])
    return values[left] + share * (values[right] - values[left])


def ttft_at(data: Prefill, isl: int) -> float | None:
    """TTFT of a prompt of ``isl`` tokens, ms; None: such prompts were not measured."""
    return between(isl, data.prefill_isl, data.prefill_ttft)


class DecodeSurface:
    """ITL by context length and concurrency."""

    def __init__(self, data: Decode) -> None:
        self._lines: dict[float, tuple[list[int], list[float]]] = {}
        rows = zip(data.y_context_length, data.decode_concurrency, data.z_itl, strict=True)
        for context, concurrency, itl in sorted(rows):
            levels, values = self._lines.setdefault(context, ([], []))
            levels.append(concurrency)
            values.append(itl)
        self.contexts = sorted(self._lines)

    def itl(self, context: float, concurrency: float) -> float | None:
        """ITL in ms. None: outside the measured range at one of the two nearest contexts."""
        near = self._near(context)
        values = [between(concurrency, *self._lines[each]) for each in near]
        measured = [value for value in values if value is not None]
        return between(context, near, measured) if len(measured) == len(near) else None

    def levels(self, context: float) -> tuple[int, int]:
        """Lowest and highest concurrency with a figure at this context; (0, 0): there is none."""
        lines = [self._lines[each][0] for each in self._near(context)]
        if not lines:
            return 0, 0
        low, high = max(line[0] for line in lines), min(line[-1] for line in lines)
        return (low, high) if low <= high else (0, 0)

    def _near(self, context: float) -> list[float]:
        """The nearest measured contexts on both sides, or the one that is equal."""
        if not self.contexts or not self.contexts[0] <= context <= self.contexts[-1]:
            return []
        right = bisect_left(self.contexts, context)
        left = right if self.contexts[right] == context else right - 1
        return self.contexts[left : right + 1]


SHORTEST = 100  # tokens of the shortest prompt
RESERVE = 512  # tokens of the context that the longest prompt of prefill leaves
_STEADY = 0.1  # least share of the tokens that must come while all requests decode


def spaced(low: int, high: int, count: int) -> list[int]:
    """Up to ``count`` whole numbers from ``low`` to ``high``, evenly spaced and with both ends."""
    if count < 2 or high <= low:
        return [low] if high >= low else []
    return sorted({low + round((high - low) * number / (count - 1)) for number in range(count)})


def prefill_lengths(max_context: int, granularity: int) -> list[int]:
    """Prompt lengths, tokens; empty: the context has no room for the shortest."""
    return spaced(SHORTEST, max_context - RESERVE, granularity)


def decode_lengths(max_context: int, osl: int, granularity: int) -> list[int]:
    """Prompt lengths whose answers of ``osl`` tokens fit into the context, tokens."""
    return spaced(SHORTEST, max_context - osl, granularity)


def concurrencies(length: int, max_kv_tokens: int, most: int, granularity: int, attention_dp: int = 1) -> list[int]:
    """Requests at once whose ``length`` tokens each all fit into the KV cache; the same number for each rank."""
    per_rank = min(most, max_kv_tokens // length) // attention_dp
    return [each * attention_dp for each in spaced(1, per_rank, granularity)]


def kv_tokens(max_batch: int, isl: int, osl: int) -> int:
    """Tokens that the KV cache must hold if ``max_batch`` such requests decode at once."""
    return max_batch * (isl + osl)


def prefill_throughput(isl: int, ttft_ms: float, gpus: int, attention_dp: int = 1) -> float:
    """Prompt tokens per second and GPU, one prompt on each rank at a time."""
    return isl / (ttft_ms / 1e3) / gpus * attention_dp


def ttft_of(records: Sequence[RequestRecord]) -> float | None:
    """Median TTFT, ms; None: nothing was streamed."""
    measured = [record.ttft_ms for record in records if record.ttft_ms > 0]
    return statistics.median(measured) if measured else None


def steady_itl(records: Sequence[RequestRecord]) -> float | None:
    """Time per token while all requests decode, ms; None: they never did, or for too few tokens.

    It starts when the last request has its first text and ends when the first one has its last, so that prompts which
    are still computed, and a batch that has begun to shrink, are not part of it.
    """
    if not records or any(record.error or record.ttft_ms < 0 or not record.gaps_ms for record in records):
        return None
    times = [list(itertools.accumulate(record.gaps_ms, initial=record.sent_ms + record.ttft_ms)) for record in records]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    seconds = tokens = 0.0
    for record, seen in zip(records, times, strict=True):
        inside = [time for time in seen if begin <= time <= end]
        if len(inside) < 2:
            return None
        seconds += inside[-1] - inside[0]
        # A read may carry several tokens: they are spread evenly over the answer's reads.
        tokens += (len(inside) - 1) * (answered(record) - 1) / len(record.gaps_ms)
    if tokens < _STEADY * sum(answered(record) - 1 for record in records):
        return None
    return seconds / tokens


def answered(record: RequestRecord) -> int:
    """The number of tokens in an answer: the server's count, or else the number of events with text."""
    return record.osl if record.osl >= 0 else record.events


def cached_share(records: Sequence[RequestRecord]) -> float:
    """Share of the prompt tokens that the server found in its cache; 0.0 if it does not report them."""
    counted = [record for record in records if record.cached >= 0 and record.isl > 0]
    return sum(record.cached for record in counted) / sum(record.isl for record in counted) if counted else 0.0


BLOCKS, BLOCK_SIZE = 16_384, 32  # as a mock worker's
_POINTS = 12


def modelled(
    setup: Setup,
    url: str,
    lengths: Iterable[int],
    ttft_ms: Callable[[int], float],
    levels: Iterable[tuple[int, int]],
    itl_ms: Callable[[int, float], float],
) -> Profile:
    """A profile from functions of times, as if it had been measured.

    Args:
        lengths: of prompts.
        levels: lengths of prompts, each with a number of requests at once.
        itl_ms: of a number of requests at once and the tokens of each one's context.
    """
    prefill, decode = Prefill(), Decode(max_kv_tokens=setup.max_kv_tokens)
    for isl in lengths:
        ttft = ttft_ms(isl)
        throughput = prefill_throughput(isl, ttft, setup.gpus, setup.attention_dp)
        prefill = prefill.added(isl, round(ttft, 4), round(throughput, 3))
    for isl, level in levels:
        decode = decode.added(setup.decode_point(isl, level, itl_ms(level, isl + setup.osl / 2)))
    return Profile(setup=setup, url=url, prefill=prefill, decode=decode)


def mock_profile(
    *,
    blocks: int = BLOCKS,
    block_size: int = BLOCK_SIZE,
    max_sequences: int = MAX_SEQUENCES,
    gpus: int = 1,
    slowness: float = 1.0,
    max_context: int = 131_072,
    osl: int = 500,
    model: str = "mock",
) -> Profile:
    """
    Args:
        slowness: factor on the duration of every step; 0.5 is a ``--mock-speedup`` of 2.
    """
    pool = blocks * block_size
    max_context = min(max_context, pool)
    setup = Setup(
        model=model,
        api="chat",
        gpus=gpus,
        attention_dp=1,
        osl=osl,
        max_context=max_context,
        max_kv_tokens=pool,
        max_batch=max_sequences,
    )
    lengths = (100, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12_000, 16_000, 32_000, 64_000, 128_000)
    return modelled(
        setup,
        "timing model of the mock engine",
        [isl for isl in lengths if isl <= max_context - RESERVE],
        lambda isl: prompt_ms(isl, blocks, block_size) * slowness,
        [
            (isl, level)
            for isl in lengths
            if isl <= max_context - osl
            for level in concurrencies(isl + osl, pool, max_sequences, _POINTS)
        ],
        lambda level, context: decode_ns(round(context * level), pool) / 1e6 * slowness,
    )


def prompt_ms(tokens: int, blocks: int, block_size: int) -> float:
    """TTFT of a prompt that has the worker to itself, ms."""
    engine = SimulatedEngine(blocks, block_size)
    engine.add(EngineSequence(0, tokens, 1, range(tokens // block_size)))
    spent = 0
    while engine.has_work:
        spent += sum(durations := engine.form())
        engine.finish(len(durations))
    return spent / 1e6
