"""The vLLM adapter over its stand-in: what the contract of all engines does not ask."""

import contextlib
import gc
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter
from safetensors.torch import load_file, save_file

from penstock.infra.bounded import ByteCache
from penstock.infra.constraints import constraint_grammar
from penstock.infra.constraints.constraint_grammar import REGEX
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.infra.model.adapter import AdapterError, read_adapter
from penstock.schemas.errors import Code
from penstock.schemas.requests import Constraint, Sampling
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.external import constrained, handoff_state
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.engines.vllm.adapter import PREFIX, SchedulerStats
from tests import standins
from tests.adapters import other_weights, write_adapter
from tests.workers.engines.contract import ALL, BLOCK, WORDS, Driver, ask, fold, inner, made, names, prefilled

(SUBJECT,) = (subject for subject in ALL if subject.name == "vllm")
PROMPT = WORDS[5:105]
Make = Callable[..., Driver]

pytestmark = pytest.mark.skipif(standins.real("vllm"), reason="reaches into the stand-in")


@pytest.fixture(scope="module", autouse=True)
def standin() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with standins.installed():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as open_ones:
        yield lambda **options: open_ones.enter_context(made(SUBJECT, **options))


def test_an_engine_that_dies_is_an_engine_error_at_the_next_step(make: Make) -> None:
    driver = make()

    def broken() -> None:
        raise RuntimeError("CUDA error")

    inner(driver).core.step = broken
    driver.engine.submit(ask(0, PROMPT))
    with pytest.raises(EngineError, match="EngineDeadError"):
        driver.until(lambda: False, "the error")
    with pytest.raises(EngineError):
        driver.engine.submit(ask(1, PROMPT))


def test_an_engine_that_dies_idle_is_found_by_its_health(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.engines.vllm.adapter.HEALTH_S", 0.02)
    driver = make()
    inner(driver).core.dead = True
    with pytest.raises(EngineError, match="EngineDeadError"):
        driver.until(lambda: False, "the error")


def test_an_error_of_one_request_is_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make()
    whole = driver.answer(ask("other", PROMPT))
    import vllm.v1.engine.async_llm as real
    from vllm.exceptions import GenerationError, VLLMValidationError

    add = real.AsyncLLM._add
    for error, code in (
        (VLLMValidationError("too odd"), Code.invalid_request),
        (GenerationError("try again"), Code.engine_error),
        (NotImplementedError("not yet"), Code.engine_error),
    ):

        def refuse(self: Any, prompt: Any, *more: Any, error: Exception = error) -> Any:
            if prompt["prompt_token_ids"][0] == 9:
                raise error
            return add(self, prompt, *more)

        monkeypatch.setattr(real.AsyncLLM, "_add", refuse)
        seen = driver.run(ask("bad", [9] * 20), ask("other", PROMPT))
        (failure,) = seen.failures
        assert (failure.key, failure.code) == ("bad", code)
        assert seen.tokens("other") == whole


def test_a_grammar_that_the_worker_has_compiled_is_not_checked_again_where_other_requests_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.v1.structured_output.backend_guidance as backend

    threads: list[str] = []

    def noted(*arguments: Any) -> str:
        threads.append(threading.current_thread().name)
        return ""

    monkeypatch.setattr(backend, "LLMatcher", SimpleNamespace(validate_grammar=noted))
    driver = make()
    constraint = Constraint(REGEX, "[a-f]{4}")
    seen = driver.run(ask(0, PROMPT, 20, constraint=constraint))
    assert (seen.failures, seen.outputs[-1].finish) == ([], "stop")
    assert threads == []


def test_no_stream_waits_for_a_schema_that_another_request_brings(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine gets of a schema is made where that is compiled; the engine compiles it beside its steps."""
    from vllm.v1.structured_output import StructuredOutputManager

    made: list[str] = []
    as_lark, create = constraint_grammar.as_lark, StructuredOutputManager._create_grammar
    compiling, go_on = threading.Event(), threading.Event()

    def noted(constraint: Constraint) -> str:
        made.append(threading.current_thread().name)
        return as_lark(constraint)

    def create_late(manager: Any, request: Any) -> Any:
        compiling.set()
        assert go_on.wait(30)
        return create(manager, request)

    monkeypatch.setattr(constraint_grammar, "as_lark", noted)
    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", create_late)
    monkeypatch.setattr(constrained, "_texts", ByteCache(1, lambda *_: 1))  # only what is in use is kept
    driver = make()
    constraint = Constraint(REGEX, "[a-f]{5}")
    assert driver.engine.grammars.known(constraint) is None
    with ThreadPoolExecutor(1, "compiles") as threads:
        kept = threads.submit(driver.engine.grammars.compile, constraint).result()
    assert made == ["compiles_0"]
    driver.engine.submit(ask("stream", PROMPT, 60))
    driver.until(lambda: len(driver.seen.of("stream")) > 2, "its first tokens")
    driver.engine.submit(ask("schema", PROMPT, 20, constraint=constraint))
    driver.until(compiling.is_set, "the engine compiles")
    before = len(driver.seen.of("stream"))
    driver.until(lambda: len(driver.seen.of("stream")) > before + 10, "more of its tokens")
    assert not driver.seen.of("schema")
    go_on.set()
    driver.until(lambda: {"stream", "schema"} <= driver.seen.ended(), "both end")
    assert (driver.seen.failures, len(made)) == ([], 1)
    assert driver.engine.grammars.known(constraint) is not None
    del kept
    gc.collect()
    assert driver.engine.grammars.known(constraint) is None, "its text is no longer kept"


def test_an_answer_continues_after_a_token_that_is_drawn_again_and_differs(make: Make) -> None:
    """The prefill engine drew a token that this one does not: the answer goes on behind that token, not its own."""
    source, target = make(role="prefill"), make(role="decode")
    pinned, first = prefilled(source, ask("h", PROMPT, 12))
    other = next(token for token in range(50, 60) if token != first)
    state = msgspec.msgpack.decode(pinned.opaque, type=handoff_state.HandoffState)
    opaque = msgspec.msgpack.encode(msgspec.structs.replace(state, first=[other]))
    whole = target.answer(ask(0, PROMPT, 12, generated=[other], base=b"r" * 16))
    generate, core, running = inner(target).generate, inner(target).core, []

    def noted(*arguments: Any, **named: Any) -> Any:
        running.append(len(core.running) + len(core.waiting))
        return generate(*arguments, **named)

    inner(target).generate = noted
    seen = target.run(ask(1, PROMPT, 12, generated=[other], opaque=opaque))
    assert seen.failures == []
    assert running == [0, 0], "the first call is aborted before the second"
    assert seen.tokens(1) == whole
    assert seen.cached(1) >= len(PROMPT) // BLOCK * BLOCK  # from the KV that was fetched


def test_a_drawn_answer_continues_elsewhere_as_one_engine_would_have_drawn_it(make: Make) -> None:
    source, target = make(role="prefill"), make(role="decode")
    drawn = Sampling(temperature=0.9, seed=11)
    whole = target.answer(ask(0, PROMPT, 12, drawn, base=b"r" * 16))
    pinned, first = prefilled(source, ask("h", PROMPT, 12, drawn))
    seen = target.run(ask(1, PROMPT, 12, drawn, generated=[first], opaque=pinned.opaque))
    assert [first, *seen.tokens(1)] == whole


def test_kv_is_let_go_of_when_fetched_and_when_its_lease_runs_out(make: Make) -> None:
    source, target = make(role="prefill", handoff_lease_s=1.0), make(role="decode")
    core = inner(source).core
    pinned, first = prefilled(source, ask("h", PROMPT))
    assert len(core.offers) == 1
    target.run(ask(0, PROMPT, generated=[first], opaque=pinned.opaque))
    assert core.offers == {}
    assert core.pool.usage == 0.0
    prefilled(source, ask("i", PROMPT))
    source.until(lambda: core.offers == {}, "the end of the lease")


def test_a_prefill_engine_that_is_gone_costs_a_computation(make: Make) -> None:
    source, target = make(role="prefill"), make(role="decode")
    whole = target.answer(ask(0, PROMPT, base=b"r" * 16))
    pinned, first = prefilled(source, ask("h", PROMPT))
    source.engine.close()
    seen = target.run(ask(1, PROMPT, generated=[first], opaque=pinned.opaque))
    assert (seen.failures, seen.tokens(1)) == ([], whole[1:])


def test_events_that_are_lost_for_good_void_what_was_known(make: Make) -> None:
    driver = make()
    driver.answer(ask(0, PROMPT))
    driver.remembers(PROMPT)
    driver.idle()
    publisher = inner(driver).events
    send, dropped = publisher._pub.send_multipart, list[int]()

    class Lossy:
        """Neither sends nor keeps the next message."""

        def send_multipart(self, parts: Any) -> None:
            if dropped:
                send(parts)
            else:
                dropped.append(int.from_bytes(parts[1], "big"))

    class Forgetful(deque[Any]):
        def append(self, item: Any) -> None:
            if item[0] not in dropped:
                super().append(item)

    publisher._pub, publisher._buffer = Lossy(), Forgetful(publisher._buffer)
    driver.answer(ask(0, WORDS[100:150], 3))
    driver.answer(ask(0, WORDS[200:250], 3))
    driver.remembers(WORDS[200:250])
    assert not set(names(PROMPT)) & set(driver.fold())
    assert fold(driver.engine.dump()) == driver.fold()


def test_an_end_in_order_is_not_reported_as_a_failure(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    driver = make()
    driver.answer(ask(0, PROMPT, 2))
    driver.engine.close()
    assert "output_handler failed" not in caplog.text


def test_as_far_as_rope_scaling_goes_a_longer_length_may_be_asked_for(make: Make, tmp_path: Path) -> None:
    """vLLM takes no more than config.json names, unless it is told that this is meant."""
    config = json.loads((modeldir.DEMO / "config.json").read_bytes())
    for file in modeldir.DEMO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    named = config["max_position_embeddings"]
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": named}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def length(wanted: int) -> int:
        engine = SUBJECT.make(SUBJECT.settings(max_model_len=wanted, kv_blocks=2 * named // BLOCK), tmp_path)
        engine.close()
        return engine.info.max_model_len

    assert (length(0), length(named + 1)) == (named, named + 1)
    with pytest.raises(BadArguments, match=f"takes {2 * named}"):
        length(2 * named + 1)


def test_without_nixl_a_handoff_is_refused_at_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_STANDIN_NIXL", "none")
    with pytest.raises(EngineError, match="pip install nixl"):
        make(role="prefill")
    assert make().answer(ask(0, PROMPT))


def test_builds_for_cpus_and_gpus_take_blocks_of_other_sizes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadArguments, match="multiples of 32"):
        make(block_size=16)
    with pytest.raises(BadArguments, match="raise --kv-blocks"):
        make(kv_blocks=3)
    with pytest.raises(BadArguments, match=r"install vllm$"):
        make(device="cuda")
    monkeypatch.setenv("VLLM_STANDIN_PLATFORM", "cuda")
    driver = make(block_size=16, device="cuda")
    assert len(driver.answer(ask(0, PROMPT))) == 8
    assert driver.engine.info.handoff_memory == "cuda"


def test_weights_that_vllm_would_replace_in_part_are_not_replaced(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = other_weights(modeldir.TINY, tmp_path / "other")
    (tmp_path / "adapters").mkdir()

    def refused(reason: str, **options: Any) -> None:
        weights = make(**options).engine.weights
        assert weights is not None
        weights.hold()
        with pytest.raises(RequestError, match=reason):
            weights.read(other)
        with pytest.raises(RequestError, match="vLLM frees memory only if it was started for that"):
            weights.sleep()

    refused("a head that is tied to the embeddings", model=modeldir.DEMO)
    with pytest.raises(BadArguments, match="Sleep mode is not supported"):
        make(sleep_after_s=60.0)
    monkeypatch.setenv("VLLM_STANDIN_PLATFORM", "cuda")
    refused("forgets its LoRA adapters", lora_folder=str(tmp_path / "adapters"), device="cuda")
    narrow = load_file(other / "model.safetensors")
    name = next(name for name in narrow if name.endswith("q_proj.weight"))
    save_file(narrow | {name: narrow[name][:-1].clone()}, other / "model.safetensors", metadata={"format": "pt"})
    weights = make(device="cuda").engine.weights
    assert weights is not None
    weights.hold()
    with pytest.raises(EngineError, match=f"vLLM cannot load the weights .* size mismatch for {name}"):
        weights.replace(other, lambda key, generated: b"")


def test_preemptions_and_usage_come_from_the_scheduler() -> None:
    scheduler = SchedulerStats()
    assert scheduler.used == 0.0
    for rank, usage in ((0, 0.25), (1, 0.75)):
        logger = scheduler.factory(None, rank)
        logger.log_engine_initialized()
        logger.record(type("S", (), {"kv_cache_usage": usage})(), type("I", (), {"num_preempted_reqs": 2})())
        logger.record(scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=rank)
        logger.record_sleep_state(1, 0)
        logger.log()
    assert (scheduler.used, scheduler.preemptions) == (0.5, 4)


def test_only_vllm_s_own_series_are_handed_on() -> None:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "of vLLM", registry=registry).inc(3)
    Counter("other", "of others", registry=registry)
    ours = CollectorRegistry()
    ours.register(NativeSeries(PREFIX, registry))
    assert {metric.name for metric in ours.collect()} == {"vllm:prompt_tokens"}
    assert ours.get_sample_value("vllm:prompt_tokens_total") == 3.0


def test_adapters_are_dropped_behind_their_last_sequence_and_ranks_are_vllm_s(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.engines.external.engine.DROP_S", 0.0)
    driver = make(lora_folder=str(tmp_path), max_lora_rank=20)
    adapters = driver.engine.adapters
    assert adapters is not None
    assert inner(driver).vllm_config.lora_config == {"max_lora_rank": 32}
    read = read_adapter(write_adapter(tmp_path / "poet", modeldir.TINY, targets=("q_proj",)), adapters.max_rank)
    adapters.add("poet@1", adapters.prepare(read, "poet@1"))
    known = inner(driver).core.loras
    driver.engine.submit(ask(0, PROMPT, 20, adapter="poet@1"))
    driver.until(lambda: bool(driver.seen.outputs), "its first token")
    adapters.remove("poet@1")
    adapters.prepare(read, "poet@2")
    driver.until(lambda: bool(driver.seen.ended()), "its end")
    assert driver.seen.failures == []
    driver.until(lambda: set(known) == {2}, "the adapter to go")
    too_high = write_adapter(tmp_path / "high", modeldir.TINY, rank=40, targets=("q_proj",))
    with pytest.raises(AdapterError, match=r"vLLM cannot load the adapter .* rank 40 is greater than"):
        adapters.prepare(read_adapter(too_high, 64), "high@1")
    driver.until(lambda: not known, "the one that was read and never served to go")
