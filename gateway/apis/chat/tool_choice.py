"""Which tools an answer may or must call: tool_choice, parallel_tool_calls and the tools' own strictness. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.gateway.base.errors import invalid, unsupported
from penstock.gateway.grammars.calls import NO_PARAMETERS, Tool

AUTO, NONE, REQUIRED = "auto", "none", "required"
CHOICES = "'none', 'auto', 'required', a function or allowed_tools"


class ToolChoice(NamedTuple):
    """
    Attributes:
        tools: that may be called.
        must: at least one is called.
        one: at most one call.
        restricts: it asks more of the answer than the model's own habits.
    """

    tools: tuple[Tool, ...] = ()
    must: bool = False
    one: bool = False
    restricts: bool = False


def resolve_tool_choice(
    given: str | dict[str, Any] | None, functions: Sequence[dict[str, Any]] | None, parallel: bool | None
) -> ToolChoice:
    """
    Args:
        given: the body's tool_choice.
        functions: its tools.
        parallel: its parallel_tool_calls.
    Raises:
        ServingError: it names a tool that is not there, or is of an unknown form.
    """
    choice = AUTO if given is None else given
    tools = tuple(_tool(each["function"]) for each in functions or ())
    if choice == NONE:
        return ToolChoice()
    one, strict = parallel is False, any(tool.strict for tool in tools)
    if choice == AUTO:
        return ToolChoice(tools, one=one, restricts=strict)
    if choice == REQUIRED:
        mode, chosen = REQUIRED, tools
    elif isinstance(choice, dict) and choice.get("type") == "function":
        mode, chosen, one = REQUIRED, _named([choice], tools), True
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        listed = inner.get("tools") if isinstance(inner, dict) else None
        if not isinstance(listed, list) or inner.get("mode") not in (AUTO, REQUIRED):
            raise invalid("tool_choice", "tool_choice.allowed_tools needs a mode ('auto' or 'required') and tools")
        mode, chosen = inner["mode"], _named(listed, tools)
    else:
        raise unsupported("tool_choice", f"tool_choice {str(choice)[:60]!r} is not supported; use {CHOICES}")
    if not chosen:
        raise invalid("tool_choice", "tool_choice requires a call, and the request has no tools")
    return ToolChoice(chosen, must=mode == REQUIRED, one=one, restricts=True)


def _tool(function: dict[str, Any]) -> Tool:
    return Tool(function["name"], function.get("parameters") or NO_PARAMETERS, function.get("strict") is True)


def _named(references: list[Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools that are referred to, as ``{"type": "function", "function": {"name": NAME}}`` or without "function"."""
    names = []
    for each in references:
        function = each.get("function", each) if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not any(name == tool.name for tool in tools):
            raise invalid("tool_choice", f"tool_choice names {str(name)[:60]!r}, which is not among the tools")
        names.append(name)
    return tuple(tool for tool in tools if tool.name in names)
