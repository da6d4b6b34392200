"""Answers as they arrive: one object per request that is filled further and handed out again and again."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorrt_llm._standin.variant import QUIRKS
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.metrics.enums import MetricNames


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


class ErrorResponse(NamedTuple):
    error: str


@dataclass
class Response:
    """From the engine; ``token_ids`` and ``logprobs`` are cumulative."""

    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: list[dict[int, Logprob]] | None
    context_logits: Any
    finish: str | None
    stop_reason: int | str | None
    stop_words: list[list[int]]
    cached_tokens: int
    iteration: int
    disaggregated_params: Any
    perf: Any
    embedding_handle: Any = None  # of an encoder
    hashes: list[list[int]] | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_text_len: int = field(default=0, repr=False)
    _last_token_ids_len: int = field(default=0, repr=False)
    _last_logprobs_len: int = field(default=0, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)


class Inbox:
    """Between the engine's thread and whoever iterates: bound to the loop that runs at its making, if any."""

    def __init__(self) -> None:
        try:
            self.loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self.loop = None
        self.aqueue: asyncio.Queue[object] | None = asyncio.Queue() if self.loop else None
        self.queue: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, item: object) -> None:
        if self.loop is None or self.aqueue is None:
            self.queue.put(item)
            return
        try:
            self.loop.call_soon_threadsafe(self.aqueue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            pass

    async def aget(self) -> object:
        assert self.aqueue is not None, (
            "The asyncio event loop was not present during initialization, so async operations are not available."
        )
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("the result belongs to another event loop")
        return await self.aqueue.get()


# Spans that would have been sent: endpoint, W3C headers, metrics. A request that is not measured has none.
EXPORTED: deque[tuple[str, dict[str, str], dict[Any, Any]]] = deque(maxlen=100)


class GenerationResult:
    """Iterate it (``async for``), or wait for its end where no loop runs (``result()``)."""

    def __init__(self, request_id: int, prompt: str | None, token_ids: list[int], params: Any, tokenizer: Any) -> None:
        self.request_id = request_id
        self.prompt, self.prompt_token_ids = prompt, token_ids
        self.sampling_params = params
        self._tokenizer = tokenizer
        self._outputs = [CompletionOutput(index) for index in range(params.best_of or params.n)]
        self._inbox = Inbox()
        self._done = False
        self._ended = 0
        self._aborted = False
        self._abort: Callable[[int], None] = lambda _: None
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.cached_tokens = 0
        self.context_logits: Any = None
        self.mm_embedding_handle: Any = None
        self.disaggregated_params: Any = None
        self.trace_headers: Any = None
        self._otlp: str | None = None
        self.metrics_dict: dict[Any, Any] = {}

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._aborted = True
        self._abort(self.request_id)

    # -- waiting

    def result(self, timeout: float | None = None) -> GenerationResult:
        """The whole answer. As the real one, it does not heed the timeout."""
        while not self._done:
            self._handle(self._get())
        return self

    async def aresult(self) -> GenerationResult:
        while not self._done:
            self._handle(await self._inbox.aget())
        return self

    def _get(self) -> object:
        assert self._inbox.aqueue is None, "made under a running event loop: use async iteration"
        return self._inbox.queue.get()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        self._handle(await self._inbox.aget())
        return self

    # -- taking in

    def _handle(self, response: object) -> None:
        if isinstance(response, ErrorResponse):
            self._done = QUIRKS.finished_after_error
            raise RequestError(response.error)
        if isinstance(response, BaseException):
            self._done = QUIRKS.finished_after_error
            raise response
        assert isinstance(response, Response)
        output = self._outputs[response.index]
        output._last_token_ids_len = len(output.token_ids)
        output._last_logprobs_len = len(output.logprobs)
        output._last_text_len = len(output.text)
        tokens, logprobs = list(response.token_ids), response.logprobs
        output.finish_reason, output.stop_reason = response.finish, response.stop_reason
        if response.finish == "stop" and not self.sampling_params.include_stop_str_in_output:
            for word in response.stop_words:
                if tokens[-len(word) :] == word:
                    tokens = tokens[: -len(word)]
                    break
        output.token_ids = tokens
        if logprobs is not None:
            output.logprobs = logprobs[: len(tokens)]
            assert len(output.logprobs) == output.length
            output.cumulative_logprob = sum(
                entry[token].logprob for entry, token in zip(output.logprobs, tokens, strict=True)
            )
        if response.prompt_logprobs is not None:
            output.prompt_logprobs = response.prompt_logprobs
        output.disaggregated_params = self.disaggregated_params = response.disaggregated_params
        output.request_perf_metrics = response.perf
        if response.embedding_handle is not None:  # behind the output, which has none of it
            self.mm_embedding_handle = response.embedding_handle
            self.disaggregated_params = DisaggregatedParams(
                multimodal_embedding_handles=[response.embedding_handle], multimodal_hashes=response.hashes
            )
        self.context_logits = response.context_logits
        self.cached_tokens = max(self.cached_tokens, response.cached_tokens)
        self.decoding_iter = response.iteration
        if self.sampling_params.detokenize and self._tokenizer is not None:
            self._write(output, tokens, response.finish is not None)
        if response.perf is not None:
            self._measure(output)
        if response.finish is not None:
            self._ended += 1
            self._done = self._ended == len(self._outputs)

    def _write(self, output: CompletionOutput, tokens: list[int], final: bool) -> None:
        params = self.sampling_params
        text = self._tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        if final or not text.endswith("\ufffd"):  # the beginning of a character is held back
            output.text = text

    def _measure(self, output: CompletionOutput) -> None:
        timing = output.request_perf_metrics.timing_metrics
        total = (timing.last_token_time - timing.arrival_time).total_seconds()
        first = (timing.first_token_time - timing.arrival_time).total_seconds()
        self.metrics_dict = {
            MetricNames.TTFT: first,
            MetricNames.TPOT: (total - first) / max(1, output.length - 1),
            MetricNames.E2E: total,
            MetricNames.REQUEST_QUEUE_TIME: (timing.first_scheduled_time - timing.arrival_time).total_seconds(),
            MetricNames.ARRIVAL_TIMESTAMP: time.time() - total,
            "finished_reason": output.finish_reason,
        }
        if self._otlp:
            EXPORTED.append((self._otlp, dict(self.trace_headers or {}), self.metrics_dict))


class IterationResult:
    """What one poll fetched, already here: events or statistics."""

    def __init__(self, items: list[Any]) -> None:
        self._items = deque(items)
        self._inbox = Inbox()

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> Any:
        assert self._inbox.loop is not None, (
            "The asyncio event loop was not present during initialization, so async operations are not available."
        )
        if not self._items:
            raise StopAsyncIteration
        return self._items.popleft()
