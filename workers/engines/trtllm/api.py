"""The only module that imports ``tensorrt_llm``: the parts of the installed release are looked up once and logged."""

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, get_args

import structlog

from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.external.arguments import check_interface, fields_of

log = structlog.get_logger("engine")

INSTALL = (
    "pip install 'tensorrt_llm==1.2.1' --extra-index-url https://pypi.nvidia.com "
    "(the package of that name on PyPI is an empty stub), or run in NVIDIA's TensorRT-LLM container"
)
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error"}
_LEVEL_VARIABLE = "TLLM_LOG_LEVEL"

_SAMPLING_FIELDS = frozenset([
    "max_tokens", "end_id", "pad_id", "detokenize", "add_special_tokens", "include_stop_str_in_output", "n", "best_of",
    "seed", "stop_token_ids", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "prompt_ignore_length", "embedding_bias", "logprobs", "prompt_logprobs",
    "return_perf_metrics",
])  # fmt: skip
_CALL = (
    *("streaming", "disaggregated_params", "scheduling_params", "cache_salt", "trace_headers"),
    *("priority", "conversation_params"),
)


@dataclasses.dataclass(frozen=True)
class TrtllmApi:
    """The classes that the adapter uses, and the capabilities of this release.

    Attributes:
        guided: class of a grammar among the SamplingParams; None: this release has none.
        call: keyword arguments of ``generate_async``.
        arguments: keys of the PyTorch backend's arguments; empty: they cannot be read.
        sections: keys of each of them that is a mapping.
        logprob: class of a token's log-probability.
        autodeploy: keys of AutoDeploy's arguments; None: they cannot be read.
        lora: class of a request's LoRA adapter; None: this release has none.
        lora_config: class of the engine's configuration of them.
    """

    version: str
    llm: type[Any]
    encoder: type[Any] | None
    sampling: type[Any]
    disaggregated: type[Any]
    request_error: type[Exception]
    scheduling: type[Any] | None
    speculative: Callable[[dict[str, Any]], Any] | None
    sparse: Callable[[dict[str, Any]], Any] | None
    collector: type[Any] | None
    shared_tensor: type[Any] | None
    guided: type[Any] | None
    call: frozenset[str]
    arguments: frozenset[str]
    sections: Mapping[str, frozenset[str]]
    logprob: type[Any] | None
    autodeploy: frozenset[str] | None
    lora: type[Any] | None
    lora_config: type[Any] | None

    @property
    def capacity(self) -> bool:
        """Whether the engine reports its KV capacity (1.3)."""
        return hasattr(self.llm, "get_kv_cache_capacity")

    def sampling_params(self, arguments: Mapping[str, Any]) -> Any:
        """SamplingParams. ``guided_decoding`` is a mapping here.

        Raises:
            ValueError: an argument is invalid.
        """
        arguments = dict(arguments)
        if "guided_decoding" in arguments and self.guided is not None:
            arguments["guided_decoding"] = self.guided(**arguments["guided_decoding"])
        return self.sampling(**arguments)

    def construct(self, model: str, tree: Mapping[str, Any]) -> Any:
        """Construct an engine; blocks until the weights are loaded.

        Raises:
            ValueError: an argument is invalid.
            Exception: anything else means that it did not start.
        """
        arguments = dict(tree)
        if self.lora_config is not None and isinstance(arguments.get("lora_config"), Mapping):
            arguments["lora_config"] = self.lora_config(**arguments["lora_config"])
        for key, make in (("speculative_config", self.speculative), ("sparse_attention_config", self.sparse)):
            if isinstance(arguments.get(key), Mapping):
                given = dict(arguments[key])  # ``from_dict`` removes the tag from its mapping
                if key == "speculative_config":
                    given = respelled(given, tagged=make is None)
                arguments[key] = given if make is None else make(given)  # from 1.3 on, the tag is a field
        return self.llm(model=model, **arguments)


_TAGS = {"DraftTarget": "Draft_Target", "UserProvided": "User_Provided"}  # of 1.2, and from 1.3 on


def respelled(speculation: Mapping[str, Any], *, tagged: bool) -> dict[str, Any]:
    """A speculation's arguments with its kind as the installed release spells it."""
    kind = speculation.get("decoding_type")
    other = _TAGS if tagged else {later: earlier for earlier, later in _TAGS.items()}
    return {**speculation, "decoding_type": other.get(kind, kind)} if isinstance(kind, str) else dict(speculation)


def set_log_level(level: str) -> None:
    """Set our log level for TensorRT-LLM in this process and its ranks, unless its variable is set.

    The package reads the variable once, at import; its ``set_level`` has no effect afterwards.
    """
    os.environ.setdefault(_LEVEL_VARIABLE, LEVELS[level].upper())


def load_trtllm() -> TrtllmApi:
    """Import TensorRT-LLM and check its interface.

    Raises:
        EngineError: it is not installed, is the empty stub, or lacks a required part; with the command to install it.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
        llm = package.LLM
        sampling = package.SamplingParams
    except (ImportError, AttributeError, OSError) as error:  # OSError: a CUDA library is missing
        raise EngineError(f"TensorRT-LLM cannot be imported ({error}); {INSTALL}") from error
    disaggregated = find("DisaggregatedParams", "tensorrt_llm.llmapi", "tensorrt_llm.disaggregated_params")
    request_error = find("RequestError", "tensorrt_llm.executor.utils", "tensorrt_llm.llmapi", "tensorrt_llm.executor")
    if disaggregated is None or request_error is None:
        raise EngineError(
            f"tensorrt_llm {_version(package)} has no DisaggregatedParams or no RequestError; use 1.2.1: {INSTALL}"
        )
    install = f"use 1.2.1: {INSTALL}"
    check_interface(f"SamplingParams of tensorrt_llm {_version(package)}", {sampling: _SAMPLING_FIELDS}, install)
    scheduling = find("SchedulingParams", "tensorrt_llm.scheduling_params", "tensorrt_llm.llmapi")
    torch_args = find("TorchLlmArgs", "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args")
    auto_args = find("LlmArgs", "tensorrt_llm._torch.auto_deploy.llm_args")
    api = TrtllmApi(
        version=_version(package),
        llm=llm,
        encoder=getattr(package, "MultimodalEncoder", None),
        sampling=sampling,
        disaggregated=disaggregated,
        request_error=request_error,
        scheduling=scheduling,
        speculative=_from_dict("DecodingBaseConfig"),
        sparse=_from_dict("BaseSparseAttentionConfig"),
        collector=find("MetricsCollector", "tensorrt_llm.metrics", "tensorrt_llm.metrics.collector"),
        guided=find("GuidedDecodingParams", "tensorrt_llm.llmapi", "tensorrt_llm.sampling_params"),
        shared_tensor=find("SharedTensorContainer", "tensorrt_llm._torch.shared_tensor"),
        call=fields_of(llm.generate_async),
        arguments=fields_of(torch_args) if torch_args is not None else frozenset(),
        sections=_sections(torch_args),
        logprob=find("Logprob", "tensorrt_llm.executor.result", "tensorrt_llm.executor"),
        autodeploy=fields_of(auto_args) if auto_args is not None else None,
        lora=find("LoRARequest", "tensorrt_llm.executor.request", "tensorrt_llm.executor"),
        lora_config=find("LoraConfig", "tensorrt_llm.lora_helper", "tensorrt_llm.lora_manager"),
    )
    log.info(
        "tensorrt_llm",
        version=api.version,
        call=sorted(name for name in _CALL if name in api.call),
        arguments=len(api.arguments),
        autodeploy=api.autodeploy is not None,
        capacity=api.capacity,
        scheduling=api.scheduling is not None,
        native_metrics=api.collector is not None,
        disaggregated=sorted(fields_of(disaggregated)),
    )
    for note in notes(api.version):
        log.warning("tensorrt_llm_version", note=note)
    return api


def notes(version: str) -> Iterator[str]:
    """Warnings about a release."""
    if version.startswith("1.2.0"):
        yield "1.2.0 gives wrong output with chunked prefill and block reuse (#12770); use 1.2.1"
    elif not version.startswith("1.2."):
        yield (
            f"written for 1.2.1; {version} is used as far as its signatures agree: "
            "`penstock doctor --engine trtllm` tries what workers do with it"
        )


def container() -> str | None:
    """The release of NVIDIA's runtime container around this process, by the Dynamo within it. None: there is none."""
    try:
        return metadata.version("ai-dynamo-runtime")
    except metadata.PackageNotFoundError:
        return None


def _version(package: Any) -> str:
    return str(getattr(package, "__version__", "unknown"))


def find(name: str, *modules: str) -> Any:
    """What the first of the modules that has this name has under it; None: none has it."""
    for module in modules:
        with contextlib.suppress(ImportError):
            attribute = getattr(importlib.import_module(module), name, None)
            if attribute is not None:
                return attribute
    return None


def _from_dict(name: str) -> Callable[[dict[str, Any]], Any] | None:
    kind = find(name, "tensorrt_llm.llmapi.llm_args", "tensorrt_llm.llmapi")
    make: Callable[[dict[str, Any]], Any] | None = getattr(kind, "from_dict", None)
    return make


def _sections(kind: Any) -> dict[str, frozenset[str]]:
    """The fields of each field that is a pydantic model, or such a model or None."""
    found: dict[str, frozenset[str]] = {}
    for name, field in (getattr(kind, "model_fields", None) or {}).items():
        annotation = field.annotation
        kinds = [each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields")]
        if len(kinds) == 1:
            found[name] = fields_of(kinds[0])
    return found
