"""The sockets on which the gateways of a deployment listen: one for all, and one for each if there are several."""

import contextlib
import socket

from penstock.infra.process.sockets import CannotListen, listening, own_sockets
from penstock.launch.http import base_url


class Listeners:
    """The shared listening socket, owned by the supervisor and inherited by every gateway, and the ports of each.

    A connection that arrives while no gateway accepts waits in the socket, so that stopping or restarting a gateway
    resets no connection. Several gateways also listen on ports of their own, after the shared one, to be reached one
    by one.
    """

    def __init__(self, host: str, *, tls: bool = False) -> None:
        self._host = host
        self._tls = tls
        self._shared: socket.socket | None = None
        self._own: list[socket.socket] = []  # hold the ports of single gateways
        self.port = 0
        self.ports: list[int] = []  # one per gateway

    def open(self, port: int, gateways: int) -> None:
        """
        Raises:
            CannotListen: an address or a port cannot be used.
        """
        self._shared = listening(self._host, port)
        self.port = int(self._shared.getsockname()[1])
        try:
            self._own = own_sockets(self._host, port and port + 1, gateways) if gateways > 1 else []
        except CannotListen:
            self.close()
            raise
        self.ports = [int(each.getsockname()[1]) for each in self._own] or [self.port]

    @property
    def fd(self) -> int:
        """The descriptor to inherit; -1: not open."""
        return -1 if self._shared is None else self._shared.fileno()

    @property
    def url(self) -> str:
        return base_url(self._host, self.port, tls=self._tls)

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each gateway's own port."""
        return tuple(base_url(self._host, port, tls=self._tls) for port in self.ports)

    def close(self) -> None:
        """Gateways that have inherited the socket still accept from it."""
        for each in (*self._own, *filter(None, [self._shared])):
            with contextlib.suppress(OSError):
                each.close()
        self._own, self._shared = [], None
