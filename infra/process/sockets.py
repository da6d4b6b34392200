"""Listening sockets, and clear reasons where there can be none."""

import contextlib
import errno
import ipaddress
import socket
import sys
from pathlib import Path

BACKLOG = 2048
_RESERVED = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class CannotListen(Exception):
    """An address or a port cannot be used; the text names the flag, the cause and the fix.

    Attributes:
        permanent: another start with the same flags would fail as well.
    """

    def __init__(self, text: str, *, permanent: bool) -> None:
        super().__init__(text)
        self.permanent = permanent


def of_this_machine(host: str) -> str:
    """Where to listen: ``host``; for ``::``, all addresses, 0.0.0.0 on a machine without IPv6."""
    if host == "::":
        try:
            socket.socket(socket.AF_INET6).close()
        except OSError:
            return "0.0.0.0"
    return host


def bind(host: str, port: int, *, port_flag: str = "--http-port", host_flag: str = "--http-host") -> socket.socket:
    """A TCP socket bound to an address; it does not listen yet. Port 0: any free one.

    Raises:
        CannotListen: the port is in use or reserved, or the host is unknown or not of this machine.
    """
    host = of_this_machine(host)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, UnicodeError) as error:
        sock.close()
        raise cannot_listen(error, host, port, port_flag=port_flag, host_flag=host_flag) from None
    return sock


def listening(host: str, port: int) -> socket.socket:
    """A socket that the gateways accept from, shared by all of them and owned by this process.

    Connections wait in it while no gateway accepts, so that none is reset when a gateway stops or is started again.

    Raises:
        CannotListen: as ``bind``.
    """
    sock = bind(host, port)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by accepted connections
        sock.listen(BACKLOG)
    except OSError as error:  # another socket listens there, bound before with SO_REUSEADDR
        sock.close()
        raise cannot_listen(error, host, port) from None
    sock.setblocking(False)
    return sock


def check_free(host: str, port: int, *, port_flag: str = "--http-port", host_flag: str = "--http-host") -> None:
    """
    Raises:
        CannotListen: the port cannot be used now.
    """
    bind(host, port, port_flag=port_flag, host_flag=host_flag).close()


def own_sockets(host: str, first: int, count: int) -> list[socket.socket]:
    """Hold the ports of single gateways: consecutive from ``first``, or (0) any free ones.

    The sockets are bound and do not listen, so a gateway can bind to its port beside them (both with SO_REUSEADDR),
    and meanwhile the kernel gives it to no outgoing connection.

    Raises:
        CannotListen: one is in use, or there are no such ports.
    """
    if first and first + count - 1 > 65535:
        raise CannotListen(
            f"--http-port {first - 1}: {count} gateways need the ports up to {first + count - 1}, "
            "and the last one is 65535",
            permanent=True,
        )
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(bind(host, first and first + number)) for number in range(count)]
        held.pop_all()
    return sockets


def claim(host: str, port: int, *, port_flag: str = "--http-port") -> socket.socket:
    """Claim a port among the deployments of this machine, until the socket is closed or this process ends.

    Sockets that do not listen yet can share a port, for which there are reasons: a gateway binds beside the one that
    holds its port, and a port can be bound again while connections of an earlier process linger there. So two
    deployments that start at once could hold the same port. The name that is claimed is bound by one process only, in
    the network namespace of the port. Claim before you bind, for a process without a claim binds and listens before
    it looks at claims (``check_unclaimed``). Elsewhere than on Linux nothing is claimed.

    Raises:
        CannotListen: a deployment has claimed it.
    """
    held = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            held.bind(f"\0penstock-port:{_address(host)}:{port}")
        except OSError as error:
            held.close()
            raise cannot_listen(error, host, port, port_flag=port_flag) from None
    return held


def check_unclaimed(host: str, port: int) -> None:
    """
    Raises:
        CannotListen: a deployment has claimed this port, whose gateway need not listen there yet.
    """
    claim(host, port).close()


def _address(host: str) -> str:
    """In numbers; the host itself if it is unknown, as ``bind`` says then."""
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(host, 0)[0][4][0])
    return host


def held_ports(host: str, first: int, count: int) -> list[socket.socket]:
    """Hold ports in a row that no process uses or holds, as ``own_sockets`` does.

    Raises:
        OSError: one of them is in use, or held by another process.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for number, sock in enumerate(sockets):
            sock.bind((host, first + number))  # without SO_REUSEADDR, which could share it with another that holds it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.pop_all()
    return sockets


def cannot_listen(
    error: Exception, host: str, port: int, *, port_flag: str = "--http-port", host_flag: str = "--http-host"
) -> CannotListen:
    """Turn a failed ``bind`` into a message with the cause and the fix."""
    if isinstance(error, (socket.gaierror, UnicodeError)):
        text = f"{host_flag} {host}: unknown host; use an address of this machine, or :: for all of them"
        return CannotListen(text, permanent=True)
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        text = f"{port_flag}: port {port} is in use on {host}; choose another, or 0 for any free one"
        return CannotListen(text, permanent=False)
    if code in (errno.EACCES, errno.EPERM):
        first = _first_unreserved()
        text = f"{port_flag} {port}: ports below {first} are reserved for root; choose one from {first} on"
        return CannotListen(text, permanent=True)
    if code in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        text = f"{host_flag} {host}: not an address of this machine; use one that it has, or :: for all of them"
        return CannotListen(text, permanent=True)
    return CannotListen(f"cannot listen on {host}:{port}: {error}", permanent=False)


def _first_unreserved() -> int:
    try:
        return int(_RESERVED.read_text())
    except (OSError, ValueError):
        return 1024
