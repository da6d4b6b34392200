import io

from rich.console import Console

from penstock.log_tools.requests.leases import show
from penstock.log_tools.timeline.request_timeline import ticket_leases
from penstock.schemas.transfer import Handoff

NOW = 1_000_000_000_000


def line(state: str, at: int = 0, ticket: str = "r1:1:decode", **more: object) -> Handoff:
    lease = NOW + 30_000_000_000 if state == "offered" else 0
    return Handoff(ticket, state, "p-1", "d-1", NOW + at, 125, lease_ns=lease, pool="kv", **more)  # type: ignore[arg-type]


def test_a_ticket_is_open_until_its_owner_lets_go() -> None:
    lines = [line("offered"), line("leased", 1), line("read", 2)]
    for count in range(1, 4):
        assert ticket_leases(lines[:count])["r1:1:decode"].is_open(NOW)
    assert not ticket_leases([*lines, line("released", 3)])["r1:1:decode"].is_open(NOW)


def test_a_lease_of_an_owner_that_died_is_over_when_its_time_is() -> None:
    (lease,) = ticket_leases([line("offered")]).values()
    assert lease.is_open(lease.offer.lease_ns)
    assert not lease.is_open(lease.offer.lease_ns + 1)


def test_blocks_in_quarantine_are_shown_until_they_are_settled() -> None:
    lines = [line("offered"), line("failed", 1, cause="timeout"), line("quarantined", 2), line("expired", 3)]
    (lease,) = ticket_leases(lines).values()
    assert lease.is_open(NOW + 3600_000_000_000)
    (lease,) = ticket_leases([*lines, line("settled", 4)]).values()
    assert not lease.is_open(NOW)


def test_what_a_reader_reports_may_be_stored_before_the_offer() -> None:
    (lease,) = ticket_leases([line("leased", 1), line("read", 2), line("offered"), line("released", 3)]).values()
    assert not lease.is_open(NOW)


def test_the_list_names_who_holds_what_for_whom() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    found = ticket_leases(
        [line("offered", bytes=32_000_000), line("offered", ticket="old"), line("released", 1, ticket="old")]
    )
    assert show(found, NOW, console) == 1
    text = out.getvalue()
    assert "p-1" in text
    assert "d-1" in text
    assert "32.0" in text
    assert "old" not in text
    assert "1 open leases; 2 handoffs" in text
    show(found, NOW, console, everything=True)
    assert "old" in out.getvalue()
