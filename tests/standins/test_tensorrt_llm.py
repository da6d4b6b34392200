"""The stand-in refuses what TensorRT-LLM 1.2.1 refuses, and answers in its shapes; 1.3's additions only when asked."""

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standins import FOLDER, installed

ROOT = FOLDER.parent.parent
MODELS = ROOT / "configs" / "models"
DEMO, TINY, SIGHTED = MODELS / "demo", MODELS / "tiny", MODELS / "demo-vision"
PROMPT = [(7 + i * i * 13 + i * 5) % 1270 for i in range(37)]
SIZE = 8


@pytest.fixture(scope="module", autouse=True)
def trt() -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with installed():
        import tensorrt_llm

        yield tensorrt_llm
    torch.set_num_threads(before)
    assert "tensorrt_llm" not in sys.modules
    assert str(FOLDER) not in sys.path


@pytest.fixture
def quirks() -> Iterator[Any]:
    """What the reference leaves open; as before after the test."""
    from tensorrt_llm._standin.variant import QUIRKS

    before = dataclasses.asdict(QUIRKS)
    yield QUIRKS
    for name, value in before.items():
        setattr(QUIRKS, name, value)


@contextlib.contextmanager
def engine(model: Path = DEMO, **options: Any) -> Iterator[Any]:
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import KvCacheConfig

    kv = {"tokens_per_block": SIZE, "max_tokens": 512, "event_buffer_max_size": 1000} | options.pop("kv", {})
    llm = LLM(str(model), kv_cache_config=KvCacheConfig(**kv), **options)
    try:
        yield llm
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def llm(trt: Any) -> Iterator[Any]:
    """One for the tests that change nothing in it."""
    with engine(enable_iter_perf_stats=True, guided_decoding_backend="xgrammar") as found:
        yield found


def params(**options: Any) -> Any:
    from tensorrt_llm import SamplingParams

    return SamplingParams(**{"end_id": 1276, "max_tokens": 8} | options)


def ask(llm: Any, prompt: Any = PROMPT, *, call: Any = None, **options: Any) -> Any:
    """The final result, waited for without a loop."""
    return llm.generate_async(prompt, params(**options), **(call or {})).result()


async def streamed(llm: Any, prompt: Any = PROMPT, *, call: Any = None, **options: Any) -> list[Any]:
    """Copies of every state of the answer's first output."""
    from tensorrt_llm.llmapi import CompletionOutput

    seen: list[CompletionOutput] = []
    result = llm.generate_async(prompt, params(**options), streaming=True, **(call or {}))
    async for state in result:
        assert state is result
        seen.append(dataclasses.replace(state.outputs[0]))
    return seen


def transceiver(**options: Any) -> Any:
    from tensorrt_llm.llmapi import CacheTransceiverConfig

    return CacheTransceiverConfig(**{"backend": "UCX", "max_tokens_in_buffer": 512} | options)


def disagg(kind: str, **fields: Any) -> Any:
    from tensorrt_llm.llmapi import DisaggregatedParams

    return DisaggregatedParams(request_type=kind, **fields)


# -- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_block_size": 8}, "kv_block_size"),
        ({"model_kwargs": {}}, "model_kwargs"),
        ({"sleep_config": {}}, "sleep_config"),
        ({"kv_events_config": {}}, "kv_events_config"),
        ({"pytorch_backend_config": {}}, "pytorch_backend_config"),
        ({"kv_cache_config": {"kv_events_config": {}}}, "kv_events_config"),
        ({"kv_cache_config": {"use_kv_cache_manager_v2": True}}, "use_kv_cache_manager_v2"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "between 0 and 1"),
        ({"kv_cache_config": {"max_attention_window": [512, 0]}}, "positive integers"),
        ({"scheduler_config": {"policy": "x"}}, "policy"),
        ({"scheduler_config": {"dynamic_batch_config": {}}}, "enable_batch_size_tuning"),
        ({"scheduler_config": {"capacity_scheduler_policy": "NONE"}}, "capacity_scheduler_policy"),
        ({"cache_transceiver_config": {"backend": "TCP"}}, "backend"),
        ({"cache_transceiver_config": {"transceiver_runtime": "auto"}}, "transceiver_runtime"),
        ({"cache_transceiver_config": {"kv_transfer_timeout_ms": 0}}, "greater than 0"),
        ({"cuda_graph_config": {"batch_sizes": [1, 4], "max_batch_size": 8}}, "largest of batch_sizes"),
        ({"moe_config": {"backend": "FASTEST"}}, "moe_config"),
        ({"kv_connector_config": {"connector_module": "x"}}, "connector_scheduler_class"),
        ({"speculative_config": {"decoding_type": "MTP"}}, "instance"),
        ({"enable_iter_req_stats": True}, "enable_iter_perf_stats"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"batch_wait_max_tokens_ratio": 2}, "batch_wait_max_tokens_ratio"),
        ({"backend": "tensorrt"}, "tensorrt"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ],
)
def test_wrong_arguments_are_refused_by_name(trt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trt.LLM(str(TINY), **options)


def test_too_few_gpus_and_a_folder_without_a_model_are_refused(trt: Any, tmp_path: Path, quirks: Any) -> None:
    with pytest.raises(RuntimeError, match="Only 1 GPUs are available, but 2 are required"):
        trt.LLM(str(TINY), tensor_parallel_size=2)
    quirks.gpus = 8
    with pytest.raises(RuntimeError, match="but 16 are"):
        trt.LLM(str(TINY), tensor_parallel_size=16)
    with engine(TINY, tensor_parallel_size=16, gpus_per_node=8):
        pass
    with pytest.raises(OSError):
        trt.LLM(str(tmp_path))


def test_speculation_is_configured_with_instances_that_are_checked(trt: Any) -> None:
    from tensorrt_llm.llmapi import EagleDecodingConfig, LookaheadDecodingConfig, NGramDecodingConfig
    from tensorrt_llm.llmapi.llm_args import DecodingBaseConfig

    options_given = {"decoding_type": "NGram", "max_draft_len": 2, "max_matching_ngram_size": 2}
    config = DecodingBaseConfig.from_dict(options_given)
    assert isinstance(config, NGramDecodingConfig)
    assert "decoding_type" not in options_given
    with engine(TINY, speculative_config=config):
        pass
    for wrong in (
        NGramDecodingConfig(max_draft_len=2),
        EagleDecodingConfig(max_draft_len=2),
        EagleDecodingConfig(speculative_model="x"),
        LookaheadDecodingConfig(),
    ):
        with pytest.raises(ValueError):
            trt.LLM(str(TINY), speculative_config=wrong)
    for wrong_dict in ({"decoding_type": "PARD"}, {"decoding_type": "MTP", "layers": 1}):
        with pytest.raises(ValueError):
            DecodingBaseConfig.from_dict(wrong_dict)
    with pytest.raises(ValueError, match="key 1"):
        NGramDecodingConfig(max_draft_len=2, draft_len_schedule={4: 2})


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"enable_attention_dp": True},
        {"max_beam_width": 2},
        {"gpus_per_node": 4},
        {"moe_expert_parallel_size": 1},
        {"device": "cpu"},
        {"moe_config": {}},
        {"build_config": {}},
    ],
)
def test_autodeploy_refuses_what_it_does_by_itself(trt: Any, options: dict[str, Any]) -> None:
    from tensorrt_llm._torch.auto_deploy import LLM

    with pytest.raises(ValueError):
        LLM(str(TINY), **options)
    with pytest.raises(ValueError):
        trt.LLM(str(TINY), backend="_autodeploy", **options)


def test_autodeploy_takes_its_own_and_explicit_defaults() -> None:
    from tensorrt_llm._torch.auto_deploy import LLM

    llm = LLM(str(TINY), tensor_parallel_size=1, world_size=1, model_kwargs={}, compile_backend="torch-cudagraph")
    assert len(ask(llm).outputs[0].token_ids) == 8
    llm.shutdown()


def test_yaml_wins_and_only_the_kv_section_is_merged(tmp_path: Path) -> None:
    from tensorrt_llm.llmapi import MTPDecodingConfig
    from tensorrt_llm.llmapi.llm_args import update_llm_args_with_extra_options

    (tmp_path / "extra.yaml").write_text(
        "kv_cache_config: {tokens_per_block: 64}\nscheduler_config: {}\nmax_batch_size: 3\n"
        "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2}\n"
    )
    ours = {
        "kv_cache_config": {"max_tokens": 9, "tokens_per_block": 8},
        "scheduler_config": {"capacity_scheduler_policy": "STATIC_BATCH"},
        "max_seq_len": 5,
    }
    merged = update_llm_args_with_extra_options(ours, str(tmp_path / "extra.yaml"))
    assert isinstance(merged.pop("speculative_config"), MTPDecodingConfig)
    assert merged == {
        "kv_cache_config": {"max_tokens": 9, "tokens_per_block": 64},
        "scheduler_config": {},
        "max_seq_len": 5,
        "max_batch_size": 3,
    }


# -- sampling parameters


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"top_k": -1}, ValueError),
        ({"top_p": 1.1}, ValueError),
        ({"temperature": -0.1}, ValueError),
        ({"truncate_prompt_tokens": 0}, ValueError),
        ({"n": 2}, ValueError),  # greedy
        ({"n": 2, "best_of": 1, "temperature": 1.0}, ValueError),
        ({"choice": ["a"]}, TypeError),
        ({"logprobs_mode": "raw"}, TypeError),
        ({"thinking_token_budget": 3}, TypeError),
        ({"max_new_tokens": 3}, TypeError),
    ],
)
def test_wrong_sampling_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        params(**options)


def test_sampling_has_the_defaults_and_traps_of_1_2_1() -> None:
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.llmapi import GuidedDecodingParams

    given = SamplingParams(temperature=1.0)
    assert (given.max_tokens, given.n, given.best_of, given.end_id, given.top_k) == (32, 1, 1, None, None)
    with pytest.raises(ValueError, match="best_of"):
        dataclasses.replace(given, n=4)  # best_of was filled with 1
    assert dataclasses.replace(given, n=4, best_of=4).best_of == 4
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        given.eos = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="one guide"):
        SamplingParams(guided_decoding=GuidedDecodingParams(regex="a", json_object=True))
    with pytest.raises(TypeError):
        GuidedDecodingParams(choice=["a"])  # type: ignore[call-arg]


# -- calls


def test_the_call_takes_exactly_the_keywords_of_1_2_1(trt: Any) -> None:
    names = list(inspect.signature(trt.LLM.generate_async).parameters)[1:]
    assert names == [
        "inputs",
        "sampling_params",
        "lora_request",
        "prompt_adapter_request",
        "streaming",
        "kv_cache_retention_config",
        "disaggregated_params",
        "trace_headers",
        "_postproc_params",
        "scheduling_params",
        "cache_salt",
    ]
    assert not inspect.iscoroutinefunction(trt.LLM.generate_async)
    for name in ("get_kv_cache_capacity", "_check_health", "_executor"):
        assert not hasattr(trt.LLM, name)


@pytest.mark.parametrize(
    ("prompt", "call", "error"),
    [
        (PROMPT, {"priority": 0.5}, TypeError),
        (PROMPT, {"conversation_params": None}, TypeError),
        (PROMPT, {"sampling": 1}, TypeError),
        ([], {}, IndexError),
        (tuple(PROMPT), {}, TypeError),
        (torch.tensor(PROMPT), {}, TypeError),
        (5, {}, TypeError),
        ({"tokens": PROMPT}, {}, TypeError),
        (PROMPT, {"disaggregated_params": {"request_type": "context_only"}}, TypeError),
        (PROMPT, {"scheduling_params": {"attention_dp_rank": 0}}, TypeError),
        (PROMPT, {"kv_cache_retention_config": {}}, TypeError),
        (PROMPT, {"cache_salt": 5}, TypeError),
    ],
)
def test_wrong_calls_are_refused_at_once(llm: Any, prompt: Any, call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        llm.generate_async(prompt, params(), **call)


def test_a_request_error_is_a_runtime_error_at_call_or_while_iterating(llm: Any) -> None:
    from tensorrt_llm.executor.utils import RequestError
    from tensorrt_llm.llmapi import GuidedDecodingParams
    from tensorrt_llm.llmapi import RequestError as Same

    assert Same is RequestError
    assert issubclass(RequestError, RuntimeError)
    with engine(max_num_tokens=16) as small, pytest.raises(RequestError, match="max_num_tokens"):
        small.generate_async(PROMPT, params())
    for prompt, options in (([5, 1280], {}), ([-1], {}), (PROMPT * 20, {}), (PROMPT, {"max_tokens": 0})):
        result = llm.generate_async(prompt, params(**options))
        with pytest.raises(RequestError):
            result.result()
    for wrong in (torch.zeros(5), torch.zeros(1280, dtype=torch.float64), [0.0] * 1280):
        with pytest.raises(RequestError):
            ask(llm, embedding_bias=wrong)
    with engine(TINY) as plain, pytest.raises(RequestError, match="guided_decoding_backend"):
        ask(plain, guided_decoding=GuidedDecodingParams(regex="a"), end_id=4095)
    assert len(ask(llm).outputs[0].token_ids) == 8


def test_more_at_the_call(llm: Any) -> None:
    from tensorrt_llm.executor.request import LoRARequest

    with pytest.raises(TypeError):
        llm.generate_async(PROMPT, {"max_tokens": 3})
    with pytest.raises(RuntimeError, match="stop and bad words"):
        llm.generate_async(PROMPT, params(stop="x"))
    with pytest.raises(ValueError, match="lora_path"):
        LoRARequest("a", 1)
    with pytest.raises(ValueError, match="LoRA is not enabled"):
        llm.generate_async(PROMPT, params(), lora_request=LoRARequest("a", 1, str(DEMO)))
    with pytest.raises(ValueError, match="max_beam_width"):
        llm.generate_async(PROMPT, params(use_beam_search=True, n=2))
    with pytest.raises(ValueError, match="Unknown request type"):
        llm.generate_async(PROMPT, params(), disaggregated_params=disagg_none())
    with engine(TINY, skip_tokenizer_init=True) as bare:
        with pytest.raises(ValueError, match="end_id"):
            bare.generate_async(PROMPT)
        with pytest.raises(ValueError, match="tokenizer"):
            bare.generate_async("text", params())


def disagg_none() -> Any:
    from tensorrt_llm.llmapi import DisaggregatedParams

    return DisaggregatedParams()


def test_after_shutdown_nothing_is_taken(trt: Any) -> None:
    with engine(TINY) as llm:
        ask(llm)
        with pytest.raises(RuntimeError, match="pickled"):
            llm.__getstate__()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async(PROMPT)


# -- answers


async def test_streamed_outputs_are_cumulative(llm: Any) -> None:
    seen = await streamed(llm, logprobs=3)
    assert [len(output.token_ids) for output in seen] == list(range(1, 9))
    assert [output.finish_reason for output in seen] == [None] * 7 + ["length"]
    for before, after in itertools.pairwise(seen):
        assert after.token_ids[:-1] == before.token_ids
        assert after.token_ids_diff == after.token_ids[-1:]
        assert after.text == before.text + after.text_diff
    last = seen[-1]
    assert len(last.logprobs) == last.length == 8
    for token, entry in zip(last.token_ids, last.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 3
        assert sorted(each.rank for each in entry.values()) == [1, 2, 3]
    assert last.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(last.logprobs, last.token_ids, strict=True))
    )


async def test_stop_words_shrink_the_last_response(llm: Any) -> None:
    whole = (await streamed(llm))[-1].token_ids
    stop = next(token for token in whole[2:] if token not in whole[:2])
    at = whole.index(stop)
    seen = await streamed(llm, stop_token_ids=[stop], logprobs=1)
    assert seen[-1].token_ids == whole[:at]
    assert seen[-1].token_ids_diff == []
    assert (seen[-1].finish_reason, seen[-1].stop_reason, len(seen[-1].logprobs)) == ("stop", stop, at)
    kept = await streamed(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert kept[-1].token_ids == whole[: at + 1]
    free = await streamed(llm, stop_token_ids=[stop], ignore_eos=True)
    assert len(free[-1].token_ids) == 8  # ignore_eos empties the stop words, too


async def test_a_stop_word_of_several_tokens_takes_back_what_was_streamed(llm: Any) -> None:
    from tensorrt_llm import SamplingParams

    text = "The quick brown fox jumps over"
    whole = llm.generate_async(text, SamplingParams(max_tokens=10))
    words = (await whole).outputs[0]
    stop = llm.tokenizer.decode(words.token_ids[3:5])
    assert llm.tokenizer.encode(stop) == words.token_ids[3:5] or pytest.skip("it tokenises otherwise")
    result = llm.generate_async(text, SamplingParams(max_tokens=10, stop=stop), streaming=True)
    lengths = [state.outputs[0].length async for state in result]
    assert max(lengths) > lengths[-1]
    assert result.outputs[0].stop_reason == stop
    assert not result.outputs[0].text.endswith(stop)


def test_without_end_id_the_tokenizer_sets_it_and_the_callers_object_is_changed(llm: Any) -> None:
    from tensorrt_llm import SamplingParams

    given = SamplingParams(max_tokens=4, return_perf_metrics=True)
    result = llm.generate_async("Hello", given).result()
    assert given.end_id == llm.tokenizer.eos_token_id
    assert given.stop_token_ids == [token for token in (1278, 1276) if token != given.end_id]
    assert result.prompt == "Hello"
    assert result.prompt_token_ids == llm.tokenizer.encode("Hello")
    assert result.metrics_dict
    timing = result.outputs[0].request_perf_metrics.timing_metrics
    assert timing.arrival_time <= timing.first_scheduled_time <= timing.first_token_time <= timing.last_token_time


def eos_at(llm: Any) -> tuple[list[int], int]:
    """An answer, and its third token, to play the end id."""
    whole = ask(llm).outputs[0].token_ids
    end = next(token for token in whole[2:] if token not in whole[:2])
    return whole, end


@pytest.mark.parametrize("kept", [True, False])
def test_the_end_id_ends_with_or_without_itself(llm: Any, quirks: Any, kept: bool) -> None:
    quirks.eos_in_token_ids = kept
    whole, end = eos_at(llm)
    at = whole.index(end)
    output = ask(llm, end_id=end, logprobs=1).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids == whole[: at + kept]
    later = ask(llm, end_id=end, min_tokens=at + 2).outputs[0]
    assert end not in later.token_ids[: at + 2]
    assert len(ask(llm, end_id=end, ignore_eos=True).outputs[0].token_ids) == 8


class Only:
    """Allows one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        assert logits.shape == (1, 1, 1280)
        assert stream_ptr is None
        assert token_ids[0][: len(PROMPT)] == PROMPT
        logits[:] = float("-inf")
        logits[0, 0, self.token] = 0.0


def test_logits_processors_edit_in_place_and_must_be_picklable(llm: Any) -> None:
    from tensorrt_llm.llmapi import RequestError

    assert ask(llm, logits_processor=Only(9)).outputs[0].token_ids == [9] * 8
    assert ask(llm, logits_processor=[Only(9)], max_tokens=2).outputs[0].token_ids == [9, 9]
    with pytest.raises(RequestError, match="pickle"):
        ask(llm, logits_processor=lambda a, b, c, d, e: None)


async def test_abort_is_answered_and_frees_all(llm: Any, quirks: Any) -> None:
    from tensorrt_llm._standin import hooks

    result = llm.generate_async(PROMPT, params(max_tokens=300, ignore_eos=True), streaming=True)
    await anext(result)
    result.abort()
    async for _ in result:
        pass
    assert result.aborted()
    assert result.finished
    assert result.outputs[0].finish_reason == "cancelled"
    quirks.abort_answers = False
    silent = llm.generate_async(PROMPT, params(max_tokens=300, ignore_eos=True), streaming=True)
    await anext(silent)
    silent.abort()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(drain(silent), 0.3)
    assert hooks.counts(llm)["used"] == 0


async def drain(result: Any) -> None:
    async for _ in result:
        pass


def test_results_belong_to_the_loop_they_were_made_in(llm: Any) -> None:
    async def late(result: Any) -> None:
        await result

    async def make() -> Any:
        return llm.generate_async(PROMPT, params())

    with pytest.raises(AssertionError, match="event loop was not present"):
        asyncio.run(late(llm.generate_async(PROMPT, params())))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(late(asyncio.run(make())))


def test_a_dead_executor_answers_everybody_and_takes_no_more() -> None:
    from tensorrt_llm._standin import hooks
    from tensorrt_llm.llmapi import RequestError

    with engine(TINY) as llm:
        hooks.hold(llm)
        results = [llm.generate_async(PROMPT, params(end_id=4095)) for _ in range(2)]
        hooks.die(llm, OSError("the device is gone"))
        hooks.free(llm)
        for result in results:
            with pytest.raises(OSError, match="gone") as caught:
                result.result()
            assert not isinstance(caught.value, RequestError)
        with pytest.raises(RuntimeError, match="shutting down"):
            llm.generate_async(PROMPT, params(end_id=4095))


# -- events


def fold(events: list[dict[str, Any]]) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """Blocks that are left: hash -> parent and tokens."""
    found: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for event in events:
        data = event["data"]
        if data["type"] == "stored":
            parent = data["parent_hash"]
            for block in data["blocks"]:
                assert parent is None or parent in found
                found[block["block_hash"]] = (parent, tuple(token["token_id"] for token in block["tokens"]))
                parent = block["block_hash"]
        elif data["type"] == "removed":
            for each in data["block_hashes"]:
                del found[each]
                assert all(parent != each for parent, _ in found.values())
    return found


def test_events_report_what_can_be_reused() -> None:
    from tensorrt_llm._standin import hooks

    with engine() as llm:
        assert llm.get_kv_cache_events(timeout=0) == []  # not before something was generated
        answer = ask(llm).outputs[0].token_ids
        hooks.counts(llm)
        events = llm.get_kv_cache_events(timeout=0.05)
        assert llm.get_kv_cache_events(timeout=0) == []  # reading takes them
        assert [event["event_id"] for event in events] == list(range(len(events)))
        assert events[0]["data"] == {"type": "created", "num_blocks_per_cache_level": [64, 0]}
        assert {event["window_size"] for event in events} == {512}
        assert all("attention_dp_rank" not in event for event in events)
        first = events[1]["data"]
        assert (first["type"], first["parent_hash"], len(first["blocks"])) == ("stored", None, len(PROMPT) // SIZE)
        block = first["blocks"][0]
        assert block["block_hash"] >= 1 << 32
        assert block == {
            "block_hash": block["block_hash"],
            "type": "stored_block",
            "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in PROMPT[:SIZE]],
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [],
        }
        tokens = [tokens for _, tokens in fold(events).values()]
        assert sum(tokens, ()) == (*PROMPT, *answer[:-1])
        assert len(tokens[-1]) == (len(PROMPT) + 7) % SIZE  # the last one is not full


def test_evictions_are_reported_and_only_leaves_go() -> None:
    from tensorrt_llm._standin import hooks

    with engine(kv={"max_tokens": 128}) as llm:
        for start in range(12):
            ask(llm, [start * 7, *PROMPT])
        assert ask(llm, [11 * 7, *PROMPT]).cached_tokens == len(PROMPT)
        hooks.counts(llm)
        events = llm.get_kv_cache_events(timeout=0.05)
        assert any(event["data"]["type"] == "removed" for event in events)
        assert 0 < len(fold(events)) <= 16


def test_a_full_buffer_loses_the_oldest_and_ids_show_it() -> None:
    from tensorrt_llm._standin import hooks

    with engine(kv={"event_buffer_max_size": 2}) as llm:
        for start in range(3):
            ask(llm, [start, *PROMPT])
        hooks.counts(llm)
        events = llm.get_kv_cache_events(timeout=0)
        assert len(events) == 2
        assert events[0]["event_id"] > 1
        hooks.emit(llm, {"type": "removed", "block_hashes": [5]}, skip=3)
        hooks.counts(llm)
        (event,) = llm.get_kv_cache_events(timeout=0.5)
        assert event["event_id"] == events[-1]["event_id"] + 4


@pytest.mark.parametrize("kv", [{"event_buffer_max_size": 0}, {"enable_block_reuse": False}])
def test_no_events_without_buffer_or_reuse(kv: dict[str, Any]) -> None:
    with engine(TINY, kv=kv) as llm:
        ask(llm)
        assert llm.get_kv_cache_events(timeout=0) == []


def test_windows_of_several_sizes_share_the_ids_and_small_ones_do_not_chain() -> None:
    from tensorrt_llm._standin import hooks

    with engine(kv={"max_attention_window": [16, 512]}) as llm:
        ask(llm)
        hooks.counts(llm)
        events = llm.get_kv_cache_events(timeout=0.05)
        assert [event["event_id"] for event in events] == list(range(len(events)))
        by_window = {size: [e for e in events if e["window_size"] == size] for size in (16, 512)}
        assert [each[0]["data"]["type"] for each in by_window.values()] == ["created", "created"]
        assert fold(by_window[512])
        with pytest.raises(AssertionError):
            fold(by_window[16])


@pytest.mark.parametrize("null", [True, False])
def test_blocks_that_go_to_the_host_are_updated(quirks: Any, null: bool) -> None:
    from tensorrt_llm._standin import hooks

    quirks.updated_with_null_diffs = null
    with engine(kv={"max_tokens": 64, "host_cache_size": 1 << 30}) as llm:
        ask(llm)
        ask(llm, PROMPT[::-1])
        again = ask(llm)
        assert again.cached_tokens == len(PROMPT) - 1
        hooks.counts(llm)
        events = [e["data"] for e in llm.get_kv_cache_events(timeout=0.05)]
        assert events[0]["num_blocks_per_cache_level"][1] > 0
        updated = [event for event in events if event["type"] == "updated"]
        levels = {(e["cache_level"]["old_value"], e["cache_level"]["new_value"]) for e in updated}
        assert levels == {(0, 1), (1, 0)}
        assert all(("priority" in event) == null for event in updated)
        assert not any(event["type"] == "removed" for event in events)


def test_salts_share_nothing_and_do_not_show_in_events() -> None:
    from tensorrt_llm._standin import hooks

    with engine() as llm:
        first = ask(llm)
        salted = ask(llm, call={"cache_salt": "a"})
        other = ask(llm, call={"cache_salt": "b"})
        same = ask(llm, call={"cache_salt": "a"})
        assert [r.cached_tokens for r in (first, salted, other, same)] == [0, 0, 0, len(PROMPT) - 1]
        hooks.counts(llm)
        roots = [e["data"] for e in llm.get_kv_cache_events(timeout=0.05) if e["data"].get("parent_hash", 1) is None]
        tokens = {json.dumps(block["tokens"]) for data in roots for block in data["blocks"][:1]}
        hashes = {block["block_hash"] for data in roots for block in data["blocks"][:1]}
        assert (len(tokens), len(hashes)) == (1, 3)
        assert all("salt" not in json.dumps(data) for data in roots)


# -- attention DP


async def test_ranks_have_caches_and_event_ids_of_their_own(quirks: Any) -> None:
    from tensorrt_llm._standin import hooks
    from tensorrt_llm.llmapi import SchedulingParams

    quirks.gpus = 2
    with engine(TINY, tensor_parallel_size=2, enable_attention_dp=True) as llm:
        for rank in (0, 1, 1):
            on = SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)
            result = await llm.generate_async(PROMPT, params(end_id=4095), scheduling_params=on)
        assert result.cached_tokens == len(PROMPT) - 1
        hooks.counts(llm)
        events = [event async for event in llm.get_kv_cache_events_async(timeout=0.05)]
        for rank in (0, 1):
            ids = [event["event_id"] for event in events if event["attention_dp_rank"] == rank]
            assert ids == list(range(len(ids)))
            assert len(ids) > 1


def test_undecided_relaxation_of_two_requests_kills_the_engine(quirks: Any) -> None:
    from tensorrt_llm._standin import hooks
    from tensorrt_llm.llmapi import SchedulingParams

    assert SchedulingParams().attention_dp_relax is None
    quirks.gpus = 2
    with engine(TINY, tensor_parallel_size=2, enable_attention_dp=True) as llm:
        hooks.hold(llm)
        results = [
            llm.generate_async(PROMPT, params(end_id=4095), scheduling_params=SchedulingParams()) for _ in range(2)
        ]
        hooks.free(llm)
        with pytest.raises(TypeError):
            [result.result() for result in results]


# -- statistics


def test_statistics_are_flat_and_complete(llm: Any) -> None:
    result = ask(llm)
    stats = llm.get_stats(timeout=0.05)
    assert stats
    assert result.finished
    last = stats[-1]
    assert {
        "timestamp",
        "iter",
        "iterLatencyMS",
        "numActiveRequests",
        "numQueuedRequests",
        "maxNumActiveRequests",
    } < set(last)
    assert "attentionDpRank" not in last
    kv = last["kvCacheStats"]
    assert kv["maxNumBlocks"] == kv["freeNumBlocks"] + kv["usedNumBlocks"] == 64
    assert kv["tokensPerBlock"] == SIZE
    assert set(last["inflightBatchingStats"]) >= {
        "numContextRequests",
        "numGenRequests",
        "numCtxTokens",
        "microBatchId",
    }
    with engine(TINY) as silent:
        ask(silent)
        assert silent.get_stats(timeout=0) == []


def test_an_empty_feed_ends_after_its_time_out(llm: Any) -> None:
    llm.get_stats(timeout=0)
    began = time.monotonic()
    assert llm.get_stats(timeout=0.2) == []
    assert time.monotonic() - began >= 0.2


# -- handoff


def prefill_and_decode(source: Any, target: Any, **options: Any) -> tuple[Any, Any]:
    first = source.generate_async(PROMPT, params(**options), disaggregated_params=disagg("context_only")).result()
    state = first.outputs[0].disaggregated_params
    assert state.request_type == "context_only"
    state.request_type = "generation_only"
    return first, target.generate_async(PROMPT, params(**options), disaggregated_params=state).result()


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[tuple[Any, Any]]:
    more = {"cache_transceiver_config": transceiver(**options)}
    with engine(disable_overlap_scheduler=True, **more) as source, engine(**more) as target:
        yield source, target


def test_prefill_holds_its_blocks_until_the_time_out() -> None:
    from tensorrt_llm._standin import hooks
    from tensorrt_llm.llmapi import RequestError

    with pair(kv_transfer_timeout_ms=300) as (source, target):
        first = ask(source, call={"disaggregated_params": disagg("context_only")})
        assert hooks.counts(source)["used"] == -(-len(PROMPT) // SIZE)
        deadline = time.monotonic() + 5
        while hooks.counts(source)["used"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert hooks.counts(source)["used"] == 0
        state = first.outputs[0].disaggregated_params
        state.request_type = "generation_only"
        with pytest.raises(RequestError, match="Can not find sequence"):
            ask(target, call={"disaggregated_params": state})


WRONG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "text": lambda state: {"opaque_state": "text"},
    "garbage": lambda state: {"opaque_state": b"garbage"},
    "none": lambda state: {"opaque_state": None},
    "no first": lambda state: {"first_gen_tokens": None},
    "other id": lambda state: {"ctx_request_id": state.ctx_request_id + 1},
    "no id": lambda state: {"ctx_request_id": None},
}


def test_decode_refuses_states_that_do_not_fit() -> None:
    from tensorrt_llm.llmapi import RequestError

    with pair() as (source, target), engine(cache_transceiver_config=transceiver(backend="NIXL")) as other:
        first = ask(source, call={"disaggregated_params": disagg("context_only")})
        state = first.outputs[0].disaggregated_params
        state.request_type = "generation_only"
        for change in WRONG.values():
            with pytest.raises(RequestError):
                ask(target, call={"disaggregated_params": dataclasses.replace(state, **change(state))})
        with pytest.raises(RequestError, match="prompt differs"):
            ask(target, PROMPT[1:], call={"disaggregated_params": state})
        with pytest.raises(RequestError, match="prompt differs"):
            ask(target, call={"disaggregated_params": state, "cache_salt": "x"})
        with pytest.raises(RequestError, match="backend differs"):
            ask(other, call={"disaggregated_params": state})
        assert ask(target, call={"disaggregated_params": state}).outputs
        with pytest.raises(RequestError, match="Can not find sequence"):
            ask(target, call={"disaggregated_params": state})


def test_the_handoff_refuses_what_the_real_one_cannot_do() -> None:
    from tensorrt_llm.llmapi import RequestError

    context = {"disaggregated_params": disagg("context_only")}
    with engine() as llm, pytest.raises(RequestError, match="transceiver"):
        ask(llm, call=context)
    with engine(cache_transceiver_config=transceiver()) as llm, pytest.raises(RequestError, match="overlap"):
        ask(llm, call=context)
    with pair() as (source, target):
        with pytest.raises(RequestError, match="one sequence"):
            ask(source, call=context, n=2, best_of=2, temperature=1.0)
        with pytest.raises(RequestError, match="logits processors"):
            ask(source, call=context, logits_processor=Only(3))
        with pytest.raises(RequestError, match="one sequence"):
            ask(target, call={"disaggregated_params": disagg("generation_only")}, n=2, best_of=2, temperature=1.0)
    with pair(max_tokens_in_buffer=16) as (source, target), pytest.raises(RequestError, match="buffer"):
        prefill_and_decode(source, target)


def test_a_first_token_that_ends_the_answer_leaves_no_state() -> None:
    with pair() as (source, target):
        (token,) = ask(target, max_tokens=1).outputs[0].token_ids
        output = ask(source, call={"disaggregated_params": disagg("context_only")}, end_id=token).outputs[0]
        assert (output.finish_reason, output.disaggregated_params) == ("stop", None)


def test_a_cancel_while_kv_is_under_way_breaks_the_engine() -> None:
    from tensorrt_llm._standin import hooks

    with pair() as (source, target):
        first = ask(source, call={"disaggregated_params": disagg("context_only")})
        state = dataclasses.replace(first.outputs[0].disaggregated_params, request_type="generation_only")
        hooks.hold(target)
        result = target.generate_async(PROMPT, params(), disaggregated_params=state)
        result.abort()
        hooks.free(target)
        with pytest.raises(RuntimeError, match="in transfer"):
            result.result()


def test_disaggregated_params_are_checked() -> None:
    from tensorrt_llm.llmapi import DisaggregatedParams

    assert disagg("CONTEXT_ONLY").request_type == "context_only"
    for name in ("disagg_request_id", "ctx_dp_rank", "schedule_style", "conversation_id", "first_gen_logits"):
        with pytest.raises(TypeError):
            DisaggregatedParams(**{name: 1})
        with pytest.raises(AttributeError):
            setattr(DisaggregatedParams(), name, 1)
    with pytest.raises(ValueError):
        disagg("prefill")
    with pytest.raises(ValueError):
        DisaggregatedParams().get_request_type()
    for wrong in ({"multimodal_embedding_handles": []}, {"mrope_position_ids_handle": {}}):
        with pytest.raises(AssertionError):
            DisaggregatedParams(**wrong)


# -- images


def picture(shade: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (64, 64), (shade, 255 - shade, 40))


TEXT = "<|im_start|>user\n<image>\nDescribe the picture.<|im_end|>\n<|im_start|>assistant\n"


def test_an_encoders_embeddings_serve_a_prompt_elsewhere_once() -> None:
    from tensorrt_llm import MultimodalEncoder
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

    encoder = MultimodalEncoder(str(SIGHTED))
    with engine(SIGHTED) as llm:
        data = {"prompt": TEXT, "multi_modal_data": {"image": [picture(90)]}}
        whole = ask(llm, data)
        encoded = encoder.generate(data)
        state = encoded.outputs[0].disaggregated_params
        (handle,) = state.multimodal_embedding_handles
        assert state.request_type is None
        assert [len(words) for words in state.multimodal_hashes] == [8]
        assert handle["tensor_size"][0] == 64
        state.request_type = "context_and_generation"
        with pytest.raises(ValueError, match="Text prompt is required"):
            llm.generate_async(PROMPT, params(), disaggregated_params=state)
        with engine() as blind, pytest.raises(ValueError, match="not supported for this model"):
            blind.generate_async(TEXT, params(), disaggregated_params=state)
        result = ask(llm, TEXT, call={"disaggregated_params": state})
        assert result.outputs[0].token_ids == whole.outputs[0].token_ids
        assert result.cached_tokens > 64  # the same image has the same hash
        with pytest.raises(RuntimeError, match="one consumer"):
            llm.generate_async(TEXT, params(), disaggregated_params=state)
        other = ask(llm, data | {"multi_modal_data": {"image": picture(20)}})
        assert other.cached_tokens < 64
        again = encoder.generate([data])[0].outputs[0].disaggregated_params
        tensor = SharedTensorContainer.from_dict(again.multimodal_embedding_handles[0]).get_local_view()
        embedded = ask(llm, {"prompt": TEXT, "multi_modal_embeddings": {"image": [tensor]}})
        assert embedded.outputs[0].token_ids == whole.outputs[0].token_ids
    encoder.shutdown()


def test_images_are_refused_where_the_real_one_does() -> None:
    from tensorrt_llm import MultimodalEncoder

    with pytest.raises(ValueError, match="no multimodal encoder"):
        MultimodalEncoder(str(TINY))
    image = {"multi_modal_data": {"image": [picture(9)]}}
    with engine(SIGHTED) as llm:
        with pytest.raises(TypeError, match="mapping"):
            llm.generate_async({"prompt": TEXT, "mm_processor_kwargs": None} | image, params())
        with pytest.raises(ValueError, match="placeholder"):
            llm.generate_async({"prompt": "no place"} | image, params())
        with pytest.raises(ValueError, match="expanded here"):
            llm.generate_async({"prompt": TEXT.replace("<image>", "<image>" * 64)} | image, params())
    with engine(TINY) as blind, pytest.raises(ValueError, match="text only"):
        blind.generate_async({"prompt": "x"} | image, params())


def test_image_blocks_carry_their_keys(quirks: Any) -> None:
    from tensorrt_llm._standin import hooks

    with engine(SIGHTED, kv={"tokens_per_block": 32}) as llm:
        ask(llm, {"prompt": TEXT, "multi_modal_data": {"image": [picture(90)]}})
        hooks.counts(llm)
        stored = [e["data"] for e in llm.get_kv_cache_events(timeout=0.05) if e["data"]["type"] == "stored"]
        keys = [block["mm_keys"] for data in stored for block in data["blocks"]]
        assert len(keys[0]) == 1
        assert keys[0][0]["type"] == "mm_key"
        assert len(bytes.fromhex(keys[0][0]["hash"])) == 32
        assert keys[1][0]["start_offset"] > 0


# -- metrics


def test_metrics_are_collected_under_the_names_of_1_2() -> None:
    from prometheus_client import REGISTRY
    from tensorrt_llm.metrics import MetricsCollector

    collector = MetricsCollector({"model_name": "m", "engine_type": "trtllm"})
    assert not hasattr(collector, "log_request_metrics_dict")
    with engine(TINY) as llm:
        collector.log_metrics_dict(ask(llm, return_perf_metrics=True, end_id=4095).metrics_dict)
    labels = {"model_name": "m", "engine_type": "trtllm"}
    found = REGISTRY.get_sample_value("trtllm_request_success_total", labels | {"finished_reason": "length"})
    assert found == 1
    assert REGISTRY.get_sample_value("trtllm_time_to_first_token_seconds_count", labels) == 1


# -- 1.3


def test_1_3_has_what_1_2_1_lacks_and_nothing_is_left_behind() -> None:
    before = sys.modules["tensorrt_llm"]
    with installed("1.3"):
        import tensorrt_llm
        from tensorrt_llm.executor.request import DEFAULT_REQUEST_PRIORITY
        from tensorrt_llm.llmapi import ConversationParams, DisaggregatedParams, KvCacheConfig
        from tensorrt_llm.llmapi.disagg_utils import get_global_disagg_request_id
        from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_options

        assert tensorrt_llm.VARIANT == "1.3"
        assert DEFAULT_REQUEST_PRIORITY == 0.5
        assert callable(update_llm_args_with_extra_options)
        assert get_global_disagg_request_id(1, 2) != get_global_disagg_request_id(1, 2)
        assert DisaggregatedParams(request_type="context_only", disagg_request_id=4).disagg_request_id == 4
        kv = KvCacheConfig(tokens_per_block=SIZE, max_tokens=512)
        with tensorrt_llm.LLM(str(TINY), kv_cache_config=kv, enable_iter_perf_stats=True) as llm:
            assert llm.get_kv_cache_capacity() == {"maxNumBlocks": 64, "tokensPerBlock": SIZE}
            given = tensorrt_llm.SamplingParams(end_id=4095, max_tokens=2)
            result = llm.generate_async(PROMPT, given, priority=0.9, conversation_params=ConversationParams()).result()
            assert len(result.outputs[0].token_ids) == 2
            assert llm.get_stats(timeout=0.05)[-1]["attentionDpRank"] == 0
            assert llm._check_health()
            with pytest.raises(ValueError, match="priority"):
                llm.generate_async(PROMPT, given, priority=2)
    assert sys.modules["tensorrt_llm"] is before
    with pytest.raises(ImportError):
        from tensorrt_llm.executor.request import DEFAULT_REQUEST_PRIORITY
    with pytest.raises(ImportError):
        import tensorrt_llm.visual_gen
