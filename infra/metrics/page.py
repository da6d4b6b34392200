"""The port of a process's metrics page, checked before anything that takes long."""

import socket

from prometheus_client import CollectorRegistry, start_http_server


class PortTaken(Exception):
    """The page cannot be served; the text says why and what to do."""


def check_port(host: str, port: int) -> None:
    """
    Args:
        port: 0: there is no page.
    Raises:
        PortTaken: another process listens there, or the address is not this machine's.
    """
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the page itself does
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _taken(host, port, error) from None


def serve_page(host: str, port: int, registry: CollectorRegistry) -> None:
    """Serve the page in a thread of its own until the process ends; nothing happens with port 0.

    Raises:
        PortTaken: as ``check_port``.
    """
    if port:
        try:
            start_http_server(port, host, registry=registry)
        except OSError as error:
            raise _taken(host, port, error) from None


def _taken(host: str, port: int, error: OSError) -> PortTaken:
    return PortTaken(f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another --metrics-port")
