"""Collects token items into one JSON response, for completions and chat completions without streaming. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from penstock.gateway.apis.chat.logprobs import LARGE, LogprobFormatter, PromptEcho
from penstock.gateway.apis.chat.stream_renderer import AnswerState, ChoiceState, reasoning_names
from penstock.gateway.base.chat_objects import (
    AnswerMessage,
    ChatChoice,
    ChatCompletionResponse,
    CompletionResponse,
    TextChoice,
    UsageBody,
    message_of,
)
from penstock.gateway.base.event_stream import PLACEHOLDER, encode_fields, encode_list, fill
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.delta_builder import Delta
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import PROMPT, WHOLE_REQUEST, Logprob, TokenItem
from penstock.schemas.wire import unpack_tokens

_json = msgspec.json.Encoder().encode


class AnswerAggregator:
    """A whole answer: the same text and usage as streamed, after the prompt if that is echoed.

    Args:
        late: log-probabilities of the prompt may have expired, as the token log is kept for less time than records.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer, *, late: bool = False) -> None:
        self._state = state = AnswerState(request, detokenizer)
        self._request = request
        self._late = late
        self._logprobs: LogprobFormatter | None = None
        if request.sampling.logprobs is not None:
            self._logprobs = LogprobFormatter(detokenizer, as_ids=request.shown.tokens_as_ids)
        self._has_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._prompt = PromptEcho(request, detokenizer) if self._has_prompt_logprobs or request.echo else None
        self._texts: list[list[str]] = [[] for _ in state.choices]
        self._deltas: list[Delta | None] = [None] * len(state.choices)
        self._ids: list[bytearray] = [bytearray() for _ in state.choices]
        self._entries: list[list[tuple[int, Logprob, int]]] = [[] for _ in state.choices]  # with characters before it
        self._sliced: list[list[bytes]] = []  # JSON of log-probabilities, in the order of the body

    @property
    def usage(self) -> UsageBody:
        return self._state.usage

    @property
    def error(self) -> ServingError | None:
        return self._state.error

    def push(self, items: Iterable[TokenItem]) -> bool:
        """Take in items; True once the answer is complete or the request has failed."""
        state = self._state
        for item in items:
            if state.done:
                break
            if item.choice < WHOLE_REQUEST:
                if self._prompt is not None and item.choice == PROMPT:
                    self._prompt.take(item)
                state.count(item)
                continue
            self._item(state.choices[item.choice], item)
        return state.done

    def _item(self, choice: ChoiceState, item: TokenItem) -> None:
        state, texts = self._state, self._texts[choice.index]
        tokens = unpack_tokens(item.tokens)
        choice.position += len(tokens)
        shown = tokens[:-1] if state.hides_last(item.finish) else tokens
        if self._request.shown.token_ids:
            self._ids[choice.index] += item.tokens
        if choice.parser is None and self._logprobs is None:
            texts += map(choice.push, shown)
        else:
            self._scored(choice, item, tokens, len(shown))
        if item.finish is not None and state.end(choice, item.finish):
            rest = choice.stream.finish()
            if choice.parser is not None:
                self._deltas[choice.index] = choice.parser.finish(rest, limited=choice.limited, whole=True)
            texts.append(rest)
            if state.is_chat:
                self._entries[choice.index] += [(*each, 0) for each in choice.content_scores(rest)]

    def _scored(self, choice: ChoiceState, item: TokenItem, tokens: Sequence[int], shown: int) -> None:
        """Tokens of an answer that is parsed, or has log-probabilities."""
        parser, texts, entries = choice.parser, self._texts[choice.index], self._entries[choice.index]
        logprobs = item.logprobs if self._logprobs is not None and item.logprobs else ()
        chat = self._state.is_chat
        for place, token in enumerate(tokens):
            logprob = logprobs[place] if place < len(logprobs) else None
            if chat and place < shown:
                choice.score(token, logprob)
            elif logprob is not None and not chat:
                entries.append((token, logprob, choice.place(token)))
            text = choice.push(token) if place < shown else ""
            if parser is not None:
                parser.feed(text)
            else:
                texts.append(text)
            if chat and logprobs:
                entries += [(*each, 0) for each in choice.content_scores(text)]

    @property
    def large(self) -> bool:
        """Encoding the body takes long enough for a thread."""
        if self._prompt is not None and self._prompt.large:
            return True
        top = self._request.sampling.logprobs
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
        state = self._state
        if state.error is not None:
            raise state.error
        if self._prompt is not None and not self._late:
            self._prompt.check()
        self._sliced = []
        names = (state.id, state.created, self._request.named)
        shell: Struct
        if state.is_chat:
            choices = [self._chat_choice(choice) for choice in state.choices]
            shell = ChatCompletionResponse(
                *names,
                choices,
                state.usage,
                prompt_logprobs=self._prompt_logprobs(),
                system_fingerprint=state.fingerprint,
                prompt_token_ids=self._prompt_ids(),
            )
        else:
            shell = CompletionResponse(
                *names,
                [self._completion_choice(choice) for choice in state.choices],
                state.usage,
                system_fingerprint=state.fingerprint,
            )
        return fill(_json(shell), self._sliced)

    def _chat_choice(self, choice: ChoiceState) -> ChatChoice:
        parsing = self._request.parsing
        if parsing is None:
            message = AnswerMessage("".join(self._texts[choice.index]))
        else:
            whole = self._deltas[choice.index] or Delta()
            message = message_of(
                whole,
                reasoning_names(parsing, streamed=False),
                hidden=parsing.hidden,
                as_function=self._request.shown.function_call,
            )
        logprobs = self._choice_logprobs(choice)
        return ChatChoice(choice.index, message, choice.finish_reason, logprobs, self._token_ids(choice))

    def _completion_choice(self, choice: ChoiceState) -> TextChoice:
        text = "".join(self._texts[choice.index])
        if self._prompt is None or not self._request.echo:
            reason, logprobs = choice.finish_reason, self._choice_logprobs(choice)
        else:
            reason = "length" if self._request.unanswered else choice.finish_reason
            logprobs = self._echoed_logprobs(self._prompt, choice)
            text = self._prompt.text + text
        of_prompt, ids = self._prompt_logprobs(), self._token_ids(choice)
        return TextChoice(choice.index, text, reason, logprobs, of_prompt, ids, self._prompt_ids())

    def _token_ids(self, choice: ChoiceState) -> Any:
        shown = self._request.shown.token_ids and not self._request.unanswered
        return unpack_tokens(bytes(self._ids[choice.index])).tolist() if shown else UNSET

    def _prompt_ids(self) -> Any:
        return unpack_tokens(self._request.prompt).tolist() if self._request.shown.token_ids else UNSET

    def _echoed_logprobs(self, prompt: PromptEcho, choice: ChoiceState) -> Any:
        """Log-probabilities of the prompt and the output after it."""
        if self._logprobs is None:
            return None
        logprobs = prompt.completion_logprobs(self._request.sampling.logprobs or 0)
        if not self._request.unanswered:
            before = len(prompt.text)
            entries = self._entries[choice.index]
            own = self._logprobs.completion((token, logprob, before + at) for token, logprob, at in entries)
            for name in logprobs.__struct_fields__:
                getattr(logprobs, name).extend(getattr(own, name))
        return self._in_slices(encode_fields(logprobs))

    def _prompt_logprobs(self) -> Any:
        if self._prompt is None or not self._has_prompt_logprobs:
            return UNSET
        slices = self._prompt.logprobs
        return self._in_slices(slices) if slices is not None else None

    def _choice_logprobs(self, choice: ChoiceState) -> Any:
        if self._logprobs is None:
            return None
        entries = self._entries[choice.index]
        if not self._state.is_chat:
            return self._in_slices(encode_fields(self._logprobs.completion(entries)))
        content = encode_list(self._logprobs.chat(token, logprob) for token, logprob, _ in entries)
        return self._in_slices([b'{"content":', *content, b',"refusal":null}'])

    def _in_slices(self, slices: list[bytes]) -> Any:
        """A placeholder for a struct; call it in the order in which the structs appear in the JSON."""
        self._sliced.append(slices)
        return PLACEHOLDER
