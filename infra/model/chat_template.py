"""A model's Jinja chat template: messages → prompt text. Compiled once; knows no tokens but the special ones' text."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_PROBE = "probe text"
_OWN = frozenset({"self", "messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt"})


class TemplateError(Exception):
    """The template cannot be used, or refuses these messages; the text is its own."""


class ChatTemplate:
    """Renders conversations.

    Attributes:
        own_variables: names that ``render`` gives to the template itself.
        source: its text.
        wants_parts: it takes a message's content as a list of typed parts and fails on plain strings.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            special_tokens: "bos_token", "eos_token", ... → text, as templates refer to them.
        Raises:
            TemplateError: it does not compile, or fails on a conversation of one user message.
        """
        # late: 30 MB, and only processes that render chats need it. It does not import torch.
        from transformers.utils import chat_template_utils

        self._render = chat_template_utils.render_jinja_template  # keeps the compiled template in a cache of its own
        self.own_variables = _OWN | inspect.signature(self._render).parameters.keys()
        _flatten_globals(chat_template_utils, source)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.wants_parts = False
        try:
            plain = _PROBE in self.render([{"role": "user", "content": _PROBE}])
        except TemplateError:
            plain = False
        if not plain:
            self.wants_parts = True
            self.render([{"role": "user", "content": _PROBE}])

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, /, **variables: Any) -> str:
        """The prompt, ending where the assistant begins to speak.

        Raises:
            TemplateError: the template refuses these messages, or a variable has a name of ours.
        """
        if taken := self.own_variables & variables.keys():
            raise TemplateError(f"variables cannot be called {sorted(taken)}")
        if self.wants_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            texts, _ = self._render(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=True,
                **{**self._special_tokens, **variables},
            )
        except RecursionError:
            raise TemplateError("tools, arguments or variables are nested too deeply") from None
        except Exception as error:  # templates are code: anything may come out of them
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return str(texts[0])


def _flatten_globals(utils: Any, source: str) -> None:
    """Jinja chains a template's globals and walks the chain at each render: a fifth of what rendering costs."""
    compiled = getattr(utils, "_compile_jinja_template", None)
    if compiled is not None:
        with contextlib.suppress(Exception):  # a template that does not compile says so when it is rendered
            template = compiled(source)
            template.globals = dict(template.globals)


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
