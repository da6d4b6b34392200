"""What ``no_store`` costs: the load is the same in both halves of a pair, and each bar is judged by itself."""

import json
from collections.abc import Callable
from itertools import islice

import pytest

from penstock.measure.load_generator import HttpTarget
from tests.perf.no_store import MIX, Half, Pair, Task, compare, requests

PLAIN = Half(1000, 0, {"gateway-0": 300.0, "nats": 100.0}, 5.0, 40.0, 8000.0, 14_000.0)
PRIVATE = Half(1000, 0, {"gateway-0": 310.0, "nats": 105.0}, 5.5, 43.0, 4000.0, 10_000.0)


def test_equal_seeds_ask_the_same_but_for_no_store() -> None:
    def bodies(no_store: bool, seed: str = "1") -> list[dict[str, object]]:
        task = Task("http://h", "m", no_store, 1.0, seed, 0.0, 1.0)
        made = list(islice(requests(task, HttpTarget("h", 80)), 40))
        assert {chat for chat, _ in made} == set(MIX)
        return [json.loads(raw.partition(b"\r\n\r\n")[2]) for _, raw in made]

    plain, private = bodies(False), bodies(True)
    assert [body.pop("no_store") for body in private] == [True] * 40
    assert plain == private
    assert plain != bodies(False, "2")


def test_what_costs_little_keeps_all_bars() -> None:
    assert [verdict.kept for verdict in compare([(PLAIN, PRIVATE)] * 3)] == [True] * 5


BREAKS: dict[str, Callable[[], Half]] = {
    "CPU per request +7.5%": lambda: PRIVATE._replace(cpu_us={"gateway-0": 325.0, "nats": 105.0}),
    "TTFT p50 +1.10 ms": lambda: PRIVATE._replace(first_p50_ms=6.1),
    "others' p99 +11.0%": lambda: PRIVATE._replace(others_p99_ms=44.4),
    "3 requests failed": lambda: PRIVATE._replace(failed=1),
    "broker's bytes to disk per request +1.0%": lambda: PRIVATE._replace(written=8080.0),
    "broker's bytes of all write calls per request +1.0%": lambda: PRIVATE._replace(written=0.0, passed=14_140.0),
}


@pytest.mark.parametrize("what", BREAKS)
def test_each_bar_is_judged_by_the_median_of_the_pairs(what: str) -> None:
    broken = BREAKS[what]()
    pairs: list[Pair] = [(PLAIN, broken)] * 3
    (found,) = [verdict.text for verdict in compare(pairs) if not verdict.kept]
    assert what in found
    one_outlier = compare([(PLAIN, PRIVATE), (PLAIN, PRIVATE), (PLAIN, broken._replace(failed=0))])
    assert all(verdict.kept for verdict in one_outlier)
