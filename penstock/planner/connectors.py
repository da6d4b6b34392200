"""Connectors start and drain the workers that a planner asks for: on Kubernetes, on this machine, or nowhere (a dry
run).

``Replicas`` scales the Helm chart's workers by the scale subresource of the Kubernetes API. A pod that Kubernetes ends
gets SIGTERM: its worker drains within the chart's ``drainSeconds``. Which pod that is, Kubernetes decides. A horizontal
autoscaler of the same workers would undo the changes: leave ``autoscaling`` off.

``LocalWorkers`` are those of the `penstock up` on this machine: started by it, and drained over the broker. A worker
that leaves takes no new request, finishes those it has and ends; `penstock up` does not start it again. A further
worker is one of the drained ones, or a new one with the next number.
"""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import httpcore2
import msgspec
from nats.errors import Error as NatsError

from penstock.infra.bus.audit import recorded
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import registrations
from penstock.infra.nats_server.datadir import holder
from penstock.infra.process.supervisor import RESUME
from penstock.launch.state import DeploymentState, Running, read_state, write_resume
from penstock.operate.drain import DrainFailed, ask, change_of
from penstock.schemas import control
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import Registration
from penstock.schemas.plans import ROLES, Role
from penstock.schemas.wire import encode

SLEEP_S = 60.0  # for running requests to finish
ASLEEP_S = 2.0  # for the answer of a worker that has none


class ConnectorFailed(Exception):
    """Workers could not be counted or changed; the text says why."""


class Connector(Protocol):
    """Used by one planner at a time.

    Attributes:
        one_machine: the workers that it adds share the processor cores of those there are.
    """

    name: ClassVar[str]
    one_machine: bool

    async def counts(self) -> dict[Role, int]:
        """Planned workers by role: running, starting or requested. Empty: only the fleet can tell.

        Raises:
            ConnectorFailed
        """

    async def apply(self, targets: Mapping[Role, int]) -> None:
        """Ask for this many workers. Those that leave finish what they run.

        Raises:
            ConnectorFailed
        """


async def put_to_sleep(buses: Sequence[Bus], model: str) -> None:
    """Have a model's workers finish what they run and sleep; returns before slow ones do.

    Raises:
        ConnectorFailed: one cannot.
    """

    async def ask_one(bus: Bus, worker: Registration) -> str:
        order = encode(control.Sleep(SLEEP_S))
        try:
            answer = await bus.nc.request(bus.subjects.drain(worker.worker), order, timeout=ASLEEP_S)
            error = control.decode_ok(answer.data).error
        except (NatsError, TimeoutError, msgspec.MsgspecError):
            return ""  # on its way; it is asked again after the next interval
        return f"{worker.lasting_name}: {error}" if error else ""

    awake = [
        (bus, each)
        for bus in buses
        for each in await registrations(bus)
        if model in (each.model, *each.aliases) and each.role in ROLES and not each.leaves and not each.weights.asleep
    ]
    failures = [each for each in await asyncio.gather(*(ask_one(*each) for each in awake)) if each]
    if failures:
        raise ConnectorFailed(f"cannot sleep: {'; '.join(failures)}")


class DryRun:
    """Decisions are logged and nothing else.

    Args:
        one_machine: further workers would share the processor cores of those there are.
    """

    name: ClassVar[str] = "dry-run"

    def __init__(self, *, one_machine: bool = False) -> None:
        self.one_machine = one_machine

    async def counts(self) -> dict[Role, int]:
        return {}

    async def apply(self, targets: Mapping[Role, int]) -> None:
        pass


ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GROUPS = {"deployment": "apps/v1", "statefulset": "apps/v1", "leaderworkerset": "leaderworkerset.x-k8s.io/v1"}
TIMEOUT_S = 10.0


class BadCluster(ValueError):
    """No API server is known, or a workload is named wrongly."""


class KubernetesApi:
    """
    Args:
        url: of the API server, such as that of `kubectl proxy`.
        token_file: read for each request, since Kubernetes renews it; None: no token.
    """

    def __init__(self, url: str, token_file: Path | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        self._token_file = token_file
        self._tls = tls

    @classmethod
    def find(cls, url: str, account: Path = ACCOUNT, environ: Mapping[str, str] = os.environ) -> "KubernetesApi":
        """The API server at ``url``; "": the one of the cluster that this process runs in, as its service account.

        Raises:
            BadCluster: this process runs in no cluster.
        """
        if url:
            return cls(url)
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (account / "token").is_file():
            raise BadCluster(
                "this process runs in no Kubernetes cluster: name the API server with --kubernetes-url, such as "
                "http://127.0.0.1:8001 of `kubectl proxy`"
            )
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account / "token", tls)

    async def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """
        Raises:
            ConnectorFailed: no answer, or one that is not a success.
        """
        headers = [("Accept", "application/json"), ("Content-Type", "application/merge-patch+json")]
        if self._token_file is not None:
            headers.append(("Authorization", f"Bearer {self._token_file.read_text().strip()}"))
        limits = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)
        try:
            async with httpcore2.AsyncConnectionPool(ssl_context=self._tls) as pool:
                response = await pool.request(
                    method,
                    f"{self.url}{path}",
                    headers=headers,
                    content=None if body is None else json.dumps(body).encode(),
                    extensions={"timeout": limits},
                )
            answer = json.loads(response.content or b"{}")
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            raise ConnectorFailed(f"{self.url}{path} does not answer: {str(error) or type(error).__name__}") from error
        except ValueError:
            answer = {}
        if response.status >= 300 or not isinstance(answer, dict):
            said = answer.get("message", "") if isinstance(answer, dict) else ""
            raise ConnectorFailed(f"{method} {path}: status {response.status} {said}".rstrip())
        return answer


class Replicas:
    """
    Args:
        workloads: kind/name of each role, such as ``deployment/penstock-decode``.
    """

    name: ClassVar[str] = "kubernetes"
    one_machine = False  # and each pod has CPU time of its own

    def __init__(self, api: KubernetesApi, namespace: str, workloads: Mapping[Role, str]) -> None:
        self._api = api
        self._paths = {role: scale_path(namespace, workload) for role, workload in workloads.items()}

    async def counts(self) -> dict[Role, int]:
        return {role: await self._replicas(path) for role, path in self._paths.items()}

    async def apply(self, targets: Mapping[Role, int]) -> None:
        for role, target in targets.items():
            path = self._paths[role]
            if await self._replicas(path) != target:
                await self._api.call("PATCH", path, {"spec": {"replicas": target}})

    async def _replicas(self, path: str) -> int:
        scale = await self._api.call("GET", path)
        return int((scale.get("spec") or {}).get("replicas") or 0)


def scale_path(namespace: str, workload: str) -> str:
    """The scale subresource of ``kind/name``.

    Raises:
        BadCluster: an unknown kind, or no name.
    """
    kind, _, name = workload.partition("/")
    if kind not in GROUPS or not name or "/" in name:
        raise BadCluster(f"{workload!r} is not a workload: write {', '.join(f'{each}/NAME' for each in GROUPS)}")
    return f"/apis/{GROUPS[kind]}/namespaces/{namespace}/{kind}s/{name}/scale"


LEAVE_S = 60.0  # for drained workers to finish what they run, before others are given their GPUs
LISTED_S = 10.0  # after which a worker that was asked for must be in state.json
_POLL_S = 0.05


class LocalWorkers:
    """
    Args:
        data_dir: of the `penstock up`.
        model: canonical name; its workers only.
        others: buses of further cells, which have workers, too.
    """

    name: ClassVar[str] = "local"
    one_machine = True

    def __init__(self, bus: Bus, data_dir: Path, model: str, others: Sequence[Bus] = ()) -> None:
        self._buses = [bus, *others]
        self._data_dir = data_dir
        self._model = model
        self._stems: dict[Role, str] = {}  # before the numbers in workers' names
        self._leaving: dict[str, int | None] = {}  # by name, with the process: after a crash, the next one stays

    async def counts(self) -> dict[Role, int]:
        processes = await self._learned()
        return {role: len(names) for role in self._stems if (names := self._staying(role, processes))}

    async def apply(self, targets: Mapping[Role, int]) -> None:
        processes = await self._learned()
        wanted: list[str] = []
        for role, target in targets.items():
            if role not in self._stems:
                raise ConnectorFailed(
                    f"`penstock up` on {self._data_dir} has started no {role} worker of {self._model} that is "
                    "registered, so none can be added or drained"
                )
            staying = self._staying(role, processes)
            wanted += joining(self._stems[role], target - len(staying), processes)
            for name in reversed(staying[max(1, target) :]):
                await self._drain(name)
        if wanted:
            await self._left(wanted)
            await self._start(wanted)

    async def _left(self, wanted: Sequence[str]) -> None:
        """Wait until enough of those that leave have ended for the new ones to have GPUs."""
        until = time.monotonic() + LEAVE_S
        while True:
            state = self._state()
            staying = in_the_way(wanted, self._still_leaving(state.processes), state)
            if not staying:
                return
            if time.monotonic() > until:
                raise ConnectorFailed(f"{', '.join(staying)} did not end within {LEAVE_S:g} s, so none was added yet")
            await asyncio.sleep(_POLL_S)

    async def _learned(self) -> list[Running]:
        """The processes; what the model's workers are called, by role, is read from those that are registered."""
        processes = self._processes()
        names = {each.name for each in processes}
        for bus in self._buses:
            for each in await registrations(bus):
                if each.model == self._model and each.role in ROLES and each.name in names:
                    self._stems[each.role] = stem_of(each.name)
        return processes

    def _staying(self, role: Role, processes: Sequence[Running]) -> list[str]:
        """Workers of a role that run or are being started, by number."""
        self._leaving = self._still_leaving(processes)
        names = [each.name for each in processes if not each.drained and each.name not in self._leaving]
        return sorted((name for name in names if stem_of(name) == self._stems[role]), key=_number)

    def _still_leaving(self, processes: Sequence[Running]) -> dict[str, int | None]:
        named = {each.name: each for each in processes if not each.drained}
        return {name: pid for name, pid in self._leaving.items() if name in named and named[name].pid in (pid, None)}

    async def _drain(self, name: str) -> None:
        fleet = [(bus, each) for bus in self._buses for each in await registrations(bus) if each.name == name]
        bus, worker = fleet[0] if fleet else (None, None)
        if bus is None or worker is None:
            raise ConnectorFailed(f"{name} is not registered, so it cannot be drained yet")
        try:
            detail = f"{change_of(worker)}, by a planner"
            async with recorded(bus.nc, bus.subjects, "drain", name, detail):
                await ask(bus, worker, control.Drain(stay_down=True))
        except (DrainFailed, ServingError) as error:
            raise ConnectorFailed(str(error)) from error
        self._leaving[name] = next((each.pid for each in self._processes() if each.name == name), None)

    async def _start(self, names: Sequence[str]) -> None:
        up = holder(self._data_dir / "up.lock")
        if up is None:
            raise ConnectorFailed(f"no `penstock up` runs on {self._data_dir}")
        write_resume(self._data_dir, names)
        os.kill(up, RESUME)
        until = time.monotonic() + LISTED_S
        while missing := [name for name in names if name not in self._running()]:
            if time.monotonic() > until:
                logs = self._data_dir / "logs"
                raise ConnectorFailed(
                    f"`penstock up` did not start {', '.join(missing)}; its log says why, also {logs}"
                )
            await asyncio.sleep(_POLL_S)

    def _running(self) -> set[str]:
        return {each.name for each in self._processes() if not each.drained}

    def _processes(self) -> list[Running]:
        return [each for each in self._state().processes if each.role == "worker"]

    def _state(self) -> DeploymentState:
        try:
            return read_state(self._data_dir / "state.json")
        except (OSError, msgspec.DecodeError) as error:
            raise ConnectorFailed(f"no `penstock up` runs on {self._data_dir} ({error})") from error


def in_the_way(wanted: Sequence[str], leaving: Container[str], state: DeploymentState) -> list[str]:
    """The leaving workers whose GPUs the wanted ones need, sorted; all that leave if the GPUs are not known."""
    running = [each for each in state.processes if not each.drained]
    left = sorted((each for each in running if each.name in leaving), key=lambda each: each.name)
    if state.gpus is None:  # `penstock up` of an earlier release
        return [each.name for each in left]
    sizes = {stem_of(each.name): len(each.gpus) for each in state.processes}
    needed = sum(sizes.get(stem_of(name), 1) for name in wanted)
    used = {gpu for each in running for gpu in each.gpus}
    if needed <= sum(gpu not in used for gpu in state.gpus):
        return []
    return [each.name for each in left if each.gpus]


def joining(stem: str, count: int, processes: Sequence[Running]) -> list[str]:
    """The next ``count`` workers of those called ``stem``: drained ones first, then further numbers."""
    known = {each.name for each in processes}
    drained = sorted((each.name for each in processes if each.drained and stem_of(each.name) == stem), key=_number)
    names = drained[: max(0, count)]
    number = 0
    while len(names) < count:
        if (name := f"{stem}-{number}") not in known:
            names.append(name)
        number += 1
    return names


def stem_of(name: str) -> str:
    """Of a worker of `penstock up`, what those of its model and role have in common: worker, demo-prefill."""
    return name.rpartition("-")[0]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
