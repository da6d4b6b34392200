"""Plans the processes of ``penstock up``: a pure function from its settings to the settings of each child."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.configs.flags import PREFIX, flags_of, to_argv, to_environ
from penstock.configs.settings import Common, CommonT, GatewaySettings, RouterSettings, TraceSettings, WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.launch.groups import EXTERNAL, PlanError, WorkerFleet, WorkerGroup, assign
from penstock.launch.state import ALL, NO_CELLS, CellCounts
from penstock.schemas.subjects import cell_namespace

SECRET = (
    "nats_url",
    "cell_nats_urls",
    "sys_nats_url",
    "api_key",
)  # with passwords: passed in the environment, which ps hides from other users
USERS = {"trace": "reader"}  # broker users not named after the role
# Children get the flags of ``up`` that they have under the same name, except these: they mean something else there.
_NOT_PASSED = {
    "model",
    "served_model_name",
    "engine",
    "http_port",
    "metrics_port",
    "threads",
    "nats_url",
    "cell_nats_urls",
}

BrokerUrl = Callable[[str, int], str]  # from a user of the broker, and a cell, to the NATS URL


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One child process.

    Attributes:
        role: a sub-command of penstock.
        cell: in which it is; gateways are in all of them.
        gpus: visible to the child; None: all.
    """

    name: str
    role: str
    settings: Common
    gpus: tuple[str, ...] | None = None
    cell: int = 0

    @property
    def argv(self) -> list[str]:
        return [self.role, *to_argv(self.settings, hidden=SECRET)]

    @property
    def metrics_port(self) -> int:
        """0: none. A gateway serves its metrics on its HTTP port."""
        return int(getattr(self.settings, "metrics_port", 0))

    @property
    def drives_gpu(self) -> bool:
        settings = self.settings
        return isinstance(settings, WorkerSettings) and (bool(self.gpus) or settings.engine in EXTERNAL)

    def logged_in(self, url: BrokerUrl) -> "PlannedProcess":
        """The same with the broker's URLs as they are now."""
        user, settings = USERS.get(self.role, self.role), self.settings
        changes: dict[str, Any] = {"nats_url": url(user, self.cell)}
        if getattr(settings, "sys_nats_url", ""):
            changes["sys_nats_url"] = url("sys", self.cell)
        if isinstance(settings, GatewaySettings) and settings.cell_nats_urls:
            changes["cell_nats_urls"] = urls_of_cells(url, user, settings.cells)
        return replace(self, settings=msgspec.structs.replace(self.settings, **changes))

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The child's environment. Variables for flags of ``up`` are removed: ``up`` passes their values on."""
        settled = {flag.variable for flag in flags_of(UpSettings)} | {PREFIX + "NAME", PREFIX + "MODE"}
        kept = {key: value for key, value in inherited.items() if key not in settled}
        secrets = [name for name in SECRET if hasattr(self.settings, name)]
        visible = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return kept | to_environ(self.settings, secrets) | {"PYTHONUNBUFFERED": "1"} | visible


def plan(
    up: UpSettings,
    fleet: WorkerFleet,
    *,
    active: int = 0,
    ports: Sequence[int],
    listen_fd: int = -1,
    counts_fd: int = -1,
    url: BrokerUrl,
    sys_url: Callable[[int], str],
    cores: int,
    metrics_ports: Sequence[int] = (),
    gpus: Sequence[str] | None = None,
) -> list[PlannedProcess]:
    """The children, in the order in which they start.

    Args:
        active: cells that take new requests; 0: all.
        ports: one per gateway.
        listen_fd, counts_fd: a listening socket that all gateways inherit, and memory for their numbers of connections.
        sys_url: from a cell to the URL of its broker's system account; "": not known.
        cores: of the machine, for the threads of native engines.
        metrics_ports: of workers, then routers; empty: they serve no metrics.
        gpus: for workers, as in CUDA_VISIBLE_DEVICES; None: none are assigned.

    Raises:
        PlanError: there are too few GPUs.
    """
    children: list[PlannedProcess] = []
    free = iter(metrics_ports)
    assigned = assign(fleet.groups, gpus)
    for name, settings in workers(up, fleet, cores):  # first: they take longest to start
        settled = _settled(up, WorkerSettings, name, settings, metrics_port=next(free, 0), state_dir=worker_state(up))
        children.append(PlannedProcess(name, "worker", settled, assigned.get(name)))
    children += _routers(up, 0, free)
    for number, port in enumerate(ports):
        children.append(_gateway(up, fleet, number, port, listen_fd, counts_fd))
    children += _traces(up, 0)
    return in_cells(children, up, active, url=url, sys_url=sys_url)


def _gateway(
    up: UpSettings, fleet: WorkerFleet, number: int, port: int, listen_fd: int, counts_fd: int
) -> PlannedProcess:
    settings = {
        "model": fleet.models or ((fleet.model,) if fleet.model else ()),
        "served_model_name": up.served_model_name if fleet.model else "",
        "learn_models": True,
        "block_size": fleet.block_size,
        "listen_fd": listen_fd,
        "counts_fd": counts_fd,
        "state_dir": str(Path(up.data_dir).resolve() / "gateways"),
        "tracing": "all" if up.otlp_endpoint else "asked",
    }
    name = f"gateway-{number}"
    return PlannedProcess(name, "gateway", _settled(up, GatewaySettings, name, settings, http_port=port))


def further_gateway(
    up: UpSettings,
    fleet: WorkerFleet,
    number: int,
    *,
    active: int = 0,
    port: int,
    listen_fd: int,
    counts_fd: int,
    url: BrokerUrl,
) -> PlannedProcess:
    """One more gateway of a deployment that runs, as ``plan`` would have had it.

    Args:
        number: of its name; no other gateway has it.
    """
    made = _gateway(up, fleet, number, port, listen_fd, counts_fd)
    return in_cells([made], up, active, url=url, sys_url=lambda cell: "")[0]


def _settled(up: UpSettings, kind: type[CommonT], name: str, settings: Mapping[str, Any], **more: Any) -> CommonT:
    return kind(**{**passed(up, kind), "name": name, **settings, **more})


def _routers(up: UpSettings, first: int, metrics_ports: Iterator[int]) -> Iterator[PlannedProcess]:
    for index in range(first, routers_of(up)):
        name = f"router-{index}"
        settings = {"mode": up.router_mode, "metrics_port": next(metrics_ports, 0)}
        yield PlannedProcess(name, "router", _settled(up, RouterSettings, name, settings))


def _traces(up: UpSettings, first: int) -> Iterator[PlannedProcess]:
    for cell in range(first, up.cells if up.otlp_endpoint else 0):
        name = f"trace-{cell}"
        yield PlannedProcess(name, "trace", _settled(up, TraceSettings, name, {"cells": 1, "cell_nats_urls": ()}))


def in_cells(
    children: Iterable[PlannedProcess],
    up: UpSettings,
    active: int = 0,
    *,
    url: BrokerUrl,
    sys_url: Callable[[int], str],
    moved: Mapping[str, int] = MappingProxyType({}),
) -> list[PlannedProcess]:
    """These processes where they belong: their cell, its namespace and its broker.

    Args:
        active: cells that have workers and take new requests; 0: all. The others are read.
        moved: cells of workers that are not where ``cell_of`` has them.
        sys_url: as for ``plan``.
    """
    active = active or up.cells
    apart = len({url("gateway", cell) for cell in range(up.cells)}) > 1  # each cell has a broker of its own

    def placed(child: PlannedProcess) -> PlannedProcess:
        number = number_of(child.name)
        cell, more = 0, dict[str, Any]()
        if child.role == "worker":
            cell = moved.get(child.name, cell_of(child.name, active))
        elif child.role == "router":
            cell = number % up.cells
            more = {"sys_nats_url": sys_url(cell)}
        elif child.role == "trace":
            cell = number
        else:
            more = {
                "cells": up.cells,
                "active_cells": active if active < up.cells else 0,
                "nearest_cell": number % active if up.cells > 1 else -1,
                "cell_nats_urls": urls_of_cells(url, "gateway", up.cells) if apart else (),
            }
        place = {
            "nats_url": url(USERS.get(child.role, child.role), cell),
            "namespace": cell_namespace(up.namespace, cell),
        }
        return replace(child, cell=cell, settings=msgspec.structs.replace(child.settings, **place, **more))

    return [placed(child) for child in children]


def of_further_cells(up: UpSettings, before: int, metrics_ports: Sequence[int] = ()) -> list[PlannedProcess]:
    """What a running deployment needs besides when it has got cells; to be placed with ``in_cells``.

    Args:
        up: with the cells that there are now.
        before: how many there were.
        metrics_ports: one for each further router (``routers_of``); empty: they serve no metrics.
    """
    first = routers_of(msgspec.structs.replace(up, cells=before))
    return [*_routers(up, first, iter(metrics_ports)), *_traces(up, before)]


def urls_of_cells(url: BrokerUrl, user: str, cells: int) -> tuple[str, ...]:
    """The brokers of the cells after the first, as gateways take them."""
    return tuple(url(user, cell).replace(",", ";") for cell in range(1, cells))


CORES_PER_CELL = 4  # 2 for its gateways, 0.8 each for its router and its workers, 0.5 for its broker
# What a request waits for is chosen in its cell only. On a recorded trace the mean time to the first token of eight
# workers is 1.4 % longer in four cells than in one, that of four workers 6 % in two, so these get one.
FEWEST_WORKERS = 8
WORKERS_PER_CELL = 2


def sized(up: UpSettings, fleet: WorkerFleet, cores: int, there: CellCounts = NO_CELLS) -> UpSettings:
    """With a number of cells, where none is set. Cells that take no new requests count, too.

    Measured on 16 cores (``python -m tests.perf.scale``): docs/results/pipeline.md. Where engines take their time, a
    part of that is enough, and the rest is idle. More cells than are chosen carry more requests/s of few, fast workers.

    Args:
        cores: that this machine has for the deployment.
        there: cells that the data folder has, which keeps them, whatever their number is to be.
    Raises:
        PlanError: there would be cells without workers.
    """
    counts = workers_by_role((group.role, group.number) for group in fleet.groups)
    workers = min((count for count in counts.values() if count), default=1)
    chosen = min(cores // CORES_PER_CELL, workers // WORKERS_PER_CELL) if workers >= FEWEST_WORKERS else 1
    active = up.cells or there.active or (1 if up.nats_url else max(1, chosen))
    if up.cells:
        check_workers(up.cells, counts)
    return msgspec.structs.replace(up, cells=max(there.known, active))


_COMPUTING = ("aggregated", "prefill", "decode")  # roles of which each cell needs a worker, if there are any


def workers_by_role(workers: Iterable[tuple[str, int]]) -> dict[str, int]:
    """How many workers compute prompts and answers.

    Args:
        workers: roles, and workers of each.
    """
    counts = dict.fromkeys(_COMPUTING, 0)
    for role, number in workers:
        if role in counts:
            counts[role] += number
    return counts


def check_workers(cells: int, counts: Mapping[str, int]) -> None:
    """
    Args:
        counts: of workers, as ``workers_by_role``.
    Raises:
        PlanError: there would be cells without workers.
    """
    fewest = min((count for count in counts.values() if count), default=cells)
    if cells > fewest:
        raise PlanError(
            f"--cells {cells}: each cell needs a worker of each role, and a role has {fewest}; start more workers, or "
            "fewer cells"
        )


def routers_of(up: UpSettings) -> int:
    """How many routers there are: each cell has one."""
    return max(up.routers, up.cells)


def cell_of(worker: str, cells: int) -> int:
    """The cell of a worker: those of each role are dealt over the cells, so that prefill and decode stay together."""
    return number_of(worker) % cells


# A cell that lacks workers for so long gets one of another cell, which drains first. Those that crash or are restarted
# still belong to their cell.
LACKING_S = 60.0


def number_of(name: str) -> int:
    """The number at the end of a process's name."""
    return int(name.rpartition("-")[2])


def kind_of(worker: str) -> str:
    """Of a worker's name: those of one kind have the same role, model and settings."""
    return worker.rpartition("-")[0]


def _counts(kind: str, workers: Mapping[str, int], active: int) -> list[int]:
    counts = [0] * active
    for name, cell in workers.items():
        if kind_of(name) == kind and cell < active:
            counts[cell] += 1
    return counts


def joined_cell(worker: str, planned: int, others: Mapping[str, int], active: int) -> int:
    """The cell that a worker joins when it starts: one with the fewest of its kind, the planned one if that is one.

    Args:
        others: cells of the other workers, by name, without those that are drained.
    """
    counts = _counts(kind_of(worker), others, active)
    return min(range(active), key=lambda cell: (counts[cell], cell != planned))


def lacking_cells(workers: Mapping[str, int], active: int) -> set[tuple[str, int]]:
    """Kinds of workers, and cells that have none of them, or less than half of their share, where others can spare one.

    Args:
        workers: cells by name, without those that are drained.
    """
    found = set()
    for kind in {kind_of(name) for name in workers}:
        counts = _counts(kind, workers, active)
        few = [cell for cell in range(active) if not counts[cell] or 2 * counts[cell] < sum(counts) / active]
        found |= {(kind, cell) for cell in few if max(counts) - counts[cell] >= 2}
    return found


def spared_worker(kind: str, workers: Mapping[str, int], active: int) -> str:
    """The worker of a kind that goes to another cell: the last of the cell that has the most."""
    counts = _counts(kind, workers, active)
    most = counts.index(max(counts))
    names = [name for name, cell in workers.items() if kind_of(name) == kind and cell == most]
    return max(names, key=number_of)


def worker_state(up: UpSettings) -> str:
    """The folder in which workers note what they run."""
    return str(Path(up.data_dir).resolve() / "workers")


def _model(up: UpSettings, fleet: WorkerFleet) -> dict[str, Any]:
    return {"model": fleet.model, "served_model_name": up.served_model_name}


def workers(up: UpSettings, fleet: WorkerFleet, cores: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of each worker. Native engines share the cores, encoders aside."""
    native = sum(group.number for group in fleet.groups if group.engine == "native" and group.role != "encode")
    threads = up.threads or max(1, cores // max(1, native))
    for group in fleet.groups:
        more: dict[str, Any] = {"threads": threads} if group.engine == "native" else {}
        if more and group.gpus and up.gpus not in ((), ("none",)):
            more["device"] = "cuda"  # of GPUs that torch does not find, "auto" would compute on processors
        for name in group.names:
            yield name, {**_model(up, fleet), **more, **group.settings}


def passed(up: UpSettings, kind: type[Common]) -> dict[str, Any]:
    """The settings of ``up`` that a child has under the same name."""
    up_only = {flag.field for flag in flags_of(UpSettings)} - _NOT_PASSED
    return {flag.field: getattr(up, flag.field) for flag in flags_of(kind) if flag.field in up_only}


_NAME = re.compile(r"([a-z0-9][a-z0-9-]*)-(\d{1,4})")


def further(
    up: UpSettings,
    fleet: WorkerFleet,
    names: Sequence[str],
    children: Sequence[PlannedProcess],
    *,
    active: int = 0,
    url: BrokerUrl,
    cores: int,
    metrics_ports: Sequence[int] = (),
    gpus: Sequence[str] | None = None,
) -> list[PlannedProcess]:
    """
    Args:
        names: of workers that the deployment does not have yet, such as decode-2. Their role must have workers.
        children: what the deployment has, without drained workers; their GPUs stay theirs.
        active: as for ``in_cells``.
        metrics_ports: one for each name; empty: they serve no metrics.

    Raises:
        PlanError: there are no such workers here, or too few GPUs.
    """
    largest = {group: max(_indices(group, names), default=-1) + 1 for group in map(_stem, fleet.groups)}
    larger = fleet._replace(
        groups=tuple(group._replace(number=max(group.number, largest[_stem(group)])) for group in fleet.groups)
    )
    settings = dict(workers(up, larger, cores))
    groups = {name: group for group in larger.groups for name in group.names}
    free = _free(gpus, children)
    ports = iter(metrics_ports)
    added = []
    for name in names:
        if name not in settings:
            stems = ", ".join(f"{_stem(group)}-N" for group in fleet.groups)
            raise PlanError(f"no worker {name!r} can be added: this deployment has {stems}")
        own, free = _gpus(name, groups[name], gpus, free)
        more = {"metrics_port": next(ports, 0), "state_dir": worker_state(up)}
        settled = _settled(up, WorkerSettings, name, settings[name], **more)
        added.append(PlannedProcess(name, "worker", settled, own))
    return in_cells(added, up, active, url=url, sys_url=lambda cell: "")


def resumed(
    fleet: WorkerFleet, child: PlannedProcess, others: Sequence[PlannedProcess], gpus: Sequence[str] | None
) -> PlannedProcess:
    """A drained worker that is to start again: on its GPUs, or on free ones where others have taken these.

    Args:
        others: of the deployment, without drained workers.

    Raises:
        PlanError: its GPUs are its alone, and too few are free.
    """
    taken = {gpu for each in others for gpu in each.gpus or ()}
    if not taken.intersection(child.gpus or ()):
        return child
    group = next(each for each in fleet.groups if _stem(each) == child.name.rpartition("-")[0])
    free = _free(gpus, others)
    return replace(child, gpus=_gpus(child.name, group, gpus, free)[0]) if group.alone or free else child


def held(fleet: WorkerFleet, child: PlannedProcess, gpus: Sequence[str] | None) -> tuple[str, ...]:
    """The GPUs that a process uses, as ``state.json`` has them."""
    if gpus is not None:
        return child.gpus or ()
    stem = child.name.rpartition("-")[0]
    return (ALL,) if any(group.gpus and _stem(group) == stem for group in fleet.groups) else ()


def _free(gpus: Sequence[str] | None, children: Iterable[PlannedProcess]) -> list[str]:
    taken = {gpu for child in children for gpu in child.gpus or ()}
    return [gpu for gpu in gpus or () if gpu not in taken]


def _gpus(
    name: str, group: WorkerGroup, gpus: Sequence[str] | None, free: list[str]
) -> tuple[tuple[str, ...] | None, list[str]]:
    """A worker's GPUs, and those that are left."""
    if not gpus or not group.gpus:
        return None, free
    if group.alone or free:
        if len(free) < group.gpus:
            raise PlanError(f"{name} needs {group.gpus} GPUs, {len(free)} of {len(gpus)} are free")
        return tuple(free[: group.gpus]), free[group.gpus :]
    match = _NAME.fullmatch(name)
    assert match is not None
    return (gpus[int(match[2]) % len(gpus)],), free


def _stem(group: WorkerGroup) -> str:
    return group._replace(number=1).names[0].rpartition("-")[0]


def _indices(stem: str, names: Sequence[str]) -> list[int]:
    matches = (_NAME.fullmatch(name) for name in names)
    return [int(match[2]) for match in matches if match and match[1] == stem]
