"""The sandbox that chat templates run in: Jinja as transformers sets it up, with a budget of CPU time and of memory.

Templates are programs, and some take time with the square of the messages. Each turn of a loop and each call of a macro
is counted, as is each item that a filter such as ``select`` goes through, and every few of them the thread's CPU time
is compared with its end. Texts and lists are bounded where they grow: by operators, by padding, ``replace`` and
``join``, in a namespace, in a captured block, in the output.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial, wraps
from time import thread_time
from typing import Any, NoReturn

import jinja2
from jinja2 import filters as _filters
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_environment

CPU_S = 5.0  # of one rendering, unless ``cpu_budget`` says otherwise
LARGEST = 64 << 20  # characters of a text, entries of a list
_CHECKED = 16  # turns between two looks at the clock; one turn takes some microseconds
_TURN = "turn of a loop or call of a macro"  # a node of the syntax tree, which becomes the call of ``_Meter.turn``
_ITEMS = ("map", "select", "reject", "selectattr", "rejectattr")  # filters that do something for each item
_NUMBER = re.compile(r"[0-9]+")
_OF_DICT = frozenset(dir(dict))
_OF_LOOP = frozenset(
    ("index", "index0", "first", "last", "length", "previtem", "nextitem", "revindex", "revindex0", "depth", "depth0")
)


class OutOfTime(Exception):
    """A rendering took the CPU time that it may. ``cpu_s``: that budget."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__(f"rendering takes more than {cpu_s:g} s of CPU time")
        self.cpu_s = cpu_s


class TooLarge(Exception):
    """A template makes a text or a list that is too large to be kept."""


class _Budget(threading.local):
    cpu_s = CPU_S
    spent = False


_budget = _Budget()


class cpu_budget:
    """What each rendering in this thread may take, until the end of the block.

    Attributes:
        spent: a rendering was ended because it would have taken more.
    """

    __slots__ = ("_before", "_cpu_s", "spent")

    def __init__(self, seconds: float) -> None:
        self._cpu_s = seconds
        self.spent = False

    def __enter__(self) -> "cpu_budget":
        self._before = _budget.cpu_s
        _budget.cpu_s, _budget.spent = self._cpu_s, False
        return self

    def __exit__(self, *_: object) -> None:
        _budget.cpu_s, self.spent = self._before, _budget.spent


class _Meter:
    """Counts the turns of one rendering. The clock is first read after some of them, which a short chat never has."""

    __slots__ = ("_end", "_left", "cpu_s")

    def __init__(self) -> None:
        self.cpu_s = _budget.cpu_s
        self._left = _CHECKED
        self._end = 0.0

    def turn(self) -> None:
        """
        Raises:
            OutOfTime: the CPU time is spent.
        """
        self._left -= 1
        if not self._left:
            self._look()

    def _look(self) -> None:
        now = thread_time()
        if not self._end:
            self._end = now + self.cpu_s
        elif now > self._end:
            _budget.spent = True
            raise OutOfTime(self.cpu_s)
        self._left = _CHECKED


class Compiled:
    """A template as Python code."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._template = _ENVIRONMENT.from_string(source)
        # Jinja chains a template's globals and walks the chain at each render: a fifth of what rendering costs.
        self._template.globals = dict(self._template.globals)

    def variables(self) -> frozenset[str]:
        """Names that it reads, and neither sets nor has from the environment."""
        return frozenset(find_undeclared_variables(_ENVIRONMENT.parse(self._source))) - _ENVIRONMENT.globals.keys()

    def render(self, variables: dict[str, Any]) -> str:
        """
        Raises:
            OutOfTime, TooLarge: a budget is spent.
            Exception: whatever the template raises.
        """
        template = self._template
        context = template.new_context(variables)
        context.meter = _Meter()  # type: ignore[attr-defined]
        try:
            return _concat(list(template.root_render_func(context)))
        finally:  # a macro refers to itself by its context: collecting such cycles took 3 % of a gateway's time
            for value in context.vars.values():
                if value.__class__ is Macro:
                    value.__dict__.clear()


class _MeteredContext(Context):
    meter: _Meter


class _MeteredCode(CodeGenerator):
    """Code that counts its turns. Node types cannot be added, so a turn is a statement with a constant of its own."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for loop in list(node.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            body: list[nodes.Node] = loop.body  # type: ignore[attr-defined]
            body.insert(0, nodes.ExprStmt(nodes.Const(_TURN), lineno=loop.lineno))
        super().visit_Template(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.Const) and node.node.value == _TURN:
            self.writeline("context.meter.turn()", node)
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("_added", (node.left, node.right), frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._call("_joined", node.nodes, frame)

    def _call(self, method: str, operands: Iterable[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{method}(")
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")")


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise TooLarge(f"the template makes a text or list of {size} characters or entries; the limit is {LARGEST}")


def _concat(pieces: Iterable[str]) -> str:
    pieces = pieces if isinstance(pieces, list) else list(pieces)
    if (size := sum(map(len, pieces))) > LARGEST:
        _check_size(size)
    return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _MeteredCode
    context_class = _MeteredContext
    intercepted_binops = frozenset(("*", "**", "%"))
    concat = staticmethod(_concat)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_size(len(value) * times)
        elif operator == "%":
            if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _added(left: Any, right: Any) -> Any:
        if left.__class__ is str or left.__class__ is list:
            made = left + right
            _check_size(len(made))
            return made
        return left + right

    @staticmethod
    def _joined(*parts: Any) -> str:
        return _concat([part if part.__class__ is str else str(part) for part in parts])

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's, which tries what nearly all templates never mean first: attributes of dict."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICT:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is _Namespace:
            if attribute[:1] != "_":
                try:
                    return object.__getattribute__(obj, "_Namespace__attrs")[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is LoopContext:
            if attribute in _OF_LOOP:
                return getattr(obj, attribute)
        elif attribute in _GROWING and issubclass(kind, str):
            return partial(_GROWING[attribute], super().getattr(obj, attribute), obj)
        return super().getattr(obj, attribute)


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int):
            _check_size(value)


def _check_format(text: str, values: Iterable[Any]) -> None:
    """The widths in a format, and those that come as values."""
    for number in _NUMBER.findall(text):
        _check_size(int(number[:20]))
    if "*" in text or "{" in text:
        _check_numbers(values)


def _check_replaced(text: str, old: str, new: str, count: int = -1) -> None:
    times = text.count(old)
    _check_size(len(text) + (times if count < 0 else min(count, times)) * max(len(new) - len(old), 0))


def _check_joined(between: str, parts: Sequence[Any]) -> None:
    _check_size(len(between) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))


# Methods of texts whose result may be much larger, and filters, with what they are to be called with.


def _padded(method: Callable[..., str], text: Any, *args: Any, **named: Any) -> str:
    _check_numbers((*args, *named.values()))
    return method(*args, **named)


def _formatted(method: Callable[..., str], text: str, *args: Any, **named: Any) -> str:
    _check_format(text, (*args, *named.values()))
    return method(*args, **named)


def _replaced(method: Callable[..., str], text: str, *args: Any, **named: Any) -> str:
    _check_replaced(text, *args, **named)
    return method(*args, **named)


def _joined(method: Callable[..., str], between: str, parts: Iterable[str]) -> str:
    parts = parts if isinstance(parts, list) else list(parts)
    _check_joined(between, parts)
    return method(parts)


_GROWING: Mapping[str, Callable[..., str]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _padded),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "replace": _replaced,
    "join": _joined,
}


def _numbers_checked(of_jinja: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(of_jinja)  # with what it tells Jinja of its arguments
    def checked(*args: Any, **named: Any) -> Any:
        _check_numbers((*args, *named.values()))
        return of_jinja(*args, **named)

    return checked


def _format_filter(text: Any, *args: Any, **named: Any) -> str:
    _check_format(str(text), (*args, *named.values()))
    return _filters.do_format(text, *args, **named)


def _replace_filter(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    count = -1 if count is None else count
    _check_replaced(text, old, new, count)
    return str(text.replace(old, new, count))


@pass_environment
def _join_filter(environment: _Sandbox, parts: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        parts = map(_filters.make_attrgetter(environment, attribute), parts)
    texts, between = [part if part.__class__ is str else str(part) for part in parts], str(d)
    _check_joined(between, texts)
    return between.join(texts)


def _items_counted(of_jinja: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose items count as turns."""

    @pass_context
    def counted(context: _MeteredContext, items: Any, *args: Any, **named: Any) -> Any:
        return of_jinja(context, _counted(context.meter, items) if items else items, *args, **named)

    return counted


def _counted(meter: _Meter, items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        meter.turn()
        yield item


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
    """Without underscore-prefixed names, which lead to the interpreter's internals.

    A namespace alone carries values from one turn of a loop to the next, so it is where growth is stopped.
    """

    def __init__(*args: Any, **named: Any) -> None:  # without self: a template may pass a variable of that name
        self, rest = args[0], args[1:]
        values = dict(*rest, **named)
        for name in values:
            _check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        if value.__class__ is str or value.__class__ is list:
            _check_size(len(value))
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


def _environment() -> _Sandbox:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters |= {"tojson": _tojson, "format": _format_filter, "replace": _replace_filter, "join": _join_filter}
    for name in ("center", "indent", "batch", "slice", "tojson"):
        made.filters[name] = _numbers_checked(made.filters[name])
    for name in _ITEMS:
        made.filters[name] = _items_counted(made.filters[name])
    del made.globals["lipsum"]  # which makes any number of words, in one call
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


_ENVIRONMENT = _environment()
