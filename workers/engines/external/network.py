"""Ports, addresses and environment variables for the processes of an engine."""

import contextlib
import fcntl
import functools
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from penstock.workers.engines.base import EngineError

_SIOCGIFADDR = 0x8915  # Linux


@contextlib.contextmanager
def environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are unset, for processes that start within the context."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@functools.lru_cache(maxsize=8)
def address(nats_url: str) -> str:
    """The address of this machine's interface towards the broker; other workers can reach it too."""
    host = urlsplit(nats_url.split(",")[0]).hostname or "127.0.0.1"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 4222, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def interface(own: str) -> str:
    """The name of the network interface that has an IPv4 address of this machine; "": none is found."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""


def reached_at(own: str, variable: str) -> dict[str, str]:
    """Environment variables for ranks of several machines: at which of its addresses the others reach this one.

    Gloo takes the address of the machine's name otherwise, which often is a loopback address.

    Args:
        variable: the engine's own.
    """
    found = {variable: own}
    if name := interface(own):
        found["GLOO_SOCKET_IFNAME"] = name
    return found


def towards(host: str) -> str:
    """The address of this machine's interface towards another one."""
    return address(f"//[{host}]" if ":" in host else f"//{host}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that were free a moment ago.

    Raises:
        EngineError: none were found.
    """
    for _ in range(64):
        with contextlib.ExitStack() as bound:
            try:
                probe = bound.enter_context(socket.socket())
                probe.bind(("", 0))
                first = int(probe.getsockname()[1])
                for port in range(first + 1, first + count):
                    bound.enter_context(socket.socket()).bind(("", port))
                return first
            except (OSError, OverflowError):
                continue
    raise EngineError(f"no {count} consecutive free ports were found; end processes that hold ports, or try again")
