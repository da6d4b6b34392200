"""Renders token items as server-sent events. Pure.

Everything shown is a function of each choice's tokens, so another gateway that is given the same items writes the same
events and can continue after any of them. Items come from ``schemas.reassembly.TokenReassembler``: in order, each token
once.
"""

from collections.abc import Iterable
from itertools import compress

import msgspec

from gateway.openai.answer_state import AnswerState, ChoiceState
from gateway.openai.logprobs import LogprobFormatter
from gateway.openai.responses import ChatLogprobs, TextLogprobs, UsageBody
from gateway.openai.sse import DONE, error_event, invalid_event_id, parse_position
from infra.model.detokenizer import Detokenizer
from infra.model.parsers.answer_parser import AnswerParser
from infra.model.parsers.delta_builder import Delta
from infra.model.parsers.registry import parser_for
from schemas.errors import ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from schemas.wire import TOKEN_BYTES, unpack_tokens

_json = msgspec.json.Encoder().encode
_IDS = [b"id: %d" % position for position in range(4_096)]  # formatting them would be a third of an event's cost


class _StreamedChoice:
    """
    Attributes:
        parser: None: text is content, unchanged.
        plain: all further events are sent, with this prefix and suffix; their ids are positions of this one choice.
        prefix: of an event, up to its text; ``suffix``: what follows the text.
        sent: an event was written, or skipped as already seen.
        skip: the client has seen events up to this position; -1: the last one too.
    """

    __slots__ = ("parser", "plain", "prefix", "push", "sent", "skip", "state", "suffix")

    def __init__(self, state: ChoiceState, parser: AnswerParser | None, *, prefix: bytes, suffix: bytes) -> None:
        self.state = state
        self.push = state.push
        self.parser = parser
        self.plain = False
        self.prefix = prefix
        self.suffix = suffix
        self.sent = False
        self.skip = 0


class StreamRenderer:
    """A streamed answer: one event per token that has text, then one with the finish reason per choice.

    An event's ``id:`` is the number of tokens consumed per choice, joined by "."; "f" marks a finished choice, "u" at
    the end the usage. A client that reconnects with it as Last-Event-ID gets what follows.
    """

    def __init__(
        self,
        request: GenerateRequest,
        detokenizer: Detokenizer,
        *,
        include_usage: bool = False,
        part_of: GenerateRequest | None = None,
        offset: int = 0,
    ) -> None:
        """
        Args:
            part_of: the stream is of several requests, of which this is the first: it has its names, and whoever joins
                them ends it.
            offset: index of the first choice.
        """
        self._state = state = AnswerState(request, detokenizer)
        self._logprobs = LogprobFormatter(detokenizer) if request.sampling.logprobs is not None else None
        self._skips_prompt = request.sampling.prompt_logprobs is not None
        kind = "chat.completion.chunk" if state.is_chat else "text_completion"
        first = state if part_of is None else AnswerState(part_of, detokenizer)
        names = {"id": first.id, "object": kind, "created": first.created, "model": request.model}
        self._ends = part_of is None
        self._head = b"\ndata: " + _json(names)[:-1]
        tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._include_usage = include_usage
        self._single = request.n == 1
        self._closed = False
        text = b'"delta":{"role":"assistant","content":' if state.is_chat else b'"text":'
        if request.parsing is not None:
            text = b'"delta":{"role":"assistant",'
        suffix = (b"}" if state.is_chat else b"") + b',"logprobs":null,"finish_reason":null}]' + tail
        self._choices = [
            _StreamedChoice(
                choice,
                parser_for(request, choice.index) if request.parsing is not None else None,
                prefix=b'%b,"choices":[{"index":%d,%b' % (self._head, choice.index + offset, text),
                suffix=suffix,
            )
            for choice in state.choices
        ]

    @property
    def done(self) -> bool:
        return self._state.done

    @property
    def usage(self) -> UsageBody:
        return self._state.usage

    @property
    def error(self) -> ServingError | None:
        return self._state.error

    def hides_last(self, finish: Finish | None) -> bool:
        return self._state.hides_last(finish)

    @property
    def ping(self) -> bytes:
        return b""

    def resume(self, last_event_id: str) -> None:
        """Skip what the client has seen; then push all items from the first on.

        Raises:
            ServingError: not the id of an event of this answer.
        """
        text = last_event_id.strip()
        if text.endswith("fu"):
            self._include_usage = False
        parts = text.removesuffix("u").split(".")
        if len(parts) != len(self._choices):
            raise invalid_event_id(last_event_id)
        for choice, part in zip(self._choices, parts, strict=True):
            position = parse_position(part.removesuffix("f"), last_event_id)
            choice.skip = -1 if part.endswith("f") else position

    def push(self, items: Iterable[TokenItem]) -> bytes:
        """Events for these items, and the end of the stream once nothing more can follow."""
        out: list[bytes] = []
        state = self._state
        if self._skips_prompt:  # a stream that re-attaches to a request with prompt_logprobs
            items = [item for item in items if item.choice != PROMPT]
        for item in items:
            if state.done:
                break
            choice = self._choices[item.choice]
            if self._logprobs is not None or choice.parser is not None:
                self._token_by_token(out, choice, item)
            else:
                self._texts(out, choice, item)
            if item.finish is not None:
                self._finish(out, choice, item.finish)
        if state.done and not self._closed:
            self._closed = True
            self._close(out)
        return b"".join(out)

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        """End the stream with an error event; b"" if it has ended. ``finished``: the request has ended too."""
        if self._closed:
            return b""
        self._state.error = self._state.error or error
        self._closed = True
        out: list[bytes] = []
        self._close(out, finished)
        return b"".join(out)

    def _texts(self, out: list[bytes], choice: _StreamedChoice, item: TokenItem) -> None:
        """Events of answers that are not parsed and have no log-probabilities."""
        state, data = choice.state, item.tokens
        end = state.position + len(data) // TOKEN_BYTES
        if item.finish is not None and self._state.hides_last(item.finish):
            data = data[:-TOKEN_BYTES]
        if choice.plain and len(data) == TOKEN_BYTES:  # most items of engines with longer steps
            if text := choice.push(int.from_bytes(data, "little")):
                out.append(b"id: %d%b%b%b" % (state.position + 1, choice.prefix, _json(text), choice.suffix))
        else:
            texts = map(choice.push, unpack_tokens(data))
            if not choice.plain:
                for text in texts:
                    state.position += 1
                    if text:
                        self._event(out, choice, choice.prefix + _json(text) + choice.suffix)
                        if choice.plain:
                            break
            if choice.plain:
                out += _events(state.position + 1, list(texts), choice.prefix, choice.suffix)
        state.position = end

    def _event(self, out: list[bytes], choice: _StreamedChoice, data: bytes) -> None:
        """Any event but the most common kind: the first of a choice, one of several choices, or already seen."""
        position = choice.state.position
        seen = choice.skip < 0 or position <= choice.skip
        if not seen:
            out.append(b"id: " + self._positions() + data)
        if not choice.sent:
            choice.sent = True
            choice.prefix = choice.prefix.replace(b'"role":"assistant",', b"", 1)
        if position > choice.skip >= 0:
            choice.skip = 0
            choice.plain = self._single

    def _positions(self) -> bytes:
        return ".".join(
            [f"{c.position}f" if c.finish is not None else str(c.position) for c in self._state.choices]
        ).encode()

    def _token_by_token(self, out: list[bytes], choice: _StreamedChoice, item: TokenItem) -> None:
        """Events of answers with log-probabilities, or that are parsed."""
        logprobs = item.logprobs or ()
        tokens = unpack_tokens(item.tokens)
        shown = len(tokens) - self._state.hides_last(item.finish)
        for place, token in enumerate(tokens):
            choice.state.position += 1
            text = choice.push(token) if place < shown else ""
            delta = choice.parser.push(text) if choice.parser is not None else None
            shaped = self._format_logprob(choice.state, token, logprobs[place]) if place < len(logprobs) else None
            if delta or shaped or (text and choice.parser is None):
                suffix = choice.suffix.replace(b"null", _json(shaped), 1) if shaped else choice.suffix
                body = _fields(delta) if choice.parser is not None else _json(text)
                self._event(out, choice, (choice.prefix + body).removesuffix(b",") + suffix)
                if choice.parser is not None and choice.parser.passthrough:  # no more parsing needed
                    choice.parser = None
                    choice.prefix += b'"content":'

    def _finish(self, out: list[bytes], choice: _StreamedChoice, finish: Finish) -> None:
        if not self._state.end(choice.state, finish):
            return
        remaining = choice.state.stream.finish()
        if choice.parser is not None:
            fields = _fields(choice.parser.finish(remaining, limited=choice.state.limited))
            body = choice.prefix + (fields if fields or choice.sent else b'"content":""')
        elif self._state.is_chat and choice.sent and not remaining:
            body = choice.prefix.removesuffix(b'"content":')
        else:
            body = choice.prefix + _json(remaining)
        suffix = choice.suffix.replace(
            b'"finish_reason":null', b'"finish_reason":' + _json(choice.state.finish_reason(choice.parser)), 1
        )
        choice.sent = True
        if choice.skip >= 0:
            out.append(b"id: " + self._positions() + body + suffix)

    def _close(self, out: list[bytes], finished: bool = True) -> None:
        if self._state.error is not None:
            out.append(error_event(self._state.error, finished=finished))
            return
        if not self._ends:
            return
        if self._include_usage:
            out.append(b'id: %bu%b,"choices":[],"usage":%b}\n\n' % (self._positions(), self._head, _json(self.usage)))
        out.append(DONE)

    def _format_logprob(self, choice: ChoiceState, token: int, logprob: Logprob) -> ChatLogprobs | TextLogprobs | None:
        if self._logprobs is None:
            return None
        if self._state.is_chat:
            return ChatLogprobs([self._logprobs.chat(token, logprob)])
        shaped = self._logprobs.completion([(token, logprob)], choice.offset)
        choice.offset += len(shaped.tokens[0])
        return shaped


def _events(first: int, texts: list[str], prefix: bytes, suffix: bytes) -> list[bytes]:
    """The pieces of one event for each text that is not empty.

    Args:
        first: position of the token whose text is the first.
    """
    end = first + len(texts)
    ids = _IDS[first:end] if end <= len(_IDS) else [b"id: %d" % position for position in range(first, end)]
    shown = [_json(text) for text in texts if text]
    pieces = [b"", prefix, b"", suffix] * len(shown)
    pieces[::4] = compress(ids, texts)
    pieces[2::4] = shown
    return pieces


def _fields(delta: Delta | None) -> bytes:
    """A delta's JSON without the braces."""
    return _json(delta)[1:-1] if delta is not None else b""
