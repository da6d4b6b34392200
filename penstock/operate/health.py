"""``penstock health``: check that a process of this machine is healthy, for the health checks of containers."""

import argparse
import http.client
import json
import os
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from penstock.configs.flags import PREFIX, Parser, is_of_a_service

OK, ILL = 0, 1
TIMEOUT_S = 4.0
POLL_S = 0.5
MOST_BYTES = 1 << 20
# of each role: the variable with its port, the port in our images, and what is asked
PAGES = {
    "gateway": ("HTTP_PORT", "8000", "/health/live"),
    "router": ("METRICS_PORT", "9090", "/metrics"),
    "worker": ("METRICS_PORT", "9090", "/metrics"),
}


def run(argv: Sequence[str]) -> int:
    """Ask, and say what is wrong; the exit status."""
    parser = Parser(prog="penstock health", description="check that a process of this machine is healthy")
    _add_arguments(parser)
    args = parser.parse_args(argv)
    url = args.url or url_of(args.role, os.environ, ready=args.ready, listed=args.workers > 0)
    deadline = time.monotonic() + args.wait_s
    while (problem := problem_at(url, args.timeout_s, args.workers)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    print(f"{args.role}: {problem or 'healthy'}", file=sys.stderr if problem else sys.stdout)
    return ILL if problem else OK


def url_of(role: str, environ: Mapping[str, str], *, ready: bool = False, listed: bool = False) -> str:
    """Where a role answers, by the variables that it was started with.

    Args:
        listed: the page of a gateway that lists workers.
    """
    variable, default, path = PAGES[role]
    port = environ.get(PREFIX + variable, default)
    port = default if is_of_a_service(PREFIX + variable, port) else port
    if role == "gateway" and (ready or listed):
        path = "/health" if listed else "/health/ready"
    host = environ.get(PREFIX + ("HTTP_HOST" if role == "gateway" else "METRICS_HOST"), "")
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    scheme = "https" if role == "gateway" and environ.get(PREFIX + "TLS_CERT") else "http"
    return f"{scheme}://{place}{path}"


def problem_at(url: str, timeout_s: float, workers: int = 0) -> str:
    """Why a GET of this URL is not answered with a status below 400, or with too few ready workers; "": it is."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]  # without a password
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{parts._replace(netloc=place).geturl()} is not an http URL"
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        # A process of this machine, whose certificate is made for its clients' name of it.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        body = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        return f"no answer from {place} ({error or type(error).__name__})"
    finally:
        connection.close()
    if answer.status >= 400:
        return f"status {answer.status}{_reasons(body)}"
    return _too_few(body, workers) if workers else ""


def _too_few(body: bytes, workers: int) -> str:
    """Why the page of a gateway does not list this many ready workers; "": it does."""
    try:
        components = json.loads(body)["components"]
        ready = sum(bool(each["ready"]) for each in components if each.get("role"))
    except (ValueError, KeyError, TypeError):
        return "the answer lists no components, as a gateway's /health does"
    return "" if ready >= workers else f"{ready} of {workers} workers are ready"


def _reasons(body: bytes) -> str:
    """What a gateway says is missing."""
    try:
        said = json.loads(body)
    except ValueError:
        return ""
    reasons = said.get("reasons") if isinstance(said, dict) else None
    return ": " + "; ".join(map(str, reasons)) if isinstance(reasons, list) and reasons else ""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=tuple(PAGES), help="asked at PENSTOCK_HTTP_PORT or PENSTOCK_METRICS_PORT")
    parser.add_argument("--ready", action="store_true", help="gateway: whether a request could be served now")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="gateway: least number of ready workers, too"
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="seconds to wait until it is healthy (default: %(default)s)",
    )
    parser.add_argument("--url", default="", help="ask this one (default: by role)")
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, metavar="SECONDS", help="for an answer (default: %(default)s)"
    )
