import ssl
from datetime import UTC, datetime, timedelta

import certifi
import pytest

from penstock.gateway.http.tls import date_problem, validity

ROOTS = ssl.create_default_context(cafile=certifi.where())


def test_dates_are_those_that_openssl_reads() -> None:
    described, encoded = ROOTS.get_ca_certs(), ROOTS.get_ca_certs(binary_form=True)
    assert len(encoded) > 50
    for found, der in zip(described, encoded, strict=True):
        since, until = validity(der)
        assert since.timestamp() == ssl.cert_time_to_seconds(str(found["notBefore"]))
        assert until.timestamp() == ssl.cert_time_to_seconds(str(found["notAfter"]))


def test_each_certificate_of_a_file_is_checked_at_the_edges_of_its_time() -> None:
    other, one = sorted(ROOTS.get_ca_certs(binary_form=True), key=lambda der: validity(der)[1])[-2:]
    pem = "a comment\n" + "".join(map(ssl.DER_cert_to_PEM_cert, (one, other)))
    since, until = max(validity(one)[0], validity(other)[0]), validity(other)[1]

    def problem(now: datetime) -> tuple[str, bool] | None:
        return date_problem(pem, now)

    second, day = timedelta(seconds=1), timedelta(days=1)
    assert problem(since) is problem(until - 14 * day) is None
    assert problem(since - second) == (f"is not valid before {since:%Y-%m-%d %H:%M} UTC", True)
    assert problem(until - 14 * day + second) == (f"expires on {until:%Y-%m-%d %H:%M} UTC", False)
    assert problem(until + second) == (f"expired on {until:%Y-%m-%d %H:%M} UTC", True)
    assert date_problem("no certificate", datetime.now(UTC)) is None


def test_a_certificate_that_is_cut_is_an_error_that_names_it() -> None:
    der = ROOTS.get_ca_certs(binary_form=True)[0]
    for size in range(100):
        with pytest.raises(ValueError, match=r"dates|data"):
            date_problem(ssl.DER_cert_to_PEM_cert(der[:size]), datetime.now(UTC))
