"""``penstock doctor --engine trtllm``: finds where an installed TensorRT-LLM differs from what the adapter expects.

The adapter was written from TensorRT-LLM's public source. These checks run all of its functions on a model: whole
requests, separate prefill and decode, images, constraints, cancellation, and a token from an idle engine. Run them
before the first use on a GPU, and after each upgrade.
"""

import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.configs.settings import WorkerSettings
from penstock.infra.constraints import constraint_grammar, llguidance_releases
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.operate.doctor.finding import CheckResult, ok, problem, skipped, warning
from penstock.schemas.block_hashes import root
from penstock.schemas.requests import Constraint, Sampling, Stop
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, ModelTokens
from penstock.workers.engines.engine_protocol import (
    Engine,
    EngineError,
    Failure,
    Output,
    PinnedPrompt,
    RequestError,
    SequenceRequest,
)
from penstock.workers.engines.support import ServedOptions
from penstock.workers.engines.trtllm import api as apis
from penstock.workers.engines.trtllm import encoder_from_settings, from_settings
from penstock.workers.engines.trtllm.adapter import TrtllmFollower

REPORT = "report it with this output and the worker's log at --log-level debug"
REFUSED = (
    "nothing to do: such requests are refused or get a note, and min_tokens is sent as this engine counts "
    "(docs/engines.md)"
)
NEAR = "two tokens may be about equally likely; if this happens often, report it"
BOUND_S = 120.0  # limit for each answer
BLOCK = 32
TOKENS = 24
GREEDY = Sampling(temperature=0.0)


class _Failed(Exception):
    """A check failed. The text says what was observed."""


class _Driver:
    """An engine and its results so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[object, list[Output]] = {}
        self.failures: dict[object, Failure] = {}
        self.pinned: dict[object, PinnedPrompt] = {}
        self.events = 0

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BOUND_S
        while not done():
            if time.monotonic() > deadline:
                raise _Failed(f"{what} did not arrive within {BOUND_S:.0f} s: {self.engine.stats()}")
            result = self.engine.step()
            for output in result.outputs:
                self.outputs.setdefault(output.key, []).append(output)
            self.failures |= {failure.key: failure for failure in result.failures}
            self.pinned |= {pinned.key: pinned for pinned in result.pinned}
            self.events += len(result.events)

    def ended(self, key: object) -> bool:
        outputs = self.outputs.get(key)
        return key in self.failures or bool(outputs and outputs[-1].finish)

    def answer(self, key: str, prompt: Sequence[int], count: int = TOKENS, **more: Any) -> list[int]:
        """Run a request, and return its tokens."""
        self.outputs.pop(key, None)
        sampling, ends = more.pop("sampling", GREEDY), more.pop("ends", False)
        generated = array("I", more.pop("generated", ()))
        stop = Stop(max_tokens=count, ignore_eos=not ends)
        request = SequenceRequest(key, array("I", prompt), sampling, stop, 0, generated, root=root("doctor"), **more)
        self.engine.submit(request)
        self.until(lambda: self.ended(key), f"the answer {key!r}")
        if key in self.failures:
            failure = self.failures.pop(key)
            raise _Failed(f"the request {key!r} failed: {failure.code}: {failure.message}")
        return [output.token for output in self.outputs[key]]


class Doctor:
    """
    Args:
        path: the model's folder.
        options: settings of the engines, besides those that the checks need.
        began: called with the name of each part before it starts; a part may take minutes.
    """

    def __init__(self, path: Path, options: dict[str, Any], began: Callable[[str], None]) -> None:
        self._path = path
        self._options = options
        self._began = began
        self._model = modeldir.load(path)
        text = "The engine of this worker is asked what it does, on its first day. " * 6
        self._prompt = self._model.tokenizer.encode(text, add_special_tokens=False).ids[: 3 * BLOCK + 5]

    def examine(self) -> Iterator[CheckResult]:
        """Run all checks, and yield their findings."""
        self._began("the installation")
        yield from self._install()
        yield from self._trial("aggregated", self._aggregated)
        yield from self._trial("prefill and decode", self._split)
        if self._model.vision is None:
            yield skipped("encode", "this model takes no images")
        else:
            yield from self._trial("encode", self._encode)

    def _install(self) -> Iterator[CheckResult]:
        api = apis.load_trtllm()
        yield ok("release", f"tensorrt_llm {api.version}, llguidance {llguidance_releases.installed() or 'none'}")
        yield ok("model", f"{self._path}, at most {self._model.max_model_len:,} tokens")
        for note in apis.notes(api.version):
            yield warning("release", note, "the adapter was written for 1.2.1")

    def _trial(self, name: str, check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
        self._began(name)
        try:
            yield from check()
        except (_Failed, EngineError, RequestError, BadArguments, ValueError, OSError) as error:
            yield problem(name, str(error) or repr(error), REPORT)
        except Exception as error:  # the engine may raise anything; run the other checks all the same
            yield problem(name, repr(error), REPORT)

    def _settings(self, role: str = "aggregated") -> WorkerSettings:
        defaults: dict[str, Any] = {
            "engine": "trtllm",
            "model": str(self._path),
            "role": role,
            "block_size": BLOCK,
            "kv_blocks": 256,
            "max_running": 8,
            "max_model_len": min(2048, self._model.max_model_len),
        }
        return WorkerSettings(**defaults | self._options)

    # --- one engine ---

    def _aggregated(self) -> Iterator[CheckResult]:
        began = time.monotonic()
        engine = from_settings(self._settings(), self._path)
        with ExitStack() as undo:
            undo.callback(engine.close)
            follower = engine.adapter.follower
            assert isinstance(follower, TrtllmFollower)
            driver = _Driver(engine)
            yield ok("start", f"ready after {time.monotonic() - began:.0f} s, {engine.info.total_blocks} KV blocks")
            yield self._sampling(follower.options.served)
            whole = driver.answer("whole", self._prompt)
            if driver.answer("again", self._prompt) != whole:
                yield warning("aggregated", "the same greedy request got another answer the second time", NEAR)
            rest = driver.answer("resumed", self._prompt, generated=whole[:7])
            if rest == whole[7:]:
                yield ok("aggregated", f"{TOKENS} tokens, the same from the cache, and when resumed after 7")
            else:
                yield warning("aggregated", "a resumed answer continues differently", NEAR)
            yield self._events(driver)
            yield from self._trial("constraints", lambda: self._constrained(driver))
            yield from self._trial("cancel", lambda: self._cancelled(driver, whole))
            yield from self._trial("one token", lambda: self._one_token(follower))

    def _sampling(self, served: ServedOptions) -> CheckResult:
        names = {"alternatives": "top_logprobs"}
        without = [names.get(name, name) for name, value in served._asdict().items() if not value]
        deviations = [f"this sampler does not apply {', '.join(without)}"] if without else []
        deviations += ["min_tokens counts the prompt as well"] if served.min_tokens == "all" else []
        if not deviations:
            return ok("sampling", "penalties, min_p, seeds, min_tokens and log-probabilities are applied")
        return warning("sampling", "; ".join(deviations), REFUSED)

    def _events(self, driver: _Driver) -> CheckResult:
        if not driver.engine.info.kv_events:
            return skipped("kv events", "switched off")
        driver.until(lambda: driver.events > 0 or bool(driver.engine.dump()), "a KV event")
        return ok("kv events", "the cached blocks have names")

    def _constrained(self, driver: _Driver) -> Iterator[CheckResult]:
        if not driver.engine.info.constraints:
            yield warning(
                "constraints", f"workers announce no structured output: {self._without_constraints()}", REPORT
            )
            return
        found = driver.answer(
            "json", self._prompt, 64, ends=True, constraint=Constraint(constraint_grammar.REGEX, "[a-z]{4,9}")
        )
        text = self._model.tokenizer.decode([each for each in found if each not in self._model.eos_token_ids])
        if not re.fullmatch("[a-z]{4,9}", text):
            raise _Failed(f"the answer {text!r} does not match [a-z]{{4,9}}")
        yield ok("constraints", f"{text!r} matches its expression")

    def _without_constraints(self) -> str:
        model = self._model
        tokens = ModelTokens(model.tokenizer, model.vocab_size, model.eos_token_ids)
        try:
            ConstraintCompiler(lambda: tokens).try_out()
        except RequestError as error:
            return error.message
        return "these arguments switch guided decoding off (docs/structured.md)"

    def _cancelled(self, driver: _Driver, whole: list[int]) -> Iterator[CheckResult]:
        engine = driver.engine
        stop = Stop(max_tokens=1000, ignore_eos=True)
        for number in range(4):
            engine.submit(
                SequenceRequest(("gone", number), array("I", self._prompt), GREEDY, stop, root=root("doctor"))
            )
        driver.until(lambda: bool(driver.outputs.get(("gone", 0))), "the first token")
        for number in range(4):
            engine.cancel(("gone", number))
        if driver.answer("beside", self._prompt) != whole:
            yield warning("cancel", "the answer after a cancel differs", NEAR)
        driver.until(lambda: engine.stats().used_blocks == 0 and not engine.has_work(), "idleness after cancelling")
        yield ok("cancel", "four requests ended at once and freed their blocks")

    def _one_token(self, follower: TrtllmFollower) -> Iterator[CheckResult]:
        began = time.monotonic()
        if not follower.ask().wait(BOUND_S):
            raise _Failed(f"an idle engine generated no token within {BOUND_S:.0f} s")
        yield ok("one token", f"an idle engine generated one in {(time.monotonic() - began) * 1000:.0f} ms")

    # --- two engines, and an encoder ---

    def _split(self) -> Iterator[CheckResult]:
        with ExitStack() as undo:
            engines = []
            for role in ("prefill", "decode"):
                engines.append(from_settings(self._settings(role), self._path))
                undo.callback(engines[-1].close)
            prefill, decode = map(_Driver, engines)
            whole = decode.answer("whole", self._prompt)
            if prefill.engine.info.handoff_layout != decode.engine.info.handoff_layout:
                raise _Failed(
                    f"layouts differ: {prefill.engine.info.handoff_layout}, {decode.engine.info.handoff_layout}"
                )
            first = prefill.answer("p", self._prompt, 1, pin=True)
            if "p" not in prefill.pinned:
                raise _Failed("the prefill engine returned no handoff state")
            rest = decode.answer("d", self._prompt, generated=first, opaque=prefill.pinned["p"].opaque)
            prefill.engine.release_pinned("p")
            if [*first, *rest] == whole:
                yield ok(
                    "prefill and decode", f"the KV of {len(self._prompt)} tokens was moved; the answer is the same"
                )
            else:
                yield warning("prefill and decode", "the answer differs from that of a single engine", NEAR)

    def _encode(self) -> Iterator[CheckResult]:
        engine = encoder_from_settings(self._settings("encode"), self._path)
        engine.close()
        yield ok("encode", "a blank image was embedded, and its handle could be opened")


def examine(path: str, options: dict[str, Any], began: Callable[[str], None] = lambda _: None) -> Iterator[CheckResult]:
    """Check the installed TensorRT-LLM, and yield the findings.

    Args:
        path: the folder of a small model; "": the bundled one.
        options: further settings of the workers.
        began: called with the name of each part, which may take minutes.
    """
    try:
        yield from Doctor(Path(path) if path else modeldir.DEMO, options, began).examine()
    except modeldir.ModelError as error:
        yield problem("model", str(error), "name the folder of a small model with --model")
    except EngineError as error:
        yield problem("release", str(error), "correct it, and run this again")
