"""Builds a native engine: loads the model, sizes the KV pool, picks the executor, warms it up."""

import contextlib
import dataclasses
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec
import structlog
import torch

from penstock.infra.process import budgets
from penstock.workers.engines.constraints.compiler import ALL_CONSTRAINTS, ConstraintCompiler
from penstock.workers.engines.core.blocks import BlockCopies, BlockManager, DiskCache, HostCache
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.core.engine import Adapters, ScheduledEngine
from penstock.workers.engines.core.queue import AdapterSlots
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.windows import most_rows
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo
from penstock.workers.engines.logits.registry import Registry
from penstock.workers.engines.native.block_files import FolderFiles
from penstock.workers.engines.native.executors import (
    follow,
    make_adapters,
    make_computer,
    make_executor,
    make_speculation,
    prepared,
)
from penstock.workers.engines.native.model import loading, vision
from penstock.workers.engines.native.model.draft import load_draft
from penstock.workers.engines.native.model.executor import TorchExecutor
from penstock.workers.engines.native.model.model import Model, UnsupportedModel
from penstock.workers.engines.native.model.options import DEFAULTS, NativeOptions
from penstock.workers.engines.native.model.parallel import RankGroup
from penstock.workers.engines.native.model.pool import KvPool, device_errors, out_of_memory, zeros
from penstock.workers.engines.native.model.pools import KvPools, make_pools
from penstock.workers.engines.native.model.quantize import quantize
from penstock.workers.engines.native.model.vision import TorchVisionEncoder
from penstock.workers.engines.native.ranks import EngineRanks, LeadingExecutor, RankFollower
from penstock.workers.engines.native.weights import DeviceWeights, WeightReader, put


class HostPool:
    """Implements ``penstock.workers.engines.core.blocks.BlockCopier``: slots of the same shape as the pool's blocks.

    Raises:
        EngineError: there is no memory for it.
    """

    def __init__(self, pool: KvPool, slots: int) -> None:
        self._pool: KvPool | None = pool
        self._device = pool.data.device
        self.slots = slots
        size, dtype = (slots, *pool.data.shape[1:]), pool.data.dtype
        try:
            self._data, self._locked = (_page_locked if self._device.type == "cuda" else _pageable)(size, dtype)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"{slots} KV blocks do not fit into host memory; lower kv_offloading_size") from error
        self._bytes = self._data.view(torch.uint8).reshape(slots, pool.block_bytes).numpy()
        self._copied: torch.cuda.Event | None = None  # after the copies so far
        self._under_way: deque[tuple[torch.cuda.Event, frozenset[int]]] = deque()  # with their blocks
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None  # around the last loads
        self.load_s = 0.0

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, for files."""
        return memoryview(self._bytes[slot])

    def ready(self) -> Callable[[], None]:
        """What waits, in any thread, for the copies so far."""
        copied = self._copied
        return copied.synchronize if copied is not None else lambda: None

    def copy(self, copies: BlockCopies) -> None:
        """Queue the copies on the device, without waiting; later steps see the result."""
        assert self._pool is not None, "closed"
        blocks, slots = self._pool.data, self._data
        self._measure()
        with device_errors(), torch.inference_mode():
            for block, slot in copies.saves:
                slots[slot].copy_(blocks[block], non_blocking=True)
            began, timed = time.perf_counter(), self._event() if copies.loads else None
            for slot, block in copies.loads:
                blocks[block].copy_(slots[slot], non_blocking=True)
            self._copied = self._event()
        if self._copied is not None:
            while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
                self._under_way.popleft()
            blocks_of = [block for block, _ in copies.saves] + [block for _, block in copies.loads]
            self._under_way.append((self._copied, frozenset(blocks_of)))
        if timed is not None and self._copied is not None:
            self._timed = timed, self._copied, len(copies.loads)
        elif copies.loads:
            self._learn((time.perf_counter() - began) / len(copies.loads))

    def settle(self, blocks: Collection[int]) -> None:
        for copied, touched in self._under_way:
            if not touched.isdisjoint(blocks):
                with device_errors():
                    copied.synchronize()

    def _event(self) -> "torch.cuda.Event | None":
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _measure(self) -> None:
        if self._timed is not None and self._timed[1].query():  # type: ignore[no-untyped-call]
            began, ended, count = self._timed
            self._learn(began.elapsed_time(ended) / 1e3 / count)
            self._timed = None

    def _learn(self, seconds: float) -> None:
        self.load_s = seconds if not self.load_s else 0.8 * self.load_s + 0.2 * seconds

    def close(self) -> None:
        if self._locked:
            with contextlib.suppress(RuntimeError):  # the device is lost
                self.ready()()
            torch.cuda.cudart().cudaHostUnregister(self._locked)  # type: ignore[no-untyped-call]
            self._locked = 0
        self._pool, self._data = None, torch.empty(0)
        del self._bytes


def _pageable(size: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    return zeros(size, dtype, torch.device("cpu")), 0


def _page_locked(size: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Zeros with which copies are asynchronous, and the address that was locked for that; 0: by torch, which takes the
    next power of two of bytes (pytorch issue 150517).

    Raises:
        OSError, RuntimeError: there is no memory for it.
    """
    data = zeros(size, dtype, torch.device("cpu"))
    if data.nbytes:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cudart.cudaHostRegister(data.data_ptr(), data.nbytes, 0)) == 0:
            return data, data.data_ptr()
        with contextlib.suppress(RuntimeError):  # else the next kernel would raise this error
            torch.ones(1, device="cuda")
    return torch.zeros(size, dtype=dtype, pin_memory=True), 0


DISK_HOST_GIB = 1.0  # of host memory, through which blocks go to files and come back

log = structlog.get_logger("engine")


def build(
    model: str,
    options: NativeOptions = DEFAULTS,
    *,
    processors: Registry | None = None,
    grammars: ConstraintCompiler | None = None,
    lost: Callable[[EngineError], None] = lambda error: None,
) -> ScheduledEngine:
    """Load a model and make its engine.

    Args:
        model: a directory, or a Hugging Face id. An id is looked up in the local cache first; with HF_HUB_OFFLINE=1,
            only there.
        processors: logits processors that requests may name.
        grammars: compiles the constraints of requests; None: they may have none.
        lost: called when another rank of a model that is split has ended; from any thread.

    Raises:
        UnsupportedModel: the model cannot be served here; the text says what to change.
        EngineError: weights or KV cache do not fit into memory, or the device is missing.
        ValueError: a size below 1.
    """
    started = time.perf_counter()
    if options.tensor_parallel_size > 1:
        return _build_over_ranks(model, options, processors, grammars, started, lost)
    device = find_device(options.device)
    set_threads(options.threads, device)
    reload = functools.partial(_load, model, device, options)
    try:
        loaded = reload()
        encoder = loading.vision_encoder(model, loaded.forward, options.embed_slots) if loaded.multimodal else None
        draft = load_draft(options, loaded) if options.drafts else None
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    return assemble(
        loaded,
        options,
        encoder=encoder,
        draft=draft,
        processors=processors,
        grammars=grammars,
        started=started,
        reload=reload,
        load_like=lambda folder, on, dtype: _load(folder, on, dataclasses.replace(options, dtype=dtype)),
    )


def _build_over_ranks(
    model: str,
    options: NativeOptions,
    processors: Registry | None,
    grammars: ConstraintCompiler | None,
    started: float,
    lost: Callable[[EngineError], None],
) -> ScheduledEngine:
    """Make the engine of rank 0, and start the others; arguments and errors as of ``build``."""
    device = _prepare_rank(options, 0)
    ranks = EngineRanks(model, options, lost)
    try:
        with ranks.explained():
            loaded = _load(model, device, options, ranks.group)
            draft = load_draft(options, loaded) if options.drafts else None
            engine = assemble(
                loaded,
                options,
                draft=draft,
                processors=processors,
                grammars=grammars,
                started=started,
                reload=functools.partial(_load, model, device, options, ranks.group),
                ranks=ranks,
            )
            ranks.run()
    except BaseException as error:
        ranks.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise EngineError(out_of_memory(error)) from error
        raise
    log.info("ranks_ready", ranks=options.tensor_parallel_size, device=device.type)
    return engine


def build_follower(model: str, options: NativeOptions, group: RankGroup) -> RankFollower:
    """Load the part of a rank other than 0, which computes what that one tells it; raises as ``build`` does."""
    device = _prepare_rank(options, group.rank)
    try:
        reload = functools.partial(_load, model, device, options, group)
        loaded = reload()
        limit = _model_len(options.max_model_len, loaded.max_positions, loaded.most_positions)
        target = prepared(loaded, reload)
        pools = make_pools(target.model, options, limit, hybrid=options.hybrid_kv_cache)
        computer = make_computer(target, pools, options, limit)
        reader = WeightReader(target.model, quantize if options.quantization == "fp8" else None)
        return RankFollower(computer, reader.read, functools.partial(put, target.model))
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error


def _prepare_rank(options: NativeOptions, rank: int) -> torch.device:
    """The device of a rank, which becomes this thread's; raises as ``build`` does."""
    size = options.tensor_parallel_size
    for name, given in (
        ("max_loras", options.max_loras),
        ("kv_offloading_size", options.kv_offloading_size),
        ("kv_disk", options.kv_disk),
        ("batch_invariant", options.batch_invariant),
    ):
        if given:
            raise UnsupportedModel(f"tensor_parallel_size {size} excludes {name}; leave out one of them")
    device = find_device(options.device)
    if device.type == "cpu":
        threads = options.threads or budgets.usable_cores()
        set_threads(max(1, threads // size), device)
        return device
    if (seen := torch.cuda.device_count()) < size:
        raise EngineError(f"tensor_parallel_size {size} needs as many GPUs, and this worker sees {seen}; lower it")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _load(model: str, device: torch.device, options: NativeOptions, group: RankGroup | None = None) -> Model:
    """Load a model, with the weights that the options ask for."""
    loaded = loading.load(model, device=device, dtype=options.dtype, group=group)
    if options.quantization == "fp8":
        if device.type == "cuda" and loaded.dtype != torch.bfloat16:
            raise UnsupportedModel(
                f"fp8 weights need bfloat16 activations on CUDA, not {loaded.dtype}; use --dtype bfloat16"
            )
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
    grammars: ConstraintCompiler | None = None,
    started: float | None = None,
    reload: Callable[[], Model] | None = None,
    ranks: EngineRanks | None = None,
    load_like: Callable[[str, torch.device, str], Model] | None = None,
) -> ScheduledEngine:
    """Make the engine of a loaded model; raises as ``build`` does.

    Args:
        options: those of loading (device, dtype, threads, embed_slots) are not used.
        draft: the draft model that ``options.speculative_model`` names.
        started: when loading began, by ``time.perf_counter``; None: now.
        reload: loads the model again if the CUDA kernels do not suit it.
        ranks: the others, of a model that is split.
        load_like: loads a folder as this model was, onto a device, in a data type; None: weights stay as they are.
    """
    started = time.perf_counter() if started is None else started
    try:
        limit = _model_len(options.max_model_len, loaded.max_positions, loaded.most_positions)
        if draft is not None and max(draft.max_positions, draft.most_positions) < limit:
            raise UnsupportedModel(
                f"the draft model takes {draft.max_positions} tokens; lower max_model_len ({limit}) to it"
            )
        if options.batch_invariant and (options.quantization or draft is not None):
            raise UnsupportedModel("batch_invariant excludes quantization and a draft model; leave them out")
        target = prepared(loaded, reload, invariant=options.batch_invariant)
        loaded = target.model
        proposing = None if draft is None else prepared(draft, functools.partial(load_draft, options, target.model))
        applied = make_adapters(target, options)
        pools = make_pools(loaded, options, limit, hybrid=options.hybrid_kv_cache, draft=draft)
        log.info("kv_cache_allocated", device=loaded.device.type, **pools.described())
        behind, behind_rows = _offload(pools, options)
        blocks = BlockManager(
            pools.kv.blocks, prefix_cache=options.prefix_cache, kv_events=options.kv_events, host=behind.host
        )
        speculation = make_speculation(options, proposing, pools, limit, loaded, blocks.generations)
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    slots = AdapterSlots(options.max_loras, applied.copy if applied is not None else lambda slot, matrices: None)
    adapters = Adapters(slots, options.max_lora_rank, applied.matrices) if applied is not None else None
    scheduler = Scheduler(
        blocks,
        SchedulerConfig(
            block_size=options.block_size,
            max_running=options.max_running,
            max_batched_tokens=options.max_batched_tokens,
            mixed_chunk_tokens=options.mixed_chunk_tokens,
            max_model_len=limit,
            eos_token_ids=loaded.eos_token_ids,
            no_evict=options.no_evict,
        ),
        pools.window_rows(blocks, behind_rows.host),
        slots,
    )
    make = functools.partial(
        make_executor, pools=pools, encoder=encoder, options=options, limit=limit, adapters=applied, ranks=ranks
    )
    executor = make(target)
    if speculation is not None:
        follow(speculation, executor)
    store = None
    if load_like is not None or ranks is not None:
        stays = "the draft model" if draft is not None else "memory of LoRA adapters" if options.max_loras else ""
        stays = stays if ranks is None else "a part of the model on another GPU"
        narrow = quantize if options.quantization == "fp8" else None
        store = DeviceWeights(
            target, pools, executor, load=load_like, make=make, quantize=narrow, stays=stays, ranks=ranks
        )
    info = _info(loaded, options, pools, limit, processors, time.perf_counter() - started)
    info = msgspec.structs.replace(info, constraints=ALL_CONSTRAINTS if grammars is not None else ())
    make_engine = functools.partial(
        ScheduledEngine,
        info,
        scheduler,
        encoder=encoder,
        processors=processors,
        copier=behind.copier,
        row_copier=behind_rows.copier,
        grammars=grammars,
        adapters=adapters,
        store=store,
    )
    if isinstance(executor, TorchExecutor | LeadingExecutor) or speculation is not None:
        return make_engine(executor=executor, speculation=speculation)  # proposals follow from the last step's tokens
    return make_engine(executor=None, ahead=executor)


def _info(
    loaded: Model, options: NativeOptions, pools: KvPools, limit: int, processors: Registry | None, load_seconds: float
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
        quantization=options.quantization,
    )


class _Offload(NamedTuple):
    """Where what leaves a pool goes; None: nowhere."""

    host: HostCache | None = None
    copier: HostPool | None = None


def _offload(pools: KvPools, options: NativeOptions) -> tuple[_Offload, _Offload]:
    """Where evicted blocks go, and their rows of sliding layers, if the options have host memory or a folder for them.

    Both share memory and files in the same proportion as the device's memory.
    """
    size = options.kv_offloading_size or (DISK_HOST_GIB if options.kv_disk else 0.0)
    if not size or not options.prefix_cache:
        return _Offload(), _Offload()
    pooled = [(pools.kv, 1)]  # with the least slots
    if pools.sliding is not None:  # files may fill half of them
        pooled.append((pools.sliding.pool, 2 * most_rows(pools.sliding.layers.window, options.block_size)))
    whole = sum(pool.blocks * pool.block_bytes for pool, _ in pooled)
    needed = max(-(-least * whole // pool.blocks) for pool, least in pooled)
    given = int(size * (1 << 30))
    if not options.kv_offloading_size:
        given = max(given, needed)
    if given < needed:
        raise EngineError(f"KV in host memory takes {needed / (1 << 30):.2g} GiB at least; raise kv_offloading_size")
    made = [HostPool(pool, given * pool.blocks // whole) for pool, _ in pooled]
    disks: list[DiskCache | None] = [None] * len(made)
    if options.kv_disk:
        files = [
            FolderFiles(
                options.kv_disk,
                f"{pool.memory().layout} {options.quantization}{' windows' * number}",
                pool.block_bytes,
                host.view,
                host.ready,
            )
            for number, ((pool, _), host) in enumerate(zip(pooled, made, strict=True))
        ]
        whole = sum(pool.blocks * each.file_bytes for (pool, _), each in zip(pooled, files, strict=True))
        disks = [
            DiskCache(each, options.kv_disk_bytes * pool.blocks // whole, each.present, kv_events=kv_events)
            for (pool, _), each, kv_events in zip(pooled, files, (options.kv_events, False), strict=False)
        ]
        blocks = disks[0]
        assert blocks is not None
        log.info("kv_disk_opened", folder=options.kv_disk, blocks=len(blocks.names), most_blocks=blocks.most_blocks)
    offloads = [
        _Offload(HostCache(host.slots, kv_events=kv_events, disk=disk), host)
        for host, disk, kv_events in zip(made, disks, (options.kv_events, False), strict=False)
    ]
    return offloads[0], offloads[1] if len(offloads) > 1 else _Offload()


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
        threads = budgets.usable_cores()
        log.info("cpu_threads", threads=threads, cores=os.cpu_count())
    if threads:
        torch.set_num_threads(threads)


def _model_len(wanted: int, limit: int, most: int) -> int:
    if wanted > max(limit, most):
        most = max(limit, most)
        raise UnsupportedModel(
            f"max_model_len is {wanted}; this model takes {most} (longer needs another RoPE scaling)"
        )
    return wanted or limit


def build_encoder(model: str, options: NativeOptions = DEFAULTS) -> EncodeEngine:
    """Load the vision encoder of a model. The language model's weights are never read.

    Args:
        options: those of loading apply (device, dtype, threads, embed_slots). block_size, max_running and
            max_model_len are only reported in ``info``.

    Raises:
        UnsupportedModel: the model takes no images that can be embedded here, or files are missing.
        EngineError: weights or embeddings do not fit into memory, or the device is missing.
    """
    started = time.perf_counter()
    config = loading.configuration(model)
    reason = vision.refusal(config)
    if reason:
        raise UnsupportedModel(f"{reason}; an encode worker needs a vision model")
    where = find_device(options.device)
    set_threads(options.threads, where)
    try:
        tower = loading.weights(vision.tower_of(config), model, config, device=where, dtype=options.dtype)
        encoder = loading.vision_encoder(model, tower, options.embed_slots)
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    text = config.get_text_config()
    info = EngineInfo(
        name="native",
        block_size=options.block_size,
        total_blocks=encoder.slots,
        slots=options.max_running,
        max_model_len=options.max_model_len or loading.positions(config, loading.written(model)).tokens,
        vocab_size=text.vocab_size,
        eos_token_ids=loading.end_tokens(tower),
        kv_events=False,
        load_seconds=time.perf_counter() - started,
    )
    return EncodeEngine(info, encoder)
