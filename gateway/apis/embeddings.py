"""From the body of an embeddings request to a GenerateRequest: parse, model, limits, request. Pure but for ids.

Texts go to the worker as they are: this gateway may have another model's tokenizer. So only the worker knows whether a
text is too long; lists of token ids are checked here.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from penstock.gateway.apis.chat.prepare import PreparedRequest
from penstock.gateway.apis.requests import EmbeddingRequest, Inputs, TokenIds, parse_embedding
from penstock.gateway.base.common import resolve_deadline_s, resolve_priority
from penstock.gateway.base.errors import invalid, unsupported
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Embedder
from penstock.schemas.requests import EMBEDDING, Embedding, GenerateRequest, Stop
from penstock.schemas.wire import pack_tokens

PATH = "/v1/embeddings"
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
