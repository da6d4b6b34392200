"""Measures the points of a profile on a live endpoint, one after the other, and saves each.

Reads the limits of servers from their metrics: tokens of KV cache, sequences in a batch, length of the context.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from penstock.measure.generator.target import ask
from penstock.measure.profile import grid
from penstock.measure.profile.data import DecodePoint, Profile, save
from penstock.measure.sweep.bodies import Bodies
from penstock.measure.sweep.endpoints import SweptEndpoint
from penstock.measure.sweep.figures import RequestRecord
from penstock.measure.sweep.level_run import RunLimits, run_level
from penstock.measure.sweep.workload import LoadLevel, Workload

_CACHED = 0.05  # share of the prompts from which TTFT is not that of a prefill


class ProfileFailed(Exception):
    """A request failed; the text says at which point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """
    Attributes:
        prefill: prompt lengths.
        decode: prompt lengths and the requests at once of each.
        requests: prompts per rank and length whose TTFT is measured.
        seconds: no further point is begun after this time.
    """

    prefill: tuple[int, ...]
    decode: tuple[tuple[int, tuple[int, ...]], ...]
    requests: int = 3
    seconds: float = 1800.0


class Profiler:
    """
    Args:
        profile: the points measured so far.
        seed: of the prompts; one that the server has seen finds them in its cache.
        say: called with a line about each point.
    """

    def __init__(
        self,
        endpoint: SweptEndpoint,
        bodies: Bodies,
        profile: Profile,
        folder: Path,
        *,
        seed: int,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._bodies = bodies
        self.profile = profile
        self._folder = folder
        self._seed = seed
        self._limits = RunLimits(failed=0, timeout_s=timeout_s)
        self._say = say

    async def run(self, grid: Grid) -> int:
        """Measure the points that the profile lacks, and return how many remain to be measured.

        Raises:
            ProfileFailed: a request failed. The points before are saved.
        """
        left = list(self._missing(grid))
        until = time.monotonic() + grid.seconds
        while left and time.monotonic() < until:
            isl, concurrency = left.pop(0)
            if concurrency:
                if not await self._decode(isl, concurrency):
                    # More requests at once would not all decode at once, either.
                    left = [each for each in left if each[0] != isl]
            else:
                await self._prefill(isl, grid.requests)
            save(self._folder, self.profile)
        return len(left)

    def _missing(self, grid: Grid) -> Iterator[tuple[int, int]]:
        """Prompt length and concurrency of each point; 0: its prefill."""
        decode = self.profile.decode
        measured = {*zip(decode.decode_isl, decode.decode_concurrency, strict=True)}
        yield from ((isl, 0) for isl in grid.prefill if isl not in self.profile.prefill.prefill_isl)
        for isl, levels in grid.decode:
            yield from ((isl, each) for each in levels if (isl, each) not in measured)

    async def _prefill(self, isl: int, requests: int) -> None:
        setup = self.profile.setup
        at_once = setup.attention_dp
        records = await self._answers(isl, 1, at_once, requests * at_once)
        ttft = grid.ttft(records)
        if ttft is None:
            raise ProfileFailed(f"prompts of {isl} tokens: no text was streamed, so there is no TTFT")
        if (cached := grid.cached_share(records)) > _CACHED:
            self._warn(f"prompts of {isl} tokens: {cached:.0%} were in the prefix cache, so TTFT is too short")
        throughput = grid.prefill_throughput(isl, ttft, setup.gpus, at_once)
        prefill = self.profile.prefill.added(isl, round(ttft, 3), round(throughput, 3))
        self.profile = msgspec.structs.replace(self.profile, prefill=prefill)
        self._say(f"prefill  {isl:>7,} tokens  TTFT {ttft:9.1f} ms  {throughput:10,.0f} tokens/s per GPU")

    async def _decode(self, isl: int, concurrency: int) -> bool:
        """Measure one decode point. False: the requests did not all decode at the same time."""
        setup = self.profile.setup
        await self._answers(isl, 1, concurrency, concurrency)  # into the prefix cache, so that all begin together
        records = await self._answers(isl, setup.osl, concurrency, concurrency)
        itl = grid.steady_itl(records)
        at = f"decode   {isl:>7,} tokens × {concurrency:<4}"
        if itl is None:
            self._warn(f"{at}: the requests did not all decode at once; no figure, and no higher concurrency")
            return False
        context = isl + setup.osl / 2
        point = DecodePoint(
            isl=isl,
            concurrency=concurrency,
            kv_usage=round(grid.kv_usage(context, concurrency, setup.max_kv_tokens), 5),
            context=context,
            itl_ms=round(itl, 4),
            throughput=round(concurrency / itl * 1e3 / setup.gpus, 3),
        )
        self.profile = msgspec.structs.replace(self.profile, decode=self.profile.decode.added(point))
        self._say(f"{at}  KV {point.kv_usage:6.1%}  ITL {itl:7.2f} ms  {point.throughput:10,.0f} tokens/s per GPU")
        return True

    async def _answers(self, isl: int, osl: int, concurrency: int, requests: int) -> list[RequestRecord]:
        level = LoadLevel("concurrency", concurrency, requests)
        workload = Workload(isl=isl, isl_stddev=0.0, osl=osl)
        # The length is in the seed: prompts of two lengths that share a seed would begin alike.
        planned = self._bodies.synthetic(workload, level, self._seed, isl)
        run, records = await run_level(self._endpoint, level, planned, self._limits)
        if run.figures.failed:
            reason = next(iter(run.figures.errors), "")
            raise ProfileFailed(f"prompts of {isl} tokens, {concurrency} at once: {run.aborted or reason}")
        if osl > 1 or concurrency == self.profile.setup.attention_dp:  # not what only fills the prefix cache
            for warning in run.client.warnings:
                self._note(f"{isl} tokens × {concurrency}: {warning}")
        return records

    def _warn(self, text: str) -> None:
        self._note(text)
        self._say(text)

    def _note(self, text: str) -> None:
        """Keep a warning for the reader of the file."""
        if text not in self.profile.warnings:
            self.profile = msgspec.structs.replace(self.profile, warnings=(*self.profile.warnings, text))


_PREFIXES = (
    "penstock_worker_kv_capacity_blocks",
    "penstock_worker_kv_block_size_tokens",
    "penstock_worker_max_sequences",
    "penstock_worker_max_model_len",
    "vllm:cache_config_info",
    "sglang:max_total_num_tokens",
)
_DECODES = ("aggregated", "decode")
_TIMEOUT_S = 5.0


class Capacity(Struct, frozen=True):
    """Limits of an endpoint. 0: not reported."""

    max_kv_tokens: int = 0
    max_batch: int = 0
    max_context: int = 0


def read_capacity(pages: Iterable[str]) -> Capacity:
    """Add up the limits on the servers' Prometheus pages. The context length is that of the shortest."""
    kv_tokens = batch = 0
    contexts = []
    for page in pages:
        values: dict[str, float] = {}
        lines = [line for line in page.splitlines() if line.startswith(_PREFIXES)]
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                if sample.labels.get("role", "decode") not in _DECODES:
                    continue
                if sample.name == "vllm:cache_config_info":
                    kv_tokens += _product(sample.labels.get("num_gpu_blocks"), sample.labels.get("block_size"))
                else:
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        blocks, size, sequences, context, tokens = (int(values.get(name, 0)) for name in (*_PREFIXES[:4], _PREFIXES[5]))
        kv_tokens += blocks * size + tokens
        batch += sequences
        contexts += [context] if context else []
    return Capacity(kv_tokens, batch, min(contexts, default=0))


def _product(*numbers: str | None) -> int:
    product = 1
    for number in numbers:
        product *= int(number) if number and number.isdecimal() else 0
    return product


async def capacity_of(endpoint: SweptEndpoint, model: str) -> Capacity:
    """Read the endpoint's metrics pages and its list of models. Pages that do not answer are left out."""
    answers = [await ask(page.target, page.path, timeout_s=_TIMEOUT_S) for page in endpoint.pages]
    capacity = read_capacity([body.decode(errors="replace") for status, body in answers if status == 200])
    if capacity.max_context:
        return capacity
    status, body = await ask(endpoint.target, "/v1/models", timeout_s=_TIMEOUT_S)
    return Capacity(capacity.max_kv_tokens, capacity.max_batch, context_of(body, model) if status == 200 else 0)


def context_of(models: bytes, model: str) -> int:
    """``max_model_len`` of a model in an answer of ``/v1/models``; 0: not reported."""
    try:
        (own,) = [each for each in json.loads(models)["data"] if each["id"] == model]
        return int(own["max_model_len"])
    except (ValueError, LookupError, TypeError):
        return 0
