import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.vllm import api


class _Params:
    def __init__(
        self, n: int = 1, max_tokens: int = 1, min_tokens: int = 0, detokenize: bool = False, ignore_eos: bool = False,
        stop_token_ids: Any = None, seed: Any = None, temperature: float = 1, top_p: float = 1, top_k: int = 0,
        min_p: float = 0, repetition_penalty: float = 1, presence_penalty: float = 0, frequency_penalty: float = 0,
        logit_bias: Any = None, logprobs: Any = None, output_kind: Any = None, extra_args: Any = None,
        structured_outputs: Any = None,
    ) -> None: ...  # fmt: skip


class _Llm:
    def generate(self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None) -> None: ...


class _OldLlm:
    def generate(self, prompt: Any, sampling_params: Any, *, lora_request: Any = None) -> None: ...


@dataclasses.dataclass
class _Args:
    model: str = ""


def install(monkeypatch: pytest.MonkeyPatch, llm: type[Any] = _Llm, **errors: type[Exception]) -> None:
    """A vLLM whose module of exceptions has just these."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.26.0"},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": llm},
        "vllm.v1.engine.exceptions": {"EngineDeadError": type("EngineDeadError", (Exception,), {})},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": _Args},
        "vllm.sampling_params": {
            "SamplingParams": _Params,
            "RequestOutputKind": SimpleNamespace(DELTA=1),
            "StructuredOutputsParams": object,
        },
        "vllm.exceptions": errors,
        "vllm.config": dict.fromkeys(("KVTransferConfig", "KVEventsConfig", "StructuredOutputsConfig"), object),
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": object},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)


def test_a_release_without_the_later_exceptions_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, VLLMValidationError=type("VLLMValidationError", (ValueError,), {}))
    found = api.load_vllm()
    assert found.version == "0.26.0"
    assert found.refusals == (ValueError, TypeError)
    assert found.transient == ()


def test_exceptions_that_a_release_has_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, failed = (type(name, (Exception,), {}) for name in ("VLLMClientError", "GenerationError"))
    install(monkeypatch, VLLMClientError=refused, GenerationError=failed)
    found = api.load_vllm()
    assert found.refusals == (refused, ValueError, TypeError)
    assert found.transient == (failed,)


def test_a_release_whose_call_differs_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, _OldLlm)
    with pytest.raises(EngineError, match=r"vLLM 0\.26\.0 lacks request_id"):
        api.load_vllm()
