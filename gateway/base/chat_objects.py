"""Responses of the OpenAI API. Streamed chunks are assembled as bytes in
``penstock.gateway.apis.chat.stream_renderer``.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.infra.text.parsers.delta_builder import Delta
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.summary import State


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class UsageBody(Struct, frozen=True):
    """``completion_tokens`` includes end tokens; ``cached_tokens`` came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of chats


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None  # OpenAI's schema requires it


class TextLogprobs(Struct, frozen=True):
    """``text_offset``: characters before each token. An echoed prompt's first token has null log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """``rank``: of the token among all of the vocabulary, from 1; null if the engine does not report it."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Per prompt token, null for the first: log-probabilities of the token itself and of the alternatives, by token id."""


class FunctionMessage(Struct, frozen=True):
    """``arguments``: JSON as the model wrote it, not validated against the tool's schema."""

    name: str
    arguments: str


class CallMessage(Struct, frozen=True):
    id: str
    function: FunctionMessage
    type: Literal["function"] = "function"


class AnswerMessage(Struct, frozen=True):
    """``content`` is null if there is only reasoning or tool calls; reasoning is null if there is none."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[CallMessage] | UnsetType = UNSET
    refusal: None = None  # OpenAI's schema requires it
    function_call: FunctionMessage | UnsetType = UNSET


def message_of(
    whole: Delta, names: Sequence[str] = (), *, hidden: bool = False, as_function: bool = False
) -> AnswerMessage:
    """The message of an answer that its parser has taken apart.

    Args:
        names: of the fields with its reasoning.
        hidden: reasoning is left out.
        as_function: the call is in the field that OpenAI's API had before tools.
    """
    calls = [
        CallMessage(call.id or "", FunctionMessage(call.function.name or "", call.function.arguments))
        for call in whole.tool_calls or ()
    ]
    thought = None if hidden else whole.reasoning_content
    content = whole.content
    if content is None and not calls and whole.reasoning_content is None:
        content = ""
    called: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if calls and as_function:
        called = {"function_call": calls[0].function}
    return AnswerMessage(content, **called, **dict.fromkeys(names, thought))


class ChatChoice(Struct, frozen=True):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(Struct, frozen=True):
    """Response of POST /v1/chat/completions without streaming."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct, frozen=True):
    """Response of POST /v1/completions without streaming."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Struct, frozen=True):
    """One server-sent event of a streamed chat completion; the last one before [DONE] may carry the usage."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: UsageBody | None = None
    system_fingerprint: str | None = None


class ErrorDetail(Struct, frozen=True):
    """``code`` is a penstock.schemas.errors.Code, ``param`` the field with the error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    owned_by: str = "penstock"
    object: Literal["model"] = "model"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    input_modalities: tuple[Literal["text", "image"], ...] = ("text",)
    output_modalities: tuple[Literal["text", "image", "video", "embedding", "score"], ...] = ("text",)


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class CancelResponse(Struct, frozen=True, omit_defaults=True):
    """``cancelled``: a running request is being cancelled. ``state``: of a request that is over."""

    id: str
    cancelled: bool
    state: Literal["done", "failed", "cancelled"] | UnsetType = UNSET


class Status(Struct, frozen=True, omit_defaults=True):
    """``GET /v1/requests/{id}``. Times in seconds since 1970; ``result`` is the response without streaming."""

    id: str
    model: str
    state: State
    created: int
    deadline: int
    gateway: str = ""
    worker: str = ""
    attempt: int = 0
    output_tokens: int = 0  # images and videos: denoising steps done
    result: Any = None
    error: ErrorDetail | None = None
    client_request_id: str = ""  # the client's own X-Request-Id


def error_body(error: ServingError) -> ErrorBody:
    """The OpenAI shape of an error."""
    status = error.code.status
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    if error.code is Code.insufficient_quota:
        kind = error.code.value  # as OpenAI has it
    return ErrorBody(ErrorDetail(error.message, kind, error.param, error.code))


def serving_error(code: str, message: str) -> ServingError:
    """An error from the wire; an unknown code counts as internal."""
    known = Code(code) if code in Code.__members__ else Code.internal
    return ServingError(known, message or known.value)


def stopping(request_id: str) -> ServingError:
    """The answer ends at this gateway; its request continues, and any gateway can read it."""
    text = "this gateway is stopping; try again"
    if request_id:
        text = (
            f"this gateway is stopping; request {request_id} continues. Resume its stream at "
            f"GET /v1/requests/{request_id}/stream with Last-Event-ID, or get the result at "
            f"GET /v1/requests/{request_id}"
        )
    return ServingError(Code.shutting_down, text, retry_after=1.0)


def unconfirmed(request_id: str) -> ServingError:
    """The gateway stops while the broker has not confirmed the request: it may be stored, and continue, or not."""
    return ServingError(
        Code.broker_unavailable,
        f"this gateway is stopping, and the broker has not confirmed request {request_id}: it may not be stored. Ask "
        f"for it at GET /v1/requests/{request_id}; if it is not found, send it again",
        retry_after=1.0,
    )
