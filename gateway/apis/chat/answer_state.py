"""The state of an answer: its choices, usage, failure. Shared by streamed and whole answers."""

from functools import lru_cache
from importlib.metadata import version

from blake3 import blake3
from msgspec import UNSET

from penstock.gateway.base.chat_objects import CompletionTokensDetails, PromptTokensDetails, UsageBody, serving_error
from penstock.gateway.base.common import CHAT
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.delta_builder import CONTENT
from penstock.infra.text.parsers.registry import answer_marks, parser_for, text_stream
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, Parsing
from penstock.schemas.tokens import FAILURES, Finish, Logprob

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

    __slots__ = ("_marks", "_measure", "_pending", "finish", "index", "offset", "parser", "position", "push", "stream")

    def __init__(self, index: int, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self.index = index
        self.stream = text_stream(request, detokenizer)
        self.push = self.stream.push
        self.parser = None
        if request.parsing is not None:
            self._marks = answer_marks(request.parsing, detokenizer)
            self.parser = parser_for(request, index, self._marks.marks)
        self.position = 0
        self.offset = 0
        self.finish: Finish | None = None
        self._pending: list[Scored] = []
        self._measure = detokenizer.stream() if request.sampling.logprobs is not None else None

    def show_marks(self) -> None:
        """Nobody parses what follows: the tokens of marks have their own text again."""
        self.stream.show(self._marks.texts)

    def place(self, token: int) -> int:
        """The characters of the output before this token, which is the next one. Partial characters have none."""
        assert self._measure is not None
        offset = self.offset
        self.offset += len(self._measure.push(token))
        return offset

    def score(self, token: int, logprob: Logprob | None) -> None:
        """The token that is pushed next, if its log-probability is wanted."""
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
        """It was cut off by its length."""
        return self.finish is not None and self.finish.reason == "length"

    @property
    def finish_reason(self) -> str:
        """Of an ended choice."""
        assert self.finish is not None
        reason = self.finish.reason
        return "tool_calls" if reason == "stop" and self.parser is not None and self.parser.has_calls else reason


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
        self.choices = [ChoiceState(index, request, detokenizer) for index in range(request.n)]
        self.open_choices = request.n

    @property
    def done(self) -> bool:
        """Nothing more will be shown: every choice has ended, or the request failed."""
        return not self.open_choices or self.error is not None

    @property
    def usage(self) -> UsageBody:
        prompt = self.request.prompt_tokens
        completion = 0 if self.request.unanswered else sum(choice.position for choice in self.choices)
        cached = min((choice.finish.cached_tokens if choice.finish else 0 for choice in self.choices), default=0)
        reasoning = CompletionTokensDetails(self.reasoning_tokens) if self.is_chat else UNSET
        return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached), reasoning)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.parser.reasoning_tokens for choice in self.choices if choice.parser is not None)

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
