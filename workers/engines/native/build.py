"""From settings to a running native engine."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
import torch

from schemas.requests import Sampling, Stop
from workers.engines import cpu_budget
from workers.engines.base import EngineError, EngineInfo, SequenceRequest
from workers.engines.core.blocks import BlockManager
from workers.engines.core.engine import ScheduledEngine
from workers.engines.core.scheduler import Scheduler
from workers.engines.core.sequence import Executor
from workers.engines.logits import Registry
from workers.engines.native.attention import Unsupported
from workers.engines.native.executor import TorchExecutor
from workers.engines.native.model import Model, ModelError, load, vision_encoder
from workers.engines.native.pool import DTYPES, Pool, blocks_that_fit, out_of_memory
from workers.engines.native.vision import TorchVisionEncoder

if TYPE_CHECKING:
    from workers.engines.native.cuda.modules import Rotation

log = structlog.get_logger("engine")

WARM_TOKENS = 4  # of the request that comes before all others


def build(
    model: str,
    *,
    block_size: int = 32,
    kv_blocks: int = 0,
    max_running: int = 256,
    max_batched_tokens: int = 8192,
    max_model_len: int = 0,
    prefix_cache: bool = True,
    kv_events: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 0,
    embed_slots: int = 0,
    processors: Registry | None = None,
    kv_dtype: str = "auto",
    kv_memory_fraction: float = 0.0,
    no_evict: bool = False,
    warm: bool = False,
) -> ScheduledEngine:
    """Load a model and make its engine; the first step finds everything in place.

    Args:
        model: directory, or Hugging Face id (looked up in the local cache first; HF_HUB_OFFLINE=1 keeps it there).
        kv_blocks: 0: as many as free memory allows.
        max_model_len: 0: what the model was made for.
        device: "auto": CUDA if there is one.
        threads: of torch, for this process; 0: on a CPU as many as cores are free, see ``cpu_budget``.
        embed_slots: pictures whose embeddings are kept, if the model sees; 0: 256, or fewer where memory is short.
        processors: of logits, that requests may name; None: none.
        kv_dtype: that KV is kept in; "auto": the weights'.
        kv_memory_fraction: of free memory for the pool; 0: 0.85 on CUDA, a quarter on a CPU.
        no_evict: see ``Scheduler``.
        warm: compute a short request first, so that no client waits for libraries to be loaded and kernels chosen.

    Raises:
        ModelError: the model cannot be served here; the text says what to change.
        EngineError: weights or pool do not fit into memory.
        ValueError: a size below 1.
    """
    started = time.perf_counter()
    where = find_device(device)
    set_threads(threads, where)
    try:
        loaded = load(model, device=where, dtype=dtype)
        encoder = vision_encoder(model, loaded.forward, embed_slots) if loaded.sees else None
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    return assemble(
        loaded,
        encoder,
        block_size=block_size,
        kv_blocks=kv_blocks,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        prefix_cache=prefix_cache,
        kv_events=kv_events,
        processors=processors,
        kv_dtype=kv_dtype,
        kv_memory_fraction=kv_memory_fraction,
        no_evict=no_evict,
        warm=warm,
        started=started,
        again=lambda: load(model, device=where, dtype=dtype),
    )


def assemble(
    loaded: Model,
    encoder: TorchVisionEncoder | None = None,
    *,
    block_size: int = 32,
    kv_blocks: int = 0,
    max_running: int = 256,
    max_batched_tokens: int = 8192,
    max_model_len: int = 0,
    prefix_cache: bool = True,
    kv_events: bool = True,
    processors: Registry | None = None,
    kv_dtype: str = "auto",
    kv_memory_fraction: float = 0.0,
    no_evict: bool = False,
    warm: bool = False,
    started: float = 0.0,
    again: Callable[[], Model] | None = None,
) -> ScheduledEngine:
    """An engine of a loaded model; for the arguments see ``build``.

    Args:
        started: when loading began, by ``time.perf_counter``.
        again: loads the model once more, if what makes it faster on CUDA does not suit it.
    """
    began = time.perf_counter()
    try:
        limit = _model_len(max_model_len, loaded.max_positions)
        rotation = None
        if loaded.device.type == "cuda":
            loaded, rotation = _faster(loaded, again)
        pool = _pool(loaded, kv_blocks, block_size, limit, kv_dtype, kv_memory_fraction)
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    blocks = BlockManager(pool.blocks, prefix_cache=prefix_cache, kv_events=kv_events)
    scheduler = Scheduler(
        blocks,
        block_size=block_size,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        max_model_len=limit,
        eos_token_ids=loaded.eos_token_ids,
        no_evict=no_evict,
    )
    executor: TorchExecutor | None = None
    ahead: Any = None
    if rotation is None:
        executor = TorchExecutor(loaded, pool, encoder)
    else:
        from workers.engines.native.cuda.executor import CudaExecutor

        ahead = CudaExecutor(
            loaded,
            pool,
            rotation,
            width=-(-limit // block_size) + 1,
            max_running=max_running,
            max_batched_tokens=max_batched_tokens,
            encoder=encoder,
        )
        if warm:
            ahead.capture()
    if warm and min(pool.blocks * block_size, limit) > WARM_TOKENS:
        _warm_up(executor or ahead, pool.blocks, block_size, (0.0,) if ahead is None else (0.0, 1.0))
    info = EngineInfo(
        name="native",
        block_size=block_size,
        total_blocks=pool.blocks,
        slots=max_running,
        max_model_len=limit,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        kv_events=blocks.kv_events,
        load_seconds=time.perf_counter() - (started or began),
        logits_processors=() if processors is None else processors.names,
        max_batched_tokens=max_batched_tokens,
    )
    return ScheduledEngine(info, scheduler, executor, encoder, processors, ahead)


def _faster(model: Model, again: Callable[[], Model] | None) -> "tuple[Model, Rotation | None]":
    """A model for the kernels of ``cuda``; without Triton, or if they do not suit it, as it was and None."""
    try:
        from workers.engines.native.cuda.prepare import prepare
    except ImportError as error:
        log.warning("cuda_without_kernels", reason=f"{error}; install triton, which torch's CUDA builds come with")
        return model, None
    try:
        return model, prepare(model)
    except (ModelError, Unsupported) as error:
        if again is None:
            raise
        log.warning("cuda_without_kernels", model=type(model.forward).__name__, reason=str(error))
        return again(), None


def _warm_up(executor: Executor | None, blocks: int, block_size: int, temperatures: tuple[float, ...]) -> None:
    """One step of a prompt and one of its answer, under a scheduler of its own: nothing is named or counted."""
    assert executor is not None
    scheduler = Scheduler(
        BlockManager(blocks, prefix_cache=False),
        block_size=block_size,
        max_running=1,
        max_batched_tokens=WARM_TOKENS,
        max_model_len=WARM_TOKENS,
    )
    half = WARM_TOKENS // 2
    for temperature in temperatures:  # on CUDA each kind of draw is a kernel
        sampling = Sampling(temperature=temperature)
        scheduler.submit(SequenceRequest(temperature, [0] * half, sampling, Stop(half, ignore_eos=True)))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, executor.execute(plan))


def find_device(name: str) -> torch.device:
    """What "auto", "cpu" or "cuda" stands for.

    Raises:
        EngineError: there is no such device.
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


def _pool(model: Model, kv_blocks: int, block_size: int, model_len: int, kv_dtype: str, share: float) -> Pool:
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    dtype = DTYPES.get(kv_dtype, model.dtype)
    block_bytes = model.shape.block_bytes(block_size, dtype)
    blocks = kv_blocks or blocks_that_fit(block_bytes, -(-model_len // block_size), model.device, share)
    if blocks < 1:
        raise EngineError(
            f"no memory is left for a single KV block of {block_bytes} bytes on {model.device}; "
            "set kv_blocks, raise kv_memory_fraction, lower block_size, or use a smaller model or dtype"
        )
    try:
        return Pool(model.shape, blocks, block_size, dtype, model.device, model.dtype)
    except OSError as error:  # mmap
        raise EngineError(f"{blocks} KV blocks of {block_bytes} bytes do not fit; lower kv_blocks") from error
