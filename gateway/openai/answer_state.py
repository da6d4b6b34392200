"""The state of an answer: its choices, usage, failure. Shared by streamed and whole answers."""

from gateway.openai.common import CHAT
from gateway.openai.responses import PromptTokensDetails, UsageBody, serving_error
from infra.model.detokenizer import Detokenizer
from infra.model.parsers.answer_parser import AnswerParser
from infra.model.parsers.registry import text_stream
from schemas.errors import ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import FAILURES, Finish


class ChoiceState:
    """
    Attributes:
        position: tokens consumed.
        offset: characters of their text, for the log-probabilities of completions.
        push: from the next token to the text that can be shown.
    """

    __slots__ = ("finish", "index", "offset", "position", "push", "stream")

    def __init__(self, index: int, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self.index = index
        self.stream = text_stream(request, detokenizer)
        self.push = self.stream.push
        self.position = 0
        self.offset = 0
        self.finish: Finish | None = None

    @property
    def limited(self) -> bool:
        """It was cut off by its length."""
        return self.finish is not None and self.finish.reason == "length"

    def finish_reason(self, parser: AnswerParser | None = None) -> str:
        """The finish reason of an ended choice. ``parser``: of its text, if it was parsed."""
        assert self.finish is not None
        reason = self.finish.reason
        return "tool_calls" if reason == "stop" and parser is not None and parser.has_calls else reason


class AnswerState:
    """
    Attributes:
        open_choices: that have not ended.
        error: why the request failed, or why its answer ends here.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self.request = request
        self.is_chat = request.endpoint == CHAT
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + request.id
        self.created = request.created_ns // 1_000_000_000
        self.error: ServingError | None = None
        self.choices = [ChoiceState(index, request, detokenizer) for index in range(request.n)]
        self.open_choices = request.n

    @property
    def done(self) -> bool:
        """Nothing more will be shown: every choice has ended, or the request failed."""
        return not self.open_choices or self.error is not None

    @property
    def usage(self) -> UsageBody:
        prompt = len(self.request.prompt) // 4
        completion = 0 if self.request.unanswered else sum(choice.position for choice in self.choices)
        cached = min((choice.finish.cached_tokens if choice.finish else 0 for choice in self.choices), default=0)
        return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))

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
