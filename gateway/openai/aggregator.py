"""Collects token items into one JSON response, for completions and chat completions without streaming. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from gateway.openai.answer_state import AnswerState, ChoiceState
from gateway.openai.json_slices import PLACEHOLDER, encode_fields, encode_list, fill
from gateway.openai.logprobs import LARGE, LogprobFormatter
from gateway.openai.prompt_logprobs import PromptEcho
from gateway.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatCompletionResponse,
    CompletionResponse,
    TextChoice,
    UsageBody,
    message_of,
)
from infra.model.detokenizer import Detokenizer
from infra.model.parsers.registry import parser_for
from schemas.errors import ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import PROMPT, Logprob, TokenItem
from schemas.wire import unpack_tokens

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
        self._logprobs = LogprobFormatter(detokenizer) if request.sampling.logprobs is not None else None
        self._has_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._prompt = PromptEcho(request, detokenizer) if self._has_prompt_logprobs or request.echo else None
        self._texts: list[list[str]] = [[] for _ in state.choices]
        self._entries: list[list[tuple[int, Logprob]]] = [[] for _ in state.choices]
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
            if item.choice == PROMPT:
                if self._prompt is not None:
                    self._prompt.take(item)
                continue
            choice = state.choices[item.choice]
            tokens = unpack_tokens(item.tokens)
            choice.position += len(tokens)
            shown = tokens[:-1] if state.hides_last(item.finish) else tokens
            self._texts[item.choice] += map(choice.push, shown)
            if self._logprobs is not None:
                self._entries[item.choice] += zip(tokens, item.logprobs or (), strict=False)
            if item.finish is not None and state.end(choice, item.finish):
                self._texts[item.choice].append(choice.stream.finish())
        return state.done

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
        names = (state.id, state.created, self._request.model)
        shell: Struct
        if state.is_chat:
            choices = [self._chat_choice(choice) for choice in state.choices]
            shell = ChatCompletionResponse(*names, choices, state.usage, prompt_logprobs=self._prompt_logprobs())
        else:
            shell = CompletionResponse(
                *names, [self._completion_choice(choice) for choice in state.choices], state.usage
            )
        return fill(_json(shell), self._sliced)

    def _chat_choice(self, choice: ChoiceState) -> ChatChoice:
        texts, request = self._texts[choice.index], self._request
        parser = parser_for(request, choice.index) if request.parsing is not None else None
        if parser is None:
            message = AnswerMessage("".join(texts))
        else:
            message = message_of(parser.parse(*texts, limited=choice.limited))
        return ChatChoice(choice.index, message, choice.finish_reason(parser), self._choice_logprobs(choice))

    def _completion_choice(self, choice: ChoiceState) -> TextChoice:
        text = "".join(self._texts[choice.index])
        if self._prompt is None or not self._request.echo:
            logprobs, of_prompt = self._choice_logprobs(choice), self._prompt_logprobs()
            return TextChoice(choice.index, text, choice.finish_reason(), logprobs, of_prompt)
        reason = "length" if self._request.unanswered else choice.finish_reason()
        logprobs = self._echoed_logprobs(self._prompt, choice)
        return TextChoice(choice.index, self._prompt.text + text, reason, logprobs, self._prompt_logprobs())

    def _echoed_logprobs(self, prompt: PromptEcho, choice: ChoiceState) -> Any:
        """Log-probabilities of the prompt and the output behind it."""
        if self._logprobs is None:
            return None
        logprobs = prompt.completion_logprobs(self._request.sampling.logprobs or 0)
        if not self._request.unanswered:
            own = self._logprobs.completion(self._entries[choice.index], len(prompt.text))
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
            return self._in_slices(encode_fields(self._logprobs.completion(entries, 0)))
        content = encode_list(self._logprobs.chat(token, logprob) for token, logprob in entries)
        return self._in_slices([b'{"content":', *content, b"}"])

    def _in_slices(self, slices: list[bytes]) -> Any:
        """A placeholder for a struct; call it in the order in which the structs appear in the JSON."""
        self._sliced.append(slices)
        return PLACEHOLDER
