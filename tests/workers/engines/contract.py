"""What every engine owes its worker, asked through the protocol of ``penstock.workers.engines.engine_protocol`` alone.

``SUBJECTS`` are the engines, each made from a worker's settings as ``penstock.workers.run_worker`` makes it;
``test_contract.py`` is the suite. Where an engine cannot keep a clause, ``lacks`` says why, and its test is skipped
with that reason.

On hardware: where the real ``tensorrt_llm`` is importable, the subject "trtllm" is the real one instead of the
stand-in, with no other change (``make test-trtllm``; it fails if only the stand-in is there). The bundled demo model is
small enough for any GPU. Engines that answer from other threads are waited for: what must be true at once for all is
asked at once, what may come later is waited for by ``settle``, at most ``BOUND_S``.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.block_hashes import chain, root, split
from penstock.schemas.kv import Cleared, KvEvent, Removed, Stored
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.tokens import Logprob
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.engine_protocol import (
    Engine,
    Failure,
    Output,
    PinnedPrompt,
    Scored,
    SequenceCounts,
    SequenceRequest,
    Started,
    StepResult,
)
from tests import standins

MODEL = modeldir.DEMO
BLOCK = 32
POOL = 96  # blocks
LIMIT = 512  # prompt + output
SLOTS = 4
BUDGET = 64  # tokens per step
BOUND_S = float(os.environ.get("PENSTOCK_CONTRACT_BOUND_S", "30"))
REAL = os.environ.get("PENSTOCK_CONTRACT_REAL", "")  # a package that must be the real one

GREEDY = Sampling(temperature=0.0)
ROOT = root("contract")
WORDS = tuple((7 + i * i * 13 + i * 5) % 1270 for i in range(LIMIT + 8))
ENDING = WORDS[:37]  # the demo model soon ends its answer to these

SEEDED_RESUME = "seeded resume"
EOS = "eos"
BIAS = "bias"
BARRED = "barred"
TENANTS = "tenants"
SMALL_POOL = "small pool"
RANKS = "ranks"
HANDOFF = "handoff"
CONSTRAINTS = "constraints"
CONTINUED = "continued constraints"
ALTERNATIVES = "alternatives"
SEEDS = "seeds"
MIN_P = "min_p"
PENALTIES = "penalties"


@dataclass(frozen=True)
class Subject:
    """One engine of the suite.

    Attributes:
        lacks: clause -> why it cannot be kept.
        handoff: "blocks" (through ``memory``), "opaque" (by itself), or "" with a reason in ``lacks``.
        package: what it needs besides ours.
        on_real: settings for the real package.
        variant: settings besides, of an engine that is here more than once.
        title: of such a variant; by default its values.
        single: a process can have one engine of the real package at a time; the suite's shared one then.
    """

    name: str
    make: Callable[[WorkerSettings, Path], Engine]
    handoff: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    on_real: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    title: str = ""

    def settings(self, **options: Any) -> WorkerSettings:
        defaults: dict[str, Any] = {
            "engine": self.name,
            "block_size": BLOCK,
            "kv_blocks": POOL,
            "max_running": SLOTS,
            "max_batched_tokens": BUDGET,
            "max_model_len": LIMIT,
            "device": "auto" if self.real else "cpu",
            "dtype": "auto" if self.package else "float32",
            "threads": 1,
            "mock_speedup": 0,
        }
        return WorkerSettings(**defaults | dict(self.variant) | (dict(self.on_real) if self.real else {}) | options)

    @property
    def label(self) -> str:
        variant = [str(value) for key, value in self.variant.items() if key != "override_engine_args"]
        return "-".join((self.name, *([self.title] if self.title else variant)))

    @property
    def real(self) -> bool:
        return bool(self.package) and standins.real(self.package)

    @property
    def quick(self) -> Path:
        """For tests of many tokens whose words do not matter; its heads are too narrow for kernels of real ones."""
        return MODEL if self.real else modeldir.TINY

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Its package is importable: the real one, else the stand-in."""
        if not self.package or self.real:
            yield
            return
        assert self.package != REAL, f"{REAL} is not installed here, only its stand-in is"
        with standins.installed():
            yield


def _mock(settings: WorkerSettings, path: Path) -> Engine:
    from penstock.workers.engines import mock

    return mock.from_settings(settings, path)


def _native(settings: WorkerSettings, path: Path) -> Engine:
    from penstock.workers.engines import native

    return native.from_settings(settings, path)


def _trtllm(settings: WorkerSettings, path: Path) -> Engine:
    from penstock.workers.engines import trtllm

    return trtllm.from_settings(settings, path)


def _vllm(settings: WorkerSettings, path: Path) -> Engine:
    from penstock.workers.engines.vllm.build import from_settings as vllm_engine

    return vllm_engine(settings, path)  # type: ignore[no-any-return]


def _sglang(settings: WorkerSettings, path: Path) -> Engine:
    from penstock.workers.engines.sglang.build import from_settings as sglang_engine

    return sglang_engine(settings, path)


ALL = (
    Subject(
        "mock",
        _mock,
        "blocks",
        {EOS: "the mock of a model never draws its end tokens", BIAS: "the mock has no logits"},
    ),
    Subject("native", _native, "blocks"),
    Subject("native", _native, "blocks", variant={"speculative_model": "ngram", "prompt_lookup_min": 1}),
    Subject(
        "trtllm",
        _trtllm,
        "opaque",
        {
            SEEDED_RESUME: "TensorRT-LLM's draws depend on its generator's history, not on the output position",
            TENANTS: "events of TensorRT-LLM 1.2.1 carry no salt: of equal blocks nobody can say whose they are",
            BARRED: "TensorRT-LLM's min_tokens bars its end id only; stop ids may be drawn, and do not stop yet",
            CONTINUED: "TensorRT-LLM's overlap scheduler shows logits processors each token one step late",
            ALTERNATIVES: "TRTLLMSampler returns log-probabilities of the drawn tokens only",
        },
        "tensorrt_llm",
    ),
    Subject(
        "trtllm",
        _trtllm,
        "opaque",
        {
            SEEDED_RESUME: "TorchSampler of 1.2 has no seeds",
            SEEDS: "TorchSampler of 1.2 has no seeds",
            MIN_P: "TorchSampler of 1.2 does not read min_p",
            PENALTIES: "TorchSampler of 1.2 applies no penalties",
            TENANTS: "events of TensorRT-LLM 1.2.1 carry no salt: of equal blocks nobody can say whose they are",
            BARRED: "TensorRT-LLM's min_tokens bars its end id only; stop ids may be drawn, and do not stop yet",
        },
        "tensorrt_llm",
        variant={"override_engine_args": '{"sampler_type": "TorchSampler", "disable_overlap_scheduler": true}'},
        title="torch-sampler",
    ),
    Subject(
        "vllm",
        _vllm,
        "opaque",
        {
            SEEDED_RESUME: "vLLM's draws depend on its generator's history, not on the output position",
            SMALL_POOL: "vLLM does not start with a pool that is too small for one sequence of full length",
        },
        "vllm",
        # The same sums in every batch; and an engine that starts in seconds, not minutes.
        {"dtype": "float32", "override_engine_args": '{"enforce_eager": true}'},
    ),
    Subject(
        "sglang",
        _sglang,
        "",
        {
            RANKS: "SGLang reports no rank of a prompt's token that is not among the best",
            HANDOFF: "SGLang's prefill engine reports no token before a decode engine has taken its KV",
        },
        "sglang",
        {"dtype": "float32"},
        {"override_engine_args": '{"enable_deterministic_inference": true}'},
        single=True,
    ),
)
SUBJECTS = tuple(subject for subject in ALL if importlib.util.find_spec(f"penstock.workers.engines.{subject.name}"))


# -- requests


def ask(
    key: object,
    prompt: Sequence[int],
    count: int = 8,
    sampling: Sampling = GREEDY,
    *,
    base: bytes = ROOT,
    generated: Sequence[int] = (),
    choice: int = 0,
    stop: Mapping[str, Any] | None = None,
    **more: Any,
) -> SequenceRequest:
    """A sequence that runs to ``count`` tokens unless ``stop`` says otherwise."""
    rules = Stop(**{"max_tokens": count, "ignore_eos": True} | dict(stop or {}))
    tokens, said = array("I", prompt), array("I", generated)
    return SequenceRequest(key, tokens, sampling, rules, choice, said, root=base, **more)


def names(tokens: Sequence[int], base: bytes = ROOT) -> list[bytes]:
    """Digests of the full blocks, as every router computes them."""
    return split(chain(pack_tokens(tokens), BLOCK, base))


# -- what an engine said


@dataclass
class Seen:
    """Everything that came out of ``step``, in order."""

    outputs: list[Output] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    pinned: list[PinnedPrompt] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    counted: list[SequenceCounts] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        self.events += result.events
        self.started += result.started
        self.failures += result.failures
        self.pinned += result.pinned
        begun = {output.key for output in self.outputs}
        assert not begun & {each.key for each in result.scored}, "a score comes before the first token"
        self.scored += result.scored
        self.counted += result.counted
        self.outputs += result.outputs

    def of(self, key: object) -> list[Output]:
        return [output for output in self.outputs if output.key == key]

    def tokens(self, key: object = 0) -> list[int]:
        return [output.token for output in self.of(key)]

    def cached(self, key: object = 0) -> int:
        (started,) = [each for each in self.started if each.key == key]
        return started.cached_tokens

    def failure(self, key: object = 0) -> Failure:
        (failure,) = [each for each in self.failures if each.key == key]
        return failure

    def scores(self, key: object = 0, first: int = 1) -> list[Logprob]:
        """Of the prompt's tokens from ``first`` on, in order and without gaps."""
        found: list[Logprob] = []
        for each in self.scored:
            if each.key == key:
                assert each.first == first + len(found)
                found += each.logprobs
        return found

    def ended(self) -> set[object]:
        return {o.key for o in self.outputs if o.finish} | {failure.key for failure in self.failures}


class Driver:
    """An engine and all that it has ever said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen = Seen()

    def step(self) -> StepResult:
        result = self.engine.step()
        self.seen.add(result)
        return result

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Step until it is so; an engine that has no work may still have news."""
        deadline = time.monotonic() + BOUND_S
        while not done():
            assert time.monotonic() < deadline, f"{what} did not come: {self.engine.stats()}"
            self.step()

    def run(self, *requests: SequenceRequest) -> Seen:
        """All to their ends; what was said meanwhile. Every sequence ends once, says nothing behind its end."""
        before = self.seen
        self.seen = seen = Seen()
        for request in requests:
            self.engine.submit(request)
        keys = {request.key for request in requests}
        self.until(lambda: keys <= seen.ended(), "the end of all sequences")
        for key in keys:
            finishes = [output.finish for output in seen.of(key)]
            assert not any(finishes[:-1]), finishes
            assert len([each for each in seen.started if each.key == key]) <= 1
        for part in ("outputs", "events", "started", "failures", "pinned", "scored", "counted"):
            getattr(before, part).extend(getattr(seen, part))
        self.seen = before
        return seen

    def answer(self, request: SequenceRequest) -> list[int]:
        seen = self.run(request)
        assert seen.failures == []
        return seen.tokens(request.key)

    def idle(self) -> None:
        """Until nothing runs, nothing is held and no event is left."""

        def quiet() -> bool:
            stats = self.engine.stats()
            counted = stats.running, stats.waiting, stats.used_blocks, stats.pinned_blocks
            return counted == (0, 0, 0, 0) and not self.engine.has_work()

        self.until(quiet, "rest")

    def fold(self) -> dict[bytes, bytes | None]:
        return fold(self.seen.events)

    def remembers(self, tokens: Sequence[int], base: bytes = ROOT) -> None:
        """Until the events have all full blocks of ``tokens``."""
        wanted = set(names(tokens, base))
        self.until(lambda: wanted <= set(self.fold()), "the events of a prompt's blocks")


@contextlib.contextmanager
def made(subject: Subject, model: Path | None = None, **options: Any) -> Iterator[Driver]:
    """An engine from a worker's settings, closed at the end."""
    driver = Driver(subject.make(subject.settings(**options), model or subject.quick))
    try:
        yield driver
    finally:
        driver.engine.close()


def inner(driver: Driver) -> Any:
    """The engine object of another package."""
    engine: Any = driver.engine
    return engine.runtime.llm


def in_loop(driver: Driver, work: Callable[[], Any]) -> Any:
    """Run something in the event loop of such an engine."""
    engine: Any = driver.engine

    async def run() -> Any:
        found = work()
        return await found if asyncio.iscoroutine(found) else found

    return engine.runtime.loop.run(run(), 10.0)


def fold(events: Sequence[KvEvent]) -> dict[bytes, bytes | None]:
    """Names that are in the cache after these events, and their parents. Asserts that parents come first."""
    found: dict[bytes, bytes | None] = {}
    for event in events:
        if isinstance(event, Stored):
            parent = event.parent
            for digest in split(event.digests):
                assert parent is None or parent in found, "a child came before its parent"
                assert digest not in found, "a name was stored twice"
                found[digest] = parent
                parent = digest
        elif isinstance(event, Removed):
            for digest in split(event.digests):
                assert found.pop(digest, b"never") != b"never", "a name left that was not there"
        else:
            assert isinstance(event, Cleared)
            found.clear()
    for parent in found.values():
        assert parent is None or parent in found, "a parent left before its child"
    return found


# -- handoff


def prefilled(source: Driver, request: SequenceRequest) -> tuple[PinnedPrompt, int]:
    """Compute a prompt and one token; its KV stays held."""
    first = msgspec.structs.replace(
        request, pin=True, stop=msgspec.structs.replace(request.stop, max_tokens=len(request.generated) + 1)
    )
    seen = source.run(first)
    assert seen.failures == []
    source.seen.pinned.clear()
    (output,) = seen.of(request.key)
    assert output.finish == "length"
    (pinned,) = seen.pinned
    assert pinned.key == request.key
    return pinned, output.token


def carried_on(
    subject: Subject, source: Driver, target: Driver, pinned: PinnedPrompt, request: SequenceRequest
) -> Seen:
    """Go on with what is held, as a decode worker does; then it is dropped."""
    if subject.handoff == "opaque":
        assert pinned.opaque
        seen = target.run(msgspec.structs.replace(request, opaque=pinned.opaque))
        assert source.engine.release_pinned(pinned.key)
        return seen
    digests = names(request.prompt, request.root)
    reservation = target.engine.kv_transfer.reserve(digests, int(len(request.prompt) % BLOCK > 0), 1)
    assert reservation is not None
    mine = source.engine.memory()["kv"]
    into = reservation.blocks + reservation.tails
    copy_blocks(source, target, pinned.blocks[reservation.have :], into[reservation.have :])
    now = (ctypes.c_uint32 * mine.blocks).from_address(mine.generations)
    assert [now[block] for block in pinned.blocks] == pinned.generations
    target.engine.kv_transfer.adopt(reservation)
    assert source.engine.release_pinned(pinned.key)
    return target.run(msgspec.structs.replace(request, reservation=reservation))


def copy_blocks(source: Driver, target: Driver, blocks: Sequence[int], into: Sequence[int]) -> None:
    """What a transfer does."""
    mine, theirs = source.engine.memory()["kv"], target.engine.memory()["kv"]
    assert mine.layout == theirs.layout
    size = mine.block_bytes
    for one, other in zip(blocks, into, strict=True):
        ctypes.memmove(theirs.base + other * size, mine.base + one * size, size)
