"""One deployment: started in order, supervised until a signal, stopped in order.

When a worker's process ends, the requests that it ran are returned to the routers before it is started again. The
restarted worker would do so from the same journal, but later, and without the exit status.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import site
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

import penstock
from penstock.cli.commands import unknown_variables
from penstock.cli.figures import show_size
from penstock.configs.settings import WorkerSettings, served_names
from penstock.configs.up_settings import UpSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.engine_args.tree import BadArguments, Tree, parse_yaml
from penstock.infra.model import modeldir
from penstock.infra.model.embedding_model import makes_vectors
from penstock.infra.nats_server.binary import ServerFailed
from penstock.infra.nats_server.datadir import DataDirBusy, DataDirUnusable, Lock
from penstock.infra.nats_server.disk import DiskWatch
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.process.budgets import available_cores, usable_cores
from penstock.infra.process.child import Process, bound_log
from penstock.infra.process.sockets import CannotListen, claim
from penstock.infra.process.supervisor import USAGE, Keeper, StopSignals
from penstock.launch.gateways import AUTO, LOOK_S, CpuMeter, GatewayScaler, gateway_range
from penstock.launch.groups import PlanError, assign, fleet_of, with_name
from penstock.launch.machine import Listeners, check_named, check_startable, free_port, gpus, held_run
from penstock.launch.nats import apply_at, apply_if_lost, connect_operator, copy_tenants, divide_at
from penstock.launch.plan import (
    LACKING_S,
    PlannedProcess,
    check_workers,
    further,
    further_gateway,
    held,
    in_cells,
    joined_cell,
    lacking_cells,
    number_of,
    of_further_cells,
    plan,
    resumed,
    routers_of,
    sized,
    spared_worker,
    worker_state,
    workers_by_role,
)
from penstock.launch.readiness import Readiness, get_url, registered_models, served_models
from penstock.launch.recipes import catalogue
from penstock.launch.show import Board, readable, welcome
from penstock.launch.state import (
    ALL,
    CellCounts,
    CellState,
    DeploymentState,
    GatewayState,
    Running,
    forget_wanted_cells,
    login_of,
    read_cells,
    read_resume,
    read_wanted_cells,
    start_of,
    stored_token,
    write_cells,
    write_state,
)
from penstock.schemas.control import LEAVE_S
from penstock.schemas.streams import GIB, limits_bytes, topology
from penstock.schemas.subjects import Subjects, cell_namespace
from penstock.workers.session.crash_journal import (
    End,
    LastProcess,
    boot_id,
    judge,
    killed_for_memory,
    paths,
    read_journal,
    returns,
)

log = structlog.get_logger("up")

STORE_S = 1.0


async def report_end(folder: Path, name: str, status: int, url: str, subjects: Subjects) -> None:
    """
    Args:
        folder: the worker's state folder.
        status: exit status, negative for a signal.
        url: of the broker, for the operator. If it does not answer, the restarted worker reports the end.
    """
    path, _ = paths(folder, name)
    try:
        last = read_journal(path.read_bytes())
    except OSError:
        return
    if last is None or not last.running:
        return
    end = judge(last, boot=boot_id(), killed=killed_for_memory(), status=status)
    log.warning(
        "worker_ended", name=name, status=status, crashed=end.crashed, why=end.reason, requests=len(last.running)
    )
    with contextlib.suppress(OSError):
        if await _stored(last, end, url, subjects):
            path.write_bytes(b"")
        else:
            with path.open("ab") as journal:
                journal.write(msgspec.json.encode(end) + b"\n")


async def _stored(last: LastProcess, end: End, url: str, subjects: Subjects) -> bool:
    try:
        nc = await connect_operator(url)
    except BrokerProblem:
        return False
    try:
        js = nc.jetstream(timeout=STORE_S)
        for each in returns(last, end, subjects):
            await js.publish(each.subject, each.payload, headers=each.headers | {"Nats-Msg-Id": each.id})
        return True
    except (NatsError, TimeoutError, OSError) as error:
        log.warning("worker_end_not_stored", error=repr(error), action="the restarted worker reports it")
        return False
    finally:
        await nc.close()


GRACE_S = 5.0  # beyond drain_s, to close connections
REPORT_S = 5.0  # between two lines about processes that are still awaited
# Gateways first, since clients are connected to them; then routers and workers, readers of the log, and the broker.
STAGES = (("gateway",), ("router", "worker"), ("trace", "dashboard"), ("nats",))


async def stop_in_order(
    keepers: Sequence[Keeper],
    drain_s: float,
    insisted: asyncio.Event,
    say: Callable[[str], None],
    *,
    serving: bool = True,
) -> bool:
    """Stop all processes; whether ``insisted`` cut it short, by killing them.

    Args:
        serving: requests may be open.
        say: takes each line for the user.
    """
    began = time.monotonic()

    def kill(task: asyncio.Task[bool]) -> None:
        if not task.cancelled():
            for keeper in keepers:
                keeper.kill()

    insisting = asyncio.create_task(insisted.wait(), name="second-signal")
    insisting.add_done_callback(kill)
    awaited = f"waiting up to {drain_s:g} s for open requests" if serving else "the start is cancelled"
    say(f"stopping: {awaited}; Ctrl-C again to stop at once")
    deadline = began + drain_s  # one for all: what a gateway has used of it is gone for workers
    for roles in STAGES:
        await _stop_together([keeper for keeper in keepers if keeper.child.role in roles], deadline, say)
    cut_short = insisted.is_set()
    insisting.cancel()
    say(
        f"stopped at once{'; open requests were cut off' if serving else ''}"
        if cut_short
        else f"stopped after {time.monotonic() - began:.1f} s"
    )
    return cut_short


async def _stop_together(keepers: Sequence[Keeper], deadline: float, say: Callable[[str], None]) -> None:
    if not keepers:
        return
    now = reported = time.monotonic()
    kill_s = max(deadline, now) + GRACE_S - now
    pending = {asyncio.create_task(keeper.stop(kill_s), name=keeper.child.name) for keeper in keepers}
    hurried = False
    while pending:
        until = reported + REPORT_S if hurried else min(deadline, reported + REPORT_S)
        done, pending = await asyncio.wait(pending, timeout=max(0.0, until - now))
        for task in done:
            task.result()
        now = time.monotonic()
        if not hurried and now >= deadline:
            hurried = True
            for keeper in keepers:
                keeper.hurry()
        if pending and now >= reported + REPORT_S:
            reported = now
            names = ", ".join(sorted(task.get_name() for task in pending))
            say(f"  waiting for {names}: {max(0.0, deadline - now):.0f} s left")


_TRIES = 3  # exits of one process before all is ready, after which the start has failed
_POLL_S = 0.05
_CELL_FAILURES = (ServerFailed, BrokerProblem, CannotListen, DataDirBusy, DataDirUnusable, OSError)  # of a further cell
ADDED_READY_S = 60.0  # for a gateway that was added
ADD_AGAIN_S = 60.0  # after one could not be added
LOGS_S = 10.0  # between two looks at the sizes of logs
ROUTER_STANDSTILL_S = 2.0  # a stopped router is killed after this, so that its requests wait for at most 5 s


class UpFailed(Exception):
    """The deployment did not start; the text says which process and why.

    Attributes:
        status: exit status for ``penstock up``.
    """

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def read_args(path: str) -> Tree:
    """A file of engine arguments.

    Raises:
        BadArguments: it cannot be read, or is not a YAML mapping.
    """
    try:
        return parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadArguments([f"engine arguments: {error}"]) from error
    except BadArguments as error:
        raise BadArguments(f"{path}: {problem}" for problem in error.problems) from error


def _makes_vectors(model: str) -> bool:
    """Whether a model is for embeddings only. Of a Hugging Face id, all but the weights is fetched to find out."""
    path = Path(model).expanduser()
    if modeldir.on_hub(model):
        try:
            path = modeldir.resolve(model)
        except modeldir.ModelError:
            return False  # ``check`` says why
    return path.is_dir() and makes_vectors(path)


def command(planned: PlannedProcess) -> list[str]:
    """The command line of one process."""
    return [sys.executable, "-m", "penstock", *planned.argv]


class Deployment:
    """Everything that one ``penstock up`` runs.

    Raises:
        PlanError, BadArguments: flags, recipe, engine arguments and this machine do not go together.
    """

    def __init__(self, settings: UpSettings, *, command: Callable[[PlannedProcess], Sequence[str]] = command) -> None:
        self.settings = settings = with_name(settings)
        self.data_dir = Path(settings.data_dir).resolve()
        members = catalogue.select(settings.recipe, catalogue.members()) if settings.recipe else ()
        self._fleet = fleet_of(settings, members, read_args, _makes_vectors)
        self._chosen = settings.gateways in (AUTO, "0")
        self._gateways = gateway_range(
            settings.gateways, available_cores(), sum(each.number for each in self._fleet.groups)
        )
        there = read_cells(self.data_dir)
        active = settings.cells or there.active
        self.settings = settings = sized(settings, self._fleet, available_cores(), there)
        self._active = active or settings.cells  # of the cells, those that take new requests
        self._subjects = [Subjects(cell_namespace(settings.namespace, cell)) for cell in range(settings.cells)]
        check_named(settings.gpus, self._fleet.groups)
        self._gpus = gpus(settings.gpus, os.environ)
        assign(self._fleet.groups, self._gpus)  # raises before anything starts
        self._ready_s = settings.ready_s or (3600.0 if self._fleet.slow or settings.diffusion else 120.0)
        self._planned: list[PlannedProcess] = []
        self._moved: dict[str, int] = {}  # cells of workers that joined others than the plan has
        self._leaving: set[str] = set()  # gateways that end with their last connection
        self._gateway_state = GatewayState(self._gateways.fewest, self._gateways.most)
        self._started: dict[str, PlannedProcess] = {}  # by name, as each was planned when it was started
        self._cells_shown = 0  # by the dashboard, which reads their number when it starts
        self._cells_refused = ""
        self._command = command
        self._lock = Lock(self.data_dir / "up.lock")
        self._brokers: list[EmbeddedNats] = []  # by cell; none where others run them
        self._keepers: list[Keeper] = []
        self._model = "".join(served_names(settings.served_model_name)[:1])
        self._makes = "text"
        self._closed = False  # requests need an API key
        self._models: tuple[str, ...] = ()
        self._listeners = Listeners(settings.http_host, tls=bool(settings.tls_cert))
        self._metrics_sockets: list[socket.socket] = []
        self._board = Board(quiet=settings.log_format == "json")
        self._failed: asyncio.Future[None] | None = None
        self._ready = False
        self._dashboard_url = ""
        self._changing = asyncio.Lock()  # the plan, by one at a time
        self._changes: set[asyncio.Task[None]] = set()
        self._watches = contextlib.AsyncExitStack()

    def check(self) -> None:
        """Find out what would end a worker at its start, and fetch models.

        Raises:
            PlanError: an engine is not installed, or cannot load its model.
        """
        check_startable(self._fleet.groups, self._board.print, self.settings.speculative_model)

    async def run(self) -> int:
        """Start, wait for a signal, stop in order.

        Raises:
            UpFailed, ServerFailed, NoServerBinary, BrokerProblem, CannotListen, DataDirBusy, DataDirUnusable: it did
                not start.
        """
        began = time.monotonic()
        self._lock.acquire("penstock up")
        self._failed = asyncio.get_running_loop().create_future()
        with StopSignals(resume=self._resume) as stop:
            signal = asyncio.create_task(stop.asked.wait(), name="signal")
            try:
                starting = asyncio.create_task(self._start(), name="start")
                await asyncio.wait([starting, signal], return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    starting.cancel()
                    await asyncio.wait([starting])
                elif starting.result() is None:
                    self._greet(time.monotonic() - began)
                    await signal
            finally:
                signal.cancel()
                cut_short = await self._stop(stop)
                if not self._failed.cancel() and not self._failed.cancelled():
                    self._failed.exception()  # retrieved: it ended the start, or came after it
                self._lock.release()
        return 130 if cut_short else 0

    async def _start(self) -> None:
        up = self.settings
        gateways = self._gateways
        self._listeners.open(up.http_port, gateways.first, chosen=self._chosen, more=not gateways.is_fixed)
        workers = sum(group.number for group in self._fleet.groups)
        metrics_ports = self._metrics_ports(up.metrics_port, workers + routers_of(up))
        with self._board:
            if not up.nats_url:
                self._warn_of_small_disk()
                for cell in range(up.cells):
                    await self._start_broker(cell)
            self._board.starting("streams")
            for cell in range(up.cells):
                await self._make_streams(cell)
            self._board.ready("streams")
            write_cells(self.data_dir, CellCounts(up.cells, self._active))
            self._planned = plan(
                up,
                self._fleet,
                active=self._active,
                ports=tuple(self._listeners.ports.values()),
                listen_fd=self._listeners.fd,
                counts_fd=self._listeners.counts_fd,
                url=self._url,
                sys_url=self._sys_url,
                cores=usable_cores(),
                metrics_ports=metrics_ports,
                gpus=self._gpus,
            )
            for planned in self._planned:
                self._board.starting(planned.name)
                await self._keep(self._keeper(planned))
            await self._until_ready()
        if up.dashboard_port >= 0:
            await self._start_dashboard()

    def _warn_of_small_disk(self) -> None:
        """Before the first start only: later, a disk is reported when it fills."""
        if (self.data_dir / "nats").exists():
            return
        free = shutil.disk_usage(self.data_dir).free
        limit = int(self.settings.store_size * GIB) or limits_bytes(topology(Subjects(), record=self.settings.record))
        if free < limit:
            self._board.print(
                f"penstock up: warning: {show_size(free)} are free under {self.data_dir}, and the streams may grow to "
                f"{show_size(limit)}: make room, name another disk with --data-dir, or limit them with --store-size"
            )

    async def _start_broker(self, cell: int) -> None:
        up, subjects = self.settings, self._subjects[cell]
        folder, name = (self.data_dir / "cells" / str(cell), f"nats-{cell}") if cell else (self.data_dir, "nats")
        folder.mkdir(parents=True, exist_ok=True)
        self._board.starting(name)
        port = up.nats_port + cell if up.nats_port else 0
        options: dict[str, Any] = {"durability": up.durability, "name": name, "beside": max(up.cells - 1, cell)}
        broker = EmbeddedNats(folder, subjects.namespace, port, **options)
        home = (self._brokers[0].url, self._subjects[0]) if cell else None

        def changed(keeper: Keeper) -> None:
            if broker not in self._brokers:  # it has a port from now on
                self._brokers.append(broker)
            self._on_change(keeper)

        def again() -> Coroutine[Any, Any, None]:
            return apply_if_lost(broker.url, subjects, **self._stream_sizes(cell), home=home)

        keeper = Keeper(broker, changed, give_up=self._give_up, restarted=again)
        await self._keep(keeper)
        await self._watches.enter_async_context(DiskWatch(broker, restart=keeper.restart))
        self._board.ready(name, f"ready on port {broker.port}")

    async def _make_streams(self, cell: int, shares: int = 0) -> None:
        url, subjects = self._url("operator", cell), self._subjects[cell]
        await apply_at(url, subjects, **self._stream_sizes(cell, shares))
        if cell:
            await copy_tenants(self._url("operator"), self._subjects[0], url, subjects)

    def _stream_sizes(self, cell: int, shares: int = 0) -> dict[str, Any]:
        up = self.settings
        return {"record": up.record, "store_size": up.store_size, "cells": shares or self._shares(cell)}

    def _shares(self, cell: int) -> int:
        """Into how many parts the space for streams is divided, one of which this cell has."""
        return self._active if cell < self._active else self.settings.cells

    def _url(self, user: str, cell: int = 0) -> str:
        """Where a user of the broker reaches a cell; its password may be another one at each call."""
        if self._brokers:
            return self._brokers[cell].url(user)
        others = self.settings.cell_nats_urls
        return others[cell - 1].replace(";", ",") if cell and others else self.settings.nats_url

    def _sys_url(self, cell: int) -> str:
        """Of the system account of a cell's broker; "": not known."""
        return self._brokers[cell].sys_url if self._brokers else ""

    async def _start_dashboard(self) -> None:
        """Started when everything else is ready: its start takes CPU time, and nothing waits for it."""
        port = free_port(self.settings.dashboard_port)
        self._dashboard_url = f"http://127.0.0.1:{port}/?token={stored_token(self.data_dir)}"
        argv = [sys.executable, "-m", "penstock", "dashboard", "--data-dir", str(self.data_dir), "--port", str(port)]
        log_path = self.data_dir / "logs" / "dashboard.log"

        def command() -> list[str]:
            self._cells_shown = self.settings.cells
            return argv

        process = Process("dashboard", "dashboard", command, os.environ | _our_path(os.environ), log_path)
        await self._keep(Keeper(process, self._on_change))

    def _metrics_ports(self, first: int, count: int) -> list[int]:
        """For workers and routers, in the order of their start; held while this deployment runs."""
        if self.settings.metrics_port < 0:
            return []
        if first:
            for port in range(first, first + count):
                self._metrics_sockets.append(claim("127.0.0.1", port, port_flag="--metrics-port"))
        sockets = held_run(first, count)
        self._metrics_sockets += sockets
        return [int(each.getsockname()[1]) for each in sockets]

    def _keeper(self, planned: PlannedProcess) -> Keeper:
        return Keeper(
            self._process(planned),
            self._on_change,
            # A lone stopped router blocks every request, and a restart loses nothing.
            standstill_s=ROUTER_STANDSTILL_S if planned.role == "router" else None,
            give_up=self._give_up,
            ended=self._on_worker_ended if planned.role == "worker" else None,
        )

    def _process(self, planned: PlannedProcess) -> Process:
        """Each start is as the process is planned by then."""

        def command() -> Sequence[str]:
            if planned.role == "worker" and self._ready:
                self._join(planned.name)
            now = self._started[planned.name] = next(each for each in self._planned if each.name == planned.name)
            return self._command(now)

        def environ() -> dict[str, str]:
            now = self._started[planned.name]
            now = now.logged_in(self._url) if self._brokers else now  # its password may be another by now
            return now.environ(_known(os.environ)) | _our_path(os.environ)

        return Process(
            planned.name,
            planned.role,
            command,
            environ,
            self.data_dir / "logs" / f"{planned.name}.log",
            echo=self.settings.log_format == "json",
            pass_fds=self._listeners.inherited if planned.role == "gateway" else (),
            interactive=planned.drives_gpu,
        )

    def _pid_of(self, name: str) -> int:
        """0: it does not run."""
        return next((keeper.child.pid or 0 for keeper in self._keepers if keeper.child.name == name), 0)

    async def _keep(self, keeper: Keeper) -> None:
        self._keepers.append(keeper)
        await keeper.start()

    async def _until_ready(self) -> None:
        """Wait until every worker is registered and every gateway answers that it can serve a request."""
        assert self._failed is not None
        deadline = time.monotonic() + self._ready_s
        names = [planned.name for planned in self._planned]
        workers = [planned.name for planned in self._planned if planned.role == "worker"]
        gateways = [planned.name for planned in self._planned if planned.role == "gateway"]
        urls = {name: self._gateway_url(name) for name in gateways}
        cells = {planned.cell for planned in self._planned if planned.role == "worker"}
        readiness = Readiness(workers, urls, self._board.ready, cells, self._pid_of)
        async with contextlib.AsyncExitStack() as stack:
            brokers = []
            for cell, subjects in enumerate(self._subjects):
                bus = Bus(await connect_operator(self._url("operator", cell)), subjects)
                brokers.append(await stack.enter_async_context(bus))
            while readiness.waiting:
                if self._failed.done():
                    self._failed.result()
                await readiness.look(brokers)
                if readiness.waiting and time.monotonic() > deadline:
                    raise UpFailed(
                        f"not ready after {self._ready_s:g} s (--ready-s):\n"
                        + "".join(f"  {name}: {why}\n" for name, why in readiness.waiting.items())
                        + f"  logs: {self.data_dir / 'logs'}"
                    )
                await asyncio.sleep(_POLL_S)
            served = await served_models(self._gateway_url(gateways[0]))
            self._closed = served is None
            if served is None:
                served = await registered_models(brokers)
        for name in names:
            self._board.ready(name)
        first = next((each for each in served if bool(self._fleet.model) == (each.makes == "text")), None)
        self._model, self._makes = (first.id, first.makes) if first is not None else (self._model, "text")
        self._models = tuple(dict.fromkeys(each.root or each.id for each in served))
        self._ready = True
        self._write_state()
        self._change(self._balance(), name="balance")
        self._change(self._bound_logs(), name="logs")
        if not self._gateways.is_fixed:
            self._change(self._scale_gateways(), name="gateways")

    def _greet(self, seconds: float) -> None:
        if self.settings.log_format == "json":
            log.info("ready", url=self._state().http_url, model=self._model, seconds=round(seconds, 2))
        else:
            self._board.print(welcome(self._state(), self.data_dir, seconds, closed=self._closed))

    def _on_change(self, keeper: Keeper | None = None) -> None:
        try:
            self._write_state()
        except OSError as error:  # a full disk: running processes must still be supervised
            log.warning("state_not_written", error=str(error))

    async def _on_worker_ended(self, keeper: Keeper) -> None:
        """Bounded: the next start waits for it."""
        folder, status = Path(worker_state(self.settings)), keeper.last_status or 0
        cell = self._started[keeper.child.name].cell  # by now it may be planned for another one
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await report_end(folder, keeper.child.name, status, self._url("operator", cell), self._subjects[cell])

    def _resume(self) -> None:
        """Start the processes that ``write_resume`` has named: drained ones again, and workers that are new.

        Change the number of active cells to what ``ask_for_cells`` has said.
        """
        if wanted := read_wanted_cells(self.data_dir):
            self._change(self._set_cells(wanted), name="cells")
        names = read_resume(self.data_dir)
        for keeper in self._keepers:
            if keeper.child.name in names and keeper.drained and self._has_gpus(keeper.child.name):
                keeper.resume()
        there = {keeper.child.name for keeper in self._keepers}
        if self._ready and (new := [name for name in names if name not in there]):
            self._change(self._grow(new), name="grow")

    def _has_gpus(self, name: str) -> bool:
        """Whether a drained process can start again; where others have taken its GPUs, on further ones."""
        child = next((each for each in self._planned if each.name == name), None)
        if child is None or child.role != "worker":
            return True
        try:
            again = resumed(self._fleet, child, self._undrained(), self._gpus)
        except PlanError as error:
            log.warning("workers_not_added", names=[name], error=str(error))
            return False
        self._planned = [again if each.name == name else each for each in self._planned]
        return True

    def _undrained(self) -> list[PlannedProcess]:
        drained = {keeper.child.name for keeper in self._keepers if keeper.drained}
        return [each for each in self._planned if each.name not in drained]

    def _change(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._changes.add(task)
        task.add_done_callback(self._changed)

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("change_failed", change=task.get_name(), exc_info=error)

    async def _grow(self, names: Sequence[str]) -> None:
        async with self._changing:
            try:
                added = further(
                    self.settings,
                    self._fleet,
                    names,
                    self._undrained(),
                    active=self._active,
                    url=self._url,
                    cores=usable_cores(),
                    metrics_ports=self._metrics_ports(0, len(names)),
                    gpus=self._gpus,
                )
                await self._start_further(added)
            except (PlanError, CannotListen, OSError) as error:
                log.warning("workers_not_added", names=names, error=str(error))

    async def _start_further(self, added: Sequence[PlannedProcess]) -> None:
        for planned in added:
            self._planned.append(planned)
            await self._keep(self._keeper(planned))

    # --- cells that lack workers ---

    def _workers(self) -> dict[str, int]:
        """The cells of all workers but those that are drained, by name."""
        return {each.name: each.cell for each in self._undrained() if each.role == "worker"}

    def _move(self, worker: str, cell: int) -> None:
        """Plan a worker for another cell. It goes there when it is started the next time."""
        self._moved[worker] = cell
        self._planned = self._placed(self._planned)

    def _join(self, worker: str) -> None:
        """A worker that starts goes where it lacks."""
        planned = next(each.cell for each in self._planned if each.name == worker)
        others = {name: cell for name, cell in self._workers().items() if name != worker}
        cell = joined_cell(worker, planned, others, self._active)
        if cell != planned:
            log.info("worker_joins", name=worker, cell=cell)
            self._move(worker, cell)

    async def _balance(self) -> None:
        """Give a cell that lacks workers for ``LACKING_S`` one of another cell, one at a time."""
        since: dict[tuple[str, int], float] = {}
        while True:
            await asyncio.sleep(LACKING_S / 12)
            now, workers = time.monotonic(), self._workers()
            since = {each: since.get(each, now) for each in sorted(lacking_cells(workers, self._active))}
            kind, cell = next((each for each, began in since.items() if now - began >= LACKING_S), ("", 0))
            if not kind or self._changing.locked() or self._outdated():  # `penstock restart` is at it
                continue
            name = spared_worker(kind, workers, self._active)
            log.warning("worker_moved", name=name, cell=cell, why=f"this cell lacks {kind} workers")
            self._move(name, cell)
            for keeper in self._keepers:
                if keeper.child.name == name:
                    keeper.restart()  # it finishes what it runs, and starts again
            since.clear()

    async def _bound_logs(self) -> None:
        """Those of processes; the brokers' are bounded by ``DiskWatch``."""
        while True:
            await asyncio.sleep(LOGS_S)
            for keeper in [*self._keepers]:
                if isinstance(keeper.child, Process):
                    await asyncio.to_thread(bound_log, keeper.child.log_path)

    # --- as many gateways as the load needs ---

    def _gateway_url(self, name: str) -> str:
        return self._listeners.url_of(number_of(name))

    def _serving(self) -> list[Keeper]:
        """The keepers of all gateways but those that are leaving."""
        return [each for each in self._keepers if each.child.role == "gateway" and each.child.name not in self._leaving]

    async def _scale_gateways(self) -> None:
        """Start one more gateway, or have one leave, when ``GatewayScaler`` says so."""
        scaler, meter = GatewayScaler(self._gateways), CpuMeter()
        while True:
            await asyncio.sleep(LOOK_S)
            now, keepers = time.monotonic(), self._serving()
            used = meter.look(now, {each.child.name: each.child.pid for each in keepers})
            if used is None or self._changing.locked() or self._outdated():  # `penstock restart` may be at it
                scaler.forget()
                continue
            change = scaler.look(now, tuple(used.shares.values()), used.idle_cores)
            if change is None:
                continue
            there = len(keepers)
            if change.gateways < there:
                await self._retire_gateway(max(keepers, key=lambda each: number_of(each.child.name)), change.why)
            elif not await self._add_gateway(change.why):
                await asyncio.sleep(ADD_AGAIN_S)

    async def _add_gateway(self, why: str) -> bool:
        """Start one more, and wait until it serves. Returns whether it does."""
        there = {number_of(each.child.name) for each in self._keepers if each.child.role == "gateway"}
        number = next(each for each in itertools.count() if each not in there)
        name = f"gateway-{number}"
        async with self._changing:
            try:
                planned = further_gateway(
                    self.settings,
                    self._fleet,
                    number,
                    active=self._active,
                    port=self._listeners.add(number),
                    listen_fd=self._listeners.fd,
                    counts_fd=self._listeners.counts_fd,
                    url=self._url,
                )
                await self._start_further([planned])
            except (CannotListen, OSError) as error:
                log.warning("gateway_not_added", name=name, error=str(error), again_s=ADD_AGAIN_S)
                self._planned = [each for each in self._planned if each.name != name]
                self._keepers = [each for each in self._keepers if each.child.name != name]
                if number in self._listeners.ports:
                    self._listeners.remove(number)
                return False
        self._note_gateways(f"{name} added: {why}")
        log.info("gateway_added", name=name, gateways=len(self._serving()), why=why)
        deadline = time.monotonic() + ADDED_READY_S
        while (await get_url(self._gateway_url(name), "/health/live"))[0] != 200:
            if time.monotonic() > deadline:
                late = f"it does not serve after {ADDED_READY_S:g} s; see {self.data_dir / 'logs' / name}.log"
                log.warning("gateway_not_added", name=name, error=late, again_s=ADD_AGAIN_S)
                keeper = next(each for each in self._keepers if each.child.name == name)
                await self._retire_gateway(keeper, "it did not serve")
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _retire_gateway(self, keeper: Keeper, why: str) -> None:
        """Have a gateway accept nothing more, and end when its last connection has closed."""
        name = keeper.child.name
        async with self._changing:
            self._planned = [each for each in self._planned if each.name != name]
            self._leaving.add(name)
        self._note_gateways(f"{name} leaves: {why}")
        log.info("gateway_leaves", name=name, gateways=len(self._serving()), why=why)
        self._change(self._until_left(keeper), name=f"leaving-{name}")

    async def _until_left(self, keeper: Keeper) -> None:
        child, began = keeper.child, time.monotonic()
        if isinstance(child, Process):
            child.leave()
        await keeper.ended(LEAVE_S + self.settings.drain_s)
        await keeper.stop(self.settings.drain_s + GRACE_S)
        log.info("gateway_left", name=child.name, status=keeper.last_status, seconds=round(time.monotonic() - began, 1))
        async with self._changing:
            self._keepers.remove(keeper)
            self._leaving.discard(child.name)
            self._listeners.remove(number_of(child.name))
        self._on_change()

    def _note_gateways(self, change: str) -> None:
        self._gateway_state = msgspec.structs.replace(self._gateway_state, change=change, changed_ns=time.time_ns())
        self._on_change()

    # --- another number of cells ---

    async def _set_cells(self, active: int) -> None:
        """Have this many cells take new requests: add what is missing, and plan where each process belongs from now on.

        Processes that run are left as they are, so nothing is refused meanwhile. `penstock restart` restarts those that
        are planned otherwise, in an order in which each request finds workers.
        """
        async with self._changing:
            self._cells_refused = ""
            try:
                self._check_cells(active)
                before = [self._shares(cell) for cell in range(self.settings.cells)]
                while self.settings.cells < active:
                    await self._add_cell(self.settings.cells, active)
                write_cells(self.data_dir, CellCounts(self.settings.cells, active))
                self._active = active
                self._moved.clear()
                self._planned = self._placed(self._planned)
                log.info("cells_set", active=active, cells=self.settings.cells)
                await self._divide_streams(before)
            except (PlanError, *_CELL_FAILURES) as error:
                self._cells_refused = str(error)
                log.warning("cells_not_set", cells=active, error=str(error))
            with contextlib.suppress(OSError):
                self._write_state()
            forget_wanted_cells(self.data_dir)  # last: the command that requested it reads the state now

    def _check_cells(self, active: int) -> None:
        if not self._ready:
            raise PlanError("the deployment is still starting; try again when it is ready")
        if (urls := self.settings.cell_nats_urls) and active > len(urls) + 1:
            raise PlanError(
                f"--cells {active}: --cell-nats-urls of `penstock up` names {len(urls)} brokers; stop it, and start it "
                "with one for each cell but the first"
            )
        settings = (each.settings for each in self._planned)
        workers = [(each.role, 1) for each in settings if isinstance(each, WorkerSettings)]
        check_workers(active, workers_by_role(workers))

    def _placed(self, planned: Iterable[PlannedProcess]) -> list[PlannedProcess]:
        places: dict[str, Any] = {"url": self._url, "sys_url": self._sys_url, "moved": self._moved}
        return in_cells(planned, self.settings, self._active, **places)

    async def _add_cell(self, cell: int, shares: int) -> None:
        """A further cell, with broker, streams and router. It has no workers yet, so gateways send nothing there.

        Args:
            shares: into how many parts the space for streams is divided.
        """
        self._subjects.append(Subjects(cell_namespace(self.settings.namespace, cell)))
        there = list(self._keepers)
        try:
            if self._brokers:
                await self._start_broker(cell)
            await self._make_streams(cell, shares)
        except _CELL_FAILURES:
            for keeper in self._keepers[len(there) :]:  # its broker
                await keeper.stop(GRACE_S)
            for broker in self._brokers[cell:]:
                await broker.stop()
            del self._subjects[cell:], self._brokers[cell:], self._keepers[len(there) :]
            raise
        before, self.settings = self.settings, msgspec.structs.replace(self.settings, cells=cell + 1)
        for broker in self._brokers:
            broker.beside = cell
        ports = self._metrics_ports(0, routers_of(self.settings) - routers_of(before))
        await self._start_further(self._placed(of_further_cells(self.settings, cell, ports)))

    async def _divide_streams(self, before: Sequence[int]) -> None:
        """Give each cell its part of the space for streams. What does not fit into it stays, and so does its limit."""
        for cell, shares in enumerate(before):
            url, subjects, sizes = self._url("operator", cell), self._subjects[cell], self._stream_sizes(cell)
            if sizes["cells"] == shares:
                continue
            try:
                await divide_at(url, subjects, shares, **sizes)
            except BrokerProblem as error:
                log.warning("streams_not_divided", cell=cell, error=str(error), action="`penstock streams set`")

    def _give_up(self, keeper: Keeper) -> bool:
        """Whether the start fails because a process exited: a retry would fail as well, or there were too many."""
        hopeless = keeper.last_status == USAGE or keeper.exits >= _TRIES
        if self._ready or not hopeless or self._failed is None:
            return False
        if not self._failed.done():
            child = keeper.child
            lines = child.last_lines() if isinstance(child, Process) else []
            output = "\n".join(textwrap.indent(readable(line), "  ") for line in lines) or "  (no output)"
            where = f"\n  (in {child.log_path})" if isinstance(child, Process) else ""
            status = USAGE if keeper.last_status == USAGE else 1
            self._failed.set_exception(
                UpFailed(f"{child.name} exited with status {keeper.last_status} at start:\n{output}{where}", status)
            )
        return True

    def _state(self) -> DeploymentState:
        client_url = self._url("client")
        metrics = {
            planned.name: f"http://127.0.0.1:{planned.metrics_port}/metrics"
            for planned in self._planned
            if planned.metrics_port
        }
        started = self._started
        cells = {name: planned.cell for name, planned in started.items()}
        cells |= {broker.name: cell for cell, broker in enumerate(self._brokers)}
        outdated = self._outdated()
        first = max(0, self.settings.cell)
        return DeploymentState(
            http_url=self._listeners.url,
            nats_url=self._url("operator"),
            client_nats_url=client_url,
            client_nats=login_of(client_url),
            sys_nats_url=self._brokers[0].sys_url if self._brokers else "",
            namespace=self.settings.namespace,
            model=self._model,
            processes=tuple(
                Running(
                    k.child.name,
                    k.child.role,
                    k.child.pid,
                    metrics.get(k.child.name, ""),
                    k.drained,
                    start_of(k.child.pid),
                    first + cells.get(k.child.name, 0),
                    k.child.name in outdated,
                    k.child.name in self._leaving,
                    held(self._fleet, started[k.child.name], self._gpus) if k.child.name in started else (),
                )
                for k in self._keepers
            ),
            makes=self._makes,
            models=self._models,
            http_urls=tuple(self._gateway_url(each.child.name) for each in self._serving()),
            dashboard_url=self._dashboard_url,
            cells=tuple(
                CellState(
                    first + cell,
                    subjects.namespace,
                    self._url("operator", cell),
                    self._brokers[cell].sys_url if self._brokers else "",
                    str(self._brokers[cell].data_dir) if self._brokers else "",
                )
                for cell, subjects in enumerate(self._subjects[: len(self._brokers) or None])  # they start in turn
            ),
            active_cells=self._active,
            cells_refused=self._cells_refused,
            gateways=self._gateway_state,
            gpus=(ALL,) if self._gpus is None else self._gpus,
        )

    def _outdated(self) -> set[str]:
        """The processes that run otherwise than they are planned now."""
        started = self._started
        names = {each.name for each in self._planned if each.name in started and started[each.name].argv != each.argv}
        if self._cells_shown not in (0, self.settings.cells):
            names.add("dashboard")
        return names & {keeper.child.name for keeper in self._keepers if keeper.child.pid is not None}

    def _write_state(self) -> None:
        write_state(self.data_dir / "state.json", self._state())

    async def _stop(self, stop: StopSignals) -> bool:
        """Stop all processes that run. Returns whether a second signal cut it short."""
        for each in self._metrics_sockets:
            each.close()
        if not self._keepers:
            self._listeners.close()
            return False
        failed = not stop.asked.is_set()
        say = (lambda line: None) if failed else self._board.print
        await self._watches.aclose()
        for task in [*self._changes]:
            task.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        self._listeners.close()  # first: from now on a connection is refused instead of left waiting
        cut_short = await stop_in_order(self._keepers, self.settings.drain_s, stop.insisted, say, serving=self._ready)
        await asyncio.gather(*(broker.stop() for broker in self._brokers))
        with contextlib.suppress(OSError):
            (self.data_dir / "state.json").unlink()
        return cut_short


def _known(environ: Mapping[str, str]) -> dict[str, str]:
    """Without misspelt settings: ``penstock up`` has warned of them, and its processes need not do so again."""
    unknown = unknown_variables(environ, UpSettings)
    return {name: value for name, value in environ.items() if name not in unknown}


def _our_path(inherited: Mapping[str, str]) -> dict[str, str]:
    """What a child finds the package by, whatever is in its working directory.

    An installed package is found without help. A source tree is named if it is where this process has the package from.
    Never the folder ``penstock`` itself: its parts would hide packages of others, and be loaded under two names.
    """
    root = Path(penstock.__path__[0]).resolve().parent
    found = {Path(entry or ".").resolve() for entry in sys.path}
    by_itself = {Path(entry).resolve() for entry in (*site.getsitepackages(), site.getusersitepackages())}
    ours = [str(root)] if root in found - by_itself else []
    path = os.pathsep.join(filter(None, [*ours, inherited.get("PYTHONPATH", "")]))
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": path} if path else {})
