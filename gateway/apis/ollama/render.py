"""Answers of Ollama's API: one JSON body, or a line of JSON for each piece.

Durations are those of this gateway: lines are not events that another gateway continues.
"""

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.gateway.apis.chat.segments import Segment, SegmentedAnswer
from penstock.gateway.apis.ollama.bodies import OllamaFunction, OllamaToolCall
from penstock.gateway.base.chat_objects import UsageBody
from penstock.gateway.base.request_bodies import OLLAMA_CHAT, unsupported
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import TokenItem

_json = msgspec.json.encode


class OllamaAnswerMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """The answer, or a piece of it: ``message`` of /api/chat, ``response`` and ``thinking`` of /api/generate.

    The last one has the counts in tokens, and durations in nanoseconds.
    """

    model: str
    created_at: str
    message: OllamaAnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaError(Struct, frozen=True):
    error: str


def rfc3339(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class _Answering:
    """What whole and streamed answers share.

    Args:
        clock: Unix time in nanoseconds; None: durations are not known.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer, clock: Callable[[], int] | None) -> None:
        self._request = request
        self._answer = SegmentedAnswer(request, detokenizer)
        self._clock = clock
        self._first_ns = 0

    @property
    def usage(self) -> UsageBody:
        return self._answer.usage

    @property
    def error(self) -> ServingError | None:
        return self._answer.error

    def _note_first(self) -> None:
        if not self._first_ns and self._clock is not None:
            self._first_ns = self._clock()

    def _piece(
        self, text: str = "", thought: str = "", calls: list[OllamaToolCall] | None = None, **ended: Any
    ) -> OllamaAnswer:
        request = self._request
        at = rfc3339(self._clock() if self._clock is not None else request.created_ns)
        ended.setdefault("done", False)
        if request.endpoint == OLLAMA_CHAT:
            message = OllamaAnswerMessage(text, thinking=thought or UNSET, tool_calls=calls or UNSET)
            return OllamaAnswer(model=request.named, created_at=at, message=message, **ended)
        return OllamaAnswer(model=request.named, created_at=at, response=text, thinking=thought or UNSET, **ended)

    def _ended(self) -> dict[str, Any]:
        """Fields of the last piece of an answer that did not fail."""
        finish, usage, request = self._answer.finish, self._answer.usage, self._request
        assert finish is not None
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }
        if self._clock is not None:
            now, began, first = self._clock(), request.created_ns, self._first_ns
            fields |= {
                "total_duration": max(now - began, 0),
                "load_duration": 0,
                "prompt_eval_duration": max(first - began, 0),
                "eval_duration": max(now - first, 0),
            }
        return fields


def _call(segment: Segment) -> OllamaToolCall:
    return OllamaToolCall(OllamaFunction(segment.name, segment.arguments), segment.call_id or None)


class WholeOllama(_Answering):
    """Implements ``penstock.gateway.apis.endpoints.Aggregator``."""

    large = False

    def push(self, items: Iterable[TokenItem]) -> bool:
        self._note_first()
        self._answer.push(items)
        return self._answer.done

    def parts(self) -> list[bytes]:
        return [self.response()]

    def response(self) -> bytes:
        """
        Raises:
            ServingError: the request failed.
        """
        answer = self._answer
        if answer.error is not None:
            raise answer.error
        segments = answer.segments
        text = "".join(each.content for each in segments if each.kind == "text")
        thought = "".join(each.content for each in segments if each.kind == "reasoning")
        calls = [_call(each) for each in segments if each.kind == "call"]
        return _json(self._piece(text, thought, calls, **self._ended()))


class OllamaLines(_Answering):
    """A streamed answer. Implements ``penstock.gateway.apis.endpoints.Renderer``."""

    def __init__(
        self, request: GenerateRequest, detokenizer: Detokenizer, clock: Callable[[], int] = time.time_ns
    ) -> None:
        super().__init__(request, detokenizer, clock)
        self._closed = False

    @property
    def done(self) -> bool:
        return self._answer.done

    @property
    def ping(self) -> bytes:
        """A piece without text: lines have no comments."""
        return b"" if self.done else _line(self._piece())

    def resume(self, last_event_id: str) -> None:
        """
        Raises:
            ServingError: unsupported.
        """
        raise unsupported("Last-Event-ID", "lines of Ollama's API have no ids; read the answer from its beginning")

    def push(self, items: Iterable[TokenItem]) -> bytes:
        lines = []
        for change in self._answer.push(items):
            self._note_first()
            segment = change.segment
            if segment.kind == "call":
                if change.what == "closed":
                    lines.append(_line(self._piece(calls=[_call(segment)])))
            elif change.what == "grew":
                text, thought = ("", change.text) if segment.kind == "reasoning" else (change.text, "")
                lines.append(_line(self._piece(text, thought)))
        if self._answer.done and not self._closed:
            self._closed = True
            lines.append(self._last())
        return b"".join(lines)

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        """The line that ends a stream that failed; b"" if it has ended."""
        if self._closed:
            return b""
        self._closed = True
        self._answer.fail(error)
        return _line(OllamaError(error.message))

    def _last(self) -> bytes:
        answer = self._answer
        if answer.error is not None:
            return _line(OllamaError(answer.error.message))
        self._note_first()
        cut_off = answer.segments[-1] if answer.segments and not answer.segments[-1].closed else None
        calls = [_call(cut_off)] if cut_off is not None and cut_off.kind == "call" else None
        return _line(self._piece(calls=calls, **self._ended()))


def _line(value: OllamaAnswer | OllamaError) -> bytes:
    return _json(value) + b"\n"
