"""Tools of the Responses API as functions that a model is told of, and their names in both directions. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.gateway.base.errors import invalid, unsupported

MAX_TOOLS = 512  # also with those of namespaces
FUNCTION, NAMESPACE = "function", "namespace"
# Beside functions they are left out, and named in a header: an agent offers them with every request.
LEFT_OUT = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")


class Function(NamedTuple):
    """``place``: in the client's body. ``namespace``: "": none."""

    place: str
    namespace: str
    name: str
    tool: dict[str, Any]


class ToolNames:
    """A function of a namespace is shown to the model by its own name, if no other function has that name."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._own: dict[str, tuple[str, str]] = {}
        self._shown: dict[tuple[str, str], str] = {}
        found = [(each.namespace, each.name) for each in _functions(tools)]
        count = Counter(name for _, name in set(found))
        taken = {name for namespace, name in found if not namespace or count[name] == 1}
        for namespace, name in dict.fromkeys(found):
            shown = name
            if namespace and count[name] > 1:
                shown = f"{namespace}__{name}"
                while shown in taken:
                    shown += "_"
                taken.add(shown)
            self._shown[namespace, name] = shown
            self._own[shown] = (namespace, name)

    def shown(self, namespace: str | None, name: str) -> str:
        """The name that the model knows; of a function that is not offered any more, its own."""
        return self._shown.get((namespace or "", name), name)

    def own(self, shown: str) -> tuple[str, str]:
        """Namespace ("": none) and name of what the model called."""
        return self._own.get(shown, ("", shown))


def chat_tools(tools: Sequence[dict[str, Any]], names: ToolNames) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Functions as chat completions have them, and where their fields come from.

    Raises:
        ServingError: a tool is not supported; names it.
    """
    _check(tools)
    count = sum(1 for _ in _functions(tools))
    if count > MAX_TOOLS:
        raise invalid(
            "tools", f"tools have {count} functions with those of namespaces; at most {MAX_TOOLS} are allowed"
        )
    made: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for found in _functions(tools):
        function = {key: value for key in ("name", "description", "parameters", "strict")
                    if (value := found.tool.get(key)) is not None}  # fmt: skip
        if isinstance(name := function.get("name"), str):
            function["name"] = names.shown(found.namespace, name)
        places[f"tools[{len(made)}].function"] = found.place
        made.append({"type": FUNCTION, "function": function})
    return made, places


def left_out(tools: Iterable[dict[str, Any]]) -> list[str]:
    """Names of the tools that the model is not told of, as "tools[3]"."""
    return [f"tools[{number}]" for number, tool in enumerate(tools) if tool.get("type") in LEFT_OUT]


def _functions(tools: Iterable[dict[str, Any]], place: str = "tools", namespace: str = "") -> Iterator[Function]:
    for number, tool in enumerate(tools):
        at = f"{place}[{number}]"
        if tool.get("type") == FUNCTION:
            yield Function(at, namespace, str(tool.get("name")), tool)
        elif tool.get("type") == NAMESPACE and not namespace:
            yield from _functions(_inner(tool), f"{at}.tools", str(tool.get("name")))


def _inner(tool: dict[str, Any]) -> list[dict[str, Any]]:
    inner = tool.get("tools")
    return [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []


def _check(tools: Sequence[dict[str, Any]]) -> None:
    functions = any(tool.get("type") in (FUNCTION, NAMESPACE) for tool in tools)
    for number, tool in enumerate(tools):
        at, kind = f"tools[{number}]", tool.get("type")
        if kind == NAMESPACE:
            _check_namespace(tool, at)
        elif kind != FUNCTION and not (kind in LEFT_OUT and functions):
            raise unsupported(f"{at}.type", f"{at}: tools of type {str(kind)[:40]!r} are not supported; use 'function'")


def _check_namespace(tool: dict[str, Any], at: str) -> None:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise invalid(f"{at}.name", f"{at}.name is missing; it must be a text")
    if not isinstance(inner, list):
        raise invalid(f"{at}.tools", f"{at}.tools is missing; it must be a list of functions")
    for number, each in enumerate(inner):
        here = f"{at}.tools[{number}]"
        if not isinstance(each, dict) or each.get("type") != FUNCTION:
            raise unsupported(f"{here}.type", f"{here}: only functions are supported in a namespace")
