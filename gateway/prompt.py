"""From messages or text to the prompt's tokens: the chat template, placeholders of images, the tokenizer. Pure."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from configs.chat_template import TemplateError
from configs.modeldir import ModelDir, Vision
from gateway.media import Part
from gateway.openai import ChatBody, invalid, unsupported
from gateway.target import Target
from schemas.errors import Code, ServingError

_OWN_VARIABLES = {"messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt"}
_PROBE_CHARS_PER_TOKEN = 16  # text above this ratio is probed by its start before all of it is tokenised


def render(body: ChatBody, messages: list[dict[str, Any]], model: ModelDir) -> str:
    if model.template is None:
        raise unsupported(
            "messages", f"model {model.name!r} has no chat template; use /v1/completions or start with --chat-template"
        )
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    if taken := _OWN_VARIABLES & variables.keys():
        raise invalid("chat_template_kwargs", f"chat_template_kwargs cannot set {sorted(taken)}")
    tools = body.tools if body.tool_choice != "none" else None
    try:
        return model.template.render(messages, tools, **variables)
    except TemplateError as error:
        raise invalid("messages", f"the model's chat template refuses these messages: {str(error)[:300]}") from None


def tokens_with_images(
    body: ChatBody, messages: list[dict[str, Any]], media: Sequence[Part], vision: Vision, target: Target
) -> list[int]:
    """The prompt of a model that sees: with one placeholder per medium, and none that a client wrote.

    The image token's text in a message would become the token. Such a text is cut in two by a mark that nobody can
    know before, and the pieces are tokenised apart: it stays text, read as it was written.

    Raises:
        ServingError: too many media; the template does not write one placeholder for each.
    """
    if len(media) > target.max_images:
        raise invalid(
            media[target.max_images].field,
            f"the request has {len(media)} images, and the limit is {target.max_images} (--max-images)",
        )
    token = vision.image_token
    text = render(body, messages, target.model)
    given = (messages, body.tools, body.chat_template_kwargs)
    if text.count(token) == len(media) and not (media and _holds(given, token)):
        tokens = encode(text, target, special=False)
    else:
        mark = secrets.token_hex(16)
        messages, tools, variables = _replaced(list(given), token, token[:1] + mark + token[1:])
        body = msgspec.structs.replace(body, tools=tools, chat_template_kwargs=variables)
        tokens = []
        for piece in render(body, messages, target.model).split(mark):
            if len(tokens) >= target.limit:
                raise too_long(f"at least {len(tokens)} tokens", target.limit)
            tokens += encode(piece, target, special=False)
    if (found := tokens.count(vision.image_token_id)) != len(media):
        raise invalid(
            media[0].field if media else "messages",
            f"the model's chat template writes {found} image placeholders for {len(media)} images; give images in user "
            "messages, or start with another --chat-template",
        )
    return tokens


def _holds(value: Any, text: str) -> bool:
    """Whether a text is anywhere in a JSON value."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, dict):
        return any(text in key or _holds(inner, text) for key, inner in value.items())
    return isinstance(value, list | tuple) and any(_holds(inner, text) for inner in value)


def _replaced(value: Any, old: str, new: str) -> Any:
    """A JSON value with a text replaced wherever it is."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {key.replace(old, new): _replaced(inner, old, new) for key, inner in value.items()}
    return [_replaced(inner, old, new) for inner in value] if isinstance(value, list) else value


def encode(text: str, target: Target, *, special: bool) -> list[int]:
    """Token ids; refuses text that cannot fit before paying for all of its tokenisation."""
    limit = target.limit

    def encode(part: str) -> list[int]:  # the batch form: no offsets (a fifth faster), and it frees the GIL
        ids: list[int] = target.model.tokenizer.encode_batch_fast([part], add_special_tokens=special)[0].ids
        return ids

    if len(text) > limit * _PROBE_CHARS_PER_TOKEN:
        longest = target.model.detokenizer.longest_bytes
        if len(text) > limit * longest:
            raise too_long(
                f"{len(text)} characters, more than {limit} tokens of at most {longest} bytes can hold", limit
            )
        # cut anywhere: at most the last word is split differently, so its count can only be a little too high
        start = len(encode(text[: limit * _PROBE_CHARS_PER_TOKEN]))
        if start > limit + _PROBE_CHARS_PER_TOKEN:
            raise too_long(f"at least {start} tokens", limit)
    return encode(text)


def too_long(what: str, limit: int) -> ServingError:
    return ServingError(
        Code.context_length_exceeded,
        f"the prompt has {what}; this model takes {limit} tokens, prompt and answer together. Shorten the prompt.",
        param=None,
    )
