"""From settings to a running TensorRT-LLM engine: arguments, checks, construction and one warm-up request.

Under MPI or Slurm, every rank runs the same command (``launch_of``; pure). TensorRT-LLM's launcher runs our worker on
the first rank only and makes the others its compute processes. Without it, each rank would register a worker of its own
and wait for the others.

Releases differ, and so do their samplers: TorchSampler of 1.2 reads temperature, top_k and top_p, and silently drops
the others. No signature says so. So a started engine is asked (``find``): each question biases two tokens far above all
others, or flattens the distribution, so that the answer shows whether the option counts, whatever the model.
"""

import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.memory_estimate import Shape, UnknownShape, shape_of
from penstock.infra.engine_args.rules.rule import Context
from penstock.infra.engine_args.schema import EngineArgs
from penstock.infra.model import modeldir
from penstock.schemas import block_hashes
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.constraints.compiler import OTHERS_CONSTRAINTS, ConstraintCompiler, compiler
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo, SequenceRequest
from penstock.workers.engines.external.arguments import given_arguments, length_limit
from penstock.workers.engines.external.constrained import standard_tokenizer
from penstock.workers.engines.external.engine import ExternalEngine
from penstock.workers.engines.external.images import ImageStore
from penstock.workers.engines.external.runtime import (
    WARM_UP_S,
    EngineRuntime,
    LoopThread,
    bounded,
    first_request,
    shut_down,
    starting,
)
from penstock.workers.engines.native.model.embedding_slots import dtype_of
from penstock.workers.engines.support import ServedOptions
from penstock.workers.engines.trtllm import engine_inputs
from penstock.workers.engines.trtllm import trtllm_metrics as stats
from penstock.workers.engines.trtllm.adapter import TrtllmCall, adapter_of, is_request_error, loras
from penstock.workers.engines.trtllm.api import TrtllmApi, container, load_trtllm, set_log_level
from penstock.workers.engines.trtllm.args import (
    AS_1_2,
    GRAMMARS,
    Installed,
    ResolvedTrtllmArgs,
    TrtllmSettings,
    resolve,
)
from penstock.workers.engines.trtllm.engine_health import LogWatch
from penstock.workers.engines.trtllm.engine_inputs import TrtllmOptions, bias
from penstock.workers.engines.trtllm.trtllm_metrics import NativeMetrics

if TYPE_CHECKING:
    from penstock.workers.engines.trtllm.logits_processors import TrtllmProcessors

LAUNCHER = "trtllm-llmapi-launch"
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class Launch(NamedTuple):
    """
    Attributes:
        launched: by TensorRT-LLM's launcher.
        ranks: processes that were started together.
        leads: this process is the first rank.
    """

    launched: bool
    ranks: int
    leads: bool


def launch_of(environ: Mapping[str, str]) -> Launch:
    """The launch that environment variables describe."""
    if environ.get("TLLM_SPAWN_PROXY_PROCESS") == "1":
        return Launch(True, _number(environ, ("tllm_mpi_size",), 1), True)  # the launcher removes MPI's variables
    return Launch(False, _number(environ, _SIZES, 1), _number(environ, _RANKS, 0) == 0)


def problem(environ: Mapping[str, str], world: int) -> str:
    """Why an engine of ``world`` ranks cannot start here; "": it can."""
    launch = launch_of(environ)
    if not launch.launched and launch.ranks > 1:
        return (
            f"{launch.ranks} processes were started by MPI or Slurm without TensorRT-LLM's launcher; put {LAUNCHER} in "
            "front of 'penstock worker', so that one of them serves and the others compute"
        )
    if launch.launched and launch.ranks not in (1, world):
        return f"the launcher started {launch.ranks} ranks, but the engine's arguments need {world}; make them equal"
    return ""


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default


TOKENS = 4  # of each answer
_FLAT = 50.0  # temperature at which any token may come
_FIRST, _SECOND, _PENALTY = 400.0, 200.0, 500.0  # far above the logits, and exact in bfloat16


class ProbeAnswer(NamedTuple):
    """``logprobs``: of the first token, by token id."""

    tokens: Seq[int] = ()
    logprobs: Mapping[int, Any] = {}


Ask = Callable[[Mapping[str, Any]], Awaitable[ProbeAnswer]]


async def find(ask: Ask, prompt_len: int, eos: Seq[int]) -> ServedOptions:
    """
    Args:
        ask: one request with these arguments of SamplingParams beside ``max_tokens``; an empty answer: it was refused.
            ``embedding_bias`` is a mapping from token id to bias. The prompt has neither of the tokens 2 to 9.
        prompt_len: tokens of its prompt.
    """
    first, second = [token for token in range(2, 10) if token not in eos][:2]
    bias = {"temperature": 0.0, "embedding_bias": {first: _FIRST, second: _SECOND}}
    flat = {"temperature": _FLAT, "top_p": 1.0, "top_k": 0}

    async def drawn(**arguments: Any) -> list[int]:
        return list((await ask(arguments)).tokens)

    async def barred(minimum: int) -> int:
        """Tokens before an end token that wins unless it is barred."""
        answer = await drawn(**{**bias, "embedding_bias": {end: _FIRST}}, end_id=end, min_tokens=minimum)
        return sum(token != end for token in answer) if answer else -1

    plain = await drawn(**bias)
    penalties = plain[:2] == [first, first] and (await drawn(**bias, frequency_penalty=_PENALTY))[:2] == [first, second]
    greedy = await drawn(temperature=0.0)
    min_p = bool(greedy) and await drawn(**flat, min_p=1.0) == greedy
    seeds = [await drawn(**flat, seed=seed) for seed in (1, 1, 2)]
    seed = bool(seeds[0]) and seeds[0] == seeds[1] != seeds[2]
    alternatives = len((await ask({"temperature": 0.0, "logprobs": 2})).logprobs) > 1
    minimum: Literal["output", "all", ""] = ""
    if eos:
        end = eos[0]
        if await barred(2) == 2:
            minimum = "output"
        elif await barred(prompt_len + 2) == 2:
            minimum = "all"
    return ServedOptions(penalties, min_p, seed, alternatives, minimum)


log = structlog.get_logger("engine")

STAT_S = 2.0
WARM_UP_TOKENS = 4  # fewer than a block; a single token looks like an attention-DP dummy request
WARM_UP_SALT = "penstock-warm-up"


def from_settings(
    settings: WorkerSettings, path: Path, processors: "TrtllmProcessors | None" = None
) -> ExternalEngine[TrtllmCall]:
    """Load the model in ``path`` and warm up its engine.

    Args:
        processors: logits processors that requests may name.

    Raises:
        BadArguments: the engine's arguments are wrong; one line per problem, each with its fix.
        EngineError: TensorRT-LLM is not installed, or the engine did not start.
        modeldir.ModelError: the directory cannot be used.
    """
    began = time.perf_counter()
    set_log_level(settings.log_level)
    plan = _plan(settings, path, processors=processors is not None and processors.configured)
    with contextlib.ExitStack() as undo:
        loop, llm = _start(plan, undo)
        labels = {"model_name": plan.model.name, "engine_type": "trtllm"}
        metrics = NativeMetrics(plan.api.collector if settings.publish_events_and_metrics else None, labels)
        served, stat = warm_up(plan, llm, loop)
        if stat is not None:
            metrics.warmed_up(stat)
        if processors is not None and plan.args.speculative_config is not None:
            processors = processors.without("with speculative decoding")
        if processors is not None and plan.overlaps:  # they would see each token one step late
            processors = processors.without("with the overlap scheduler (set disable_overlap_scheduler: true)")
        info = info_of(
            *(plan.resolved, plan.wanted, plan.model),
            rank_blocks=capacity(llm, plan.api, plan.args, stat),
            load_seconds=time.perf_counter() - began,
            logits_processors=() if processors is None else processors.names,
        )
        info = msgspec.structs.replace(info, ignored_options=served.ignored)
        images = image_store(settings, plan.model)
        options = _options(plan, info, served, processors, images)
        runtime = EngineRuntime(llm, plan.api, loop, undo.pop_all())
    adapters = loras(runtime, settings, options.one_token) if settings.lora_slots else None
    adapter = adapter_of(info, runtime, options, metrics, images)
    log.info("trtllm_ready", layout=options.layout, blocks=info.total_blocks, slots=info.slots, ranks=info.dp_size)
    return ExternalEngine(info, runtime, adapter, plan.grammars if info.constraints else None, adapters)


class _Plan(NamedTuple):
    """What is known before the engine starts."""

    api: TrtllmApi
    path: Path
    model: modeldir.ModelDir
    wanted: TrtllmSettings
    resolved: ResolvedTrtllmArgs
    grammars: ConstraintCompiler | None = None

    @property
    def args(self) -> EngineArgs:
        return self.resolved.args

    @property
    def overlaps(self) -> bool:
        """The overlap scheduler runs: logits processors see each token one step late."""
        return not self.args.disable_overlap_scheduler


def _plan(settings: WorkerSettings, path: Path, *, processors: bool) -> _Plan:
    """Read the model and check the arguments.

    Args:
        processors: the worker's flags name logits processors.

    Raises:
        BadArguments: the engine's arguments are wrong.
        EngineError: TensorRT-LLM is not installed, or the process was not launched as its arguments need.
        modeldir.ModelError: the directory cannot be used.
    """
    api = load_trtllm()
    if settings.lora_slots and (api.lora is None or api.lora_config is None):
        raise EngineError(
            f"tensorrt_llm {api.version} has no LoRARequest or no LoraConfig; leave out --lora and --lora-folder"
        )
    model = modeldir.load(path)
    grammars = compiler(path) if api.guided is not None and standard_tokenizer(path) else None
    wanted = TrtllmSettings(
        settings,
        length_limit(settings, model.length.limit(settings.max_model_len)),
        images=_takes_images(model),
        constraints=grammars is not None,
        processors=processors,
        choose_sampler=api.version.startswith("1.2."),
    )
    plan = _Plan(api, path, model, wanted, arguments(settings, wanted, api, path), grammars)
    if reason := problem(os.environ, plan.args.gpus):
        raise EngineError(reason)
    return plan


def _start(plan: _Plan, undo: contextlib.ExitStack) -> tuple[LoopThread, Any]:
    """Start the loop thread and the engine; ``undo`` closes them in reverse order."""
    watch = LogWatch()
    undo.callback(watch.attach())
    loop = LoopThread("trtllm")
    undo.callback(loop.close)
    with watch.processes(), starting("TensorRT-LLM", plan.api.version):
        llm = plan.api.construct(str(plan.path), plan.resolved.tree)
    undo.callback(shut_down, llm)  # before the loop closes: the engine's threads deliver to it until they end
    return loop, llm


def _options(
    plan: _Plan,
    info: EngineInfo,
    served: ServedOptions,
    processors: "TrtllmProcessors | None",
    images: ImageStore | None,
) -> TrtllmOptions:
    """How the engine's calls are made."""
    api, args = plan.api, plan.args
    return TrtllmOptions(
        prompt_limit=prompt_limit(args, info.max_model_len),
        layout=plan.resolved.layout,
        root=block_hashes.root(plan.model.revision),
        disaggregated=api.disaggregated,
        scheduling=api.scheduling if info.dp_size > 1 else None,
        logprob=api.logprob,
        vocab_size=info.vocab_size,
        served=served,
        one_token=partial(one_token, api),
        publish=plan.wanted.worker.publish_events_and_metrics,
        trace_headers=bool(args.otlp_traces_endpoint) and "trace_headers" in api.call,
        abort_hold_s=plan.wanted.worker.handoff_lease_s,
        processors=processors,
        continuing=_continuing(plan, info),
        image_inputs=None if images is None else partial(engine_inputs.image_inputs, plan.model, images),
    )


def _continuing(plan: _Plan, info: EngineInfo) -> Callable[[SequenceRequest], Any] | None:
    """Logits processors do not work in disaggregated serving, nor in time with the overlap scheduler."""
    if not info.constraints or plan.wanted.worker.role != "aggregated" or plan.overlaps:
        return None
    from penstock.workers.engines.trtllm.logits_processors import Continuing  # imports torch

    return Continuing(plan.path)


def prompt_limit(args: EngineArgs, model_len: int) -> int:
    """The longest prompt, tokens. Without chunked prefill, it must fit into one step."""
    return model_len if args.enable_chunked_prefill else min(model_len, args.max_num_tokens or model_len)


def info_of(
    resolved: ResolvedTrtllmArgs,
    wanted: TrtllmSettings,
    model: modeldir.ModelDir,
    *,
    rank_blocks: int,
    load_seconds: float,
    logits_processors: tuple[str, ...],
) -> EngineInfo:
    """The engine's sizes and capabilities. ``rank_blocks``: KV blocks of one data-parallel rank."""
    args = resolved.args
    ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
    moves = args.cache_transceiver_config
    return EngineInfo(
        name="trtllm",
        block_size=args.kv_cache_config.tokens_per_block,
        total_blocks=rank_blocks * ranks,
        slots=args.batch_size * ranks,
        max_model_len=args.max_seq_len or wanted.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        kv_events=resolved.kv_events and wanted.worker.publish_events_and_metrics,
        load_seconds=load_seconds,
        dp_size=ranks,
        handoff_layout=resolved.layout if moves is not None else "",
        connector=f"trtllm {moves.backend or 'DEFAULT'}" if moves is not None else "",
        connector_tokens=(moves.max_tokens_in_buffer or 0) if moves is not None else 0,
        logits_processors=logits_processors,
        constraints=OTHERS_CONSTRAINTS if wanted.constraints and args.guided_decoding_backend == GRAMMARS else (),
        max_batched_tokens=args.max_num_tokens or 0,
        quantization="dynamic" if args.force_dynamic_quantization else "",
    )


def arguments(settings: WorkerSettings, wanted: TrtllmSettings, api: TrtllmApi, path: Path) -> ResolvedTrtllmArgs:
    """The constructor's arguments, checked against the model, the draft model and the installed release.

    Raises:
        BadArguments: see ``args.resolve``.
    """
    given = given_arguments(settings)
    speculation = given.get("speculative_config") or {}
    draft = speculation.get("speculative_model") or speculation.get("speculative_model_dir") or ""
    local = draft.startswith(("/", ".", "~")) or draft.count("/") > 1
    context = Context(
        role=wanted.worker.role,  # type: ignore[arg-type]  # a Literal in the settings
        model_len=wanted.max_model_len if "max_seq_len" not in given else None,
        router_block_size=wanted.worker.block_size,
        shape=_shape(path),
        draft=_shape(Path(draft).expanduser()) if draft else None,
        missing=frozenset([draft] if local and not Path(draft).expanduser().is_dir() else ()),
        version=api.version,
        container=container(),
        logits_processors=wanted.processors,
    )
    installed = AS_1_2 if api.version.startswith("1.2.") else Installed(api.arguments, api.sections)
    return resolve(wanted, given, installed=installed, known=api.autodeploy, context=context)


def _takes_images(model: modeldir.ModelDir) -> bool:
    return model.vision is not None and model.vision.hidden > 0 and model.vision.patches is None


def image_store(settings: WorkerSettings, model: modeldir.ModelDir) -> ImageStore | None:
    """Images and embeddings until their prompts are computed; None: the model takes no images."""
    if model.vision is None or not _takes_images(model):
        return None
    dtype = dtype_of(settings.dtype, _config(model.path))
    return ImageStore("TensorRT-LLM", model.vision, settings.embed_slots, model.vision.image_tokens, dtype)


def _config(path: Path) -> dict[str, Any]:
    return msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])


def _shape(path: Path) -> Shape | None:
    """The model's size according to its config.json; None: unknown."""
    try:
        return shape_of(_config(path), model=path.name)
    except (UnknownShape, msgspec.MsgspecError, OSError):
        return None


def one_token(api: TrtllmApi) -> dict[str, Any]:
    """Arguments of ``generate_async`` for a request of one token.

    Its cache salt separates it from clients' requests and from the dummy requests of attention DP.
    """
    arguments = engine_inputs.sampling_arguments(
        Sampling(temperature=0.0), Stop(1, ignore_eos=True), eos=(), max_tokens=1
    )
    return {"inputs": [1] * WARM_UP_TOKENS, "sampling_params": api.sampling(**arguments)} | _apart(api)


def _apart(api: TrtllmApi) -> dict[str, Any]:
    extra: dict[str, Any] = {"cache_salt": WARM_UP_SALT} if "cache_salt" in api.call else {}
    if api.scheduling is not None:  # 1.2 compares this value of requests that wait; None would end the engine
        extra["scheduling_params"] = api.scheduling(attention_dp_relax=True)
    return extra


class WarmedUp(NamedTuple):
    """``stat``: the engine's latest statistic, None without any."""

    served: ServedOptions
    stat: dict[str, Any] | None


def warm_up(plan: _Plan, llm: Any, loop: LoopThread) -> WarmedUp:
    """Compute a few short requests: the first compiles, the others show which sampling options the engine applies.

    Raises:
        EngineError: the first request failed.
    """
    api, model = plan.api, plan.model

    async def ask(arguments: Mapping[str, Any]) -> ProbeAnswer:
        fixed = {"max_tokens": TOKENS, "end_id": -1, "pad_id": 0, "detokenize": False, "add_special_tokens": False}
        given = {**fixed, "include_stop_str_in_output": True, **arguments}
        if "embedding_bias" in given:
            given["embedding_bias"] = bias(given["embedding_bias"], model.vocab_size)
        try:
            params = api.sampling(**given)
            answer = llm.generate_async([1] * WARM_UP_TOKENS, params, **_apart(api))
            (output,) = (await answer.aresult()).outputs
        except Exception as error:
            if not is_request_error(error, api.request_error, at_call=True):
                raise
            return ProbeAnswer()
        entries = output.logprobs or [{}]
        return ProbeAnswer(list(output.token_ids), entries[0] if isinstance(entries[0], Mapping) else {})

    async def all_requests() -> ServedOptions:
        await llm.generate_async(**one_token(api)).aresult()
        return await find(ask, WARM_UP_TOKENS, model.eos_token_ids)

    served = first_request("TensorRT-LLM", loop, all_requests())
    log.info("trtllm_sampling", **served._asdict())
    stat = None
    if plan.wanted.worker.publish_events_and_metrics:
        stat = bounded(_latest_stat, llm, seconds=WARM_UP_S)
    return WarmedUp(served, stat)


def _latest_stat(llm: Any) -> dict[str, Any] | None:
    """The last of the statistics so far, which come a little later than the tokens."""
    deadline, last = time.monotonic() + STAT_S, None
    while time.monotonic() < deadline:
        found = llm.get_stats(timeout=0)
        if not found and last is not None:
            break
        last = dict(found[-1]) if found else last
        time.sleep(0.01)
    return last


def capacity(llm: Any, api: TrtllmApi, args: EngineArgs, stat: dict[str, Any] | None) -> int:
    """KV blocks of one rank: from the engine's API, else from its statistics, else estimated from its arguments."""
    if api.capacity:
        answer = llm.get_kv_cache_capacity()
        blocks = answer.get("maxNumBlocks") if isinstance(answer, dict) else getattr(answer, "maxNumBlocks", None)
        if blocks:
            return int(blocks)
    shown = stats.pool_counts(stat) if stat is not None else None
    if shown is not None and shown.total > 0:
        return shown.total
    kv = args.kv_cache_config
    tokens = kv.max_tokens or args.batch_size * (args.max_seq_len or 0)
    log.warning("kv_capacity_unknown", guess=tokens // kv.tokens_per_block, fix="enable_iter_perf_stats")
    return max(1, tokens // kv.tokens_per_block)
