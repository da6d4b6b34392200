"""What the adapters of other packages owe beyond the contract of all engines, over their stand-ins."""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from penstock.infra.engine_args.tree import BadArguments
from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.workers.engines.engine_protocol import RequestError
from tests.standins import FOLDER
from tests.workers.engines.contract import ALL, WORDS, Driver, Subject, ask, in_loop, inner, made

PROMPT = WORDS[5:105]
Make = Callable[..., Driver]


class Inside(NamedTuple):
    """What a test reads and replaces of a stand-in. Functions take its engine.

    Attributes:
        engine: module and class; ``generate``: its method.
        headers: argument of that method for a span's parent, and the settings that it needs.
        rests: whether nothing runs or waits, and no block is in use.
        reset: empties the prefix cache; None: it cannot.
        refuses: how it is named where it refuses its arguments.
    """

    engine: tuple[str, str]
    generate: str
    headers: tuple[str, dict[str, Any]]
    rests: Callable[[Any], bool]
    reset: Callable[[Any], Any] | None
    refuses: str


def _vllm_rests(llm: Any) -> bool:
    return (llm.core.running, len(llm.core.waiting), llm.core.pool.usage) == ([], 0, 0.0)


def _sglang_rests(llm: Any) -> bool:
    return all((each.running, each.pool.usage) == ([], 0.0) for each in llm.tokenizer_manager.schedulers)


def _trtllm_rests(llm: Any) -> bool:
    found = importlib.import_module("tensorrt_llm._standin.hooks").counts(llm)
    return found["running"] + found["waiting"] == 0


INSIDE = {
    "vllm": Inside(
        ("vllm.v1.engine.async_llm", "AsyncLLM"),
        "generate",
        ("trace_headers", {}),
        _vllm_rests,
        lambda llm: llm.reset_prefix_cache(),
        r"vLLM 0\.33\.0",
    ),
    "sglang": Inside(
        ("sglang.srt.entrypoints.engine", "Engine"),
        "async_generate",
        ("external_trace_header", {}),
        _sglang_rests,
        lambda llm: llm.tokenizer_manager.flush_cache(),
        r"SGLang 0\.5\.23",
    ),
    "trtllm": Inside(
        ("tensorrt_llm", "LLM"),
        "generate_async",
        ("trace_headers", {"otlp_endpoint": "http://127.0.0.1:9/v1/traces"}),
        _trtllm_rests,
        None,
        r"TensorRT-LLM 1\.2\.1",
    ),
}
SUBJECTS = [next(subject for subject in ALL if subject.name == name) for name in INSIDE]


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    found: Subject = request.param
    if found.real:
        pytest.skip("reaches into the stand-in")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with found.present(), pytest.MonkeyPatch.context() as patch:
        for name in ("TENSORRT_LLM_STANDIN_KV", "SGLANG_STANDIN_KV"):
            patch.setenv(name, str(tmp_path_factory.mktemp("kv")))
        patch.syspath_prepend(str(FOLDER / "sglang" / "_standin" / "path"))
        yield found
    torch.set_num_threads(before)


@pytest.fixture
def inside(subject: Subject) -> Inside:
    return INSIDE[subject.name]


@pytest.fixture
def make(subject: Subject) -> Iterator[Make]:
    with contextlib.ExitStack() as open_ones:
        yield lambda **options: open_ones.enter_context(made(subject, **options))


def class_of(inside: Inside) -> Any:
    module, name = inside.engine
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_it_has_answered_once_before_it_is_ready(
    make: Make, inside: Inside, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """No client waits for an engine's first request."""
    asked, real = list[int](), getattr(class_of(inside), inside.generate)

    @functools.wraps(real)
    def noted(*arguments: Any, **named: Any) -> Any:
        asked.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(class_of(inside), inside.generate, noted)
    driver = make(role=role)
    assert asked
    assert not driver.engine.has_work()


def test_spans_of_its_own_are_below_the_worker_s(make: Make, inside: Inside) -> None:
    name, options = inside.headers
    driver = make(**options)
    generate, given = getattr(inner(driver), inside.generate), list[Any]()

    def noted(*arguments: Any, **named: Any) -> Any:
        given.append(named.get(name))
        return generate(*arguments, **named)

    setattr(inner(driver), inside.generate, noted)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for key, trace in (("a", headers), ("b", None)):
        driver.run(ask(key, PROMPT, 2, trace=trace))
    assert given == [headers, None]


def test_a_cancelled_sequence_is_aborted_in_the_engine_and_no_other(make: Make, inside: Inside) -> None:
    """SGLang aborts all requests whose ids begin with the given one: the second of more than ten must not."""
    driver = make(max_running=16)
    for number in range(14):
        driver.engine.submit(ask(number, WORDS[number : number + 20], 40))
    driver.until(lambda: all(driver.seen.of(number) for number in range(12)), "first tokens")
    assert driver.engine.cancel(1)
    driver.until(lambda: len(driver.seen.ended()) == 13, "the end of the others")
    assert driver.seen.failures == []
    assert {len(driver.seen.of(number)) for number in range(14) if number != 1} == {40}
    driver.until(lambda: inside.rests(inner(driver)), "rest")
    driver.engine.submit(ask(1, PROMPT, 2))  # its key is free again


def test_tokens_outside_the_vocabulary_cannot_be_biased(make: Make) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary") as refused:
        make().engine.submit(ask(0, PROMPT, sampling=Sampling(logit_bias={99_999: 1.0})))
    assert refused.value.code == Code.invalid_request


def test_a_reset_cache_is_reported(make: Make, inside: Inside) -> None:
    if (reset := inside.reset) is None:
        pytest.skip("it cannot be reset")
    driver = make()
    driver.answer(ask(0, PROMPT))
    driver.remembers(PROMPT)
    driver.idle()
    assert in_loop(driver, lambda: reset(inner(driver)))
    driver.until(lambda: driver.fold() == {}, "the removal")
    assert driver.engine.dump() == []
    driver.answer(ask(0, PROMPT))
    driver.remembers(PROMPT)


def test_preemptions_are_counted(make: Make, subject: Subject) -> None:
    if subject.name == "trtllm":
        pytest.skip("GUARANTEED_NO_EVICT preempts none")
    driver = make(kv_blocks=14, max_model_len=208)
    driver.run(*(ask(number, WORDS[number * 7 :][:120], 80) for number in range(4)))
    assert driver.engine.stats().preemptions > 0


def test_what_the_package_refuses_is_said_with_its_version_and_leaves_nothing(
    make: Make, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()

    def refuse(self: Any, *arguments: Any, **named: Any) -> None:
        raise ValueError("no such attention backend")

    monkeypatch.setattr(class_of(inside), "__init__", refuse)
    monkeypatch.setattr(class_of(inside), "__del__", lambda self: None, raising=False)
    with pytest.raises(BadArguments, match=f"{inside.refuses} refuses its arguments: no such attention backend"):
        make()
    for thread in threading.enumerate():
        if thread.name == "engine output":  # it has nothing to read any more
            thread.join(10)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"override_engine_args": '{"dtypo": 1}'}, "dtypo: no such key"),
        ({"extra_engine_args": "/gone.yaml"}, "--extra-engine-args"),
        ({"override_engine_args": '{"dtype": "au'}, "--override-engine-args: not JSON"),
        ({"max_model_len": 1 << 20}, "this model takes"),
    ],
)
def test_wrong_arguments_end_the_start_and_leave_nothing(make: Make, options: dict[str, Any], words: str) -> None:
    before = threading.active_count()
    with pytest.raises(BadArguments, match=words):
        make(**options)
    assert threading.active_count() == before


def test_closing_ends_threads_and_files(make: Make, subject: Subject) -> None:
    make().engine.close()  # what is opened once for all

    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = counts()
    for _ in range(2):
        driver = make()
        driver.engine.submit(ask(0, PROMPT, 200))
        driver.step()
        driver.engine.close()
        driver.engine.close()
    for thread in threading.enumerate():
        if thread.name == "engine output":  # of TensorRT-LLM's processes
            thread.join(10)
    assert counts() == before
