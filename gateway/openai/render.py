"""Token items become what a client reads: server-sent events, or one JSON answer.

Everything shown is a function of each choice's tokens, so another replica that is fed the same items writes the
same events and can go on after any of them. Items come from ``schemas.reassembly.TokenReassembler``: in order, each
token once.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from gateway.openai.common import CHAT
from gateway.openai.json_slices import PLACEHOLDER, encode_fields, encode_list, fill
from gateway.openai.prompt_logprobs import LARGE, LOWEST, PromptEcho
from gateway.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprob,
    ChatLogprobs,
    CompletionResponse,
    Delta,
    PromptTokensDetails,
    TextChoice,
    TextLogprobs,
    TopLogprob,
    UsageBody,
    error_body,
    serving_error,
)
from gateway.parsers.answer_parser import AnswerParser
from gateway.parsers.registry import parser_for, special_markers
from infra.model.detokenizer import Detokenizer
from schemas.errors import ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from schemas.wire import unpack_tokens

DONE = b"data: [DONE]\n\n"

_FAILED = ("error", "cancelled")
_json = msgspec.json.Encoder().encode


class _Choice:
    """How far one choice is. ``sent``: an event was written (or suppressed as already seen) for it."""

    __slots__ = (
        "finish",
        "index",
        "offset",
        "parser",
        "position",
        "prefix",
        "push",
        "sent",
        "skip",
        "stream",
        "suffix",
    )

    def __init__(self, index: int, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        stop = request.stop
        self.index = index
        self.parser = parser_for(request, index) if request.parsing is not None else None
        shown = detokenizer.special(special_markers(request.parsing)) if request.parsing is not None else None
        self.stream = detokenizer.stream(
            stop.strings, min_tokens=stop.min_tokens, stops_shown=request.stops_shown, shown=shown
        )
        self.push = self.stream.push
        self.position = 0
        self.offset = 0  # characters of token text before the next token, for text logprobs
        self.finish: Finish | None = None
        self.sent = False
        self.skip = 0  # events up to this position were seen by the client; -1: its last one too
        self.prefix = self.suffix = b""


class _Answer:
    """What streamed and whole answers share: choices, usage, names."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self.request = request
        self.chat = request.endpoint == CHAT
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + request.id
        self.created = request.created_ns // 1_000_000_000
        self.error: ServingError | None = None
        self._detokenizer = detokenizer
        self._logprobs = request.sampling.logprobs is not None
        self._scored = request.sampling.prompt_logprobs is not None
        self._parsed = request.parsing is not None
        self._choices = [_Choice(index, request, detokenizer) for index in range(request.n)]
        self._open = request.n

    @property
    def done(self) -> bool:
        """Nothing more will be shown: every choice ended, or the request failed."""
        return not self._open or self.error is not None

    @property
    def usage(self) -> UsageBody:
        prompt = len(self.request.prompt) // 4
        completion = 0 if self.request.unanswered else sum(choice.position for choice in self._choices)
        cached = min((choice.finish.cached_tokens if choice.finish else 0 for choice in self._choices), default=0)
        return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def hides_last(self, finish: Finish | None) -> bool:
        """Whether the last token is a stop token, which is counted but not shown, like a stop string."""
        if self.request.unanswered:
            return finish is not None
        return finish is not None and finish.stop.__class__ is int and not self.request.stops_shown

    def _ended(self, choice: _Choice, finish: Finish) -> bool:
        """Note the end of a choice; False: the whole request failed."""
        if finish.reason in _FAILED:
            self.error = serving_error(finish.code or finish.reason, finish.message)
            return False
        choice.finish = finish
        self._open -= 1
        return True

    def _token_text(self, token: int) -> str:
        return self._detokenizer.raw(token).decode("utf-8", "replace")

    def _chat_logprob(self, token: int, logprob: Logprob) -> ChatLogprob:
        top = [TopLogprob(*self._described(other, value)) for other, value in logprob.top]
        return ChatLogprob(*self._described(token, logprob.logprob), top)

    def _described(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._token_text(token), max(logprob, LOWEST), list(self._detokenizer.raw(token))

    def _text_logprobs(self, choice: _Choice, entries: Iterable[tuple[int, Logprob]]) -> TextLogprobs:
        out = TextLogprobs([], [], [], [])
        for token, logprob in entries:
            text = self._token_text(token)
            chosen = max(logprob.logprob, LOWEST)
            out.tokens.append(text)
            out.token_logprobs.append(chosen)
            top = {self._token_text(other): max(value, LOWEST) for other, value in reversed(logprob.top)}
            out.top_logprobs.append({**top, text: chosen})
            out.text_offset.append(choice.offset)
            choice.offset += len(text)
        return out

    def _shaped_logprobs(self, choice: _Choice, entries: list[tuple[int, Logprob]]) -> Any:
        if self.chat:
            return ChatLogprobs([self._chat_logprob(token, logprob) for token, logprob in entries])
        return self._text_logprobs(choice, entries)


class StreamRenderer(_Answer):
    """A streamed answer: one event per token that has text, then one with the finish reason per choice.

    Each event's ``id:`` names the tokens consumed per choice, joined by "."; "f" marks a finished choice, "u" behind
    all the usage. A client that reconnects with it as Last-Event-ID gets what comes after.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer, *, include_usage: bool = False) -> None:
        super().__init__(request, detokenizer)
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        names = {"id": self.id, "object": kind, "created": self.created, "model": request.model}
        self._head = b"\ndata: " + _json(names)[:-1]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._include_usage = include_usage
        self._single = request.n == 1
        self._closed = False
        for choice in self._choices:
            text = b'"delta":{"role":"assistant","content":' if self.chat else b'"text":'
            if self._parsed:
                text = b'"delta":{"role":"assistant",'
            choice.prefix = b'%b,"choices":[{"index":%d,%b' % (self._head, choice.index, text)
            brace = b"}" if self.chat else b""
            choice.suffix = brace + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def resume(self, last_event_id: str) -> None:
        """Suppress what the client has seen; then push all items from the first on.

        Raises:
            ValueError: not an id of this answer's events.
        """
        text = last_event_id.strip()
        if text.endswith("fu"):
            self._include_usage = False
        parts = text.removesuffix("u").split(".")
        if len(parts) != len(self._choices):
            raise ValueError(f"{last_event_id!r} names {len(parts)} choices; this answer has {len(self._choices)}")
        for choice, part in zip(self._choices, parts, strict=True):
            number = part.removesuffix("f")
            if not (number.isascii() and number.isdigit() and len(number) < 16):
                raise ValueError(f"{last_event_id!r} is not an event id")
            choice.skip = -1 if part.endswith("f") else int(number)

    def push(self, items: Iterable[TokenItem]) -> bytes:
        """Events for these items; also the end of the stream, once nothing more can come."""
        out: list[bytes] = []
        if self._scored:  # a stream of a request that asked for its prompt's shows the answer only
            items = [item for item in items if item.choice != PROMPT]
        for item in items:
            if self.done:
                break
            choice = self._choices[item.choice]
            if self._logprobs or choice.parser is not None:
                self._token_by_token(out, choice, item)
            else:
                data = item.tokens
                if item.finish is not None and self.hides_last(item.finish):
                    data = data[:-4]
                # one token per item is the rule: spare it the array
                for token in (int.from_bytes(data, "little"),) if len(data) == 4 else unpack_tokens(data):
                    choice.position += 1
                    if text := choice.push(token):
                        if choice.sent and self._single and not choice.skip:
                            out.append(b"id: %d%b%b%b" % (choice.position, choice.prefix, _json(text), choice.suffix))
                        elif not choice.sent or 0 <= choice.skip <= choice.position:
                            self._event(out, choice, choice.prefix + _json(text) + choice.suffix)
                if data is not item.tokens:
                    choice.position += 1
            if item.finish is not None:
                self._finish(out, choice, item.finish)
        if self.done and not self._closed:
            self._closed = True
            self._close(out)
        return b"".join(out)

    def fail(self, error: ServingError, *, over: bool = True) -> bytes:
        """End the stream with an error event; b"" if it has ended. ``over``: the request has ended, too."""
        if self._closed:
            return b""
        self.error = error
        self._closed = True
        out: list[bytes] = []
        self._close(out, over)
        return b"".join(out)

    def _event(self, out: list[bytes], choice: _Choice, data: bytes) -> None:
        """Any event but the most common one: the first of a choice, of several choices, or already seen."""
        seen = choice.skip < 0 or choice.position <= choice.skip
        if not seen:
            out.append(b"id: " + self._positions() + data)
        if not choice.sent:
            choice.sent = True
            choice.prefix = choice.prefix.replace(b'"role":"assistant",', b"", 1)
        if choice.position > choice.skip >= 0:
            choice.skip = 0

    def _positions(self) -> bytes:
        return ".".join([f"{c.position}f" if c.finish is not None else str(c.position) for c in self._choices]).encode()

    def _token_by_token(self, out: list[bytes], choice: _Choice, item: TokenItem) -> None:
        """Events of answers with logprobs, or that are taken apart."""
        logprobs = item.logprobs or ()
        tokens = unpack_tokens(item.tokens)
        shown = len(tokens) - self.hides_last(item.finish)
        for place, token in enumerate(tokens):
            choice.position += 1
            text = choice.push(token) if place < shown else ""
            delta = choice.parser.push(text) if choice.parser is not None and text else None
            shaped = self._shaped_logprobs(choice, [(token, logprobs[place])]) if place < len(logprobs) else None
            if delta or shaped or (text and choice.parser is None):
                suffix = choice.suffix.replace(b"null", _json(shaped), 1) if shaped else choice.suffix
                said = _fields(delta) if choice.parser is not None else _json(text)
                self._event(out, choice, (choice.prefix + said).removesuffix(b",") + suffix)
                if choice.parser is not None and choice.parser.passthrough:  # the short way from here on
                    choice.parser = None
                    choice.prefix += b'"content":'

    def _finish(self, out: list[bytes], choice: _Choice, finish: Finish) -> None:
        if not self._ended(choice, finish):
            return
        rest = choice.stream.finish()
        if choice.parser is not None:
            said = _fields(choice.parser.finish(rest))
            body = choice.prefix + (said if said or choice.sent else b'"content":""')
        elif self.chat and choice.sent and not rest:
            body = choice.prefix.removesuffix(b'"content":')
        else:
            body = choice.prefix + _json(rest)
        suffix = choice.suffix.replace(
            b'"finish_reason":null', b'"finish_reason":' + _json(_reason(choice, choice.parser)), 1
        )
        choice.sent = True
        if choice.skip >= 0:
            out.append(b"id: " + self._positions() + body + suffix)

    def _close(self, out: list[bytes], over: bool = True) -> None:
        if self.error is not None:
            out.append(b"data: " + _json(error_body(self.error)) + b"\n\n")
        elif self._include_usage:
            out.append(b'id: %bu%b,"choices":[],"usage":%b}\n\n' % (self._positions(), self._head, _json(self.usage)))
        if over:
            out.append(DONE)


class AnswerAggregator(_Answer):
    """A whole answer: the same text and usage as streamed, behind the prompt if that is echoed.

    ``late``: log-probabilities may be unknown by now, as the token log keeps less long than the terminal events.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer, *, late: bool = False) -> None:
        super().__init__(request, detokenizer)
        self._late = late
        self._prompt = PromptEcho(request, detokenizer) if self._scored or request.echo else None
        self._texts: list[list[str]] = [[] for _ in self._choices]
        self._entries: list[list[tuple[int, Logprob]]] = [[] for _ in self._choices]
        self._sliced: list[list[bytes]] = []  # JSON of log-probabilities, in the order of the body

    def push(self, items: Iterable[TokenItem]) -> bool:
        """Take in items; True once the answer is complete (or has failed)."""
        for item in items:
            if self.done:
                break
            if item.choice == PROMPT:
                if self._prompt is not None:
                    self._prompt.take(item)
                continue
            choice = self._choices[item.choice]
            tokens = unpack_tokens(item.tokens)
            choice.position += len(tokens)
            shown = tokens[:-1] if self.hides_last(item.finish) else tokens
            self._texts[item.choice] += map(choice.push, shown)
            if self._logprobs:
                self._entries[item.choice] += zip(tokens, item.logprobs or (), strict=False)
            if item.finish is not None and self._ended(choice, item.finish):
                self._texts[item.choice].append(choice.stream.finish())
        return self.done

    @property
    def large(self) -> bool:
        """Writing the body takes long enough to do it in a thread."""
        if self._prompt is not None and self._prompt.large:
            return True
        top = self.request.sampling.logprobs
        return top is not None and sum(map(len, self._entries)) * (1 + top) > LARGE

    def response(self) -> bytes:
        """The JSON body in one piece.

        Raises:
            ServingError: the request failed.
        """
        return b"".join(self.parts())

    def parts(self) -> list[bytes]:
        """The JSON body in pieces; those of log-probabilities are short.

        Raises:
            ServingError: the request failed.
        """
        if self.error is not None:
            raise self.error
        if self._prompt is not None and not self._late:
            self._prompt.check()
        self._sliced = []
        names = (self.id, self.created, self.request.model)
        shell: Struct
        if self.chat:
            choices = [self._chat_choice(choice) for choice in self._choices]
            shell = ChatCompletionResponse(*names, choices, self.usage, prompt_logprobs=self._prompt_logprobs())
        else:
            shell = CompletionResponse(*names, [self._text_choice(choice) for choice in self._choices], self.usage)
        return fill(_json(shell), self._sliced)

    def _chat_choice(self, choice: _Choice) -> ChatChoice:
        text = "".join(self._texts[choice.index])
        made = parser_for(self.request, choice.index) if self._parsed else None
        message = AnswerMessage(text) if made is None else made.parse(text)
        return ChatChoice(choice.index, message, _reason(choice, made), self._all_logprobs(choice))

    def _text_choice(self, choice: _Choice) -> TextChoice:
        text = "".join(self._texts[choice.index])
        if self._prompt is None or not self.request.echo:
            logprobs, scored = self._all_logprobs(choice), self._prompt_logprobs()
            return TextChoice(choice.index, text, _reason(choice), logprobs, scored)
        choice.offset = len(self._prompt.text)
        reason = "length" if self.request.unanswered else _reason(choice)
        logprobs = self._prompt.text_logprobs(self.request.sampling.logprobs or 0) if self._logprobs else None
        if logprobs is not None and not self.request.unanswered:
            own = self._text_logprobs(choice, self._entries[choice.index])
            for name in logprobs.__struct_fields__:
                getattr(logprobs, name).extend(getattr(own, name))
        shown = self._in_slices(encode_fields(logprobs)) if logprobs is not None else None
        return TextChoice(choice.index, self._prompt.text + text, reason, shown, self._prompt_logprobs())

    def _prompt_logprobs(self) -> Any:
        if self._prompt is None or not self._scored:
            return UNSET
        slices = self._prompt.logprobs
        return self._in_slices(slices) if slices is not None else None

    def _all_logprobs(self, choice: _Choice) -> Any:
        if not self._logprobs:
            return None
        entries = self._entries[choice.index]
        if not self.chat:
            return self._in_slices(encode_fields(self._text_logprobs(choice, entries)))
        content = encode_list(self._chat_logprob(token, logprob) for token, logprob in entries)
        return self._in_slices([b'{"content":', *content, b"}"])

    def _in_slices(self, slices: list[bytes]) -> Any:
        """A placeholder in the place of a struct: call it in the order in which the JSON has them."""
        self._sliced.append(slices)
        return PLACEHOLDER


def _reason(choice: _Choice, parsed: AnswerParser | None = None) -> str:
    assert choice.finish is not None
    reason = choice.finish.reason
    return "tool_calls" if reason == "stop" and parsed is not None and parsed.has_calls else reason


def _fields(delta: Delta | None) -> bytes:
    """A delta's JSON without the braces."""
    return _json(delta)[1:-1] if delta is not None else b""
