"""The only module that imports ``sglang``: the parts of the installed release are looked up once and logged."""

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import structlog

from penstock.infra.engine_args.tree import Tree
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.external.arguments import check_interface, fields_of

log = structlog.get_logger("engine")

INSTALL = "pip install 'penstock[sglang]' (SGLang 0.5.23), or run in the image lmsysorg/sglang:v0.5.23"
VERSIONS = ("0.5.",)  # that the adapter was written for
_CALL = frozenset([
    "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank",
    "external_trace_header", "lora_path", "rid",
])  # fmt: skip
_SAMPLING = frozenset([
    "max_new_tokens", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "ignore_eos", "logit_bias", "sampling_seed", "ebnf",
])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SglangApi:
    """The classes that the adapter uses.

    Attributes:
        arguments: fields of ServerArgs.
        salts: requests may have a cache of their own: 0.5.23 has `cache_salt`, 0.5.17 has not.
        commands: what its processes are sent.
    """

    version: str
    llm: type[Any]
    arguments: frozenset[str]
    salts: bool = True
    commands: Any = None

    def construct(self, model: str, tree: Tree) -> Any:
        """Construct an engine; blocks until the weights are loaded. Call it in the engine's event loop.

        Raises:
            ValueError, TypeError: an argument is invalid.
            Exception: anything else means that it did not start.
        """
        if ":" in model:  # which SGLang refuses in the name that it takes from the folder
            tree = {"served_model_name": model.replace(":", "_")} | tree
        return self.llm(model_path=model, **tree)

    @staticmethod
    def block_size(llm: Any) -> int:
        """Of a started engine, in tokens: some models and attention backends have a size of their own."""
        args = llm.server_args
        found = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
        return int(found["page_size"]) * int(found.get("dcp_size") or 1)

    def nixl(self) -> bool:
        """Whether NIXL is there; otherwise only the log of a subprocess would report it."""
        return importlib.util.find_spec("nixl") is not None

    def saves_memory(self) -> bool:
        """Whether weights can leave the device; otherwise its schedulers end at their start."""
        return importlib.util.find_spec("torch_memory_saver") is not None

    @staticmethod
    def cuda_folders() -> list[str]:
        """Of CUDA's runtime as pip installs it. The memory saver is loaded into a process before torch finds them."""
        spec = importlib.util.find_spec("nvidia")
        places = (spec.submodule_search_locations if spec is not None else None) or ()
        return sorted({str(file.parent) for each in places for file in Path(each).glob("*/lib/libcudart.so.*")})

    def traces(self) -> bool:
        """Whether it can send spans: it needs both exporters, whichever it uses."""
        try:
            for name in ("grpc", "http"):
                importlib.import_module(f"opentelemetry.exporter.otlp.proto.{name}.trace_exporter")
        except ImportError:
            return False
        return True


def load_sglang() -> SglangApi:
    """Import SGLang and check its interface.

    Raises:
        EngineError: it is not installed, or lacks a required part; with the command to install it.
    """
    try:
        version = str(importlib.import_module("sglang.version").__version__)
        llm = importlib.import_module("sglang.srt.entrypoints.engine").Engine
        args = importlib.import_module("sglang.srt.server_args").ServerArgs
        commands = importlib.import_module("sglang.srt.managers.io_struct")
        sampling = importlib.import_module("sglang.srt.sampling.sampling_params").SamplingParams
    except (ImportError, AttributeError, OSError) as error:  # OSError: a CUDA library is missing
        raise EngineError(f"SGLang cannot be used ({error}); {INSTALL}") from error
    check_interface(f"SGLang {version}", {sampling: _SAMPLING, llm.async_generate: _CALL}, INSTALL)
    arguments = frozenset(name for name in fields_of(args) if not name.startswith("_"))
    api = SglangApi(version, llm, arguments, "cache_salt" in fields_of(llm.async_generate), commands)
    log.info("sglang", version=version, arguments=len(api.arguments))
    if not version.startswith(VERSIONS):
        log.warning("sglang_version", note=f"written for 0.5.23; {version} is used as far as its signatures agree")
    return api
