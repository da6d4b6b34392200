"""The mock engine: real scheduler, block manager and KV events, no model, simulated step time."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from configs import modeldir
from configs.detokenize import REPLACEMENT
from configs.settings import WorkerSettings
from workers.engines.base import EngineInfo
from workers.engines.core.blocks import BlockManager
from workers.engines.core.engine import ScheduledEngine
from workers.engines.core.scheduler import Scheduler
from workers.engines.mock.executor import MockExecutor, Vocabulary

DEFAULT_BLOCKS = 16_384


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
) -> ScheduledEngine:
    """A mock engine.

    Args:
        eos_token_ids: end a sequence when drawn; add them to ``excluded`` for answers that run to ``max_tokens``.
        excluded: ids never drawn, such as special tokens.
        total_blocks: in the pool; 0: the default.
        speedup: how much faster than life a step is; 0: it takes no time.

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
    )
    executor = MockExecutor(
        Vocabulary(vocab_size, excluded), blocks.total_blocks * block_size, speedup=speedup, sleep=sleep
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
    )
    return ScheduledEngine(info, scheduler, executor)


def from_settings(settings: WorkerSettings, path: Path) -> ScheduledEngine:
    """A mock of the model in ``path``: its vocabulary and limits, answers of text that run to ``max_tokens``.

    Raises:
        modeldir.ModelError: the directory cannot be used.
        ValueError: no token of the vocabulary stands for text of its own.
    """
    model = modeldir.load(path)
    return build(
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
    )


def _without_text(model: modeldir.ModelDir) -> Iterator[int]:
    """Ids that show nothing by themselves: special ones, parts of characters, padding of the vocabulary; and EOS."""
    yield from model.eos_token_ids
    texts = model.tokenizer.decode_batch([[token] for token in range(model.vocab_size)])
    for token, text in enumerate(texts):
        if not text or REPLACEMENT in text:
            yield token


__all__ = ["DEFAULT_BLOCKS", "build", "from_settings"]
