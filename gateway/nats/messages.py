"""An answer as numbered messages: 0, 1, 2 … without gaps, the same from every gateway. Pure.

A streamed answer has one message per event that the HTTP API would write; any other answer is one message. The tokens
of several choices are sent in one fixed order: choices take turns, one token each, then their end. So the order depends
on the answer only. In the token log it changes whenever a choice is preempted or another worker continues it, and the
record has none.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.base.chat_objects import UsageBody, error_body
from penstock.gateway.base.event_stream import DONE
from penstock.gateway.nats.protocol import STREAM_USAGE
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import (
    HEADER_ERROR,
    HEADER_EVENT_ID,
    HEADER_FINAL,
    HEADER_RECORD,
    HEADER_RETRY_AFTER,
    HEADER_SEQ,
)
from penstock.schemas.tokens import COUNTS, WHOLE_REQUEST, Finish, TokenItem


class ChoiceInterleaver:
    """Holds back what a choice has beyond the others, at most its ``max_tokens``.

    Args:
        hides_last: whether the token that comes with an end is not shown: then the two are one turn.
    """

    def __init__(self, choices: int, hides_last: Callable[[Finish], bool]) -> None:
        self._waiting: list[deque[TokenItem]] = [deque() for _ in range(choices)]
        self._open = list(range(choices))
        self._turn = 0  # place in ``_open``
        self._hides_last = hides_last

    def push(self, items: Iterable[TokenItem]) -> list[TokenItem]:
        """Items in each choice's own order; returns those whose turn has come, of one token or one end each."""
        out: list[TokenItem] = []
        for item in items:
            if item.choice >= WHOLE_REQUEST:
                self._waiting[item.choice].extend(self._turns(item))
            elif item.choice == COUNTS:
                out.append(item)
        while self._open and (waiting := self._waiting[self._open[self._turn]]):
            item = waiting.popleft()
            out.append(item)
            if item.finish is not None:
                del self._open[self._turn]
            else:
                self._turn += 1
            if self._turn >= len(self._open):
                self._turn = 0
        return out

    def _turns(self, item: TokenItem) -> Iterable[TokenItem]:
        request, attempt, choice, finish = item.request, item.attempt, item.choice, item.finish
        count = len(item.tokens) >> 2
        joined = finish is not None and count > 0 and self._hides_last(finish)
        for at in range(count):
            token = item.tokens[4 * at : 4 * at + 4]
            logprobs = item.logprobs[at : at + 1] if item.logprobs else item.logprobs
            end = finish if joined and at == count - 1 else None
            yield TokenItem(request, attempt, choice, item.first + at, token, end, logprobs)
        if finish is not None and not joined:
            yield TokenItem(request, attempt, choice, item.first + count, b"", finish)


_json = msgspec.json.encode


class DeliveredMessage(NamedTuple):
    """One message of an answer. ``number`` -1: it is not part of an answer, but an error instead of one."""

    number: int
    body: bytes
    final: bool = True
    event_id: str = ""
    error: str = ""
    record: bool = False
    retry_after: float | None = None

    def headers(self, base: dict[str, str]) -> dict[str, str]:
        """Its own headers beside those that all messages of the answer have."""
        out = dict(base)
        if self.number >= 0:
            out[HEADER_SEQ] = str(self.number)
        if self.event_id:
            out[HEADER_EVENT_ID] = self.event_id
        if self.final:
            out[HEADER_FINAL] = "1"
        if self.error:
            out[HEADER_ERROR] = self.error
        if self.retry_after is not None:
            out[HEADER_RETRY_AFTER] = str(max(1, round(self.retry_after)))
        if self.record:
            out[HEADER_RECORD] = "1"
        return out


def failure(error: ServingError, number: int = 0) -> DeliveredMessage:
    """The last message of an answer that failed. ``number`` -1: a call failed, not the request."""
    return DeliveredMessage(number, _json(error_body(error)), error=error.code.value, retry_after=error.retry_after)


class StreamMessages:
    """A streamed answer's messages."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._renderer = StreamRenderer(request, detokenizer, include_usage=request.form == STREAM_USAGE)
        self._interleaver = ChoiceInterleaver(request.n, self._renderer.hides_last) if request.n > 1 else None
        self._next = 0

    @property
    def done(self) -> bool:
        return self._renderer.done

    @property
    def usage(self) -> UsageBody:
        return self._renderer.usage

    @property
    def code(self) -> str:
        """For the metrics, once it is done."""
        return self._renderer.error.code.value if self._renderer.error is not None else "ok"

    def push(self, items: Iterable[TokenItem]) -> list[DeliveredMessage]:
        return self._messages(
            self._renderer.push(self._interleaver.push(items) if self._interleaver is not None else items)
        )

    def fail(self, error: ServingError) -> list[DeliveredMessage]:
        return self._messages(self._renderer.fail(error))

    def _messages(self, data: bytes) -> list[DeliveredMessage]:
        events = data.removesuffix(DONE).split(b"\n\n")[:-1]
        out = []
        for place, event in enumerate(events, 1):
            head, _, body = event.partition(b"data: ")  # the first: a text may hold one too
            final = self.done and place == len(events)
            error = self.code if final and self._renderer.error is not None else ""
            event_id = head.removeprefix(b"id: ").strip().decode()
            out.append(DeliveredMessage(self._next, body, final, event_id, error))
            self._next += 1
        return out
