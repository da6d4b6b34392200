"""The process of the embedded nats-server: start on a data directory, wait until it answers, stop, kill."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.configs.settings import Durability
from penstock.infra.nats_server.binary import ServerFailed, find_server
from penstock.infra.nats_server.config import USERS, Cluster, ServerConfig, render
from penstock.infra.nats_server.datadir import Lock, load_secrets, write_private
from penstock.infra.nats_server.tenants import INCLUDE, PASSWORDS_INCLUDE, user_in_use, write_passwords
from penstock.infra.process.budgets import cgroup_bytes
from penstock.infra.process.child import die_with_parent
from penstock.infra.process.scheduling import lax_timers
from penstock.infra.process.sockets import CannotListen, bind, check_free
from penstock.schemas.subjects import Subjects

LOOPBACK = "127.0.0.1"
_POLL_S = 0.01
MEMORY_VARIABLE = "GOMEMLIMIT"
# Percent of what is in use that may lie as garbage, beside it. With Go's 100, a third more memory is resident, for the
# same CPU time (``python -m tests.perf.broker``, with and without the variable, in turns).
GARBAGE_VARIABLE, GARBAGE = "GOGC", "50"
LEAST_MEMORY = 1 << 30
_TERM_S = 20.0  # it flushes each durable consumer on the way out, about 10 ms each


class EmbeddedNats:
    """One nats-server, by default on loopback, its store, secrets and port under ``data_dir``.

    ``port`` 0 means the one used the last time, or any free one; a restart keeps the port, so that clients find
    the server again. Belongs to no event loop: any may call it. ``beside``: other servers of the deployment on this
    machine, which share its memory; another number counts from the next start on. ``cells``: of the deployment that
    share it, each with a namespace.
    """

    role = "nats"

    def __init__(
        self,
        data_dir: Path | str,
        namespace: str = "ps",
        port: int = 0,
        monitor_port: int = 0,
        monitor_host: str = LOOPBACK,
        *,
        jetstream: bool = True,
        durability: Durability = "process",
        cluster: Cluster | None = None,
        host: str = LOOPBACK,
        name: str = "nats",
        beside: int = 0,
        cells: int = 1,
    ) -> None:
        self.name = name
        self.beside = beside
        self.data_dir = Path(data_dir).resolve()
        self.subjects = Subjects(namespace)
        self.log_path = self.data_dir / "nats.log"
        self._wanted_port = port
        self._port = 0
        self._monitor = monitor_host, monitor_port
        self._jetstream = jetstream
        self._durability = durability
        self._cluster = cluster
        self._cells = cells
        self._host = host
        self._reached = LOOPBACK if host in ("0.0.0.0", "::") else host  # by processes of this machine
        self._secrets: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock(self.data_dir / "nats.lock")
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """None: not running."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def port(self) -> int:
        """0 before the first start."""
        return self._port

    def url(self, role: str = "operator") -> str:
        """Where a process of this role connects, password included."""
        with contextlib.suppress(OSError, ValueError):  # passwords may have been changed while it runs
            self._secrets = load_secrets(self.data_dir / "secrets.json", USERS) if self.pid else self._secrets
        user = user_in_use(self._secrets, role)
        return f"nats://{user}:{self._secrets[user]}@{self._reached}:{self._port}"

    @property
    def sys_url(self) -> str:
        return self.url("sys")

    async def start(self, timeout_s: float = 60.0) -> None:
        """Start, and wait until it accepts connections and its JetStream answers.

        Raises:
            DataDirBusy: another process runs a broker on this data directory.
            NoServerBinary: there is no nats-server to run.
            DataDirUnusable, CannotListen: the folder or the port cannot be used.
            ServerFailed: the store is unusable, or it was not ready in time.
        """
        assert not self.pid, "already running"
        binary = await asyncio.to_thread(find_server)
        self._lock.acquire("a nats-server of penstock")
        try:
            await asyncio.to_thread(end_stale, self.data_dir / "nats.pid", self._config_path)
            self._secrets = load_secrets(self.data_dir / "secrets.json", USERS)
            self._port = self._choose_port()
            write_passwords(self.data_dir, self._secrets, self.subjects)
            write_private(self._config_path, self._render())
            self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: ASYNC220 - forked here, see die_with_parent; a few ms
                    [binary, "-c", self._config_path],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=with_memory_limit(os.environ, memory_bytes() // (1 + self.beside)),
                    # Its own session: Ctrl-C on the terminal must not end it before those who still need it.
                    start_new_session=True,
                    preexec_fn=die_with_parent() if self._durability == "power" else lax_timers(die_with_parent()),
                )
            write_private(self.data_dir / "nats.pid", str(self._process.pid))
            await self._ready(time.monotonic() + timeout_s)
            write_private(self.data_dir / "nats.port", str(self._port))
        except BaseException:
            self.kill()
            self._lock.release()
            raise

    async def stop(self, timeout_s: float = _TERM_S) -> None:
        """Shut it down; it is killed if that takes longer than ``timeout_s``."""
        if self.pid and self._process is not None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, timeout_s)
        self.kill()
        self._lock.release()

    def terminate(self) -> None:
        """Ask it to shut down; ``wait`` returns when it has."""
        if self.pid and self._process is not None:
            self._process.terminate()

    def hurry(self) -> None:
        """It has no work of its own to finish."""

    def kill(self) -> None:
        """Kill it, as a crash would. ``start`` brings it back on the same port and store."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def wait(self) -> int:
        """Wait until it ends by itself or is ended; its exit status (negative: the signal)."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    @property
    def _config_path(self) -> Path:
        return self.data_dir / "nats.conf"

    def _render(self) -> str:
        return render(
            ServerConfig(
                name=f"penstock-{self.subjects.namespace}",
                port=self._port,
                host=self._host,
                store_dir=str(self.data_dir / "nats"),
                secrets=self._secrets,
                subjects=self.subjects,
                monitor_host=self._monitor[0],
                monitor_port=self._monitor[1],
                jetstream=self._jetstream,
                sync_always=self._durability == "power",
                cluster=self._cluster,
                cells=self._cells,
                tenants_file=INCLUDE,
                passwords_file=PASSWORDS_INCLUDE,
            )
        )

    def _choose_port(self) -> int:
        fixed = self._port or self._wanted_port  # the port never changes after the first start: clients reconnect to it
        if fixed:
            check_free(self._host, fixed, port_flag="--nats-port", host_flag="--nats-host")
            return fixed
        with contextlib.suppress(OSError, ValueError, CannotListen):
            last = int((self.data_dir / "nats.port").read_text())
            check_free(self._host, last)
            return last
        with bind(self._host, 0) as probe:
            return int(probe.getsockname()[1])

    async def _ready(self, deadline: float) -> None:
        while True:
            problem = await self._problem()
            if problem is None:
                return
            assert self._process is not None
            status = self._process.poll()
            if status is not None:
                raise ServerFailed(f"nats-server ended at start with status {status}\n{self._last_lines()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"nats-server is not ready: {problem}\n{self._last_lines()}")
            await asyncio.sleep(_POLL_S)

    async def _problem(self) -> str | None:
        """What keeps it from being ready; None: it is."""
        try:
            async with asyncio.timeout(2.0):
                user = user_in_use(self._secrets, "operator")
                return await _ask_jetstream(self._reached, self._port, user, self._secrets[user], self._jetstream)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            return repr(error)

    def _last_lines(self) -> str:
        """The log's last lines since this start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[-8:]
        return "\n".join([*(f"  {line}" for line in lines), f"  (in {self.log_path})"])


def with_memory_limit(environ: Mapping[str, str], total: int) -> dict[str, str]:
    """The server's environment. It collects garbage more often above half of the memory, unless another limit is set.

    Below, half as much garbage lies as is in use (``GARBAGE``). No less than 1 GiB: what is in use has to fit, or the
    server does little else than collect. With less than 1.3 GiB in all, three quarters: above a container's limit, the
    kernel kills the server before it collects.

    Args:
        total: bytes of the machine or container, or of this server's share.
    """
    limit = max(total // 2, min(LEAST_MEMORY, total * 3 // 4))
    return {MEMORY_VARIABLE: f"{limit >> 20}MiB", GARBAGE_VARIABLE: GARBAGE, **environ}


def memory_bytes() -> int:
    """What this machine has, or this container may use."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cgroup_bytes())


def end_stale(pid_file: Path, config: Path) -> None:
    """End a server that outlived its supervisor; the caller holds the lock, so it has no supervisor any more."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return
    # The pid may have been reused: only a process started with this configuration file is ours.
    if pid <= 0 or not was_started_with(pid, str(config)):
        return
    for sign, patience in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not was_started_with(pid, str(config)):
                return
            time.sleep(_POLL_S)
    raise ServerFailed(f"an earlier nats-server (pid {pid}) does not end: kill it, then start again")


def was_started_with(pid: int, argument: str) -> bool:
    """Whether a process runs, and has an argument that is this one from end to end, not only a part of it."""
    return f" {argument} " in f"{_command_line(pid)} "


def _command_line(pid: int) -> str:
    """Empty: no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if Path("/proc/self").exists():
        return ""
    run = subprocess.run(["ps", "-ww", "-p", str(pid), "-o", "command="], capture_output=True, text=True, check=False)
    return run.stdout.strip()


async def _ask_jetstream(host: str, port: int, user: str, password: str, jetstream: bool) -> str | None:
    """Check over a plain connection, since a client library would retry and log. Returns the problem, or None."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        await reader.readuntil(b"\r\n")  # INFO
        hello = json.dumps({"user": user, "pass": password, "verbose": False, "pedantic": False})
        ask = "SUB r 1\r\nPUB $JS.API.INFO r 0\r\n\r\n" if jetstream else ""
        writer.write(f"CONNECT {hello}\r\n{ask}PING\r\n".encode())
        while True:
            line = await reader.readuntil(b"\r\n")
            if line.startswith(b"-ERR"):
                return line.decode().strip()
            if line.startswith(b"PONG") and not jetstream:
                return None
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            if line.startswith(b"MSG"):
                body = await reader.readexactly(int(line.split()[-1]) + 2)
                error = json.loads(body).get("error")
                return f"JetStream: {error['description']}" if error else None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
