"""``penstock bench replay``: what it sends to deployments, and what it makes of their answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Choice, Chunk, PenstockError, Usage
from penstock.launch.state import DeploymentState, write_state
from penstock.measure.simulation.trace import RequestTrace, TraceRow
from tests.perf import replay
from tests.perf.replay import Answered, ReplayBenchSettings, figures, replay_prompts, run, sweep_prompts


def test_prompts_of_a_sweep_share_prefixes_and_differ_behind_them() -> None:
    settings = ReplayBenchSettings(requests=60, prefixes=3, prompt_tokens=1000)
    prompts = sweep_prompts(settings, 0.7, 5)
    assert len({tuple(each.tokens[:700]) for each in prompts}) == 3
    assert len({tuple(each.tokens[700:]) for each in prompts}) == 60
    own = [len(each.tokens) - 700 for each in prompts]
    assert 250 < sum(own) / 60 < 350
    assert max(own) - min(own) > 100
    assert prompts == sweep_prompts(settings, 0.7, 5)
    assert prompts != sweep_prompts(settings, 0.7, 6)


def test_requests_of_a_trace_share_what_their_units_share() -> None:
    rows = (TraceRow(1000, 1200, 3, (1, 2, 3)), TraceRow(3000, 1100, 4, (1, 2, 9)), TraceRow(4000, 70, 4, (7,)))
    first, second, third = replay_prompts(RequestTrace("t", rows), 2.0, 1000)
    assert [each.at_s for each in (first, second, third)] == [0.0, 1.0, 1.5]
    assert [len(each.tokens) for each in (first, second, third)] == [1200, 1100, 70]
    assert first.tokens[:1024] == second.tokens[:1024]
    assert first.tokens[1024:1100] != second.tokens[1024:]
    assert min(first.tokens) >= 16


def test_figures_are_in_milliseconds() -> None:
    found = figures("a", "x", [Answered(0.0, 0.1, 0.6, 11, 100, 25), Answered(1.0, 1.3, 1.8, 11, 100, 0)], 1, 2.0)
    assert (found.requests, found.failed, found.hit_rate) == (2, 1, 0.125)
    assert found.ttft_mean == pytest.approx(200.0)
    assert found.itl_mean == pytest.approx(50.0)
    assert found.e2e_mean == pytest.approx(700.0)
    assert found.tokens_per_s == pytest.approx(11.0)


class FakeDeployment:
    """Answers like a gateway, at once; ``most`` requests were open at the same time."""

    open = most = 0
    fails = False

    def __init__(self, url: str, namespace: str) -> None:
        assert (url, namespace) == ("nats://client", "ps")

    async def __aenter__(self) -> "FakeDeployment":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def complete(self, *, model: str, prompt: list[int], max_tokens: int, **_: Any) -> AsyncIterator[Chunk]:
        kind = FakeDeployment
        kind.open += 1
        kind.most = max(kind.most, kind.open)
        await asyncio.sleep(0)
        if kind.fails:
            raise PenstockError("overloaded", "queue full")
        yield Chunk(id="1", model=model, choices=(Choice(0, text="word"),))
        usage = Usage(len(prompt), max_tokens, 0, {"cached_tokens": len(prompt) // 2})
        yield Chunk(id="1", model=model, choices=(Choice(0, "length"),))
        yield Chunk(id="1", model=model, usage=usage)
        kind.open -= 1


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(replay, "Client", FakeDeployment)
    monkeypatch.setattr(FakeDeployment, "most", 0)
    path = tmp_path / "state.json"
    write_state(path, DeploymentState("http://x", "nats://operator", "nats://client", "", "ps", "demo"))
    return str(path)


def test_a_sweep_keeps_its_concurrency_and_writes_series(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.json"
    settings = ReplayBenchSettings(
        state=(state,), requests=20, concurrency=4, prompt_tokens=200, prefix_ratios=(0.2, 0.8), json=str(file)
    )
    assert run(settings) == 0
    assert FakeDeployment.most == 4
    document = json.loads(file.read_bytes())
    assert document["prefix_ratios"] == [0.2, 0.8]
    assert len(document["ttft_values"][state]) == len(document["throughput_values"][state]) == 2
    assert document["config"]["requests"] == 20
    assert all(0.49 < each["hit_rate"] <= 0.5 for each in document["figures"])
    assert "shared prefixes" in capsys.readouterr().out


def test_a_trace_is_sent_at_its_times(state: str, tmp_path: Path) -> None:
    trace, file = tmp_path / "some.jsonl", tmp_path / "figures.json"
    row = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps(row | {"timestamp": n * 1000}) + "\n" for n in range(5)))
    assert run(ReplayBenchSettings(state=(state,), trace=str(trace), speed=500.0, json=str(file))) == 0
    (found,) = json.loads(file.read_bytes())["figures"]
    assert (found["label"], found["requests"]) == ("some", 5)


def test_a_deployment_that_answers_nothing_is_reported(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeDeployment, "fails", True)
    assert run(ReplayBenchSettings(state=(state,), requests=2, prompt_tokens=100, prefix_ratios=(0.5,))) == 1
    said = capsys.readouterr().err
    assert "queue full" in said
    assert "none of 2 requests was answered" in said


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (ReplayBenchSettings(state=("/nowhere/state.json",)), "no deployment runs there"),
        (ReplayBenchSettings(workload="strange"), "--workload strange: one of chat, agents"),
        (ReplayBenchSettings(trace="/nowhere.jsonl"), "No such file"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    settings: ReplayBenchSettings, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(settings) == 1
    assert error in capsys.readouterr().err
