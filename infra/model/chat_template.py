"""A model's Jinja chat template: messages → prompt text. Compiled once; of the tokens, only special ones have a role.

Renders as ``apply_chat_template`` of transformers does (``transformers/utils/chat_template_utils.py``, 5.17), which
templates are written for: the same sandbox, extensions, filters, globals and variables. It needs jinja2 alone.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]

_PROBE = "probe text"
_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names under which clients pass it; templates read the first


class PromptEnd(Enum):
    """Where a prompt ends: where the assistant's next message begins, behind the last message, or behind its text."""

    generation = "generation"
    last_message = "last_message"
    last_text = "last_text"


class TemplateError(Exception):
    """The template cannot be used, or refuses these messages; the text is the template's own."""


class ChatTemplate:
    """Renders conversations.

    Attributes:
        own_variables: names that ``render`` gives to the template itself, or that ``apply_chat_template`` reserves.
        knows_developer: it mentions the role "developer", the newer name of "system".
        source: its text.
        wants_parts: it takes a message's content as a list of typed parts and fails on plain strings.
    """

    own_variables = frozenset(
        {"self", "messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt", "kwargs"}
        | {"return_assistant_tokens_mask", "continue_final_message"}
    )

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            special_tokens: "bos_token", "eos_token", ... → text, as templates refer to them.
        Raises:
            TemplateError: it does not compile, or fails on a conversation of one user message.
        """
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except Exception as error:  # of several kinds, SyntaxError and RecursionError among them
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        # Jinja chains a template's globals and walks the chain at each render: a fifth of what rendering costs.
        self._template.globals = dict(self._template.globals)
        self.source = source
        self.knows_developer = "developer" in source
        self._special_tokens = dict(special_tokens)
        self.wants_parts = False
        try:
            plain = _PROBE in self.render([{"role": "user", "content": _PROBE}])
        except TemplateError:
            plain = False
        if not plain:
            self.wants_parts = True
            self.render([{"role": "user", "content": _PROBE}])

    def names(self, role: str) -> bool:
        """Whether it mentions this role, so that it does something about it."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        ends: PromptEnd = PromptEnd.generation,
        /,
        **variables: Any,
    ) -> str:
        """The prompt.

        Args:
            messages, tools, variables: plain JSON values; the template cannot change them.
            ends: where it ends.
        Raises:
            TemplateError: the template refuses these messages, or a variable has a reserved name.
        """
        if taken := self.own_variables & variables.keys():
            raise TemplateError(f"these variables are set by the server: {', '.join(sorted(taken))}")
        if self.wants_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            text = self._template.render(
                **{**self._special_tokens, **variables},
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=ends is PromptEnd.generation,
            )
        except RecursionError:
            raise TemplateError("tools, arguments or variables are nested too deeply") from None
        except Exception as error:  # templates are code and may raise anything
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return _cut_behind(text, messages[-1].get("content")) if ends is PromptEnd.last_text else text


def _cut_behind(text: str, content: Any) -> str:
    """A prompt up to the end of its last message's text, as ``continue_final_message`` of transformers cuts it.

    Raises:
        TemplateError: the template changes that text, or there is none.
    """
    if isinstance(content, list):
        content = next((part.get("text") for part in reversed(content) if part.get("type") == "text"), None)
    if not isinstance(content, str) or not content.strip():
        raise TemplateError("the last message has no text to continue")
    at = text.rfind(content.strip())
    if at < 0:
        raise TemplateError("the text of the last message is not in the prompt, so that it cannot be continued")
    whole = content.lstrip()  # with the spaces behind it, unless the template removes them
    return text[: at + len(whole)] if text.startswith(whole, at) else text[: at + len(content.strip())]


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_reasoning(message: Message) -> Message:
    """Reasoning under both names that templates read it by, whatever the client called it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body).set_lineno(line)]


class _Dict:
    """``dict`` for templates: the class itself has attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Without underscore-prefixed names, which lead to the interpreter's internals."""

    def __init__(*args: Any, **named: Any) -> None:  # without self: a template may pass a variable of that name
        self, rest = args[0], args[1:]
        values = dict(*rest, **named)
        for name in values:
            _check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store underscore-prefixed attributes on a namespace: {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML characters, which models do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


_ENVIRONMENT = _environment()
