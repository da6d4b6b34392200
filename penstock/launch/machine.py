"""The machine's resources for a deployment: engines, models, GPUs, ports, and the sockets on which gateways listen: one
for all, and one for each if there are several.
"""

import contextlib
import importlib.util
import itertools
import os
import random
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from penstock.infra.model import modeldir, servable
from penstock.infra.model.weight_files import is_mistral_format
from penstock.infra.process.sockets import CannotListen, bind, claim, held_ports, listening, own_sockets
from penstock.launch.groups import PlanError, WorkerGroup
from penstock.launch.readiness import base_url

_HOST = "127.0.0.1"
# Below the ports that Linux gives to outgoing connections (ip_local_port_range): those may be taken before a worker
# that loads for minutes comes to listen.
_FIRST, _LAST = 20_000, 32_000
# What each engine imports, in the order of size, and the extra that has it.
_PACKAGES = {
    "native": ("torch", "transformers", "safetensors"),
    "trtllm": ("tensorrt_llm",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "openai": ("httpx",),
}
_NIXL = ("nixl_cu12", "nixl_cu13")


def check_startable(groups: Iterable[WorkerGroup], say: Callable[[str], None], draft: str = "") -> None:
    """Find out what would end a worker at its start: before a broker is started and a data folder is made.

    Models of the Hugging Face hub are fetched, so that a download is seen, and is none of the time that starting may
    take.

    Args:
        say: prints a line, before a download.
        draft: ``--speculative-model`` of groups that have none of their own.
    Raises:
        PlanError: an engine is not installed, or a model is not there or cannot be loaded by it.
    """
    for group in groups:
        diffusers = group.role == "diffusion" and group.engine == "native"
        for package in ("diffusers",) if diffusers else _PACKAGES.get(group.engine, ()):
            if importlib.util.find_spec(package) is None:
                extra = "diffusion" if diffusers else group.engine
                index = " --extra-index-url https://pypi.nvidia.com" if extra == "trtllm" else ""
                raise PlanError(f"--engine {group.engine} needs {package}: pip install 'penstock[{extra}]'{index}")
        split = group.role in ("prefill", "decode", "encode") and group.engine in ("native", "mock")
        if split and not any(map(importlib.util.find_spec, _NIXL)):
            raise PlanError(f"--{group.role}: KV moves between workers by NIXL: pip install 'penstock[native]'")
        if group.role != "diffusion":
            _check_model(group, say)
        proposes = str(group.settings.get("speculative_model", draft))
        if group.engine == "native" and group.role in ("aggregated", "decode") and proposes not in ("", "ngram"):
            _resolved("--speculative-model", proposes, True, say)


def _check_model(group: WorkerGroup, say: Callable[[str], None]) -> None:
    engine = group.engine
    path = _resolved("--model", str(group.settings["model"]), engine not in ("mock", "openai"), say)
    if engine not in ("mock", "openai") and (reason := servable.problem(path, engine)):
        raise PlanError(f"--model: {reason}")


def _resolved(flag: str, model: str, weights: bool, say: Callable[[str], None]) -> Path:
    try:
        if modeldir.on_hub(model):
            say(f"Fetching {model} from the Hugging Face hub, unless its cache here has it")
        path = modeldir.resolve(model, weights=weights)
        modeldir.read_json(path / "config.json", needed=not is_mistral_format(path))
    except modeldir.ModelError as error:
        raise PlanError(f"{flag}: {error}") from None
    return path


def check_named(named: Sequence[str], groups: Sequence[WorkerGroup], devices: Path = Path("/dev")) -> None:
    """
    Raises:
        PlanError: this machine has no such GPUs for native engines. Others look for theirs themselves.
    """
    if tuple(named) in ((), ("none",)) or not any(group.gpus and group.engine == "native" for group in groups):
        return
    count, flag = _count(devices), f"--gpus {','.join(named)}"
    others = ("dxg", "kfd", "nvhost-gpu")  # of WSL 2, ROCm and Jetson
    if not count and not any((devices / other).exists() for other in others):
        raise PlanError(
            f"{flag}: there is no GPU here (no {devices}/nvidia0); leave --gpus out to serve on processors, or load "
            "the driver (in a container: run it with --gpus all)"
        )
    if count and (beyond := [each for each in named if each.isdigit() and int(each) >= count]):
        known = "GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
        raise PlanError(
            f"{flag}: there is no GPU {beyond[0]} here, only {known}; name some of these, or leave --gpus out"
        )


def _count(devices: Path) -> int:
    return sum(1 for path in devices.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", path.name))


def gpus(named: Sequence[str], environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...] | None:
    """GPUs that workers may use, as CUDA_VISIBLE_DEVICES writes them; None: do not assign any.

    Like CUDA, up to the first entry that is neither an index nor the id of a GPU or of a part of one: -1, or Slurm's
    NoDevFiles, says that there are none.
    """
    if named:
        return None if tuple(named) == ("none",) else tuple(named)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        entries = filter(None, map(str.strip, visible.split(",")))
        return tuple(itertools.takewhile(lambda entry: entry.isdigit() or entry[:4] in ("GPU-", "MIG-"), entries))
    return tuple(map(str, range(_count(devices))))  # CUDA counts those that it sees from 0


def held_run(first: int, count: int) -> list[socket.socket]:
    """Ports in a row on loopback: from ``first`` on, or (0) from anywhere. They are held until the sockets are closed.

    A server with SO_REUSEADDR may listen beside the sockets, which do not listen. Another deployment that starts at the
    same time chooses others.

    Raises:
        CannotListen: one of them is in use or reserved.
        PlanError: there are no such ports.
    """
    if first:
        if count and first + count - 1 > 65535:
            raise PlanError(f"{count} processes from --metrics-port {first} on go beyond port 65535")
        with contextlib.ExitStack() as held:
            ports = range(first, first + count)
            sockets = [held.enter_context(bind(_HOST, port, port_flag="--metrics-port")) for port in ports]
            held.pop_all()
        return sockets
    for _ in range(100):
        with contextlib.suppress(OSError):
            return held_ports(_HOST, random.randrange(_FIRST, _LAST - count), count)
    raise PlanError(f"no {count} free ports in a row for metrics: name the first with --metrics-port (-1: none)")


def free_port(preferred: int) -> int:
    """``preferred`` if it is free on loopback now, else another free port; 0: any."""
    for port in dict.fromkeys((preferred, 0)):
        with contextlib.suppress(OSError), socket.create_server((_HOST, port)) as listener:
            return int(listener.getsockname()[1])
    return 0


class Listeners:
    """The shared listening socket, owned by the supervisor and inherited by every gateway, and the ports of each.

    A connection that arrives while no gateway accepts waits in the socket, so that stopping or restarting a gateway
    resets no connection. Gateways of which there are several, or may be, also listen on ports of their own, after the
    shared one, to be reached one by one.
    """

    def __init__(self, host: str, *, tls: bool = False) -> None:
        self._host = host
        self._tls = tls
        self._shared: socket.socket | None = None
        self._counts = -1
        self._first = 0  # port of gateway-0; 0: any
        self._own: dict[int, socket.socket] = {}  # hold the ports of single gateways, by number
        self._claims: dict[int, socket.socket] = {}  # by port
        self.port = 0
        self.ports: dict[int, int] = {}  # of each gateway, by its number

    def open(self, port: int, gateways: int, *, chosen: bool = False, more: bool = False) -> None:
        """
        Args:
            chosen: the number of gateways was not set: where the ports after the shared one are not free, their own
                are any. So is that of a lone one: another deployment may be meant to have the next port.
            more: there may be more of them later.
        Raises:
            CannotListen: an address or a port cannot be used.
        """
        own = gateways if gateways > 1 or more else 0
        try:
            if port:
                self._claim([port])
            self._shared = listening(self._host, port)
            self.port = int(self._shared.getsockname()[1])
            self._first = port + 1 if port and not (chosen and gateways == 1) else 0
            self._own = dict(enumerate(self._own_ports(self._first, own, chosen=chosen)))
            self.ports = {number: int(each.getsockname()[1]) for number, each in self._own.items()} or {0: self.port}
            self._claim({self.port, *self.ports.values()} - self._claims.keys())
        except CannotListen:
            self.close()
            raise
        if own:
            self._counts = os.memfd_create("penstock-connections")

    def add(self, number: int) -> int:
        """The port of one more gateway: that in the row, if it is free.

        Raises:
            CannotListen: there is none.
        """
        first = self._first and self._first + number
        (sock,) = self._own_ports(first if first <= 65535 else 0, 1, chosen=True)
        port = int(sock.getsockname()[1])
        if port not in self._claims:
            self._claim([port])
        self._own[number], self.ports[number] = sock, port
        return port

    def remove(self, number: int) -> None:
        """Give the port of a gateway back that has ended."""
        port = self.ports.pop(number)
        for each in (self._own.pop(number), self._claims.pop(port)):
            each.close()

    def _own_ports(self, first: int, count: int, *, chosen: bool) -> list[socket.socket]:
        try:
            if first:
                self._claim(range(first, first + count))
            return own_sockets(self._host, first, count)
        except CannotListen:
            if not chosen:
                raise
            for port in range(first, first + count):
                if (claimed := self._claims.pop(port, None)) is not None:
                    claimed.close()
            sockets = own_sockets(self._host, 0, count)
            self._claim(int(each.getsockname()[1]) for each in sockets)
            return sockets

    def _claim(self, ports: Iterable[int]) -> None:
        for port in ports:
            self._claims[port] = claim(self._host, port)

    @property
    def fd(self) -> int:
        """The descriptor to inherit; -1: not open."""
        return -1 if self._shared is None else self._shared.fileno()

    @property
    def counts_fd(self) -> int:
        """The same for memory in which several gateways note how many connections they have; -1: there is one."""
        return self._counts

    @property
    def inherited(self) -> tuple[int, ...]:
        """All descriptors of a gateway."""
        return tuple(each for each in (self.fd, self.counts_fd) if each >= 0)

    @property
    def url(self) -> str:
        return base_url(self._host, self.port, tls=self._tls)

    def url_of(self, gateway: int) -> str:
        """The URL of a gateway's own port."""
        return base_url(self._host, self.ports[gateway], tls=self._tls)

    def close(self) -> None:
        """Gateways that have inherited the socket still accept from it."""
        for each in (*self._own.values(), *filter(None, [self._shared]), *self._claims.values()):
            with contextlib.suppress(OSError):
                each.close()
        if self._counts >= 0:
            os.close(self._counts)
        self._own, self._claims, self._shared, self._counts = {}, {}, None, -1
