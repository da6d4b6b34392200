"""Starts an engine of several processes (vLLM, SGLang), and its part on each other machine."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import Tree
from penstock.schemas.fleet import GpuUse
from penstock.workers.engines.external import runtime
from penstock.workers.engines.external.event_streams import subscribe
from penstock.workers.engines.external.nodes import NodeGroup, environ, reached_at, towards


class Package(NamedTuple):
    """
    Attributes:
        name: of ``--engine``.
        title: for messages.
        version: of the installed release.
        own_address: environment variable for the address at which ranks of other machines reach this one.
    """

    name: str
    title: str
    version: str
    own_address: str


class StartedEngine(NamedTuple):
    """``gpus``: of the engine's other machines."""

    llm: Any
    loop: runtime.LoopThread
    inbox: runtime.Inbox
    gpus: Callable[[], tuple[GpuUse, ...]]


def start(
    package: Package,
    settings: WorkerSettings,
    revision: str,
    make: Callable[[], Any],
    undo: contextlib.ExitStack,
    *,
    tree: Tree,
    variables: Mapping[str, str],
    events: Mapping[str, Any] | None,
    ranks: int,
    readers: Callable[[Any], Iterable["asyncio.Task[Any]"]],
    asked: Callable[[], None],
) -> StartedEngine:
    """Start an engine on all of its machines.

    Args:
        revision: of the model.
        make: constructs the engine, in its event loop.
        undo: receives the callbacks that end the engine.
        tree: the engine's arguments, for the other machines.
        variables: environment variables for the engine's processes.
        events: of the engine's publisher of KV events; None: there is none.
        ranks: data-parallel ranks, each with a publisher.
        readers: the engine's tasks that read from its processes.
        asked: called when another machine was asked to stop; from any thread.

    Raises:
        BadArguments: it refuses an argument.
        EngineError: the engine does not start, or a machine is missing.
    """
    inbox = runtime.Inbox()
    group = NodeGroup(settings, (package.name, package.version, revision), inbox, asked)
    undo.callback(group.close)
    variables = {**variables, **group.meet(tree, package.own_address)}
    loop = runtime.LoopThread(package.name)
    undo.callback(loop.close)
    early = undo.enter_context(contextlib.ExitStack())
    if events is not None:  # before the engine starts: a late subscriber misses the first events
        for rank in range(ranks):
            early.callback(subscribe(events, rank, inbox).close)
    before = runtime.children()
    with environ(variables):
        llm = group.construct(lambda: runtime.construct(package.title, package.version, loop, make), before)
    undo.callback(runtime.ProcessGuard(runtime.children() - before).close)
    undo.callback(runtime.close, llm, loop, lambda: readers(llm))
    undo.callback(group.close)  # before the engine ends here, which would look like a lost rank there
    undo.push(early.pop_all())
    return StartedEngine(llm, loop, inbox, group.gpus)


class EngineNode:
    """The part of an engine on another machine than its first.

    Args:
        variables: environment variables for its processes.
        make: starts the processes with the given arguments; blocks until all ranks of the engine are connected.
        ended: waits until a process has ended; returns what happened.
    """

    def __init__(
        self,
        package: Package,
        settings: WorkerSettings,
        variables: Callable[[], Mapping[str, str]],
        make: Callable[[Tree], Any],
        ended: Callable[[Any], str],
    ) -> None:
        self.version = package.version
        self._package = package
        self._leader = settings.leader_address
        self._variables = variables
        self._make = make
        self._ended = ended
        self._part: Any = None

    def run(self, tree: Tree) -> str:
        """Start the processes, and wait until one ends. Returns what happened.

        Raises:
            BadArguments: it refuses an argument.
            EngineError: it does not start.
        """
        variables = {**self._variables(), **reached_at(towards(self._leader), self._package.own_address)}
        with environ(variables), runtime.starting(self._package.title, self.version):
            self._part = self._make(tree)
        return self._ended(self._part)

    def close(self) -> None:
        if self._part is not None:
            runtime.shut_down(self._part)
