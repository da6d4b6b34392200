"""``penstock replay``: what one deployment recorded, run again on another."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.schemas.done import Done
from penstock.schemas.subjects import HEADER_MSG_ID
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Process, ending, ok, registrations, until, words

TOKENS = 40


@pytest.fixture(scope="module")
def recorded(new_deployment: NewDeployment) -> Deployment:
    """About 10 ms per token."""
    return new_deployment("--mock-speedup", "0.6", "--workers", "2")


@pytest.fixture(scope="module")
def fresh(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--mock-speedup", "0", "--workers", "2")


@pytest.fixture
async def recorded_bus(recorded: Deployment) -> AsyncIterator[Bus]:
    bus = await connect(recorded.state.nats_url, role="operator", name="test", namespace=recorded.state.namespace)
    yield bus
    await bus.close()


async def ended(deployment: Deployment, ids: Sequence[str]) -> list[Done]:
    """Their records, which are stored a moment after the answers."""
    state = deployment.state
    async with await connect(state.nats_url, role="operator", name="test", namespace=state.namespace) as bus:
        return [(await ending(bus, each))[1] for each in ids]


async def ask(client: httpx.AsyncClient, number: int, count: int = TOKENS) -> str:
    body = {"model": "tiny", "prompt": words(40, number), "max_tokens": count, "temperature": 1, "logprobs": 2}
    answer = await ok(client.post("/v1/completions", json=body))
    return str(answer.headers["x-request-id"])


async def replay(*argv: str, report: Path) -> tuple[int, dict[str, Any]]:
    def run() -> tuple[int, dict[str, Any]]:
        status = main(["replay", *argv, "--json", str(report)])
        return status, json.loads(report.read_text())

    return await asyncio.to_thread(run)


async def test_requests_whose_worker_was_killed_give_the_same_answers_elsewhere_and_another_seed_does_not(
    recorded: Deployment, fresh: Deployment, recorded_bus: Bus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = str(tmp_path / "incident.jsonl"), tmp_path / "report.json"
    async with httpx.AsyncClient(base_url=recorded.urls[0], trust_env=False, timeout=30) as client:
        asked = [asyncio.create_task(ask(client, number)) for number in range(8)]
        stream = recorded_bus.subjects.stream("TOKENS")

        async def flowing() -> bool:
            return (await recorded_bus.js.stream_info(stream)).state.messages > 15

        await until(flowing, "tokens")
        victim = next(iter((await registrations(recorded_bus)).values()))
        os.kill(victim.pid, signal.SIGKILL)
        ids = await asyncio.gather(*asked)
    ends = await ended(recorded, ids)
    assert max(end.attempt for end in ends) == 2, "nothing was under way at the killed worker"
    where = ["--data-dir", str(recorded.data_dir)]
    assert await asyncio.to_thread(main, ["export", "--all", "-o", file, *where]) == 0
    moved = next(end for end in ends if end.attempt == 2)
    capsys.readouterr()
    for source in (where, ["--file", file]):
        assert await asyncio.to_thread(main, ["inspect", moved.request, "--json", *source]) == 0
        events = json.loads(capsys.readouterr().out)["events"]
        by_worker = [each for each in events if each["kind"] == "tokens" and each["where"].startswith("worker")]
        assert {(each["attempt"], each["where"]) for each in by_worker} == {(1, victim.worker), (2, moved.worker)}
        assert [each["attempt"] for each in events if each["kind"] == "routed"] == [1, 2]
        assert [each["text"] for each in events if each["kind"] == "continued"]

    again = ["--file", file, "--data-dir", str(fresh.data_dir), "--speed", "max"]
    status, found = await replay(*again, report=report)
    assert (status, found["requests"], found["outcomes"]["same"]) == (0, 8, 8)
    assert found["compared_tokens"] == 8 * TOKENS
    assert found["logprob_gap"] == 0.0
    assert found["recorded"]["itl"]["count"] > 0

    status, found = await replay(*again, "--seed", "7", report=report)
    assert (status, found["outcomes"]["tokens"]) == (1, 8)
    by_id = dict(zip(ids, ends, strict=True))
    for each in found["comparisons"]:
        one = each["difference"]
        old = by_id[each["id"]].choices[0]
        assert one["recorded"][0] != one["replayed"][0]
        assert one["recorded"] == list(memoryview(old.tokens).cast("I"))[one["position"] :][: len(one["recorded"])]
        assert one["margin"] == pytest.approx(0.6931, abs=1e-3)
    status, _ = await replay(*again, "--seed", "7", "--fail-on", "errors", report=report)
    assert status == 0


async def test_a_worker_that_is_killed_during_a_replay_changes_no_answer(
    recorded: Deployment, recorded_bus: Bus, tmp_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=recorded.urls[0], trust_env=False, timeout=30) as client:
        ids = await asyncio.gather(*(ask(client, number) for number in range(400, 408)))
    await ended(recorded, ids)
    stream = recorded_bus.subjects.stream("TOKENS")
    before = (await recorded_bus.js.stream_info(stream)).state.messages
    argv = [*ids, "--data-dir", str(recorded.data_dir), "--speed", "max"]
    replaying = asyncio.create_task(replay(*argv, report=tmp_path / "report.json"))

    async def flowing() -> bool:
        return (await recorded_bus.js.stream_info(stream)).state.messages > before

    await until(flowing, "tokens of the replay")
    os.kill(next(iter((await registrations(recorded_bus)).values())).pid, signal.SIGKILL)
    status, found = await replaying
    assert (status, found["outcomes"]["same"], found["compared_tokens"]) == (0, 8, 8 * TOKENS)
    again = await ended(recorded, [each["replay_id"] for each in found["comparisons"]])
    assert max(end.attempt for end in again) == 2, "nothing was under way at the killed worker"


async def test_a_replay_that_is_killed_leaves_whole_answers_and_is_run_again(
    recorded: Deployment, recorded_bus: Bus, tmp_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=recorded.urls[0], trust_env=False, timeout=30) as client:
        ids = await asyncio.gather(*(ask(client, number) for number in range(500, 506)))
    await ended(recorded, ids)
    tokens, requests = (recorded_bus.subjects.stream(name) for name in ("TOKENS", "REQUESTS"))
    before = (await recorded_bus.js.stream_info(tokens)).state.messages
    last = (await recorded_bus.js.stream_info(requests)).state.last_seq
    argv = [*ids, "--data-dir", str(recorded.data_dir), "--speed", "max"]
    report = tmp_path / "killed.json"
    replaying = Process(tmp_path / "replay.log", "replay", *argv, "--json", str(report))

    async def flowing() -> bool:
        return (await recorded_bus.js.stream_info(tokens)).state.messages > before + 6

    await until(flowing, "tokens of the replay")
    os.kill(replaying.pid, signal.SIGKILL)
    assert await asyncio.to_thread(replaying.wait) == -signal.SIGKILL
    published = [entry.headers[HEADER_MSG_ID] async for entry in read(recorded_bus, requests, ">", after=last)]
    assert 0 < len(published) <= len(ids)
    assert {(end.code, end.usage.completion) for end in await ended(recorded, published)} == {("", TOKENS)}
    assert not report.exists()
    status, found = await replay(*argv, report=report)
    assert (status, found["outcomes"]["same"], found["compared_tokens"]) == (0, 6, 6 * TOKENS)


async def test_the_recorded_pace_is_kept_and_can_be_faster(fresh: Deployment, tmp_path: Path) -> None:
    async with httpx.AsyncClient(base_url=fresh.urls[0], trust_env=False, timeout=30) as client:
        first = await ask(client, 100, 2)
        await asyncio.sleep(0.6)  # the pace to be kept
        second = await ask(client, 101, 2)
    await ended(fresh, (first, second))
    argv = [first, second, "--data-dir", str(fresh.data_dir)]
    _, slow = await replay(*argv, report=tmp_path / "slow.json")
    _, fast = await replay(*argv, "--speed", "30", report=tmp_path / "fast.json")
    assert slow["seconds"] >= 0.6
    assert fast["seconds"] < slow["seconds"]
    assert (slow["outcomes"]["same"], fast["outcomes"]["same"]) == (2, 2)


async def test_over_http_the_texts_are_compared(recorded: Deployment, fresh: Deployment, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    async with httpx.AsyncClient(base_url=fresh.urls[0], trust_env=False, timeout=30) as client:
        ids = [await ask(client, number, 12) for number in range(300, 304)]
    await ended(fresh, ids)
    argv = [*ids, "--data-dir", str(fresh.data_dir), "--speed", "max", "--target", f"{recorded.urls[0]}/v1"]
    status, found = await replay(*argv, report=report)
    assert (status, found["outcomes"]["same"]) == (0, 4)
    assert found["recorded"]["prompt_tokens"] == found["replayed"]["prompt_tokens"]
    status, found = await replay(*argv, "--seed", "7", report=report)
    assert (status, found["outcomes"]["tokens"]) == (1, 4)
    # A server that returns token ids, as ours does, is compared by these.
    assert all((each.get("text_difference") or each["difference"])["recorded"] for each in found["comparisons"])
    status, found = await replay(*argv, "--model", "none", report=report)
    assert (status, found["outcomes"]["error"]) == (1, 4)
    assert found["comparisons"][0]["replayed_code"] == "http_404"


async def test_a_target_that_cannot_run_it_is_named(
    fresh: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--data-dir", str(fresh.data_dir)]
    for argv, said in (
        (["--all", "--model", "huge"], "it has tiny: choose one with --model"),
        (["--all", "--target", str(tmp_path)], "--target"),
        (["--all", "--set", "temprature=0"], "no such setting"),
        (["--all", "--speed", "fast"], "--speed"),
        ([], "--all"),
    ):
        assert await asyncio.to_thread(main, ["replay", *argv, *where]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.slow  # workers/engines/mock/test_play has the engine alone
async def test_a_mock_that_plays_a_recording_gives_its_tokens_at_its_times_and_other_prompts_its_own(
    recorded: Deployment, new_deployment: NewDeployment, tmp_path: Path
) -> None:
    """The file is redacted: no engine would generate its placeholders."""
    file = str(tmp_path / "played.jsonl")
    async with httpx.AsyncClient(base_url=recorded.urls[0], trust_env=False, timeout=30) as client:
        ids = [await ask(client, number, 20) for number in (200, 201)]
    await ended(recorded, ids)
    where = ["--data-dir", str(recorded.data_dir)]
    assert await asyncio.to_thread(main, ["export", *ids, "--redact", "-o", file, *where]) == 0
    player = new_deployment("--play", file, "--workers", "1", "--gateways", "1")
    again = ["--file", file, "--speed", "max", "--json", str(tmp_path / "report.json")]
    status, found = await replay(*again, "--data-dir", str(player.data_dir), report=tmp_path / "report.json")
    assert (status, found["outcomes"]["same"], found["compared_tokens"]) == (0, 2, 40)
    for side in ("recorded", "replayed"):
        assert found[side]["itl"]["mean"] > 5, "a token takes 10 ms"
    status, found = await replay(*again, *where, report=tmp_path / "report.json")
    assert (status, found["outcomes"]["tokens"]) == (1, 2)
    async with httpx.AsyncClient(base_url=player.urls[0], trust_env=False, timeout=30) as client:
        await ask(client, 202, 5)
