"""Answers and chunks, in the OpenAI API's own shape, with types; and what can go wrong, as exceptions.

An exception's ``code`` is one of the documented error codes; its ``message`` says what to do. A position is a small
value from which another process can continue to read.
"""

from typing import Any, Literal

import msgspec


class PenstockError(Exception):
    """A request failed, or cannot be answered now. ``code`` is for programs, ``message`` for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class InvalidRequest(PenstockError):
    """The request itself is at fault: the same request fails again."""


class NotFound(PenstockError):
    """No such model, or no such request: it was never accepted, or its record has expired."""


class Conflict(PenstockError):
    """The idempotency key was used for another request within the last 24 hours."""


class Overloaded(PenstockError):
    """Refused for now: the queue is full. Try again later."""


class Cancelled(PenstockError):
    """The request was cancelled."""


class DeadlineExceeded(PenstockError):
    """The request did not finish within its own deadline (``timeout_s``)."""


class Timeout(PenstockError):
    """The client's own timeout has passed. The request continues: resume from its position, or cancel it."""


class Disconnected(PenstockError):
    """The connection is closed for good. The request continues: resume from its position with another client."""


_KINDS: dict[str, type[PenstockError]] = {
    "invalid_request": InvalidRequest,
    "context_length_exceeded": InvalidRequest,
    "body_too_large": InvalidRequest,
    "unsupported": InvalidRequest,
    "poisoned_request": InvalidRequest,
    "model_not_found": NotFound,
    "request_not_found": NotFound,
    "idempotency_conflict": Conflict,
    "queue_full": Overloaded,
    "overloaded": Overloaded,
    "cancelled": Cancelled,
    "deadline_exceeded": DeadlineExceeded,
    "timeout": Timeout,
    "disconnected": Disconnected,
}


def error(code: str, message: str) -> PenstockError:
    """The exception for a code; codes without a class of their own are a plain ``PenstockError``."""
    return _KINDS.get(code, PenstockError)(code, message or code)


Kind = Literal["chat", "text"]


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """``str`` converts it to text, ``Position.parse`` back.

    Attributes:
        key: the idempotency key of the request.
        next: number of the first message that was not read.
    """

    key: str
    next: int = 0
    kind: Kind = "chat"
    stream: bool = False

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> "Position":
        """
        Raises:
            ValueError: not the text of a position.
        """
        try:
            parsed = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"{text[:80]!r} is not a position: {problem}") from None
        if not parsed.key or parsed.next < 0:
            raise ValueError(f"{text[:80]!r} is not a position: it needs a key, and a number of at least 0")
        return parsed


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call. In a chunk, a part of the call with this ``index``."""

    function: Function = Function()
    id: str | None = None
    type: str | None = None
    index: int = 0


class Message(msgspec.Struct, frozen=True):
    """The model's message. In a chunk, the new part."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One of ``n`` answers: ``message`` of a chat, ``delta`` of its chunks, ``text`` of a completion and its chunks."""

    index: int
    finish_reason: str | None = None
    message: Message = Message()
    delta: Message = Message()
    text: str | None = None
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None

    @property
    def content(self) -> str:
        """Its text, whichever field has it."""
        return self.text or self.message.content or self.delta.content or ""


class _Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    created: int = 0
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    prompt_logprobs: list[Any] | None = None
    position: Position = Position("")  # after this; set by the client, not on the wire
    request: str = ""  # the request's id, as in GET /v1/requests/<id>

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return next((choice.content for choice in self.choices if choice.index == 0), "")


class Answer(_Completion, frozen=True, kw_only=True):
    """A whole answer."""


class Chunk(_Completion, frozen=True, kw_only=True):
    """A part of a streamed answer.

    ``replaces``: this is the whole answer, in place of all chunks before it. It comes when a stream with several
    choices is resumed so late (more than an hour) that only its record is left.
    """

    replaces: bool = False


_answer = msgspec.json.Decoder(Answer).decode
_chunk = msgspec.json.Decoder(Chunk).decode


def read_answer(body: bytes, position: Position, request: str) -> Answer:
    """
    Raises:
        PenstockError: not an answer.
    """
    try:
        return msgspec.structs.replace(_answer(body), position=position, request=request)
    except msgspec.MsgspecError as problem:
        raise _unreadable(problem) from None


def read_chunk(body: bytes, position: Position, request: str, *, replaces: bool = False) -> Chunk:
    """
    Raises:
        PenstockError: not a chunk.
    """
    try:
        return msgspec.structs.replace(_chunk(body), position=position, request=request, replaces=replaces)
    except msgspec.MsgspecError as problem:
        raise _unreadable(problem) from None


class _Detail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Error(msgspec.Struct):
    error: _Detail


def read_error(body: bytes, code: str) -> PenstockError:
    """The exception of an error body."""
    try:
        detail = msgspec.json.decode(body, type=_Error).error
    except msgspec.MsgspecError:
        return error(code or "internal", body[:200].decode(errors="replace"))
    return error(code or detail.code or "internal", detail.message)


def _unreadable(problem: Exception) -> PenstockError:
    return error("internal", f"the answer cannot be read by this version of the client: {problem}")


def kind_of(body: dict[str, Any]) -> Kind:
    return "chat" if "messages" in body else "text"
