"""Renders a conversation that grew from where it grew: a long chat costs what is new, if its template allows that.

A template that walks the messages in a loop is compiled a second time, with a look at each turn of that loop. What the
turns so far have written depends on what they have read: the messages, by index or one after the other; the variables
that were set before the loop; and namespaces, which alone carry values from turn to turn. All three are recorded, and
the text of those turns is used again only where all three are equal. A turn that reads how many messages there are
depends on those to come, and nothing behind it is kept. So whatever precedes and follows the loop, and the last turns,
are computed each time. The first prompts that are made so are compared with whole ones all the same.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.runtime import Context, Macro, Undefined

from penstock.infra.bounded import ByteCache
from penstock.infra.text.template_sandbox import Meter, MeteredCode, Sandbox, SandboxNamespace, environment, joined

CACHED_BYTES = 64 << 20  # of texts, for all tenants of a gateway; a conversation of 2,000 messages has about 1 MB
LEAST_MESSAGES = 32  # shorter conversations are rendered as a whole
_LAST = 8  # turns from whose beginnings a later rendering may go on
_COMPARED = 3  # first prompts of a template that are also rendered as a whole
_ENTER, _BEGIN = "enter a loop", "begin of a turn"  # nodes of the syntax tree
_STATEFUL = ("cycler", "joiner", "lipsum")  # that hold state, or are not the same each time
_CLOCK = "strftime_now"

Message = Mapping[str, Any]


class _Point(NamedTuple):
    """The beginning of a turn.

    Attributes:
        before: variables and namespaces, as they were before the loop.
        read: how many messages the turns before have read.
        text: that they wrote.
        namespaces: values of those made before the loop, in that order.
    """

    loop: int
    before: bytes
    turn: int
    read: int
    text: str
    namespaces: tuple[dict[str, Any], ...]


class ResumedRendering:
    """One template, and what is kept of the conversations that it rendered. May be used from several threads."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._template: Any = None
        self._useless = False  # the template does not allow it
        self._compared = 0
        self._lock = threading.Lock()
        self._points: ByteCache[bytes, _Point] = ByteCache(CACHED_BYTES, _size)

    def render(self, variables: dict[str, Any], owner: str, whole: Callable[[], str]) -> str:
        """
        Args:
            variables: of the template, messages included.
            owner: whose conversation it is; others share nothing of it.
            whole: renders all of it.
        Raises:
            Exception: whatever the template raises.
        """
        messages: list[Message] = variables["messages"]
        if self._useless or len(messages) < LEAST_MESSAGES or not self._compile():
            return whole()
        try:
            digests = _digests(owner, variables, messages)
        except (TypeError, RecursionError):
            return whole()
        with self._lock:
            point = next((found for each in reversed(digests) if (found := self._points.get(each)) is not None), None)
        track = _Track(messages, point)
        context = self._template.new_context({**variables, "messages": track.messages})
        context.meter, context.track = Meter(), track
        track.context = context
        for piece in self._template.root_render_func(context):
            track.pieces.append(piece)
        text = joined(track.pieces)
        if track.resumed and self._compared < _COMPARED:
            self._compared += 1
            if text != (expected := whole()):
                self._useless = True
                return expected
        if track.last is not None:
            with self._lock:
                self._points.put(digests[track.last.read - 1], track.last)
        return text

    def _compile(self) -> bool:
        if self._template is None:
            tree = environment().parse(self._source)
            if not _fit(tree):
                self._useless = True
                return False
            made = _ENVIRONMENT.from_string(tree)
            made.globals = dict(made.globals)
            self._template = made
        return True


class _Track:
    """What one rendering reads and writes."""

    def __init__(self, messages: Sequence[Message], point: _Point | None) -> None:
        self.pieces: list[str] = []
        self.messages = _Messages(self, messages, 0)
        self.context: Context | None = None
        self.resumed = False
        self.last: _Point | None = None
        self._count = len(messages)
        self._point = point
        self._namespaces: list[SandboxNamespace] = []  # made before the loop
        self._read = 0  # how many of the messages
        self._ended = False  # how many there are was read
        self._loop = -1
        self._before: bytes | None = None
        self._first = 0  # piece of the loop
        self._turn = -1
        self._turns = 0
        self._skip_to = -1

    def saw(self, count: int) -> None:
        if count > self._read:
            self._read = count

    def saw_all(self) -> None:
        self._ended = True

    def enter(self, loop: int, values: Any) -> Any:
        """A loop begins."""
        self._loop, self._turn, self._skip_to, self._before = loop, -1, -1, None
        if not isinstance(values, _Messages):
            return values
        self._first = len(self.pieces)
        self._read, self._ended = values.offset, False
        self._turns = self._count - values.offset
        self._before = self._state(values.offset)
        point = self._point
        if point is not None and self._before is not None and (point.loop, point.before) == (loop, self._before):
            self._skip_to = point.turn
        return values

    def begin(self) -> str | None:
        """A turn begins; None: it has to run, "": it is known, else it has to run behind this text."""
        if self._before is None:
            return None
        self._turn += 1
        if self._turn < self._skip_to:
            return ""
        text = None
        if self._turn == self._skip_to:
            assert self._point is not None
            for made, values in zip(self._namespaces, self._point.namespaces, strict=True):
                _values(made).clear()
                _values(made).update(values)
            self.saw(self._point.read)
            self.resumed = True
            text = self._point.text or None
        elif not self._ended and self._turn >= self._turns - _LAST and self._turn > 0:
            self._keep()
        return text

    def _keep(self) -> None:
        namespaces = tuple(dict(_values(made)) for made in self._namespaces)
        if _encoded(namespaces) is None:
            return
        assert self._before is not None
        text = "".join(self.pieces[self._first :])
        if self.last is None or self.last.loop == self._loop or len(text) >= len(self.last.text):
            self.last = _Point(self._loop, self._before, self._turn, self._read, text, namespaces)

    def _state(self, offset: int) -> bytes | None:
        """Variables and namespaces before the loop; None: some are no plain values. Sets ``_namespaces``."""
        assert self.context is not None
        variables: list[Any] = []
        self._namespaces = []
        for name, value in sorted(self.context.vars.items()):
            if isinstance(value, SandboxNamespace):
                if not any(value is each for each in self._namespaces):
                    self._namespaces.append(value)
                at = next(at for at, each in enumerate(self._namespaces) if each is value)
                variables.append([name, "namespace", at, _values(value)])
            elif isinstance(value, Macro):
                variables.append([name, "macro"])
            elif isinstance(value, _Messages):
                variables.append([name, "messages", value.offset])
            elif isinstance(value, Undefined):
                variables.append([name, "undefined"])
            else:
                variables.append([name, "value", value])
        return _encoded([offset, variables])


class _Messages:
    """A list that tells what is read of it: all messages, or those from one on."""

    __slots__ = ("_items", "_track", "offset")

    def __init__(self, track: _Track, items: Sequence[Message], offset: int) -> None:
        self._track = track
        self._items = items  # of the whole conversation
        self.offset = offset

    def _all(self) -> list[Message]:
        self._track.saw_all()
        return list(self._items[self.offset :])

    def __getitem__(self, key: Any) -> Any:
        if type(key) is int and key >= 0:
            at = self.offset + key
            if at < len(self._items):
                self._track.saw(at + 1)
                return self._items[at]
        elif isinstance(key, slice) and (key.stop, key.step) == (None, None) and type(key.start) is int:
            start = self.offset + key.start
            if self.offset <= start <= len(self._items):
                self._track.saw(start)
                return _Messages(self._track, self._items, start)
        return self._all()[key]

    def __iter__(self) -> Iterator[Message]:
        for at in range(self.offset, len(self._items)):
            self._track.saw(at + 1)
            yield self._items[at]
        self._track.saw_all()

    def __len__(self) -> int:
        self._track.saw_all()
        return len(self._items) - self.offset

    def __bool__(self) -> bool:
        if len(self._items) == self.offset:
            self._track.saw_all()
            return False
        self._track.saw(self.offset + 1)
        return True

    def __reversed__(self) -> Iterator[Message]:
        return reversed(self._all())

    def __contains__(self, value: object) -> bool:
        return value in self._all()

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, _Messages) else other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return self._all() + (other._all() if isinstance(other, _Messages) else other)

    def __radd__(self, other: Any) -> Any:
        return other + self._all()

    def __mul__(self, times: int) -> Any:
        return self._all() * times

    __rmul__ = __mul__

    def __str__(self) -> str:
        return str(self._all())

    __repr__ = __str__

    def copy(self) -> list[Message]:
        return self._all()

    def index(self, *args: Any) -> int:
        return self._all().index(*args)

    def count(self, value: Any) -> int:
        return self._all().count(value)


class _TrackedCode(MeteredCode):
    """Code that tells of the loops that are not within others."""

    def visit_MarkSafe(self, node: nodes.MarkSafe, frame: Frame) -> None:
        if isinstance(node.expr, nodes.Tuple) and node.expr.ctx == _ENTER:
            number, iterated = node.expr.items
            assert isinstance(number, nodes.Const)
            self.write(f"context.track.enter({number.value}, ")
            self.visit(iterated, frame)
            self.write(")")
        else:
            super().visit_MarkSafe(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.Const) and node.node.value == _BEGIN:
            name = self.temporary_identifier()
            self.writeline(f"{name} = context.track.begin()", node)
            self.writeline(f"if {name} is not None:")
            self.indent()
            self.writeline(f"if not {name}: continue")
            self.writeline(f"yield {name}")
            self.outdent()
        else:
            super().visit_ExprStmt(node, frame)


class _TrackedSandbox(Sandbox):
    code_generator_class = _TrackedCode


def _fit(tree: nodes.Template) -> bool:
    """Prepare the loops that are in no other; False: there are none, or the template has what cannot be resumed."""
    if any(tree.find_all((nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport))):
        return False
    if any(name.name in _STATEFUL for name in tree.find_all(nodes.Name)):
        return False
    if any(each.name == "random" for each in tree.find_all(nodes.Filter)):
        return False
    if any(each.attr == "changed" for each in tree.find_all(nodes.Getattr)):
        return False
    loops = [loop for loop in _outer_loops(tree.body) if not loop.recursive and loop.test is None]
    timed = _timed(tree)
    if any(name.name in timed for loop in loops for name in loop.find_all(nodes.Name)):
        return False
    for number, loop in enumerate(loops):
        loop.iter = nodes.MarkSafe(nodes.Tuple([nodes.Const(number), loop.iter], _ENTER))
        loop.body.insert(0, nodes.ExprStmt(nodes.Const(_BEGIN), lineno=loop.lineno))
    return bool(loops)


def _timed(tree: nodes.Template) -> set[str]:
    """Names of what reads the clock: the function itself, and macros that call it, directly or not."""
    timed, size = {_CLOCK}, 0
    while len(timed) > size:
        size = len(timed)
        for macro in tree.find_all(nodes.Macro):
            if any(name.name in timed for name in macro.find_all(nodes.Name)):
                timed.add(macro.name)
    return timed


def _outer_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            yield from _outer_loops([*node.body, *node.elif_, *node.else_])


def _digests(owner: str, variables: Mapping[str, Any], messages: Sequence[Message]) -> list[bytes]:
    """Of the first message, the first two, and so on, with everything else that a prompt depends on."""
    others = {name: value for name, value in variables.items() if name != "messages"}
    digest = blake3(msgspec.json.encode([owner, others]))
    found = []
    for message in messages:
        encoded = msgspec.json.encode(message)
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
        found.append(digest.digest())
    return found


def _values(namespace: SandboxNamespace) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


def _encoded(value: Any) -> bytes | None:
    """Plain values as bytes; None: there are others among them."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, RecursionError, ValueError):
        return None


def _size(digest: bytes, point: _Point) -> int:
    return 1_000 + 4 * len(point.text) + len(point.before) + len(_encoded(point.namespaces) or b"")


_ENVIRONMENT = environment(_TrackedSandbox)
