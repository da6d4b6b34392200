"""The mock engine: real scheduler, block manager, KV events and memory; no model, simulated step time."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from configs.settings import WorkerSettings
from infra.model import modeldir
from infra.model.detokenizer import REPLACEMENT
from workers.engines.base import EngineInfo
from workers.engines.core.blocks import BlockManager
from workers.engines.core.data_parallel import DataParallelEngine
from workers.engines.core.engine import EncodeEngine, ScheduledEngine
from workers.engines.core.scheduler import Scheduler
from workers.engines.mock.executor import MockExecutor, Vocabulary
from workers.engines.mock.memory import BLOCK_BYTES, MockBlocks, MockVisionEncoder

DEFAULT_BLOCKS = 16_384
DEFAULT_SLOTS = 256


def build(
    *,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
    excluded: Iterable[int] = (),
    block_size: int = 32,
    total_blocks: int = DEFAULT_BLOCKS,
    max_running: int = 256,
    max_batched_tokens: int = 8192,
    max_model_len: int = 131_072,
    prefix_cache: bool = True,
    kv_events: bool = True,
    speedup: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
    memory_block_bytes: int = 0,
    image_tokens: int = 0,
    embed_slots: int = 0,
    no_evict: bool = False,
) -> ScheduledEngine:
    """A mock engine.

    Args:
        eos_token_ids: end a sequence when drawn; add them to ``excluded`` for answers that run to ``max_tokens``.
        excluded: ids never drawn, such as special tokens.
        total_blocks: in the pool; 0: the default.
        speedup: how much faster than a GPU a step is; 0: it takes no time.
        memory_block_bytes: of each KV block, which then holds a checksum of what it stands for; 0: no memory.
        image_tokens: placeholder tokens of an image; 0: a text model.
        embed_slots: images whose embeddings are kept; 0: the default.
        no_evict: see ``Scheduler``.

    Raises:
        ValueError: a size below 1, or every id is excluded.
    """
    started = time.perf_counter()
    eos = tuple(eos_token_ids)
    blocks = BlockManager(total_blocks or DEFAULT_BLOCKS, prefix_cache=prefix_cache, kv_events=kv_events)
    scheduler = Scheduler(
        blocks,
        block_size=block_size,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        no_evict=no_evict,
    )
    encoder = MockVisionEncoder(embed_slots or DEFAULT_SLOTS, image_tokens) if image_tokens else None
    pool = MockBlocks(blocks.total_blocks, block_size, memory_block_bytes, encoder) if memory_block_bytes else None
    executor = MockExecutor(
        Vocabulary(vocab_size, excluded),
        blocks.total_blocks * block_size,
        speedup=speedup,
        sleep=sleep,
        blocks=pool,
        encoder=encoder,
    )
    info = EngineInfo(
        name="mock",
        block_size=block_size,
        total_blocks=blocks.total_blocks,
        slots=max_running,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        kv_events=blocks.kv_events,
        load_seconds=time.perf_counter() - started,
        max_batched_tokens=max_batched_tokens,
    )
    return ScheduledEngine(info, scheduler, executor, encoder)


def build_data_parallel(
    ranks: int,
    *,
    eos_token_ids: Iterable[int] = (),
    excluded: Iterable[int] = (),
    sleep: Callable[[float], None] = time.sleep,
    **options: Any,
) -> DataParallelEngine:
    """A mock engine with attention data parallelism; arguments as of ``build``, for each rank.

    Raises:
        ValueError: as of ``build``.
    """
    times: list[float] = []  # of this step, by rank

    def pause() -> None:
        if times:
            sleep(max(times))
            times.clear()

    eos, barred = tuple(eos_token_ids), frozenset(excluded)
    engines = [build(eos_token_ids=eos, excluded=barred, sleep=times.append, **options) for _ in range(ranks)]
    return DataParallelEngine(engines, pause)


def build_encoder(
    *,
    image_tokens: int,
    embed_slots: int = 0,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
    block_size: int = 32,
    max_running: int = 256,
    max_model_len: int = 131_072,
) -> EncodeEngine:
    """The mock of an encode worker's engine; arguments as of ``build``."""
    encoder = MockVisionEncoder(embed_slots or DEFAULT_SLOTS, image_tokens)
    info = EngineInfo(
        name="mock",
        block_size=block_size,
        total_blocks=encoder.slots,
        slots=max_running,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=tuple(eos_token_ids),
        kv_events=False,
    )
    return EncodeEngine(info, encoder)


def from_settings(settings: WorkerSettings, path: Path) -> ScheduledEngine | DataParallelEngine:
    """A mock of the model in ``path``: its vocabulary and limits, answers of text that run to ``max_tokens``.

    With several ranks, sizes in the settings are those of each.

    Raises:
        modeldir.ModelError: the directory cannot be used.
        ValueError: no token of the vocabulary stands for text of its own, or ranks in a role that hands KV over.
    """
    model = modeldir.load(path)
    ranks = settings.mock_ranks
    if ranks > 1 and settings.role != "aggregated":
        raise ValueError(f"--mock-ranks {ranks}: only workers of --role aggregated have ranks")
    make = functools.partial(build_data_parallel, ranks) if ranks > 1 else build
    seen = 0 if model.vision is None or ranks > 1 else model.vision.image_tokens
    return make(
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        excluded=_without_text(model),
        block_size=settings.block_size,
        total_blocks=settings.kv_blocks,
        max_running=settings.max_running,
        max_batched_tokens=settings.max_batched_tokens,
        max_model_len=settings.max_model_len or model.max_model_len,
        prefix_cache=settings.prefix_cache,
        kv_events=settings.publish_events_and_metrics,
        speedup=settings.mock_speedup,
        memory_block_bytes=0 if settings.role == "aggregated" else BLOCK_BYTES,
        image_tokens=seen,
        embed_slots=settings.embed_slots,
        no_evict=settings.scheduler_policy == "guaranteed_no_evict",
    )


def encoder_from_settings(settings: WorkerSettings, path: Path) -> EncodeEngine:
    """A mock of what encodes the images of the model in ``path``.

    Raises:
        modeldir.ModelError: the directory cannot be used, or the model takes no images.
    """
    model = modeldir.load(path)
    if model.vision is None:
        raise modeldir.ModelError(f"{path} needs no encode worker: {model.no_vision}")
    return build_encoder(
        image_tokens=model.vision.image_tokens,
        embed_slots=settings.embed_slots,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_model_len=settings.max_model_len or model.max_model_len,
    )


def _without_text(model: modeldir.ModelDir) -> Iterator[int]:
    """Ids that show nothing by themselves: special ones, parts of characters, padding of the vocabulary; and EOS."""
    yield from model.eos_token_ids
    texts = model.tokenizer.decode_batch([[token] for token in range(model.vocab_size)])
    for token, text in enumerate(texts):
        if not text or REPLACEMENT in text:
            yield token


__all__ = [
    "DEFAULT_BLOCKS",
    "DEFAULT_SLOTS",
    "build",
    "build_data_parallel",
    "build_encoder",
    "encoder_from_settings",
    "from_settings",
]
