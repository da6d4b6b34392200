"""A recorded request and its replay: what counts as a difference, and where it is."""

import io
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.log_tools.export.recording import RecordedRun, Recording
from penstock.log_tools.replay.comparison import CONTEXT, compare, what_changed
from penstock.log_tools.replay.report import Replayed, make_report, show
from penstock.log_tools.sources.log_line import LogLine
from penstock.schemas.done import Done, MadeWith, Outcome, Timings, Usage
from penstock.schemas.jobs import Stage
from penstock.schemas.tokens import Logprob, TokenBatch, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.traces import samples
from tests.properties import examples

MS = 1_000_000


def run(tokens: list[int], reason: str = "stop", *, code: str = "", logprobs: tuple[Logprob, ...] = ()) -> RecordedRun:
    choices = (Outcome(pack_tokens(tokens), reason, logprobs=logprobs),)
    return RecordedRun("r", samples.request(), Done("r", "tiny", 1, choices=choices, code=code), stored={})


@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=60))
@examples(300)
def test_the_first_differing_token_is_found(one: list[int], other: list[int]) -> None:
    found = compare(run(one), run(other))
    wanted = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if wanted is None and len(one) != len(other):
        wanted = min(len(one), len(other))
    assert (found.difference.position if found.difference else None) == wanted
    assert found.outcome == ("same" if wanted is None else "tokens")
    if found.difference:
        assert found.difference.recorded == tuple(one[wanted:][:CONTEXT])
        assert found.difference.before == (*range(100), *one[:wanted])[-CONTEXT:]


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        (run([1, 2]), run([1, 2], "length"), "finish"),
        (run([1, 2]), run([1], "error", code="engine_error"), "error"),
        (run([1, 2]), RecordedRun("", stored={}), "unanswered"),
        (run([1], "error", code="worker_lost"), run([1, 2, 3]), "recovered"),
        (run([1], "cancelled", code="cancelled"), run([7, 2, 3]), "tokens"),
        (run([], "error", code="deadline_exceeded"), run([1], "error", code="deadline_exceeded"), "same"),
    ],
)
def test_endings_and_failures_are_told_apart(old: RecordedRun, new: RecordedRun, outcome: str) -> None:
    assert compare(old, new).outcome == outcome


def test_the_margin_is_that_of_the_first_difference() -> None:
    near, far = Logprob(-0.6, ((1, -0.6), (2, -0.61)), 1), Logprob(-0.1, ((9, -0.1), (8, -3.0)), 1)
    found = compare(run([9, 1], logprobs=(far, near)), run([9, 2]))
    assert found.difference is not None
    assert found.difference.margin == pytest.approx(0.01)
    assert found.difference.margin_of == "recorded"
    gap = compare(run([9, 1], logprobs=(far, near)), run([9, 1], logprobs=(far, Logprob(-0.5))))
    assert (gap.outcome, gap.logprob_gap) == ("same", pytest.approx(0.1))


def line(stream: str, message: Any, at_ms: int = 0, subject: str = "ps.x") -> LogLine:
    time = f"2026-11-22T09:30:00.{at_ms * MS:09d}Z"
    return LogLine(stream, 1, time, subject, {}, encode(message))


def test_a_recording_knows_times_and_routes_whatever_the_order_of_its_streams() -> None:
    request = samples.request()
    job = samples.job(1, Stage("prefill", "p-1"), Stage("decode", "d-1"), attempt=2)
    first = samples.job(0, Stage("aggregated", "w-0"))
    import msgspec

    lines = [
        line("REQUESTS", request),
        *(line("WORK", msgspec.structs.replace(each, request=msgspec.Raw(encode(request)))) for each in (first, job)),
        line("TOKENS", TokenBatch("w", 1, 0, (TokenItem(request.id, 1, 0, 0, pack_tokens([1])),)), 10),
        line("TOKENS", TokenBatch("w", 1, 1, (TokenItem(request.id, 1, 0, 1, pack_tokens([2, 3])),)), 30),
        line("DONE", Done(request.id, "tiny", 2, "d-1", usage=Usage(100, 3, 64),
                          timings=Timings(samples.T0, 0, 0, samples.at(5), samples.at(40)))),
        LogLine("DONE", 9, "", "ps.x", {}, b"damaged"),
    ]  # fmt: skip
    for seed in range(5):
        random.Random(seed).shuffle(lines)
        recording = Recording()
        for record in lines:
            recording.add(record)
        run = recording.runs[request.id]
        assert (run.attempts, run.route, run.cached_tokens) == (2, ("p-1", "d-1"), 64)
        assert (run.ttft_ms, run.e2e_ms, list(run.itl_ms())) == (5.0, 40.0, [10.0, 10.0])


def test_what_changed_is_said_before_any_token() -> None:
    old, new = run([1, 2]), run([1, 3])
    assert what_changed(old, new) == []
    assert new.request is not None
    sampling = msgspec.structs.replace(new.request.sampling, temperature=0.25, logprobs=2)
    new.request = msgspec.structs.replace(new.request, sampling=sampling)
    old.revision, new.revision = "abc", "def"
    assert old.done is not None
    assert new.done is not None
    old.done = msgspec.structs.replace(old.done, timings=Timings(made_with=MadeWith("abc", "mock", "penstock 1")))
    new.done = msgspec.structs.replace(new.done, timings=Timings(made_with=MadeWith("def", "mock", "penstock 2")))
    assert what_changed(old, new) == [
        "the revision changed from abc to def",
        "the build changed from penstock 1 to penstock 2",
        f"temperature differs: {old.request.sampling.temperature if old.request else None}, now 0.25",
    ]
    report = make_report(
        Replayed("", [(old, new)], [compare(old, new)], 1.0), source="", settings={}, skipped={}, tolerance=0.01
    )
    out = io.StringIO()
    show(report, Console(file=out, width=120))
    assert out.getvalue().startswith("the revision changed from abc to def\n")
