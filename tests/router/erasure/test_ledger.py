"""Which requests are erased when: a fold of WORK and DONE, in any order and with repeats."""

from hypothesis import given
from hypothesis import strategies as st

from router.erasure.ledger import OTHERS_S, SECOND_LOOK_S, ErasureLedger

S = 1_000_000_000


def test_a_request_is_due_when_its_grace_is_over_and_later_where_another_router_owns_it() -> None:
    own, other = ErasureLedger(30.0), ErasureLedger(30.0)
    own.end("r", 100 * S, own=True)
    other.end("r", 100 * S, own=False)
    assert not own.due(130 * S - 1, 9)
    assert [each.request for each in own.due(130 * S, 9)] == ["r"]
    assert not other.due(130 * S, 9)
    assert other.due(130 * S + int(OTHERS_S * S), 9)


def test_it_is_looked_at_twice_and_then_forgotten() -> None:
    ledger = ErasureLedger(0.0)
    ledger.add_job("r", 7)
    ledger.end("r", S, own=True)
    (due,) = ledger.due(S, 9)
    assert (due.jobs, due.again) == (frozenset({7}), False)
    ledger.erased(due, S)
    assert not ledger.due(S, 9)
    (again,) = ledger.due(S + int(SECOND_LOOK_S * S), 9)
    assert (again.jobs, again.again) == (frozenset(), True)
    ledger.erased(again, 20 * S)
    assert len(ledger) == 0


def test_a_job_that_is_stored_while_it_is_erased_is_erased_next() -> None:
    ledger = ErasureLedger(0.0)
    ledger.end("r", S, own=True)
    (due,) = ledger.due(S, 9)
    ledger.add_job("r", 8)
    ledger.erased(due, S)
    assert ledger.due(S, 9)[0].jobs == {8}


def test_what_comes_after_the_second_look_is_due_at_once() -> None:
    ledger = ErasureLedger(0.0)
    ledger.end("r", S, own=True)
    for now in (S, 100 * S):
        ledger.erased(ledger.due(now, 9)[0], now)
    ledger.end("r", S, own=True)
    assert not ledger.due(101 * S, 9), "a repeated end is no news"
    ledger.add_job("r", 9)
    assert ledger.due(101 * S, 9)[0].jobs == {9}
    ledger.erased(ledger.due(101 * S, 9)[0], 101 * S)
    ledger.erased(ledger.due(200 * S, 9)[0], 200 * S)
    ledger.left_over(["r", "unknown"])
    assert [each.request for each in ledger.due(200 * S, 9)] == ["r"]


def test_a_request_with_jobs_has_not_ended_as_far_as_its_router_knows() -> None:
    ledger = ErasureLedger(0.0)
    ledger.add_job("r", 7)
    ledger.add_job("s", 8)
    ledger.end("s", S, own=True)
    assert ledger.unended() == {"r"}


def test_after_a_failure_it_is_due_again_later() -> None:
    ledger = ErasureLedger(0.0)
    ledger.end("r", S, own=True)
    ledger.failed(ledger.due(S, 9)[0], 3 * S)
    assert not ledger.due(3 * S - 1, 9)
    assert ledger.due(3 * S, 9)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["job", "end"])), max_size=30), st.integers(1, 3))
def test_nothing_is_erased_before_its_end_and_everything_after_it(steps: list[tuple[str, str]], limit: int) -> None:
    ledger = ErasureLedger(0.0)
    stored: dict[str, set[int]] = {}
    ended: set[str] = set()
    for seq, (request, kind) in enumerate(steps):
        if kind == "job":
            ledger.add_job(request, seq)
            stored.setdefault(request, set()).add(seq)
        else:
            ledger.end(request, 0, own=True)
            ended.add(request)
    now = 0
    while len(ledger):
        now += int(SECOND_LOOK_S * S)
        for due in ledger.due(now, limit):
            assert due.request in ended
            stored.get(due.request, set()).difference_update(due.jobs)
            ledger.erased(due, now)
    assert not any(stored.get(request) for request in ended)
