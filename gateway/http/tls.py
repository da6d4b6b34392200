"""The certificate that the gateway shows, loaded again when its files change. Open connections keep theirs.

``ssl`` shows no dates of a certificate that was not verified, so they are read from its DER encoding (RFC 5280, 4.1).
"""

import asyncio
import contextlib
import os
import re
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import structlog

SOON = timedelta(days=14)
SOON_SHARE = 10  # or the last tenth of its time, if that is less: some are renewed every day

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags


class DateProblem(NamedTuple):
    """``refused``: clients refuse it now."""

    text: str
    refused: bool


def date_problem(pem: str, now: datetime) -> DateProblem | None:
    """What is wrong with the dates of the certificates in a PEM text, the worst of it; None: nothing.

    Raises:
        ValueError: one of them cannot be read.
    """
    try:
        found = [_problem(*validity(ssl.PEM_cert_to_DER_cert(encoded)), now) for encoded in _PEM.findall(pem)]
    except IndexError:
        raise ValueError("the certificate ends before its dates") from None
    return max(filter(None, found), key=lambda each: each.refused, default=None)


def _problem(since: datetime, until: datetime, now: datetime) -> DateProblem | None:
    if now > until:
        return DateProblem(f"expired on {until:%Y-%m-%d %H:%M} UTC", True)
    if now < since:
        return DateProblem(f"is not valid before {since:%Y-%m-%d %H:%M} UTC", True)
    if until - now < min(SOON, (until - since) / SOON_SHARE):
        return DateProblem(f"expires on {until:%Y-%m-%d %H:%M} UTC", False)
    return None


def validity(der: bytes) -> tuple[datetime, datetime]:
    """The first and the last moment of a certificate.

    Raises:
        ValueError, IndexError: it is not a certificate.
    """
    _, at, _ = _element(der, 0)  # the certificate
    _, at, _ = _element(der, at)  # what is signed of it
    if der[at] == _VERSION:
        _, _, at = _element(der, at)
    for _ in range(3):  # serial number, algorithm, issuer
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)
    tag, begin, at = _element(der, at)
    since = _time(tag, der[begin:at])
    tag, begin, at = _element(der, at)
    return since, _time(tag, der[begin:at])


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the element at an offset, and where its content begins and ends."""
    tag, length = der[at], der[at + 1]
    at += 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(der[at : at + size]), at + size
    return tag, at, at + length


def _time(tag: int, text: bytes) -> datetime:
    layout = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), layout).replace(tzinfo=UTC)


log = structlog.get_logger("gateway")

LOOK_S = 2.0
CHECK_DATES_S = 86_400.0
HANDSHAKE_S = 10.0

_Stamp = tuple[tuple[int, ...], ...]


class BadCertificate(Exception):
    """The files cannot be used; the text says why."""


class Certificate:
    """
    Args:
        cert: PEM file with the certificate and its chain.
        key: PEM file with its private key, without a password.
        now: Unix time; the log warns of a certificate that is not valid then, or not for long.
    Raises:
        BadCertificate: the files cannot be used.

    Attributes:
        context: of the server's sockets; new handshakes use what was loaded last.
    """

    def __init__(self, cert: str, key: str, now: Callable[[], float] = time.time) -> None:
        self._cert, self._key, self._now = cert, key, now
        self._stamp = self._stamped()
        self.context = self._loaded()
        self._check_dates()

    async def watch(self) -> None:
        """Load the files again whenever they have changed. A pair that does not fit is tried again when it changes."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Load the files if they have changed; check the dates once a day."""
        if not self.reload() and self._now() - self._checked > CHECK_DATES_S:
            self._check_dates()

    def reload(self) -> bool:
        """Load the files if they have changed; returns whether they were loaded."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._loaded()  # in a separate context: the files may be half replaced
            self.context.load_cert_chain(self._cert, self._key, _no_password)
        except (BadCertificate, OSError) as error:
            log.warning("certificate_not_loaded", error=str(error), effect="the last one stays in use")
            return False
        log.info("certificate_loaded", file=self._cert)
        self._check_dates()
        return True

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert, self._key, _no_password)
        except ssl.SSLError as error:
            what = "they do not belong together" if "MISMATCH" in str(error) else error.reason or str(error)
            raise BadCertificate(f"--tls-cert {self._cert}, --tls-key {self._key}: {what}; give PEM files") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadCertificate(f"--tls-cert {self._cert}, --tls-key {self._key}: {reason}") from None
        return context

    def _check_dates(self) -> None:
        self._checked = self._now()
        try:
            problem = date_problem(
                Path(self._cert).read_text(errors="replace"), datetime.fromtimestamp(self._checked, UTC)
            )
        except (OSError, ValueError) as error:
            log.warning("certificate_dates_unknown", file=self._cert, error=str(error))
            return
        if problem is not None:
            event = "certificate_not_valid" if problem.refused else "certificate_expires_soon"
            fix = "replace the files of --tls-cert and --tls-key; a restart is not needed"
            log.warning(event, file=self._cert, problem=f"it {problem.text}", fix=fix)

    def _stamped(self) -> _Stamp:
        """What differs when a file is replaced, written or made readable, through links as Kubernetes makes them."""
        stamps = []
        for path in (self._cert, self._key):
            with contextlib.suppress(OSError):
                at = os.stat(path)
                stamps.append((at.st_mtime_ns, at.st_ctime_ns, at.st_size, at.st_ino))
        return tuple(stamps)


def _no_password() -> str:
    """Called for an encrypted key, where OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted; give one without a password")
