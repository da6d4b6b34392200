"""How the answer of a request for text or vectors is shaped: by the API that it was made in. Pure."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from penstock.gateway.apis.chat.aggregator import AnswerAggregator
from penstock.gateway.apis.chat.segments import SegmentedAnswer, WholeAnswer
from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.apis.embeddings import EmbeddingAggregator
from penstock.gateway.apis.messages.render import MessageRenderer, message
from penstock.gateway.apis.responses.prepare import compacted
from penstock.gateway.apis.responses.render import ResponseRenderer, response
from penstock.gateway.base.chat_objects import UsageBody
from penstock.gateway.base.common import COMPACTION, MESSAGE, RESPONSE
from penstock.gateway.base.errors import unsupported
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import TokenItem

# Of APIs whose answers are segments.
_BODIES: dict[str, Callable[[GenerateRequest, SegmentedAnswer], Any]] = {
    RESPONSE: response,
    COMPACTION: compacted,
    MESSAGE: message,
}


class _Answer(Protocol):
    @property
    def usage(self) -> UsageBody: ...

    @property
    def error(self) -> ServingError | None: ...


class Aggregator(_Answer, Protocol):
    """Collects items into one JSON body; see ``penstock.gateway.apis.chat.aggregator``."""

    @property
    def large(self) -> bool: ...

    def push(self, items: Iterable[TokenItem]) -> bool: ...

    def response(self) -> bytes: ...

    def parts(self) -> Sequence[bytes]: ...


class Renderer(_Answer, Protocol):
    """Renders items as server-sent events; see ``penstock.gateway.apis.chat.stream_renderer``."""

    @property
    def done(self) -> bool: ...

    @property
    def ping(self) -> bytes:
        """What says nothing, to be sent while nothing else is; b"": nothing more is sent."""

    def resume(self, last_event_id: str) -> None: ...

    def push(self, items: Iterable[TokenItem]) -> bytes: ...

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes: ...


def aggregator_for(request: GenerateRequest, detokenizer: Detokenizer | None, *, late: bool = False) -> Aggregator:
    """
    Args:
        detokenizer: of its model; None: it makes vectors.
        late: log-probabilities of the prompt may have expired.
    """
    if request.embedding is not None:
        return EmbeddingAggregator(request)
    assert detokenizer is not None
    body = _BODIES.get(request.endpoint)
    if body is not None:
        return WholeAnswer(request, detokenizer, body)
    return AnswerAggregator(request, detokenizer, late=late)


def renderer_for(request: GenerateRequest, detokenizer: Detokenizer | None, *, include_usage: bool = False) -> Renderer:
    """
    Args:
        detokenizer: of its model; None: it makes vectors.
        include_usage: of chat and text completions; the others always have it.
    Raises:
        ServingError: unsupported: the answer has no events.
    """
    if request.embedding is not None:
        raise unsupported("stream", "embeddings are not streamed: read the answer with GET /v1/requests/" + request.id)
    assert detokenizer is not None
    if request.endpoint == COMPACTION:
        raise unsupported("stream", "compactions are not streamed: read the answer with GET /v1/requests/" + request.id)
    if request.endpoint == RESPONSE:
        return ResponseRenderer(request, detokenizer)
    if request.endpoint == MESSAGE:
        return MessageRenderer(request, detokenizer)
    return StreamRenderer(request, detokenizer, include_usage=include_usage)


WRITE_BYTES = 262_144  # bytes of a large whole answer that are handed to the connection at once


_WRITER = ThreadPoolExecutor(1, "answer-writer")  # several would only compete for the interpreter


async def encode_answer(collector: Aggregator) -> bytes:
    """The JSON body of an answer, in one piece.

    Raises:
        ServingError: the request failed.
    """
    return b"".join(await encode_portions(collector))


async def encode_portions(collector: Aggregator) -> list[bytes]:
    """The JSON body of an answer. Large ones are encoded in a thread, one after the other, beside others' streams.

    Returns: pieces of about ``WRITE_BYTES`` bytes; copying 10 MB at once would stop the event loop for 10 ms.
    Raises:
        ServingError: the request failed.
    """
    if not collector.large:
        return [collector.response()]
    return await asyncio.get_running_loop().run_in_executor(_WRITER, _portions, collector)


def _portions(collector: Aggregator) -> list[bytes]:
    portions: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for part in collector.parts():
        parts.append(part)
        size += len(part)
        if size >= WRITE_BYTES:
            portions.append(b"".join(parts))
            parts, size = [], 0
    return [*portions, b"".join(parts)] if parts else portions
