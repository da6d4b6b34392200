"""The few HTTP GETs that the supervisor needs, without an HTTP library."""

import asyncio
import contextlib

_MOST = 1 << 20


async def get(host: str, port: int, path: str, timeout_s: float = 2.0) -> tuple[int, bytes]:
    """Status and body of a GET; status 0: no answer."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
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


def reachable(host: str) -> str:
    """Where to reach a server that listens on ``host``: one cannot connect to "any address"."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def base_url(host: str, port: int) -> str:
    name = reachable(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
