"""Which requests a router holds: bounded in bytes by class and by model, and what it publishes again."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.held.held_requests import (
    CLAIM_S,
    HELD_BYTES,
    PREFIX_LENGTHS,
    READ_AHEAD,
    Held,
    HeldOrder,
    HeldPrefixes,
    HeldRequests,
)
from penstock.router.placement.cost import FEW
from penstock.router.placement.decision_inputs import array_decisions
from penstock.router.placement.pending import PendingRequest
from penstock.router.placement.routing import RoutingRequest
from penstock.router.state.holders import Depths
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.requests import Priority
from penstock.schemas.routers import BOUNDED, TENANTS, HeldByModel, HeldByTenant
from penstock.schemas.wire import encode
from tests.workers.support import BLOCK, MODEL, request

STANDARD = Priority.standard


def pending(model: str = MODEL, reply: str = "reply", *, raw: bytes = b"", **options: Any) -> PendingRequest:
    """Of ``HELD_BYTES``, with ``raw``."""
    asked = msgspec.structs.replace(request(model=model, **options), digests=b"")
    return PendingRequest(asked, raw, reply, 0)


def made(requests: int) -> HeldRequests:
    """With space for so many requests of ``pending``."""
    tracker = LoadTracker()
    return HeldRequests(requests * HELD_BYTES, 256, HeldOrder(tracker, array_decisions(tracker), lambda _: {}))


def fill(held: HeldRequests, model: str, count: int, serving: int, registered: int) -> int:
    """How many of ``count`` requests are held."""
    return sum(held.hold(pending(model), serving, registered) for _ in range(count))


def test_a_model_leaves_space_for_requests_of_others() -> None:
    held = made(16)
    assert fill(held, "missing", 10, serving=0, registered=3) == 4, "a quarter of the class"
    assert fill(held, "absent", 10, serving=0, registered=3) == 0, "which models without workers share"
    assert fill(held, "busy", 10, serving=2, registered=3) == 8, "half of the class"
    assert held.space(STANDARD) == 4
    assert held.space(Priority.batch) == 16


def test_the_only_model_may_take_all_the_space() -> None:
    held = made(16)
    assert fill(held, MODEL, 16, serving=3, registered=3) == 16
    assert held.space(STANDARD) == 0


def test_a_later_attempt_is_held_beyond_the_share_of_its_model() -> None:
    held = made(4)
    assert fill(held, "missing", 2, serving=0, registered=3) == 1
    assert held.hold(pending("missing", reply=""), 0, 3)


def test_requests_are_counted_by_class_and_tenant_however_they_leave() -> None:
    held = made(100)
    gone = [pending(tenant="acme", deadline_s=-1.0), pending(tenant="acme"), pending(tenant="zoe")]
    for each in [*gone, pending(tenant="acme"), pending(tenant="ann", priority=Priority.batch)]:
        assert held.hold(each, 1, 1)
    assert held.by_tenant() == (
        HeldByTenant("standard", (("acme", 3), ("zoe", 1))),
        HeldByTenant("batch", (("ann", 1),)),
    )
    held.expired(gone[0].request.created_ns)
    held.remove(gone[1].request.id)
    held.take(gone[2].request.id)
    assert held.by_tenant() == (HeldByTenant("standard", (("acme", 1),)), HeldByTenant("batch", (("ann", 1),)))


def test_the_tenants_that_have_most_are_named_and_the_others_counted_together() -> None:
    held = made(100)
    for number in range(TENANTS + 3):
        for _ in range(2 if number == TENANTS + 1 else 1):
            held.hold(pending(tenant=f"t-{number:02}"), 1, 1)
    (counts,) = held.by_tenant()
    assert counts.tenants[0] == ("t-09", 2)
    assert (len(counts.tenants), counts.others) == (TENANTS, 3)


def test_every_tenant_with_a_bound_is_named_as_far_as_a_lease_stays_small() -> None:
    """Gateways would let it have more waiting than it may."""
    tracker, bounds = LoadTracker(), dict[str, int]()
    held = HeldRequests(1 << 30, 256, HeldOrder(tracker, None, lambda _: {}), bounds)
    for number in range(TENANTS):
        for _ in range(3):
            held.hold(pending(tenant=f"many-{number}"), 1, 1)
    for number in range(BOUNDED + 2):
        held.hold(pending(tenant=f"few-{number}"), 1, 1)
    held.hold(pending(tenant="few-2"), 1, 1)
    bounds.update({f"few-{number}": 10 + number % 2 for number in range(1, BOUNDED + 1)})
    (counts,) = held.by_tenant()
    assert [tenant for tenant, _ in counts.tenants[:TENANTS]] == [f"many-{number}" for number in range(TENANTS)]
    named = dict(counts.tenants[TENANTS:])
    assert named.keys() == bounds.keys()
    assert (next(iter(named)), named["few-2"], counts.others) == ("few-2", 2, 2)
    bounds[f"few-{BOUNDED + 1}"] = 1
    (counts,) = held.by_tenant()
    assert counts.tenants[TENANTS] == (f"few-{BOUNDED + 1}", 1), "its bound is reached"
    assert (len(counts.tenants), counts.others) == (TENANTS + BOUNDED, 2)
    assert len(encode(counts)) < 20 * BOUNDED


def test_space_is_free_again_however_a_request_leaves() -> None:
    held = made(16)
    gone = [pending(deadline_s=-1.0), pending(), pending(), pending()]
    for each in gone:
        assert held.hold(each, 1, 2)
    now_ns = gone[0].request.created_ns
    assert held.expired(now_ns) == [gone[0]]
    assert held.remove(gone[1].request.id) is gone[1]
    assert held.remove(gone[1].request.id) is None
    held.release(gone[2].request.id, "another message")
    assert gone[2].request.id in held
    held.release(gone[2].request.id, "reply")
    ((_, lane),) = held.heads()
    assert list(held.candidates(lane, now_ns)) == [gone[3]]
    assert held.take(gone[3].request.id) is gone[3]
    assert (held.space(STANDARD), len(held), held.heads()) == (16, 0, [])
    assert fill(held, MODEL, 10, serving=1, registered=2) == 8, "the share of the model, too"


def test_deferred_requests_are_named_once_and_held_ones_while_the_router_reads() -> None:
    held = made(4)
    kept, deferred = pending("missing", reply="a"), pending("missing", reply="b")
    assert held.hold(kept, 0, 3)
    assert not held.hold(deferred, 0, 3)
    assert list(held.unacknowledged(reading=False)) == [(deferred.request.id, "b")]
    assert list(held.unacknowledged(reading=True)) == [(kept.request.id, "a")]
    assert fill(held, MODEL, 3, serving=3, registered=3) == 3
    assert list(held.unacknowledged(reading=True)) == [], "no space, so this router reads no more of the class"


def test_prompts_stay_in_the_log_beyond_half_of_the_bytes_and_their_requests_are_held() -> None:
    held, prompt = made(8), bytes(2 * HELD_BYTES)
    kept, large, small = pending(raw=prompt), pending(raw=prompt + b"x"), pending(raw=prompt)
    for each in (kept, large, small):
        assert held.hold(each, 1, 1)
    assert (kept.raw, large.raw, small.raw) == (prompt, b"", prompt)
    assert held.space(STANDARD) == 0, "8 of them: 3 requests, and twice 2 for prompts"
    assert held.take(kept.request.id) is kept
    assert held.hold(again := pending(raw=prompt), 1, 1)
    assert again.raw == prompt, "there is space again"


def test_a_model_takes_no_more_of_its_share_than_is_held_of_its_requests() -> None:
    held, prompt = made(16), bytes(100 * HELD_BYTES)
    asked = [pending("busy", raw=prompt) for _ in range(10)]
    assert sum(held.hold(each, 2, 3) for each in asked) == 8, "half of the space, without their prompts"


def test_a_later_attempt_keeps_its_prompt_since_the_log_has_no_message_of_it() -> None:
    held = made(1)
    later = pending(reply="", raw=bytes(HELD_BYTES))
    assert held.hold(later, 1, 1)
    assert later.raw == bytes(HELD_BYTES)


def test_what_is_held_of_a_request_has_its_length_and_no_prompt() -> None:
    held, asked = made(8), pending()
    tokens = asked.request.prompt_tokens
    assert tokens
    assert held.hold(asked, 1, 1)
    assert (asked.request.prompt, asked.request.prompt_tokens) == (b"", tokens)


def test_requests_are_read_from_the_log_as_far_as_those_that_are_held_leave_space() -> None:
    held = made(16)
    assert held.space(STANDARD) == 16
    for each in range(4):
        held.hold(pending(raw=bytes(HELD_BYTES)), 1, 1)
        assert held.space(STANDARD) == (16 - 2 * each - 2) // 2, "each takes the space of two"
    assert made(1 << 20).space(STANDARD) == READ_AHEAD
    assert made(0).space(STANDARD) == 1, "one is read, however large"


def test_what_is_held_is_not_looked_at_before_the_unacknowledged_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held, looks = made(4), list[object]()
    assert held.hold(pending(), 1, 1)

    def look(_: HeldRequests) -> Iterator[PendingRequest]:
        looks.append(None)
        return iter(())

    monkeypatch.setattr(HeldRequests, "__iter__", look)
    unread = held.unacknowledged(reading=True)
    assert not looks
    assert list(unread) == []
    assert len(looks) == 1


@pytest.mark.parametrize("workers", [1, FEW + 1])
def test_only_as_many_held_requests_are_looked_at_as_it_takes_to_find_one_with_room(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In overload hundreds are held, and each one that is placed is the first that is tried, mostly."""
    tracker = LoadTracker()
    for number in range(workers):
        tracker.put_worker(Registration(f"w{number}", MODEL, "aggregated", "mock", 1, 16, 1000, 8, 4096))
    order: HeldOrder[int] = HeldOrder(tracker, array_decisions(tracker), lambda _: {})
    for number in range(100):
        keys = [number]
        asked = RoutingRequest(MODEL, 20, 10, prompt_blocks=1)
        assert order.push(
            str(number), Held(number, asked, keys), rank=0, arrived_ns=number, deadline_ns=1 << 62, now_ns=0
        )
    looked_at: list[int] = []
    prefixes = tracker.loads.prefixes

    def counted(keys: list[int]) -> Depths:
        looked_at.append(keys[0])
        return prefixes(keys)

    monkeypatch.setattr(tracker.loads, "prefixes", counted)
    assert next(order.candidates("", 0)).item.item == 0
    assert looked_at == [0]
    tracker.loads.put(("w0", 0), block_size=16, blocks=1000, slots=8, limit=8)
    for number in range(workers * 8):
        load = LoadHeader(16, 0, "", 1 << 62, "")
        tracker.admit(f"r{number}", 1, f"w{number % workers}", load, now_ns=0)
    looked_at.clear()
    assert list(order.candidates("", 0)) == []
    assert looked_at == [0], "nothing begins as they do, so none has room"
    tracker.finish("r0")
    tracker.admit("again", 1, "w0", LoadHeader(16, 0, "", 1 << 62, ""), now_ns=0, keys=[7])
    looked_at.clear()
    assert list(order.candidates("", 0)) == []
    assert looked_at == [0, 7]


def test_a_held_message_is_claimed_at_intervals_for_as_long_as_it_is_held() -> None:
    """Each claim costs this router and the broker a message: of hundreds that are held, most leave before the first."""
    held, claim_ns = made(9), int(CLAIM_S * 1e9)
    first, second, later = (pending(reply=reply) for reply in ("first", "second", ""))
    for each, at_ns in ((first, 1), (second, 2), (later, 3)):
        assert held.hold(each, 1, 1, at_ns)
    assert list(held.claims(claim_ns)) == []
    assert list(held.claims(claim_ns + 1)) == ["first"]
    assert held.take(first.request.id) is first
    assert held.hold(first, 1, 1, claim_ns + 2), "it could not be placed, and is claimed once"
    assert held.take(second.request.id) is second
    assert list(held.claims(2 * claim_ns)) == []
    assert list(held.claims(2 * claim_ns + 1)) == ["first"]
    assert held.hold(second, 1, 1, 2 * claim_ns + 2), "its job was not stored"
    assert held.delivered_again(second.request.id, "again")
    assert list(held.claims(3 * claim_ns + 2)) == ["first", "again"]
    for each in (first, second):
        held.remove(each.request.id)
    assert list(held.claims(9 * claim_ns)) == list(held.claims(99 * claim_ns)) == []


def test_requests_are_counted_by_model_without_looking_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    held = made(9)
    asked = [pending(), pending("other"), pending("other"), pending("other", reply="")]
    for each in asked:
        assert held.hold(each, 1, 1)
    held.remove(asked[1].request.id)
    monkeypatch.setattr(HeldRequests, "__iter__", None)
    assert held.by_model() == HeldByModel((("other", 1), (MODEL, 1)) if MODEL > "other" else ((MODEL, 1), ("other", 1)))
    held.take(asked[0].request.id)
    assert held.by_model().models == (("other", 1),)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.booleans()), max_size=30), st.data())
def test_the_common_beginning_is_the_longest_kept_length_of_a_held_prompt(
    steps: list[tuple[list[int], bool]], data: st.DataObject
) -> None:
    """Against a list of prompts. A key names its whole prefix, as those of blocks do."""
    prefixes, held = HeldPrefixes(), list[list[int]]()
    for bits, leaves in steps:
        if leaves and held:
            prefixes.remove(held.pop(data.draw(st.integers(0, len(held) - 1))))
        held.append(keys_of(bits))
        assert prefixes.add(held[-1]) == sum(length <= len(bits) for length in PREFIX_LENGTHS)
    asked = keys_of(data.draw(st.lists(st.integers(0, 1), max_size=12)))
    common = max((sum(key in each for key in asked) for each in held), default=0)
    assert prefixes.blocks(asked) == max((each for each in PREFIX_LENGTHS if each <= common), default=0)
    for each in held:
        prefixes.remove(each)
    assert not len(prefixes)


def keys_of(bits: list[int]) -> list[int]:
    keys, prefix = [], 1
    for bit in bits:
        prefix = prefix * 2 + bit
        keys.append(prefix)
    return keys


@pytest.mark.parametrize("known_before", [True, False])  # whether there were several cells by then
def test_what_a_held_request_begins_with_is_known_until_it_leaves_however_it_does(known_before: bool) -> None:
    tracker = LoadTracker()
    tracker.put_worker(Registration("w", MODEL, "aggregated", "mock", 1, BLOCK, 100, 4, 4096))
    held = HeldRequests(100 * HELD_BYTES, 256, HeldOrder(tracker, None, lambda _: {}))
    prompt = list(range(1, 5 * BLOCK + 1))

    def asked(deadline_s: float = 60.0) -> PendingRequest:
        return PendingRequest(request(prompt, deadline_s=deadline_s), b"", "reply", 0)

    waiting = [asked(), asked(), asked(-1.0)]
    if known_before:
        assert held.uncomputed(asked()) == len(prompt)
    for each in waiting:
        assert held.hold(each, 1, 1)
    assert held.uncomputed(asked()) == 0, "all five blocks are in what is held"
    held.take(waiting[0].request.id)
    held.remove(waiting[1].request.id)
    assert held.uncomputed(asked()) == 0
    held.expired(waiting[2].request.deadline_ns + 1)
    assert held.uncomputed(asked()) == len(prompt)


def test_a_held_request_fits_where_an_active_one_begins_as_it_does() -> None:
    """95 blocks are filled at most. What was known of its beginning when it was held is not enough."""
    tracker = LoadTracker()
    tracker.put_worker(Registration("w", MODEL, "aggregated", "mock", 1, 16, 100, 8, 4096))
    order: HeldOrder[str] = HeldOrder(tracker, array_decisions(tracker), lambda _: {})

    def admit(name: str, keys: list[int]) -> None:
        tracker.admit(name, 1, "w", LoadHeader(16 * len(keys), 0, "", 1 << 62, ""), now_ns=0, keys=keys)

    def candidates() -> list[str]:
        return [entry.id for entry in order.candidates("", 0)]

    admit("large", [*range(100, 160)])
    admit("small", [*range(200, 210)])
    for name, begin in (("first", 300), ("second", 400), ("alike", 0)):
        held = Held(name, RoutingRequest(MODEL, 480, 10, prompt_blocks=30), [*range(begin, begin + 30)])
        assert order.push(name, held, rank=0, arrived_ns=0, deadline_ns=1 << 62, now_ns=0)
    assert candidates() == [], "22 blocks are left"
    admit("begins", [*range(10)])
    assert candidates() == [], "11 are left, and 20 needed"
    tracker.finish("small")
    assert candidates() == ["alike"], "22 are left"
