"""The stand-in refuses what TensorRT-LLM 1.2.1 refuses, also where no adapter errs today; 1.3's additions only when
asked. What it answers is tested through the adapter: ``tests/workers/engines``.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.standins import FOLDER, installed

MODELS = FOLDER.parent.parent / "configs" / "models"
TINY = MODELS / "tiny"
PROMPT = [(7 + i * i * 13 + i * 5) % 1270 for i in range(37)]


@pytest.fixture(scope="module", autouse=True)
def trt() -> Iterator[Any]:
    with installed():
        import tensorrt_llm

        yield tensorrt_llm
    assert "tensorrt_llm" not in sys.modules
    assert str(FOLDER) not in sys.path


@pytest.fixture(scope="module")
def llm(trt: Any) -> Iterator[Any]:
    """One for the tests that change nothing in it."""
    found = trt.LLM(str(TINY), skip_tokenizer_init=True)
    yield found
    found.shutdown()


def params(**options: Any) -> Any:
    from tensorrt_llm import SamplingParams

    return SamplingParams(**{"end_id": 1276, "max_tokens": 8} | options)


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
        (PROMPT, {"cache_salt": 5}, TypeError),
    ],
)
def test_wrong_calls_are_refused_at_once(llm: Any, prompt: Any, call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        llm.generate_async(prompt, params(), **call)


def test_a_request_that_the_engine_refuses_ends_by_a_request_error(llm: Any) -> None:
    from tensorrt_llm.executor.utils import RequestError

    for prompt, options in (([5, 4096], {}), ([-1], {}), (PROMPT, {"max_tokens": 0})):
        with pytest.raises(RequestError):
            llm.generate_async(prompt, params(**options)).result()
    for wrong in (torch.zeros(5), torch.zeros(4096, dtype=torch.float64), [0.0] * 4096):
        with pytest.raises(RequestError):
            llm.generate_async(PROMPT, params(embedding_bias=wrong)).result()
    assert len(llm.generate_async(PROMPT, params()).result().outputs[0].token_ids) == 8


@pytest.mark.parametrize("name", ["disagg_request_id", "ctx_dp_rank", "schedule_style", "conversation_id"])
def test_fields_of_1_3_are_refused_by_1_2_1(name: str) -> None:
    from tensorrt_llm.llmapi import DisaggregatedParams

    with pytest.raises(TypeError):
        DisaggregatedParams(**{name: 1})
    with pytest.raises(AttributeError):
        setattr(DisaggregatedParams(), name, 1)


def test_1_3_has_what_1_2_1_lacks_and_nothing_is_left_behind() -> None:
    before = sys.modules["tensorrt_llm"]
    with installed("1.3"):
        import tensorrt_llm
        from tensorrt_llm.llmapi import ConversationParams, DisaggregatedParams

        assert tensorrt_llm.VARIANT == "1.3"
        assert DisaggregatedParams(request_type="context_only", disagg_request_id=4).disagg_request_id == 4
        llm = tensorrt_llm.LLM(str(TINY), skip_tokenizer_init=True)
        given = tensorrt_llm.SamplingParams(end_id=4095, max_tokens=2)
        more = {"priority": 0.9, "conversation_params": ConversationParams()}
        assert len(llm.generate_async(PROMPT, given, **more).result().outputs[0].token_ids) == 2
        assert llm.get_kv_cache_capacity()["tokensPerBlock"] == 32
        with pytest.raises(ValueError, match="priority"):
            llm.generate_async(PROMPT, given, priority=2)
        llm.shutdown()
    assert sys.modules["tensorrt_llm"] is before
    with pytest.raises(ImportError):
        from tensorrt_llm.executor.request import ConversationParams
