"""Finding requests without their ids, on a real nats-server."""

import asyncio
import datetime
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.requests import find_requests
from penstock.log_tools.requests.find_requests import ended, merged, summaries, unfinished
from penstock.log_tools.requests.list_requests import SORTS, RequestLine, largest, lines, run
from penstock.log_tools.sources.data_folder import StoredLog
from penstock.log_tools.sources.open_log import LogSource, open_log
from penstock.log_tools.sources.store_files import Raw
from penstock.log_tools.timeline.read import read_timeline, stored_at
from penstock.schemas.requests import Sampling
from penstock.schemas.streams import ROUTER_ACK_WAIT_S
from penstock.schemas.subjects import HEADER_MSG_ID, KEPT
from penstock.schemas.summary import Criteria, RequestSummary
from penstock.schemas.wire import encode, pack_tokens
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, assign, end

EVERYTHING = Criteria()


async def listed(bus: Bus, broker: EmbeddedNats, *flags: str) -> list[dict[str, object]]:
    """What the command prints with --json."""
    import contextlib
    import io

    out = io.StringIO()
    argv = ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace, "--json", *flags]
    with contextlib.redirect_stdout(out):
        status = await asyncio.to_thread(run, argv)
    assert status == 0, out.getvalue()
    return [json.loads(line) for line in out.getvalue().splitlines()]


@given(st.lists(st.lists(st.integers(0, 50)), max_size=4), st.integers(0, 12))
async def test_what_cells_have_comes_as_if_it_was_of_one_and_little_is_read_ahead(
    parts: list[list[int]], wanted: int
) -> None:
    taken = 0

    async def cell(items: list[int]) -> AsyncGenerator[int, None]:
        nonlocal taken
        for item in sorted(items, reverse=True):
            taken += 1
            yield item

    found: list[int] = []
    cells = [cell(items) for items in parts]
    async for item in merged(cells, lambda item: item):
        found.append(item)
        if len(found) == wanted:
            break
    everything = sorted((item for items in parts for item in items), reverse=True)
    assert found == (everything[:wanted] if wanted else everything)
    assert taken <= len(found) + len(parts)
    for each in cells:
        await each.aclose()


async def test_unfinished_requests_come_first_and_the_last_to_end_before_others(bus: Bus, broker: EmbeddedNats) -> None:
    requests = [await accept(bus) for _ in range(4)]
    for request in requests[:3]:
        await assign(bus, request)
    for request in (requests[1], requests[0]):
        await end(bus, request, 1, 2)
    await bus.js.pull_subscribe(bus.subjects.work("aggregated", "w-1"), "w-1", bus.subjects.stream("WORK"))
    found = await listed(bus, broker)
    assert [line["id"] for line in found] == [requests[n].id for n in (3, 2, 0, 1)]
    assert [line["state"] for line in found] == ["queued", "running", "done", "done"]
    assert found[1]["worker"] == "w-1"
    assert (found[2]["completion_tokens"], found[2]["ttft_ms"], found[2]["duration_ms"]) == (2, 10.0, 50.0)


async def test_a_request_that_was_placed_twice_is_listed_once_with_its_last_attempt(bus: Bus) -> None:
    request = await accept(bus)
    for attempt, worker in ((1, "w-1"), (2, "w-2")):
        await assign(bus, request, worker, attempt)
        await bus.js.pull_subscribe(bus.subjects.work("aggregated", worker), worker, bus.subjects.stream("WORK"))
    (found,) = await unfinished(bus, EVERYTHING)
    assert (found.summary.attempts, found.summary.worker) == (2, "w-2")


async def test_what_consumers_have_acknowledged_is_not_read_again(bus: Bus) -> None:
    done, waiting = await accept(bus), await accept(bus)
    await end(bus, done)
    subscription = await bus.js.pull_subscribe("", "router-standard", bus.subjects.stream("REQUESTS"))
    (message,) = await subscription.fetch(1, timeout=ROUTER_ACK_WAIT_S)
    await message.ack_sync()
    assert [found.summary.id for found in await unfinished(bus, EVERYTHING)] == [waiting.id]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--model", "other"), [1]),
        (("--worker", "w-2"), [2]),
        (("--state", "failed"), [3]),
        (("--state", "done"), [2, 1, 0]),
        (("--code", "any"), [3]),
        (("--code", "deadline_exceeded"), [3]),
        (("--code", "internal"), []),
        (("--min-duration", "1s"), [2]),
        (("--tenant", "acme"), [1]),
        (("-n", "2"), [3, 2]),
        (("--since", "1h"), [3, 2, 1, 0]),
        (("--until", "1h"), []),
    ],
)
async def test_every_flag_narrows_the_list(
    bus: Bus, broker: EmbeddedNats, flags: tuple[str, ...], expected: list[int]
) -> None:
    requests = [
        await accept(bus),
        await accept(bus, model="other", tenant="acme"),
        await accept(bus),
        await accept(bus),
    ]
    await end(bus, requests[0])
    await end(bus, requests[1])
    await end(bus, requests[2], worker="w-2", took_ms=2000)
    await end(bus, requests[3], code="deadline_exceeded")
    found = await listed(bus, broker, *flags)
    assert [line["id"] for line in found] == [requests[n].id for n in expected]


async def test_text_is_found_in_prompts_and_in_answers(bus: Bus, broker: EmbeddedNats) -> None:
    tokenizer = load_tokenizer(TINY)
    prompt, answer = (tokenizer.encode(text).ids for text in ("the capital of France", "it is Paris, of course"))
    request = await accept(bus, prompt=pack_tokens(prompt))
    other = await accept(bus, prompt=pack_tokens(tokenizer.encode("nothing").ids))
    await end(bus, request, *answer)
    await end(bus, other)
    for pattern in ("Fr.nce", "Paris", "(?i)PARIS"):
        (found,) = await listed(bus, broker, "--grep", pattern)
        assert found["id"] == request.id
    (found,) = await listed(bus, broker, "--grep", "paris", "-i")
    assert "Paris" in str(found["match"])
    assert await listed(bus, broker, "--grep", "Rome") == []


async def test_prompts_are_found_that_only_the_stream_of_requests_has(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records lack them. Requests end in another order than they came, and of one the prompt is gone."""
    tokenizer = load_tokenizer(TINY)
    texts = ("the capital of France", "nothing", "the capital of France", "nothing", "the capital of France")
    requests = [await accept(bus, prompt=pack_tokens(tokenizer.encode(text).ids)) for text in texts]
    for number in (4, 0, 3, 1, 2):
        await end(bus, requests[number], *tokenizer.encode("Paris").ids)
    await listed(bus, broker, "--grep", "France")
    assert capsys.readouterr().err == ""
    await bus.js.delete_msg(bus.subjects.stream("REQUESTS"), 5)
    for _ in range(2):
        found = await listed(bus, broker, "--grep", "France")
        assert [line["id"] for line in found] == [requests[2].id, requests[0].id]
        assert "of 1 request, only the answer was searched" in capsys.readouterr().err
    assert len(await listed(bus, broker, "--grep", "Paris")) == 5


async def test_a_prompt_is_found_that_only_the_copy_of_a_request_has(bus: Bus, broker: EmbeddedNats) -> None:
    """Routers publish waiting requests again when their stream fills. A copy's id has more behind the request's."""
    asked = await accept(bus, prompt=pack_tokens(load_tokenizer(TINY).encode("the capital of France").ids))
    name = bus.subjects.stream("REQUESTS")
    headers = {HEADER_MSG_ID: f"{asked.id}:{KEPT}:1"}
    await bus.js.publish(
        bus.subjects.request(asked.model, asked.priority.value, asked.id), encode(asked), headers=headers
    )
    await bus.js.delete_msg(name, 1)
    await end(bus, asked)
    (found,) = await listed(bus, broker, "--grep", "France")
    assert found["id"] == asked.id
    timeline = await read_timeline(bus, asked.id)
    assert timeline.request.prompt == asked.prompt
    assert (await stored_at(bus, asked.id)).request == asked


async def test_why_requests_are_slow_is_said_instead_of_a_list(bus: Bus, broker: EmbeddedNats) -> None:
    for number in range(60):
        slow = number % 3 == 0
        await end(bus, await accept(bus), 1, 2, worker=f"w-{slow:d}", took_ms=500 if slow else 50)
    (found,) = await listed(bus, broker, "--why", "slow", "--slowest", "33")
    assert (found["slow"], found["others"], found["measure"]) == (20, 40, "duration")
    assert found["differences"][0]["property"] == "worker"
    assert found["differences"][0]["groups"][0]["value"] == "w-1"


async def test_reading_ends_where_no_older_record_can_match(bus: Bus) -> None:
    for _ in range(3):
        await end(bus, await accept(bus))
    since = time.time_ns()
    last = await accept(bus)
    await end(bus, last)
    found = [found.summary.id async for _, found in ended(bus, Criteria(since_ns=since))]
    assert found == [last.id]


async def test_the_log_of_a_stopped_deployment_lists_what_it_left_unfinished(
    make_broker: Callable[..., EmbeddedNats], capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, server.subjects) as bus:
        over, running, waiting = [await accept(bus) for _ in range(3)]
        await assign(bus, over)
        await end(bus, over)
        await assign(bus, running)
    await server.stop()
    assert await asyncio.to_thread(run, ["--data-dir", str(server.data_dir), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [(waiting.id, "queued"), (running.id, "running"), (over.id, "done")]
    assert [(line["id"], line["state"]) for line in lines] == expected
    assert await asyncio.to_thread(run, ["--data-dir", str(server.data_dir), "--follow"]) == 1
    assert "nothing to follow" in capsys.readouterr().err


async def test_what_a_stopped_deployment_left_unfinished_is_found_until_it_ends(
    make_broker: Callable[..., EmbeddedNats],
) -> None:
    server = make_broker()

    async def found() -> list[tuple[str, str]]:
        async with open_log(LogSource(server.data_dir), name="test", files=True) as log:
            left = await unfinished(log.reader, EVERYTHING, stopped=True)
            return [(each.summary.id, each.summary.state) for each in left]

    await server.start()
    async with opened(server, server.subjects) as bus:
        over, running, waiting = [await accept(bus) for _ in range(3)]
        await end(bus, over)
        await assign(bus, running)
    await server.stop()
    expected = [(waiting.id, "queued"), (running.id, "running")]
    assert await found() == expected

    await server.start()
    async with opened(server, server.subjects) as bus:
        await end(bus, running)
    await server.stop()
    assert await found() == expected[:1]


async def test_jobs_are_not_read_where_no_request_is_open(
    make_broker: Callable[..., EmbeddedNats], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, server.subjects) as bus:
        over = await accept(bus)
        await assign(bus, over)
        await end(bus, over)
    await server.stop()
    read = []
    without = find_requests._without

    def noted(stored: StoredLog, name: str, *more: Any) -> Iterator[Raw]:
        read.append(name)
        return without(stored, name, *more)

    monkeypatch.setattr(find_requests, "_without", noted)
    async with open_log(LogSource(server.data_dir), name="test", files=True) as log:
        assert await unfinished(log.reader, EVERYTHING, stopped=True) == []
    assert read == ["REQUESTS"]


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--since", "yesterday"), "15m, 2h, 7d"),
        (("--min-ttft", "3"), "300ms"),
        (("--grep", "("), "regular expression"),
        (("--why", "slow", "--slowest", "0"), "between 0 and 100"),
        (("--why", "slow", "--follow"), "leave out --follow"),
        (("--limit", "-1"), "0 for all"),
    ],
)
def test_a_flag_that_cannot_be_read_is_named_with_an_example(
    flags: tuple[str, str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(flags)) == 1
    assert hint in capsys.readouterr().err


async def test_what_the_connection_logs_is_not_among_the_lines(
    bus: Bus, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import structlog

    from penstock.log_tools.requests import list_requests

    await end(bus, await accept(bus))
    before = list_requests.summaries

    def noisy(*args: object) -> object:
        structlog.get_logger("bus").warning("bus_disconnected")
        return before(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(list_requests, "summaries", noisy)
    monkeypatch.setattr(structlog, "is_configured", lambda: False)
    argv = ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace, "--json"]
    assert await asyncio.to_thread(run, argv) == 0
    said = capsys.readouterr()
    assert [len(line) > 2 and line[0] for line in said.out.splitlines()] == ["{"]
    assert "bus_disconnected" in said.err


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 200])
def test_lines_have_columns_that_fit_and_cut_only_the_last(width: int) -> None:
    made = [
        RequestSummary(f"id-{n:033}", "m" * n, state, 10**18, worker="w", code=code, message="too\nlong " * 40)
        for n, (state, code) in enumerate((("failed", "deadline_exceeded"), ("done", ""), ("queued", "")))
    ]
    found = [RequestLine(each) for each in made]
    plain = list(lines(found, width=width, now_ns=10**18, header="error"))
    assert len(plain) == 4
    places = {line.index("id-") for line in plain[1:]}
    assert len(places) == 1
    assert all(len(line) <= width for line in plain)
    assert ("accepted" in plain[0], "worker" in plain[0], "cached" in plain[0]) == (
        width > 80,
        width > 120,
        width > 120,
    )
    errors = [line.endswith("…") and "  too" in line for line in plain[1:]]
    assert errors == [width == 60 or width >= 120] * 3
    assert all(("deadline_exceeded" in line) == (width > 60) for line in plain[1:2])
    coloured = lines(found, width=width, now_ns=10**18, header="error", colours=True)
    assert [re.sub("\x1b\\[[0-9;]*m", "", line).rstrip() for line in coloured] == [line.rstrip() for line in plain]


def test_tokens_that_no_record_has_yet_are_left_out() -> None:
    made = [RequestSummary(f"id-{state:>33}", "m", state, 10**18, prompt_tokens=7) for state in ("running", "done")]
    running, done = list(lines([RequestLine(each) for each in made], width=200, now_ns=10**18))
    assert running.split()[-1] == "7"
    assert done.split()[-3:] == ["7", "0", "0"]


async def test_summaries_are_those_of_the_records(bus: Bus) -> None:
    for number in range(12):
        await end(bus, await accept(bus), 1, code="" if number % 4 else "internal")
    for criteria, count in ((Criteria(), 12), (Criteria(code="any"), 3), (Criteria(since_ns=time.time_ns()), 0)):
        expected = [each.summary async for _, each in ended(bus, criteria)]
        assert [each async for each in summaries(bus, criteria)] == expected
        assert len(expected) == count


def test_sorted_lists_begin_with_the_largest() -> None:
    def line(name: str, routed: int, first: int, tokens: int) -> RequestLine:
        summary = RequestSummary(name, "tiny", "done", 1, routed_ns=routed, first_token_ns=first, ended_ns=100)
        return RequestLine(msgspec.structs.replace(summary, completion_tokens=tokens))

    found = [line("a", 2, 30, 71), line("b", 9, 20, 3), line("c", 5, 40, 11)]
    orders = {sort: "".join(each.summary.id for each in largest(found, sort, 2)) for sort in SORTS}
    assert orders == {"ttft": "ca", "itl": "bc", "tokens": "ac", "wait": "bc"}


def test_a_list_shows_the_revision_and_the_settings_only_where_they_differ() -> None:
    def line(revision: str, temperature: float) -> RequestLine:
        return RequestLine(
            RequestSummary("i", "tiny", "done", 1, revision=revision, engine="mock", sampling=Sampling(temperature))
        )

    alike = list(lines([line("a" * 40, 1.0), line("a" * 40, 1.0)], width=300, now_ns=1, header="error"))
    other = list(lines([line("a" * 40, 1.0), line("b" * 40, 0.5)], width=300, now_ns=1, header="error"))
    assert not {"revision", "engine", "temperature"} & set(alike[0].split())
    assert {"revision", "temperature"} <= set(other[0].split())
    assert other[2].split()[-2:] == ["b" * 12, "0.5"]


def test_a_list_shows_adapters_where_some_requests_have_one_or_another() -> None:
    def heading(*adapters: str) -> list[str]:
        found = [RequestLine(RequestSummary("i", "tiny", "done", 1, adapter=each)) for each in adapters]
        return next(iter(lines(found, width=300, now_ns=1, header="error"))).split()

    assert "adapter" in heading("poet@0a", "")
    assert "adapter" in heading("poet@0a", "poet@0b")
    assert "adapter" not in heading("poet@0a", "poet@0a")
    assert "adapter" not in heading("", "")


async def test_a_moment_lists_what_was_under_way_and_what_it_did_then(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time_ns()
    early, late = [await accept(bus, created_ns=now + ms * 1_000_000) for ms in (-9_000, -4_000)]
    await end(bus, early, 1, took_ms=2_000)  # its first token comes after 10 ms
    await end(bus, late, 1, took_ms=3_000)
    at = [datetime.datetime.fromtimestamp((now + ms * 1_000_000) / 1e9).isoformat() for ms in (-8_000, -6_500, -3_995)]
    assert [[line["id"] for line in await listed(bus, broker, "--at", each)] for each in at] == [
        [early.id],
        [],
        [late.id],
    ]
    argv = ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace, "--at"]
    for moment, did in ((at[0], "generating"), (at[2], "prompt")):
        assert await asyncio.to_thread(run, [*argv, moment]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[-1] == did
