"""Renders token items as server-sent events. Pure.

Everything shown is a function of each choice's tokens, so another gateway that is given the same items writes the same
events and can continue after any of them. Items come from ``penstock.schemas.reassembly.TokenReassembler``: in order,
each token once.
"""

from collections.abc import Callable, Iterable
from itertools import compress

import msgspec

from penstock.gateway.apis.chat.answer_state import AnswerState, ChoiceState, reasoning_names
from penstock.gateway.apis.chat.logprobs import LogprobFormatter, PromptEcho
from penstock.gateway.base.chat_objects import ChatLogprobs, TextLogprobs, UsageBody
from penstock.gateway.base.event_stream import COMMENT, DONE, error_event, invalid_event_id, parse_position
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.delta_builder import Delta
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import PROMPT, Finish, TokenItem
from penstock.schemas.wire import TOKEN_BYTES, unpack_tokens

_json = msgspec.json.Encoder().encode
_IDS = [b"id: %d" % position for position in range(4_096)]  # formatting them would be a third of an event's cost


class _StreamedChoice:
    """
    Attributes:
        parser: None: text is content, unchanged.
        ids: tokens that no event has had yet, if events have them.
        plain: all further events are sent, with this prefix and suffix; their ids are positions of this one choice.
        prefix: of an event, up to its text; ``suffix``: what follows the text.
        sent: an event was written, or skipped as already seen.
        skip: the client has seen events up to this position; -1: the last one too.
    """

    __slots__ = ("ids", "parser", "plain", "prefix", "push", "sent", "skip", "state", "suffix")

    def __init__(self, state: ChoiceState, *, prefix: bytes, suffix: bytes) -> None:
        self.state = state
        self.push: Callable[[int], str] = state.push
        self.parser = state.parser
        self.ids: list[int] = []
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
        self._logprobs: LogprobFormatter | None = None
        if request.sampling.logprobs is not None:
            self._logprobs = LogprobFormatter(detokenizer, as_ids=request.shown.tokens_as_ids)
        self._detailed = self._logprobs is not None or request.shown.token_ids or request.shown.usage
        self._has_prompt = request.sampling.prompt_logprobs is not None
        self._echo = PromptEcho(request, detokenizer) if request.echo else None
        kind = "chat.completion.chunk" if state.is_chat else "text_completion"
        first = state if part_of is None else AnswerState(part_of, detokenizer)
        names = {"id": first.id, "object": kind, "created": first.created, "model": request.model}
        names["system_fingerprint"] = state.fingerprint
        self._ends = part_of is None
        self._head = b"\ndata: " + _json(names)[:-1]
        tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._include_usage = include_usage
        self._single = request.n == 1
        self._closed = False
        text = b'"delta":{"role":"assistant","content":' if state.is_chat else b'"text":'
        if request.parsing is not None:
            text = b'"delta":{"role":"assistant",'
        thoughts = [name.encode() for name in reasoning_names(request.parsing, streamed=True)]
        self._thoughts = thoughts
        self._no_thought = b"".join([b'"%b":null,' % name for name in thoughts])
        self._hidden = request.parsing is not None and request.parsing.hidden
        suffix = (b"}" if state.is_chat else b"") + b',"logprobs":null,"finish_reason":null}]' + tail
        self._choices = [
            _StreamedChoice(
                choice,
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
        return b"" if self.done else COMMENT

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
        self._echo = None  # it came before the first id

    def push(self, items: Iterable[TokenItem]) -> bytes:
        """Events for these items, and the end of the stream once nothing more can follow."""
        out: list[bytes] = []
        state = self._state
        for item in items:
            if state.done:
                break
            if self._has_prompt and item.choice == PROMPT:
                if self._echo is not None:
                    self._echo.take(item)
                continue
            if self._echo is not None:
                self._echo_prompt(out, self._echo)
            choice = self._choices[item.choice]
            if self._detailed or choice.parser is not None:
                self._token_by_token(out, choice, item)
            else:
                self._texts(out, choice, item.tokens, item.finish)
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

    def _texts(self, out: list[bytes], choice: _StreamedChoice, data: bytes, finish: Finish | None) -> None:
        """Events of tokens that are not parsed and have no log-probabilities."""
        state = choice.state
        end = state.position + len(data) // TOKEN_BYTES
        if finish is not None and self._state.hides_last(finish):
            data = data[:-TOKEN_BYTES]
        if choice.plain and len(data) == TOKEN_BYTES:  # most items of engines with longer steps
            if text := choice.push(int.from_bytes(data, "little")):
                out.append(b"id: %d%b%b%b" % (state.position + 1, choice.prefix, _json(text), choice.suffix))
        else:
            tokens = unpack_tokens(data)
            if not choice.plain:
                begin = state.position
                for token in tokens:
                    state.position += 1
                    if text := choice.push(token):
                        self._event(out, choice, choice.prefix + _json(text) + choice.suffix)
                        if choice.plain:
                            break
                tokens = tokens[state.position - begin :]
            if tokens:
                texts = state.stream.push_all(tokens)
                out += _events(state.position + 1, texts, choice.prefix, choice.suffix)
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

    def _echo_prompt(self, out: list[bytes], prompt: PromptEcho) -> None:
        """The prompt, in an event of each choice. Only the last has an id: then the client has all of them."""
        self._echo = None
        logprobs = prompt.completion_logprobs(self._state.request.sampling.logprobs or 0) if self._logprobs else None
        for choice in self._choices:
            head = b"id: " + self._positions() if choice is self._choices[-1] else b""
            data = choice.prefix + _json(prompt.text) + self._suffix(choice, logprobs)
            out.append(head + data if head else data.removeprefix(b"\n"))
            choice.state.offset = len(prompt.text)
            choice.sent = True

    def _token_by_token(self, out: list[bytes], choice: _StreamedChoice, item: TokenItem) -> None:
        """Events of answers that are parsed, or have more than text."""
        chat, state, shown = self._state.is_chat, choice.state, self._state.request.shown
        logprobs = item.logprobs if self._logprobs is not None and item.logprobs else ()
        tokens = unpack_tokens(item.tokens)
        visible = len(tokens) - self._state.hides_last(item.finish)
        for place, token in enumerate(tokens):
            state.position += 1
            if shown.token_ids and not self._state.request.unanswered:
                choice.ids.append(token)
            logprob = logprobs[place] if place < len(logprobs) else None
            scored: ChatLogprobs | TextLogprobs | None = None
            if chat and place < visible:
                state.score(token, logprob)
            elif logprob is not None and not (chat or self._state.request.unanswered):
                assert self._logprobs is not None
                scored = self._logprobs.completion([(token, logprob, state.place(token))])
            text = choice.push(token) if place < visible else ""
            delta = choice.parser.push(text) if choice.parser is not None else None
            if chat and logprobs:
                scored = self._content_scores(state, text)
            body = self._fields(delta) if choice.parser is not None else _json(text) if text else b""
            if body or scored:
                body = body or (b"" if choice.parser is not None else b'""')
                data = (choice.prefix + body).removesuffix(b",")
                self._event(out, choice, data + self._suffix(choice, scored))
            if choice.parser is not None and choice.parser.passthrough and self._logprobs is None:
                choice.parser = None  # no more parsing is needed
                state.show_marks()
                choice.prefix += self._no_thought + b'"content":'
                if not self._detailed:
                    self._texts(out, choice, item.tokens[(place + 1) * TOKEN_BYTES :], item.finish)
                    break

    def _content_scores(self, state: ChoiceState, text: str) -> ChatLogprobs | None:
        if self._logprobs is None or not (scores := state.content_scores(text)):
            return None
        return ChatLogprobs([self._logprobs.chat(token, logprob) for token, logprob in scores])

    def _suffix(
        self, choice: _StreamedChoice, logprobs: ChatLogprobs | TextLogprobs | None = None, reason: str | None = None
    ) -> bytes:
        """What follows the text of an event."""
        suffix, chat = choice.suffix, self._state.is_chat
        shown = self._state.request.shown
        if shown.token_ids:
            ids, choice.ids = choice.ids, []
            more = b',"token_ids":' + _json(ids)
            prompt = b"" if choice.sent else b',"prompt_token_ids":' + _json(self._prompt_ids())
            suffix = suffix.replace(b"}]", b"%b}]%b" % (more, prompt) if chat else b"%b%b}]" % (more, prompt), 1)
        if reason is not None:
            suffix = suffix.replace(b'"finish_reason":null', b'"finish_reason":"%b"' % reason.encode(), 1)
        if logprobs is not None:
            suffix = suffix.replace(b"null", _json(logprobs), 1)
        if shown.usage:
            end = b',"usage":%b}\n\n' % _json(self.usage)
            suffix = suffix.removesuffix(b',"usage":null}\n\n').removesuffix(b"}\n\n") + end
        return suffix

    def _prompt_ids(self) -> list[int]:
        return unpack_tokens(self._state.request.prompt).tolist()

    def _fields(self, delta: Delta | None) -> bytes:
        """A delta's JSON without the braces; b"": it shows nothing. It may end with a comma."""
        if delta is None:
            return b""
        thought = None if self._hidden else delta.reasoning_content
        rest = _json(Delta(content=delta.content, tool_calls=delta.tool_calls))[1:-1]
        if thought is None:
            return self._no_thought + rest if rest else b""
        return b"".join([b'"%b":%b,' % (name, _json(thought)) for name in self._thoughts]) + rest

    def _finish(self, out: list[bytes], choice: _StreamedChoice, finish: Finish) -> None:
        state = choice.state
        if not self._state.end(state, finish):
            return
        remaining = state.stream.finish()
        if choice.parser is not None:
            fields = self._fields(choice.parser.finish(remaining, limited=state.limited))
            body = choice.prefix + (fields or self._no_thought + (b"" if choice.sent else b'"content":""'))
            body = body.removesuffix(b",")
        elif self._state.is_chat and choice.sent and not remaining:
            body = choice.prefix.removesuffix(b'"content":').removesuffix(b",")
        else:
            body = choice.prefix + _json(remaining)
        scored = self._content_scores(state, remaining) if self._state.is_chat else None
        reason = "length" if self._state.request.unanswered else state.finish_reason
        data = body + self._suffix(choice, scored, reason)
        choice.sent = True
        if choice.skip >= 0:
            out.append(b"id: " + self._positions() + data)

    def _close(self, out: list[bytes], finished: bool = True) -> None:
        if self._state.error is not None:
            out.append(error_event(self._state.error, finished=finished))
            return
        if not self._ends:
            return
        if self._include_usage:
            out.append(b'id: %bu%b,"choices":[],"usage":%b}\n\n' % (self._positions(), self._head, _json(self.usage)))
        out.append(DONE)


def _events(first: int, texts: list[str], prefix: bytes, suffix: bytes) -> list[bytes]:
    """The pieces of one event for each text that is not empty.

    Args:
        first: position of the token whose text is the first.
    """
    end = first + len(texts)
    ids = _IDS[first:end] if end <= len(_IDS) else [b"id: %d" % position for position in range(first, end)]
    shown = [*map(_json, filter(None, texts))]
    pieces = [b"", prefix, b"", suffix] * len(shown)
    pieces[::4] = compress(ids, texts)
    pieces[2::4] = shown
    return pieces
