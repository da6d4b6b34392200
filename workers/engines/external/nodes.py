"""The machines of one engine: how they find each other, agree, and notice that one of them is gone.

vLLM and SGLang run a process on each machine, and their ranks meet through ``torch.distributed``. It does not
report a lost machine: the other ranks wait in a collective operation for minutes, or for ever while there is no
request. So the first machine's process (the leader, which is the worker) and each of the others (a follower, which only
computes) keep a TCP connection with a message every few seconds. Followers get the engine's arguments through it, so
that they cannot differ. The connection is not encrypted, as the engines' own are not.
"""

import asyncio
import contextlib
import fcntl
import functools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.schemas.fleet import GpuUse
from penstock.workers.engines.engine_protocol import EngineError, NodeLost
from penstock.workers.engines.external.runtime import EngineFailed, Inbox, LoopThread, ProcessGuard, children, in_thread

_SIOCGIFADDR = 0x8915  # Linux


@contextlib.contextmanager
def environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are unset, for processes that start within the context."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@functools.lru_cache(maxsize=8)
def address(nats_url: str) -> str:
    """The address of this machine's interface towards the broker; other workers can reach it too."""
    host = urlsplit(nats_url.split(",")[0]).hostname or "127.0.0.1"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 4222, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def interface(own: str) -> str:
    """The name of the network interface that has an address of this machine; "": none is found."""
    if ":" in own:
        with contextlib.suppress(OSError, ValueError):
            wanted = socket.inet_pton(socket.AF_INET6, own.partition("%")[0]).hex()
            rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((row[-1] for row in rows if row[0] == wanted), "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""


def reached_at(own: str, variable: str) -> dict[str, str]:
    """Environment variables for ranks of several machines: at which of its addresses the others reach this one.

    Gloo takes the address of the machine's name otherwise, which often is a loopback address.

    Args:
        variable: the engine's own.
    """
    found = {variable: own}
    if name := interface(own):
        found["GLOO_SOCKET_IFNAME"] = name
    return found


def towards(host: str) -> str:
    """The address of this machine's interface towards another one."""
    return address(f"//[{host}]" if ":" in host else f"//{host}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that were free a moment ago.

    Raises:
        EngineError: none were found.
    """
    for _ in range(64):
        with contextlib.ExitStack() as bound:
            try:
                probe = bound.enter_context(socket.socket())
                probe.bind(("", 0))
                first = int(probe.getsockname()[1])
                for port in range(first + 1, first + count):
                    bound.enter_context(socket.socket()).bind(("", port))
                return first
            except (OSError, OverflowError):
                continue
    raise EngineError(f"no {count} consecutive free ports were found; end processes that hold ports, or try again")


log = structlog.get_logger("engine")

BEAT_S = 2.0
SILENT_S = 30.0  # imports and the loading of weights keep a process from its messages for seconds
HELLO_S = 10.0
RETRY_S = 1.0
MAX_MESSAGE_BYTES = 1 << 20
MAX_STRANGERS = 64  # connections that have not said who they are

T = TypeVar("T")


class Rendezvous(NamedTuple):
    """Where the machines of an engine meet. ``wait_s``: how long they wait for each other at the start."""

    nodes: int
    host: str
    port: int
    wait_s: float

    @property
    def engine_port(self) -> int:
        """The first of the ports that the engine uses on the leader's machine."""
        return self.port + 1


class JoinRequest(msgspec.Struct, frozen=True, tag="join", forbid_unknown_fields=True):
    """What a machine has. All but ``node`` must be equal. ``model``: its revision."""

    node: int
    nodes: int
    engine: str
    version: str
    model: str


class JoinRefused(msgspec.Struct, frozen=True, tag="refused"):
    """``later``: another try may succeed."""

    reason: str
    later: bool = False


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The engine starts on all machines. ``arguments``: the leader's, without what differs between them."""

    arguments: dict[str, Any]


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """Still there. ``gpus``: of a follower's machine, as in ``fleet.Load.gpus``."""

    gpus: tuple[GpuUse, ...] = ()


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """A follower was asked to stop: the worker is to drain."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine has ended on a follower."""

    reason: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The leader ends in order."""


Message = JoinRequest | JoinRefused | Start | Beat | StopRequest | Failed | Leave
_decode = msgspec.json.Decoder(Message).decode


def place_of(settings: WorkerSettings) -> Rendezvous:
    return Rendezvous(settings.nodes, settings.leader_address, settings.leader_port, settings.nodes_wait_s)


def meeting(place: Rendezvous) -> str:
    """Where the engine's ranks meet, as HOST:PORT."""
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{host}:{place.engine_port}"


def objection(member: JoinRequest, own: JoinRequest) -> str:
    """Why a machine cannot be one of the leader's; "": it can."""
    if member.nodes != own.nodes or not 0 < member.node < own.nodes:
        return (
            f"node {member.node} of {member.nodes}, but the engine has the nodes 0 to {own.nodes - 1}: give them all "
            "the same --nodes, and each its own --node-rank"
        )
    for name, fix in (
        ("engine", "start the same --engine on all nodes"),
        ("version", "install the same version on all nodes"),
        ("model", "all nodes need the same files of the model"),
    ):
        theirs, ours = getattr(member, name), getattr(own, name)
        if theirs != ours:
            return f"node {member.node} has {own.engine if name == 'version' else name} {theirs}, node 0 {ours}; {fix}"
    return ""


class _Link:
    """Messages as lines of JSON. Used in one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.peer = str((writer.get_extra_info("peername") or ("?",))[0])

    def send(self, message: Message) -> None:
        """Buffered: a peer that reads nothing is given up by ``receive`` long before much is."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None: the connection is closed, or carries something else.

        Args:
            seconds: default: ``SILENT_S``.

        Raises:
            TimeoutError: nothing came in time.
        """
        try:
            line = await asyncio.wait_for(self._reader.readline(), SILENT_S if seconds is None else seconds)
            return _decode(line) if line.endswith(b"\n") else None
        except TimeoutError:  # an OSError, too
            raise
        except (OSError, ValueError, msgspec.DecodeError):
            return None

    async def beat(self, gpus: Callable[[], tuple[GpuUse, ...]] = tuple) -> None:
        while True:
            self.send(Beat(gpus()))
            await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), RETRY_S)
        self._writer.close()


class Leader:
    """
    Args:
        own: what this machine has.
        lost: called with the first error when a machine is gone after the start; from any thread.
        asked: called when a follower was asked to stop; from any thread.
    """

    def __init__(
        self, own: JoinRequest, place: Rendezvous, lost: Callable[[EngineError], None], asked: Callable[[], None]
    ) -> None:
        self._own = own
        self._place = place
        self._asked = asked
        self._links: dict[int, _Link] = {}
        self._gpus: dict[int, tuple[GpuUse, ...]] = {}
        self._strangers = 0
        self._started = self._closing = False
        self._joined = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._failure: Future[EngineError] = Future()
        self._failure.add_done_callback(lambda failure: None if failure.cancelled() else lost(failure.result()))
        self._loop = LoopThread("nodes")

    def gather(self) -> str:
        """Wait for all followers. Returns the address where this machine is reached.

        Raises:
            EngineError: the address is not this machine's, or its port is taken.
            NodeLost: some did not come in time.
        """
        found: str = self._loop.run(self._gather(), self._place.wait_s + HELLO_S)
        return found

    async def _gather(self) -> str:
        place = self._place
        until = time.monotonic() + place.wait_s
        found = await self._listen(until)
        log.info("waiting_for_nodes", nodes=place.nodes, address=f"{found}:{place.port}", seconds=place.wait_s)
        while len(self._links) < place.nodes - 1:
            self._joined.clear()
            try:
                await asyncio.wait_for(self._joined.wait(), max(0.0, until - time.monotonic()))
            except TimeoutError:
                missing = [str(node) for node in range(1, place.nodes) if node not in self._links]
                raise NodeLost(
                    f"node {', '.join(missing)} of {place.nodes} did not connect to {place.host}:{place.port} within "
                    f"{place.wait_s:g} s; start it with the same --leader-address, or raise --nodes-wait-s"
                ) from None
        self._started = True
        return found

    async def _listen(self, until: float) -> str:
        host, port = self._place.host, self._place.port
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                address = str(found[0][4][0])
                self._server = await asyncio.start_server(self._serve, address, port, limit=MAX_MESSAGE_BYTES)
                return address
            except socket.gaierror as error:
                if time.monotonic() >= until:
                    raise EngineError(f"--leader-address {host}: {error.strerror}") from None
                await asyncio.sleep(RETRY_S)  # a pod's name is known a moment after its start
            except OSError as error:
                raise EngineError(
                    f"node 0 cannot listen on {host}:{port}: {error.strerror}; --leader-address is an address of node "
                    "0, and --leader-port a free port there"
                ) from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(reader, writer)
        beat: asyncio.Task[None] | None = None
        try:
            member = await self._greet(link)
            if member is not None:
                beat = asyncio.create_task(link.beat(), name="beat")
                await self._follow(member.node, link)
        finally:
            if beat is not None:
                beat.cancel()
            await link.close()

    async def _greet(self, link: _Link) -> JoinRequest | None:
        if self._strangers >= MAX_STRANGERS:
            return None
        self._strangers += 1
        try:
            member = await link.receive(HELLO_S)
        except TimeoutError:
            return None
        finally:
            self._strangers -= 1
        if not isinstance(member, JoinRequest):
            return None
        if reason := objection(member, self._own):
            log.error("node_refused", address=link.peer, reason=reason)
            link.send(JoinRefused(reason))
            return None
        if self._started or member.node in self._links:
            link.send(JoinRefused(f"node 0 has a node {member.node} already; it is not replaced while it runs", True))
            return None
        log.info("node_joined", node=member.node, address=link.peer)
        self._links[member.node] = link
        self._joined.set()
        return member

    async def _follow(self, node: int, link: _Link) -> None:
        reason, blamed = "", False
        while not reason:
            try:
                message = await link.receive()
            except TimeoutError:
                reason = f"sent nothing for {SILENT_S:g} s"
                continue
            if message is None:
                reason = "has ended, or its connection has"
            elif isinstance(message, Failed):
                reason, blamed = f"has failed: {message.reason}", True
            elif isinstance(message, StopRequest):
                log.info("node_stops", node=node, action="draining")
                self._asked()
            elif isinstance(message, Beat):
                self._gpus[node] = message.gpus
        del self._links[node]
        if self._started and not self._closing and not self._failure.done():
            text = f"node {node} of {self._place.nodes} ({link.peer}) {reason}"
            self._failure.set_result(EngineError(text) if blamed else NodeLost(text))

    def gpus(self) -> tuple[GpuUse, ...]:
        """Of the followers' machines, in the order of their numbers; from any thread."""
        return tuple(gpu for _, gpus in sorted(self._gpus.copy().items()) for gpu in gpus)

    def start(self, arguments: Mapping[str, Any]) -> None:
        """Let the followers start the engine."""

        async def send() -> None:
            for link in self._links.values():
                link.send(Start(dict(arguments)))

        self._loop.run(send(), HELLO_S)

    def unless_lost(self, work: Callable[[], T]) -> T:
        """Call a function that blocks, for example until all ranks have met.

        Raises:
            EngineError: a machine was lost; the function continues in its own thread.
        """
        answer = in_thread(work, "engine-start")
        either: list[Future[Any]] = [answer, self._failure]
        wait(either, return_when=FIRST_COMPLETED)
        if not answer.done():
            raise self._failure.result()
        return answer.result()

    def close(self) -> None:
        """Let the followers end. May be called twice."""
        if self._closing:
            return
        self._closing = True

        async def leave() -> None:
            if self._server is not None:
                self._server.close()
            links = list(self._links.values())
            for link in links:
                link.send(Leave())
            await asyncio.gather(*(link.close() for link in links))

        with contextlib.suppress(TimeoutError):
            self._loop.run(leave(), 2 * RETRY_S)
        self._loop.close()


class NodeGroup:
    """The machines of a worker's engine, as its first one sees them; nothing happens if that is the only one.

    Args:
        has: the engine, its version, and the revision of the model.
        asked: called when another machine was asked to stop.
    """

    def __init__(
        self, settings: WorkerSettings, has: tuple[str, str, str], inbox: Inbox, asked: Callable[[], None]
    ) -> None:
        self._leader: Leader | None = None
        if settings.nodes > 1:
            own = JoinRequest(0, settings.nodes, *has)
            self._leader = Leader(own, place_of(settings), lambda error: inbox.put(EngineFailed(error)), asked)

    def meet(self, arguments: Mapping[str, Any], own_address: str) -> dict[str, str]:
        """Wait for the others, and let them start the engine. Returns environment variables for its ranks here.

        Args:
            own_address: the engine's variable for this machine's address.

        Raises:
            EngineError: as in ``Leader.gather``.
        """
        if self._leader is None:
            return {}
        variables = reached_at(self._leader.gather(), own_address)
        self._leader.start(arguments)
        return variables

    def gpus(self) -> tuple[GpuUse, ...]:
        """Of the other machines, as they said last."""
        return () if self._leader is None else self._leader.gpus()

    def construct(self, make: Callable[[], T], before: frozenset[int]) -> T:
        """Construct an engine, unless a machine is lost on the way.

        Args:
            before: child processes of this one. Those that are new end with it if a machine is lost.

        Raises:
            Exception: of ``make``, or as in ``Leader.unless_lost``.
        """
        if self._leader is None:
            return make()
        try:
            return self._leader.unless_lost(make)
        except EngineError:
            ProcessGuard(children() - before)  # what is left of them waits for the lost ranks
            raise

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()


class NodeFollower:
    """
    Args:
        gpus: of this machine, for the leader. It must not block.
    Attributes:
        over: how it ended: "", in order, or what happened to the leader.
    """

    def __init__(self, own: JoinRequest, place: Rendezvous, gpus: Callable[[], tuple[GpuUse, ...]] = tuple) -> None:
        self.over: Future[str] = Future()
        host = socket.gethostname()
        self._gpus = lambda: tuple(msgspec.structs.replace(gpu, host=host) for gpu in gpus())
        self._own = own
        self._place = place
        self._link: _Link | None = None
        self._closed = False
        self._loop = LoopThread("nodes")

    def join(self) -> Start:
        """Wait for the leader, and until the engine starts.

        Raises:
            EngineError: the leader refuses this machine.
            NodeLost: there is no leader, or the other machines did not come in time.
        """
        started: Start = self._loop.run(self._join(), self._place.wait_s + HELLO_S)
        return started

    async def _join(self) -> Start:
        place = self._place
        until = time.monotonic() + place.wait_s
        reason = ""
        log.info("waiting_for_leader", address=f"{place.host}:{place.port}", seconds=place.wait_s)
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(HELLO_S):
                    link = _Link(*await asyncio.open_connection(place.host, place.port, limit=MAX_MESSAGE_BYTES))
            except OSError as error:  # a TimeoutError is one
                reason = str(error) or "no answer"
                await asyncio.sleep(RETRY_S)
                continue
            link.send(self._own)
            beat = self._loop.task(link.beat(self._gpus), "beat")
            answer = await self._answer(link)
            if isinstance(answer, Start):
                self._link = link
                self._loop.task(self._follow(link), "leader")
                return answer
            beat.cancel()
            await link.close()
            if isinstance(answer, JoinRefused) and not answer.later:
                raise EngineError(f"node 0 ({place.host}:{place.port}) refuses this node: {answer.reason}")
            reason = answer.reason if isinstance(answer, JoinRefused) else "it ended before all nodes were there"
            await asyncio.sleep(RETRY_S)
        raise NodeLost(
            f"node 0 did not start the engine within {place.wait_s:g} s ({place.host}:{place.port}: {reason}); start "
            "it there with --node-rank 0, or raise --nodes-wait-s"
        )

    async def _answer(self, link: _Link) -> Message | None:
        try:
            while isinstance(message := await link.receive(), Beat):
                pass
        except TimeoutError:
            return None
        return message

    async def _follow(self, link: _Link) -> None:
        reason: str | None = None
        while reason is None:
            try:
                message = await link.receive()
            except TimeoutError:
                reason = f"node 0 ({link.peer}) sent nothing for {SILENT_S:g} s"
                continue
            if isinstance(message, Leave):
                reason = ""
            elif message is None:
                reason = f"node 0 ({link.peer}) has ended, or its connection has"
        self.over.set_result(reason)

    def stop(self) -> None:
        """Ask the leader to drain."""
        if self._link is not None:
            self._loop.post(self._link.send, StopRequest())

    def failed(self, reason: str) -> None:
        """Tell the leader that the engine has ended here."""
        if self._link is not None:
            self._loop.post(self._link.send, Failed(reason[:2000]))

    def close(self) -> None:
        """May be called twice."""
        if self._closed:
            return
        self._closed = True

        async def close() -> None:
            if self._link is not None:
                await self._link.close()

        with contextlib.suppress(TimeoutError):
            self._loop.run(close(), 2 * RETRY_S)
        self._loop.close()
