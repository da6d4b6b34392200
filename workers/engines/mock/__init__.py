"""The mock engine: a real scheduler, block manager, KV events and memory; no model, and simulated step times.

``DataParallelEngine`` makes several engines the attention data-parallel ranks of one: each has its own cache, and all
step together.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from penstock.configs.settings import WorkerSettings
from penstock.infra.constraints import constraint_grammar
from penstock.infra.model import modeldir
from penstock.infra.text.detokenizer import REPLACEMENT
from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.constraints.compiler import ALL_CONSTRAINTS, ConstraintCompiler, ModelTokens, working
from penstock.workers.engines.core.blocks import BlockManager, HostCache
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.core.engine import Adapters, ScheduledEngine
from penstock.workers.engines.core.queue import AdapterSlots
from penstock.workers.engines.core.running import MAX_SCORED_TOKENS, SchedulerConfig
from penstock.workers.engines.core.scheduler import DECODE_ROLE_CHUNK_TOKENS, Scheduler
from penstock.workers.engines.engine_protocol import (
    AdapterEngine,
    EngineInfo,
    EngineStats,
    Failure,
    Grammars,
    KvTransfer,
    Output,
    RequestError,
    Scored,
    SequenceMeasurements,
    SequenceRequest,
    Started,
    StepResult,
    VisionEngine,
    WeightsEngine,
)
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, closing_tokens
from penstock.workers.engines.mock.memory import BLOCK_BYTES, MockBlocks, MockCopies, MockVisionEncoder
from penstock.workers.engines.mock.play import Played, Player, read_recording

DEFAULT_BLOCKS = 16_384
TOKEN_BYTES = 128 << 10  # of KV, as of a Llama of 8B; of a mock without memory
TOKEN_S = 20.6e-6  # that a prompt's token takes in a whole step
LOAD_SHARE = 0.1
DEFAULT_SLOTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """The simulated model, and the sizes and policies of its engine.

    Attributes:
        vocab_size: token ids of the model.
        eos_token_ids: end a sequence when drawn; add them to ``excluded`` for answers that run to ``max_tokens``.
        excluded: ids that are never drawn, such as special tokens.
        block_size: tokens per KV block.
        total_blocks: of the KV cache; 0: the default.
        max_running: sequences that run at once.
        max_batched_tokens: tokens computed per step, prompt and decode.
        mixed_chunk_tokens: see ``SchedulerConfig``.
        max_model_len: prompt + output of one sequence, tokens.
        speedup: how many times faster than a GPU a step is; 0: it takes no time.
        memory_block_bytes: of each KV block, which then holds a checksum of its tokens; 0: no memory.
        image_tokens: placeholder tokens of an image; 0: a text model.
        embed_slots: images whose embeddings are kept; 0: the default.
        no_evict: see ``Scheduler``.
        tokenizer: for constraints on the output; None: it takes none.
        crash_token, answer_tokens: see ``MockExecutor``, the second its ``lengths``.
        max_loras: adapters of which sequences run at once, with other tokens for each; 0: it takes none.
        max_lora_rank: of an adapter.
        host_blocks: of host memory behind the KV cache; bringing one back takes ``LOAD_SHARE`` of computing it.
        played: recorded requests whose answers are played; all others get the mock's own.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    excluded: Collection[int] = ()
    block_size: int = 32
    total_blocks: int = DEFAULT_BLOCKS
    max_running: int = 256
    max_batched_tokens: int = 8192
    mixed_chunk_tokens: int = 0
    max_model_len: int = 131_072
    prefix_cache: bool = True
    kv_events: bool = True
    speedup: float = 1.0
    memory_block_bytes: int = 0
    image_tokens: int = 0
    embed_slots: int = 0
    no_evict: bool = False
    crash_token: int = -1
    answer_tokens: tuple[int, int] | None = None
    played: Sequence[Played] = ()
    max_loras: int = 0
    max_lora_rank: int = 64
    host_blocks: int = 0
    tokenizer: Tokenizer | None = None


class DataParallelEngine:
    """Implements ``engine_protocol.Engine`` for text, without KV transfer; owns ``engines``, configured
    alike.

    Args:
        pause: called after each step of all ranks, for the time in which they wait for the slowest.
    """

    def __init__(self, engines: Sequence[ScheduledEngine], pause: Callable[[], None] = lambda: None) -> None:
        self.kv_transfer: KvTransfer | None = None
        self.vision: VisionEngine | None = None
        self.grammars: Grammars | None = engines[0].grammars  # shared by all
        self.adapters: AdapterEngine | None = None
        self.weights: WeightsEngine | None = None
        self._engines = engines
        self._pause = pause
        self._rank_of: dict[object, int] = {}
        one, count = engines[0].info, len(engines)
        self.info = msgspec.structs.replace(
            one, total_blocks=one.total_blocks * count, slots=one.slots * count, dp_size=count
        )

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence on its rank.

        Raises:
            RequestError: it can never run here.
        """
        if not 0 <= request.rank < len(self._engines):
            raise RequestError(
                Code.invalid_request, f"rank {request.rank} does not exist: this worker has {len(self._engines)}"
            )
        self._engines[request.rank].submit(request)
        self._rank_of[request.key] = request.rank

    def cancel(self, key: object) -> bool:
        rank = self._rank_of.pop(key, None)
        return rank is not None and self._engines[rank].cancel(key)

    def has_work(self) -> bool:
        return any(engine.has_work() for engine in self._engines)

    def step(self) -> StepResult:
        """One batch on every rank that has work.

        Raises:
            EngineError: a rank is broken, and with it this engine.
        """
        outputs: list[Output] = []
        started: list[Started] = []
        failures: list[Failure] = []
        scored: list[Scored] = []
        measured: list[SequenceMeasurements] = []
        events: dict[int, list[KvEvent]] = {}
        computed = 0
        for rank, engine in enumerate(self._engines):
            if not engine.has_work():
                continue
            result = engine.step()
            outputs += result.outputs
            started += result.started
            failures += result.failures
            scored += result.scored
            measured += result.measured
            computed += result.computed_tokens
            if result.events:
                events[rank] = result.events
        self._pause()
        for output in outputs:
            if output.finish:
                self._rank_of.pop(output.key, None)
        for failure in failures:
            self._rank_of.pop(failure.key, None)
        return StepResult(outputs, events.pop(0, []), started, failures, computed, (), scored, events, measured)

    @property
    def blocked(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        columns = zip(*(msgspec.structs.astuple(engine.stats()) for engine in self._engines), strict=True)
        return EngineStats(*(sum(others, first) for first, *others in columns))  # tuples, too

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._engines[rank].dump()

    def memory(self) -> dict[str, Memory]:
        return {}

    def release_pinned(self, key: object) -> bool:
        return False

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def build(options: MockOptions, *, sleep: Callable[[float], None] = time.sleep) -> ScheduledEngine:
    """Make a mock engine.

    Args:
        sleep: waits for a step's simulated time, seconds.

    Raises:
        ValueError: a size below 1, or every id is excluded.
    """
    started = time.perf_counter()
    host = HostCache(options.host_blocks, kv_events=options.kv_events) if options.host_blocks else None
    blocks = BlockManager(
        options.total_blocks or DEFAULT_BLOCKS,
        prefix_cache=options.prefix_cache,
        kv_events=options.kv_events,
        host=host if options.prefix_cache else None,
    )
    slots = AdapterSlots(options.max_loras)
    scheduler = Scheduler(
        blocks,
        SchedulerConfig(
            block_size=options.block_size,
            max_running=options.max_running,
            max_batched_tokens=options.max_batched_tokens,
            mixed_chunk_tokens=options.mixed_chunk_tokens,
            max_model_len=options.max_model_len,
            eos_token_ids=options.eos_token_ids,
            no_evict=options.no_evict,
            max_scored_tokens=MAX_SCORED_TOKENS,
        ),
        adapters=slots,
    )
    images, image_tokens = options.embed_slots or DEFAULT_SLOTS, options.image_tokens
    encoder = MockVisionEncoder(images, image_tokens) if image_tokens else None
    pool: MockBlocks | None = None
    if options.memory_block_bytes:
        pool = MockBlocks(blocks.total_blocks, options.block_size, options.memory_block_bytes, encoder)
    executor = MockExecutor(
        MockVocabulary(options.vocab_size, options.excluded),
        blocks.total_blocks * options.block_size,
        speedup=options.speedup,
        sleep=sleep,
        blocks=pool,
        encoder=encoder,
        closing=closing_tokens(options.tokenizer, options.eos_token_ids) if options.tokenizer is not None else (),
        crash_token=options.crash_token,
        lengths=options.answer_tokens,
        end=options.eos_token_ids[0] if options.eos_token_ids else -1,
    )
    grammars = _grammars(options)
    info = EngineInfo(
        name="mock",
        block_size=options.block_size,
        total_blocks=blocks.total_blocks,
        slots=options.max_running,
        max_model_len=options.max_model_len,
        vocab_size=options.vocab_size,
        eos_token_ids=options.eos_token_ids,
        kv_events=blocks.kv_events,
        load_seconds=time.perf_counter() - started,
        max_batched_tokens=options.max_batched_tokens,
        constraints=ALL_CONSTRAINTS if grammars is not None else (),
    )
    adapters = Adapters(slots, options.max_lora_rank, lambda folder: None) if options.max_loras else None
    copier: MockCopies | None = None
    if blocks.host is not None:
        load_s = LOAD_SHARE * TOKEN_S * options.block_size / options.speedup if options.speedup else 0.0
        copier = MockCopies(pool.pages if pool is not None else None, options.host_blocks, load_s, sleep)
    engine = ScheduledEngine(
        info, scheduler, executor, encoder, copier=copier, grammars=grammars, adapters=adapters, store=executor
    )
    executor.written = engine.written
    if options.played:
        executor.plays = True
        engine.hold = Player(options.played, speedup=options.speedup, sleep=sleep).hold
    return engine


def _grammars(options: MockOptions) -> ConstraintCompiler | None:
    if options.tokenizer is None or not constraint_grammar.available():
        return None
    tokens = ModelTokens(options.tokenizer, options.vocab_size, options.eos_token_ids)
    return working(ConstraintCompiler(lambda: tokens))


def build_data_parallel(
    ranks: int, options: MockOptions, *, sleep: Callable[[float], None] = time.sleep
) -> DataParallelEngine:
    """Make a mock engine with attention data parallelism.

    Args:
        options: of each rank.
        sleep: as in ``build``. A step takes as long as that of the slowest rank.

    Raises:
        ValueError: as in ``build``.
    """
    durations: list[float] = []  # of the current step, by rank

    def pause() -> None:
        if durations:
            sleep(max(durations))
            durations.clear()

    return DataParallelEngine([build(options, sleep=durations.append) for _ in range(ranks)], pause)


def build_encoder(
    *,
    image_tokens: int,
    embed_slots: int = 0,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    block_size: int = 32,
    max_running: int = 256,
    max_model_len: int = 131_072,
) -> EncodeEngine:
    """Make the mock of an encode worker's engine; for the arguments see ``MockOptions``."""
    encoder = MockVisionEncoder(embed_slots or DEFAULT_SLOTS, image_tokens)
    info = EngineInfo(
        name="mock",
        block_size=block_size,
        total_blocks=encoder.slots,
        slots=max_running,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        kv_events=False,
    )
    return EncodeEngine(info, encoder)


def from_settings(settings: WorkerSettings, path: Path) -> ScheduledEngine | DataParallelEngine:
    """A mock of the model in ``path``: its vocabulary and limits, answers of text that run to ``max_tokens``.

    With several ranks, the sizes in the settings are those of each.

    Raises:
        modeldir.ModelError: the directory cannot be used.
        ValueError: no token of the vocabulary is text by itself, or several ranks in a disaggregated role.
    """
    model = modeldir.load(path)
    vision, ranks, moves = model.vision, settings.mock_ranks, settings.move_prefixes == "on"
    if ranks > 1 and settings.role != "aggregated":
        raise ValueError(f"--mock-ranks {ranks}: only workers of --role aggregated have ranks")
    if ranks > 1 and settings.play:
        raise ValueError(f"--mock-ranks {ranks}: --play takes workers of one rank; start more of them")
    options = MockOptions(
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        excluded=frozenset(_without_text(model)),
        block_size=settings.block_size,
        total_blocks=settings.kv_blocks,
        max_running=settings.max_running,
        max_batched_tokens=settings.max_batched_tokens,
        mixed_chunk_tokens=DECODE_ROLE_CHUNK_TOKENS if settings.role == "decode" else 0,
        max_model_len=settings.max_model_len or model.max_model_len,
        prefix_cache=settings.prefix_cache,
        kv_events=settings.publish_events_and_metrics,
        speedup=settings.mock_speedup,
        host_blocks=int(settings.kv_offloading_size * (1 << 30)) // (settings.block_size * TOKEN_BYTES),
        memory_block_bytes=BLOCK_BYTES if settings.role != "aggregated" or (moves and ranks == 1) else 0,
        image_tokens=0 if vision is None or vision.patches is not None or ranks > 1 else vision.image_tokens,
        embed_slots=settings.embed_slots,
        no_evict=settings.scheduler_policy == "guaranteed_no_evict",
        tokenizer=model.tokenizer,
        crash_token=settings.mock_crash_token,
        answer_tokens=_lengths(settings.mock_answer_tokens),
        max_loras=settings.lora_slots if ranks == 1 else 0,
        max_lora_rank=settings.max_lora_rank,
        played=read_recording(settings.play, model.vocab_size, skip_bad=settings.skip_bad) if settings.play else (),
    )
    return build(options) if ranks == 1 else build_data_parallel(ranks, options)


def _lengths(text: str) -> tuple[int, int] | None:
    """``--mock-answer-tokens`` as the least and the most."""
    if not text:
        return None
    least, _, most = text.partition("-")
    if most and int(most) < int(least):
        raise ValueError(f"--mock-answer-tokens {text}: the first number is the smaller one")
    return int(least), int(most or least)


def encoder_from_settings(settings: WorkerSettings, path: Path) -> EncodeEngine:
    """A mock of the vision encoder of the model in ``path``.

    Raises:
        modeldir.ModelError: the directory cannot be used, or the model takes no images.
    """
    model = modeldir.load(path)
    if model.vision is None:
        raise modeldir.ModelError(f"{path} needs no encode worker: {model.no_vision}")
    if model.vision.patches is not None:
        raise modeldir.ModelError(f"{path}: images of this model are taken by --engine native only")
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
    """Ids without text of their own: EOS, special tokens, parts of characters, padding of the vocabulary."""
    yield from model.eos_token_ids
    texts = model.tokenizer.decode_batch([[token] for token in range(model.vocab_size)])
    for token, text in enumerate(texts):
        if not text or REPLACEMENT in text:
            yield token
