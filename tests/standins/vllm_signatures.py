"""What an importable ``vllm`` looks like where adapters touch it, as data: stand-in and real one must agree.

``python -m tests.standins.vllm_signatures`` prints it as JSON for whichever is importable. ``differences`` compares
two of them: what the stand-in has, the real one must have, with the same defaults.
"""

import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

METHODS = (
    "generate",
    "abort",
    "add_lora",
    "remove_lora",
    "check_health",
    "from_engine_args",
    "shutdown",
    "get_kv_event_sources",
    "reset_prefix_cache",
    "collective_rpc",
    "sleep",
    "wake_up",
    "__init__",
)
DATA = {
    "vllm.engine.arg_utils": ("AsyncEngineArgs",),
    "vllm.sampling_params": ("SamplingParams", "StructuredOutputsParams"),
    "vllm.outputs": ("CompletionOutput",),
    "vllm.logprobs": ("Logprob",),
    "vllm.config": ("KVTransferConfig", "KVEventsConfig", "StructuredOutputsConfig"),
    "vllm.distributed.kv_events": ("BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"),
}
ERRORS = {
    "vllm.exceptions": ("VLLMClientError", "VLLMValidationError", "GenerationError", "GracefulHTTPError"),
    "vllm.v1.engine.exceptions": ("EngineDeadError", "EngineGenerateError"),
}
_UNKNOWN = "?"  # the stand-in names the field only

Description = dict[str, dict[str, Any]]


def describe() -> Description:
    """Of the ``vllm`` that can be imported now."""
    found: Description = {}
    llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    for name in METHODS:
        found[f"AsyncLLM.{name}"] = dict(_parameters(getattr(llm, name)))
    executor = importlib.import_module("vllm.v1.executor.multiproc_executor").MultiprocExecutor
    for name in ("__init__", "start_worker_monitor", "shutdown"):
        found[f"MultiprocExecutor.{name}"] = dict(_parameters(getattr(executor, name)))
    config = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.create_engine_config
    found["create_engine_config"] = dict(_parameters(config))
    output = importlib.import_module("vllm.outputs").RequestOutput
    found["RequestOutput"] = {name: value for name, value in _parameters(output.__init__) if name != "kwargs"}
    for module, names in DATA.items():
        for name in names:
            found[name] = dict(_fields(getattr(importlib.import_module(module), name)))
    for module, names in ERRORS.items():
        for name in names:
            kind = getattr(importlib.import_module(module), name)
            found[name] = {base.__name__: "" for base in kind.__mro__ if base.__module__.startswith("vllm")}
    kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
    found["RequestOutputKind"] = {each.name: each.value for each in kinds}
    found["BlockStored"]["<wire>"] = _wire()
    return found


def differences(standin: Description, real: Description) -> list[str]:
    """One line per thing of the stand-in's that the real one has not, or has otherwise."""
    lines = []
    for subject, fields in standin.items():
        for name, value in fields.items():
            if name not in real.get(subject, {}):
                lines.append(f"{subject}: the real one has no {name}")
            elif _UNKNOWN not in (value, real[subject][name]) and real[subject][name] != value:
                lines.append(f"{subject}.{name}: {real[subject][name]!r}, not {value!r}")
    return lines


def _parameters(function: Any) -> Iterator[tuple[str, str]]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in ("self", "cls"):
            yield name, f"{parameter.kind.name}"


def _fields(kind: Any) -> Iterator[tuple[str, Any]]:
    if issubclass(kind, msgspec.Struct):
        for each in msgspec.structs.fields(kind):
            yield each.name, _plain(each.default)
        return
    loose = kind.__name__ == "AsyncEngineArgs"
    for field in dataclasses.fields(kind):
        yield field.name, _UNKNOWN if loose else _plain(field.default)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _UNKNOWN


def _wire() -> Any:
    """One event of each kind, as it is read. Its bytes depend on the number of a struct's fields, which may grow."""
    events: Any = importlib.import_module("vllm.distributed.kv_events")
    stored = events.BlockStored([b"h"], None, [1, 2], 2, None, "GPU", None, [("salt",)], 0)
    batch = events.KVEventBatch(1.0, [stored, events.BlockRemoved([7], "GPU", 0), events.AllBlocksCleared()], 3)
    return msgspec.to_builtins(msgspec.msgpack.decode(msgspec.msgpack.encode(batch)))


def load(text: str) -> Description:
    found: Mapping[str, Any] = json.loads(text)
    return dict(found)


if __name__ == "__main__":
    json.dump(describe(), sys.stdout)
