"""What waits at a late worker is placed again once another one is idle, newest first, and nothing else is."""

import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.recovery import stalled_requests
from penstock.router.recovery.stalled_requests import LATE, LEAST_SAMPLES, Late, find_late
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas import fleet
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import Clients, routing
from tests.workers.support import answer, engine, request, run_worker

S = 1_000_000_000
LEAST_S = 5.0
TOKENS = 64


def tracker_of(*workers: str, **fields: object) -> LoadTracker:
    tracker = LoadTracker()
    for worker in workers:
        known = {"model": "m", "role": "aggregated", "slots": 4, "total_blocks": 1000, "max_model_len": 1000}
        tracker.put_worker(
            Registration(worker=worker, engine="mock", epoch=1, block_size=16, **(known | fields))  # type: ignore[arg-type]
        )
    return tracker


def send(tracker: LoadTracker, name: str, worker: str, at_ns: int, *, echoed: bool = True, attempt: int = 1) -> None:
    load = LoadHeader(TOKENS, 0, "g", 10_000 * S, "standard", 1)
    keys = [hash((name, at)) for at in range(TOKENS // 16)]
    tracker.admit(name, attempt, worker, load, now_ns=at_ns, role="aggregated", keys=keys)
    if echoed:
        tracker.admit(name, attempt, worker, load, now_ns=at_ns, role="aggregated", echoed=True, seq=1)


def computed(tracker: LoadTracker, name: str, worker: str, at_ns: int) -> None:
    tracker.stored((worker, 0), [hash((name, at)) for at in range(TOKENS // 16)], at_ns)


def learnt(tracker: LoadTracker, seconds: float, *workers: str) -> int:
    """Every prompt took so long; the time at which they were computed."""
    at_ns = S
    for number in range(LEAST_SAMPLES):
        for worker in workers:
            send(tracker, f"old-{number}-{worker}", worker, at_ns)
        at_ns += int(seconds * S)
        for worker in workers:
            computed(tracker, f"old-{number}-{worker}", worker, at_ns)
            tracker.finish(f"old-{number}-{worker}")
    return at_ns


def test_while_every_busy_worker_computes_prompts_no_worker_is_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = tracker_of("busy", "idle")
    now_ns = learnt(tracker, 0.1, "busy", "idle")
    for number in range(3):
        send(tracker, f"r{number}", "busy", now_ns)
    monkeypatch.setattr(tracker, "workers", lambda: pytest.fail("a fleet has thousands"))
    now_ns += 60 * S
    computed(tracker, "r0", "busy", now_ns)
    assert find_late(tracker, now_ns + int(LEAST_S * S) - 1, LEAST_S) == []
    monkeypatch.undo()
    assert names(find_late(tracker, now_ns + 600 * S, LEAST_S))


def names(found: list[Late]) -> list[str]:
    return [entry.request for entry, _ in found]


def test_the_newest_request_of_a_late_worker_goes_first_one_for_each_idle_target() -> None:
    tracker = tracker_of("late", "idle")
    now = learnt(tracker, 0.1, "late", "idle")
    for number in range(3):
        send(tracker, f"r{number}", "late", now + number)
    assert names(find_late(tracker, now + int((LEAST_S - 0.1) * S), LEAST_S)) == []
    assert names(find_late(tracker, now + int((LEAST_S + 0.1) * S), LEAST_S))
    for worker in ("idle-2", "idle-3"):
        registration = tracker.worker("idle")
        assert registration is not None
        tracker.put_worker(fleet.Registration(**{**_fields(registration), "worker": worker}))
    assert names(find_late(tracker, now + int((LEAST_S + 0.1) * S), LEAST_S)) == ["r2", "r1", "r0"]


def _fields(registration: Registration) -> dict[str, object]:
    return {name: getattr(registration, name) for name in registration.__struct_fields__}


def test_a_worker_that_computes_prompts_is_not_late_however_many_wait_there() -> None:
    tracker = tracker_of("busy", "idle")
    now = learnt(tracker, 0.1, "busy", "idle")
    for number in range(200):
        send(tracker, f"r{number}", "busy", now)
    for number in range(100):
        now += S
        computed(tracker, f"r{number}", "busy", now)
        assert find_late(tracker, now + S, LEAST_S) == []


def test_prompts_that_usually_take_long_have_their_time() -> None:
    tracker = tracker_of("slow", "idle")
    now = learnt(tracker, 10.0, "slow", "idle")
    send(tracker, "r", "slow", now)
    assert find_late(tracker, now + int((LATE * 10.0 - 1) * S), LEAST_S) == []
    assert names(find_late(tracker, now + int((LATE * 10.0 + 1) * S), LEAST_S)) == ["r"]


@pytest.mark.parametrize("case", ["nothing learnt", "nobody idle", "second attempt", "not stored", "computed", "full"])
def test_what_cannot_gain_or_is_not_known_stays(case: str) -> None:
    tracker = tracker_of("late", "idle", slots=1 if case == "full" else 4)
    now = S if case == "nothing learnt" else learnt(tracker, 0.1, "late", "idle")
    send(tracker, "r", "late", now, echoed=case != "not stored", attempt=2 if case == "second attempt" else 1)
    if case == "nobody idle":
        send(tracker, "other", "idle", now + int(60 * S))
    if case == "computed":
        computed(tracker, "r", "late", now + S)
    if case == "full":
        send(tracker, "done", "idle", now)
        computed(tracker, "done", "idle", now + S)
    assert find_late(tracker, now + 60 * S, LEAST_S) == []


async def test_an_idle_worker_answers_what_a_late_one_has_not_begun(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalled_requests, "CHECK_S", 0.05)
    monkeypatch.setattr(stalled_requests, "LEAST_SAMPLES", 1)
    monkeypatch.setattr(fleet, "RENEW_S", 0.05)
    log = clients.log
    first, second = engine(), engine()
    async with routing(broker, pipeline, resteer_after_s=0.5) as one, run_worker(broker, pipeline, first) as late:
        before = request([7] * 40, max_tokens=8)
        first.hold()
        await clients.ask(before)
        await clients.placed(before)
        first.allow(2)  # its prompt is computed, and it goes on
        await eventually(lambda: one.router.cluster.tracker.loads.learned.samples)
        first.resume()
        await log.end(before)
        first.hold()
        asked = request([9] * 40, max_tokens=12)
        await clients.ask(asked)
        assert (await clients.placed(asked))[0] == late.session.id
        async with run_worker(broker, pipeline, second) as idle:
            worker, job = await clients.placed(asked, attempt=2)
            assert worker == idle.session.id
            assert job.decision.reason.startswith(f"resteered: worker {late.session.id} has computed no prompt")
            done = await log.end(asked)
            assert (done.code, done.attempt, done.worker) == ("", 2, idle.session.id)
            assert (late.session.id, asked.id) in [(where, each.request) for where, each in await clients.revoked()]
            first.resume()  # nothing of the first attempt counts
            await eventually(lambda: not late.session.requests.running)
            assert log.streamed(asked) == answer(asked, 12)
            assert len(log.ends(asked)) == 1
