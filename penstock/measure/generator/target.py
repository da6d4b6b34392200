"""The server under load: its address, its TLS settings, and the header of requests to it."""

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpcore2

_MOST_BYTES = 16 << 20
_PORTS = {"http": 80, "https": 443}


class BadTarget(ValueError):
    """A URL that cannot be loaded; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """
    Attributes:
        prefix: of the path, without ``/v1``.
        tls: None: plain HTTP.
        api_key: bearer token; "": none.
    """

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    api_key: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, path: str) -> str:
        """The head of a POST of JSON, up to the length of the body."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
            "Content-Type: application/json\r\nAccept: */*\r\nContent-Length: "
        )


def parse_target(url: str, *, api_key: str = "", insecure: bool = False) -> HttpTarget:
    """A server by its URL, with or without scheme (http) and ``/v1``.

    Args:
        insecure: accept any certificate.

    Raises:
        BadTarget: no host, another scheme, or a port that is none.
    """
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    if parts.scheme not in _PORTS:
        raise BadTarget(f"{url}: only http and https")
    try:
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        raise BadTarget(f"{url}: the port is not a number up to 65535") from None
    if not parts.hostname or any(each.isspace() for each in url):
        raise BadTarget(f"{url!r} names no host; expected http://host:port")
    if any(not each.isprintable() for each in api_key):
        raise BadTarget("the API key has control characters")
    tls = None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
        if insecure:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    return HttpTarget(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"), tls, api_key)


async def ask(target: HttpTarget, path: str, body: bytes | None = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Send a GET, or a POST of ``body``, and return status and body. Status 0: no answer, and the body says why."""
    headers = [("Authorization", f"Bearer {target.api_key}")] if target.api_key else []
    if body is not None:
        headers.append(("Content-Type", "application/json"))
    limits = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
    try:
        async with httpcore2.AsyncConnectionPool(ssl_context=target.tls) as pool:
            response = await pool.request(
                "GET" if body is None else "POST",
                f"{target.url}{path}",
                headers=headers,
                content=body,
                extensions={"timeout": limits},
            )
            return response.status, response.content[:_MOST_BYTES]
    except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
        return 0, (str(error) or type(error).__name__).encode()
