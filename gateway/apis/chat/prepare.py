"""From the body of a chat completion or completion to a GenerateRequest: parse, prompt, options, request.

Pure but for random numbers. Blocks for as long as tokenisation takes (about 1 ms per 1,000 tokens), so an event loop
runs large bodies in a thread. A chat with images takes two steps: ``prepare_chat`` returns a ``PendingMediaRequest``
that names the media, and ``attach_media`` completes it once they are stored.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from penstock.gateway.apis.chat.constraint import Wanted
from penstock.gateway.apis.chat.options import GenerationOptions, resolve_options
from penstock.gateway.apis.chat.prompt import Prompt, chat_prompt, completion_prompt, expand_media, truncated
from penstock.gateway.base.common import CHAT, COMPLETION, random_seed, resolve_deadline_s, resolve_priority
from penstock.gateway.base.prepare_context import PrepareContext
from penstock.schemas.blocks import chain, media_extra, root
from penstock.schemas.requests import TEXT_ONLY, GenerateRequest, Media, Shown
from penstock.schemas.wire import pack_tokens


class PreparedRequest(NamedTuple):
    """A request that can be published, and how its client wants the answer.

    Attributes:
        detached: it continues when its client disconnects.
        wanted: where the request's constraint comes from.
        repeated: it was made before, under the same key; the client asks again.
    """

    request: GenerateRequest
    prompt_tokens: int
    stream: bool
    include_usage: bool
    detached: bool = False
    repeated: bool = False
    wanted: Wanted | None = None


class PendingMediaRequest(NamedTuple):
    """A chat with images, checked as far as possible without them.

    Attributes:
        deadline_s: counted from ``now_ns``.
    """

    body: ChatCompletionRequest
    prompt: Prompt
    deadline_s: float
    now_ns: int
    request_id: str
    no_store: bool = False


def prepare_chat(
    data: bytes,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest | PendingMediaRequest:
    """
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    return prepare_chat_body(parse_chat(data), context, now_ns=now_ns, request_id=request_id, seed=seed)


def prepare_chat_body(
    body: ChatCompletionRequest,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest | PendingMediaRequest:
    """A chat that ``check_chat`` accepts, in whichever API it was written.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    context.check_model(body.model)
    prompt = truncated(chat_prompt(body, context), body, context)
    options = resolve_options(
        body, prompt.tokens, prompt.min_tokens, context, seed
    )  # before media are fetched for an invalid body
    if prompt.media:
        deadline_s = resolve_deadline_s(body, context.default_deadline_s)
        no_store = context.no_store or bool(body.no_store)
        return PendingMediaRequest(body, prompt, deadline_s, now_ns, request_id, no_store)
    return _prepared(body, CHAT, prompt.tokens, options, context, now_ns=now_ns, request_id=request_id)


def count_prompt(body: ChatCompletionRequest, context: PrepareContext) -> int:
    """Tokens of a chat's prompt; of an embedding file, one.

    Raises:
        ServingError: the chat cannot be served; names the field and the limit.
    """
    context.check_model(body.model)
    return chat_prompt(body, context).min_tokens


def attach_media(
    pending: PendingMediaRequest,
    media: Sequence[Media],
    context: PrepareContext,
    *,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """
    Args:
        media: stored, in the order of ``pending.prompt.media``; positions are set here.
    Raises:
        ServingError: with all tokens of its media, the prompt is too long.
    """
    body, prompt, _, now_ns, request_id, _ = pending
    vision = context.model.vision
    assert vision is not None
    length = len(prompt.tokens) - len(media) + sum(medium.tokens for medium in media)
    options = resolve_options(body, prompt.tokens, length, context, seed)
    tokens, placed = expand_media(prompt, media, vision.image_token_id)
    return _prepared(body, CHAT, tokens, options, context, now_ns=now_ns, request_id=request_id, media=placed)


def prepare_completion(
    data: bytes,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_completion(data)
    context.check_model(body.model)
    prompt = truncated(completion_prompt(body, context), body, context)
    options = resolve_options(body, prompt.tokens, prompt.min_tokens, context, seed)
    return _prepared(body, COMPLETION, prompt.tokens, options, context, now_ns=now_ns, request_id=request_id)


def _prepared(
    body: ChatCompletionRequest | CompletionRequest,
    endpoint: str,
    tokens: list[int],
    options: GenerationOptions,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    media: tuple[Media, ...] = (),
) -> PreparedRequest:
    model = context.model
    prompt = pack_tokens(tokens)
    salt = context.salt(body.cache_salt or "")
    extra = media_extra(((m.position, m.tokens, m.digest) for m in media), context.block_size) if media else None
    request = GenerateRequest(
        id=request_id,
        model=context.names[0],
        gateway=context.gateway,
        prompt=prompt,
        stop=options.stop,
        created_ns=now_ns,
        deadline_ns=now_ns + int(resolve_deadline_s(body, context.default_deadline_s) * 1e9),
        digests=chain(prompt, context.block_size, root(context.revision or model.revision, salt=salt), extra),
        block_size=context.block_size,
        sampling=options.sampling,
        n=body.n or 1,
        priority=resolve_priority(body.priority, body.service_tier, context.priority),
        user=body.user or "",
        salt=salt,
        media=media,
        worker=body.worker or "",
        endpoint=endpoint,
        stops_shown=bool(body.include_stop_str_in_output),
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        unanswered=body.max_tokens == 0,
        revision="" if body.worker else context.revision,  # a named worker is wanted whatever revision it serves
        tokenizer=model.tokenizer_digest,
        parsing=options.parsing,
        no_store=context.no_store or bool(body.no_store),
        session=body.prompt_cache_key or "",
        tenant=context.tenant,
        constraint=options.wanted.constraint if options.wanted is not None else None,
        shown=_shown(body),
    )
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return PreparedRequest(request, len(tokens), bool(body.stream), usage, wanted=options.wanted)


def _shown(body: ChatCompletionRequest | CompletionRequest) -> Shown:
    stream = body.stream_options
    usage = stream is not None and bool(stream.continuous_usage_stats)
    if not (body.return_token_ids or body.return_tokens_as_token_ids or usage):
        return TEXT_ONLY
    return Shown(bool(body.return_token_ids), bool(body.return_tokens_as_token_ids), usage)
