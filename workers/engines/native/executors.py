"""Chooses and prepares what computes an engine's steps, and its draft model's: plain torch, or kernels for CUDA."""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import structlog

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.drafts import NgramDrafter
from penstock.workers.engines.core.engine import Drafter, Speculator
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import Executor
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.model.adapters import TorchAdapters
from penstock.workers.engines.native.model.attention import UnsupportedAttention
from penstock.workers.engines.native.model.draft import DraftModel
from penstock.workers.engines.native.model.eagle import AuxiliaryStates, EagleDrafter, EagleHead, HeadRuns
from penstock.workers.engines.native.model.executor import TorchExecutor
from penstock.workers.engines.native.model.model import Model, UnsupportedModel
from penstock.workers.engines.native.model.options import NGRAM, NativeOptions
from penstock.workers.engines.native.model.pools import KvPools
from penstock.workers.engines.native.model.vision import TorchVisionEncoder
from penstock.workers.engines.native.ranks import (
    EngineRanks,
    LeadingExecutor,
    LeadingOverlapExecutor,
    RankComputer,
    TorchComputer,
)

if TYPE_CHECKING:
    from penstock.workers.engines.native.cuda.executor import CudaExecutor
    from penstock.workers.engines.native.cuda.modules import Rotation
    from penstock.workers.engines.native.cuda.packing import PackedStep

    AnyExecutor = TorchExecutor | LeadingExecutor | LeadingOverlapExecutor | CudaExecutor

log = structlog.get_logger("engine")

WARM_TOKENS = 4  # prompt + output of a warm-up request


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
    again: bool = False,
    *,
    pools: KvPools,
    encoder: TorchVisionEncoder | None,
    options: NativeOptions,
    limit: int,
    adapters: TorchAdapters | None = None,
    ranks: EngineRanks | None = None,
) -> "AnyExecutor":
    """The engine's executor, warmed up if requested.

    Args:
        again: this model had an executor before; see ``CudaExecutor.capture``.
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
            _warm_up(executor, pools, options.block_size, (Sampling(temperature=0.0),))
        return executor
    cuda_executor = _cuda_executor(
        model, rotation, pools, encoder, options, limit, adapters, None if ranks is None else ranks.send_packed, again
    )
    leading = cuda_executor if ranks is None else LeadingOverlapExecutor(cuda_executor, ranks)
    if warm:
        drawn = Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)
        _warm_up(leading, pools, options.block_size, (Sampling(temperature=0.0), *drawn))
    return leading


def make_computer(target: PreparedModel, pools: KvPools, options: NativeOptions, limit: int) -> RankComputer:
    """What computes a rank's part of the steps of ``make_executor``'s; arguments as there."""
    if target.rotation is None:
        return TorchComputer(target.model, pools)
    return _cuda_executor(target.model, target.rotation, pools, None, options, limit, None, None)


def _cuda_executor(
    model: Model,
    rotation: "Rotation",
    pools: KvPools,
    encoder: TorchVisionEncoder | None,
    options: NativeOptions,
    limit: int,
    adapters: TorchAdapters | None,
    others: "Callable[[PackedStep], None] | None",
    again: bool = False,
) -> "CudaExecutor":
    from penstock.workers.engines.native.cuda.adapters import CudaAdapters
    from penstock.workers.engines.native.cuda.executor import CudaExecutor

    assert not isinstance(adapters, TorchAdapters) or isinstance(adapters, CudaAdapters)
    executor = CudaExecutor(
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
        others=others,
    )
    if options.warm:
        executor.capture(again=again)
    return executor


def make_speculation(
    options: NativeOptions,
    draft: PreparedModel | None,
    pools: KvPools,
    limit: int,
    target: Model,
    generations: "array[int]",
) -> Speculator | None:
    """
    Args:
        draft: the draft model or EAGLE-3 head, if the options name one.
        limit: tokens of the longest sequence.
        target: as it computes.
        generations: of the blocks.

    Raises:
        ValueError: a number of tokens is out of range.
    """
    if options.speculative_model == NGRAM:
        drafter: Drafter = NgramDrafter(options.prompt_lookup_min, options.prompt_lookup_max)
        return Speculator(drafter, options.num_speculative_tokens)
    if draft is None:
        return None
    assert pools.draft is not None
    head, proposed = draft.model.forward, options.num_speculative_tokens
    eagle = None
    if isinstance(head, EagleHead):
        rows = max(options.max_batched_tokens, options.max_running * (1 + proposed))
        eagle = AuxiliaryStates(target, head, rows), HeadRuns(generations, options.block_size)
    if draft.rotation is None:
        if eagle is not None:
            return Speculator(EagleDrafter(draft.model, pools.draft, *eagle, options.max_running), proposed)
        return Speculator(DraftModel(draft.model, pools.draft), proposed)
    from penstock.workers.engines.native.cuda.draft import CudaDraftModel, CudaEagle, DraftLoop
    from penstock.workers.engines.native.cuda.executor import CudaExecutor

    executor = CudaExecutor(
        draft.model,
        pools.draft,
        draft.rotation,
        width=-(-limit // options.block_size) + 1,
        max_running=options.max_running,
        max_batched_tokens=options.max_batched_tokens,
        # All tokens of the step before, or the last proposal, if all were accepted, and the token after it.
        tokens_per_sequence=1 + proposed if eagle is not None else 2,
        singles=1 + proposed if eagle is not None else 2,
        in_flight=proposed + 1,
        continued=None if eagle is None else eagle[0].states,
    )
    loop = None
    if options.warm:
        executor.capture()
        if proposed > 1:
            loop = DraftLoop(executor, options.max_running, proposed - 1)
            loop.capture()
    return Speculator(CudaDraftModel(executor, loop) if eagle is None else CudaEagle(executor, loop, *eagle), proposed)


def follow(speculation: Speculator, executor: Executor) -> None:
    """Have an EAGLE-3 head find the rows of the sequences in the steps of its target's executor."""
    auxiliary = getattr(speculation.drafter, "auxiliary", None)
    if auxiliary is not None and (first_rows := getattr(executor, "first_rows", None)) is not None:
        auxiliary.first_rows = first_rows


def _warm_up(executor: Executor, pools: KvPools, block_size: int, samplings: tuple[Sampling, ...]) -> None:
    """Compute a short request of each sampling, with a scheduler that leaves nothing in metrics and prefix cache."""
    blocks = BlockManager(pools.kv.blocks, prefix_cache=False)
    config = SchedulerConfig(
        block_size=block_size, max_running=1, max_batched_tokens=WARM_TOKENS, max_model_len=WARM_TOKENS
    )
    scheduler = Scheduler(blocks, config, pools.window_rows(blocks))
    half = WARM_TOKENS // 2
    for number, sampling in enumerate(samplings):  # on CUDA each way of sampling has its own kernels
        scheduler.submit(SequenceRequest(number, [0] * half, sampling, Stop(half, ignore_eos=True)))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, executor.execute(plan))
