"""From the body of an embeddings request to a GenerateRequest: parse, model, limits, request. Pure but for ids.

Texts go to the worker as they are: this gateway may have another model's tokenizer. So only the worker knows whether a
text is too long; lists of token ids are checked here.

The body of POST /v1/embeddings: its fields and limits. Knows no model.

Token items of an embeddings request become its JSON answer. Pure.

The "tokens" are a count and then float32 values (``penstock.schemas.requests.Embedding``).
"""

import base64
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.base.chat_objects import UsageBody, serving_error
from penstock.gateway.base.request_bodies import (
    CommonOptions,
    decode_body,
    invalid,
    resolve_deadline_s,
    resolve_priority,
    unsupported,
)
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Embedder
from penstock.schemas.requests import EMBEDDING, Embedding, GenerateRequest, Stop
from penstock.schemas.tokens import FAILURES, TokenItem
from penstock.schemas.wire import pack_tokens

MAX_INPUTS = 2048  # as in OpenAI's API
MAX_TOKENS = 300_000  # of all inputs that are given as token ids, as in OpenAI's API
MAX_VALUES = MAX_TOKENS + MAX_INPUTS  # in a body; so many are decoded in about 12 ms

TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
TokenIds = list[TokenId]
Cut = Annotated[
    int, Meta(ge=-1, description="cut longer inputs to so many tokens; -1: to the model's limit; default: refuse them")
]


class EmbeddingRequest(CommonOptions, frozen=True, kw_only=True):
    """POST /v1/embeddings. ``input``: a text, several, token ids, or several lists of token ids."""

    input: str | list[str | TokenId | TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: (
        Annotated[int, Meta(ge=1, le=1 << 20, description="shorten the vectors and scale them to length 1 again")]
        | None
    ) = None
    truncate_dim: Annotated[int, Meta(ge=1, le=1 << 20, description="another name for dimensions")] | None = None
    truncate_prompt_tokens: Cut | None = None
    input_type: (
        Annotated[
            str,
            Meta(
                max_length=128,
                description="what the texts are: query, document (or search_query, search_document, passage), or the "
                "name of another prompt of the model's, which is put before each text; default: the model's default",
            ),
        ]
        | None
    ) = None


class Inputs(Struct, frozen=True):
    """The inputs of a body in their order: either texts or token ids."""

    texts: Sequence[str] = ()
    tokens: Sequence[TokenIds] = ()

    def __len__(self) -> int:
        return len(self.texts) or len(self.tokens)


_decode = msgspec.json.Decoder(EmbeddingRequest).decode


def parse_embedding(data: bytes) -> tuple[EmbeddingRequest, Inputs]:
    """
    Raises:
        ServingError: invalid_request or unsupported, with the field and the limit.
    """
    body: EmbeddingRequest = decode_body(_decode, data)
    if body.stream:
        raise unsupported("stream", "embeddings are not streamed: leave stream out")
    if body.truncate_prompt_tokens == 0:
        raise invalid(
            "truncate_prompt_tokens", "truncate_prompt_tokens is 0; use 1 or more, or -1 for the model's limit"
        )
    if body.dimensions and body.truncate_dim and body.dimensions != body.truncate_dim:
        raise invalid("truncate_dim", "truncate_dim and dimensions mean the same and differ; give one of them")
    return body, _inputs(body.input)


def _inputs(given: str | list[str | int | list[int]]) -> Inputs:
    if isinstance(given, str):
        given = [given]
    elif given and isinstance(given[0], int):
        ids = [each for each in given if isinstance(each, int)]
        if len(ids) < len(given):
            raise invalid("input", "input begins with a token id; then every entry must be one")
        given = [ids]
    if not given:
        raise invalid("input", "input is empty; give at least one text or list of token ids")
    if len(given) > MAX_INPUTS:
        raise invalid("input", f"input has {len(given)} entries; the limit is {MAX_INPUTS}: send several requests")
    for at, each in enumerate(given):
        if not each and each != 0:
            raise invalid("input", f"input[{at}] is empty")
    texts = [each for each in given if isinstance(each, str)]
    tokens = [each for each in given if isinstance(each, list)]
    if len(given) not in (len(texts), len(tokens)):
        raise invalid("input", "input mixes kinds: give texts only, or lists of token ids only")
    if (total := sum(map(len, tokens))) > MAX_TOKENS:
        raise invalid("input", f"input has {total} token ids; the limit is {MAX_TOKENS}: send several requests")
    return Inputs(texts, tokens)


EMBEDDINGS_PATH = "/v1/embeddings"
_DOCUMENT = ("document", "passage", "corpus")
# What clients call the kinds of texts, and the prompts that sentence-transformers has for them.
_KINDS = {"query": ("query",), "search_query": ("query",)} | dict.fromkeys(("search_document", *_DOCUMENT), _DOCUMENT)
MAX_FLOATS = 1 << 22  # in one answer, which has 16 MiB of them then


def prepare_embedding(
    data: bytes,
    models: Mapping[str, Embedder],
    *,
    gateway: str,
    default_deadline_s: float,
    now_ns: int,
    others: Collection[str] = (),
    no_store: bool = False,
    request_id: str,
) -> PreparedRequest:
    """
    Args:
        models: of the embed workers, by name.
        others: names of models that are served here and make no vectors.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body, inputs = parse_embedding(data)
    name, model = _find_model(body.model, models, others)
    dimensions = _dimensions(body, model)
    if (floats := len(inputs) * dimensions) > MAX_FLOATS:
        text = f"{len(inputs)} vectors of {dimensions} have {floats} numbers; the limit is {MAX_FLOATS}"
        raise invalid("input", f"{text}: send several requests")
    tokens = [_checked(at, each, body, model) for at, each in enumerate(inputs.tokens)]
    request = GenerateRequest(
        id=request_id,
        model=name,
        gateway=gateway,
        prompt=pack_tokens(list(chain.from_iterable(tokens))),
        stop=Stop(max_tokens=1),
        created_ns=now_ns,
        deadline_ns=now_ns + int(resolve_deadline_s(body, default_deadline_s) * 1e9),
        priority=resolve_priority(body.priority, body.service_tier),
        user=body.user or "",
        worker=body.worker or "",
        endpoint=EMBEDDING,
        no_store=no_store or bool(body.no_store),
        embedding=_embedding(body, inputs, tokens, model, dimensions),
    )
    return PreparedRequest(request, sum(map(len, tokens)), False, False)


def _embedding(
    body: EmbeddingRequest, inputs: Inputs, tokens: Sequence[TokenIds], model: Embedder, dimensions: int
) -> Embedding:
    return Embedding(
        dimensions=dimensions,
        texts=tuple(inputs.texts),
        lengths=tuple(map(len, tokens)),
        truncate=_longest(body, model) if body.truncate_prompt_tokens is not None else 0,
        base64=body.encoding_format == "base64",
        prompt=_prompt(body, inputs, model),
    )


def _prompt(body: EmbeddingRequest, inputs: Inputs, model: Embedder) -> str:
    """The name of the prompt, chosen as sentence-transformers does it; "": the model's default."""
    kind = body.input_type
    if kind is None:
        return ""
    if inputs.tokens:
        raise invalid("input_type", "input_type puts a prompt before texts; token ids are taken as they are")
    names = [kind, *_KINDS.get(kind.lower(), ())]
    found = next((name for name in names if name in model.prompts), None)
    found = found or next((name for name in model.prompts if name.lower() == kind.lower()), None)
    if found is None and (kind.lower() not in _KINDS or model.prompts):
        known = ", ".join(model.prompts or ("query", "document"))
        raise invalid("input_type", f"input_type is {kind!r}; this model knows {known}")
    return found or ""


def _find_model(name: str | None, models: Mapping[str, Embedder], others: Collection[str]) -> tuple[str, Embedder]:
    """The model and its name. ``name``: None or "": the only one that there is."""
    if not name and models and all(model == next(iter(models.values())) for model in models.values()):
        name = next(iter(models))
    name = name or ""
    model = models.get(name)
    if model is not None:
        return name, model
    served = ", ".join(map(repr, models)) or "none"
    if name in others:
        raise unsupported(
            "model",
            f"model {name[:200]!r} makes no embeddings here; models that do: {served}. To make embeddings with it, "
            "start a worker for it with --role embed",
        )
    raise ServingError(
        Code.model_not_found, f"no model {name[:200]!r} makes embeddings here; models that do: {served}", param="model"
    )


def _dimensions(body: EmbeddingRequest, model: Embedder) -> int:
    wanted, name = (body.dimensions, "dimensions") if body.dimensions else (body.truncate_dim, "truncate_dim")
    if wanted is None:
        return model.default_dimensions or model.dimensions
    if wanted > model.dimensions:
        raise invalid(name, f"{name} is {wanted}; this model's vectors have {model.dimensions}, ask for fewer")
    if model.matryoshka and wanted not in {*model.matryoshka, model.dimensions}:
        known = ", ".join(map(str, sorted(model.matryoshka)))
        raise invalid(name, f"{name} is {wanted}; this model was trained for {known}")
    return wanted


def _longest(body: EmbeddingRequest, model: Embedder) -> int:
    """Tokens of an input, at most."""
    cut = body.truncate_prompt_tokens
    return model.max_tokens if cut is None or cut < 0 else min(cut, model.max_tokens)


def _checked(at: int, tokens: TokenIds, body: EmbeddingRequest, model: Embedder) -> TokenIds:
    if (largest := max(tokens)) >= model.vocab_size:
        raise invalid("input", f"input[{at}] has the token id {largest}; this model's are below {model.vocab_size}")
    longest = _longest(body, model)
    if len(tokens) > longest and body.truncate_prompt_tokens is None:
        raise too_long(at, len(tokens), longest)
    return tokens[:longest]


def too_long(at: int, tokens: int, limit: int) -> ServingError:
    return ServingError(
        Code.context_length_exceeded,
        f"input[{at}] has {tokens} tokens; this model takes {limit}. Shorten it, or set truncate_prompt_tokens to -1",
        param="input",
    )


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
    """Collects the vectors of one request; see ``penstock.gateway.apis.endpoints.Aggregator``."""

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
