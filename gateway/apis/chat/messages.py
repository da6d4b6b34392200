"""Chat messages as chat templates expect them, and the images that they name."""

import json
from collections.abc import Set
from itertools import groupby
from typing import Any

from penstock.gateway.apis.chat.bodies import ChatMessage, ContentPart, MediaUrl, ToolCall
from penstock.gateway.base.errors import invalid, unsupported
from penstock.gateway.media.sources import MediaPart

# type of content part -> field with the URL
_MEDIA_FIELDS = {"image_url": "image_url", "input_image": "image_url", "image_embeds": "image_embeds"}


def template_messages(messages: list[ChatMessage], walks_parts: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """Messages for a chat template.

    Content is one string, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image"}``: with images, and
    where the template walks such lists. Arguments of tool calls are objects; those that the model did not write as one
    are text.

    Args:
        walks_parts: roles in whose messages the template writes each part of a list. Elsewhere texts are joined with a
            line break, so that their words do not merge.
    Raises:
        ServingError: a content part that is not supported.
    """
    return [
        {"role": message.role, "content": message.content}
        if message.content.__class__ is str and message.role == "user" and message.name is None
        else _template_message(f"messages[{number}]", message, message.role in walks_parts)
        for number, message in enumerate(messages)
    ]


def media_parts(messages: list[ChatMessage]) -> list[MediaPart]:
    """Images and embedding files in the order of the messages, which ``template_messages`` has accepted."""
    parts = []
    for number, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for i, part in enumerate(message.content):
            if name := _MEDIA_FIELDS.get(part.type):
                value: MediaUrl | str = getattr(part, name)
                url = value if isinstance(value, str) else value.url
                parts.append(MediaPart(f"messages[{number}].content[{i}].{name}", url, name == "image_embeds"))
    return parts


def _template_message(field: str, message: ChatMessage, walks: bool) -> dict[str, Any]:
    # Clients send our answers back, and those may consist of tool calls or truncated reasoning alone.
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    may_be_empty = message.role == "assistant" and (message.tool_calls or thought is not None)
    if message.content is None and not may_be_empty:
        raise invalid(f"{field}.content", f"{field}.content is missing")
    out: dict[str, Any] = {"role": message.role, "content": _content(field, message.role, message.content, walks)}
    for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id), ("reasoning_content", thought)):
        if value is not None:
            out[key] = value
    if message.tool_calls:
        out["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return out


def _content(field: str, role: str, content: str | list[ContentPart] | None, walks: bool) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        _check_part(f"{field}.content[{i}]", role, part)
    if walks and content:
        return [
            {"type": "text", "text": part.text or ""} if part.type == "text" else {"type": "image"} for part in content
        ]
    if all(part.type == "text" for part in content):
        return "\n".join(part.text or "" for part in content)
    parts: list[dict[str, str]] = []
    for is_text, run in groupby(content, lambda part: part.type == "text"):
        if is_text:  # joined here, since the template might merge their words
            parts.append({"type": "text", "text": "\n".join(part.text or "" for part in run)})
        else:
            parts += [{"type": "image"} for _ in run]
    return parts


def _check_part(field: str, role: str, part: ContentPart) -> None:
    if part.type == "text":
        if part.text is None:
            raise invalid(f"{field}.text", f"{field}.text is missing")
    elif name := _MEDIA_FIELDS.get(part.type):
        if getattr(part, name) is None:
            raise invalid(f"{field}.{name}", f"{field}.{name} is missing")
        if role not in ("user", "tool"):
            raise unsupported(
                f"{field}.{name}", f"images are not supported in {role} messages; put them into user messages"
            )
    else:
        raise unsupported(
            f"{field}.type",
            f"content parts of type {part.type[:40]!r} are not supported; use 'text', 'image_url' or 'image_embeds'",
        )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}


def _arguments(call: ToolCall) -> Any:
    """Arguments as templates take them. A conversation goes on whatever the model wrote, as when a limit cut it off."""
    given = call.function.arguments
    if given is None:
        return {}
    if isinstance(given, list):
        return json.dumps(given, ensure_ascii=False)
    if isinstance(given, dict):
        return given
    try:
        value = json.loads(given or "{}", strict=False)  # strings may hold line breaks
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else {} if value is None else given


def as_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages for a template that takes objects alone: text that is none is under one name. None: all are objects."""
    found = False
    out = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], str):
                found = True
                function = {**function, "arguments": {"arguments": function["arguments"]}}
            calls.append({**call, "function": function})
        out.append({**message, "tool_calls": calls} if calls else message)
    return out if found else None
