"""From the body of an embeddings request to a GenerateRequest: parse, model, limits, request. Pure but for ids.

Reranking and scoring are the same with pairs of texts, of which workers with a cross-encoder make one number each.

Texts go to the worker as they are: this gateway may have another model's tokenizer. So only the worker knows whether a
text is too long; lists of token ids are checked here.

The "tokens" are a count and then float32 values (``penstock.schemas.requests.Embedding``).
"""

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.ollama.bodies import untagged
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
from penstock.schemas.requests import (
    EMBEDDING,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    PAIRS,
    RERANK,
    SCORE,
    Embedding,
    GenerateRequest,
    Stop,
)
from penstock.schemas.tokens import FAILURES, TokenItem
from penstock.schemas.wire import pack_tokens

MAX_INPUTS = 2048  # as in OpenAI's API
MAX_TOKENS = 300_000  # of all inputs that are given as token ids, as in OpenAI's API
MAX_VALUES = MAX_TOKENS + MAX_INPUTS  # in a body; this many are decoded in about 12 ms
MAX_PAIR_BYTES = 16 << 20  # of all pairs, the query counted in each: a long one makes much work of a small body
BILLED_DOCUMENTS = 100  # of a search unit, as in Cohere's API

TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
TokenIds = list[TokenId]
Cut = Annotated[
    int, Meta(ge=-1, description="cut longer inputs to N tokens; -1: to the model's limit; default: refuse them")
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


class _OllamaOptions(CommonOptions, frozen=True, kw_only=True):
    options: Annotated[dict[str, Any] | None, Meta(description="ignored: they are of chats")] = None
    keep_alive: Annotated[Any, Meta(description="ignored: workers keep their model")] = None


class OllamaEmbedRequest(_OllamaOptions, frozen=True, kw_only=True):
    """POST /api/embed, in Ollama's form."""

    input: str | list[str]
    truncate: Annotated[bool, Meta(description="false: refuse inputs that are too long; default: cut them")] | None = (
        None
    )
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20, description="of shortened vectors; 0: all")] | None = None


class OllamaEmbeddingsRequest(_OllamaOptions, frozen=True, kw_only=True):
    """POST /api/embeddings, Ollama's older form, for one text."""

    prompt: str


class Document(Struct, frozen=True):
    """A text as an object, as Cohere's and Jina's clients may send it."""

    text: str


class RerankRequest(CommonOptions, frozen=True, kw_only=True):
    """POST /v1/rerank and /v2/rerank, in Cohere's and Jina's form. ``documents``: texts, or objects with a text."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1, description="number of best documents in the answer; default: all")] | None = None
    return_documents: Annotated[bool, Meta(description="repeat the documents in the answer")] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, description="cut each document to this many tokens")] | None = None
    truncate: (
        Annotated[bool, Meta(description="false: refuse pairs that are too long; default: cut the longer text")] | None
    ) = None
    truncation: Annotated[bool, Meta(description="another name for truncate")] | None = None
    truncate_prompt_tokens: Cut | None = None


class ScoreRequest(CommonOptions, frozen=True, kw_only=True):
    """POST /v1/score, in vLLM's form. One text and several make a pair with each; two lists, pairs in their order."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: Annotated[str | list[str], Meta(description="another name for text_1")] | None = None
    documents: Annotated[str | list[str], Meta(description="another name for text_2")] | None = None
    truncate_prompt_tokens: Cut | None = None


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
    _check_cut(body.truncate_prompt_tokens)
    if body.dimensions and body.truncate_dim and body.dimensions != body.truncate_dim:
        raise invalid("truncate_dim", "truncate_dim and dimensions mean the same and differ; give one of them")
    return body, _inputs(body.input)


def _check_cut(cut: int | None) -> None:
    if cut == 0:
        raise invalid(
            "truncate_prompt_tokens", "truncate_prompt_tokens is 0; use 1 or more, or -1 for the model's limit"
        )


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
RERANK_PATH, SCORE_PATH = "/v1/rerank", "/v1/score"
TEXT_PATHS = "/v1/chat/completions and the other endpoints for text"
_DOCUMENT = ("document", "passage", "corpus")
# What clients call the kinds of texts, and the prompts that sentence-transformers has for them.
_KINDS = {"query": ("query",), "search_query": ("query",)} | dict.fromkeys(("search_document", *_DOCUMENT), _DOCUMENT)
MAX_FLOATS = 1 << 22  # in one answer, which has 16 MiB of them then


def paths_of(model: Embedder) -> str:
    """Where a model of embed workers is asked, for messages."""
    return f"{RERANK_PATH} or {SCORE_PATH}" if model.scores else EMBEDDINGS_PATH


class _Asked(NamedTuple):
    """``tokens``: of the inputs, where the body has these instead of texts."""

    body: CommonOptions
    model: str
    embedding: Embedding
    tokens: Sequence[TokenIds] = ()


def prepare_embedding(
    data: bytes,
    models: Mapping[str, Embedder],
    *,
    endpoint: str = EMBEDDING,
    gateway: str,
    default_deadline_s: float,
    now_ns: int,
    others: Mapping[str, str] = MappingProxyType({}),
    no_store: bool = False,
    request_id: str,
) -> PreparedRequest:
    """
    Args:
        models: of the embed workers, by name.
        endpoint: one of ``BY_EMBED_WORKERS``.
        others: models that are served here and make no vectors, by name, with the paths to ask them at.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body, name, embedding, tokens = _ASKS[endpoint](data, models, others)
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
        endpoint=endpoint,
        no_store=no_store or bool(body.no_store),
        embedding=embedding,
    )
    return PreparedRequest(request, sum(map(len, tokens)), False, False)


def _vectors_asked(data: bytes, models: Mapping[str, Embedder], others: Mapping[str, str]) -> _Asked:
    return _vectors(*parse_embedding(data), models, others)


_decode_ollama = msgspec.json.Decoder(OllamaEmbedRequest).decode
_decode_ollama_one = msgspec.json.Decoder(OllamaEmbeddingsRequest).decode


def _ollama_asked(data: bytes, models: Mapping[str, Embedder], others: Mapping[str, str]) -> _Asked:
    body: OllamaEmbedRequest = decode_body(_decode_ollama, data)
    cut = None if body.truncate is False else -1
    return _ollama_vectors(body, body.input, body.dimensions or None, cut, models, others)


def _ollama_text_asked(data: bytes, models: Mapping[str, Embedder], others: Mapping[str, str]) -> _Asked:
    body: OllamaEmbeddingsRequest = decode_body(_decode_ollama_one, data)
    if not body.prompt:
        raise invalid("prompt", "prompt is empty")
    return _ollama_vectors(body, body.prompt, None, -1, models, others)


def _ollama_vectors(
    body: _OllamaOptions,
    given: str | list[str],
    dimensions: int | None,
    cut: int | None,
    models: Mapping[str, Embedder],
    others: Mapping[str, str],
) -> _Asked:
    shared: dict[str, Any] = {name: getattr(body, name) for name in CommonOptions.__struct_fields__}
    shared["model"] = untagged(body.model or "", {*models, *others})
    texts: list[str | int | list[int]] = [given] if isinstance(given, str) else [*given]
    asked = EmbeddingRequest(input=texts, dimensions=dimensions, truncate_prompt_tokens=cut, **shared)
    if asked.stream:
        raise unsupported("stream", "embeddings are not streamed: leave stream out")
    return _vectors(asked, _inputs(texts), models, others)


def _vectors(
    body: EmbeddingRequest, inputs: Inputs, models: Mapping[str, Embedder], others: Mapping[str, str]
) -> _Asked:
    name, model = _find_model(body.model, models, others, scores=False)
    dimensions = _dimensions(body, model)
    if (floats := len(inputs) * dimensions) > MAX_FLOATS:
        text = f"{len(inputs)} vectors of {dimensions} have {floats} numbers; the limit is {MAX_FLOATS}"
        raise invalid("input", f"{text}: send several requests")
    tokens = [_checked(at, each, body, model) for at, each in enumerate(inputs.tokens)]
    embedding = Embedding(
        dimensions=dimensions,
        texts=tuple(inputs.texts),
        lengths=tuple(map(len, tokens)),
        truncate=0 if body.truncate_prompt_tokens is None else _longest(body.truncate_prompt_tokens, model),
        base64=body.encoding_format == "base64",
        prompt=_prompt(body, inputs, model),
    )
    return _Asked(body, name, embedding, tokens)


_decode_rerank = msgspec.json.Decoder(RerankRequest).decode
_decode_score = msgspec.json.Decoder(ScoreRequest).decode


def _ranking_asked(data: bytes, models: Mapping[str, Embedder], others: Mapping[str, str]) -> _Asked:
    body: RerankRequest = decode_body(_decode_rerank, data)
    texts = tuple(each if isinstance(each, str) else each.text for each in body.documents)
    _check_pairs(body, (body.query,), texts, "query", "documents")
    name, model = _find_model(body.model, models, others, scores=True)
    cuts = False not in (body.truncate, body.truncation)
    cut = -1 if body.truncate_prompt_tokens is None and cuts else body.truncate_prompt_tokens
    embedding = Embedding(
        1,
        texts,
        truncate=0 if cut is None else _longest(cut, model),
        prompt=PAIRS,
        queries=(body.query,),
        document_tokens=min(body.max_tokens_per_doc or 0, model.max_tokens),
        top=min(body.top_n or 0, MAX_INPUTS),
        shows_texts=bool(body.return_documents),
    )
    return _Asked(body, name, embedding)


def _scores_asked(data: bytes, models: Mapping[str, Embedder], others: Mapping[str, str]) -> _Asked:
    body: ScoreRequest = decode_body(_decode_score, data)
    queries = _side("text_1", body.text_1, "queries", body.queries)
    texts = _side("text_2", body.text_2, "documents", body.documents)
    fields = ("text_1" if body.queries is None else "queries", "text_2" if body.documents is None else "documents")
    if len(queries) not in (1, len(texts)):
        counts = f"{fields[0]} has {len(queries)} texts and {fields[1]} {len(texts)}"
        raise invalid(fields[0], f"{counts}; give one and any number, or two lists of the same length")
    _check_pairs(body, queries, texts, *fields)
    name, model = _find_model(body.model, models, others, scores=True)
    cut = body.truncate_prompt_tokens
    longest = 0 if cut is None else _longest(cut, model)
    return _Asked(body, name, Embedding(1, texts, truncate=longest, prompt=PAIRS, queries=queries))


_ASKS = {
    EMBEDDING: _vectors_asked,
    OLLAMA_EMBED: _ollama_asked,
    OLLAMA_EMBEDDINGS: _ollama_text_asked,
    RERANK: _ranking_asked,
    SCORE: _scores_asked,
}


def _side(name: str, given: str | list[str] | None, other: str, also: str | list[str] | None) -> tuple[str, ...]:
    """One side of the pairs, under whichever of its names."""
    if (given is None) == (also is None):
        raise invalid(name, f"give either {name} or {other}: a text, or a list of texts")
    texts = also if given is None else given
    assert texts is not None
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _check_pairs(
    body: RerankRequest | ScoreRequest, queries: Sequence[str], texts: Sequence[str], query: str, document: str
) -> None:
    """
    Args:
        query, document: names of the fields.
    Raises:
        ServingError: invalid_request or unsupported, with the field and the limit.
    """
    if body.stream:
        raise unsupported("stream", "scores are not streamed: leave stream out")
    _check_cut(body.truncate_prompt_tokens)
    if not texts:
        raise invalid(document, f"{document} is empty; give at least one text")
    if not all(queries):
        raise invalid(query, f"{query} is empty, or has an empty text")
    if len(texts) > MAX_INPUTS:
        raise invalid(
            document, f"{document} has {len(texts)} entries; the limit is {MAX_INPUTS}: send several requests"
        )
    each = [len(text.encode()) for text in queries]
    size = sum(len(text.encode()) for text in texts) + sum(each) * (len(texts) // len(each))
    if size > MAX_PAIR_BYTES:
        raise invalid(
            document,
            f"{len(texts)} pairs have {size} bytes, {query} counted in each; the limit is {MAX_PAIR_BYTES}: send "
            f"several requests, or a shorter {query}",
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


def _find_model(
    name: str | None, models: Mapping[str, Embedder], others: Mapping[str, str], *, scores: bool
) -> tuple[str, Embedder]:
    """The model and its name.

    Args:
        name: None or "": the only one that there is.
        scores: it must score pairs, or else make vectors.
    """
    able = {each: model for each, model in models.items() if model.scores is scores}
    if not name and able and all(model == next(iter(able.values())) for model in able.values()):
        name = next(iter(able))
    name = name or ""
    model = able.get(name)
    if model is not None:
        return name, model
    served, does = ", ".join(map(repr, able)) or "none", "scores pairs of texts" if scores else "makes embeddings"
    if name in models or name in others:
        paths = paths_of(models[name]) if name in models else others[name]
        others_can = "A cross-encoder does" if scores else "An encoder or a language model does"
        raise unsupported(
            "model",
            f"no worker of model {name[:200]!r} {does}; it serves {paths}. Models that do: {served}. {others_can}, "
            "where a worker serves it with --role embed",
        )
    raise ServingError(
        Code.model_not_found, f"no model {name[:200]!r} {does} here; models that do: {served}", param="model"
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


def _longest(cut: int | None, model: Embedder) -> int:
    """Tokens of an input, at most. ``cut``: ``truncate_prompt_tokens``."""
    return model.max_tokens if cut is None or cut < 0 else min(cut, model.max_tokens)


def _checked(at: int, tokens: TokenIds, body: EmbeddingRequest, model: Embedder) -> TokenIds:
    if (largest := max(tokens)) >= model.vocab_size:
        raise invalid("input", f"input[{at}] has the token id {largest}; this model's are below {model.vocab_size}")
    longest = _longest(body.truncate_prompt_tokens, model)
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
LARGE_BYTES = 65_536  # of vectors; this many are written as JSON in about 1 ms

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


class OllamaEmbedResponse(Struct, frozen=True):
    """Response of POST /api/embed. ``embeddings``: in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OllamaEmbeddingsResponse(Struct, frozen=True):
    """Response of POST /api/embeddings."""

    embedding: list[float]


class RankedDocument(Struct, frozen=True, omit_defaults=True):
    """``index``: of the document in the body."""

    index: int
    relevance_score: float
    document: Document | None = None


class BilledUnits(Struct, frozen=True):
    search_units: int


class RerankMeta(Struct, frozen=True):
    billed_units: BilledUnits


class RerankResponse(Struct, frozen=True):
    """Response of POST /v1/rerank. ``results``: the best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
    meta: RerankMeta


class ScoreData(Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreResponse(Struct, frozen=True):
    """Response of POST /v1/score. ``data``: in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage
    object: str = "list"


class EmbeddingAggregator:
    """Collects the vectors, or scores, of one request; see ``penstock.gateway.apis.endpoints.Aggregator``."""

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
        repeated = sum(map(len, self._embedding.texts)) if self._embedding.shows_texts else 0
        return len(self._received) + repeated > LARGE_BYTES

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
        """The body in pieces of one vector each; one of scores in one piece.

        Raises:
            ServingError: the request failed.
        """
        if self.error is not None:
            raise self.error
        width = FLOAT_BYTES * self._embedding.dimensions
        if (len(self._received) - FLOAT_BYTES) % width:
            raise ServingError(Code.internal, "the vectors in the log are not whole")
        if self._embedding.scores:
            return [_json(self._ranking() if self.request.endpoint == RERANK else self._scores())]
        return list(self._parts(width))

    def _ranking(self) -> RerankResponse:
        values, asked = _floats(self._received[FLOAT_BYTES:]), self._embedding
        texts = asked.texts if asked.shows_texts and len(asked.texts) == len(values) else ()
        best = sorted(range(len(values)), key=lambda index: -values[index])[: asked.top or None]
        results = [RankedDocument(at, values[at], Document(texts[at]) if texts else None) for at in best]
        units = BilledUnits(-(-len(values) // BILLED_DOCUMENTS))
        return RerankResponse(self.request.id, self.request.model, results, self._total(), RerankMeta(units))

    def _scores(self) -> ScoreResponse:
        request, values = self.request, _floats(self._received[FLOAT_BYTES:])
        data = [ScoreData(index, value) for index, value in enumerate(values)]
        return ScoreResponse(request.id, request.created_ns // 1_000_000_000, request.model, data, self._total())

    def _total(self) -> EmbeddingUsage:
        tokens = self.usage.prompt_tokens
        return EmbeddingUsage(tokens, tokens)

    def _parts(self, width: int) -> Iterator[bytes]:
        request = self.request
        places = range(FLOAT_BYTES, len(self._received), width)
        vectors = (_json(self._vector(bytes(self._received[at : at + width]))) for at in places)
        if request.endpoint == OLLAMA_EMBEDDINGS:
            yield b'{"embedding":%b}' % next(vectors)
        elif request.endpoint == OLLAMA_EMBED:
            yield b'{"model":%b,"embeddings":[' % _json(request.model)
            yield from (b",%b" % vector if index else vector for index, vector in enumerate(vectors))
            yield b'],"prompt_eval_count":%d}' % self._total().prompt_tokens
        else:
            yield b'{"object":"list","id":%b,"created":%d,"model":%b,"data":[' % (
                _json(request.id),
                request.created_ns // 1_000_000_000,
                _json(request.model),
            )
            for index, vector in enumerate(vectors):
                comma = b"," if index else b""
                yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, vector)
            yield b'],"usage":%b}' % _json(self._total())

    def _vector(self, packed: bytes) -> list[float] | str:
        if self._embedding.base64:
            return base64.b64encode(packed).decode()
        return _floats(packed)


def _floats(packed: bytes | bytearray) -> list[float]:
    """``packed``: float32 values, little-endian."""
    values = array("f", bytes(packed))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
