"""``state.json``: what runs, and how to reach it, for ``penstock inspect``, tests and benchmarks."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.infra.nats_server.datadir import write_private

TOKEN_FILE = "dashboard.token"
ALL = "all"  # all GPUs there are, which each engine sees


def stored_token(data_dir: Path) -> str:
    """The token of a data folder, made if there is none. Only the folder's owner can read it.

    Raises:
        OSError: it cannot be read or written.
    """
    path = data_dir / TOKEN_FILE
    token = path.read_text().strip() if path.exists() else ""
    if not token:  # an empty file, as after a full disk, must not grant access to everyone
        token = secrets.token_urlsafe(18)
        write_private(path, token + "\n")
    return token


class Running(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process. It has no ``pid`` while it waits to be started again: pid 0 is the sender's own group."""

    name: str
    role: str
    pid: int | None = None
    metrics_url: str = ""  # Prometheus; "": none of its own (a gateway's are at its http_url + /metrics)
    drained: bool = False  # by `penstock drain`; it starts again after `penstock restart`
    began: int = 0  # when the process was started, as ``start_of``; 0: not known
    cell: int = 0  # the number of its cell; gateways are in all
    outdated: bool = False  # it was started before the number of cells changed; `penstock restart` changes that
    leaving: bool = False  # a gateway that accepts nothing more, and ends with its last connection
    gpus: tuple[str, ...] = ()  # that a worker uses, as in ``DeploymentState.gpus``


class NatsLogin(msgspec.Struct, frozen=True):
    """What a URL says, apart: many NATS clients ignore the user and the password in a URL."""

    server: str = ""
    user: str = ""
    password: str = ""


def login_of(url: str) -> NatsLogin:
    """The parts of a broker's URL; of several, those of the first."""
    parts = urlsplit(url.partition(",")[0])
    place = parts.netloc.rpartition("@")[2]
    return NatsLogin(f"{parts.scheme}://{place}", unquote(parts.username or ""), unquote(parts.password or ""))


class CellState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cell, and where its broker is.

    Attributes:
        number: as ids of its requests have it.
        nats_url: the operator's.
        sys_nats_url: "": another's broker.
        data_dir: of its broker; "": another's.
    """

    number: int
    namespace: str
    nats_url: str
    sys_nats_url: str = ""
    data_dir: str = ""


class GatewayState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Between which numbers gateways come and go, and the last change with its reason.

    Attributes:
        fewest, most: 0: an earlier release has written this.
        change: "": there was none yet.
        changed_ns: Unix time.
    """

    fewest: int = 0
    most: int = 0
    change: str = ""
    changed_ns: int = 0


class DeploymentState(msgspec.Struct, frozen=True):
    """URLs hold passwords: the file is readable by its owner only. ``sys_nats_url`` is empty on another's broker."""

    http_url: str
    nats_url: str  # the operator's
    client_nats_url: str
    sys_nats_url: str
    namespace: str
    model: str
    processes: tuple[Running, ...] = ()
    http_urls: tuple[str, ...] = ()  # of every gateway that accepts requests, in the order of ``processes``
    makes: str = "text"  # the model: or "image", "video"
    dashboard_url: str = ""  # with its token
    client_nats: NatsLogin = NatsLogin()  # the same as client_nats_url
    models: tuple[str, ...] = ()  # canonical names of all
    cells: tuple[CellState, ...] = ()  # the first is home, which ``namespace`` and the URLs above are of
    active_cells: int = 0  # this many of the first take new requests; 0: all
    cells_refused: str = ""  # why another number of cells was not taken the last time
    gateways: GatewayState = GatewayState()
    gpus: tuple[str, ...] | None = None  # for workers, as CUDA_VISIBLE_DEVICES has them, or ALL; None: not known

    @property
    def all_cells(self) -> tuple[CellState, ...]:
        """At least home, also where an earlier release has written the file."""
        return self.cells or (CellState(0, self.namespace, self.nats_url, self.sys_nats_url),)

    @property
    def gateway_urls(self) -> dict[str, str]:
        """By the name of each gateway that accepts requests."""
        names = [each.name for each in self.processes if each.role == "gateway" and not each.leaving]
        return dict(zip(names, self.http_urls, strict=False))

    def is_active(self, number: int) -> bool:
        """Whether the cell of this number takes new requests."""
        return not self.active_cells or number - self.all_cells[0].number < self.active_cells


def start_of(pid: int | None) -> int:
    """When a process was started, in clock ticks since the machine was (Linux); 0: there is none, or not known."""
    if pid is None:
        return 0
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def write_state(path: Path, state: DeploymentState) -> None:
    write_private(path, msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n")


def read_state(path: Path) -> DeploymentState:
    """Read a deployment's state.

    Raises:
        OSError: there is none.
        msgspec.DecodeError: it is damaged.
    """
    return msgspec.json.decode(path.read_bytes(), type=DeploymentState)


def write_resume(data_dir: Path, names: Iterable[str]) -> None:
    """Name processes that the signal ``RESUME`` starts, beside those that others have named and were not read yet.

    Raises:
        OSError: the folder cannot be written.
    """
    file = os.open(data_dir / "resume", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # two planners, and `penstock restart`, may write at once
        os.write(file, "".join(f"{name}\n" for name in names).encode())
    finally:
        os.close(file)


def read_resume(data_dir: Path) -> list[str]:
    """The processes that ``write_resume`` has named, each once."""
    try:
        with (data_dir / "resume").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            names = file.read().split()
            file.truncate(0)
    except OSError:
        return []
    return list(dict.fromkeys(names))


class CellCounts(msgspec.Struct, frozen=True):
    """The cells of a data folder, from the first on.

    Attributes:
        known: whose requests are found.
        active: that have workers and take new requests.
    """

    known: int = 0
    active: int = 0


NO_CELLS = CellCounts()  # of a new folder


def read_cells(data_dir: Path) -> CellCounts:
    """Those whose stores a data folder has, or that another's broker has for it. A folder that cannot be read has none:
    starting the broker says why."""
    known, noted = 0, NO_CELLS
    with contextlib.suppress(OSError, msgspec.DecodeError):
        noted = msgspec.json.decode((data_dir / "cells.json").read_bytes(), type=CellCounts)
    with contextlib.suppress(OSError):
        if (data_dir / "nats").is_dir():
            known = 1 + sum((each / "nats").is_dir() for each in (data_dir / "cells").glob("*"))
    known = known or noted.known
    return CellCounts(known, min(noted.active or known, known))


def write_cells(data_dir: Path, counts: CellCounts) -> None:
    """Note the cells for the next start."""
    write_private(data_dir / "cells.json", msgspec.json.encode(counts).decode() + "\n")


def ask_for_cells(data_dir: Path, number: int) -> Path:
    """Say how many cells are to be active; the signal ``RESUME`` has it read. The file is there until that was done."""
    path = data_dir / "cells.wanted"
    write_private(path, str(number))
    return path


def read_wanted_cells(data_dir: Path) -> int:
    """What ``ask_for_cells`` has said; 0: nothing."""
    try:
        return int((data_dir / "cells.wanted").read_text())
    except (OSError, ValueError):
        return 0


def forget_wanted_cells(data_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (data_dir / "cells.wanted").unlink()
