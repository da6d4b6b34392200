"""The part of TensorRT-LLM's interface that the adapter uses, as a table; how the installed release differs from it.

The arguments of ``LLM`` are compared with ``penstock.infra.engine_args.schema``, which has those of 1.2.1.
"""

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import msgspec

from penstock.infra.engine_args import schema
from penstock.workers.engines.trtllm.api import find

ANY = object()  # a default that does not matter, or none


class InterfacePart(NamedTuple):
    """A class or a method.

    Attributes:
        name: of the class, or "class.method".
        modules: where it may be.
        members: fields, attributes or parameters, and the defaults that are known; ``ANY`` accepts each.
        optional: only some releases have it.
    """

    name: str
    modules: Seq[str]
    members: Mapping[str, Seq[Any]] = {}
    optional: bool = False


class InterfaceDifference(NamedTuple):
    """``used``: the adapter needs what is missing; else a default is another one than known."""

    where: str
    what: str
    used: bool


_TOP, _LLMAPI, _RESULT = "tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.executor.result"
_NONE = (None,)

PARTS: tuple[InterfacePart, ...] = (
    InterfacePart(
        "LLM.generate_async",
        (_TOP,),
        {
            "inputs": (ANY,),
            "sampling_params": _NONE,
            "streaming": (False,),
            "disaggregated_params": _NONE,
            "trace_headers": _NONE,
            "scheduling_params": _NONE,
            "cache_salt": _NONE,
        },
    ),
    InterfacePart("LLM.get_kv_cache_events", (_TOP,), {"timeout": (ANY,)}),
    InterfacePart("LLM.get_stats", (_TOP,), {"timeout": (ANY,)}),
    InterfacePart("LLM.shutdown", (_TOP,)),
    InterfacePart(
        "SamplingParams",
        (_TOP,),
        {
            "max_tokens": (32, None),
            "end_id": _NONE,
            "pad_id": _NONE,
            "detokenize": (True,),
            "add_special_tokens": (True,),
            "include_stop_str_in_output": (False,),
            "n": (1,),
            "best_of": _NONE,
            "seed": _NONE,
            "stop_token_ids": _NONE,
            "min_tokens": _NONE,
            "temperature": _NONE,
            "top_p": _NONE,
            "top_k": _NONE,
            "min_p": _NONE,
            "repetition_penalty": _NONE,
            "presence_penalty": _NONE,
            "frequency_penalty": _NONE,
            "prompt_ignore_length": _NONE,
            "embedding_bias": _NONE,
            "logits_processor": _NONE,
            "logprobs": _NONE,
            "prompt_logprobs": _NONE,
            "guided_decoding": _NONE,
            "return_perf_metrics": (False,),
        },
    ),
    InterfacePart("GuidedDecodingParams", (_LLMAPI, "tensorrt_llm.sampling_params"), {"grammar": _NONE}),
    InterfacePart(
        "DisaggregatedParams",
        (_LLMAPI, "tensorrt_llm.disaggregated_params"),
        {
            "request_type": _NONE,
            "first_gen_tokens": _NONE,
            "ctx_request_id": _NONE,
            "opaque_state": _NONE,
            "draft_tokens": _NONE,
            "multimodal_embedding_handles": _NONE,
            "multimodal_hashes": _NONE,
        },
    ),
    InterfacePart(
        "SchedulingParams",
        ("tensorrt_llm.scheduling_params", _LLMAPI),
        {"attention_dp_rank": _NONE, "attention_dp_relax": (None, True)},
    ),
    InterfacePart("RequestError", ("tensorrt_llm.executor.utils", _LLMAPI, "tensorrt_llm.executor")),
    InterfacePart(
        "CompletionOutput",
        (_RESULT, _LLMAPI),
        {
            "token_ids": (ANY,),
            "logprobs": (ANY,),
            "prompt_logprobs": (ANY,),
            "finish_reason": _NONE,
            "stop_reason": _NONE,
            "disaggregated_params": _NONE,
            "request_perf_metrics": _NONE,
        },
    ),
    InterfacePart(
        "RequestOutput", (_LLMAPI, "tensorrt_llm.llmapi.llm"), {"outputs": (ANY,), "finished": (ANY,), "abort": (ANY,)}
    ),
    InterfacePart("Logprob", (_RESULT, "tensorrt_llm.executor"), {"logprob": (ANY,), "rank": _NONE}),
    InterfacePart("MultimodalEncoder.generate", (_TOP,), {"inputs": (ANY,), "use_tqdm": (ANY,)}, optional=True),
    InterfacePart("SharedTensorContainer.from_dict", ("tensorrt_llm._torch.shared_tensor",), optional=True),
    InterfacePart(
        "MetricsCollector", ("tensorrt_llm.metrics", "tensorrt_llm.metrics.collector"), {"labels": (ANY,)}, True
    ),
)

# Sections of the arguments: our Struct, and the engine's class.
SECTIONS: Mapping[str, tuple[type[msgspec.Struct], str]] = {
    "": (schema.EngineArgs, "TorchLlmArgs"),
    "kv_cache_config": (schema.KvCacheConfig, "KvCacheConfig"),
    "scheduler_config": (schema.SchedulerConfig, "SchedulerConfig"),
    "cache_transceiver_config": (schema.CacheTransceiverConfig, "CacheTransceiverConfig"),
    "cuda_graph_config": (schema.CudaGraphConfig, "CudaGraphConfig"),
    "attention_dp_config": (schema.AttentionDpConfig, "AttentionDpConfig"),
    "moe_config": (schema.MoeConfig, "MoeConfig"),
    "torch_compile_config": (schema.TorchCompileConfig, "TorchCompileConfig"),
}
_EFFECTIVE = {
    "max_batch_size",
    "max_beam_width",
    "max_input_len",
    "cp_config",
    "load_format",
}  # None stands for another


def differences() -> list[InterfaceDifference]:
    """Where the installed release differs from the table; what it has beyond it does not matter.

    Raises:
        ImportError: it cannot be imported.
    """
    importlib.import_module(_TOP)
    return [each for part in PARTS for each in _of_part(part)] + [
        each for key, (ours, name) in SECTIONS.items() for each in _of_section(key, ours, name)
    ]


def _of_part(part: InterfacePart) -> Iterator[InterfaceDifference]:
    owner, _, method = part.name.partition(".")
    found = find(owner, *part.modules)
    if found is not None and method:
        found = getattr(found, method, None)
    if found is None:
        if not part.optional:
            yield InterfaceDifference(part.name, "is missing", True)
        return
    members = _members(found)
    for name, known in part.members.items():
        if name not in members and not hasattr(found, name):
            yield InterfaceDifference(
                f"{part.name}.{name}" if not method else f"{part.name}({name})", "is missing", True
            )
        elif name in members and ANY not in known and not any(_same(members[name], each) for each in known):
            expected = " or ".join(map(repr, known))
            yield InterfaceDifference(
                f"{part.name} {name}", f"has the default {members[name]!r}, known is {expected}", False
            )


def _of_section(key: str, ours: type[msgspec.Struct], name: str) -> Iterator[InterfaceDifference]:
    found = find(name, "tensorrt_llm.llmapi.llm_args", _LLMAPI)
    if found is None:
        yield InterfaceDifference(name, "is missing", True)
        return
    members = _members(found)
    for field in msgspec.structs.fields(ours):
        where = f"{key}.{field.name}" if key else field.name
        if field.name not in members:
            yield InterfaceDifference(where, "is no argument of this release", False)
            continue
        default, theirs = field.default, members[field.name]
        plain = isinstance(default, str | int | float | bool | None)
        if plain and field.name not in _EFFECTIVE and theirs is not ANY and not _same(theirs, default):
            yield InterfaceDifference(where, f"has the default {theirs!r}, known is {default!r}", False)


def _same(theirs: Any, known: Any) -> bool:
    value = theirs.value if isinstance(theirs, enum.Enum) else theirs
    return bool(value == known) or (known is None and value in ({}, []))


def _members(found: Any) -> dict[str, Any]:
    """Fields or parameters with their defaults; ``ANY``: none, or one that is made anew each time."""
    if dataclasses.is_dataclass(found):
        return {
            each.name: ANY if each.default is dataclasses.MISSING else each.default
            for each in dataclasses.fields(found)
        }
    fields = getattr(found, "model_fields", None)
    if isinstance(fields, Mapping):
        return {
            name: ANY if each.is_required() or each.default_factory else each.default for name, each in fields.items()
        }
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return {}
    return {name: ANY if each.default is inspect.Parameter.empty else each.default for name, each in parameters.items()}
