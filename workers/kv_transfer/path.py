"""Which side moves the bytes: the one that needs them (read) or the one that has them (write).

A read is one-sided where the memory of the other process can be copied directly (same host and PID namespace) and over
RDMA. Over TCP it is emulated with messages: slower than a write, and a reader that crashes in the middle can take the
owner with it. There the owner pushes.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from penstock.schemas.transfer import Endpoint

SHARED = {"all", "cma", "sm", "shm", "shared_memory"}  # values of UCX_TLS that leave copying between processes on
RDMA = {"all", "ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ud_v"}


def path_between(a: Endpoint, b: Endpoint) -> Literal["read", "write"]:
    """The direction to use between two workers; symmetric."""
    if a.host and a.host == b.host:
        return "read"
    return "read" if a.rdma and b.rdma else "write"


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """Boot id, PID namespace and user; "" where this process cannot copy from another one's memory at all."""
    if not allowed(environ, SHARED) or not copies_between_processes():
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.geteuid()}"


def has_rdma(environ: Mapping[str, str] = os.environ, devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether a port of an RDMA device is active and UCX may use it."""
    states = (path.read_text(encoding="ascii", errors="replace") for path in devices.glob("*/ports/*/state"))
    return allowed(environ, RDMA) and any("ACTIVE" in state for state in states)


def allowed(environ: Mapping[str, str], names: set[str]) -> bool:
    """Whether ``UCX_TLS`` leaves one of these transports on (``^`` turns those named off)."""
    value = environ.get("UCX_TLS", "") or "all"
    named = {name.split(":")[0].strip() for name in value.lstrip("^").split(",")}
    return not named & (names - {"all"}) if value.startswith("^") else bool(named & names)


def copies_between_processes() -> bool:
    """Try the system call on ourselves: a sandbox may forbid it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)

    def vector(buffer: "ctypes.Array[ctypes.c_char]") -> "ctypes.Array[ctypes.c_void_p]":
        return (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 1)  # struct iovec: address, length

    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return bool(call(os.getpid(), vector(target), 1, vector(source), 1, 0) == 1) and target.raw == b"x"
