"""Token items of an embeddings request become its JSON answer. Pure.

The "tokens" are a count and then float32 values (``penstock.schemas.requests.Embedding``).
"""

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct

from penstock.gateway.base.chat_objects import UsageBody, serving_error
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import FAILURES, TokenItem

FLOAT_BYTES = 4
LARGE_BYTES = 65_536  # of vectors; so many are written as JSON in about 1 ms

_json = msgspec.json.encode


class EmbeddingData(Struct, frozen=True):
    """One vector: numbers, or base64 of float32 values, little-endian."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Struct, frozen=True):
    """Response of POST /v1/embeddings. ``data``: in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage
    object: str = "list"


class EmbeddingAggregator:
    """Collects the vectors of one request; see ``penstock.gateway.apis.answer_shapes.Aggregator``."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.embedding is not None
        self.request = request
        self.error: ServingError | None = None
        self._embedding = request.embedding
        self._received = bytearray()
        self._ended = False

    @property
    def done(self) -> bool:
        return self._ended

    @property
    def large(self) -> bool:
        return len(self._received) > LARGE_BYTES

    @property
    def usage(self) -> UsageBody:
        tokens = int.from_bytes(self._received[:FLOAT_BYTES], "little")
        return UsageBody(tokens, 0, tokens)

    def push(self, items: Iterable[TokenItem]) -> bool:
        """Take in items; True once there are no more."""
        for item in items:
            if self._ended:
                break
            self._received += item.tokens
            if (finish := item.finish) is not None:
                self._ended = True
                if finish.reason in FAILURES:
                    self.error = serving_error(finish.code or finish.reason, finish.message)
        return self._ended

    def response(self) -> bytes:
        """
        Raises:
            ServingError: the request failed.
        """
        return b"".join(self.parts())

    def parts(self) -> Sequence[bytes]:
        """The body in pieces of one vector each.

        Raises:
            ServingError: the request failed.
        """
        if self.error is not None:
            raise self.error
        width = FLOAT_BYTES * self._embedding.dimensions
        if (len(self._received) - FLOAT_BYTES) % width:
            raise ServingError(Code.internal, "the vectors in the log are not whole")
        return list(self._parts(width))

    def _parts(self, width: int) -> Iterator[bytes]:
        request, usage = self.request, self.usage
        yield b'{"object":"list","id":%b,"created":%d,"model":%b,"data":[' % (
            _json(request.id),
            request.created_ns // 1_000_000_000,
            _json(request.model),
        )
        for index, at in enumerate(range(FLOAT_BYTES, len(self._received), width)):
            vector = _json(self._vector(bytes(self._received[at : at + width])))
            comma = b"," if index else b""
            yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, vector)
        yield b'],"usage":%b}' % _json(EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens))

    def _vector(self, packed: bytes) -> list[float] | str:
        if self._embedding.base64:
            return base64.b64encode(packed).decode()
        values = array("f", packed)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()
