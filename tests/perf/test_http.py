"""``penstock bench http`` against a small real HTTP server."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from penstock.launch.state import DeploymentState, Running, write_state
from penstock.measure.load_generator import Exchange, HttpTarget
from penstock.measure.sweep.figures import Slo
from tests.penstock.measure.load_generator.support import TOKENS, serving
from tests.perf.cpu import cpu_seconds
from tests.perf.http import BenchFailed, Requests, Settings, Stage, Tally, _measure, _target, figures, report


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
    target = HttpTarget("127.0.0.1", listening.sockets[0].getsockname()[1], "")
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
        await _measure(bench(), HttpTarget("127.0.0.1", 1), {})


async def test_a_server_that_needs_a_key_is_said_to() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
        target = HttpTarget("127.0.0.1", listening.sockets[0].getsockname()[1], "")
        with pytest.raises(BenchFailed, match="answered 401: no; give a key with --api-key"):
            await _measure(bench(), target, {})


def test_prompts_share_a_prefix_and_repeat_with_the_seed() -> None:
    target = HttpTarget("h", 80, "/x")

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
    write_state(
        path, DeploymentState("http://h:8001", "n", "c", "s", "ps", "m", (Running("gateway-0", "gateway", 12),))
    )
    assert _target(bench(state=str(path), pids=(5,))) == (HttpTarget("h", 8001, ""), {"gateway-0": 12, "pid 5": 5})
    assert _target(bench(url="h:9/base/v1/"))[0] == HttpTarget("h", 9, "/base")
    with pytest.raises(BenchFailed, match="name the server"):
        _target(bench())
    with pytest.raises(BenchFailed, match="only http and https"):
        _target(bench(url="ftp://h"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"output_tokens": 3}, "3 tokens instead of 4"), ({"output_tokens": -1}, "answer without usage")],
)
def test_a_wrong_answer_is_an_error_and_not_a_figure(more: dict[str, Any], reason: str) -> None:
    tally = Tally()
    tally.count(Exchange(b"", lambda _: None, sent=1.0, ended=2.0, status=200, **more), TOKENS)
    assert (dict(tally.errors), tally.requests, tally.tokens) == ({reason: 1}, 0, 0)


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


def test_one_figure_is_the_gap_between_tokens_and_one_that_between_reads(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    for cached in (0, 60):
        exchange = Exchange(b"", lambda _: None, sent=0.0, first=0.081, last=0.101, ended=0.101, status=200)
        exchange.gaps_s.extend([0.010, 0.010])
        exchange.prompt_tokens, exchange.cached_tokens, exchange.output_tokens = 100, cached, 21
        tally.count(exchange, 21, Slo(ttft=90, itl=0.9 if cached else 1.1))
    stage = figures(2, 1.0, tally, {}, 0.0, Slo(ttft=90))
    assert (stage.itl_p50_ms, stage.gap_p99_ms) == (pytest.approx(1.0), pytest.approx(10.0))
    assert stage.hit_rate == pytest.approx(0.3)
    assert (stage.good_share, stage.good_per_s, stage.slo) == (0.5, 1.0, "ttft=90")
    report([stage], {}, 0.5)
    out = capsys.readouterr().out
    assert "50% of each prompt is common to all" in out
    assert "1.00*" in out
    assert "30%" in out
    assert "percentiles of fewer than 100 requests" in out
