"""``penstock up``: broker, streams, workers, routers and gateways as processes of this machine, kept alive."""

import asyncio
import contextlib
import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog
from nats.aio.client import Client
from rich.console import Console

from configs.logs import setup
from configs.settings import UpSettings
from infra.broker.apply import BrokerProblem
from infra.broker.binary import NoServerBinary
from infra.broker.datadir import DataDirBusy, Lock
from infra.broker.disk import DiskWatch
from infra.broker.main import apply_at, connect_operator
from infra.broker.server import EmbeddedNats, ServerFailed, is_free
from infra.engine_args.tree import BadArguments, Tree, parse_yaml
from infra.launch.fleet import registered
from infra.launch.groups import assign, fleet_of
from infra.launch.http import base_url, get, reachable
from infra.launch.machine import free_run, gpus
from infra.launch.plan import Planned, plan
from infra.launch.process import Process
from infra.launch.show import Board, readable, welcome
from infra.launch.signals import Stop
from infra.launch.state import Running, State, write_state
from infra.launch.supervisor import Keeper
from infra.recipes import catalogue
from schemas.subjects import Subjects

log = structlog.get_logger("up")

USAGE = 2  # a child's exit status for settings it cannot use: starting it again would not help
_TRIES = 3  # ends of one child before all is ready, after which the start is given up
_POLL_S = 0.05
_GRACE_S = 5.0  # beyond drain_s, to close connections
ROUTER_STANDSTILL_S = 2.0  # a stopped router is killed after this: its requests then wait for no more than 5 s


class UpFailed(Exception):
    """The deployment did not start; the text says which part and why."""


def run(settings: UpSettings) -> int:
    """Run a deployment until Ctrl-C or SIGTERM; the exit status."""
    setup(settings.log_format, settings.log_level, name="up")
    try:
        return asyncio.run(Deployment(settings).run())
    except (UpFailed, ServerFailed, NoServerBinary, BrokerProblem, DataDirBusy, ValueError) as error:
        print(f"penstock up: {error}", file=sys.stderr)
        return 1


def read_args(path: str) -> Tree:
    """A file of engine arguments.

    Raises:
        BadArguments: it cannot be read, or is no YAML mapping.
    """
    try:
        return parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadArguments([f"engine arguments: {error}"]) from error
    except BadArguments as error:
        raise BadArguments(f"{path}: {problem}" for problem in error.problems) from error


def command(planned: Planned) -> list[str]:
    """How one child is started."""
    return [sys.executable, "-m", "infra.cli", *planned.argv]


class Deployment:
    """Everything that one ``penstock up`` runs.

    Raises:
        PlanError, BadArguments: flags, recipe, engine arguments and this machine do not go together.
    """

    def __init__(self, settings: UpSettings, *, command: Callable[[Planned], Sequence[str]] = command) -> None:
        self.settings = settings
        self.data_dir = Path(settings.data_dir).resolve()
        self.subjects = Subjects(settings.namespace)
        members = catalogue.chosen(settings.recipe, catalogue.members()) if settings.recipe else ()
        self._fleet = fleet_of(settings, members, read_args)
        self._gpus = gpus(settings.gpus, os.environ)
        assign(self._fleet.groups, self._gpus)  # too few are told of before anything starts
        self._ready_s = settings.ready_s or (3600.0 if self._fleet.slow or settings.diffusion else 120.0)
        self._planned: list[Planned] = []
        self._command = command
        self._lock = Lock(self.data_dir / "up.lock")
        self._broker: EmbeddedNats | None = None
        self._keepers: list[Keeper] = []
        self._model = settings.served_model_name.partition(",")[0]
        self._makes = "text"
        self._ports: list[int] = []
        self._console = Console(stderr=True)
        self._board = Board(self._console, quiet=settings.log_format == "json")
        self._failed: asyncio.Future[None] | None = None
        self._ready = False
        self._watches = contextlib.AsyncExitStack()

    async def run(self) -> int:
        """Start, wait for a signal, stop in order.

        Raises:
            UpFailed, ServerFailed, NoServerBinary, BrokerProblem, DataDirBusy: it did not start.
        """
        began = time.monotonic()
        self._lock.acquire("penstock up")
        self._failed = asyncio.get_running_loop().create_future()
        with Stop() as stop:
            asked = asyncio.create_task(stop.asked.wait(), name="signal")
            try:
                starting = asyncio.create_task(self._start(), name="start")
                await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    starting.cancel()
                    await asyncio.wait([starting])
                elif starting.result() is None:
                    self._greet(time.monotonic() - began)
                    await asked
            finally:
                asked.cancel()
                insisted = await self._stop(stop.insisted)
                if not self._failed.cancel() and not self._failed.cancelled():
                    self._failed.exception()  # seen: it is what ended the start, or came after its end
                self._lock.release()
        return 130 if insisted else 0

    async def _start(self) -> None:
        up = self.settings
        self._ports = choose_ports(up.http_host, up.http_port, up.gateways)
        with self._board:
            if up.nats_url:
                url: Callable[[str], str] = lambda role: up.nats_url  # noqa: E731
                sys_url = ""
            else:
                self._board.starting("nats")
                self._broker = EmbeddedNats(self.data_dir, up.namespace, up.nats_port, durability=up.durability)
                await self._keep(Keeper(self._broker, self._on_change))
                await self._watches.enter_async_context(DiskWatch(self._broker))
                self._board.ready("nats", f"ready on port {self._broker.port}")
                url, sys_url = self._broker.url, self._broker.sys_url
            self._board.starting("streams")
            await apply_at(url("operator"), self.subjects, record=up.record)
            self._board.ready("streams")
            children = self._planned = plan(
                up,
                self._fleet,
                ports=self._ports,
                url=url,
                sys_url=sys_url,
                cores=_cores(),
                metrics_ports=self._metrics_ports(),
                gpus=self._gpus,
            )
            for planned in children:
                self._board.starting(planned.name)
                # A lone router that stands still holds up every request, and has nothing that another start would lose.
                standstill_s = ROUTER_STANDSTILL_S if planned.role == "router" else None
                await self._keep(Keeper(self._process(planned), self._on_change, standstill_s=standstill_s))
            await self._until_ready(children)

    def _metrics_ports(self) -> list[int]:
        """For workers and routers, in the order of their start."""
        count = sum(group.number for group in self._fleet.groups) + self.settings.routers
        return [] if self.settings.metrics_port < 0 else free_run(self.settings.metrics_port, count)

    def _process(self, planned: Planned) -> Process:
        return Process(
            planned.name,
            planned.role,
            self._command(planned),
            planned.environ(os.environ) | _our_path(os.environ),
            self.data_dir / "logs" / f"{planned.name}.log",
            echo=self.settings.log_format == "json",
        )

    async def _keep(self, keeper: Keeper) -> None:
        self._keepers.append(keeper)
        await keeper.start()

    async def _until_ready(self, children: list[Planned]) -> None:
        """Wait until every worker is registered and every gateway says that it can serve a request."""
        assert self._failed is not None
        deadline = time.monotonic() + self._ready_s
        # Without workers of our own, others' may come later: gateways then only have to answer.
        waiting = {planned.name: "does not answer yet" for planned in children if planned.role == "gateway"}
        waiting |= {planned.name: "is not registered yet" for planned in children if planned.role == "worker"}
        nc = await connect_operator(self._state().nats_url)
        try:
            while waiting:
                if self._failed.done():
                    self._failed.result()
                await self._look(nc, waiting)
                if waiting and time.monotonic() > deadline:
                    raise UpFailed(
                        f"not ready after {self._ready_s:g} s (--ready-s):\n"
                        + "".join(f"  {name}: {said}\n" for name, said in waiting.items())
                        + f"  logs: {self.data_dir / 'logs'}"
                    )
                await asyncio.sleep(_POLL_S)
        finally:
            await nc.close()
        for planned in children:
            self._board.ready(planned.name)
        host, pictures = reachable(self.settings.http_host), not self._fleet.model
        self._model, self._makes = await _first_model(host, self._ports[0], pictures) or (self._model, "text")
        self._ready = True
        self._write_state()

    async def _look(self, nc: Client, waiting: dict[str, str]) -> None:
        """Take out of ``waiting`` who is ready; note what the others say."""
        workers = {name for name in waiting if not name.startswith("gateway-")}
        for name in (await registered(nc, self.subjects)) & workers if workers else ():
            del waiting[name]
            self._board.ready(name)
        for index, port in enumerate(self._ports):
            name = f"gateway-{index}"
            if name not in waiting:
                continue
            status, body = await get(reachable(self.settings.http_host), port, "/health/ready")
            if status == 200 or (status and not self._fleet.groups):
                del waiting[name]
                self._board.ready(name, f"ready on port {port}")
            elif status:
                waiting[name] = body.decode(errors="replace")[:300]

    def _greet(self, seconds: float) -> None:
        if self.settings.log_format == "json":
            log.info("ready", url=self._state().http_url, model=self._model, seconds=round(seconds, 2))
        else:
            self._console.print(
                welcome(self._state(), self.data_dir, seconds), markup=False, highlight=False, soft_wrap=True
            )

    def _on_change(self, keeper: Keeper) -> None:
        self._write_state()
        hopeless = keeper.exits and (keeper.last_status == USAGE or keeper.exits >= _TRIES)
        if hopeless and not self._ready and self._failed is not None and not self._failed.done():
            child = keeper.child
            lines = child.last_lines() if isinstance(child, Process) else []
            said = "\n".join(textwrap.indent(readable(line), "  ") for line in lines) or "  (it said nothing)"
            where = f"\n  (in {child.log_path})" if isinstance(child, Process) else ""
            self._failed.set_exception(
                UpFailed(f"{child.name} ended with status {keeper.last_status} at start:\n{said}{where}")
            )

    def _state(self) -> State:
        given = self.settings.nats_url
        broker = self._broker
        metrics = {
            planned.name: f"http://127.0.0.1:{planned.metrics_port}/metrics"
            for planned in self._planned
            if planned.metrics_port
        }
        return State(
            http_url=base_url(self.settings.http_host, self._ports[0]),
            nats_url=broker.url("operator") if broker else given,
            client_nats_url=broker.url("client") if broker else given,
            sys_nats_url=broker.sys_url if broker else "",
            namespace=self.settings.namespace,
            model=self._model,
            processes=tuple(
                Running(k.child.name, k.child.role, k.child.pid, metrics.get(k.child.name, "")) for k in self._keepers
            ),
            makes=self._makes,
            http_urls=tuple(base_url(self.settings.http_host, port) for port in self._ports),
        )

    def _write_state(self) -> None:
        write_state(self.data_dir / "state.json", self._state())

    async def _stop(self, insisted: asyncio.Event) -> bool:
        """Gateways first, since they hold the clients; then who works for them, who tells of it, and the broker.

        Returns: whether a second signal cut it short.
        """
        insisting = asyncio.create_task(insisted.wait(), name="second-signal")
        insisting.add_done_callback(lambda task: None if task.cancelled() else self._kill())
        if self._keepers and sys.stderr.isatty():
            self._console.print("stopping; Ctrl-C again to stop at once")
        patience = self.settings.drain_s + _GRACE_S
        await self._watches.aclose()
        for roles in (("gateway",), ("router", "worker"), ("trace",), ("nats",)):
            group = [keeper.stop(patience) for keeper in self._keepers if keeper.child.role in roles]
            await asyncio.gather(*group)
        if self._broker is not None:
            await self._broker.stop()
        with contextlib.suppress(OSError):
            (self.data_dir / "state.json").unlink()
        cut = insisted.is_set()
        insisting.cancel()
        return cut

    def _kill(self) -> None:
        for keeper in self._keepers:
            keeper.kill()


def choose_ports(host: str, first: int, count: int) -> list[int]:
    """The gateways' ports: consecutive from ``first``, or free ones.

    Raises:
        UpFailed: one is in use, or there are no such ports.
    """
    if first == 0:
        return _free_ports(host, count)
    ports = list(range(first, first + count))
    if ports[-1] > 65535:
        raise UpFailed(f"{count} gateways from --http-port {first} on go beyond port 65535")
    for port in ports:
        if not is_free(port, host):
            raise UpFailed(f"port {port} on {host} is in use: choose another with --http-port (0: any free one)")
    return ports


def _our_path(inherited: Mapping[str, str]) -> dict[str, str]:
    """Our own packages come first in a child: the working directory may well hold a folder called configs."""
    ours = str(Path(__file__).resolve().parents[2])
    return {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [ours, inherited.get("PYTHONPATH", "")])),
    }


def _free_ports(host: str, count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [
            held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) for _ in range(count)
        ]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def _first_model(host: str, port: int, pictures: bool) -> tuple[str, str] | None:
    """A model that is served, and what it makes: "text", "image" or "video"; not text with ``pictures``."""

    class Model(msgspec.Struct):
        id: str
        output_modalities: tuple[str, ...] = ("text",)

    class Models(msgspec.Struct):
        data: list[Model]

    status, body = await get(host, port, "/v1/models")
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError):
            for model in msgspec.json.decode(body, type=Models).data:
                makes = next((kind for kind in model.output_modalities if kind != "text"), "text")
                if pictures == (makes != "text"):
                    return model.id, makes
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
