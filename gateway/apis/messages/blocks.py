"""Content blocks of the Messages API as chat messages, and where each message came from. Pure."""

from collections.abc import Sequence

import msgspec

from penstock.gateway.apis.chat.bodies import ChatMessage, ContentPart, FunctionCall, ToolCall
from penstock.gateway.apis.messages.bodies import ContentBlock, ImageSource, InputMessage
from penstock.gateway.base.errors import invalid, unsupported

_json = msgspec.json.encode


class Conversation:
    """Chat messages made of messages with blocks. Results of tools become messages of their own.

    Attributes:
        messages: so far.
        places: from a field of a chat message to the client's.
        references: names of tools in ``tool_reference`` blocks.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.places: dict[str, str] = {}
        self.references: set[str] = set()

    def instruct(self, system: str | Sequence[ContentBlock]) -> None:
        text = system if isinstance(system, str) else _texts(system, "system")
        if text:
            self._append(ChatMessage("system", text), "system")

    def add(self, message: InputMessage, at: str) -> None:
        """
        Raises:
            ServingError: a block that is not supported here, or lacks something.
        """
        if isinstance(message.content, str):
            self._append(ChatMessage(message.role, message.content), at)
        elif message.role == "assistant":
            self._assistant(message.content, f"{at}.content")
        elif message.role == "system":
            self._append(ChatMessage("system", _texts(message.content, f"{at}.content")), at)
        else:
            self._user(message.content, f"{at}.content")

    def _user(self, blocks: Sequence[ContentBlock], at: str) -> None:
        parts: list[ContentPart] = []
        places: list[str] = []
        for number, block in enumerate(blocks):
            here = f"{at}[{number}]"
            if block.type == "tool_result":
                self._spoken(parts, places)
                parts, places = [], []
                self._tool_result(block, here)
            else:
                parts.append(_part(block, here))
                places.append(here)
        self._spoken(parts, places)

    def _spoken(self, parts: list[ContentPart], places: list[str]) -> None:
        if not parts:
            return
        name = f"messages[{len(self.messages)}]"
        for number, place in enumerate(places):
            self.places[f"{name}.content[{number}]"] = place
            self.places[f"{name}.content[{number}].image_url"] = f"{place}.source"
        self._append(ChatMessage("user", parts), places[0])

    def _tool_result(self, block: ContentBlock, at: str) -> None:
        content: str | list[ContentPart]
        if isinstance(block.content, list):
            content = [self._result_part(part, f"{at}.content[{number}]") for number, part in enumerate(block.content)]
        else:
            content = block.content or ""
        call = _needed(block.tool_use_id, f"{at}.tool_use_id")
        self._append(ChatMessage("tool", content, tool_call_id=call), at)

    def _result_part(self, block: ContentBlock, at: str) -> ContentPart:
        if block.type != "tool_reference":
            return _part(block, at)
        name = _needed(block.tool_name, f"{at}.tool_name")
        self.references.add(name)
        return ContentPart("text", name)

    def _assistant(self, blocks: Sequence[ContentBlock], at: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for number, block in enumerate(blocks):
            here = f"{at}[{number}]"
            match block.type:
                case "text":
                    texts.append(_needed(block.text, f"{here}.text"))
                case "thinking":
                    thoughts.append(_needed(block.thinking, f"{here}.thinking"))
                case "redacted_thinking":
                    pass  # nothing of ours: reasoning is never redacted here
                case "tool_use":
                    name, arguments = _needed(block.name, f"{here}.name"), _json(block.input or {}).decode()
                    calls.append(ToolCall(FunctionCall(name, arguments), id=_needed(block.id, f"{here}.id")))
                case other:
                    raise _unsupported(other, here, "'text', 'thinking' or 'tool_use'")
        self._append(
            ChatMessage(
                "assistant",
                "".join(texts) if texts or not (calls or thoughts) else None,
                tool_calls=calls or None,
                reasoning_content="".join(thoughts) if thoughts else None,
            ),
            at.removesuffix(".content"),
        )

    def _append(self, message: ChatMessage, place: str) -> None:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)


def _texts(blocks: Sequence[ContentBlock], at: str) -> str:
    for number, block in enumerate(blocks):
        if block.type != "text":
            raise _unsupported(block.type, f"{at}[{number}]", "'text'")
    return "\n".join(_needed(block.text, f"{at}[{number}].text") for number, block in enumerate(blocks))


def _part(block: ContentBlock, at: str) -> ContentPart:
    if block.type == "text":
        return ContentPart("text", _needed(block.text, f"{at}.text"))
    if block.type == "image":
        if block.source is None:
            raise invalid(f"{at}.source", f"{at}.source is missing")
        return ContentPart("image_url", image_url=_url(block.source, f"{at}.source"))
    raise _unsupported(block.type, at, "'text', 'image' or 'tool_result'")


def _url(source: ImageSource, at: str) -> str:
    if source.type == "url":
        return _needed(source.url, f"{at}.url")
    if source.type == "base64":
        kind = _needed(source.media_type, f"{at}.media_type")
        if not kind.startswith("image/") or "," in kind or ";" in kind:
            raise invalid(f"{at}.media_type", f"{at}.media_type {kind[:40]!r} is not the media type of an image")
        return f"data:{kind};base64,{_needed(source.data, f'{at}.data')}"
    raise unsupported(f"{at}.type", f"{at}.type {source.type[:40]!r} is not supported; use 'base64' or 'url'")


def _unsupported(kind: str, at: str, known: str) -> Exception:
    return unsupported(f"{at}.type", f"{at}: blocks of type {kind[:40]!r} are not supported here; use {known}")


def _needed(value: str | None, at: str) -> str:
    if value is None:
        raise invalid(at, f"{at} is missing")
    return value
