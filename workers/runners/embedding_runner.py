"""Runs embeddings requests: the inputs of all of them form batches, one after the other, in the engine's thread.

A request's vectors are published once all are there, so that they come from one attempt.

A batch has the oldest input of the request whose turn it is. Short requests come before those with much left, which are
computed in slices, and among equals the one that has waited longest. Beside it are inputs of nearly the same length, of
any request: a matrix is as wide as its longest row, and what pads the others is computed for nothing.
"""

import asyncio
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from penstock.configs.settings import WorkerSettings, served_names
from penstock.infra.bus.clock import steady_ns
from penstock.infra.bus.tasks import end
from penstock.infra.model import modeldir, servable
from penstock.infra.process.gc_policy import loading
from penstock.schemas import done, fleet, jobs, requests
from penstock.schemas.errors import Code
from penstock.schemas.requests import Embedding
from penstock.schemas.tokens import Finish, TokenItem
from penstock.schemas.wire import pack_tokens, unpack_tokens
from penstock.workers.engines.embed.embedding_protocol import EmbeddingEngine, finite, shortened, window
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.runners.pipeline_thread import PipelineBackend, PipelineRunnerBase, PipelineThread
from penstock.workers.session.process import ProcessEvents
from penstock.workers.session.request_runner import ServedModel, SessionContext, StageInput
from penstock.workers.session.requests import RunningRequest, admit

# Waiting inputs that a batch is made of: the oldest ones of each request, as many of one as of another.
LOOK_AHEAD = 4096
# Rows may be shorter than the longest by this share, or by this many tokens. 8 instead of 14 % of what is computed for
# texts of mixed length is padding (``python -m tests.perf.tuning padding``).
NEAR_SHARE, NEAR_TOKENS = 0.25, 16

# A request's next slice waits at most for this many times its tokens of shorter ones (and for the slices that wait like
# it): large ones progress while short ones keep coming.
PATIENCE = 64
STEP_S = 0.1  # of a batch of several inputs, since inputs that arrive meanwhile wait for it
FEWEST_TOKENS, FIRST_TOKENS = 256, 1024  # of a batch, however slow the engine is; before that is known

K = TypeVar("K", bound=Hashable)


class Input(NamedTuple, Generic[K]):
    """The input at ``place`` of the request ``key``."""

    key: K
    place: int
    tokens: Sequence[int]


class _Waiting:
    """What waits of a request. ``since``: tokens that were taken when it came, or had its last turn."""

    __slots__ = ("inputs", "since", "tokens")

    def __init__(self, inputs: Sequence[Sequence[int]], since: int) -> None:
        self.inputs = dict(enumerate(inputs))
        self.tokens = sum(map(len, inputs))
        self.since = since


class InputQueue(Generic[K]):
    """
    Args:
        max_tokens: of a batch, padding included; an input that is longer forms a batch of its own.
        max_inputs: of a batch.
    """

    def __init__(self, max_tokens: int, max_inputs: int = 1024) -> None:
        self.max_tokens = max_tokens
        self._max_inputs = max_inputs
        self._waiting: dict[K, _Waiting] = {}
        self._size = 0
        self._taken = 0  # tokens so far

    def __len__(self) -> int:
        return self._size

    def add(self, key: K, inputs: Sequence[Sequence[int]]) -> None:
        """
        Args:
            key: a request that is not in the queue.
        """
        if inputs:
            self._waiting[key] = _Waiting(inputs, self._taken)
            self._size += len(inputs)

    def drop(self, key: K) -> None:
        """Forget what waits of a request."""
        dropped = self._waiting.pop(key, None)
        self._size -= len(dropped.inputs) if dropped is not None else 0

    def take(self) -> list[Input[K]]:
        """The inputs of the next batch, removed from the queue; empty if none waits."""
        if not self._waiting:
            return []
        order = sorted(self._waiting, key=self._due)  # stable: of equals, the one that came first
        each_of = max(1, LOOK_AHEAD // len(order))
        ahead = [
            (len(tokens), key, place)
            for key in order[:LOOK_AHEAD]
            for place, tokens in islice(self._waiting[key].inputs.items(), each_of)
        ]
        wanted = ahead[0][0]
        by_length = sorted(ahead, key=lambda each: each[0])  # stable: ``ahead[0]`` leads those of its length
        begin, end = _window([length for length, _, _ in by_length], wanted, self.max_tokens, self._max_inputs)
        batch = [self._pop(key, place) for _, key, place in by_length[begin:end]]
        self._taken += sum(len(each.tokens) for each in batch)
        if (had_its_turn := self._waiting.get(order[0])) is not None:
            had_its_turn.since = self._taken
        return batch

    def _due(self, key: K) -> int:
        waiting = self._waiting[key]
        return waiting.since + PATIENCE * min(waiting.tokens, self.max_tokens)

    def _pop(self, key: K, place: int) -> Input[K]:
        waiting = self._waiting[key]
        tokens = waiting.inputs.pop(place)
        waiting.tokens -= len(tokens)
        self._size -= 1
        if not waiting.inputs:
            del self._waiting[key]
        return Input(key, place, tokens)


def next_budget(budget: int, computed: int, seconds: float, most: int) -> int:
    """Tokens of the next batch, so that it takes about ``STEP_S``.

    Args:
        budget: of the last batch.
        computed: by it, padding included.
        most: tokens of a batch, whatever it takes.
    """
    if seconds > STEP_S:  # a single input may be longer than the budget, and says nothing of shorter ones' batches
        return max(FEWEST_TOKENS, min(budget, int(computed * STEP_S / seconds)))
    if 2 * computed > budget:
        return min(most, int(budget * min(2.0, STEP_S / max(seconds, 1e-9))))
    return budget


def _window(lengths: Sequence[int], wanted: int, max_tokens: int, max_inputs: int) -> tuple[int, int]:
    """The part of sorted lengths that begins at ``wanted`` or before it, and fits.

    Longer rows are added before shorter ones: they make the matrix wider, but each adds more tokens than padding.
    """
    first = bisect_left(lengths, wanted)
    last = first + 1
    while last < len(lengths) and last - first < max_inputs:
        longest = lengths[last]
        if longest * (last + 1 - first) > max_tokens or longest - wanted > _near(longest):
            break
        last += 1
    longest = lengths[last - 1]
    while first and last - first < max_inputs:
        if longest * (last + 1 - first) > max_tokens or longest - lengths[first - 1] > _near(longest):
            break
        first -= 1
    return first, last


def _near(longest: int) -> float:
    return max(NEAR_TOKENS, NEAR_SHARE * longest)


log = structlog.get_logger("worker")

MESSAGE_BYTES = 1 << 19  # of vectors in one message; most answers take one
NOT_FINITE = (
    "the vector of input[{}] is not finite: this model's numbers overflow in the worker's data type; --dtype float32"
)
CHUNK = 1 << 18  # characters that are tokenized at a time


class _Vectors:
    """A request and its vectors so far."""

    __slots__ = ("embedding", "missing", "prompt_tokens", "running", "vectors")

    def __init__(self, running: RunningRequest, embedding: Embedding, inputs: Sequence[Sequence[int]]) -> None:
        self.running = running
        self.embedding = embedding
        self.prompt_tokens = sum(map(len, inputs))
        self.vectors: list[bytes] = [b""] * len(inputs)
        self.missing = len(inputs)

    def put(self, index: int, vector: bytes) -> bool:
        """True: it was the last one."""
        self.vectors[index] = shortened(vector, self.embedding.dimensions)
        self.missing -= 1
        return not self.missing

    def output(self) -> bytes:
        """As ``penstock.schemas.requests.Embedding`` says."""
        return pack_tokens([self.prompt_tokens]) + b"".join(self.vectors)


class _Batch(NamedTuple):
    inputs: list[Input[_Vectors]]
    vectors: list[bytes]


class EmbeddingRunner(PipelineRunnerBase[EmbeddingEngine]):
    queue = 0

    def __init__(
        self,
        context: SessionContext,
        thread: PipelineThread,
        engine: EmbeddingEngine,
        engine_failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(context, thread, engine, engine_failed)
        self.slots = context.settings.max_running
        self._most_tokens = context.settings.max_batched_tokens
        self.inputs: InputQueue[_Vectors] = InputQueue(min(FIRST_TOKENS, self._most_tokens))
        self.open_requests: dict[str, _Vectors] = {}
        self._added = asyncio.Event()
        self._steps = 0

    # --- requests ---

    def admit(self, job: jobs.Job, request: requests.GenerateRequest, delivery: Any) -> RunningRequest:
        if request.embedding is None or request.n != 1:
            raise ValueError("this worker makes embeddings; the request asks for something else")
        return admit(job, request, delivery, None)

    async def run(self, running: RunningRequest, stage_input: StageInput | None) -> None:
        self._context.tasks.spawn(
            self._prepare(running),
            name="tokenize",
            on_failure=lambda error: self._terminal.fail(running, "tokenisation", error),
        )

    async def _prepare(self, running: RunningRequest) -> None:
        request, engine = running.request, self._engine
        assert request.embedding is not None
        try:
            inputs = await asyncio.to_thread(inputs_of, engine, request.embedding, request.prompt)
        except RequestError as error:
            await self._terminal.end(running, Code(error.code), error.message)
            return
        if self._requests.is_current(running):
            entry = self.open_requests[request.id] = _Vectors(running, request.embedding, inputs)
            self.inputs.add(entry, inputs)
            self._added.set()

    async def _run_all(self) -> None:
        """While one batch is computed, the results of the one before are published."""
        last: _Batch | None = None
        while True:
            inputs = self.inputs.take()
            computing = self._begin(inputs) if inputs else None
            if last is not None:
                self.deliver(last)
            if computing is None:
                last = None
                self._added.clear()
                if not len(self.inputs):
                    await self._added.wait()
                continue
            try:
                vectors, seconds = await computing
            except Exception as error:
                log.error("engine_failed", error=repr(error), exc_info=error)
                self._engine_failed(error)
                return
            last = _Batch(inputs, vectors)
            computed = len(inputs) * max(len(each.tokens) for each in inputs)
            self.inputs.max_tokens = next_budget(self.inputs.max_tokens, computed, seconds, self._most_tokens)
            self._steps += 1

    def _begin(self, inputs: list[Input[_Vectors]]) -> "asyncio.Future[tuple[list[bytes], float]]":
        """Vectors of a batch, and the seconds that the engine takes for them."""
        now = steady_ns()
        for each in inputs:
            if not each.key.running.started_ns:
                each.key.running.started_ns = now
        batch = [each.tokens for each in inputs]
        metrics = self._context.metrics.embed
        metrics.batch_inputs.observe(len(batch))
        metrics.tokens.inc(sum(map(len, batch)))
        metrics.padding.inc(len(batch) * max(map(len, batch)) - sum(map(len, batch)))

        def embed() -> tuple[list[bytes], float]:
            began = time.perf_counter()
            return self._engine.embed(batch), time.perf_counter() - began

        return asyncio.wrap_future(self._thread.call(embed))

    def deliver(self, batch: _Batch) -> None:
        for (entry, index, _), vector in zip(batch.inputs, batch.vectors, strict=True):
            request = entry.running.request.id
            if (
                self.open_requests.get(request) is not entry
            ):  # cancelled, failed or revoked: another attempt may run here
                continue
            if not finite(vector):
                self.drop(entry.running)
                self._terminal.spawn(self._terminal.end(entry.running, Code.engine_error, NOT_FINITE.format(index)))
            elif entry.put(index, vector):
                del self.open_requests[request]
                self._terminal.spawn(self._finish(entry))

    async def _finish(self, entry: _Vectors) -> None:
        """Publish the vectors, then the terminal event."""
        running, output = entry.running, entry.output()
        if not self._requests.is_current(running):
            return
        running.first_token_ns = steady_ns()
        running.outcomes[0] = done.Outcome(output, "stop")
        request, size = running.request, min(MESSAGE_BYTES, self._context.bus.max_message // 2) & ~3
        for at in range(0, len(output), size):
            finish = Finish("stop") if at + size >= len(output) else None
            item = TokenItem(request.id, running.attempt, 0, at // 4, output[at : at + size], finish)
            await self._context.reporter.items(request.token_address, (item,))
        if self._requests.owns(running):
            self._context.metrics.embed.vectors.inc(len(entry.vectors))
            self._terminal.finish(running)

    # --- early ends ---

    def stop_early(self, running: RunningRequest) -> None:
        self.drop(running)
        self._terminal.spawn(self._terminal.end_cancelled(running))

    def free(self, running: RunningRequest, cancel: bool) -> None:
        self.drop(running)

    def drop(self, running: RunningRequest) -> None:
        entry = self.open_requests.get(running.request.id)
        if entry is not None and entry.running is running:
            del self.open_requests[running.request.id]
            self.inputs.drop(entry)

    # --- start and stop ---

    async def open(self) -> None:
        self._running = self._context.tasks.spawn(self._run_all(), name="embed")

    async def fence(self) -> None:
        await end([self._running])

    def registration(self, state: fleet.WorkerState) -> fleet.Registration:
        load = fleet.Load(running=len(self.open_requests), waiting=len(self.inputs), steps=self._steps)
        embedder, batched = self._engine.embedder, self._context.settings.max_batched_tokens
        return self._registration(
            state, self.slots, load, embedder.max_tokens, embedder=embedder, max_batched_tokens=batched
        )

    def housekeeping(self, now: float) -> None:
        self._context.metrics.running.set(len(self.open_requests))
        self._context.metrics.waiting.set(len(self.inputs))


def inputs_of(engine: EmbeddingEngine, embedding: Embedding, prompt: bytes) -> list[Sequence[int]]:
    """Token ids of each input, cut if the request says so.

    Raises:
        RequestError: one is too long or empty, or the vectors are shorter than what is asked for.
    """
    known = engine.embedder
    if embedding.scores is not known.scores:  # a model of the same name of the other kind was here before
        does, other = ("scores pairs", "vectors") if known.scores else ("makes vectors", "scores")
        raise RequestError(Code.unsupported, f"this model {does} of texts; {other} are made by other models")
    if embedding.dimensions > known.dimensions:  # a model of the same name with longer vectors was here before
        raise RequestError(
            Code.invalid_request, f"dimensions is {embedding.dimensions}; this model's vectors have {known.dimensions}"
        )
    limit = min(embedding.truncate, known.max_tokens) if embedding.truncate else known.max_tokens
    if embedding.scores:
        return _pairs_of(engine, embedding, limit)
    inputs: list[Sequence[int]] = []
    if embedding.lengths:
        tokens: array[int] = unpack_tokens(prompt)
        for end, length in zip(accumulate(embedding.lengths), embedding.lengths, strict=True):
            inputs.append(tokens[end - length : end].tolist())
            _check(len(inputs) - 1, inputs[-1], limit)
        return inputs
    prompt_text = engine.prompt(embedding.prompt)
    if prompt_text is None:  # a model of the same name with other prompts was here before
        raise RequestError(Code.invalid_request, f"this model has no prompt {embedding.prompt!r} (input_type)")
    for texts in _chunks(embedding.texts, prompt_text):
        for text, each in zip(texts, engine.tokenize(texts, limit if embedding.truncate else 0), strict=True):
            _check(len(inputs), each, limit, whole=len(text) <= window(known.max_tokens))
            inputs.append(each)
    return inputs


def _pairs_of(engine: EmbeddingEngine, embedding: Embedding, limit: int) -> list[Sequence[int]]:
    longest, document = limit if embedding.truncate else 0, embedding.document_tokens
    texts, queries, pairs = embedding.texts, embedding.queries, list[Sequence[int]]()
    if len(queries) == 1:
        for chunk in _chunks(texts, ""):
            pairs += engine.tokenize_pairs(queries[0], chunk, longest, document)
    else:
        for query, text in zip(queries, texts, strict=True):
            pairs += engine.tokenize_pairs(query, [text], longest, document)
    for index, tokens in enumerate(pairs):
        if not tokens:
            raise RequestError(Code.invalid_request, f"text {index} and its query have no tokens")
        if len(tokens) > limit:
            raise RequestError(
                Code.context_length_exceeded,
                f"text {index} and its query have at least {len(tokens)} tokens; this model takes {limit}. Shorten "
                "one of them, or set truncate_prompt_tokens to -1",
            )
    return pairs


def _chunks(texts: Sequence[str], prompt: str) -> Iterator[list[str]]:
    """Texts after the prompt, some ``CHUNK`` characters at a time: tokenizing takes hundreds of times their memory."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(prompt + text)
        size += len(prompt) + len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _check(index: int, tokens: Sequence[int], limit: int, *, whole: bool = True) -> None:
    if not tokens:
        raise RequestError(Code.invalid_request, f"input[{index}] has no tokens")
    if len(tokens) > limit:
        raise RequestError(
            Code.context_length_exceeded,
            f"input[{index}] has {'' if whole else 'at least '}{len(tokens)} tokens; this model takes {limit}. "
            "Shorten it, or set truncate_prompt_tokens to -1",
        )


class EmbeddingBackend(PipelineBackend[EmbeddingEngine]):
    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics, events: ProcessEvents) -> None:
        super().__init__(settings, events, lambda: build_engine(settings))
        self._metrics = metrics

    async def open(self, connection: str) -> ServedModel:
        names = served_names(self._settings.served_model_name) or (self._engine.model,)
        self._metrics.process.set_label("model", names[0])
        self._metrics.max_sequences.set(self._settings.max_running)
        self._metrics.max_batched_tokens.set(self._settings.max_batched_tokens)
        self._metrics.max_model_len.set(self._engine.embedder.max_tokens)
        return ServedModel(names[0], names[1:], self._engine.revision, None, connection)

    def make_runner(self, context: SessionContext) -> EmbeddingRunner:
        return EmbeddingRunner(context, self._thread, self._engine, self._events.engine_failed)


def build_engine(settings: WorkerSettings) -> EmbeddingEngine:
    """The engine that the settings name, built in the thread that will run it.

    Raises:
        ModelError: the model cannot be served.
        EngineError: it does not fit into memory.
        ValueError: the engine makes no embeddings.
    """
    engine: EmbeddingEngine
    if settings.engine == "native":
        from penstock.infra.process.budgets import wait_passively

        path = modeldir.resolve(settings.model, weights=True)
        if reason := servable.problem(path, "native"):  # before what takes seconds to import
            raise modeldir.ModelError(reason)
        wait_passively()
        with loading("penstock.workers.engines.embed.native"):
            from penstock.workers.engines.embed import native

        engine = native.from_settings(settings, path)
    elif settings.engine == "mock":
        from penstock.workers.engines.embed import mock

        engine = mock.from_settings(settings, modeldir.resolve(settings.model or str(modeldir.TINY)))
    else:
        raise ValueError(f"--role embed runs with --engine native or mock, not {settings.engine}")
    known = engine.embedder
    log.info(
        "engine_ready",
        engine=engine.name,
        dimensions=known.dimensions,
        max_tokens=known.max_tokens,
        pooling=known.pooling,
        seconds=round(engine.load_seconds, 2),
    )
    return engine
