"""A model's Jinja chat template: messages → prompt text. Compiled once; of the tokens, only special ones have a role.

Renders as ``apply_chat_template`` of transformers does (``transformers/utils/chat_template_utils.py``, 5.17), which
templates are written for: the same sandbox, extensions, filters, globals and variables. It needs jinja2 alone.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

from jinja2.exceptions import SecurityError

from penstock.infra.text.template_sandbox import Compiled, OutOfTime, TooLarge

Message = dict[str, Any]

_TOOL_USE, _RAG = "tool_use", "rag"  # names of templates beside the default one
_REASONING = ("reasoning_content", "thinking", "reasoning")  # its names; if a message has several, the first counts
_REASONING_NAMES = frozenset(_REASONING)
_PROBE, _SECOND = "probe text", "second text"
_PROBE_CALL = {"id": "call00000", "type": "function", "function": {"name": "sounding", "arguments": {"x": 1}}}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
# What a template may need, as it is tried: nothing first.
_GIVEN: Mapping[str, Mapping[str, list[Message]]] = {
    "": {},
    "tools": {"tools": [_PROBE_TOOL]},
    "documents": {"documents": [{"title": "t", "text": "d"}]},
}
# By role, what stands before and after a message of it: templates refuse what does not alternate.
_AROUND: Mapping[str, tuple[list[Message], list[Message]]] = {
    "user": ([], []),
    "system": ([], [{"role": "user", "content": "u"}]),
    "developer": ([], [{"role": "user", "content": "u"}]),
    "assistant": ([{"role": "user", "content": "u"}], [{"role": "user", "content": "v"}]),
    "tool": (
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}],
        [],
    ),
}


class PromptEnd(Enum):
    """Where a prompt ends: where the assistant's next message begins, after the last message, or after its text."""

    generation = "generation"
    last_message = "last_message"
    last_text = "last_text"


class TemplateError(Exception):
    """The template cannot be used, or refuses these messages; the text is the template's own."""


class TemplateBudgetError(TemplateError):
    """Rendering these messages takes too long, or makes too much text. ``cpu_s``: the time it may take; 0: too much."""

    def __init__(self, text: str, cpu_s: float = 0.0) -> None:
        super().__init__(text)
        self.cpu_s = cpu_s


class ChatTemplate:
    """Renders conversations.

    Attributes:
        own_variables: names that ``render`` gives to the template itself, or that ``apply_chat_template`` reserves.
        writes_developer: it writes messages of the role "developer", the newer name of "system".
        source: its text.
        needs: what it renders no conversation without: "tools", "documents", or a variable's name; "": nothing.
        wants_parts: it takes a message's content as a list of typed parts and fails on plain strings.
        text_arguments: it joins the arguments of a call to its own text, and fails on objects.
        first_call: it writes only the first of several calls in a message.
        joins_system: it writes only one of several system messages at the beginning.
        leads_system: it leaves out system messages that come later.
        null_content: it leaves out the calls of a message unless its content is null.
        walks_parts: roles in whose messages it takes a list of typed parts and writes their texts.
        keeps_texts: it writes the text of every message, however old.
        lead: what stands between the text beside calls, which it leaves out, and the name of the first call; "": it
            writes that text, or cannot write it so.
        splits_text: it writes the text beside calls only as a message before them.
        omits: what it never writes: "tools", "calls", "text beside calls".
        named: the model's templates for other occasions: "tool_use", "rag".
    """

    own_variables = frozenset(
        {"self", "messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt", "kwargs"}
        | {"return_assistant_tokens_mask", "continue_final_message"}
    )

    def __init__(self, source: str, special_tokens: Mapping[str, str], named: Mapping[str, str] | None = None) -> None:
        """
        Args:
            special_tokens: "bos_token", "eos_token", ... → text, as templates refer to them.
            named: sources of the model's other templates.
        Raises:
            TemplateError: one does not compile, or fails on every conversation that it is tried with.
        """
        try:
            self._compiled = Compiled(source)
        except Exception as error:  # of several kinds, SyntaxError and RecursionError among them
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        self.source = source
        self.writes_developer = False
        self._names_reasoning = _READS_REASONING.search(source) is not None
        self._special_tokens = dict(special_tokens)
        self.wants_parts = self.text_arguments = self.null_content = False
        self.lead, self.splits_text = "", False
        self.needs = self._probe()
        self._try_calls()
        self._try_text_beside_calls()
        self._try_systems()
        self.walks_parts = frozenset(role for role in _AROUND if self._walks(role))
        self.keeps_texts = self._keeps_texts()
        self.named: dict[str, ChatTemplate] = {}
        for name, other in (named or {}).items():
            try:
                self.named[name] = ChatTemplate(other, special_tokens)
            except TemplateError as error:
                raise TemplateError(f"template {name!r}: {error}") from error

    def names(self, role: str) -> bool:
        """Whether it mentions this role, so that it does something about it."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def suited(self, tools: object = None, documents: object = None) -> "ChatTemplate":
        """The model's template for a conversation with these: "tool_use", as in ``apply_chat_template``, or "rag"."""
        if tools and _TOOL_USE in self.named:
            return self.named[_TOOL_USE]
        return self.named[_RAG] if documents and _RAG in self.named else self

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        ends: PromptEnd = PromptEnd.generation,
        documents: Sequence[Message] | None = None,
        /,
        **variables: Any,
    ) -> str:
        """The prompt.

        Args:
            messages, tools, documents, variables: plain JSON values; the template cannot change them.
            ends: where it ends.
        Raises:
            TemplateError: the template refuses these messages, or a variable has a reserved name.
            TemplateBudgetError: they take too long; see ``template_sandbox.cpu_budget``.
        """
        if taken := self.own_variables & variables.keys():
            raise TemplateError(f"these variables are set by the server: {', '.join(sorted(taken))}")
        if self.wants_parts:
            messages = [_in_parts(message) for message in messages]
        beside: dict[str, str] = {}
        nonce = secrets.token_hex(8) if self.lead else ""
        if self.lead:
            messages = [_beside_calls(message, beside, nonce) for message in messages]
        mark = last = ""
        if ends is PromptEnd.last_text:
            mark = _MARK + secrets.token_hex(8).upper()
            last, marked = _marked(messages[-1], f"{mark} ")
            messages = [*messages[:-1], marked]
        try:
            text = self._compiled.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": [self._with_reasoning(each) for message in messages for each in self._calling(message)],
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": ends is PromptEnd.generation,
                }
            )
        except RecursionError:
            raise TemplateError("tools, arguments or variables are nested too deeply") from None
        except OutOfTime as error:
            raise TemplateBudgetError(str(error), error.cpu_s) from None
        except TooLarge as error:
            raise TemplateBudgetError(str(error)) from None
        except Exception as error:  # templates are code and may raise anything
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        if beside:
            text = self._with_texts(text, beside, nonce)
        return _cut_at(text, mark, last) if mark else text

    def _with_texts(self, text: str, beside: dict[str, str], nonce: str) -> str:
        """A prompt with the texts of ``_beside_calls`` where their keys are, in one pass over it."""
        between = "\n" if _TAG.match(self.lead) else ""
        first, *others = text.split(nonce)
        out = [first]
        for each in others:
            number, behind = each[:_DIGITS], each[_DIGITS:]
            if number in beside and out[-1].endswith(self.lead):
                out[-1] = out[-1].removesuffix(self.lead)
                out += [beside.pop(number), between, self.lead]
            out.append(behind)
        return "".join(out)

    def _with_reasoning(self, message: Message) -> Message:
        """Reasoning under every name that templates read it by, whatever the client called it."""
        if _REASONING_NAMES.isdisjoint(message):
            return message
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is None:
            return message
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if self._names_reasoning:
            message["reasoning"] = reasoning
        return message

    def _calling(self, message: Message) -> list[Message]:
        """A message with calls in the form that the template writes. Its text may become a message before it."""
        calls = message.get("tool_calls")
        if not calls or not (self.text_arguments or self.null_content or self.splits_text):
            return [message]
        if self.text_arguments:
            message = {**message, "tool_calls": [*map(_with_text_arguments, calls)]}
        if not (self.null_content or (self.splits_text and message.get("content"))):
            return [message]
        text = {"role": message["role"], "content": message["content"]}
        return [*([text] if message["content"] else ()), {**message, "content": None if self.null_content else ""}]

    def _try_calls(self) -> None:
        """Set ``text_arguments`` and ``null_content`` if the template writes calls only with them."""
        self.first_call = False
        writes_tools = self._writes("probe", [{"role": "user", "content": "u"}], _GIVEN["tools"])
        self.omits: tuple[str, ...] = ("tools",) if writes_tools is False else ()
        before, _ = _AROUND["tool"]
        result = {"role": "tool", "content": _PROBE, "tool_call_id": _PROBE_CALL["id"], "name": "probe"}
        for self.text_arguments, self.null_content in product((False, True), repeat=2):
            if self._writes("sounding", [*before, result], _GIVEN["tools"]):
                other = {**_PROBE_CALL, "id": "call00001", "function": {"name": "plumbing", "arguments": {"x": 1}}}
                two = {**before[1], "tool_calls": [_PROBE_CALL, other]}
                messages = [before[0], two, result, {**result, "tool_call_id": "call00001"}]
                self.first_call = self._writes("plumbing", messages, _GIVEN["tools"]) is False
                return
        self.text_arguments = self.null_content = False
        self.omits += ("calls",)

    def _try_text_beside_calls(self) -> None:
        """Set ``lead`` or ``splits_text`` if the template leaves out the text beside calls.

        ``lead`` is what it writes between the beginning of an answer and the name of its first call. Text may stand
        before it if the lead begins with a mark, and if an answer of text alone begins with its text there: models that
        say something before a call write the same, and it is read as text and a call. Without a mark, as with Llama 3,
        an answer with text before a call would be read as text alone.
        """
        tools = _GIVEN["tools"]
        (user, calling), _ = _AROUND["tool"]
        other = {**_PROBE_CALL, "id": "call00001", "function": {"name": "plumbing", "arguments": {"x": 1}}}
        first, second = ({"role": "tool", "content": "r", "tool_call_id": each["id"]} for each in (_PROBE_CALL, other))
        messages = [user, calling, first, {**calling, "content": _PROBE, "tool_calls": [other]}, second]
        if "calls" in self.omits or self._writes(_PROBE, messages, tools) is not False:
            return
        try:
            begins = self.render([user], tools["tools"])
            answers = {"role": "assistant", "content": _PROBE}, calling
            text, call = (self.render([user, each], tools["tools"], PromptEnd.last_message) for each in answers)
        except TemplateError:
            pass
        else:
            lead = call.removeprefix(begins).partition("sounding")[0]
            if lead.startswith(_MARKS) and call.startswith(begins) and text.startswith(begins + _PROBE):
                self.lead = lead
        if self.lead and self._writes(_PROBE, messages, tools):
            return
        self.lead, self.splits_text = "", True
        if not (self._writes(_PROBE, messages, tools) and self._writes("plumbing", messages, tools)):
            self.splits_text = False
            self.omits += ("text beside calls",)

    def _try_systems(self) -> None:
        user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
        first, second = ({"role": "system", "content": text} for text in (_PROBE, _SECOND))
        given = _GIVEN.get(self.needs, {})
        self.joins_system = any(self._writes(text, [first, second, user], given) is False for text in (_PROBE, _SECOND))
        later = [first, user, answer, second, user]
        self.leads_system = any(self._writes(text, later, given) is False for text in (_PROBE, _SECOND))
        developer = {**first, "role": "developer"}
        self.writes_developer = "developer" in self.source and bool(self._writes(_PROBE, [developer, user], given))

    def _writes(self, text: str, messages: list[Message], given: Mapping[str, list[Message]]) -> bool | None:
        """Whether the prompt contains ``text``; None: the template refuses the messages."""
        try:
            prompt = self.render(messages, given.get("tools"), PromptEnd.generation, given.get("documents"))
        except TemplateError:
            return None
        return text in prompt

    def _probe(self) -> str:
        """What it needs. Sets ``wants_parts``.

        Raises:
            TemplateError: it fails whatever it gets.
        """
        failures = []
        rendered = []
        message = {"role": "user", "content": _PROBE}
        for needs, given in _GIVEN.items():
            for parts in (False, True):
                self.wants_parts = parts
                try:
                    text = self.render([message], given.get("tools"), PromptEnd.generation, given.get("documents"))
                except TemplateError as error:
                    failures.append(error)
                    continue
                if _PROBE in text.lower():
                    return needs
                rendered.append((parts, needs))
        if rendered:  # a template of some other kind
            self.wants_parts, needs = rendered[0]
            return needs
        self.wants_parts = False
        if (variable := self._missing_variable(failures[0])) is None:
            raise failures[0]
        return variable

    def _missing_variable(self, error: TemplateError) -> str | None:
        """A variable that requests set with ``chat_template_kwargs``, and without which rendering failed."""
        if isinstance(error.__cause__, SecurityError) or "ndefined" not in str(error):
            return None
        missing = self._compiled.variables() - self.own_variables - self._special_tokens.keys()
        return next((name for name in sorted(missing) if name in self.source), None)

    def _keeps_texts(self) -> bool:
        texts = [f"{_PROBE} {number}." for number in range(12)]
        roles = ("user", "assistant")
        try:
            text = self.render([{"role": roles[at % 2], "content": each} for at, each in enumerate([*texts, _SECOND])])
        except TemplateError:
            return False
        return all(each in text for each in texts)

    def _walks(self, role: str) -> bool:
        if role == "developer" and not self.writes_developer:
            return self._walks("system")  # which it is written as
        before, after = _AROUND[role]
        content = [{"type": "text", "text": _PROBE}, {"type": "text", "text": _SECOND}]
        message: Message = {"role": role, "content": content}
        if role == "tool":
            message |= {"tool_call_id": _PROBE_CALL["id"], "name": "probe"}
        try:
            given = _GIVEN["tools" if role == "tool" else self.needs] if self.needs in _GIVEN else {}
            text = self.render(
                [*before, message, *after], given.get("tools"), PromptEnd.generation, given.get("documents")
            )
        except TemplateError:
            return False
        first, second = text.find(_PROBE), text.find(_SECOND)
        # A template that prints the list itself, as Python or as JSON, has the type between the texts.
        return 0 <= first < second and "type" not in text[first:second]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


class _KeyedName(str):
    """A name that is written after a key, and that a template can compare as if there were none."""

    def __new__(cls, key: str, name: str) -> "_KeyedName":
        made = super().__new__(cls, key + name)
        made.name = name
        return made

    name: str

    def __eq__(self, other: object) -> bool:
        return self.name == other

    def __ne__(self, other: object) -> bool:
        return self.name != other

    def __hash__(self) -> int:
        return hash(self.name)

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        return part in self.name

    def startswith(self, *given: Any) -> bool:
        return self.name.startswith(*given)


def _beside_calls(message: Message, beside: dict[str, str], nonce: str) -> Message:
    """A message with calls without its text. This is noted by a number that follows the nonce before its first name."""
    calls, content = message.get("tool_calls"), message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if not calls or not content:
        return message
    beside[number := f"{len(beside):0{_DIGITS}}"] = content
    function = {**calls[0]["function"], "name": _KeyedName(nonce + number, calls[0]["function"]["name"])}
    return {**message, "content": "", "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}


_MARKS = "[", "<"  # that calls begin with; other marks than tags follow text directly
_MARK = "ENDOFTEXT"
_DIGITS = 8  # of the number of a message
_TAG = re.compile(r"<\w")
_READS_REASONING = re.compile(r"[.'\"]reasoning\b")


def _marked(message: Message, mark: str) -> tuple[str, Message]:
    """The last text of a message, and a copy with a mark after it."""
    content = message.get("content")
    if isinstance(content, str) and (content.strip() or not message.get("tool_calls")):
        return content, {**message, "content": content + mark}
    if isinstance(content, list):
        for at in reversed(range(len(content))):
            if content[at].get("type") == "text":
                text = content[at]["text"]
                return text, {
                    **message,
                    "content": [*content[:at], {**content[at], "text": text + mark}, *content[at + 1 :]],
                }
    raise TemplateError("the last message has no text to continue")


def _cut_at(text: str, mark: str, last: str) -> str:
    """A prompt up to the mark, as ``continue_final_message`` of transformers cuts it.

    Args:
        last: the text before the mark. After the mark is a space: where the template removes that, it would have
            removed those before the mark, too.
    """
    at = text.rfind(mark)
    if at < 0:
        at = text.lower().rfind(mark.lower())
    if at < 0:
        raise TemplateError("the chat template leaves out the end of the last message, so it cannot be continued")
    cut = text[:at]
    return cut if text.startswith(" ", at + len(mark)) else cut.removesuffix(last[len(last.rstrip()) :])


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
