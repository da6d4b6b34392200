"""Chooses and prepares what computes an engine's steps, and its draft model's: plain torch, or kernels for CUDA."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
import torch

from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.drafts import NgramDrafter
from penstock.workers.engines.core.engine import Drafter, Speculator
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import Executor
from penstock.workers.engines.engine_protocol import EngineError, RequestError, SequenceRequest
from penstock.workers.engines.native.model.adapters import TorchAdapters, places_of
from penstock.workers.engines.native.model.attention import UnsupportedAttention
from penstock.workers.engines.native.model.draft import DraftModel
from penstock.workers.engines.native.model.executor import TorchExecutor
from penstock.workers.engines.native.model.model import Model, UnsupportedModel
from penstock.workers.engines.native.model.options import NGRAM, NativeOptions
from penstock.workers.engines.native.model.pool import device_errors, dtype_name, out_of_memory
from penstock.workers.engines.native.model.pools import KvPools
from penstock.workers.engines.native.model.vision import TorchVisionEncoder
from penstock.workers.engines.native.ranks import EngineRanks, LeadingExecutor

if TYPE_CHECKING:
    from penstock.workers.engines.native.cuda.executor import CudaExecutor
    from penstock.workers.engines.native.cuda.modules import Rotation

log = structlog.get_logger("engine")

WARM_TOKENS = 4  # prompt + output of a warm-up request
# Of a configuration: what does not change what a model computes.
_INCIDENTAL = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
}


class PreparedModel(NamedTuple):
    """A model to compute with; ``rotation``: of its CUDA kernels, None if it has none."""

    model: Model
    rotation: "Rotation | None" = None


def prepared(model: Model, reload: Callable[[], Model] | None, *, invariant: bool = False) -> PreparedModel:
    """Rewrite a model on CUDA for the kernels of ``cuda``, if Triton is there and they suit it.

    Args:
        reload: loads the model again if they do not.
        invariant: what is computed for a sequence shall not depend on the others.

    Raises:
        UnsupportedModel: it has to be invariant and cannot be; or it has to be reloaded, without ``reload``.
    """
    if model.device.type != "cuda":
        return PreparedModel(model)
    try:
        from penstock.workers.engines.native.cuda.rewrite import prepare
    except ImportError as error:
        if invariant:
            raise UnsupportedModel(
                f"batch_invariant needs triton, which torch's CUDA builds come with ({error})"
            ) from error
        log.warning("cuda_without_kernels", reason=f"{error}; install triton, which torch's CUDA builds come with")
        return PreparedModel(model)
    try:
        return PreparedModel(model, prepare(model, invariant=invariant))
    except (UnsupportedModel, UnsupportedAttention) as error:
        if reload is None or invariant:
            raise
        log.warning("cuda_without_kernels", model=type(model.forward).__name__, reason=str(error))
        return PreparedModel(reload())


def make_adapters(target: PreparedModel, options: NativeOptions) -> TorchAdapters | None:
    """Room for LoRA adapters beside a model's products; None: the options have none.

    Raises:
        UnsupportedModel: this model cannot have any, or not with these options.
    """
    if not options.max_loras:
        return None
    if options.quantization or options.batch_invariant:
        name = "quantization" if options.quantization else "batch_invariant"
        raise UnsupportedModel(f"{name} excludes LoRA adapters; leave out one of them")
    if target.rotation is None:
        made = TorchAdapters(target.model, options.max_loras, options.max_lora_rank)
    else:
        from penstock.workers.engines.native.cuda.adapters import CudaAdapters

        made = CudaAdapters(target.model, options.max_loras, options.max_lora_rank)
    log.info("adapter_slots", slots=options.max_loras, rank=options.max_lora_rank, mib=made.bytes >> 20)
    return made


def make_executor(
    target: PreparedModel,
    pools: KvPools,
    encoder: TorchVisionEncoder | None,
    options: NativeOptions,
    limit: int,
    adapters: TorchAdapters | None = None,
    ranks: EngineRanks | None = None,
) -> "TorchExecutor | LeadingExecutor | CudaExecutor":
    """The engine's executor, warmed up if requested.

    Args:
        limit: tokens of the longest sequence.
        adapters: of ``make_adapters``.
        ranks: the others, of a model that is split; owned by the executor.
    """
    model, rotation = target
    warm = options.warm and min(pools.kv.blocks * options.block_size, limit) > WARM_TOKENS
    if rotation is None:
        plain = TorchExecutor(model, pools.kv, encoder, pools.sliding, adapters, ranks)
        executor = plain if ranks is None else LeadingExecutor(plain, ranks)
        if warm:
            _warm_up(executor, pools, options.block_size, temperatures=(0.0,))
        return executor
    from penstock.workers.engines.native.cuda.adapters import CudaAdapters
    from penstock.workers.engines.native.cuda.executor import CudaExecutor

    assert not isinstance(adapters, TorchAdapters) or isinstance(adapters, CudaAdapters)
    cuda_executor = CudaExecutor(
        model,
        pools.kv,
        rotation,
        width=-(-limit // options.block_size) + 1,
        max_running=options.max_running,
        max_batched_tokens=options.max_batched_tokens,
        tokens_per_sequence=1 + (options.num_speculative_tokens if options.speculative_model else 0),
        encoder=encoder,
        sliding=pools.sliding,
        invariant=options.batch_invariant,
        adapters=adapters,
    )
    if options.warm:
        cuda_executor.capture()
    if warm:
        _warm_up(cuda_executor, pools, options.block_size, temperatures=(0.0, 1.0))  # greedy and drawn tokens
    return cuda_executor


class DeviceWeights:
    """Implements ``core.engine.WeightStore``: replaces weights in place, so that captured graphs stay as they are.

    Args:
        executor: of ``make``.
        load: loads a folder as ``target`` was loaded, onto a device, in a data type.
        make: what computes with a model and ``pools``.
        stays: why the KV cache or other memory cannot leave the device; "": all of it can.
    """

    def __init__(
        self,
        target: PreparedModel,
        pools: KvPools,
        executor: "TorchExecutor | LeadingExecutor | CudaExecutor",
        *,
        load: Callable[[str, torch.device, str], Model],
        make: "Callable[[PreparedModel], TorchExecutor | LeadingExecutor | CudaExecutor]",
        stays: str = "",
    ) -> None:
        self._target = target
        self._executor = executor
        self._pools = [pools.kv, *([pools.sliding.pool] if pools.sliding is not None else [])]
        self._load = load
        self._make = make
        self._stays = stays

    def replace(self, folder: Path) -> "TorchExecutor | LeadingExecutor | CudaExecutor | None":
        old = self._target.model
        try:
            new = self._load(str(folder), torch.device("cpu"), dtype_name(old.dtype))
        except (UnsupportedModel, UnsupportedAttention) as error:
            raise RequestError(Code.invalid_request, str(error)) from error
        if changed := _differences(old, new):
            raise RequestError(
                Code.invalid_request,
                f"{folder} is of another model: {', '.join(changed)} differ; weights are replaced by those of the same "
                "configuration only",
            )
        places, values = (
            places_of(old.forward),
            dict(new.forward.named_parameters()) | dict(new.forward.named_buffers()),
        )
        unfit = [name for name, value in values.items() if not _fits(places.get(name), value)]
        if unfit and self._target.rotation is not None:
            return self._rebuild(new, str(folder))
        if unfit:
            raise RequestError(Code.invalid_request, f"{folder}: {unfit[0]} has another size or data type here")
        with device_errors(), torch.inference_mode():
            for name, value in values.items():
                places[name].copy_(value)
            if old.device.type == "cuda":
                torch.cuda.synchronize(old.device)
        return None

    def _rebuild(self, new: Model, folder: str) -> "TorchExecutor | LeadingExecutor | CudaExecutor":
        """The kernels keep some weights in a form of their own: prepare the new model as at the start.

        Raises:
            RequestError: this engine's memory cannot be freed meanwhile.
            EngineError: the new model cannot be prepared. The old one is gone.
        """
        old = self._target.model
        self.sleep()
        try:
            moved = dataclasses.replace(new, forward=new.forward.to(old.device), device=old.device)
            self._target = prepared(moved, lambda: self._load(folder, old.device, dtype_name(old.dtype)))
        except (torch.OutOfMemoryError, UnsupportedModel) as error:
            raise EngineError(f"the weights of {folder} cannot be prepared: {error}") from error
        return self.wake()

    def sleep(self) -> None:
        if self._stays:
            raise RequestError(Code.unsupported, f"{self._stays} stays on the device, so this worker does not sleep")
        self._executor.close()
        for pool in self._pools:
            pool.free()
        if self._target.model.device.type == "cuda":
            move(self._target.model.forward, torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> "TorchExecutor | LeadingExecutor | CudaExecutor":
        try:
            if self._target.model.device.type == "cuda":
                move(self._target.model.forward, self._target.model.device)
            for pool in self._pools:
                pool.allocate()
            self._executor = self._make(self._target)
        except (torch.OutOfMemoryError, OSError) as error:
            raise EngineError(out_of_memory(error)) from error
        return self._executor


def move(model: Any, device: torch.device) -> None:
    """Copy a model's tensors to a device, one after the other. Those that share memory, as tied weights, still do."""
    copies: dict[int, torch.UntypedStorage] = {}
    for each in (*model.parameters(), *model.buffers()):
        old = each.data.untyped_storage()
        new = copies.get(old.data_ptr())
        if new is None:
            new = torch.empty(old.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
            copies[old.data_ptr()] = new.copy_(old)
        empty = torch.empty(0, dtype=each.dtype, device=device)
        each.data = empty.set_(new, each.storage_offset(), each.shape, each.stride())


def _differences(old: Model, new: Model) -> list[str]:
    """What decides how weights are used and is not equal."""
    before, after = old.forward.config.to_dict(), new.forward.config.to_dict()
    changed = sorted(
        key for key in before.keys() | after.keys() if key not in _INCIDENTAL and before.get(key) != after.get(key)
    )
    return changed or ([] if old.eos_token_ids == new.eos_token_ids else ["end tokens"])


def _fits(place: Any, value: torch.Tensor) -> bool:
    return place is not None and place.shape == value.shape and place.dtype == value.dtype


def make_speculation(
    options: NativeOptions, draft: PreparedModel | None, pools: KvPools, limit: int
) -> Speculator | None:
    """
    Args:
        draft: the draft model, if the options name one.
        limit: tokens of the longest sequence.

    Raises:
        ValueError: a number of tokens is out of range.
    """
    if options.speculative_model == NGRAM:
        drafter: Drafter = NgramDrafter(options.prompt_lookup_min, options.prompt_lookup_max)
        return Speculator(drafter, options.num_speculative_tokens)
    if draft is None:
        return None
    assert pools.draft is not None
    if draft.rotation is None:
        return Speculator(DraftModel(draft.model, pools.draft), options.num_speculative_tokens)
    from penstock.workers.engines.native.cuda.draft import CudaDraftModel, DraftLoop
    from penstock.workers.engines.native.cuda.executor import CudaExecutor

    executor = CudaExecutor(
        draft.model,
        pools.draft,
        draft.rotation,
        width=-(-limit // options.block_size) + 1,
        max_running=options.max_running,
        max_batched_tokens=options.max_batched_tokens,
        tokens_per_sequence=2,  # the last proposal, if all were accepted, and the token behind it
        singles=2,
        in_flight=options.num_speculative_tokens + 1,
    )
    loop = None
    if options.warm:
        executor.capture()
        if options.num_speculative_tokens > 1:
            loop = DraftLoop(executor, options.max_running, options.num_speculative_tokens - 1)
            loop.capture()
    return Speculator(CudaDraftModel(executor, loop), options.num_speculative_tokens)


def _warm_up(executor: Executor, pools: KvPools, block_size: int, *, temperatures: tuple[float, ...]) -> None:
    """Compute a short request per temperature, with a scheduler that leaves nothing in metrics and prefix cache."""
    blocks = BlockManager(pools.kv.blocks, prefix_cache=False)
    config = SchedulerConfig(
        block_size=block_size, max_running=1, max_batched_tokens=WARM_TOKENS, max_model_len=WARM_TOKENS
    )
    scheduler = Scheduler(blocks, config, pools.window_rows(blocks))
    half = WARM_TOKENS // 2
    for temperature in temperatures:  # on CUDA each way of sampling has its own kernel
        sampling = Sampling(temperature=temperature)
        scheduler.submit(SequenceRequest(temperature, [0] * half, sampling, Stop(half, ignore_eos=True)))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, executor.execute(plan))
