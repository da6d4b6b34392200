"""What a router keeps of the requests of other owners, and folds when it takes over."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.bus.direct_get import Entry
from penstock.router.state.attempts import ActiveRequest, EndedAttempts, UnownedRequests, read_sent
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import LoadHeader, load_header
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID

WORKERS = ("a", "b")
REQUESTS = ("r0", "r1", "r2")
SECOND = 1_000_000_000
steps = st.lists(
    st.one_of(
        st.tuples(st.just("sent"), st.sampled_from(REQUESTS), st.integers(1, 3), st.sampled_from(WORKERS)),
        st.tuples(st.just("done"), st.sampled_from(REQUESTS), st.just(0), st.just("")),
    ),
    max_size=20,
)


def sent(seq: int, request: str, attempt: int, worker: str) -> Entry:
    load = load_header(*LoadHeader(1000 + seq, 0, "gateway", 1 << 62, "standard", 1))
    return Entry(
        f"ps.work.aggregated.{worker}", seq, b"", {HEADER_MSG_ID: f"{request}:{attempt}", HEADER_LOAD: load}, seq - 1
    )


def tracker() -> LoadTracker:
    made = LoadTracker()
    for worker in WORKERS:
        made.put_worker(Registration(worker, "m", "aggregated", "mock", 1, 32, 512, 8, 4096))
    return made


def fold(into: LoadTracker, entry: Entry, read_ns: int) -> None:
    found = read_sent(entry)
    assert found is not None
    into.admit(
        found.request, found.attempt, found.worker, found.load, now_ns=read_ns, role=found.role, echoed=True,
        seq=entry.seq,
    )  # fmt: skip


def seen(of: LoadTracker) -> tuple[list[ActiveRequest], list[bool], list[int]]:
    active = sorted(of.active(), key=lambda each: each.request)
    return active, [of.ended(name) for name in REQUESTS], [of.load((w, 0), 0).sequences for w in WORKERS]


@given(steps, st.integers(0, 20))
def test_who_takes_over_has_folded_the_same_as_who_folded_all_the_time(
    taken: list[tuple[str, str, int, str]], at: int
) -> None:
    """Whenever it takes over; it folds everything from then on."""
    always, later, kept = tracker(), tracker(), UnownedRequests()
    for seq, (what, request, attempt, worker) in enumerate(taken, 1):
        if seq == at:
            for entry, read_ns in kept.take():
                fold(later, entry, read_ns)
        if what == "sent":
            entry = sent(seq, request, attempt, worker)
            fold(always, entry, seq * SECOND)
            if seq < at:
                kept.add(request, entry, seq * SECOND)
            else:
                fold(later, entry, seq * SECOND)
            continue
        always.finish(request)
        if kept.end(request):
            later.finish(request)
        else:
            later.finish(request)
    for entry, read_ns in kept.take():
        fold(later, entry, read_ns)
    assert seen(later) == seen(always)


def test_messages_of_a_request_come_in_the_order_of_the_log_and_once() -> None:
    kept = UnownedRequests()
    entries = [sent(3, "r1", 1, "a"), sent(4, "r0", 1, "a"), sent(7, "r1", 2, "b")]
    for entry in entries:
        kept.add(entry.headers[HEADER_MSG_ID].partition(":")[0], entry, entry.seq)
    assert [each.entry.seq for each in kept.take()] == [3, 7, 4], "of a request together, in order"
    assert list(kept.take()) == []


def test_it_is_full_at_its_limit_and_has_room_again_when_a_request_ends() -> None:
    kept = UnownedRequests(most=3)
    for seq, request in enumerate(("r0", "r0", "r1"), 1):
        assert not kept.full
        kept.add(request, sent(seq, request, seq, "a"), 0)
    assert kept.full
    assert kept.end("r0")
    assert not kept.end("r0")
    assert not kept.full
    assert len(kept) == 1


def of_earlier_build(entry: Entry, blocks: int) -> Entry:
    """With the names of the prompt's blocks, which routers of earlier builds send each other."""
    return msgspec.structs.replace(entry, headers={**entry.headers, "Penstock-Keys": "AQAAAAAAAAA=" * blocks})


def test_what_an_earlier_build_says_of_a_prompts_blocks_changes_nothing() -> None:
    plain, named = sent(1, "r0", 1, "a"), of_earlier_build(sent(1, "r0", 1, "a"), 1)
    assert read_sent(named) == read_sent(plain) is not None
    plainly, later = tracker(), tracker()
    fold(plainly, plain, SECOND)
    fold(later, named, SECOND)
    assert seen(later) == seen(plainly)


def test_long_headers_of_an_earlier_build_fill_it_sooner() -> None:
    kept = UnownedRequests(most_bytes=100_000)
    long = of_earlier_build(sent(1, "r0", 1, "a"), 5_000)
    kept.add("r0", long, 0)
    assert not kept.full
    kept.add("r1", long, 0)
    assert kept.full
    assert kept.end("r0")
    assert not kept.full


def test_what_was_not_folded_yet_is_left_to_a_takeover_that_comes_in_between() -> None:
    """A snapshot folds with pauses."""
    kept = UnownedRequests()
    for seq in range(3):
        kept.add(f"r{seq}", sent(seq + 1, f"r{seq}", 1, "a"), 0)
    folding = kept.take()
    assert next(folding).entry.seq == 1
    assert kept.end("r1"), "it ended meanwhile"
    assert [each.entry.seq for each in kept.take()] == [3]
    assert list(folding) == []
    assert not kept.full
    assert len(kept) == 0


def test_the_jobs_themselves_are_not_kept() -> None:
    """After a reconnect the log is read from the stream, with prompts of up to megabytes."""
    kept = UnownedRequests()
    kept.add("r0", msgspec.structs.replace(sent(1, "r0", 1, "a"), data=bytes(1 << 20)), 0)
    assert [each.entry.data for each in kept.take()] == [b""]


def test_a_snapshot_has_the_ended_attempts_as_they_were_when_it_began() -> None:
    """What ends between two of its parts is read from the log again: 65,536 are not looked up once more for it."""
    ended = EndedAttempts()
    for request in "abcd":
        ended.close(request, 1)
    parts = ended.parts(2)
    assert next(parts) == (("a", 1), ("b", 1))
    ended.close("c", 2)
    ended.close("e", 1)
    assert list(parts) == [(("c", 1), ("d", 1))]
