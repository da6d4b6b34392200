"""Runs embeddings requests: the inputs of all of them form batches, one after the other, in the engine's thread.

A request's vectors are published once all are there, so that they come from one attempt.
"""

import asyncio
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import structlog

from penstock.infra.bus.tasks import end
from penstock.schemas import done, fleet, jobs, requests
from penstock.schemas.control import Ok, Push, Pushed, Release
from penstock.schemas.errors import Code
from penstock.schemas.kv import KvDump
from penstock.schemas.requests import Embedding
from penstock.schemas.tokens import Finish, TokenItem
from penstock.schemas.wire import pack_tokens, unpack_tokens
from penstock.workers.engines.base import RequestError
from penstock.workers.engines.embed.base import EmbeddingEngine, finite, shortened, window
from penstock.workers.runners.inputs import Input, InputQueue
from penstock.workers.runners.pipeline_thread import PipelineThread
from penstock.workers.session.request_runner import SessionContext, StageInput
from penstock.workers.session.requests import RunningRequest, admit

log = structlog.get_logger("worker")

MESSAGE_BYTES = 1 << 19  # of vectors in one message; most answers take one
NOT_FINITE = (
    "the vector of input[{}] is not finite: this model's numbers overflow in the worker's data type; --dtype float32"
)
CHUNK = 1 << 18  # characters that are tokenized at a time


class _Vectors:
    """A request and its vectors so far."""

    __slots__ = ("embedding", "missing", "prompt_tokens", "running", "vectors")

    def __init__(self, running: RunningRequest, embedding: Embedding, inputs: list[list[int]]) -> None:
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


class EmbeddingRunner:
    """
    Args:
        engine_failed: called once when the engine is broken; nothing more begins then.
    """

    queue = 0

    def __init__(
        self,
        context: SessionContext,
        thread: PipelineThread,
        engine: EmbeddingEngine,
        engine_failed: Callable[[BaseException], None],
    ) -> None:
        self.slots = context.settings.max_running
        self._context = context
        self._requests = context.requests
        self._terminal = context.terminal
        self._thread = thread
        self._engine = engine
        self._engine_failed = engine_failed
        self._inputs: InputQueue[_Vectors] = InputQueue(context.settings.max_batched_tokens)
        self._open: dict[str, _Vectors] = {}
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
            entry = self._open[request.id] = _Vectors(running, request.embedding, inputs)
            self._inputs.add(entry, inputs)
            self._added.set()

    async def _run_all(self) -> None:
        """While one batch is computed, the results of the one before are published."""
        last: _Batch | None = None
        while True:
            inputs = self._inputs.take()
            computing = self._begin(inputs) if inputs else None
            if last is not None:
                self._deliver(last)
            if computing is None:
                last = None
                self._added.clear()
                if not len(self._inputs):
                    await self._added.wait()
                continue
            try:
                last = _Batch(inputs, await computing)
            except Exception as error:
                log.error("engine_failed", error=repr(error), exc_info=error)
                self._engine_failed(error)
                return
            self._steps += 1

    def _begin(self, inputs: list[Input[_Vectors]]) -> "asyncio.Future[list[bytes]]":
        now = time.time_ns()
        for each in inputs:
            if not each.key.running.started_ns:
                each.key.running.started_ns = now
        batch = [each.tokens for each in inputs]
        metrics = self._context.metrics.embed
        metrics.batch_inputs.observe(len(batch))
        metrics.tokens.inc(sum(map(len, batch)))
        metrics.padding.inc(len(batch) * max(map(len, batch)) - sum(map(len, batch)))
        return asyncio.wrap_future(self._thread.call(lambda: self._engine.embed(batch)))

    def _deliver(self, batch: _Batch) -> None:
        for (entry, index, _), vector in zip(batch.inputs, batch.vectors, strict=True):
            request = entry.running.request.id
            if self._open.get(request) is not entry:  # cancelled, failed or revoked: another attempt may run here
                continue
            if not finite(vector):
                self._drop(entry.running)
                self._terminal.spawn(self._terminal.end(entry.running, Code.engine_error, NOT_FINITE.format(index)))
            elif entry.put(index, vector):
                del self._open[request]
                self._terminal.spawn(self._finish(entry))

    async def _finish(self, entry: _Vectors) -> None:
        """Publish the vectors, then the terminal event."""
        running, output = entry.running, entry.output()
        if not self._requests.is_current(running):
            return
        running.first_token_ns = time.time_ns()
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

    def accepts_stop(self, running: RunningRequest) -> bool:
        return True

    def stop_early(self, running: RunningRequest) -> None:
        self._drop(running)
        self._terminal.spawn(self._terminal.end_cancelled(running))

    def free(self, running: RunningRequest, cancel: bool) -> None:
        self._drop(running)

    def _drop(self, running: RunningRequest) -> None:
        entry = self._open.get(running.request.id)
        if entry is not None and entry.running is running:
            del self._open[running.request.id]
            self._inputs.drop(entry)

    def release_input(self, stage_input: StageInput) -> None:
        """No stage comes before this one."""

    async def not_begun(self) -> list[RunningRequest]:
        return [running for running in self._requests.running.values() if not running.started_ns]

    # --- start and stop ---

    async def open(self) -> None:
        self._running = self._context.tasks.spawn(self._run_all(), name="embed")

    async def fence(self) -> None:
        await end([self._running])

    async def close(self) -> None:
        """Nothing to do: there are only the session's tasks."""

    def registration(self, state: fleet.State) -> fleet.Registration:
        context, settings, model = self._context, self._context.settings, self._context.model
        return fleet.Registration(
            worker=context.id,
            model=model.name,
            role=settings.role,
            engine=self._engine.name,
            epoch=context.epoch,
            block_size=settings.block_size,
            total_blocks=0,
            slots=self.slots,
            max_model_len=self._engine.embedder.max_tokens,
            state=state,
            aliases=model.aliases,
            revision=model.revision,
            kv_events=False,
            load=fleet.Load(running=len(self._open), waiting=len(self._inputs), steps=self._steps),
            host=socket.gethostname(),
            pid=os.getpid(),
            name=settings.name,
            connection=model.connection,
            max_batched_tokens=settings.max_batched_tokens,
            embedder=self._engine.embedder,
        )

    # --- upkeep and control ---

    @property
    def holds_leases(self) -> bool:
        return False

    def housekeeping(self, now: float) -> None:
        self._context.metrics.running.set(len(self._open))
        self._context.metrics.waiting.set(len(self._inputs))

    async def dump(self, page: int) -> KvDump:
        return KvDump(self._context.id, self._context.epoch, 0, ())

    def release(self, order: Release) -> Ok:
        return Ok(error="this worker pins no blocks")

    async def push(self, order: Push) -> Pushed:
        return Pushed("refused", "this worker holds no blocks")


def inputs_of(engine: EmbeddingEngine, embedding: Embedding, prompt: bytes) -> list[list[int]]:
    """Token ids of each input, cut if the request says so.

    Raises:
        RequestError: one is too long or empty, or the vectors are shorter than what is asked for.
    """
    known = engine.embedder
    if embedding.dimensions > known.dimensions:  # a model of the same name with longer vectors was here before
        raise RequestError(
            Code.invalid_request, f"dimensions is {embedding.dimensions}; this model's vectors have {known.dimensions}"
        )
    limit = min(embedding.truncate, known.max_tokens) if embedding.truncate else known.max_tokens
    inputs: list[list[int]] = []
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


def _chunks(texts: Sequence[str], prompt: str) -> Iterator[list[str]]:
    """Texts behind the prompt, some ``CHUNK`` characters at a time: tokenizing takes hundreds of times their memory."""
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
    """
    Raises:
        RequestError: an input is too long or empty.
    """
    if not tokens:
        raise RequestError(Code.invalid_request, f"input[{index}] has no tokens")
    if len(tokens) > limit:
        raise RequestError(
            Code.context_length_exceeded,
            f"input[{index}] has {'' if whole else 'at least '}{len(tokens)} tokens; this model takes {limit}. "
            "Shorten it, or set truncate_prompt_tokens to -1",
        )
