"""When `penstock up` starts one more gateway, or has one leave, and what it knows of CPU time."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.launch import gateways
from penstock.launch.gateways import BUSY, BUSY_S, SPARE_S, CpuMeter, GatewayRange, GatewayScaler, gateway_range
from penstock.launch.groups import PlanError

LOOKS = int(3 * SPARE_S)  # one a second


@pytest.mark.parametrize(
    ("asked", "cores", "workers", "expected"),
    [
        ("auto", 16, 4, (8, 8, 16)),
        ("auto", 16, 1, (2, 2, 16)),
        ("auto", 2, 4, (1, 1, 2)),
        ("auto", 1, 4, (1, 1, 1)),
        ("0", 8, 4, (4, 4, 8)),
        ("3", 16, 4, (3, 3, 3)),
        ("2-6", 16, 4, (6, 2, 6)),
        ("2-6", 8, 4, (4, 2, 6)),
        ("2-6", 1, 1, (2, 2, 6)),
        ("4-4", 16, 1, (4, 4, 4)),
    ],
)
def test_the_range_of_gateways(asked: str, cores: int, workers: int, expected: tuple[int, int, int]) -> None:
    assert gateway_range(asked, cores, workers) == expected


def test_more_at_least_than_at_most_is_refused_with_the_order() -> None:
    with pytest.raises(PlanError, match="--gateways 6-2: the fewest come first, such as 2-6"):
        gateway_range("6-2", 8, 1)


def run(limits: GatewayRange, cores: float, loads: list[tuple[float, float]]) -> list[int]:
    """Numbers of gateways, one for each second.

    Args:
        loads: for each second, what gateways would use if there were enough of them, and what everything else uses,
            both in cores.
    """
    scaler, number, numbers = GatewayScaler(limits), limits.first, []
    for second, (wanted, others) in enumerate(loads):
        used = min(wanted, number, cores)
        change = scaler.look(float(second), [used / number] * number, max(0.0, cores - used - others))
        if change is not None:
            assert abs(change.gateways - number) == 1
            assert change.why
            number = change.gateways
        numbers.append(number)
    return numbers


ranges = st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6)).map(
    lambda drawn: GatewayRange(drawn[0] + min(drawn[1], drawn[2]), drawn[0], drawn[0] + drawn[1])
)
load = st.tuples(st.floats(0, 12), st.floats(0, 12))


@given(ranges, st.floats(1, 16), st.lists(st.tuples(load, st.integers(1, 90)), max_size=8))
def test_numbers_stay_within_the_range_whatever_the_load(
    limits: GatewayRange, cores: float, parts: list[tuple[tuple[float, float], int]]
) -> None:
    loads = [part for part, seconds in parts for _ in range(seconds)]
    assert all(limits.fewest <= number <= limits.most for number in run(limits, cores, loads))


@given(ranges, st.floats(1, 16), load)
def test_under_a_steady_load_the_number_goes_one_way_and_then_stays(
    limits: GatewayRange, cores: float, steady: tuple[float, float]
) -> None:
    numbers = run(limits, cores, [steady] * (8 * int(SPARE_S)))
    steps = {after - before for before, after in itertools.pairwise(numbers)} - {0}
    assert len(steps) <= 1
    assert len(set(numbers[-int(1.5 * SPARE_S) :])) == 1


def test_it_grows_after_some_busy_seconds_and_only_while_cores_are_idle() -> None:
    limits = GatewayRange(1, 1, 4)
    assert run(limits, 8, [(8, 1)] * 20)[: int(BUSY_S) + 1] == [1] * int(BUSY_S) + [2]
    assert run(limits, 8, [(8, 1)] * 20)[-1] == 4
    assert run(limits, 2, [(8, 0.6)] * LOOKS)[-1] == 1  # what is idle is not enough
    assert run(limits, 8, [(BUSY - 0.01, 1)] * LOOKS)[-1] == 1
    assert run(limits, 8, [(8, 1), (8, 1), (8, 1), (0.2, 1)] * 50)[-1] == 1  # never busy for long


def test_it_shrinks_one_by_one_after_a_minute_to_the_floor() -> None:
    numbers = run(GatewayRange(4, 2, 4), 8, [(0.4, 1)] * LOOKS)
    assert numbers.index(3) == int(SPARE_S)
    assert (numbers.index(2) - numbers.index(3), numbers[-1]) == (int(SPARE_S) + 1, 2)
    assert run(GatewayRange(4, 2, 4), 8, [(1.6, 1)] * LOOKS)[-1] == 4  # three would be more than half busy


def test_what_was_seen_before_a_gateway_came_or_went_does_not_count() -> None:
    scaler = GatewayScaler(GatewayRange(2, 1, 4))
    for second in range(int(BUSY_S)):
        assert scaler.look(float(second), [1.0, 1.0], 4.0) is None
    scaler.forget()
    assert scaler.look(BUSY_S, [1.0, 1.0], 4.0) is None
    for second in range(int(BUSY_S)):
        assert scaler.look(10.0 + second, [1.0, 1.0, 1.0], 4.0) is None
    assert scaler.look(10.0 + BUSY_S, [1.0, 1.0], 4.0) is None


def test_one_gateway_that_idles_among_full_ones_is_no_reason_for_another() -> None:
    scaler = GatewayScaler(GatewayRange(3, 3, 6))
    assert not any(scaler.look(float(second), [1.0, 1.0, 0.1], 4.0) for second in range(60))


# -- CPU time ---------------------------------------------------------------------------------------------------------


def fake_machine(folder: Path, *, used: int, idle: int) -> None:
    (folder / "7").mkdir(parents=True, exist_ok=True)
    (folder / "7" / "stat").write_text("7 (a b) c) S " + "0 " * 10 + f"{used} 0 0 0\n")
    cores = sorted(os.sched_getaffinity(0))
    lines = [f"cpu{core} 5 0 5 {idle} 0 0 0 0 0 0" for core in cores] + ["cpu999 5 0 5 999999999 0 0 0 0 0 0"]
    (folder / "stat").write_text("cpu 1 1 1 1\n" + "\n".join(lines) + "\nctxt 1\n")


@pytest.mark.parametrize(("limit", "expected"), [(float("inf"), "all"), (2.0, 0.5), (1.0, 0.0)])
def test_idle_are_only_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, expected: object
) -> None:
    spent = iter((0.0, 3.0, 3.0))
    monkeypatch.setattr(gateways, "cgroup_cpu", lambda: (limit, next(spent)))
    meter, ticks = CpuMeter(tmp_path), os.sysconf("SC_CLK_TCK")
    fake_machine(tmp_path, used=0, idle=0)
    assert meter.look(100.0, {"one": 7}) is None
    fake_machine(tmp_path, used=ticks, idle=2 * ticks)
    seen = meter.look(102.0, {"one": 7})
    assert seen is not None
    assert seen.shares == {"one": 0.5}
    assert seen.idle_cores == (len(os.sched_getaffinity(0)) if expected == "all" else expected)
    assert meter.look(103.0, {"one": 7, "two": 8}) is None


def test_a_process_is_known_from_its_second_look_on() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        meter, spun = CpuMeter(), 0.0
        assert meter.look(time.monotonic(), {"spinning": spinning.pid}) is None
        while not spun:  # it gets a core sooner or later
            used = meter.look(time.monotonic(), {"spinning": spinning.pid})
            assert used is not None
            spun += used.shares["spinning"]
        assert meter.look(time.monotonic(), {"spinning": spinning.pid, "other": os.getpid()}) is None
        assert meter.look(time.monotonic(), {"spinning": None}) is None
    finally:
        spinning.kill()
        spinning.wait()
