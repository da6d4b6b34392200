"""The few HTTP GETs that the supervisor needs, without an HTTP library."""

import asyncio
import contextlib
import ssl
from urllib.parse import urlsplit

_MOST = 1 << 20


async def get(host: str, port: int, path: str, timeout_s: float = 2.0, *, tls: bool = False) -> tuple[int, bytes]:
    """Status and body of a GET; status 0: no answer.

    Args:
        tls: over HTTPS, to whichever certificate: nothing secret is sent.
    """
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=_unverified() if tls else None)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
                answer = await reader.read(_MOST)
                while more := await reader.read(_MOST):
                    answer += more
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            head, _, body = answer.partition(b"\r\n\r\n")
            return int(head.split(None, 2)[1]), body
    return 0, b""


async def get_url(url: str, path: str = "") -> tuple[int, bytes]:
    """The same for a URL, with ``path`` behind it."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return await get(parts.hostname or "", parts.port or (443 if tls else 80), parts.path + path, tls=tls)


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def reachable(host: str) -> str:
    """Where to reach a server that listens on ``host``: one cannot connect to "any address"."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    name, scheme = reachable(host), "https" if tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
