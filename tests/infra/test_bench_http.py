"""The load generator: its parser on bytes cut anywhere, and itself against a small real HTTP server."""

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from infra.bench.answers import Connection, Tally
from infra.bench.cpu import cpu_seconds
from infra.bench.http import BenchFailed, Requests, Settings, Target, _measure, _target
from infra.bench.http_report import Stage, figures
from infra.launch.state import Running, State, write_state

TOKENS = 4


def sse(events: int = TOKENS, tokens: int = TOKENS) -> bytes:
    """A streamed answer: the role, ``events`` pieces of text, the end, the usage."""
    choices: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}]
    choices += [{"delta": {"content": f"word{i} "}} for i in range(events)]
    choices += [{"delta": {}, "finish_reason": "stop"}]
    bodies: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    bodies += [{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}]
    lines = [b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n" for body in bodies]
    chunks = [b"%x\r\n%s\r\n" % (len(line), line) for line in [*lines, b"data: [DONE]\n\n"]]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"


def whole(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


class Wire(asyncio.Transport):
    """Where a connection writes; remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def converse(answers: bytes, cuts: list[int], requests: int = 2) -> tuple[Tally, Wire]:
    """Feed the answers cut at these places to a connection that has so many requests to send."""
    tally, wire = Tally(), Wire()
    left = iter([(b"request", tally)] * requests)
    connection = Connection(lambda: next(left, None), TOKENS, lambda: None)
    connection.connection_made(wire)
    places = [0, *sorted(cut % len(answers) for cut in cuts), len(answers)]
    for start, end in itertools.pairwise(places):
        if start < end:
            connection.data_received(answers[start:end])
    return tally, wire


@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=40))
def test_a_stream_is_counted_the_same_however_it_is_cut(cuts: list[int]) -> None:
    first, second = sse(), sse()
    # A server answers a request only after it was sent: no read spans two answers.
    tally, wire = converse(first + second, [*cuts, len(first)])
    assert (tally.requests, tally.tokens, tally.events, tally.failed) == (2, 2 * TOKENS, 2 * (TOKENS + 3), 0)
    assert len(tally.first_s) == 2
    assert (wire.sent, wire.closed) == ([b"request"] * 2, True)


@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=20))
def test_a_whole_answer_is_counted_the_same_however_it_is_cut(cuts: list[int]) -> None:
    body = json.dumps({"usage": {"completion_tokens": TOKENS}, "choices": [{"message": {"content": "x" * 3000}}]})
    tally, _ = converse(whole(body.encode()), cuts, requests=1)
    assert (tally.requests, tally.tokens, tally.failed) == (1, TOKENS, 0)


def test_every_event_is_timed_when_each_comes_alone() -> None:
    answer = sse()
    ends = [i + 2 for i in range(len(answer)) if answer.startswith(b"\n\n", i)]
    tally, _ = converse(answer, ends, requests=1)
    assert len(tally.first_s) == 1
    assert len(tally.between_s) == TOKENS - 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sse(tokens=3), "3 tokens instead of 4"),
        (whole(b"{}"), "answer without usage"),
        (whole(b'{"error":"full"}', "429 Too Many Requests"), 'HTTP 429: {"error":"full"}'),
        (whole(b"", "503 Unavailable"), "HTTP 503: "),
    ],
)
def test_a_wrong_answer_is_an_error_and_not_a_figure(answer: bytes, reason: str) -> None:
    tally, _ = converse(answer, [], requests=1)
    assert (dict(tally.errors), tally.requests, tally.tokens) == ({reason: 1}, 0, 0)


def test_a_connection_cut_in_an_answer_is_an_error_and_one_closed_after_it_is_not() -> None:
    for answer, failed in ((sse()[:-1], 1), (whole(b'{"completion_tokens":4}', more="Connection: close\r\n"), 0)):
        tally, lost = Tally(), []
        connection = Connection(lambda tally=tally: (b"r", tally), TOKENS, lambda lost=lost: lost.append(1))  # type: ignore[misc]
        connection.connection_made(Wire())
        connection.data_received(answer)
        connection.connection_lost(None)
        assert (tally.failed, lost) == (failed, [1])


class Server:
    """Answers a number of requests per connection, then closes."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            for _ in range(self.keep):
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(whole(b'{"data":[{"id":"m"}]}'))
                    break
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}).encode()
                writer.write(sse() if body.get("stream") else whole(usage))
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving(keep: int = 1_000_000) -> AsyncIterator[tuple[Server, Target]]:
    server = Server(keep)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield server, Target("127.0.0.1", listening.sockets[0].getsockname()[1], "")
    finally:
        listening.close()


def bench(**more: Any) -> Settings:
    options: dict[str, Any] = {"output_tokens": TOKENS, "warm_up_s": 0.0, "concurrency": (2,), "prompt_words": 20}
    return Settings(**(options | more))


async def test_a_number_of_requests_is_measured_exactly() -> None:
    async with serving() as (server, target):
        (stage,) = await _measure(bench(requests=50), target, {"me": os.getpid()})
    assert (stage.requests, stage.failed) == (50, 0)
    assert len(server.bodies) >= 50  # and those of the warm-up
    assert stage.tokens_per_s > 0
    assert stage.ttft_p50_ms > 0
    assert server.bodies[0]["model"] == "m"
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_a_duration_is_kept_without_a_stream_too() -> None:
    async with serving() as (_, target):
        (stage,) = await _measure(bench(duration_s=0.3, warm_up_s=0.05, stream=False), target, {})
    assert 0.3 <= stage.seconds < 10  # what was begun is ended, on a machine that may be busy
    assert stage.requests > 10
    assert stage.failed == 0


def test_it_runs_on_the_loop_that_the_command_uses() -> None:
    async def measure() -> list[Stage]:
        async with serving() as (_, target):
            return await _measure(bench(requests=20, concurrency=(1, 4)), target, {})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert [(stage.requests, stage.failed) for stage in runner.run(measure())] == [(20, 0), (20, 0)]


async def test_a_server_that_never_answers_is_a_failure() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    target = Target("127.0.0.1", listening.sockets[0].getsockname()[1], "")
    (stage,) = await _measure(bench(model="m", duration_s=0.05), target, {})
    listening.close()
    assert stage.errors == {"no request was answered in time": 1}


async def test_connections_that_the_server_closes_are_opened_again() -> None:
    async with serving(keep=3) as (server, target):
        (stage,) = await _measure(bench(requests=20), target, {})
    assert server.connections > 5
    # A request may cross the server's close: it is counted as lost, and the others still come.
    assert stage.requests + stage.failed == 20
    assert stage.requests >= 10


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchFailed, match="no server answers at"):
        await _measure(bench(), Target("127.0.0.1", 1, ""), {})


def test_prompts_share_a_prefix_and_repeat_with_the_seed() -> None:
    target = Target("h", 80, "/x")

    def prompts(**more: Any) -> list[list[str]]:
        made = Requests(bench(prompt_words=20, **more), target, "m")
        requests = [made.make() for _ in range(2)]
        assert all(
            request.startswith(b"POST /x/v1/chat/completions HTTP/1.1\r\nHost: h:80\r\n") for request in requests
        )
        return [json.loads(r.partition(b"\r\n\r\n")[2])["messages"][0]["content"].split() for r in requests]

    one, two = prompts(shared_prefix=0.5)
    assert (len(one), len(two)) == (20, 20)
    assert one[:10] == two[:10]
    assert one[10:] != two[10:]
    assert prompts() == prompts()
    assert prompts() != prompts(seed=2)


def test_a_state_file_names_the_server_and_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_state(path, State("http://h:8001", "n", "c", "s", "ps", "m", (Running("gateway-0", "gateway", 12),)))
    assert _target(bench(state=str(path), pids=(5,))) == (Target("h", 8001, ""), {"gateway-0": 12, "pid 5": 5})
    assert _target(bench(url="h:9/base/v1/"))[0] == Target("h", 9, "/base")
    with pytest.raises(BenchFailed, match="name the server"):
        _target(bench())
    with pytest.raises(BenchFailed, match="only http"):
        _target(bench(url="https://h"))


def test_figures_divide_cpu_by_tokens() -> None:
    tally = Tally(tokens=1000, events=500)
    tally.total_s.extend([0.1, 0.3])
    stage = figures(2, 2.0, tally, {"a": 0.01, "b": 0.02}, 0.5)
    assert (stage.requests_per_s, stage.tokens_per_s, stage.tokens_per_event) == (1.0, 500.0, 2.0)
    assert stage.cpu_us_per_token == {"a": 10.0, "b": 20.0}
    assert (stage.total_cpu_us_per_token, stage.cpu_ms_per_request, stage.own_cpu_share) == (30.0, 15.0, 0.25)
    assert msgspec.json.decode(msgspec.json.encode(stage))["latency_p99_ms"] == 300.0


def test_cpu_time_grows_with_work() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) < before + 0.03:
        sum(range(10_000))
    assert cpu_seconds(2**22 + 1) == 0.0
