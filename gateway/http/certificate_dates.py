"""Whether a certificate is valid now and for long enough.

``ssl`` shows no dates of a certificate that was not verified, so they are read from its DER encoding (RFC 5280, 4.1).
"""

import re
import ssl
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

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
        ValueError, IndexError: it is no certificate.
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
