"""The SGLang adapter over its stand-in: what the contract of all engines does not ask."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.infra.model.adapter import AdapterError, read_adapter
from penstock.infra.process.class_queue import StartShare
from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.sglang.api import load_sglang
from tests.adapters import other_weights, write_adapter
from tests.workers.engines.contract import BLOCK, LIMIT, WORDS, ask, fold, names
from tests.workers.engines.sglang.conftest import Make, inner, scheduler

PROMPT = WORDS[5:105]


def test_an_adapter_that_is_unloaded_while_it_is_used_goes_behind_its_last_sequence(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang loads nothing while it waits for that; and it has no adapter back in the meantime."""
    monkeypatch.setattr("penstock.workers.engines.external.engine.DROP_S", 0.0)
    driver = make(lora_folder=str(tmp_path))
    adapters, manager = driver.engine.adapters, inner(driver).tokenizer_manager
    assert adapters is not None
    poet, clerk = (
        read_adapter(write_adapter(tmp_path / name, modeldir.TINY, seed=seed, targets=("q_proj",)), adapters.max_rank)
        for seed, name in enumerate(("poet", "clerk"))
    )
    adapters.add("poet@1", adapters.prepare(poet, "poet@1"))
    weights = driver.engine.weights
    assert weights is not None
    with pytest.raises(RequestError, match="not replaced below LoRA adapters"):
        weights.read(modeldir.TINY)
    whole = driver.answer(ask("whole", PROMPT, 40, adapter="poet@1"))
    driver.engine.submit(ask("paused", PROMPT, 40, adapter="poet@1"))
    driver.until(lambda: bool(driver.seen.of("paused")), "the first token")
    weights.hold()
    driver.until(lambda: weights.settled, "rest")
    weights.proceed()
    driver.until(lambda: "paused" in driver.seen.ended(), "its end")
    assert driver.seen.tokens("paused") == whole
    driver.engine.submit(ask(0, PROMPT, 200, adapter="poet@1"))
    driver.engine.submit(ask(1, PROMPT, 200, adapter="poet@1"))
    driver.until(lambda: bool(driver.seen.of(0)), "the first token")
    adapters.remove("poet@1")
    adapters.add("clerk@1", adapters.prepare(clerk, "clerk@1"))
    assert set(manager.lora_registry) == {"poet@1", "clerk@1"}
    adapters.add("poet@1", adapters.prepare(poet, "poet@1"))  # what is still there is not read again
    assert driver.engine.cancel(0)
    adapters.remove("poet@1")
    driver.until(lambda: 1 in driver.seen.ended(), "the last sequence")
    assert driver.seen.failures == []
    driver.until(lambda: set(manager.lora_registry) == {"clerk@1"}, "the adapter to go")
    adapters.add("poet@1", adapters.prepare(poet, "poet@1"))
    driver.answer(ask(2, PROMPT, 4, adapter="poet@1"))
    high = read_adapter(write_adapter(tmp_path / "high", modeldir.TINY, rank=40, targets=("q_proj",)), 64)
    with pytest.raises(AdapterError, match=r"SGLang cannot load the adapter in .* rank 40"):
        adapters.prepare(high, "high@1")


def test_adapters_need_a_release_that_keeps_prefixes_apart(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    api = dataclasses.replace(load_sglang(), salts=False)
    monkeypatch.setattr("penstock.workers.engines.sglang.build.load_sglang", lambda: api)
    with pytest.raises(EngineError, match="no cache_salt, which LoRA adapters need"):
        make(lora=("poet=/a",))


def test_weights_that_fail_in_mid_load_end_the_engine(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reads the new folder once more on its way back to the old weights; its process ends by that."""
    monkeypatch.setattr("penstock.workers.engines.sglang.adapter.HEALTH_S", 0.02)
    other = other_weights(modeldir.TINY, tmp_path / "other")
    wide = load_file(other / "model.safetensors")
    name = next(name for name in wide if name.endswith("q_proj.weight"))
    save_file(wide | {name: wide[name][:-1].clone()}, other / "model.safetensors", metadata={"format": "pt"})
    driver = make()
    weights = driver.engine.weights
    assert weights is not None
    weights.hold()
    with pytest.raises(RequestError, match=rf"{name} is of size"):
        weights.read(other)
    with pytest.raises(EngineError, match="a process of SGLang"):
        weights.replace(other, lambda key, generated: b"")


def test_weights_of_another_model_are_refused_before_sglang_reads_them(make: Make, tmp_path: Path) -> None:
    weights = make().engine.weights
    assert weights is not None
    folder = other_weights(modeldir.TINY, tmp_path / "other")
    whole, config = load_file(folder / "model.safetensors"), (folder / "config.json").read_text()
    other = json.dumps(json.loads(config) | {"rms_norm_eps": 1e-4})
    name = next(name for name in whole if name.endswith("q_proj.weight"))
    for changed, reason in (
        ({key: each for key, each in whole.items() if key != name}, rf"it lacks 1 tensor \({name}\)"),
        (whole | {"extra": torch.ones(2)}, r"the model has no 1 tensor \(extra\)"),
        (whole | {name: torch.full_like(whole[name], float("nan"))}, "NaN or infinite"),
        (whole | {name: whole[name].to(torch.float8_e4m3fn)}, "another data type"),
    ):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RequestError, match=reason):
            weights.read(folder)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(other)
    with pytest.raises(RequestError, match="of another model: rms_norm_eps differ"):
        weights.read(folder)
    (folder / "config.json").write_text(config)
    assert weights.read(folder) == folder


def test_an_engine_without_the_memory_saver_does_not_sleep(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang says that it did, and frees nothing."""
    driver = make()
    weights = driver.engine.weights
    assert weights is not None
    weights.hold()
    with pytest.raises(RequestError, match="--sleep-after-s, --share-device, or enable_memory_saver"):
        weights.sleep()
    weights.proceed()
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path / "nvidia" / "cu13" / "lib") in load_sglang().cuda_folders()
    monkeypatch.setattr(sys.modules["importlib.util"], "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="pip install torch-memory-saver"):
        make(sleep_after_s=60.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"override_engine_args": '{"dp_size": 2}'}, "data-parallel ranks"),
        ({"role": "prefill"}, "the other engine of a pair"),
    ],
)
def test_flags_of_weights_need_an_engine_whose_weights_change(make: Make, given: dict[str, Any], words: str) -> None:
    assert make(**given).engine.weights is None
    with pytest.raises(BadArguments, match=f"{words}.*leave out --weights-folder"):
        make(weights_folder=("/weights",), **given)


def test_a_sequence_that_stands_still_can_be_cancelled_and_a_paused_one_finds_its_kv(make: Make) -> None:
    driver = make()
    weights = driver.engine.weights
    assert weights is not None
    whole = driver.answer(ask(0, PROMPT, 40))
    for key in (1, 2):
        driver.engine.submit(ask(key, PROMPT, 40))
    driver.until(lambda: len(driver.seen.of(2)) > 3, "some tokens")
    weights.hold()
    driver.until(lambda: weights.settled, "rest")
    said = len(driver.seen.outputs)
    assert driver.engine.cancel(1)
    driver.engine.submit(ask(3, PROMPT, 40))
    driver.step()
    assert len(driver.seen.outputs) == said
    weights.proceed()
    driver.until(lambda: {2, 3} <= driver.seen.ended(), "their ends")
    assert [driver.seen.tokens(key) for key in (2, 3)] == [whole, whole]
    assert len([each for each in driver.seen.started if each.key == 2]) == 1


def test_a_scheduler_that_dies_is_an_engine_error_also_without_requests(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.engines.sglang.adapter.HEALTH_S", 0.02)
    driver = make()
    llm = inner(driver)
    assert not llm.tokenizer_manager._subprocess_watchdog.running  # it would end this process
    llm.processes[0].kill()
    with pytest.raises(EngineError, match=f"pid {llm.processes[0].pid}"):
        driver.until(lambda: False, "the error")
    with pytest.raises(EngineError):
        driver.engine.submit(ask(1, PROMPT))


def test_the_death_of_one_rank_of_several_is_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.engines.sglang.adapter.HEALTH_S", 0.02)
    driver = make(override_engine_args='{"dp_size": 2}')
    driver.engine.submit(ask(0, PROMPT, 300, rank=0))
    inner(driver).processes[1].kill()
    with pytest.raises(EngineError, match="has ended"):
        driver.until(lambda: False, "the error")


def test_what_waits_for_a_slot_waits_here_and_starts_by_tenants_shares(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines of other packages share this; the stand-in of one of them shows it."""
    monkeypatch.setattr("penstock.infra.process.class_queue.QUANTUM", 0)
    driver = make(max_running=2)
    for number in range(6):
        driver.engine.submit(ask(f"a{number}", WORDS[number : number + 40], 60, share=StartShare(1, "a")))
    driver.until(lambda: len(driver.seen.started) == 2, "the first two")
    assert len(scheduler(driver).jobs) == 2
    assert driver.engine.stats().waiting == 4
    driver.engine.submit(ask("b", WORDS[50:90], 6, share=StartShare(1, "b")))
    assert driver.engine.cancel("a3")
    keys = {"a0", "a1", "a2", "a4", "a5", "b"}
    driver.until(lambda: keys <= driver.seen.ended(), "all ends")
    order = [each.key for each in driver.seen.started]
    assert set(order) == keys
    assert order.index("b") < order.index("a4")
    driver.idle()


def test_ranks_have_caches_and_events_of_their_own(make: Make) -> None:
    driver = make(override_engine_args='{"dp_size": 2}')
    info = driver.engine.info
    assert (info.dp_size, info.total_blocks, info.slots) == (2, 2 * 96, 2 * 4)
    driver.answer(ask(0, PROMPT, 4, rank=1))
    driver.until(lambda: set(names(PROMPT)) <= set(fold(driver.engine.dump(1))), "the events of rank 1")
    assert (driver.fold(), driver.engine.dump(0)) == ({}, [])
    assert driver.run(ask(1, PROMPT, 2, rank=1)).cached(1) > 0
    assert driver.run(ask(2, PROMPT, 2, rank=0)).cached(2) == 0


def test_with_a_draft_head_the_whole_context_is_there_and_its_blocks_are_named(make: Make) -> None:
    driver = make(override_engine_args='{"speculative_algorithm": "EAGLE3"}')
    assert driver.engine.info.max_model_len == LIMIT
    assert len(driver.answer(ask(0, WORDS[: LIMIT - 10], 10))) == 10
    driver.remembers(WORDS[: LIMIT - 10])
    assert driver.run(ask(1, WORDS[: LIMIT - 50], 2)).cached(1) >= LIMIT - 50 - BLOCK


def test_blocks_of_another_size_end_the_start(make: Make) -> None:
    with pytest.raises(EngineError, match="SGLang chose blocks of 64 tokens for this model; use --block-size 64"):
        make(override_engine_args='{"attention_backend": "flashmla"}', max_batched_tokens=128)


def test_a_worker_takes_no_longer_sequences_than_its_pool_holds(make: Make) -> None:
    driver = make(kv_blocks=4)
    longest = driver.engine.info.max_model_len
    assert longest == 4 * BLOCK - 6
    assert driver.answer(ask(0, WORDS[: longest - 1], 1))
    with pytest.raises(RequestError, match=f"this model takes {longest}, output included"):
        driver.engine.submit(ask(1, WORDS[:longest], 1))


def test_a_folder_s_name_may_have_a_colon() -> None:
    made: dict[str, Any] = {}
    api = dataclasses.replace(load_sglang(), llm=made.update)  # type: ignore[arg-type]
    api.construct("/models/llama3:8b", {})
    assert made == {"model_path": "/models/llama3:8b", "served_model_name": "/models/llama3_8b"}


def test_seeds_count_only_in_deterministic_engines(make: Make) -> None:
    drawn = Sampling(temperature=1.0, seed=3)
    plain = make(override_engine_args="{}")
    assert plain.answer(ask(0, PROMPT, 16, drawn)) != plain.answer(ask(1, PROMPT, 16, drawn))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ({"type": "abort", "message": "too odd", "status_code": 400}, Code.invalid_request),
        ({"type": "abort", "message": "NCCL", "status_code": 500}, Code.engine_error),
        ({"type": "abort", "message": "Aborted", "status_code": None}, Code.cancelled),
    ],
)
def test_an_error_of_one_request_is_its_own(make: Make, reason: dict[str, Any], code: Code) -> None:
    driver = make()
    whole = driver.answer(ask("other", PROMPT))
    manager = inner(driver).tokenizer_manager
    deliver = manager.deliver

    def spoilt(rid: str, tokens: list[int], info: dict[str, Any]) -> None:
        bad = rid.endswith("1")
        deliver(rid, tokens, {"finish_reason": reason} if bad and info["completion_tokens"] > 2 else info)

    scheduler(driver).deliver = spoilt
    seen = driver.run(ask("bad", PROMPT[::-1]), ask("other", PROMPT))
    (failure,) = seen.failures
    assert (failure.key, failure.code, failure.message) == ("bad", code, reason["message"])
    assert len(seen.of("bad")) == 2  # the last chunk of an aborted request repeats a token
    assert seen.tokens("other") == whole


def test_spans_need_sglang_s_own_exporters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(EngineError, match=r"pip install 'sglang\[tracing\]'"):
        make(otlp_endpoint="http://c:4318/v1/traces")


def test_closing_ends_its_processes(make: Make) -> None:
    driver = make()
    processes = inner(driver).processes
    driver.engine.close()
    assert all(process.poll() is not None for process in processes)


def test_a_transport_that_moves_nothing_is_refused(make: Make) -> None:
    with pytest.raises(BadArguments, match="use nixl"):
        make(override_engine_args='{"disaggregation_transfer_backend": "fake"}', role="decode")
