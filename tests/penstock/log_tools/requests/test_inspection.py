"""What is shown of a request: every event in order, whatever happened; as text, as JSON and as a page."""

import asyncio
import io
import itertools
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.infra.bus.direct_get import format_time, read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.requests.inspect import as_json, run, show
from penstock.log_tools.requests.inspection import MOST_LINES, InspectedEvent, Inspection, inspect, line_of, token_lines
from penstock.log_tools.requests.inspection_page import page
from penstock.log_tools.timeline.read import read_timeline
from penstock.log_tools.timeline.request_timeline import RequestTimeline, TokensStored
from penstock.schemas.done import Done, Outcome, Timings, Usage, request_of, without_content
from penstock.schemas.jobs import DecisionInputs, LowerTiers, Stage
from penstock.schemas.requests import new_request_id
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import ANOTHER_MODEL, WHOLE_REQUEST, Finish, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.requests.support import accept, assign, end, stream
from tests.penstock.log_tools.traces import samples
from tests.router.support import Clients, routing
from tests.workers.support import answer, engine, log_client, request, run_worker

S = 1_000_000_000
STORED_MS = 10_000  # an end by which all that a test stores is stored, however slow the machine


def shown(found: Inspection, width: int = 200, *, colours: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colours, color_system="truecolor" if colours else None)
    show(found, console, now_ns=samples.at(0))
    return out.getvalue()


def batch(at_ns: int, first: int, count: int, finish: str = "", *, attempt: int = 1, choice: int = 0) -> TokensStored:
    return TokensStored(at_ns, attempt, "w-1", choice, first, count, finish)


# --- token batches as lines ---


@given(st.lists(st.tuples(st.integers(0, 20 * S), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=200))
def test_no_token_is_lost_between_the_lines_and_there_are_few(steps: list[tuple[int, int, int]]) -> None:
    at, batches = 0, []
    for after, count, choice in steps:
        at += after
        batches.append(batch(at, 0, count, choice=choice))
    lines = token_lines(batches)
    counts = [int(word) for line in lines for word in line.text.partition(": ")[2].split()[:1] if word.isdigit()]
    counts += [int(line.text.split()[0]) for line in lines if ": " not in line.text and line.text[0].isdigit()]
    assert sum(counts) == sum(count for _, count, _ in steps)
    assert len(lines) <= 2 * MOST_LINES + 2
    assert [line.at_ns for line in lines] == sorted(line.at_ns for line in lines)


def test_the_first_token_has_a_line_and_the_rest_have_rates_and_ends() -> None:
    batches = [batch(S, 0, 1), *(batch(S + n * S // 10, 1 + 10 * (n - 1), 10) for n in range(1, 101))]
    lines = [line.text for line in token_lines([*batches, batch(12 * S, 1001, 5, "stop")])]
    assert lines[0] == "choice 0: 1 token from 0"
    assert lines[1].startswith("choice 0: 100 tokens from 1 in 1000 ms (100/s)")
    assert lines[-1].endswith(", stop")


def test_what_came_too_late_is_one_line() -> None:
    fence = TokensStored(2 * S, 2, "router-1", WHOLE_REQUEST, 0, 0)
    late = [batch(3 * S + number, number, 1) for number in range(68)]
    assert [line.text for line in token_lines([fence, *late])][1:] == ["68 tokens in 68 batches, void: too late"]


def test_what_a_fence_made_void_is_named_as_such() -> None:
    fence = TokensStored(2 * S, 2, "router-1", WHOLE_REQUEST, 0, 0)
    lines = [line.text for line in token_lines([batch(S, 0, 3), fence, batch(3 * S, 3, 4)])]
    assert lines == ["choice 0: 3 tokens from 0", "attempt 1 ends here", "4 tokens, void: too late"]


def test_an_attempt_of_another_model_says_so() -> None:
    told = TokensStored(2 * S, 2, "w-2", ANOTHER_MODEL, 1, 0)
    lines = [line.text for line in token_lines([told, batch(3 * S, 0, 4, attempt=2)])]
    assert lines == ["fallback 1 runs it", "choice 0: 4 tokens from 0"]


# --- the whole ---


def test_every_stage_of_a_disaggregated_request_is_an_event_and_a_phase() -> None:
    timeline = samples.split(compact=False)
    for worker, first, at in (("p-1", 0, 20), ("d-1", 1, 32), ("d-1", 2, 45)):
        item = TokenItem(samples.ID, 1, 0, first, pack_tokens([first]), Finish("stop") if first == 2 else None)
        timeline.add_tokens(worker, samples.at(at), item)
    found = inspect(timeline)
    kinds = [entry.kind for entry in found.events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "done"
    for kind in ("queued", "routed", "assigned", "prefilled", "handed_off", "transfer", "tokens"):
        assert kind in kinds
    assert [phase.name for phase in found.phases if phase.depth == 1] == ["route", "prefill", "decode"]
    assert found.missing == ()
    text = shown(found)
    assert "handed KV to decode d-1" in text
    assert "p-1 ←" in text
    for entry in found.events:
        assert entry.text in text


def test_the_process_is_named_also_where_its_name_is_a_part_of_another_word() -> None:
    assert line_of(InspectedEvent(1, "handed_off", "ticket 01a203d1-e1ebb:1", 1, "e1")).startswith("e1: ticket")
    assert line_of(InspectedEvent(1, "assigned", "encode queued at e1", 1, "e1")) == "encode queued at e1"


def test_a_record_without_its_request_is_shown_from_its_acceptance_on() -> None:
    timeline = samples.timeline(compact=False)
    timeline.add_end(msgspec.structs.replace(samples.done(50), submitted=b"", timings=Timings()), samples.at(50))
    found = inspect(timeline)
    assert (found.request.created_ns, found.request.priority) == (timeline.request.created_ns, "standard")


@pytest.mark.parametrize("width", [40, 80, 120, 250])
def test_no_line_of_the_waterfall_is_wider_than_the_terminal(width: int) -> None:
    lines = shown(inspect(samples.split(compact=False)), width).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("phase"))
    assert all(len(line) <= width for line in itertools.takewhile(str.strip, lines[start:]))


def test_without_colours_nothing_is_lost() -> None:
    import re

    found = inspect(samples.split(compact=False))
    assert re.sub("\x1b\\[[0-9;]*m", "", shown(found, colours=True)) == shown(found)


def test_of_an_erased_request_it_says_that_its_content_was_not_kept_and_what_that_is() -> None:
    asked = samples.request(no_store=True)
    whole = Done(
        asked.id, "tiny", 1, "w-1", (Outcome(pack_tokens([1]), "stop"),), Usage(100, 1), submitted=encode(asked)
    )
    timeline = RequestTimeline(asked.id)
    left = without_content(whole)
    rest = request_of(left)
    assert rest is not None
    timeline.add_request(rest)
    timeline.add_end(left, samples.at(9))
    found = inspect(timeline)
    assert [text.partition(";")[2] for text in found.missing] == [" the record lacks: prompt, tokens"]
    assert "prompt not kept (no_store)" in shown(found)


def test_what_is_missing_is_said() -> None:
    timeline = samples.timeline(compact=False)
    assert any("no router has placed it yet" in text for text in inspect(timeline).missing)
    timeline.add_end(samples.done(50), samples.at(50))
    missing = " ".join(inspect(timeline).missing)
    assert "WORK" in missing
    assert "TOKENS" in missing


def test_a_running_request_reaches_as_far_as_its_last_token() -> None:
    timeline = samples.timeline(compact=False)
    timeline.add_work("aggregated", "w-1", samples.at(3), samples.job(2, Stage("aggregated", "w-1")))
    timeline.add_tokens("w-1", samples.at(900), TokenItem(samples.ID, 1, 0, 0, pack_tokens([1])))
    found = inspect(timeline)
    assert found.request.state == "running"
    assert found.phases[0].end_ns == samples.at(900)
    assert "running" in shown(found)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_well_formed_needs_nothing_else_and_escapes_what_users_wrote() -> None:
    asked = samples.request(user="<script>alert(1)</script>")
    timeline = samples.timeline(asked, compact=False)
    timeline.add_end(
        samples.done(50, user="<script>alert(1)</script>", code="internal", message="a < b"), samples.at(50)
    )
    text = page(inspect(timeline))
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<script" not in text
    assert not any(word in text for word in ("http:", "https:", "src="))
    assert "a < b" in "".join(tags.texts)
    assert "prefers-color-scheme: dark" in text


def test_json_has_the_fields_that_the_documentation_names() -> None:
    found = json.loads(as_json(inspect(samples.split(compact=False))))
    assert {"request", "gateway", "max_tokens", "choices", "phases", "events"} <= found.keys()
    assert {"id", "state", "ttft_ms", "duration_ms", "attempts", "code"} <= found["request"].keys()
    assert {"name", "depth", "service", "where", "start_ns", "end_ns", "attempt", "error"} == found["phases"][0].keys()
    routed = next(entry for entry in found["events"] if entry["kind"] == "routed")
    assert routed["candidates"][0]["worker"] == "p-1"
    assert routed["chosen"] == ["p-1", "d-1"]


def test_blocks_to_bring_back_are_in_the_score_table() -> None:
    inputs = DecisionInputs(1, lower_tiers=(LowerTiers("w-1", 0, 1, 1, 0.12, 0.5),))
    job = msgspec.structs.replace(samples.job(2, Stage("aggregated", "w-1")), inputs=inputs)
    timeline = samples.timeline(samples.request(), compact=False)
    timeline.add_work("aggregated", "w-1", samples.at(3), job)
    found = inspect(timeline)
    assert "1 host × 0.12, 1 disk × 0.5" in " ".join(shown(found).split())
    assert "1 host × 0.12, 1 disk × 0.5" in page(found)
    assert "to bring" not in shown(inspect(samples.split(compact=False)))


# --- on a broker ---


async def test_both_attempts_of_a_request_whose_worker_died_are_shown(broker: EmbeddedNats, pipeline: Subjects) -> None:
    asked = request(max_tokens=12, id=new_request_id())
    first = engine()
    first.hold()
    async with (
        log_client(broker, pipeline) as log,
        run_worker(broker, pipeline, first) as dying,
        routing(broker, pipeline) as one,
    ):
        clients = Clients(log)
        await clients.ask(asked)
        await clients.placed(asked)
        first.allow(5)
        await log.has_streamed(asked)
        async with run_worker(broker, pipeline, engine()) as other:
            await one.knows(other.id)
            await dying.die()
            await log.end(asked, within_s=20)
            assert log.streamed(asked) == answer(asked, 12)
            found = inspect(await read_timeline(log.bus, asked.id, with_tokens=True))
    assert (found.request.state, found.request.attempts) == ("done", 2)
    assert {phase.where for phase in found.phases if phase.name == "aggregated"} == {dying.id, other.id}
    (continued,) = [entry for entry in found.events if entry.kind == "continued"]
    assert f"{other.id} continues instead of {dying.id}, after" in continued.text
    assert "worker_lost" in continued.text
    assert [entry.text for entry in found.events if "ends here" in entry.text] == ["attempt 1 ends here"]


async def test_of_a_request_that_is_older_than_the_jobs_it_says_how_far_back_they_reach(
    broker: EmbeddedNats, pipeline: Subjects
) -> None:
    async with log_client(broker, pipeline) as log:
        asked = await accept(log.bus)
        await assign(log.bus, asked)
        await stream(log.bus, asked, 5)
        await end(log.bus, asked, 5, took_ms=STORED_MS)
        await log.bus.js.purge_stream(pipeline.stream("WORK"))  # as if it were full
        (gone,) = inspect(await read_timeline(log.bus, asked.id, with_tokens=True)).missing
        assert "its jobs are gone: WORK is empty; it keeps them for a day" in gone
        other = await accept(log.bus)
        await assign(log.bus, other)
        (stored,) = [entry async for entry in read(log.bus, pipeline.stream("WORK"), ">")]
        (gone,) = inspect(await read_timeline(log.bus, asked.id, with_tokens=True)).missing
        assert f"WORK reaches back to {format_time(stored.time_ns)[:-7]}Z only" in gone


async def test_of_a_request_whose_prompt_is_gone_it_says_how_long_it_was_and_how_far_back_prompts_reach(
    broker: EmbeddedNats, pipeline: Subjects
) -> None:
    async with log_client(broker, pipeline) as log:
        asked = await accept(log.bus, prompt=pack_tokens(range(70)), digests=bytes(32), block_size=32)
        await assign(log.bus, asked)
        await stream(log.bus, asked, 5)
        await end(log.bus, asked, 5, took_ms=STORED_MS)
        assert inspect(await read_timeline(log.bus, asked.id, with_tokens=True)).missing == ()
        await log.bus.js.purge_stream(pipeline.stream("REQUESTS"))  # as if it were full
        found = inspect(await read_timeline(log.bus, asked.id, with_tokens=True))
    (gone,) = found.missing
    assert "its prompt is gone: REQUESTS is empty; it keeps them for 7 days, or until it is full" in gone
    assert "prompt 70 tokens (2 full blocks of 32)" in shown(found)


async def test_the_command_writes_text_json_and_a_page(
    broker: EmbeddedNats, pipeline: Subjects, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with log_client(broker, pipeline) as log:
        asked = await accept(log.bus, model="tiny")
        await assign(log.bus, asked)
        await stream(log.bus, asked, 5, 6)
        await end(log.bus, asked, 5, 6)
        flags = ["--nats-url", broker.url(), "--namespace", pipeline.namespace]

        async def said(*more: str, status: int = 0, run: Callable[..., int] = run) -> str:
            assert await asyncio.to_thread(run, [asked.id, *flags, *more]) == status
            printed = capsys.readouterr()
            return printed.err if status else printed.out

        assert "2 tokens from 0" in await said()
        found = json.loads(await said("--json", "--tokens", "--text"))
        assert found["content"]["answer_tokens"] == [[5, 6]]
        assert found["content"]["prompt_tokens"] == list(range(100))
        assert found["content"]["prompt"]
        file = tmp_path / "page.html"
        assert await said("--html", str(file)) == ""
        assert asked.id in file.read_text()
        assert "cannot be written" in await said("--html", str(tmp_path / "no" / "page.html"), status=1)
        missing = json.loads(await said("--json", "--text", "--model-path", str(tmp_path)))["missing"]
        assert any("--model-path" in text for text in missing)
        assert not [
            each for each in json.loads(await said("--json", "--no-batches"))["events"] if each["kind"] == "tokens"
        ]
