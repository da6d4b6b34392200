"""Renders token items as server-sent events, by the state of an answer: its choices, usage, failure. Pure.

Everything shown is a function of each choice's tokens, so another gateway that is given the same items writes the same
events and can continue after any of them. Items come from ``penstock.schemas.token_dedup.TokenReassembler``: in order,
each token once. Whole answers have the same state (``aggregator``).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import version
from itertools import compress

import msgspec
from blake3 import blake3
from msgspec import UNSET

from penstock.gateway.apis.chat.logprobs import LogprobFormatter, PromptEcho
from penstock.gateway.base.chat_objects import (
    ChatLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    TextLogprobs,
    UsageBody,
    serving_error,
)
from penstock.gateway.base.event_stream import COMMENT, DONE, error_event, invalid_event_id, parse_position
from penstock.gateway.base.request_bodies import CHAT
from penstock.infra.text.detokenizer import Detokenizer, TextStream
from penstock.infra.text.parsers.delta_builder import CONTENT, Delta
from penstock.infra.text.parsers.registry import answer_marks, parser_for, special_texts, text_stream
from penstock.schemas.done import Usage, counts_in, total
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, Parsing
from penstock.schemas.tokens import COUNTS, FAILURES, PROMPT, WHOLE_REQUEST, Finish, Logprob, TokenItem
from penstock.schemas.wire import TOKEN_BYTES, unpack_tokens

Scored = tuple[int, Logprob]  # a token and its log-probability

REASONING_CONTENT, REASONING = "reasoning_content", "reasoning"
BOTH = "both"

_BUILD = version("penstock")


class ChoiceState:
    """
    Attributes:
        position: tokens consumed.
        offset: characters of their text, for the log-probabilities of completions.
        push: from the next token to the text that can be shown.
        stream: of the texts of its tokens.
        parser: of that text; None: it is not parsed.
    """

    __slots__ = (
        *("_called", "_measure", "_pending", "_texts"),
        *("finish", "index", "offset", "parser", "position", "push", "stream"),
    )

    def __init__(self, index: int, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self.index = index
        self._called = "function_call" if request.shown.function_call else "tool_calls"
        self.stream = text_stream(request, detokenizer)
        self.push = self.stream.push
        self.parser = None
        special = special_texts(request, detokenizer)
        if request.parsing is not None:
            marks = answer_marks(request.parsing, detokenizer)
            self._texts = {**special, **marks.texts}
            self.parser = parser_for(request, index, marks.marks)
        self.position = 0
        self.offset = 0
        self.finish: Finish | None = None
        self._pending: list[Scored] = []
        self._measure: TextStream | None = None
        if request.sampling.logprobs is not None:
            self._measure = detokenizer.stream(marks=special, continues=request.continues)

    def show_marks(self) -> None:
        """Stop parsing: from now on, the tokens of marks have their own text again."""
        self.stream.show(self._texts)

    def place(self, token: int) -> int:
        """Number of characters of the output before the next token, without partial characters."""
        assert self._measure is not None
        offset = self.offset
        self.offset += len(self._measure.push(token))
        return offset

    def score(self, token: int, logprob: Logprob | None) -> None:
        """Note the token that is pushed next, if its log-probability was requested."""
        if logprob is not None:
            self._pending.append((token, logprob))

    def content_scores(self, text: str) -> list[Scored]:
        """The tokens of the content that the last one made final. Those of reasoning, calls and marks have none.

        Args:
            text: of an answer that is not parsed: what the last token added.
        """
        grew = self.parser.grew if self.parser is not None else CONTENT if text else 0
        if not grew:
            return []
        scores, self._pending = self._pending, []
        return scores if grew & CONTENT else []

    @property
    def limited(self) -> bool:
        """The choice was cut off by its length."""
        return self.finish is not None and self.finish.reason == "length"

    @property
    def finish_reason(self) -> str:
        """The finish reason of an ended choice."""
        assert self.finish is not None
        reason = self.finish.reason
        return self._called if reason == "stop" and self.parser is not None and self.parser.has_calls else reason


@lru_cache(maxsize=64)  # of revisions, which workers name
def _fingerprint(revision: str) -> str:
    return "fp_" + blake3(f"{revision}/{_BUILD}".encode()).hexdigest()[:10]


class AnswerState:
    """
    Attributes:
        open_choices: that have not ended.
        error: why the request failed, or why its answer ends here.
        fingerprint: changes with the revision of the model and the build that shows the answer.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self.request = request
        self.is_chat = request.endpoint == CHAT
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + request.id
        self.created = request.created_ns // 1_000_000_000
        self.fingerprint = _fingerprint(request.revision)
        self.error: ServingError | None = None
        self._counts: dict[int, Usage] = {}  # as reported by the server that computed the answer
        self.choices = [ChoiceState(index, request, detokenizer) for index in range(request.n)]
        self.open_choices = request.n

    @property
    def done(self) -> bool:
        """Nothing more will be shown: every choice has ended, or the request failed."""
        return not self.open_choices or self.error is not None

    @property
    def usage(self) -> UsageBody:
        if self._counts and (counts := total(self._counts, self.request.n)) is not None:
            return self._usage(counts.prompt, counts.completion, counts.cached)
        prompt = self.request.prompt_tokens
        completion = 0 if self.request.unanswered else sum(choice.position for choice in self.choices)
        cached = min((choice.finish.cached_tokens if choice.finish else 0 for choice in self.choices), default=0)
        return self._usage(prompt, completion, cached)

    def _usage(self, prompt: int, completion: int, cached: int) -> UsageBody:
        reasoning = CompletionTokensDetails(self.reasoning_tokens) if self.is_chat else UNSET
        return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached), reasoning)

    @property
    def reasoning_tokens(self) -> int:
        found = sum(choice.parser.reasoning_tokens for choice in self.choices if choice.parser is not None)
        counts = total(self._counts, self.request.n) if self._counts else None
        if counts is None:
            return found
        return counts.reasoning if counts.reasoning >= 0 else min(found, counts.completion)

    def count(self, item: TokenItem) -> None:
        """Note the counts in an item, if it has some."""
        if item.choice == COUNTS:
            self._counts[item.first] = counts_in(item)

    def hides_last(self, finish: Finish | None) -> bool:
        """Whether the last token is a stop token, which is counted but not shown, like a stop string."""
        if self.request.unanswered:
            return finish is not None
        return finish is not None and finish.stop.__class__ is int and not self.request.stops_shown

    def end(self, choice: ChoiceState, finish: Finish) -> bool:
        """Record the end of a choice; False: the whole request failed."""
        if finish.reason in FAILURES:
            self.error = serving_error(finish.code or finish.reason, finish.message)
            return False
        choice.finish = finish
        self.open_choices -= 1
        return True


def reasoning_names(parsing: Parsing | None, *, streamed: bool) -> tuple[str, ...]:
    """The fields of a message or delta that have its reasoning, or null; none: the model's format is not known.

    By default, a whole answer has it under both names that clients read. In streams it is sent once.
    """
    if parsing is None or not parsing.reasoning or parsing.joined:
        return ()
    if parsing.names == BOTH or not (parsing.names or streamed):
        return (REASONING_CONTENT, REASONING)
    return (parsing.names or REASONING_CONTENT,)


_json = msgspec.json.Encoder().encode
_IDS = [b"id: %d" % position for position in range(4_096)]  # formatting them would be a third of an event's cost


class _StreamedChoice:
    """
    Attributes:
        parser: None: text is content, unchanged.
        ids: tokens that were in no event yet, if events have token ids.
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
            part_of: this is the first of several requests that share a stream. The stream has this request's names, and
                the caller ends it.
            offset: index of the first choice.
        """
        self._state = state = AnswerState(request, detokenizer)
        self._logprobs: LogprobFormatter | None = None
        if request.sampling.logprobs is not None:
            self._logprobs = LogprobFormatter(detokenizer, as_ids=request.shown.tokens_as_ids)
        self._detailed = self._logprobs is not None or request.shown.token_ids or request.shown.usage
        self._echo = PromptEcho(request, detokenizer) if request.echo else None
        kind = "chat.completion.chunk" if state.is_chat else "text_completion"
        first = state if part_of is None else AnswerState(part_of, detokenizer)
        names = {"id": first.id, "object": kind, "created": first.created, "model": request.named}
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
            if state.error is not None or not state.open_choices:
                break
            if item.choice < WHOLE_REQUEST:
                if self._echo is not None and item.choice == PROMPT:
                    self._echo.take(item)
                state.count(item)
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
        if (state.error is not None or not state.open_choices) and not self._closed:
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
        """Any event except the most common kind: the first of a choice, one of several choices, or already seen."""
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
        """The bytes of an event after its text."""
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
        shown = Delta(content=delta.content, tool_calls=delta.tool_calls)
        if delta.tool_calls and self._state.request.shown.function_call:
            shown = Delta(content=delta.content, function_call=delta.tool_calls[0].function)
        rest = _json(shown)[1:-1]
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
