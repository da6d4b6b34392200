"""Finds the installed NIXL and loads it without its side effects.

NIXL reads its environment once, at import, and changes Python's logging; UCX installs a handler for SIGHUP.
"""

import importlib
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from penstock.workers.kv_transfer.base import TransportUnavailable

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
