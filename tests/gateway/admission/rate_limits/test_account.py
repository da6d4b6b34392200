"""Several gateways on one ledger: never more than the limit, nothing lost, and a dead gateway's share comes back."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.rate_limits.account import (
    CHARGED_S,
    EMPTY,
    HOLD_NS,
    MINUTE_S,
    SKEW_S,
    SPARE,
    Account,
    Amount,
    Reservation,
    free,
    held_by_others,
    seconds_until,
    taken,
)
from penstock.schemas.keys import Ledger, decode_ledger
from penstock.schemas.wire import encode
from tests.properties import examples

S = 1_000_000_000
START = 1_700_000_000 * S


@dataclass
class Shared:
    """The ledger in the broker."""

    ledger: Ledger = EMPTY
    revision: int = 0

    def swap(self, ledger: Ledger, revision: int) -> bool:
        if revision != self.revision:
            return False
        self.ledger, self.revision = decode_ledger(encode(ledger)), revision + 1
        return True


@dataclass
class Replica:
    account: Account
    skew_ns: int
    open: list[Reservation] = field(default_factory=list)

    def ask(self, shared: Shared, tokens: int, now_ns: int, lost: int = 0) -> Reservation | None:
        """One request as the shell does it; the first ``lost`` compare-and-sets fail."""
        account, now_ns, limits = self.account, now_ns + self.skew_ns, self.account.limits
        need = Amount(bool(limits.requests), tokens if limits.tokens else 0, bool(limits.slots))
        account.waiting = need
        try:
            while (found := account.take(tokens, now_ns)) is None:
                proposal = account.propose(shared.ledger, now_ns)
                left, unspent = free(shared.ledger, limits, account.gateway, now_ns), account.unspent(now_ns)
                short = (
                    left.requests + unspent.requests < need.requests or left.tokens + unspent.tokens < need.tokens
                ) or (limits.slots and left.slots < account.open + 1)
                if short:
                    return None
                if lost or not shared.swap(proposal.ledger, shared.revision):
                    lost -= 1
                    continue
                account.stored(proposal)
        finally:
            account.waiting = Amount()
        self.open.append(found)
        return found

    def sweep(self, shared: Shared, now_ns: int, *, answered: bool = True, reached: bool = True) -> None:
        """``answered``: the broker's answer arrives; ``reached``: if it does not, the ledger has changed."""
        if self.account.sweep(now_ns + self.skew_ns):
            proposal = self.account.propose(shared.ledger, now_ns + self.skew_ns)
            assert not (answered or reached) or shared.swap(proposal.ledger, shared.revision)
            (self.account.stored if answered else self.account.gave_back)(proposal)


def replicas(count: int, limits: Amount, skews: list[int]) -> list[Replica]:
    return [Replica(Account("k", f"g{n}", limits), skews[n % len(skews)]) for n in range(count)]


PAUSES = (*(0,) * 12, S // 10, S // 2, S, 2 * S, 5 * S, 20 * S, 56 * S)  # ns
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # which gateway
        st.integers(1, 60),  # tokens
        st.integers(0, 100),  # per cent of them used
        st.sampled_from([0, 0, 0, 100_000_000, S, 3 * S, 20 * S, 61 * S]),  # time until then
        st.sampled_from(["ask", "ask", "ask", "settle", "undo", "sweep"]),
        st.integers(0, 2),  # lost compare-and-sets
    ),
    max_size=120,
)


@examples(40)
@given(st.randoms(use_true_random=False), st.integers(0, 12), st.integers(60, 400))
def test_in_no_minute_do_gateways_together_spend_more_than_the_limit(
    draw: random.Random, requests: int, tokens: int
) -> None:
    limits = Amount(requests, tokens, 0)
    skews = [draw.randint(-SKEW_S * S // 2, SKEW_S * S // 2) for _ in range(4)]
    shared, gateways, now = Shared(), replicas(4, limits, skews), START
    spent: list[list[int]] = []  # when, and requests and tokens, of each accepted request; corrected when it ends
    of: dict[int, list[int]] = {}
    for _ in range(200):
        now += draw.choice(PAUSES)
        replica = draw.choice(gateways)
        action = draw.choice(("ask", "ask", "ask", "settle", "undo", "sweep"))
        if action == "ask":
            need = draw.randint(1, 60)
            found = replica.ask(shared, need, now, draw.choice((0, 0, 1, 2)))
            if found is not None:
                of[id(found)] = [now, 1, need]
                spent.append(of[id(found)])
        elif action == "sweep":
            replica.sweep(shared, now, answered=draw.random() < 0.7, reached=draw.random() < 0.5)
        elif replica.open:
            ended = replica.open.pop(draw.randrange(len(replica.open)))
            entry = of.pop(id(ended))
            if action == "undo":
                replica.account.undo(ended, now + replica.skew_ns)
                entry[1:] = [0, 0]
            else:
                entry[2] = draw.randint(0, entry[2])
                replica.account.settle(ended, entry[2], now + replica.skew_ns)
    for begin, _, _ in spent:
        within = [each for each in spent if begin <= each[0] < begin + MINUTE_S * S]
        assert not requests or sum(each[1] for each in within) <= requests
        assert sum(each[2] for each in within) <= tokens


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3)), max_size=200))
def test_never_more_than_the_limit_run_at_a_time_and_slots_of_a_dead_gateway_come_back(
    limit: int, steps: list[tuple[int, bool, int]]
) -> None:
    shared, now = Shared(), START
    gateways = replicas(4, Amount(0, 0, limit), [0])
    for which, begins, after in steps:
        for _ in range(after):  # a gateway renews its share about every second
            now += S
            for replica in gateways:
                replica.sweep(shared, now)
        replica = gateways[which]
        running = sum(len(each.open) for each in gateways)
        if begins:
            found = replica.ask(shared, 0, now)
            idle = (limit // SPARE) * (len(gateways) - 1)  # may be held at the others, of requests that have ended
            assert found is not None or running >= limit - idle
        elif replica.open:
            replica.account.settle(replica.open.pop(), 0, now)
            if replica.account.gives_up_slots:
                proposal = replica.account.propose(shared.ledger, now)
                assert shared.swap(proposal.ledger, shared.revision)
                replica.account.stored(proposal)
        assert sum(len(each.open) for each in gateways) <= limit
    survivor = gateways[0]
    while survivor.open:
        survivor.account.settle(survivor.open.pop(), 0, now)
    now += HOLD_NS  # the others have died
    assert held_by_others(shared.ledger, "g0", now) == 0
    assert [survivor.ask(shared, 0, now) is not None for _ in range(limit + 1)] == [True] * limit + [False]


@given(STEPS)
def test_nothing_of_a_limit_is_lost(steps: list[tuple[int, int, int, int, str, int]]) -> None:
    limits = Amount(10, 300, 4)
    shared, gateways, now = Shared(), replicas(4, limits, [0]), START
    for which, need, _, after, action, lost in steps:
        now += min(after, S)
        replica = gateways[which]
        if action == "ask":
            replica.ask(shared, need, now, lost)
        elif replica.open:
            replica.account.settle(replica.open.pop(), 0, now)
    for replica in gateways:
        while replica.open:
            replica.account.undo(replica.open.pop(), now)
    for _ in range(4):
        now += S
        for replica in gateways:
            replica.sweep(shared, now)
    assert taken(shared.ledger.tokens, now // S) == 0
    now += CHARGED_S * S
    assert free(shared.ledger, limits, "new", now) == limits
    for replica in gateways:
        for _ in range(3):
            replica.sweep(shared, now)
        assert replica.account.idle


def test_what_was_given_back_without_an_answer_is_not_given_back_again() -> None:
    shared, now = Shared(), START
    first, second = replicas(2, Amount(0, 100, 0), [0])
    kept, ended = first.ask(shared, 40, now), first.ask(shared, 60, now)
    assert kept is not None
    assert ended is not None
    first.account.undo(ended, now)
    first.sweep(shared, now + 3 * S, answered=False)
    first.sweep(shared, now + 4 * S)
    assert second.ask(shared, 61, now + 5 * S) is None


def test_slots_are_given_up_before_others_can_have_them() -> None:
    shared, now = Shared(), START
    first, second = replicas(2, Amount(0, 0, 4), [0])
    running = [first.ask(shared, 0, now) for _ in range(4)]
    for ended in running[1:]:
        assert ended is not None
        first.account.settle(ended, 0, now)
    proposal = first.account.propose(shared.ledger, now)
    assert shared.swap(proposal.ledger, shared.revision)  # and its answer is under way
    taken_by_others = [second.ask(shared, 0, now) for _ in range(4)]
    assert [each is not None for each in taken_by_others] == [True, True, True, False]
    assert first.account.take(0, now) is None
    first.account.stored(proposal)
    assert first.account.take(0, now) is None


def test_an_account_for_whose_slots_a_request_waits_is_not_idle() -> None:
    account = Account("k", "g", Amount(0, 0, 1))
    assert account.idle
    account.looking = 1
    assert not account.idle
    account.looking, account.waiting = 0, Amount(slots=1)
    assert not account.idle


def test_a_busy_gateway_asks_for_the_ledger_far_less_often_than_it_is_asked() -> None:
    shared, now = Shared(), START
    [replica] = replicas(1, Amount(600_000, 60_000_000, 0), [0])
    for number in range(20_000):  # 2,000 a second
        if number % 2_000 == 0:
            replica.sweep(shared, now)
        found = replica.ask(shared, 100, now)
        assert found is not None
        replica.account.settle(found, 50, now)
        now += S // 2_000
    assert shared.revision < 200


@pytest.mark.parametrize("phase", [0.0, 0.5, 0.95])
def test_no_request_of_a_busy_key_waits_for_the_ledger_once_its_pace_is_known(phase: float) -> None:
    """Otherwise 3 to 6 % of them did, and passed one by one."""
    shared, now, asked = Shared(), START + int(phase * S), 0
    [replica] = replicas(1, Amount(600_000, 60_000_000, 0), [0])
    for number in range(8_000):  # 1,000 a second
        if number % 1_000 == 0:
            replica.sweep(shared, now)
        before = shared.revision
        found = replica.ask(shared, 100, now)
        assert found is not None
        replica.account.settle(found, 50, now)
        asked += number >= 2_000 and shared.revision != before
        now += S // 1_000
    assert asked == 0
    assert shared.revision < 30


def test_what_a_busy_key_takes_ahead_is_a_small_part_of_its_limit() -> None:
    shared, now, limits = Shared(), START, Amount(3_200, 320_000, 0)
    [replica] = replicas(1, limits, [0])
    for number in range(800):  # 100 a second
        if number % 100 == 0:
            replica.sweep(shared, now)
            unspent = replica.account.unspent(now)
            assert unspent.requests <= limits.requests // SPARE
            assert unspent.tokens <= limits.tokens // SPARE
        assert replica.ask(shared, 100, now) is not None
        now += S // 100


def test_the_time_until_a_retry_is_when_enough_no_longer_counts() -> None:
    charges = {100: 4, 110: 3, 120: 3}
    assert [seconds_until(charges, 10, units, 120) for units in (0, 1, 4, 5, 10)] == [
        *(0, 100 + CHARGED_S - 120, 100 + CHARGED_S - 120, 110 + CHARGED_S - 120, 120 + CHARGED_S - 120),
    ]
