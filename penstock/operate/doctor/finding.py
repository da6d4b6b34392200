"""The findings of checks, and the checks of certificates that gateways and the broker show: their dates, now and in the
next days.
"""

import enum
import ssl
from datetime import UTC, datetime
from urllib.parse import urlsplit

import msgspec

from penstock.gateway.http.tls import date_problem
from penstock.infra.bus.connection import Bus
from penstock.schemas.fleet import ConnectorUse, GpuUse


class CheckStatus(enum.StrEnum):
    ok = "ok"
    warning = "warning"  # it serves, but worse than it could
    problem = "problem"  # requests fail or wait
    skipped = "skipped"  # could not be checked here


class WorkerUse(msgspec.Struct, frozen=True):
    """What a worker has in use, as it said with the last renewal of its lease.

    Attributes:
        worker: its name, or id if it has none.
        running, waiting: sequences; it runs ``slots`` at once.
        used_blocks: of its ``total_blocks`` of KV, on all ranks.
        gpus: that it sees, with the use of all processes on them; empty: none, or it cannot say.
        connector: None: it hands no KV or embeddings to others.
        note: "hot" with the reason, "idle", "busy without requests", or why it takes none; "": it is at work.
    """

    worker: str
    role: str
    model: str
    host: str
    running: int
    waiting: int
    slots: int
    used_blocks: int
    total_blocks: int
    gpus: tuple[GpuUse, ...]
    connector: ConnectorUse | None
    note: str = ""


class CheckResult(msgspec.Struct, frozen=True):
    """One result of one check.

    Attributes:
        check: its name, the same in every release.
        what: what is the case, in one line.
        fix: what to do; "" if nothing is wrong.
        use: of a check "resources", which is shown as a row of a table.
    """

    check: str
    status: CheckStatus
    what: str
    fix: str = ""
    use: WorkerUse | None = None


def ok(check: str, what: str) -> CheckResult:
    return CheckResult(check, CheckStatus.ok, what)


def warning(check: str, what: str, fix: str) -> CheckResult:
    return CheckResult(check, CheckStatus.warning, what, fix)


def problem(check: str, what: str, fix: str) -> CheckResult:
    return CheckResult(check, CheckStatus.problem, what, fix)


def skipped(check: str, what: str) -> CheckResult:
    return CheckResult(check, CheckStatus.skipped, what)


def now() -> datetime:
    return datetime.now(UTC)


def check_gateway_certificate(url: str) -> list[CheckResult]:
    """The one that an https URL shows. Blocks for a few seconds at most."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return []
    try:
        pem = ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=3)
    except OSError:
        return []  # that it does not answer is a finding of its own
    return [_finding(url, pem, "replace the files of --tls-cert and --tls-key; the gateway loads them by itself")]


def check_broker_certificate(bus: Bus) -> list[CheckResult]:
    """The one of a connection over TLS, which was valid when that was made."""
    shown = bus.nc.peer_certificate
    if not shown:
        return []
    fix = "replace the server's files and reload it (`nats-server --signal reload`): without it no process reconnects"
    return [_finding("the broker", ssl.DER_cert_to_PEM_cert(shown), fix)]


def _finding(of: str, pem: str, fix: str) -> CheckResult:
    found = date_problem(pem, now())
    if found is None:
        return ok("certificate", f"that of {of} is valid")
    return (problem if found.refused else warning)("certificate", f"that of {of} {found.text}", fix)
