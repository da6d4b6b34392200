"""Parses the text of one choice as it is generated."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from penstock.infra.text.parsers.delta_builder import BEGUN, CLOSED, CONTENT, LAYOUT, REASONING, Delta, DeltaBuilder
from penstock.infra.text.parsers.families import Thoughts
from penstock.infra.text.parsers.harmony import HarmonyMarks, read_harmony
from penstock.infra.text.parsers.reader import NONE, SPACE, TOKEN, Markers, Marks, Reader, Steps
from penstock.infra.text.parsers.tool_formats import ContentMarks, Offered, ToolFormat, read_content, try_calls
from penstock.schemas.requests import Parsing, Stop


class ThoughtMarks:
    """The marks of a row's thoughts, as one vocabulary writes them.

    Attributes:
        begins: the characters with which the marks begin.
        again: more thoughts may follow content.
        repeated: closing marks that count once, however often they are written.
    """

    def __init__(self, thoughts: Thoughts, marks: Marks) -> None:
        # A word is no mark without its line break.
        self.opening = tuple(
            marks.within(each if each.strip().isalpha() else each.rstrip()) for each in thoughts.opening
        )
        self.closing = tuple(marks.within(each) for each in thoughts.closing)
        self.begins = "".join({mark[0] for mark in (*self.opening, *self.closing)})
        both = (*self.opening, *self.closing)
        self.again = thoughts.again and all(map(TOKEN.match, both))
        # Models repeat a closing mark, which as a token is part of nothing there.
        self.repeated = tuple(mark for mark in self.closing if TOKEN.match(mark))


def read_reasoning(
    reader: Reader,
    deltas: DeltaBuilder,
    tags: ThoughtMarks,
    tools: ToolFormat | None,
    offered: Offered,
    *,
    in_reasoning: bool,
    joined: bool = False,
    headed: bool = False,
) -> Steps[str]:
    """Read an answer's reasoning, if it begins with some.

    A model may try a call in its thoughts, and some models call without a closing mark. Which of the two a call was is
    known when the mark comes, or the text ends: until then, the call and what follows it are held back.

    Args:
        joined: reasoning and its marks are part of the content.
        headed: it begins within a header, whose spaces are part of nothing.
    Returns: "", or at the end of the text the calls that ended the reasoning, and what follows them.
    """
    if in_reasoning:
        deltas.thought = BEGUN
    space = yield from reader.space()
    opening = yield from reader.literal(*tags.opening)
    if not opening and not in_reasoning:
        if stray := (yield from reader.literal(*tags.closing)):  # of thoughts that the prompt has closed
            yield from _close(reader, deltas, tags, stray, joined=joined, thought=0)
        elif not headed:
            deltas.content(space)
        return ""
    deltas.thought = BEGUN
    thought = deltas.verbatim if joined else deltas.reasoning
    thought(space + opening if joined else "" if opening else space)
    ends = Markers(*tags.closing, *(tools.openers if tools is not None else ()))
    while mark := (yield from reader.until(ends, thought)):
        if mark in tags.closing:
            yield from _close(reader, deltas, tags, mark, joined=joined)
            return ""
        assert tools is not None
        reader.tape(mark)
        called = False
        while mark and mark not in tags.closing:
            probe = deltas.probe()
            called = (yield from try_calls(reader, probe, tools, offered, mark, _drop)) or called
            if not called:
                break
            mark = yield from reader.until(ends, _drop)
        text = reader.taped()
        if mark in tags.closing:
            thought(text[: -len(mark)])
            yield from _close(reader, deltas, tags, mark, joined=joined)
            return ""
        if called:
            return text
        if not reader.cut_short:  # else it may have become a call
            thought(text)
    return ""


def _close(
    reader: Reader, deltas: DeltaBuilder, tags: ThoughtMarks, mark: str, *, joined: bool, thought: int = CLOSED
) -> Steps[None]:
    deltas.thought = thought
    if joined:
        deltas.verbatim(mark)
        return
    deltas.end_reasoning()
    while tags.repeated:
        yield from reader.scan(_space, deltas.content)
        if not (yield from reader.literal(*tags.repeated)):
            return
        deltas.skip()


def _space(text: str, at: int) -> tuple[int, bool]:
    end = len(text) - len(text[at:].lstrip(SPACE))
    return end, end < len(text)


def _drop(text: str) -> None:
    """For text that is on the tape."""


class AnswerFormat(NamedTuple):
    """How the answers of a model are written, whatever the request.

    Attributes:
        reasoning: None: no reasoning is separated.
        tools: None: no calls are parsed.
        content: marks around the content and in it; None: there are none.
        harmony: the text is in the harmony format, which has marks of its own for both; None: it is not.
        harmony_calls: parse tool calls in harmony.
        marks: that are tokens.
    """

    reasoning: ThoughtMarks | None = None
    tools: ToolFormat | None = None
    content: ContentMarks | None = None
    harmony: HarmonyMarks | None = None
    harmony_calls: bool = False
    marks: Marks = NONE

    @property
    def marked_content(self) -> bool:
        """There may be calls or marks in the content."""
        return (
            self.tools is not None or self.content is not None or (self.reasoning is not None and self.reasoning.again)
        )


class AnswerParser:
    """``push`` the text of each token, then ``finish``; without stop strings, in any pieces, or all of it to ``parse``.

    Workers (to end a generation) and gateways (to show it) run this code over the same tokens. What it has found after
    k tokens depends on those k tokens only, so another process can take over at any k.

    Attributes:
        marks: that are tokens, and come as their characters.
        reasoning_tokens: pushed so far that reasoning and its marks took, as ``penstock.schemas.done`` counts them.
    """

    __slots__ = (
        "_begins",
        "_deltas",
        "_reader",
        "_reasoned",
        "_steps",
        "_unassigned",
        "_unsearched",
        "marks",
        "reasoning_tokens",
    )

    def __init__(
        self, form: AnswerFormat, parsing: Parsing, stop: Stop, call_id: Callable[[int], str], *, stops_shown: bool
    ) -> None:
        """
        Args:
            parsing, stop, stops_shown: of the request.
            call_id: from a call's index to its id.
        """
        marked = form.marked_content
        self._reader = Reader()
        self._deltas = DeltaBuilder(
            call_id,
            tools=marked,
            one_call=parsing.one_call,
            stops=stop.strings,
            stops_shown=stops_shown,
            marks=form.marks,
        )
        self.marks = form.marks
        # The reasoning of an answer whose content must not be empty, until there is content; None: of any other.
        self._reasoned: list[str] | None = [] if parsing.nonempty else None
        self._unassigned = 0  # tokens before there was anything of an answer
        self.reasoning_tokens = 0
        self._unsearched = max(stop.min_tokens - 1, 0)
        self._deltas.searching = not self._unsearched
        self._steps: Steps[None] | None = _steps_of(self._reader, self._deltas, form, parsing)
        # Most answers are content from the first word on, whose first character tells so if all else is reasoning.
        self._begins = ""
        if form.reasoning is not None and not (marked or form.harmony or parsing.thinking or parsing.prefilled):
            self._begins = form.reasoning.begins

    @property
    def passthrough(self) -> bool:
        """All further text is content, unchanged."""
        return self._steps is None and self._reasoned is None and self._deltas.passthrough

    @property
    def has_calls(self) -> bool:
        return self._deltas.calls > 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the content; nothing follows."""
        return self._deltas.stop

    def push(self, text: str) -> Delta | None:
        """What the text of a token ("": it has none yet) adds; None: nothing yet."""
        self.feed(text)
        delta = self._deltas.take()
        if self._reasoned is not None:
            self._keep(delta)
        return delta

    @property
    def grew(self) -> int:
        """What the last ``push``, ``feed`` or ``finish`` added: bits of REASONING, CONTENT, CALL and LAYOUT."""
        return self._deltas.grew

    def feed(self, text: str) -> None:
        """As ``push``; what it adds is returned by the next ``push`` or ``finish``."""
        self._deltas.grew = 0
        closed = self._deltas.thought == CLOSED
        self._take_in(text)
        if closed and self._deltas.thought == CLOSED:
            return
        last = self._deltas.last
        if self._deltas.thought or last == REASONING:
            self.reasoning_tokens += 1 + self._unassigned
            self._unassigned = 0
        elif last or self._deltas.grew & LAYOUT:
            self._unassigned = 0
        else:
            self._unassigned += 1

    def _take_in(self, text: str) -> None:
        if self._unsearched:
            self._unsearched -= 1
        elif not self._deltas.searching:
            self._deltas.searching = True
        if not text or self._deltas.stop is not None:
            return
        begins, self._begins = self._begins, ""
        if begins and (first := text.lstrip(SPACE)[:1]) and first not in begins:
            self._steps = None
        if self._steps is None:
            self._deltas.content(text)
        else:
            self._reader.feed(text)
            self._step()

    def finish(self, text: str = "", *, limited: bool = False, whole: bool = False) -> Delta | None:
        """Parse the last piece, and the text held back before it.

        Args:
            limited: the answer was cut off by its length: the beginning of a call is not shown as text.
            whole: nothing was shown yet. A call that was cut off is none then: its arguments are not what the model
                meant. After complete calls it is left out, else it is content.
        """
        self._deltas.grew = 0
        if self._steps is None:
            self._deltas.content(text)
        self._reader.feed(text)
        self._reader.ended, self._reader.limited = True, limited
        if self._steps is not None:
            self._step()
        if whole and limited and self._deltas.call_open:
            self._deltas.drop_call()
        self._deltas.finish(limited=limited)
        delta = self._deltas.take()
        self._keep(delta)
        if not self._reasoned or self.has_calls:
            return delta
        self._deltas.grew |= CONTENT
        shown = delta.reasoning_content if delta is not None and not whole else None
        return Delta(content="".join(self._reasoned), reasoning_content=shown)

    def _keep(self, delta: Delta | None) -> None:
        if delta is None or self._reasoned is None:
            return
        if delta.content and delta.content.strip():
            self._reasoned = None
        elif delta.reasoning_content:
            self._reasoned.append(delta.reasoning_content)

    def parse(self, *texts: str, limited: bool = False) -> Delta:
        """What the deltas of a whole answer add up to.

        Args:
            texts: of each token; without stop strings, in any pieces.
            limited: as for ``finish``.
        """
        for text in texts:
            self.feed(text)
        return self.finish(limited=limited, whole=True) or Delta()

    def _step(self) -> None:
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
            if remaining := self._reader.rest():
                self._deltas.content(remaining)


def _steps_of(reader: Reader, deltas: DeltaBuilder, form: AnswerFormat, parsing: Parsing) -> Steps[None]:
    offered, prefilled = Offered(parsing.texts, frozenset(parsing.functions)), parsing.prefilled
    if form.harmony is not None:
        yield from read_harmony(
            reader, deltas, form.harmony, offered.names, calls=form.harmony_calls, prefilled=prefilled
        )
        return
    rest = ""
    in_content = prefilled and not parsing.thinking
    tags = form.reasoning
    if tags is not None and not in_content:
        if prefilled:
            deltas.continue_reasoning()
        headed = form.content is not None and bool(form.content.header[1])
        rest = yield from read_reasoning(
            reader, deltas, tags, form.tools, offered,
            in_reasoning=parsing.thinking, joined=parsing.joined, headed=headed,
        )  # fmt: skip
        if rest:  # the reasoning was not closed: it ends where this begins, which is all that is left
            reader = reader.within(rest)
    if form.marked_content:
        content = form.content or ContentMarks()
        again = tags.again and not parsing.joined if tags is not None else False
        if tags is not None and again:
            content = dataclasses.replace(content, layout=(*content.layout, *tags.closing), thoughts=tags.opening)
        while (yield from read_content(reader, deltas, form.tools, offered, marks=content, begun=in_content)):
            assert tags is not None
            in_content = True
            if deltas.thought:
                deltas.reasoning("\n")
            rest = yield from read_reasoning(reader, deltas, tags, form.tools, offered, in_reasoning=True)
            if rest:
                reader = reader.within(rest)
    if rest:
        deltas.content(reader.rest())
