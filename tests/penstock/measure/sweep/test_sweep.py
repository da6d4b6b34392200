"""A whole sweep against small servers: its order, its files, what ends it, and what a second run does."""

import asyncio
import io
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from rich.console import Console

from penstock.configs.flags import BadSettings
from penstock.measure.simulation.trace import RequestTrace, TraceRow
from penstock.measure.sweep import results
from penstock.measure.sweep.endpoints import parse_endpoints
from penstock.measure.sweep.figures import Slo
from penstock.measure.sweep.plot import workloads
from penstock.measure.sweep.report import knee_of, print_report
from penstock.measure.sweep.results import BadResults, read_series
from penstock.measure.sweep.smoke import Unhealthy
from penstock.measure.sweep.sweep_command import Plan, Sweep, SweepFailed, SweepSettings, plan_of
from penstock.measure.sweep.sweep_command import run as run_command
from penstock.measure.sweep.workload import LoadLevel, RecordedConversation, Workload, concurrency_level
from tests.penstock.measure.sweep.fake_server import TEXTS, FakeServer, fake_server
from tests.penstock.measure.sweep.samples import load_records


def plan(out: Path, *servers: FakeServer, **more: Any) -> Plan:
    named = [f"{'ab'[number]}={server.url}" for number, server in enumerate(servers)]
    planned: dict[str, Any] = {
        "workload": Workload(isl=60, isl_stddev=5.0, osl=4),
        "levels": (concurrency_level(2), concurrency_level(4)),
    }
    planned |= {
        name: more.pop(name)
        for name in ("workload", "levels", "trace", "extra", "conversations", "slo")
        if name in more
    }
    settings = SweepSettings(out=str(out), **{"warm_up": 0} | more)
    return Plan(settings=settings, endpoints=tuple(parse_endpoints(named)), **planned)


async def run(made: Plan) -> Sweep:
    sweep = Sweep(made, lambda model: TEXTS)
    sweep.healthy = await sweep.run()  # type: ignore[attr-defined]
    return sweep


async def test_each_level_of_each_endpoint_has_its_files(tmp_path: Path) -> None:
    async with fake_server() as one, fake_server() as two:
        await run(plan(tmp_path, one, two, repeat=2, warm_up=3))
    assert files(tmp_path, "*.json*") == [
        f"{name}/{level}/{file}"
        for name in "ab"
        for level in ("c2", "c4")
        for file in ("records-1.jsonl", "records-2.jsonl", "result.json")
    ]
    first, second = read_series([tmp_path])
    assert [(each.name, [result.level.value for result in each.results]) for each in (first, second)] == [
        ("a", [2, 4]),
        ("b", [2, 4]),
    ]
    result = first.results[1]
    assert [(each.number, each.figures.requests) for each in result.runs] == [(1, 12), (2, 12)]
    assert len(load_records(first.folder / "c4", 2)) == 12
    # Both endpoints got the same requests; no prompt came twice.
    prompts = [[body["messages"][0]["content"] for body in server.bodies] for server in (one, two)]
    assert prompts[0] == prompts[1] or sorted(prompts[0]) == sorted(prompts[1])
    assert len(set(prompts[0])) == len(prompts[0]) - 1  # but the smoke request


async def test_prompts_are_as_long_as_asked_for_as_the_server_counts_them(tmp_path: Path) -> None:
    async with fake_server() as server:
        await run(plan(tmp_path, server, workload=Workload(isl=200, isl_stddev=20.0, osl=4, osl_stddev=1.0)))
    for result in read_series([tmp_path])[0].results:
        for record in load_records(tmp_path / "a" / result.level.folder, 1):
            assert (record.isl, record.osl) == (record.isl_asked, record.osl_asked)
        assert result.runs[0].figures.isl is not None
        assert 185 < result.runs[0].figures.isl.mean < 215


async def test_the_turns_of_a_conversation_are_sent_one_after_the_other_with_recorded_answers(tmp_path: Path) -> None:
    talks = tuple(
        RecordedConversation(tuple((f"ask {talk} {turn}", f"answer {talk} {turn}") for turn in range(3)), "be brief")
        for talk in range(4)
    )
    async with fake_server() as server:
        await run(plan(tmp_path, server, conversations=talks, levels=(concurrency_level(3, 12),), repeat=2))
        bodies = [body["messages"] for body in server.bodies if body["messages"][0]["content"] == "be brief"]
    assert len(bodies) == 24
    begun: list[str] = []
    for messages in bodies:
        roles = [each["role"] for each in messages]
        turn = roles.count("user") - 1
        assert roles == ["system", *["user", "assistant"] * turn, "user"]
        mark, talk = messages[1]["content"].rsplit(" ", 3)[0], messages[1]["content"].split()[-2]
        assert messages[-1]["content"].endswith(f"ask {talk} {turn}")
        assert [each["content"] for each in messages[2::2]] == [f"answer {talk} {n}" for n in range(turn)]
        if turn == 0:
            begun.append(mark)
        else:
            assert mark in begun, "a turn was sent before the one before it"
    assert len(set(begun)) == 8, "no run finds the prompts of another one in a cache"
    (result,) = read_series([tmp_path])[0].results
    assert [each.figures.requests for each in result.runs] == [12, 12]
    assert {each.osl_asked for each in load_records(tmp_path / "a/c3", 1)} == {TEXTS.count("answer 0 0")}


def test_the_variable_of_another_sweep_is_honoured_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONCURRENCIES", "4, 1 2")
    endpoint = ("a=http://127.0.0.1:9",)
    assert [each.value for each in plan_of(SweepSettings(endpoint=endpoint)).levels] == [1, 2, 4]
    out = capsys.readouterr().out
    assert "levels from CONCURRENCIES: 4, 1, 2" in out
    assert "asked for: prompts of 2,000 ± 10 tokens, nothing of them common" in out
    assert [each.value for each in plan_of(SweepSettings(endpoint=endpoint, concurrency=(8,))).levels] == [8]
    monkeypatch.setenv("CONCURRENCIES", "many")
    with pytest.raises(BadSettings, match="CONCURRENCIES='many': give numbers"):
        plan_of(SweepSettings(endpoint=endpoint))


async def test_goodput_and_percentiles_of_few_requests_are_shown_as_such(tmp_path: Path) -> None:
    async with fake_server() as server:
        await run(
            plan(tmp_path, server, levels=(concurrency_level(2, 10), concurrency_level(4, 100)), slo=Slo(ttft=1e6))
        )
    (series,) = read_series([tmp_path])
    out = io.StringIO()
    print_report([series], Console(file=out, width=220))
    rows = {line.split()[0]: line.split() for line in out.getvalue().splitlines() if line[:6].strip().isdigit()}
    assert sum(cell.endswith("*") for cell in rows["2"]) == sum(each in ("p50", "p95", "p99") for each in _head(out))
    assert not any(cell.endswith("*") for cell in rows["4"])
    assert "good/s" in _head(out)
    assert "Requests within ttft=1e+06 (ms): concurrency 2: 100%, concurrency 4: 100%." in out.getvalue()
    assert "* percentiles of fewer than 100 requests" in out.getvalue()
    assert workloads([series]) == ["m: ISL 60, OSL 4; 10 to 100 requests a level"]


def _head(out: io.StringIO) -> list[str]:
    return next(line.split() for line in out.getvalue().splitlines() if "conc." in line)


async def test_prompts_below_the_chat_templates_length_are_said_to_be_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fake_server() as server:
        await run(plan(tmp_path, server, workload=Workload(isl=3, isl_stddev=0.0, osl=4)))
    (result,) = {each.warnings for each in read_series([tmp_path])[0].results}
    assert "instead of 3: the server's chat template adds" in result[-1]
    assert "instead of 3" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("levels", "said"), [(0, "no level was finished"), (1, "finished levels are in")])
def test_a_stop_says_whether_a_level_was_finished(
    levels: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(self: Sweep) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "run", interrupted)
    monkeypatch.setattr(Sweep, "measured", property(lambda self: [None] * levels))
    assert run_command(SweepSettings(out=str(tmp_path), endpoint=("a=http://127.0.0.1:1",))) == 130
    assert said in capsys.readouterr().err


async def test_common_prefixes_are_common_also_to_other_levels(tmp_path: Path) -> None:
    async with fake_server() as server:
        workload = Workload(isl=107, isl_stddev=0.0, osl=4, shared_prefix=0.5, prefixes=2)
        await run(plan(tmp_path, server, workload=workload))
    prompts = [body["messages"][0]["content"] for body in server.bodies[2:]]
    common = [TEXTS.text(Random(f"1 prefix {number}"), 50) for number in range(2)]
    assert {next(each for each in common if prompt.startswith(each)) for prompt in prompts} == set(common)
    assert len(set(prompts)) == len(prompts) == 22


async def test_a_traces_prefixes_are_common_within_a_run_and_to_no_other_run(tmp_path: Path) -> None:
    rows = tuple(TraceRow(turn, 80 + 40 * turn, 4, tuple(range(1 + turn))) for turn in range(3))
    levels = (LoadLevel("speed", 10.0, len(rows)), LoadLevel("speed", 20.0, len(rows)))
    trace = RequestTrace("three", rows, block_tokens=32)
    async with fake_server() as server:
        await run(plan(tmp_path, server, trace=trace, levels=levels, repeat=2, warm_up=0))
        count = len(server.bodies)
        await run(plan(tmp_path / "again", server, trace=trace, levels=levels, repeat=2, warm_up=0))
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(prompts[:count]) == sorted(prompts[count:])
    beginnings = [prompt[:100] for prompt in prompts[2:count]]  # behind the two smoke requests
    assert Counter(Counter(beginnings).values()) == {3: 4}, "each of four runs has a beginning of its own, three times"


async def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    async with fake_server() as server:
        await run(plan(tmp_path, server, levels=(concurrency_level(2),)))
        before = (tmp_path / "a/c2/result.json").read_bytes()
        sent = len(server.bodies)
        await run(plan(tmp_path, server, repeat=2))
        assert len(server.bodies) - sent == 2 + 10 + 2 * 12
        result = results.load(tmp_path / "a/c2")
        assert result is not None
        assert msgspec.json.decode(before, type=results.LevelResult).runs == result.runs[:1]
        with pytest.raises(BadResults, match="of another load"):
            await run(plan(tmp_path, server, seed=2))
        await run(plan(tmp_path, server, seed=2, overwrite=True))


async def test_a_server_that_breaks_is_left_and_the_other_is_measured(tmp_path: Path) -> None:
    async with fake_server() as broken, fake_server() as good:
        broken.fails_after = 6
        sweep = await run(plan(tmp_path, broken, good, max_failed=2))
    assert [each.name for each in sweep.measured] == ["b"]
    assert not sweep.healthy  # type: ignore[attr-defined]
    result = results.load(tmp_path / "a/c2")
    assert result is not None
    assert "HTTP 500: broken" in result.runs[0].aborted
    assert len(broken.bodies) < 15  # bounded: the rest of the level and the other level were not sent
    assert result.complete == ()
    assert not (tmp_path / "a/c4").exists()


async def test_nothing_is_loaded_when_one_endpoint_does_not_pass_its_smoke_request(tmp_path: Path) -> None:
    async with fake_server() as good, fake_server() as empty:
        empty.models = []
        with pytest.raises(Unhealthy, match=r"b: .* serves no model yet"):
            await run(plan(tmp_path, good, empty))
        assert len(good.bodies) == 2
    assert files(tmp_path, "*") == []


async def test_a_server_that_fails_immediately_is_no_result(tmp_path: Path) -> None:
    async with fake_server() as server:
        server.fails_after = 2
        with pytest.raises(SweepFailed):
            await run(plan(tmp_path, server))
    assert files(tmp_path, "result.json") == ["a/c2/result.json"]


def files(out: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob(pattern))


async def test_a_sweep_that_is_cancelled_keeps_what_is_finished(tmp_path: Path) -> None:
    async with fake_server() as server:
        task = asyncio.create_task(run(plan(tmp_path, server, levels=(concurrency_level(2), concurrency_level(3)))))
        while not (tmp_path / "a/c2/result.json").exists():
            await asyncio.sleep(0)
            server.seconds = 60.0 if len(server.bodies) >= 12 else 0.0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert files(tmp_path, "result.json") == ["a/c2/result.json"]


async def test_arrivals_are_poisson_and_the_lag_of_the_generator_is_measured(tmp_path: Path) -> None:
    async with fake_server() as server:
        await run(plan(tmp_path, server, levels=(LoadLevel("rate", 200.0, 40),)))
    records = load_records(tmp_path / "a/r200", 1)
    due = [record.due_ms for record in records]
    assert due == sorted(due)
    assert 80 < due[-1] - due[0] < 500  # 40 arrivals at 200 a second
    result = results.load(tmp_path / "a/r200")
    assert result is not None
    assert result.runs[0].client.sent_late_p99_ms is not None


async def test_the_search_doubles_the_level_until_the_knee_of_a_server_is_found(tmp_path: Path) -> None:
    """Where the knee is depends on the machine's load too; ``test_knee`` finds it in exact measurements."""
    async with fake_server() as server:
        server.slots, server.seconds = asyncio.Semaphore(4), 0.03
        await run(plan(tmp_path, server, search=True, max_concurrency=16, requests=24))
    knee = knee_of(read_series([tmp_path])[0])
    assert knee is not None
    assert 2 <= knee.level <= 16
    assert {"a/c1/result.json", "a/c2/result.json", "a/c4/result.json"} <= {*files(tmp_path, "result.json")}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"concurrency": (1,), "rate": (1.0,)}, "exclude each other"),
        ({"rate": (1.0,), "trace": "t"}, "exclude each other"),
        ({"search": True, "rate": (1.0,)}, "cannot be combined"),
        ({"preset": "multimodal", "api": "completions"}, "need --api chat"),
        ({"extra_body": "[]"}, "a JSON object"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        plan_of(SweepSettings(endpoint=("a=h",), **flags))
