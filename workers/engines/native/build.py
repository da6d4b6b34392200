"""Builds a native engine: loads the model, sizes the KV pool, picks the executor, warms it up."""

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
import torch

from schemas.requests import Sampling, Stop
from workers.engines import cpu_budget
from workers.engines.base import EngineError, EngineInfo, SequenceRequest
from workers.engines.core.blocks import BlockManager
from workers.engines.core.config import SchedulerConfig
from workers.engines.core.engine import ScheduledEngine
from workers.engines.core.offload import HostCache
from workers.engines.core.scheduler import Scheduler
from workers.engines.core.sequence import Executor
from workers.engines.logits import Registry
from workers.engines.native.attention import Unsupported
from workers.engines.native.draft import load_draft, make_speculation
from workers.engines.native.executor import TorchExecutor
from workers.engines.native.host_pool import HostPool
from workers.engines.native.model import Model, ModelError, load, vision_encoder
from workers.engines.native.options import DEFAULTS, NativeOptions
from workers.engines.native.pool import out_of_memory
from workers.engines.native.pools import Pools, make_pools
from workers.engines.native.quantize import quantize
from workers.engines.native.vision import TorchVisionEncoder

if TYPE_CHECKING:
    from workers.engines.native.cuda.executor import CudaExecutor
    from workers.engines.native.cuda.modules import Rotation

log = structlog.get_logger("engine")

WARM_TOKENS = 4  # prompt + output of a warm-up request


def build(model: str, options: NativeOptions = DEFAULTS, *, processors: Registry | None = None) -> ScheduledEngine:
    """Load a model and make its engine.

    Args:
        model: a directory, or a Hugging Face id. An id is looked up in the local cache first; with HF_HUB_OFFLINE=1,
            only there.
        processors: logits processors that requests may name.

    Raises:
        ModelError: the model cannot be served here; the text says what to change.
        EngineError: weights or KV cache do not fit into memory, or the device is missing.
        ValueError: a size below 1.
    """
    started = time.perf_counter()
    device = find_device(options.device)
    set_threads(options.threads, device)
    reload = functools.partial(_load, model, device, options)
    try:
        loaded = reload()
        encoder = vision_encoder(model, loaded.forward, options.embed_slots) if loaded.multimodal else None
        draft = load_draft(options, loaded)
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    return assemble(
        loaded, options, encoder=encoder, draft=draft, processors=processors, started=started, reload=reload
    )


def _load(model: str, device: torch.device, options: NativeOptions) -> Model:
    """Load a model, with the weights that the options ask for.

    Raises:
        ModelError: as ``load``, or its data type has no fp8 products on this device.
    """
    loaded = load(model, device=device, dtype=options.dtype)
    if options.quantization == "fp8":
        if device.type == "cuda" and loaded.dtype != torch.bfloat16:
            raise ModelError(f"fp8 weights need bfloat16 activations on CUDA, not {loaded.dtype}; use --dtype bfloat16")
        language = loaded.forward.get_decoder() if loaded.multimodal else loaded.forward
        log.info("weights_quantized", to="fp8", layers=quantize(language))
    return loaded


def assemble(
    loaded: Model,
    options: NativeOptions = DEFAULTS,
    *,
    encoder: TorchVisionEncoder | None = None,
    draft: Model | None = None,
    processors: Registry | None = None,
    started: float | None = None,
    reload: Callable[[], Model] | None = None,
) -> ScheduledEngine:
    """Make the engine of a loaded model; raises as ``build`` does.

    Args:
        options: those of loading (device, dtype, threads, embed_slots) are not used.
        draft: the draft model that ``options.speculative_model`` names.
        started: when loading began, by ``time.perf_counter``; None: now.
        reload: loads the model again if the CUDA kernels do not suit it.
    """
    started = time.perf_counter() if started is None else started
    try:
        limit = _model_len(options.max_model_len, loaded.max_positions)
        if draft is not None and draft.max_positions < limit:
            raise ModelError(f"the draft model takes {draft.max_positions} tokens; lower max_model_len ({limit}) to it")
        rotation = None
        if loaded.device.type == "cuda":
            loaded, rotation = _with_kernels(loaded, reload)
        if rotation is not None and options.speculative_model:
            raise ModelError("the CUDA kernels do not verify proposed tokens yet; leave out --speculative-model")
        # The CUDA kernels read one table of blocks per sequence.
        hybrid = options.hybrid_kv_cache and rotation is None and draft is None and not options.kv_offloading_size
        pools = make_pools(loaded, options, limit, hybrid=hybrid, draft=draft)
        speculation = make_speculation(options, draft, pools.draft)
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    host, copier = _offload(pools, options)
    blocks = BlockManager(pools.kv.blocks, prefix_cache=options.prefix_cache, kv_events=options.kv_events, host=host)
    scheduler = Scheduler(
        blocks,
        SchedulerConfig(
            block_size=options.block_size,
            max_running=options.max_running,
            max_batched_tokens=options.max_batched_tokens,
            max_model_len=limit,
            eos_token_ids=loaded.eos_token_ids,
            no_evict=options.no_evict,
        ),
        pools.window_rows(blocks),
    )
    executor, ahead = _executors(loaded, pools, rotation, encoder, options, limit)
    info = _info(loaded, options, pools, limit, processors, time.perf_counter() - started)
    return ScheduledEngine(info, scheduler, executor, encoder, processors, ahead, speculation, copier)


def _info(
    loaded: Model, options: NativeOptions, pools: Pools, limit: int, processors: Registry | None, load_seconds: float
) -> EngineInfo:
    return EngineInfo(
        name="native",
        block_size=options.block_size,
        total_blocks=pools.total_blocks,
        slots=options.max_running,
        max_model_len=limit,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        kv_events=options.kv_events and options.prefix_cache,
        load_seconds=load_seconds,
        logits_processors=() if processors is None else processors.names,
        max_batched_tokens=options.max_batched_tokens,
    )


def _offload(pools: Pools, options: NativeOptions) -> tuple[HostCache | None, HostPool | None]:
    """Where evicted blocks go, if the options have host memory for them.

    Raises:
        EngineError: the memory does not hold a block, or there is not so much.
    """
    if not options.kv_offloading_size or not options.prefix_cache:
        return None, None
    slots = int(options.kv_offloading_size * (1 << 30)) // pools.kv.block_bytes
    if slots < 1:
        raise EngineError(f"a KV block has {pools.kv.block_bytes} bytes; raise kv_offloading_size (GiB)")
    return HostCache(slots, kv_events=options.kv_events), HostPool(pools.kv, slots)


def _executors(
    model: Model,
    pools: Pools,
    rotation: "Rotation | None",
    encoder: TorchVisionEncoder | None,
    options: NativeOptions,
    limit: int,
) -> "tuple[TorchExecutor | None, CudaExecutor | None]":
    """The engine's executor, warmed up if requested: a ``CudaExecutor`` if the model has CUDA kernels.

    Args:
        rotation: None: the model has no CUDA kernels.
        limit: tokens of the longest sequence.
    """
    warm = options.warm and min(pools.kv.blocks * options.block_size, limit) > WARM_TOKENS
    if rotation is None:
        executor = TorchExecutor(model, pools.kv, encoder, pools.sliding)
        if warm:
            _warm_up(executor, pools, options.block_size, temperatures=(0.0,))
        return executor, None
    from workers.engines.native.cuda.executor import CudaExecutor

    ahead = CudaExecutor(
        model,
        pools.kv,
        rotation,
        width=-(-limit // options.block_size) + 1,
        max_running=options.max_running,
        max_batched_tokens=options.max_batched_tokens,
        encoder=encoder,
    )
    if options.warm:
        ahead.capture()
    if warm:
        _warm_up(ahead, pools, options.block_size, temperatures=(0.0, 1.0))  # greedy and drawn tokens
    return None, ahead


def _with_kernels(model: Model, reload: Callable[[], Model] | None) -> "tuple[Model, Rotation | None]":
    """Rewrite the model for the kernels of ``cuda``; None: Triton is missing, or they do not suit it."""
    try:
        from workers.engines.native.cuda.prepare import prepare
    except ImportError as error:
        log.warning("cuda_without_kernels", reason=f"{error}; install triton, which torch's CUDA builds come with")
        return model, None
    try:
        return model, prepare(model)
    except (ModelError, Unsupported) as error:
        if reload is None:
            raise
        log.warning("cuda_without_kernels", model=type(model.forward).__name__, reason=str(error))
        return reload(), None


def _warm_up(executor: Executor, pools: Pools, block_size: int, *, temperatures: tuple[float, ...]) -> None:
    """Compute a short request per temperature. A scheduler of its own keeps them out of metrics and prefix cache."""
    blocks = BlockManager(pools.kv.blocks, prefix_cache=False)
    scheduler = Scheduler(
        blocks,
        SchedulerConfig(
            block_size=block_size,
            max_running=1,
            max_batched_tokens=WARM_TOKENS,
            max_model_len=WARM_TOKENS,
        ),
        pools.window_rows(blocks),
    )
    half = WARM_TOKENS // 2
    for temperature in temperatures:  # on CUDA each way of sampling has its own kernel
        sampling = Sampling(temperature=temperature)
        scheduler.submit(SequenceRequest(temperature, [0] * half, sampling, Stop(half, ignore_eos=True)))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, executor.execute(plan))


def find_device(name: str) -> torch.device:
    """Resolve "auto", "cpu" or "cuda".

    Raises:
        EngineError: CUDA is asked for, but there is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EngineError("device is cuda, but torch finds no CUDA device; use --device cpu or fix the driver")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def set_threads(threads: int, device: torch.device) -> None:
    """Set torch's threads for this process; 0: choose for a CPU, unless OMP_NUM_THREADS is set."""
    if not threads and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        threads = cpu_budget.usable_cores()
        log.info("cpu_threads", threads=threads, cores=os.cpu_count())
    if threads:
        torch.set_num_threads(threads)


def _model_len(wanted: int, limit: int) -> int:
    if wanted > limit:
        raise ModelError(f"max_model_len is {wanted}; this model takes {limit} (longer needs another RoPE scaling)")
    return wanted or limit
