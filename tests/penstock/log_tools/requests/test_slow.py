"""Where the slow requests differ from the others."""

import random
from collections.abc import Callable

import pytest

from penstock.log_tools.requests.slow import (
    Difference,
    GroupComparison,
    Samples,
    Slow,
    comparison_lines,
    itl_ms,
    report,
)
from penstock.schemas.summary import RequestSummary

MS = 10**6
BEGIN_NS = 1_800_000_000 * 10**9


def request(number: int, took_ms: float, worker: str = "w-0", prompt: int = 100, **more: object) -> RequestSummary:
    created = BEGIN_NS + number * 100 * MS
    first, ended = created + 10 * MS, created + int(took_ms * MS)
    times = {"created_ns": created, "routed_ns": created + MS, "first_token_ns": first, "ended_ns": ended}
    counts = {"prompt_tokens": prompt, "completion_tokens": 10, "attempts": 1, "priority": "standard"}
    fields = {"id": f"r-{number}", "model": "tiny", "state": "done", "worker": worker} | times | counts | more
    return RequestSummary(**fields)  # type: ignore[arg-type]


def compared(
    make: Callable[[int, random.Random], RequestSummary], count: int = 2000, measure: str = "duration"
) -> Slow:
    rng, samples = random.Random(1), Samples(measure)
    for number in range(count):
        samples.add(make(number, rng))
    return samples.slowest(5)


def named(slow: Slow, name: str) -> Difference:
    (found,) = [each for each in slow.differences if each.property == name]
    return found


def test_the_worker_that_is_slow_comes_first_with_its_share_among_the_slow_and_the_others() -> None:
    def make(number: int, rng: random.Random) -> RequestSummary:
        worker = f"w-{rng.randrange(4)}"
        slow = worker == "w-2" and rng.random() < 0.18
        return request(number, rng.uniform(500, 900) if slow else rng.uniform(20, 60), worker, rng.randrange(50, 500))

    slow = compared(make)
    assert [each.property for each in slow.differences][:1] == ["worker"]
    worst = named(slow, "worker").groups[0]
    assert worst.value == "w-2"
    assert worst.slow_share > 0.8
    assert worst.others_share < 0.3
    assert 0.2 < named(slow, "worker").explains < 1
    assert slow.slow == 100
    assert slow.from_ms > slow.others_median_ms
    assert {each.property for each in slow.differences} == {"worker"}


def test_revisions_are_compared_by_what_their_requests_took() -> None:
    comparison = GroupComparison("revision")
    for number in range(300):
        new = number % 3 == 0
        failed = {"state": "failed", "code": "engine_error"} if number % 30 == 0 else {}
        comparison.add(request(number, 200 if new else 100, revision="new" if new else "old", **failed))
    comparison.add(request(300, 100, revision="old", state="cancelled", code="cancelled"))
    old, new_one = comparison.groups()
    assert (old.value, old.requests, old.failed, old.duration_p50_ms, old.ttft_p99_ms) == ("old", 201, 0, 100, 10)
    assert (new_one.value, new_one.requests, new_one.failed, new_one.duration_p99_ms) == ("new", 100, 10, 200)
    assert new_one.itl_p50_ms == pytest.approx(190 / 9)
    head, *rows = comparison_lines("revision", [old, new_one])
    assert head.split() == ["revision", "requests", "failed", "ttft", "p50", "p99", "itl", "p50", "duration", "p50",
                            "p99", "tokens"]  # fmt: skip
    assert rows[1].split()[:3] == ["new", "100", "10"]
    assert len({len(line) for line in (head, *rows)}) == 1, "columns are aligned"


def test_a_router_whose_requests_are_slow_is_found() -> None:
    def make(number: int, rng: random.Random) -> RequestSummary:
        router = f"router-{rng.randrange(3)}-5e6f7a8b"
        slow = router.startswith("router-1") and rng.random() < 0.15
        return request(number, rng.uniform(500, 900) if slow else rng.uniform(20, 60), router=router)

    (difference,) = compared(make).differences
    assert (difference.property, difference.groups[0].value) == ("router", "router-1-5e6f7a8b")


def test_long_prompts_few_cached_tokens_and_a_bad_minute_are_found() -> None:
    def make(number: int, rng: random.Random) -> RequestSummary:
        prompt = rng.randrange(10, 4000)
        cached = rng.choice((0, prompt // 2))
        stalled = 1000 <= number < 1040
        took = (prompt - cached) * 0.1 + rng.uniform(0, 20) + 1000 * stalled
        return request(number, took, prompt=prompt, cached_tokens=cached)

    slow = compared(make, 4000)
    assert {"prompt", "computed prompt", "cached share", "accepted"} <= {each.property for each in slow.differences}
    assert named(slow, "prompt").groups[0].value.endswith("tokens")
    assert named(slow, "cached share").groups[0].value.startswith("0")
    assert named(slow, "accepted").groups[0].slow >= 20


def test_where_chance_alone_decides_nothing_is_named() -> None:
    def make(number: int, rng: random.Random) -> RequestSummary:
        users = {"user": f"user-{rng.randrange(500)}", "tenant": rng.choice("ab")}
        return request(number, 20 + rng.random() * 100, f"w-{rng.randrange(8)}", rng.randrange(1000), **users)

    slow = compared(make, 5000)
    assert slow.differences == ()
    assert list(report(slow, 80))[-1] == "nothing that is recorded sets them apart"


def test_a_property_that_says_all_explains_all() -> None:
    slow = compared(lambda number, rng: request(number, 1000 if number % 20 == 0 else 50, f"w-{number % 20 == 0}"))
    assert named(slow, "worker").explains == pytest.approx(1, abs=0.01)
    assert slow.examples[0] == "r-0"


def test_the_time_between_tokens_and_to_the_first_one_are_compared_too() -> None:
    def make(number: int, rng: random.Random) -> RequestSummary:
        return request(number, 100 + 900 * (number % 20 == 0), f"w-{number % 20 == 0}")

    slow = compared(make, measure="itl")
    assert slow.from_ms == itl_ms(make(0, random.Random(1)))
    assert named(slow, "worker").groups[0].value == "w-True"
    with pytest.raises(ValueError, match="all 2000 requests took 10 ms"):
        compared(make, measure="ttft")


def test_a_heat_map_counts_each_request_once_where_it_was_accepted_and_how_long_it_took() -> None:
    samples = Samples("duration")
    rng = random.Random(1)
    took = [10 ** rng.uniform(1.1, 3.5) for _ in range(500)]
    for number, each in enumerate(took):
        samples.add(request(number, each))
    begins, step, edges, counts = samples.heat_map()
    assert sum(map(sum, counts)) == 500
    assert edges == [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0]
    assert (len(counts), step, len(begins)) == (len(edges), 1, 50)
    assert [sum(row) for row in counts] == [
        sum(low <= each < high for each in took) for low, high in zip(edges, [*edges[1:], 1e9], strict=True)
    ]
    assert [sum(row[column] for row in counts) for column in range(50)] == [10] * 50


def test_too_few_requests_are_refused_with_the_number_that_is_needed() -> None:
    with pytest.raises(ValueError, match="the slowest 5 % are 15: at least 20 are needed"):
        compared(lambda number, rng: request(number, 20 + rng.random()), 300)


def test_the_report_fits_the_terminal_and_shows_the_cause_first() -> None:
    slow = compared(lambda number, rng: request(number, 10 + 90 * (number % 20 == 0), f"worker-{number % 20 == 0}" * 9))
    lines = list(report(slow, 90))
    assert lines[0].startswith("the slowest 5 % of 2,000 requests took 100.0 ms or more: 100")
    table = lines[3:-2]
    assert table[0].split()[:3] == ["explains", "property", "value"]
    assert table[1].split()[:2] == ["100%", "worker"]
    assert max(map(len, table)) <= 90
