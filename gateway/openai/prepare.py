"""An HTTP body becomes a GenerateRequest: parsed, its prompt made, its options settled, its blocks named.

Pure but for random numbers; blocking for as long as tokenisation takes (about 1 ms per 1,000 tokens), so callers
with an event loop run large bodies in a thread. A conversation with images needs two steps: its
``PendingMediaRequest`` names the media, and ``finish`` takes them once they are stored.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gateway.media.media import MediaPart
from gateway.openai.options import deadline_of, max_tokens_of, output_limit, sampling_of, stop_of
from gateway.openai.prepare_context import PrepareContext
from gateway.openai.prompt import encode, prompt_tokens, tokens_with_images
from gateway.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    invalid,
    media_parts,
    parse_chat,
    parse_text,
    prompt_of,
    template_messages,
    unsupported,
)
from gateway.parsers.registry import parsing
from schemas.blocks import chain, media_extra, root
from schemas.errors import Code, ServingError
from schemas.ids import new_request_id
from schemas.requests import GenerateRequest, Media, Parsing, Priority
from schemas.wire import pack_tokens

CHAT = "chat"
TEXT = "text"

TIERS = {"flex": Priority.batch, "priority": Priority.interactive}


class PreparedRequest(NamedTuple):
    """A request that can be published, and how its answer is wanted."""

    request: GenerateRequest
    prompt_tokens: int
    stream: bool
    include_usage: bool


class PendingMediaRequest(NamedTuple):
    """A conversation with images, checked as far as it can be without them.

    Attributes:
        tokens: the prompt, with one placeholder per medium.
        media: what to load, in the order of the placeholders.
        deadline_s: from ``now_ns`` on.
    """

    body: ChatCompletionRequest
    tokens: list[int]
    media: list[MediaPart]
    now_ns: int
    request_id: str | None
    deadline_s: float


def random_seed() -> int:
    return secrets.randbits(63)


def prepare_chat(
    data: bytes,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str | None = None,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest | PendingMediaRequest:
    """A chat completion body, ready to be published, or waiting for its media.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_chat(data)
    _check_model(body.model, context)
    messages = template_messages(body.messages)
    media = media_parts(body.messages)
    vision = context.model.vision
    if vision is None and not media:
        tokens = prompt_tokens(body, messages, context)
        return _request(body, CHAT, tokens, context, now_ns, request_id, seed)
    if vision is None:
        raise unsupported(media[0].field, f"images: {context.model.no_vision}")
    tokens = tokens_with_images(body, messages, media, vision, context)
    if not media:
        return _request(body, CHAT, tokens, context, now_ns, request_id, seed)
    # as long as it will be at least, so that nothing is fetched for a prompt without room
    fewest = sum(1 if part.embedding else vision.image_tokens for part in media)
    output_limit(len(tokens) - len(media) + fewest, max_tokens_of(body), context)
    return PendingMediaRequest(body, tokens, media, now_ns, request_id, deadline_of(body, context))


def finish(
    draft: PendingMediaRequest,
    media: Sequence[Media],
    context: PrepareContext,
    *,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """The request of a draft whose media are stored: each placeholder becomes as many as its medium has tokens.

    Args:
        media: in the order of ``draft.media``; positions are set here.
    Raises:
        ServingError: it has become too long.
    """
    vision = context.model.vision
    assert vision is not None
    total = len(draft.tokens) - len(media) + sum(medium.tokens for medium in media)
    output_limit(total, max_tokens_of(draft.body), context)
    tokens: list[int] = []
    placed = []
    start = 0
    for medium in media:
        at = draft.tokens.index(vision.image_token_id, start)
        tokens += draft.tokens[start:at]
        placed.append(msgspec.structs.replace(medium, position=len(tokens)))
        tokens += [vision.image_token_id] * medium.tokens
        start = at + 1
    tokens += draft.tokens[start:]
    return _request(draft.body, CHAT, tokens, context, draft.now_ns, draft.request_id, seed, tuple(placed))


def prepare_text(
    data: bytes,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str | None = None,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """A text completion body, ready to be published.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_text(data)
    _check_model(body.model, context)
    prompt = prompt_of(body)
    if isinstance(prompt, str):
        prompt = encode(prompt, context, special=True)
    elif max(prompt, default=0) >= context.model.vocab_size:
        raise invalid("prompt", f"prompt has token id {max(prompt)}; ids are below {context.model.vocab_size}")
    vision = context.model.vision
    if vision is not None and vision.image_token_id in prompt:
        raise invalid("prompt", f"prompt has the image token {vision.image_token!r}; images go into chat completions")
    return _request(body, TEXT, prompt, context, now_ns, request_id, seed)


def _check_model(name: str, context: PrepareContext) -> None:
    if name not in context.names:
        served = ", ".join(repr(known) for known in context.names)
        raise ServingError(
            Code.model_not_found, f"model {name[:200]!r} is not served here; served: {served}", param="model"
        )


def _request(
    body: ChatCompletionRequest | CompletionRequest,
    endpoint: str,
    tokens: list[int],
    context: PrepareContext,
    now_ns: int,
    request_id: str | None,
    seed: Callable[[], int],
    media: tuple[Media, ...] = (),
) -> PreparedRequest:
    model = context.model
    prompt = pack_tokens(tokens)
    salt = body.cache_salt or ""
    extra = media_extra(((m.position, m.tokens, m.digest) for m in media), context.block_size) if media else None
    request = GenerateRequest(
        id=request_id or new_request_id(now_ns),
        model=context.names[0],
        gateway=context.gateway,
        prompt=prompt,
        stop=stop_of(body, output_limit(len(tokens), max_tokens_of(body), context), model),
        created_ns=now_ns,
        deadline_ns=now_ns + int(deadline_of(body, context) * 1e9),
        digests=chain(prompt, context.block_size, root(context.revision or model.revision, salt=salt), extra),
        block_size=context.block_size,
        sampling=sampling_of(body, len(tokens), context, seed),
        n=body.n or 1,
        priority=body.priority or TIERS.get(body.service_tier or "", Priority.standard),
        user=body.user or "",
        salt=salt,
        media=media,
        worker=body.worker or "",
        endpoint=endpoint,
        stops_shown=bool(body.include_stop_str_in_output),
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        unanswered=body.max_tokens == 0,
        revision="" if body.worker else context.revision,  # who names a worker wants that one, also on trial
        tokenizer=model.tokenizer_digest,
        parsing=_parsing(body, tokens, context)
        if context.parsers is not None and isinstance(body, ChatCompletionRequest)
        else None,
    )
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return PreparedRequest(request, len(tokens), bool(body.stream), usage)


def _parsing(body: ChatCompletionRequest, tokens: list[int], context: PrepareContext) -> Parsing | None:
    assert context.parsers is not None

    def prompt_end(count: int) -> str:
        text: str = context.model.tokenizer.decode(tokens[-count:], skip_special_tokens=False)
        return text

    tools = body.tools if body.tool_choice != "none" else None
    return parsing(context.parsers, tools, prompt_end, one_call=body.parallel_tool_calls is False)
