"""A worker whose engine hangs keeps its lease: its requests go on at another worker, once, and nothing else does."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.recovery import stalled_requests
from penstock.router.recovery.stalled_requests import Watchdog
from penstock.router.state.attempts import ActiveRequest
from penstock.schemas import fleet
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import TokenItem
from tests.infra.bus.support import eventually
from tests.router.support import Clients, routing
from tests.workers.support import LogClient, answer, engine, request, run_worker

AFTER_S = 10.0


def active(name: str, worker: str = "w", attempt: int = 1, *, echoed: bool = True) -> ActiveRequest:
    return ActiveRequest(name, attempt, worker, 10, 0, 1, 0, echoed=echoed)


# --- the core ---


def test_a_request_is_stalled_once_its_worker_made_no_step_for_long_enough() -> None:
    dog, there = Watchdog(AFTER_S), [active("a")]
    assert [dog.check({"w": (1, 7)}, there, now) for now in (0.0, 1.0, 10.9)] == [[], [], []]
    assert dog.check({"w": (1, 7)}, there, 11.0) == there
    assert dog.stalled_workers() == {"w"}
    assert dog.check({"w": (1, 7)}, there, 12.0) == []
    assert dog.check({"w": (1, 7)}, there, 21.0) == there  # its recovery has failed, then


@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.booleans()), max_size=40))
def test_no_request_is_stalled_while_steps_are_made_or_before_its_time(checks: list[tuple[float, bool]]) -> None:
    dog, now, steps, quiet_since = Watchdog(AFTER_S), 0.0, 0, 0.0
    dog.check({"w": (1, steps)}, [active("a")], now)
    for after, stepped in checks:
        now += after
        steps += stepped
        if stepped:
            quiet_since = now
        found = dog.check({"w": (1, steps)}, [active("a")], now)
        if found:
            assert now - quiet_since >= AFTER_S
            quiet_since = now
        else:
            assert now - quiet_since < AFTER_S + 3.0 + 3.0  # the next check after, at the latest


@pytest.mark.parametrize(
    ("steps", "entry"),
    [
        ({"w": (1, -1)}, active("a")),  # a worker that counts no steps
        ({"w": (1, 7)}, active("a", echoed=False)),  # its job is being stored
        ({"w": (1, 7)}, active("a", "other")),  # at a worker that is not registered
    ],
)
def test_what_cannot_be_judged_is_not_stalled(steps: dict[str, tuple[int, int]], entry: ActiveRequest) -> None:
    dog = Watchdog(AFTER_S)
    assert not any(dog.check(steps, [entry], float(now)) for now in range(60))


def test_a_request_that_came_late_to_an_idle_worker_gets_its_time() -> None:
    dog, count = Watchdog(AFTER_S), {"w": (1, 7)}
    for now in range(100):  # an idle worker makes no steps
        dog.check(count, [], float(now))
    assert not any(dog.check(count, [active("late")], 100.0 + now) for now in range(10))
    assert dog.check(count, [active("late")], 110.0)


def test_a_step_a_new_epoch_or_a_break_of_the_link_starts_over() -> None:
    for event in ((1, 8), (2, 7), None):
        dog = Watchdog(AFTER_S)
        for now in range(10):
            dog.check({"w": (1, 7)}, [active("a")], float(now))
        if event is None:
            dog.forget()
        assert dog.check({"w": event or (1, 7)}, [active("a")], 30.0) == []
        assert dog.stalled_workers() == set()


def test_a_stalled_worker_is_tried_again_after_a_while() -> None:
    dog, there = Watchdog(AFTER_S), [active("a")]
    for now in range(12):
        dog.check({"w": (1, 7)}, there, float(now))
    assert dog.stalled_workers() == {"w"}
    dog.check({"w": (1, 7)}, [], 22.0)
    assert dog.stalled_workers() == set()


# --- on a broker, with engines that hang while their workers renew their leases ---


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalled_requests, "CHECK_S", 0.05)
    monkeypatch.setattr(stalled_requests, "LEAST_S", 0.0)
    monkeypatch.setattr(fleet, "RENEW_S", 0.05)


def streamed_by(log: LogClient, attempt: int) -> list[TokenItem]:
    return [item for item in log.items if item.attempt == attempt and item.tokens]


async def test_another_worker_continues_what_a_hanging_engine_had_begun(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, soon: None
) -> None:
    log = clients.log
    first, second, asked = engine(), engine(), request(max_tokens=12)
    first.hold()
    async with (
        run_worker(broker, pipeline, first) as hanging,
        routing(broker, pipeline, stalled_after_s=1.0) as one,
    ):
        await clients.ask(asked)
        assert (await clients.placed(asked))[0] == hanging.session.id
        first.allow(5)
        await eventually(lambda: len(streamed_by(log, 1)) > 0)
        async with run_worker(broker, pipeline, second) as other:
            worker, job = await clients.placed(asked, attempt=2)
            assert worker == other.session.id
            assert job.decision.reason.startswith("stalled: no step of the engine for 1 s at aggregated worker")
            assert hanging.session.id in job.decision.reason
            done = await log.end(asked)
            assert (done.code, done.attempt, done.worker) == ("", 2, other.session.id)
            assert log.streamed(asked) == answer(asked, 12)
            labels = {"stage": "aggregated"}
            assert one.registry.get_sample_value("penstock_router_stalled_requests_total", labels) == 1.0
            first.resume()  # the kernel returns after all: nothing of it counts
            await eventually(lambda: not hanging.session.requests.running)
            assert log.streamed(asked) == answer(asked, 12)
            assert len(log.ends(asked)) == 1


async def test_a_request_that_stalls_again_fails_with_both_workers_named(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, soon: None
) -> None:
    first, second, asked = engine(), engine(), request(max_tokens=12)
    first.hold()
    second.hold()
    async with (
        run_worker(broker, pipeline, first) as one,
        run_worker(broker, pipeline, second) as two,
        routing(broker, pipeline, stalled_after_s=1.0),
    ):
        await clients.ask(asked)
        done = await clients.log.end(asked)
        assert (done.code, done.attempt) == ("engine_error", 3)
        assert done.message.startswith("stalled: no step of the engine for 1 s at")
        assert one.session.id in done.message
        assert two.session.id in done.message


async def test_slow_steps_and_requests_behind_them_are_no_stall(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, soon: None
) -> None:
    """Each step takes 0.3 s, the whole prompt several, and the second request waits for the first."""
    slow = engine(max_running=1, max_batched_tokens=16)
    slow.hold()
    prompts = [request(range(10 * number, 10 * number + 48), max_tokens=2) for number in range(2)]
    async with (
        run_worker(broker, pipeline, slow) as worker,
        routing(broker, pipeline, stalled_after_s=1.0) as one,
    ):
        await clients.ask(*prompts)
        for _ in range(8):
            await asyncio.sleep(0.3)
            slow.allow(1)
        slow.resume()
        for asked in prompts:
            done = await clients.log.end(asked)
            assert (done.code, done.attempt, done.worker) == ("", 1, worker.session.id)
        assert one.registry.get_sample_value("penstock_router_stalled_requests_total", {"stage": "aggregated"}) == 0
