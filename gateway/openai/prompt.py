"""From messages or text to the prompt's tokens: the chat template, placeholders of images, the tokenizer. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.media.media import MediaPart
from gateway.openai.prepare_context import PrepareContext
from gateway.openai.requests import ChatCompletionRequest, invalid, unsupported
from infra.model.chat_template import TemplateError
from infra.model.modeldir import ModelDir, Vision
from schemas.errors import Code, ServingError

_PROBE_CHARS_PER_TOKEN = 16  # text above this ratio is probed by its start before all of it is tokenised


def render(body: ChatCompletionRequest, messages: list[dict[str, Any]], model: ModelDir) -> str:
    if model.template is None:
        raise unsupported(
            "messages", f"model {model.name!r} has no chat template; use /v1/completions or start with --chat-template"
        )
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    if taken := model.template.own_variables & variables.keys():
        raise invalid("chat_template_kwargs", f"chat_template_kwargs cannot set {sorted(taken)}")
    tools = body.tools if body.tool_choice != "none" else None
    try:
        return model.template.render(messages, tools, **variables)
    except TemplateError as error:
        raise invalid("messages", f"the model's chat template refuses these messages: {str(error)[:300]}") from None


def prompt_tokens(body: ChatCompletionRequest, messages: list[dict[str, Any]], context: PrepareContext) -> list[int]:
    """The prompt as ``apply_chat_template`` and the tokenizer make it, but that clients' text stays text.

    Raises:
        ServingError: the template refuses the messages; the prompt is too long.
    """
    try:
        return _prompt_tokens(body, messages, context)
    except RecursionError:
        raise invalid("messages", "tools, arguments or variables are nested too deeply") from None


def _prompt_tokens(body: ChatCompletionRequest, messages: list[dict[str, Any]], context: PrepareContext) -> list[int]:
    plain, only_image = context.model.plain, not context.plain
    if not plain.found(messages, body.tools, body.chat_template_kwargs, only_image=only_image):
        return encode(render(body, messages, context.model), context, special=False)
    text, mark = "", ""
    for mark in plain.marks(messages, body.tools, body.chat_template_kwargs):
        inert = plain.marked(messages, mark, only_image=only_image)
        tools = plain.marked_value(body.tools, mark, only_image=only_image)
        variables = plain.marked_value(body.chat_template_kwargs, mark, only_image=True)
        if plain.found(inert, tools, variables, only_image=only_image):
            break  # what normalising makes of it is a control token
        marked = msgspec.structs.replace(body, tools=tools, chat_template_kwargs=variables)
        text = render(marked, inert, context.model)
        check_length(text, context, special=False)
        tokens = plain.encode(text, mark)
        if tokens is not None:
            return tokens
    if not text:
        raise invalid("messages", "the messages have text of a control token that cannot be kept apart from the token")
    tokens = []
    for piece in text.split(mark):  # apart: it stays text, read as it was written
        tokens += encode(piece, context, special=False)
    return tokens


def tokens_with_images(
    body: ChatCompletionRequest,
    messages: list[dict[str, Any]],
    media: Sequence[MediaPart],
    vision: Vision,
    context: PrepareContext,
) -> list[int]:
    """The prompt of a model that sees: with one placeholder per medium, and none that a client wrote.

    Raises:
        ServingError: too many media; the template does not write one placeholder for each.
    """
    if len(media) > context.max_images:
        raise invalid(
            media[context.max_images].field,
            f"the request has {len(media)} images, and the limit is {context.max_images} (--max-images)",
        )
    tokens = prompt_tokens(body, messages, context)
    if (found := tokens.count(vision.image_token_id)) != len(media):
        raise invalid(
            media[0].field if media else "messages",
            f"the model's chat template writes {found} image placeholders for {len(media)} images; give images in user "
            "messages, or start with another --chat-template",
        )
    return tokens


def encode(text: str, context: PrepareContext, *, special: bool) -> list[int]:
    """Token ids; refuses text that cannot fit before paying for all of its tokenisation."""
    if len(text) > context.limit * _PROBE_CHARS_PER_TOKEN:
        check_length(text, context, special=special)
    return _encode(text, context, special)


def check_length(text: str, context: PrepareContext, *, special: bool) -> None:
    """
    Raises:
        ServingError: the text has more tokens than fit, as far as its length and its beginning tell.
    """
    limit = context.limit
    if len(text) <= limit * _PROBE_CHARS_PER_TOKEN:
        return
    longest = context.model.detokenizer.longest_bytes
    if len(text) > limit * longest:
        raise too_long(f"{len(text)} characters, more than {limit} tokens of at most {longest} bytes can hold", limit)
    # cut anywhere: at most the last word is split differently, so its count can only be a little too high
    start = len(_encode(text[: limit * _PROBE_CHARS_PER_TOKEN], context, special))
    if start > limit + _PROBE_CHARS_PER_TOKEN:
        raise too_long(f"at least {start} tokens", limit)


def _encode(
    text: str, context: PrepareContext, special: bool
) -> list[int]:  # the batch form: no offsets, and it frees the GIL
    ids: list[int] = context.model.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def too_long(what: str, limit: int) -> ServingError:
    return ServingError(
        Code.context_length_exceeded,
        f"the prompt has {what}; this model takes {limit} tokens, prompt and answer together. Shorten the prompt.",
        param=None,
    )
