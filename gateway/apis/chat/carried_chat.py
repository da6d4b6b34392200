"""The chat that a request carries beside its prompt, for a server that makes prompts itself. Pure.

It is the client's: what it did not say is left to the server. Images and videos go along as their URLs; in the prompt,
which counts tokens and names blocks here, each is a line of text.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from blake3 import blake3

from penstock.gateway.apis.chat.bodies import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    MediaUrl,
    thinking_variables,
)
from penstock.gateway.apis.chat.constraint import asked_of_content
from penstock.gateway.apis.chat.prompt import MEDIA_FIELDS, media_parts
from penstock.gateway.base.request_bodies import PrepareContext, invalid, unsupported
from penstock.gateway.media.sources import MediaPart
from penstock.infra.constraints.constraint_grammar import JSON_SCHEMA

MAX_INLINE_BYTES = 1 << 20  # of data: URLs: the log and the work streams hold them
_AS_GIVEN = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "ignore_eos", "min_tokens", "stop_token_ids", "skip_special_tokens", "logprobs", "top_logprobs"),
    *("reasoning_effort", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message"),
)
_NOT_THERE = ("truncate_prompt_tokens", "max_thinking_tokens", "thinking_token_budget", "logits_processors")


def carried_chat(body: ChatCompletionRequest, max_tokens: int | None) -> bytes:
    """The chat as JSON.

    Args:
        max_tokens: of the answer; None: the server decides.
    Raises:
        ServingError: unsupported: an option that a server of chats has no name for.
    """
    for name in _NOT_THERE:
        if getattr(body, name) is not None:
            raise unsupported(name, f"{name} is not supported: this model's server makes the prompt; leave it out")
    chat: dict[str, Any] = {"messages": [_message(number, each) for number, each in enumerate(body.messages)]}
    chat |= {name: value for name in _AS_GIVEN if (value := getattr(body, name)) is not None}
    variables = thinking_variables(body.thinking) or {}
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
    if variables:
        chat["chat_template_kwargs"] = {**variables, **chat.get("chat_template_kwargs", {})}
    if max_tokens is not None:
        chat["max_tokens"] = max_tokens
    if body.tools:
        chat["tools"] = body.tools
        chat |= {
            name: value for name in ("tool_choice", "parallel_tool_calls") if (value := getattr(body, name)) is not None
        }
    if (wanted := _response_format(body)) is not None:
        chat["response_format"] = wanted
    return msgspec.json.encode(chat)


def shown_as_text(body: ChatCompletionRequest, context: PrepareContext) -> ChatCompletionRequest:
    """The chat with a line of text in the place of each image and video, another one for each URL.

    Raises:
        ServingError: there are too many, they are too large, or no URLs that the server can read.
    """
    media = media_parts(body.messages)
    if not media:
        return body
    for kind, videos, limit in (("images", False, context.max_images), ("videos", True, context.max_videos)):
        parts = [part for part in media if part.video is videos]
        if len(parts) > limit:
            raise invalid(
                parts[limit].field, f"the request has {len(parts)} {kind}; the limit is {limit} (--max-{kind})"
            )
    size = 0
    for part in media:
        scheme = part.url[:8].partition(":")[0].lower()
        if part.embedding or scheme not in ("http", "https", "data"):
            raise unsupported(part.field, f"{part.field}: this model's server reads http:, https: and data: URLs only")
        size += len(part.url) if scheme == "data" else 0
        if size > MAX_INLINE_BYTES:
            raise invalid(
                part.field,
                f"data: URLs up to {part.field} have {size} bytes; the limit is {MAX_INLINE_BYTES} in all for this "
                "model's server. Name larger media by their http: or https: URL.",
            )
    return msgspec.structs.replace(
        body,
        messages=[
            msgspec.structs.replace(each, content=list(map(_as_text, each.content)))
            if isinstance(each.content, list)
            else each
            for each in body.messages
        ],
    )


class _Carried(msgspec.Struct):
    messages: list[ChatMessage]


def fetched_by_server(chat: bytes) -> list[MediaPart]:
    """The media of a carried chat that its server reads from elsewhere."""
    if b'_url"' not in chat:
        return []
    media = media_parts(msgspec.json.decode(chat, type=_Carried).messages)
    return [part for part in media if part.url[:5].lower() != "data:"]


def _url_of(part: ContentPart) -> tuple[str, MediaUrl] | None:
    name = MEDIA_FIELDS.get(part.type)
    value = getattr(part, name) if name else None
    if name is None or value is None:
        return None
    return name, MediaUrl(value) if isinstance(value, str) else value


def _as_text(part: ContentPart) -> ContentPart:
    if (found := _url_of(part)) is None:
        return part
    name, value = found
    return ContentPart("text", f"[{name.removesuffix('_url')} {blake3(value.url.encode()).hexdigest(8)}]")


def _message(number: int, message: ChatMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        out["content"] = list(_parts(message.content))
    else:  # llama-cpp-python fails on a message without, and on null
        out["content"] = message.content or ""
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id), ("reasoning_content", thought)):
        if value is not None:
            out[key] = value
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id or f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _text(call.function.arguments)},
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return out


def _parts(content: list[ContentPart]) -> Iterator[dict[str, Any]]:
    for part in content:
        if (found := _url_of(part)) is None:
            yield {"type": "text", "text": part.text or ""}
        else:
            name, value = found
            detail = {"detail": value.detail} if value.detail else {}
            yield {"type": name, name: {"url": value.url, **detail}}


def _text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else msgspec.json.encode(arguments).decode()


def _response_format(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """What the content must match, in the one form that servers share; None: anything.

    Raises:
        ServingError: it is not a JSON schema.
    """
    asked = asked_of_content(body)
    if asked is None:
        return None
    field, constraint = asked
    if constraint.kind != JSON_SCHEMA:
        raise unsupported(field, f"{field} is not supported: this model's server takes JSON schemas only")
    given = body.response_format
    if given is not None and given.type == "json_object" and given.schema is None:
        return {"type": "json_object"}
    named = given.json_schema if given is not None else None
    schema: dict[str, Any] = {"name": "answer", "strict": True, "schema": msgspec.json.decode(constraint.text)}
    if named is not None:
        given_too = {"name": named.name, "strict": named.strict, "description": named.description}
        schema = schema | {key: value for key, value in given_too.items() if value is not None}
    return {"type": "json_schema", "json_schema": schema}
