"""The engine on the stand-in: requests, their ends and aborts, errors, events, statistics, the end of it all."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.infra.model.adapter import AdapterError, AdapterFolder, read_adapter
from penstock.schemas import block_hashes, wire
from penstock.schemas.errors import Code
from penstock.schemas.kv import Cleared, Stored
from penstock.schemas.requests import Sampling
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.external import engine as shell
from penstock.workers.engines.native.build import build as native_engine
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.trtllm import adapter
from tests import standins
from tests.adapters import write_adapter
from tests.workers.engines.trtllm.conftest import BLOCK, LIMIT, MODEL, Results, ask, run, until

Make = Callable[..., Any]

TEXT = "The broker keeps every request in an ordered log, and the router reads the log to steer the next request. "


@pytest.fixture(scope="session")
def prompt(vocabulary: modeldir.ModelDir) -> list[int]:
    tokens: list[int] = vocabulary.tokenizer.encode(TEXT * 2).ids
    assert len(tokens) > 3 * BLOCK
    return tokens


@pytest.fixture(scope="session")
def expected(prompt: list[int]) -> list[int]:
    """What our own engine goes on with, greedily."""
    engine = native_engine(str(MODEL), NativeOptions(device="cpu", dtype="float32", max_model_len=LIMIT, kv_blocks=64))
    results = run(engine, ask("a", prompt, 24, ignore_eos=True))
    engine.close()
    return results.tokens("a")


def names(vocabulary: modeldir.ModelDir, tokens: Sequence[int], salt: str = "") -> list[bytes]:
    root = block_hashes.root(vocabulary.revision, salt=salt)
    return block_hashes.split(block_hashes.chain(wire.pack_tokens(tokens), BLOCK, root))


# --- answers


def test_it_answers_what_our_own_engine_answers(make: Make, prompt: list[int], expected: list[int]) -> None:
    engine = make()
    results = run(engine, ask("a", prompt, 24, ignore_eos=True), ask("b", prompt[:40], 5))
    assert results.tokens("a") == expected
    assert results.of("a")[-1].finish == "length"
    assert len(results.tokens("b")) <= 5
    assert not engine.has_work() or not engine.step().outputs


def test_several_tokens_at_once_and_few_at_the_end_each_come_once(
    make: Make, prompt: list[int], expected: list[int]
) -> None:
    engine = make(override_engine_args='{"stream_interval": 7}')
    results = run(engine, ask("a", prompt, 24, ignore_eos=True))
    assert results.tokens("a") == expected
    assert max(len(step.outputs) for step in results.steps) > 1


@pytest.mark.parametrize("shown", [True, False])
def test_the_stop_token_is_reported_and_ends_it(
    make: Make, quirks: Any, prompt: list[int], expected: list[int], shown: bool
) -> None:
    quirks.eos_in_token_ids = shown
    engine = make()
    stop = expected[3]
    results = run(engine, ask("a", prompt, 24, token_ids=(stop,), ignore_eos=True))
    end = expected.index(stop) + 1
    assert results.tokens("a") == expected[:end]
    assert (results.of("a")[-1].finish, results.of("a")[-1].stop_token) == ("stop", stop)


@pytest.mark.parametrize("shown", [True, False])
def test_so_is_the_end_token(make: Make, quirks: Any, prompt: list[int], shown: bool) -> None:
    """A bias makes it the only token."""
    quirks.eos_in_token_ids = shown
    engine = make()
    eos = engine.info.eos_token_ids[0]
    results = run(engine, ask("a", prompt, 9, Sampling(temperature=0.0, logit_bias={eos: 100.0})))
    assert (results.tokens("a"), results.of("a")[-1].finish, results.of("a")[-1].stop_token) == ([eos], "stop", eos)


def test_a_second_prompt_finds_the_first_ones_blocks_and_tenants_find_nothing(make: Make, prompt: list[int]) -> None:
    engine = make()
    tenant = block_hashes.root("rev", salt="tenant")
    assert run(engine, ask("a", prompt, 2)).cached("a") == 0
    assert run(engine, ask("b", prompt, 2)).cached("b") >= len(prompt) // BLOCK * BLOCK - BLOCK
    assert run(engine, ask("c", prompt, 2, root=tenant)).cached("c") == 0
    assert engine.stats().hit_tokens > 0
    assert engine.stats().prompt_tokens == 3 * len(prompt)


# --- refusals and errors


def test_without_chunks_a_prompt_longer_than_a_step_is_refused(make: Make) -> None:
    engine = make(
        max_batched_tokens=64,
        max_model_len=64,
        override_engine_args='{"enable_chunked_prefill": false, "max_seq_len": 64, "max_num_tokens": 64}',
    )
    assert engine.adapter.follower.options.prompt_limit == 64


def test_a_request_error_fails_its_request_and_no_other(make: Make, prompt: list[int], monkeypatch: Any) -> None:
    from tensorrt_llm.executor.utils import RequestError as Theirs

    engine = make()
    real = engine.runtime.llm.generate_async
    errors = {5: Theirs("prompt should not exceed max_num_tokens"), 6: ValueError("bad"), 7: NotImplementedError("no")}

    def generate_async(inputs: Any, **more: Any) -> Any:
        if len(inputs) in errors:
            raise errors[len(inputs)]
        return real(inputs, **more)

    monkeypatch.setattr(engine.runtime.llm, "generate_async", generate_async)
    results = run(engine, ask("a", prompt, 4), *(ask(n, prompt[:n], 4) for n in errors))
    assert {failure.key: failure.code for failure in results.failures} == {
        5: Code.context_length_exceeded,
        6: Code.invalid_request,
        7: Code.unsupported,
    }
    assert results.tokens("a")
    assert run(engine, ask("b", prompt, 2)).tokens("b")


def test_a_request_error_on_the_way_fails_its_request_and_no_other(make: Make, prompt: list[int]) -> None:
    from tensorrt_llm._standin import hooks
    from tensorrt_llm.executor.result import ErrorResponse

    engine = make()
    hooks.hold(engine.runtime.llm)
    engine.submit(ask("a", prompt, 8, ignore_eos=True))
    engine.submit(ask("b", prompt, 8, ignore_eos=True))
    sequence = engine.active["a"]
    while sequence.call.result is None:
        engine.step()
    sequence.call.result._inbox.put(ErrorResponse("this one cannot go on"))
    results = until(engine, lambda results: "a" in results.ended())
    hooks.free(engine.runtime.llm)
    until(engine, lambda results: "b" in results.ended(), results)
    assert results.failure("a").code == Code.engine_error
    assert len(results.tokens("b")) == 8


def test_any_other_error_is_the_engines_end(make: Make, prompt: list[int]) -> None:
    from tensorrt_llm._standin import hooks

    engine = make()
    hooks.hold(engine.runtime.llm)
    engine.submit(ask("a", prompt, 100, ignore_eos=True))
    while engine.active["a"].call.result is None:
        engine.step()
    hooks.die(engine.runtime.llm)
    hooks.free(engine.runtime.llm)
    with pytest.raises(EngineError, match="illegal memory access"):
        until(engine, lambda results: False)
    with pytest.raises(EngineError):
        engine.submit(ask("b", prompt, 2))


@pytest.mark.parametrize("method", ["get_kv_cache_events", "get_stats"])
def test_an_error_in_reading_events_is_raised_before_the_next_generation(
    make: Make, prompt: list[int], monkeypatch: Any, method: str
) -> None:
    engine = make()

    def broken(timeout: float = 2) -> Any:
        raise OSError("the queue is gone")

    run(engine, ask("a", prompt, 2))
    monkeypatch.setattr(engine.runtime.llm, method, broken)
    deadline = time.monotonic() + 10
    while engine.runtime.inbox.failure is None and time.monotonic() < deadline:
        engine.runtime.inbox.get(timeout=10)
    with pytest.raises(EngineError, match="the queue is gone"):
        engine.submit(ask("b", prompt, 2))


# --- aborts


def test_an_abort_that_is_not_answered_leaves_nothing_behind(
    make: Make, quirks: Any, prompt: list[int], monkeypatch: Any
) -> None:
    quirks.abort_answers = False
    monkeypatch.setattr(adapter, "ABORT_S", 0.05)
    engine = make()
    engine.submit(ask("a", prompt, 400, ignore_eos=True))
    until(engine, lambda results: bool(results.tokens("a")))
    task = engine.active["a"].task
    engine.cancel("a")
    deadline = time.monotonic() + 10
    while not task.done():
        assert time.monotonic() < deadline
        engine.step()


# --- waiting


def test_a_step_waits_but_not_long_and_never_spins(make: Make, prompt: list[int]) -> None:
    from tensorrt_llm._standin import hooks

    engine = make(publish_events_and_metrics=False)
    llm = engine.runtime.llm
    hooks.hold(llm)
    engine.submit(ask("a", prompt, 4))
    began, cpu, steps = time.monotonic(), time.thread_time(), 40
    for _ in range(steps):
        assert engine.step().empty
    spent = time.monotonic() - began
    assert steps * shell.WAIT_S * 0.9 <= spent < 20 * steps * shell.WAIT_S
    assert time.thread_time() - cpu < spent / 2
    hooks.free(llm)
    until(engine, lambda results: "a" in results.ended())


def test_a_long_silence_is_reported(make: Make, prompt: list[int], monkeypatch: Any) -> None:
    from structlog.testing import capture_logs
    from tensorrt_llm._standin import hooks

    monkeypatch.setattr(shell, "SILENT_S", 0.01)
    engine = make(publish_events_and_metrics=False)
    hooks.hold(engine.runtime.llm)
    engine.submit(ask("a", prompt, 4))
    with capture_logs() as lines:
        for _ in range(5):
            engine.step()
    assert "engine_silent" in {line["event"] for line in lines}
    hooks.free(engine.runtime.llm)


# --- events and statistics


def stored(results: Results) -> list[bytes]:
    return [name for event in results.events if isinstance(event, Stored) for name in block_hashes.split(event.digests)]


def test_attention_dp_ranks_are_chosen_and_distinguished(
    make: Make, prompt: list[int], vocabulary: modeldir.ModelDir, quirks: Any
) -> None:
    quirks.gpus = 2
    engine = make(tensor_parallel_size=2, override_engine_args='{"enable_attention_dp": true}')
    wanted = names(vocabulary, prompt)
    results = run(engine, ask("a", prompt, 1, rank=1))
    until(engine, lambda results: len(of_rank(results, 1)) >= len(wanted), results)
    assert (stored(results), of_rank(results, 1)) == ([], wanted)
    assert (engine.dump(0), of_rank_dump(engine, 1)) == ([], wanted)
    results = run(engine, ask("b", prompt, 1, rank=0), ask("c", prompt, 1, rank=1))
    assert results.cached("b") == 0
    assert results.cached("c") > 0


def of_rank(results: Results, rank: int) -> list[bytes]:
    events = [event for step in results.steps for event in step.others.get(rank, ())]
    return [name for event in events if isinstance(event, Stored) for name in block_hashes.split(event.digests)]


def of_rank_dump(engine: Any, rank: int) -> list[bytes]:
    return [name for event in engine.dump(rank) for name in block_hashes.split(event.digests)]


def test_lost_events_clear_what_routers_know(make: Make, prompt: list[int]) -> None:
    from tensorrt_llm._standin import hooks

    engine = make()
    results = run(engine, ask("a", prompt, 1))
    until(engine, lambda results: bool(stored(results)), results)
    hooks.emit(engine.runtime.llm, {"type": "removed", "block_hashes": []}, skip=2)
    until(engine, lambda results: Cleared() in results.events, results)
    assert engine.dump() == []


def test_switched_off_it_reads_and_reports_nothing(make: Make, prompt: list[int]) -> None:
    engine = make(publish_events_and_metrics=False)
    results = run(engine, ask("a", prompt, 8, ignore_eos=True))
    assert results.events == []
    assert not engine.info.kv_events
    watch = engine.adapter.follower.queues
    assert (watch.events.wanted, watch.stats.wanted) == (False, False)


def test_the_engines_own_metrics_come_beside_ours(make: Make, prompt: list[int]) -> None:
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

    for theirs in [c for c, of in REGISTRY._collector_to_names.items() if any(n.startswith("trtllm") for n in of)]:
        REGISTRY.unregister(theirs)  # of an engine of another test: there is one per process
    engine = make()
    registry = CollectorRegistry()
    (collector,) = engine.collectors()
    registry.register(collector)
    run(engine, ask("a", prompt, 8, ignore_eos=True))
    deadline = time.monotonic() + 10
    while b"trtllm_request_success_total{" not in (text := generate_latest(registry)):
        assert time.monotonic() < deadline, text.decode()
        engine.step()
    until(engine, lambda results: b"trtllm_kv_cache_max_blocks" in generate_latest(registry))
    assert b"python_info" not in text


# --- the end


# --- LoRA adapters


@pytest.fixture
def adapters_on_disk(tmp_path: Path) -> dict[str, AdapterFolder]:
    """Before ``make``, which counts threads: transformers' progress bars leave one."""
    kinds: dict[str, dict[str, Any]] = {name: {"targets": ("q_proj",)} for name in ("poet", "clerk", "scribe", "high")}
    kinds |= {"head": {"targets": ("q_proj", "lm_head")}}
    kinds["high"]["rank"] = 16
    folders = [write_adapter(tmp_path / name, MODEL, seed=len(name), **more) for name, more in kinds.items()]
    return {folder.name: read_adapter(folder, 64) for folder in folders}


@pytest.mark.parametrize("variant", ["1.2.1", "1.3"])
def test_adapters_that_it_cannot_read_are_found_before_they_end_it_and_what_it_has_read_is_counted(
    adapters_on_disk: dict[str, AdapterFolder], make: Make, prompt: list[int], variant: str
) -> None:
    with standins.installed(variant):
        engine = make(lora_folder="/", max_lora_rank=8, max_cpu_loras=2)
        adapters = engine.adapters

        def prepared(name: str) -> object:
            found: object = adapters.prepare(adapters_on_disk[name], f"{name}@1")
            return found

        with pytest.raises(AdapterError, match=r"TensorRT-LLM cannot load the adapter in .*: it changes lm_head"):
            prepared("head")
        for name in ("poet", "clerk"):
            adapters.add(f"{name}@1", prepared(name))
        asked = {name: ask(name, prompt, 6, ignore_eos=True, adapter=f"{name}@1") for name in ("poet", "clerk")}
        results = run(engine, *asked.values(), ask("plain", prompt, 6, ignore_eos=True))
        assert len({tuple(results.tokens(name)) for name in ("poet", "clerk", "plain")}) == 3
        adapters.remove("poet@1")
        with pytest.raises(AdapterError, match="keeps also those that were unloaded; restart the worker"):
            prepared("scribe")
        adapters.add("poet@1", prepared("poet"))
        assert run(engine, asked["poet"]).tokens("poet") == results.tokens("poet")


def test_an_adapter_that_later_releases_cannot_read_is_an_error_of_its_own(
    adapters_on_disk: dict[str, AdapterFolder], make: Make, prompt: list[int], expected: list[int]
) -> None:
    with standins.installed("1.3"):
        engine = make(lora_folder="/", max_lora_rank=8)
        with pytest.raises(AdapterError, match="Failed to load LoRA adapter: the adapter's rank is greater"):
            engine.adapters.prepare(adapters_on_disk["high"], "high@1")
        assert run(engine, ask("a", prompt, 4, ignore_eos=True)).tokens("a") == expected[:4]


def test_autodeploy_has_no_adapters(make: Make) -> None:
    with pytest.raises(BadArguments, match="AutoDeploy serves no LoRA adapters"):
        make(lora=("poet=/a",), trtllm_backend="autodeploy")
