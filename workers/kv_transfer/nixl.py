"""A NIXL agent: implements ``Agent`` and tests at start that it can move bytes here.

NIXL reads its environment once, at import, and changes Python's logging; UCX installs a handler for SIGHUP.

Makes a GPU's context current in a thread: without one, what UCX does there for GPU memory fails or crashes.

Through the driver's C interface, so that no framework is imported.
"""

import ctypes
import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, MutableMapping
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.agent import WORD_BYTES, CopyOp, MemoryRanges, PeerLost, TransferRejected
from penstock.workers.kv_transfer.inflight import digest
from penstock.workers.kv_transfer.transport_protocol import (
    TransferError,
    TransportUnavailable,
    has_rdma,
    host_identity,
)

MODULES = ("nixl_cu12", "nixl_cu13")  # never both in one process: the second import fails
INSTALL = "install NIXL: pip install nixl-cu12==1.5.1 (CUDA 12, or no GPU) or nixl-cu13==1.5.1 (CUDA 13)"
ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "ERROR",  # its INFO lines go to stdout
    "UCX_LOG_LEVEL": "fatal",  # so do UCX's warnings; what fails is raised anyway
    "UCX_DEBUG_SIGNO": "0",  # leaves SIGHUP alone
    "UCX_TCP_USER_TIMEOUT": "3s",  # the only thing that ends a transfer on a cut link
    "UCX_TCP_CONN_NB": "y",  # otherwise a host that does not answer holds add_remote_agent for 135 s
    "UCX_TCP_SYN_CNT": "2",
}


class Library(NamedTuple):
    api: Any
    errors: Mapping[str, type[Exception]]  # by their names without "nixl" and "Error"
    version: str


def load(environ: MutableMapping[str, str] = os.environ) -> Library:
    """
    Raises:
        TransportUnavailable: NIXL is not installed, or not for this CUDA.
    """
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)
    names = [name for name in candidates(sys.modules, cuda_driver()) if util.find_spec(name)]
    problems = []
    for name in names:
        try:
            return _import(name)
        except (ImportError, OSError) as error:
            problems.append(f"{name}: {error}")
    raise TransportUnavailable("; ".join([*problems, INSTALL]))


def candidates(loaded: Mapping[str, ModuleType], driver: int) -> tuple[str, ...]:
    """The modules that may fit, best first. ``driver``: major version of NVIDIA's kernel module, 0: there is none."""
    if imported := tuple(name for name in MODULES if name in loaded):
        return imported
    torch = loaded.get("torch")
    if cuda := getattr(getattr(torch, "version", None), "cuda", None):
        return (f"nixl_cu{cuda.split('.')[0]}",)
    return MODULES[::-1] if driver >= 580 else MODULES  # from 580 on the driver runs CUDA 13


def cuda_driver(path: Path = Path("/proc/driver/nvidia/version")) -> int:
    try:
        fields = path.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return 0
    return next((int(word.split(".")[0]) for word in fields if word[0].isdigit() and "." in word), 0)


def _import(name: str) -> Library:
    raise_exceptions = logging.raiseExceptions
    try:
        api = importlib.import_module(f"{name}._api")
        bindings = importlib.import_module(f"{name}._bindings")
    finally:
        logging.raiseExceptions = raise_exceptions
        logger = logging.getLogger("nixl")
        logger.handlers.clear()  # its own handler writes to stdout
        logger.propagate = True
    errors = {
        each.removeprefix("nixl").removesuffix("Error"): getattr(bindings, each)
        for each in dir(bindings)
        if each.startswith("nixl") and each.endswith("Error")
    }
    return Library(api, errors, metadata.version(name.replace("_", "-")))


def use_device(devices: Collection[int]) -> None:
    """Take the primary context of the one device that the pools lie on; nothing for none.

    Raises:
        TransportUnavailable: there is no driver or no such device, or the pools lie on several.
    """
    if not devices:
        return
    if len(devices) > 1:
        raise TransportUnavailable(f"pools on several GPUs ({sorted(devices)}) in one transport; open one for each")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailable(f"GPU pools without an NVIDIA driver: {error}") from error
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls = (
        ("cuInit", lambda: driver.cuInit(0)),
        ("cuDeviceGet", lambda: driver.cuDeviceGet(ctypes.byref(device), *devices)),
        ("cuDevicePrimaryCtxRetain", lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)),
        ("cuCtxSetCurrent", lambda: driver.cuCtxSetCurrent(context)),
    )
    for name, call in calls:
        if status := call():  # type: ignore[no-untyped-call]
            raise TransportUnavailable(f"{name} for GPU {sorted(devices)[0]} failed with status {status}")


KINDS = {"cpu": "DRAM", "cuda": "VRAM"}
SELF_TEST_BYTES = 4096
SELF_TEST_S = 5.0
SELF_TEST_POLL_S = 0.0005


class _Posted:
    """A NIXL transfer and its last known state: after DONE it must not be polled again."""

    __slots__ = ("done", "handle")

    def __init__(self, handle: Any, done: bool) -> None:
        self.handle, self.done = handle, done


class NixlAgent:
    """
    Raises:
        TransportUnavailable: the agent cannot be made or does not move bytes; the text says which step failed.
    """

    def __init__(self, library: Library, name: str, pools: Mapping[str, Memory]) -> None:
        self._library = library
        self._rejections = tuple(
            library.errors[each] for each in ("InvalidParam", "Mismatch", "NotAllowed", "NotFound")
        )
        self._losses = tuple(library.errors.values())
        use_device({pool.device for pool in pools.values() if pool.kind == "cuda"})
        before = _event_polls()
        step = "making the agent"
        try:
            config = library.api.nixl_agent_config(enable_prog_thread=False)  # its progress thread would spin
            self._agent = library.api.nixl_agent(name, config)
            self.events = tuple(_event_polls() - before)
            if "UCX" not in self._agent.backends:
                raise TransportUnavailable("NIXL's UCX plugin could not be loaded")
            step = "moving bytes to itself"
            self._self_test(name)
            step = "registering the pools"
            for pool in pools.values():
                if pool.block_bytes:  # none are in the first pool of a model whose layers all slide
                    self._register(pool.base, pool.blocks * pool.block_bytes, pool.kind, pool.device)
                if pool.generations:
                    self._register(pool.generations, pool.blocks * WORD_BYTES, "cpu", 0)
            metadata = bytes(self._agent.get_agent_metadata())
        except self._losses as error:
            raise TransportUnavailable(f"NIXL {library.version} failed when {step}: {error!r}") from error
        self.endpoint = Endpoint(
            agent=name,
            backend="nixl",
            version=library.version,
            pools=dict(pools),
            metadata=metadata,
            digest=digest(metadata),
            host=host_identity(),
            rdma=has_rdma(),
            address=socket.gethostname(),
        )

    def add(self, peer: Endpoint) -> None:
        try:
            name = self._agent.add_remote_agent(peer.metadata)
        except self._rejections as error:
            raise TransferRejected(f"its metadata were rejected: {error!r}") from error
        except self._losses as error:
            raise PeerLost(repr(error)) from error
        if name.decode() != peer.agent:
            raise TransferRejected(f"its metadata are of agent {name.decode()!r}")

    def remove(self, name: str) -> None:
        self._agent.remove_remote_agent(name)

    def post(self, op: str, peer: str, move: CopyOp) -> _Posted:
        try:
            handle = self._agent.initialize_xfer(
                op, self._descriptors(move.local), self._descriptors(move.remote), peer
            )
        except self._rejections as error:
            raise TransferRejected(f"its memory description is invalid: {error!r}") from error
        except self._losses as error:
            raise PeerLost(repr(error)) from error
        try:
            return _Posted(handle, self._agent.transfer(handle) == "DONE")
        except self._losses as error:
            self._agent.release_xfer_handle(handle)
            raise PeerLost(repr(error)) from error

    def done(self, handle: _Posted) -> bool:
        if not handle.done:
            try:
                handle.done = self._agent.check_xfer_state(handle.handle) == "DONE"
            except self._losses as error:
                raise PeerLost(repr(error)) from error
        return handle.done

    def release(self, handle: _Posted) -> None:
        self._agent.release_xfer_handle(handle.handle)

    def register(self, address: int, size: int, kind: str = "cpu", device: int = 0) -> None:
        try:
            self._register(address, size, kind, device)
        except self._losses as error:
            raise TransferError(
                "unavailable", f"{size} bytes of {KINDS[kind]} memory cannot be registered with NIXL: {error!r}"
            ) from error

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        self.events = ()
        self._agent = None  # the last reference: handles have been released

    def _register(self, address: int, size: int, kind: str, device: int) -> Any:
        return self._agent.register_memory([(address, size, device, "")], mem_type=KINDS[kind])

    def _descriptors(self, ranges: MemoryRanges) -> Any:
        return self._agent.get_xfer_descs(ranges.rows, KINDS[ranges.kind])

    def _self_test(self, name: str) -> None:
        """Write 4 kB to itself: a missing plugin, a sandbox or a wrong ``UCX_TLS`` fails here, not in a request."""
        source, target = np.full(SELF_TEST_BYTES, 0x5A, np.uint8), np.zeros(SELF_TEST_BYTES, np.uint8)
        registered = [self._register(each.ctypes.data, SELF_TEST_BYTES, "cpu", 0) for each in (source, target)]
        handle = self.post("WRITE", name, CopyOp(_stretch(source), _stretch(target)))
        deadline = time.monotonic() + SELF_TEST_S
        while not self.done(handle) and time.monotonic() < deadline:
            time.sleep(SELF_TEST_POLL_S)
            self.progress()
        if not handle.done:
            self.release(handle)
            self.close()  # before the memory goes
            raise TransportUnavailable(f"NIXL did not move {SELF_TEST_BYTES} bytes to itself within {SELF_TEST_S} s")
        self.release(handle)
        for each in registered:
            self._agent.deregister_memory(each)
        if not np.array_equal(source, target):
            raise TransportUnavailable("NIXL reported a completed transfer, but the bytes did not arrive")


def _stretch(array: NDArray[np.uint8]) -> MemoryRanges:
    return MemoryRanges("cpu", np.array([[array.ctypes.data, array.nbytes, 0]], np.uint64))


def _event_polls() -> set[int]:
    """The open epoll descriptors. UCX creates some for its sockets without exposing them; a thread can wait on them."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                descriptors.add(int(name))
        except OSError:  # the one that listed
            continue
    return descriptors
