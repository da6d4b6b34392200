from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engines.trtllm.engine_health import ANSWER_S, CHECK_S, LOOP_LATE_S, POLL_LATE_S, QUIET_S, Liveness


def checked(liveness: Liveness, until: float, now: float = 0.0) -> str:
    """The first problem in checks on time."""
    while now < until:
        now = min(now + CHECK_S, until)
        if found := liveness.problem(now):
            return found
    return ""


def alive(now: float, liveness: Liveness) -> Liveness:
    liveness.polled(now)
    liveness.looped(now)
    return liveness


def test_a_poll_that_does_not_return_is_a_problem() -> None:
    liveness = alive(0.0, Liveness(0.0))
    liveness.looped(POLL_LATE_S + 1)
    assert checked(liveness, POLL_LATE_S) == ""
    assert "poll" in checked(liveness, POLL_LATE_S + 1, POLL_LATE_S)
    liveness.polled(POLL_LATE_S + 1)
    assert liveness.problem(POLL_LATE_S + 1) == ""


def test_so_is_a_call_that_blocks_the_loop() -> None:
    liveness = Liveness(0.0)
    liveness.polled(LOOP_LATE_S + 1)
    assert "submits" in checked(liveness, LOOP_LATE_S + 1)


def test_a_process_without_processor_is_not_taken_for_a_dead_engine() -> None:
    """Stopped, or starved: all its threads come late alike, and the check may be the first."""
    liveness = Liveness(0.0)
    for now in (1000.0, 1020.0, 1040.0):
        assert liveness.problem(now) == ""
        liveness.polled(now)
        liveness.looped(now)
    assert "poll" in checked(liveness, 1040 + POLL_LATE_S + 1, 1040.0)


def test_a_token_is_asked_for_where_none_came_for_a_while_and_once() -> None:
    liveness = Liveness(0.0)
    assert not liveness.wants_token(QUIET_S - 1)
    liveness.generated(10.0)
    assert not liveness.wants_token(QUIET_S + 9)
    assert liveness.wants_token(QUIET_S + 10)
    liveness.asked(QUIET_S + 10)
    assert not liveness.wants_token(3 * QUIET_S)
    liveness.answered(3 * QUIET_S)
    assert not liveness.wants_token(3 * QUIET_S + 1)
    assert liveness.wants_token(4 * QUIET_S)


def test_a_token_that_does_not_come_is_a_problem_unless_others_do() -> None:
    liveness = Liveness(0.0)
    at = QUIET_S
    liveness.generated(0.0)
    checked(alive(at, liveness), at, at - CHECK_S)

    def problem(until: float) -> str:
        found = ""
        while not found and liveness.checked < until:
            now = liveness.checked + CHECK_S
            found = alive(now, liveness).problem(now)
        return found

    liveness.asked(liveness.checked)
    asked = liveness.checked
    assert problem(asked + ANSWER_S) == ""
    liveness.generated(asked + ANSWER_S)  # a queue in front of it moves on
    assert problem(asked + 2 * ANSWER_S) == ""
    assert "one token" in problem(asked + 2 * ANSWER_S + 1)


@given(st.lists(st.tuples(st.sampled_from(["polled", "looped", "generated", "asked", "answered"]), st.floats(0, 9))))
def test_an_engine_that_shows_all_signs_in_time_is_never_broken(steps: list[tuple[str, float]]) -> None:
    liveness, now = Liveness(0.0), 0.0
    for name, wait in steps:
        now += wait
        alive(now, liveness)
        getattr(liveness, name)(now)
        liveness.generated(now)
        assert liveness.problem(now) == ""
