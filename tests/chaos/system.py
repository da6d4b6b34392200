"""The deployment under attack: its processes, their memory, and what is done to them."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.launch.machine import held_run
from penstock.launch.readiness import get_url
from penstock.launch.state import DeploymentState
from tests.chaos.audit import Footprint
from tests.chaos.brokers import Brokers, live_heap, profiled
from tests.chaos.builds import VARIABLE, OtherBuild, begin, snapshot
from tests.chaos.disk import Disk
from tests.chaos.launch import Starts
from tests.chaos.links import Links
from tests.chaos.plan import BROKER, Act, Disturbance, Hit
from tests.chaos.topology import Topology
from tests.pipeline.support import Deployment
from tests.tls_support import issue

BACK_S = 90.0  # until everything runs again
DRAIN_S = 10.0
# Workers are lost every few seconds: with the default of 4, some requests meet as many.
SETTINGS = {"PENSTOCK_MAX_ATTEMPTS": "12"}
# All workers of a cell, or the only one of a model, are away for longer than the default of 30 s on a loaded machine.
WAIT_LONGER = {"PENSTOCK_REVISION_WAIT_S": "90"}
STOPPED_S = DRAIN_S + 8.0  # within which a process that was asked to end has ended
DOWN_S = 1.0  # between a crash of everything and the next start
STARTS = "starts"
_PAGE = os.sysconf("SC_PAGE_SIZE")


class System:
    """Owns the deployment, from ``started`` to ``stop``; ``say`` gets one line per event."""

    def __init__(
        self,
        start: Callable[[], Deployment],
        deployment: Deployment,
        brokers: Brokers | None,
        topology: Topology,
        say: Callable[[str], None],
        links: Links | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.topology = topology
        self.deployment = deployment
        self.urls = deployment.urls
        self.hits: list[Hit] = []
        self.late: list[str] = []
        self._start = start
        self._brokers, self._links, self._disk = brokers, links, disk
        self._owned = contextlib.AsyncExitStack()
        self._profiled = brokers is not None
        self._say = say
        self._stopped: set[int] = set()
        self._holds: set[asyncio.Task[None]] = set()
        self._returns: set[asyncio.Task[None]] = set()  # of them, what starts a broker again: it is never cancelled
        self._parents = {deployment.pid, os.getpid()}

    @classmethod
    async def started(
        cls,
        home: Path,
        topology: Topology,
        say: Callable[[str], None],
        other: OtherBuild | None = None,
        seed: int = 1,
        small_disk: bool = True,
    ) -> Self:
        """Start everything, and wait until it is ready.

        Args:
            other: processes come from both builds in turn.
            seed: of clocks.
            small_disk: a lone broker's disk is one that can be filled.
        """
        async with contextlib.AsyncExitStack() as opened:
            opened.enter_context(profiled(home))
            # Shared, one of each gateway, the brokers'; the same after a crash.
            held = held_run(0, 1 + topology.gateways + topology.cells)
            for each in held:
                opened.enter_context(each)
            ports = [int(each.getsockname()[1]) for each in held]
            broker_ports = dict(zip(topology.brokers, ports[1 + topology.gateways :], strict=True))
            flags = [*topology.flags, "--drain-s", f"{DRAIN_S:g}", "--http-port", str(ports[0])]
            pair = issue(home, "everyone") if topology.tls else None
            if pair is not None:
                os.environ["SSL_CERT_FILE"] = str(pair[0])
                flags += ["--tls-cert", str(pair[0]), "--tls-key", str(pair[1])]
            brokers, disk, links = None, None, None
            if topology.cluster:
                brokers = await Brokers.started(home / "brokers", pair)
                opened.push_async_callback(brokers.stop)
                flags += ["--nats-url", brokers.url]
            else:
                flags += ["--nats-port", str(broker_ports[BROKER])]
                disk = Disk.mounted(home / "data") if small_disk else None
                if disk is not None:
                    opened.callback(disk.unmount)
            if topology.links:
                links = Links.started({name: broker_ports[to] for name, (_, to) in topology.links_of.items()})
                opened.callback(links.stop)
            if topology.painter:
                from tests.workers.engines.diffusion import pipelines  # late: it imports torch

                flags += ["--diffusion-model", str(pipelines.image(home / "painter"))]
            if other is not None:
                model = await asyncio.to_thread(snapshot, topology.model, home)
                flags = [*_without(flags, "--model"), "--model", str(model), "--served-model-name", topology.model]
                if brokers is None:
                    await asyncio.to_thread(begin, other, home / "data")
            ports_of: dict[str, dict[str, int]] = {}
            for link, port in links.ports.items() if links is not None else ():
                process, broker = topology.links_of[link]
                ports_of.setdefault(process, {})[str(broker_ports[broker])] = port
            starts = Starts(str(home / STARTS), seed, other, topology.clock_s, ports_of)
            variables = {VARIABLE: msgspec.json.encode(starts).decode(), **SETTINGS}
            if topology.cells > 1 or topology.lone_workers:
                variables |= WAIT_LONGER

            def start() -> Deployment:
                return Deployment(home, *flags, module="tests.chaos.launch", **variables)

            made = cls(start, await asyncio.to_thread(start), brokers, topology, say, links, disk)
            made._owned, made._profiled = opened.pop_all(), True
            return made
        raise AssertionError

    async def stop(self) -> None:
        self.release()
        await asyncio.gather(*self._holds, return_exceptions=True)
        await asyncio.to_thread(self.deployment.stop)
        await self._owned.aclose()

    @property
    def store(self) -> Path:
        """Where the broker, or each of them, has its files."""
        if self._brokers is not None:
            return self.deployment.home / "brokers"
        return self.deployment.data_dir / ("nats" if self.topology.cells == 1 else "")

    @property
    def nats_urls(self) -> list[str]:
        """Where the operator reaches the broker of each cell, home first."""
        return [cell.nats_url for cell in self.deployment.state.all_cells]

    def _folder(self, cell: int) -> Path:
        """Of the broker of a cell."""
        data = self.deployment.data_dir
        return data / "cells" / str(cell) if cell else data

    @property
    def starts(self) -> Path:
        """A line for each process that was started."""
        return self.deployment.home / STARTS

    @property
    def more(self) -> frozenset[Act]:
        """What this deployment can have beyond signals."""
        found = {Act.stall: self._links, Act.fill: self._disk}
        return frozenset(act for act, means in found.items() if means is not None)

    @property
    def client_url(self) -> str:
        """Where NATS clients connect."""
        return self.deployment.state.client_nats_url if self._brokers is None else self._brokers.client_url

    @property
    def pids(self) -> dict[str, int]:
        """Of everything that runs now, but for the supervisor."""
        state = self._state()
        found = {p.name: p.pid for p in state.processes if p.pid} if state is not None else {}
        return found if self._brokers is None else found | self._brokers.pids

    @property
    def names(self) -> list[str]:
        state = self._state()
        found = [process.name for process in state.processes] if state is not None else []
        return found if self._brokers is None else [*found, *self._brokers.names]

    def _state(self) -> DeploymentState | None:
        """None while nothing runs."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return self.deployment.state
        return None

    def footprints(self) -> dict[str, Footprint]:
        found = {}
        for name, pid in self.pids.items():
            with contextlib.suppress(OSError):
                rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
                found[name] = Footprint(pid, rss, sum((kinds := open_files(pid)).values()), kinds)
        return found

    async def heaps(self) -> dict[str, int]:
        """Bytes in use of each broker that this started; of a deployment that was there before, brokers show none."""
        own = enumerate(self.topology.brokers) if self._profiled else ()
        lone = {name: self._folder(cell) / "nats.log" for cell, name in own}
        return {name: await live_heap(path) for name, path in (self._brokers.logs if self._brokers else lone).items()}

    # -- disturbing it --------------------------------------------------------------------------------------------

    async def carry_out(self, disturbances: list[Disturbance], until: float) -> None:
        """Do as planned, from now on to ``until`` (monotonic); ends when everything that was stopped goes on."""
        began = time.monotonic()
        try:
            for each in disturbances:
                if began + each.at_s >= until:
                    break
                await asyncio.sleep(max(0.0, began + each.at_s - time.monotonic()))
                if each.act in (Act.roll, Act.crash):
                    since = time.monotonic()
                    if each.act is Act.crash:
                        await self._crash()
                    else:
                        await (self._regroup() if self.topology.cells > 1 else self._roll())
                    began += time.monotonic() - since  # what comes later keeps its distances
                else:
                    self._hit(each)
            if self._holds:
                await asyncio.wait(self._holds)
        finally:
            self.release()

    def release(self) -> None:
        """Let everything go on that is stopped."""
        for task in self._holds - self._returns:
            task.cancel()
        for pid in list(self._stopped):
            self._go_on(pid)
        if self._disk is not None:
            self._disk.free()

    def _hit(self, each: Disturbance) -> None:
        if each.act in (Act.stall, Act.fill):
            self._beside(each)
            return
        groups = self.topology.groups
        if (victim := each.victim([*self.names, *groups])) is not None:
            for name in groups.get(victim, (victim,)):
                self._signal(each, name)

    def _signal(self, each: Disturbance, name: str) -> None:
        pid = self.pids.get(name, 0)
        whole = self._brokers is None or name not in self._brokers.names or self._brokers.whole
        if pid in self._stopped or not self._is_ours(pid) or not whole:
            return
        sent = {Act.kill: signal.SIGKILL, Act.stop: signal.SIGSTOP, Act.restart: signal.SIGTERM}[each.act]
        try:
            os.kill(pid, sent)
        except ProcessLookupError:  # another disturbance has just ended it
            return
        self.hits.append(Hit(time.time(), each.act, name, each.hold_s))
        self._say(f"{each.act} {name} ({pid})" + (f" for {each.hold_s:.1f} s" if each.hold_s else ""))
        if each.act is Act.stop:
            self._stopped.add(pid)
            self._spawn(self._hold(pid, each.hold_s))
        elif each.act is Act.restart and not name.startswith(BROKER):
            self._spawn(self._ends(name, pid))
        if self._brokers is not None and name in self._brokers.names:
            task = self._spawn(self._brokers.back(name, each.hold_s))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    def _beside(self, each: Disturbance) -> None:
        """What is done to the link of a process, or to the disk."""
        if each.act is Act.fill and self._disk is not None:
            self.hits.append(Hit(time.time(), each.act, BROKER, each.hold_s))
            self._say(f"the disk is full for {each.hold_s:.1f} s")
            self._spawn(self._full(self._disk, each.hold_s))
        elif self._links is not None and (name := each.victim(self._stallable)) is not None:
            self._say(f"the link of {name} carries nothing {each.way} for {each.hold_s:.1f} s")
            for link, (process, broker) in self.topology.links_of.items():
                if link == name or broker == name or process in self.topology.groups.get(name, ()):
                    self._links.stall(link, each.way, each.hold_s)
            for one in self.topology.groups.get(name, (name,)):
                self.hits.append(Hit(time.time(), each.act, one, each.hold_s))

    @property
    def _stallable(self) -> list[str]:
        """Links by their names; those of all processes to a broker, and those of all workers of a cell, by its name."""
        topology = self.topology
        return [*topology.links_of, *topology.brokers, *topology.groups]

    async def _full(self, disk: Disk, seconds: float) -> None:
        disk.fill()
        try:
            await asyncio.sleep(seconds)
        finally:
            disk.free()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._holds.add(task)
        task.add_done_callback(self._holds.discard)
        return task

    async def _ends(self, name: str, pid: int) -> None:
        """Note it if a process that was asked to end does not within its bound. It may be stopped on the way."""
        paused, began = 0.0, time.monotonic()
        while self._is_ours(pid):
            await asyncio.sleep(0.1)
            paused += 0.1 * (pid in self._stopped)
            if time.monotonic() - began - paused > STOPPED_S:
                self.late.append(f"{name} ({pid}) has not ended {STOPPED_S:g} s after SIGTERM, --drain-s {DRAIN_S:g}")
                self._say(self.late[-1])
                return

    async def _hold(self, pid: int, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            self._go_on(pid)

    def _go_on(self, pid: int) -> None:
        if pid in self._stopped:
            self._stopped.discard(pid)
            if self._is_ours(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _is_ours(self, pid: int) -> bool:
        """Whether it is still a child of our supervisor, or ours: a pid may be anyone's by now."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            return pid > 0 and int(stat.rpartition(")")[2].split()[1]) in self._parents
        return False

    async def _roll(self) -> None:
        """Restart everything but the broker in order, one after the other, each once the one before is back."""
        self._say("rolling restart")
        for name in sorted(self.names):
            pid = self.pids.get(name, 0)
            if name.startswith(BROKER) or pid in self._stopped or not self._is_ours(pid):
                continue
            self.hits.append(Hit(time.time(), Act.roll, name))
            os.kill(pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(BACK_S):
                    while self.pids.get(name, pid) == pid or not await self.ready():  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            except TimeoutError:
                self.late.append(f"{name} is not back {BACK_S:g} s after a rolling restart")
                self._say(self.late[-1])
        self._say("rolling restart is over")

    async def _regroup(self) -> None:
        """Give up all cells but the first, and take them again: what moves is restarted in turn."""
        for cells in (1, self.topology.cells):
            self._say(f"{cells} active cells")
            self.release()  # a process that is stopped would hold up those after it
            command = ("restart", "--rolling", "--cells", str(cells), "--timeout", f"{BACK_S:g}s")
            regrouping = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", *command, "--data-dir", str(self.deployment.data_dir)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
            assert regrouping.stdout is not None
            said = b""
            async for said in regrouping.stdout:
                if match := re.fullmatch(r"(\S+): ready again after (\S+) s\n", said.decode()):
                    self.hits.append(Hit(time.time() - float(match[2]), Act.roll, match[1]))
            if await regrouping.wait():
                self.late.append(f"there are not {cells} active cells: {said.decode().strip()}")
                self._say(self.late[-1])
        self._say("the cells are as before")

    async def _crash(self) -> None:
        """Kill the supervisor, and with it everything; start it again on the same data."""
        self._say("crash of everything")
        self.release()
        self.hits.append(Hit(time.time(), Act.crash, "all"))
        os.kill(self.deployment.pid, signal.SIGKILL)
        await asyncio.to_thread(self.deployment.wait)
        await asyncio.sleep(DOWN_S)
        self.deployment = await asyncio.to_thread(self._start)
        self._parents.add(self.deployment.pid)
        self._say("everything runs again")

    # -- waiting for it -------------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """Whether all processes run and every gateway could serve a request."""
        state = self._state()
        if state is None or not all(process.pid for process in state.processes):
            return False
        answers = [await get_url(url, "/health/ready") for url in self.urls]
        return all(status == 200 for status, _ in answers)

    async def settle(self) -> bool:
        """Wait until it is ready; False: it is not within ``BACK_S``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BACK_S):
                while not await self.ready():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                return True
        return False


def open_files(pid: int) -> dict[str, int]:
    """How many a process has, by what they are: of a broker's files, which stream's."""
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found[_kind(str(descriptor.readlink()))] += 1
    return dict(found)


def _kind(target: str) -> str:
    if match := re.search(r"/streams/([^/]+)/(msgs|obs)/", target):
        return f"{match[2]} of {match[1]}"
    if match := re.search(r"/_js_/([SC]-R\d+[FM])-", target):  # the log of a stream or consumer with replicas
        return f"replication {match[1]}"
    return target.partition(":")[0] if ":[" in target else "other"


def _without(flags: list[str], name: str) -> list[str]:
    """Flags without one that has a value and may be repeated."""
    pairs = zip(["", *flags], flags, strict=False)
    return [flag for before, flag in pairs if name not in (before, flag)]
