"""Constraints are tried in processes that can be ended: what one costs is no other's time, and no verdict is a lie."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from penstock.infra.bounded import QueueLimits
from penstock.infra.constraints import trials as constraint_trials
from penstock.infra.constraints.constraint_grammar import CHOICE, GRAMMAR, JSON_SCHEMA, LARK, REGEX
from penstock.infra.constraints.trials import CRASHED, TOO_LONG, ConstraintTrials, Trial, TrialsBusy, digest_of
from penstock.schemas.requests import Constraint

SMALL = Constraint(REGEX, "[0-9]+")


def wide(properties: int, name: str = "p") -> Constraint:
    """A schema whose time to compile grows with the square of its properties: 9,000 take 8 to 11 s."""
    listed = {f"{name}{number}": {"type": "string"} for number in range(properties)}
    return Constraint(JSON_SCHEMA, json.dumps({"type": "object", "properties": listed}))


def chained(references: int) -> Constraint:
    names = {f"a{at}": {"properties": {"x": {"$ref": f"#/$defs/a{at + 1}"}}} for at in range(references)}
    names[f"a{references}"] = {"type": "string"}  # type: ignore[dict-item]
    return Constraint(JSON_SCHEMA, json.dumps({"$defs": names, "$ref": "#/$defs/a0"}))


@pytest.fixture
async def trials() -> AsyncIterator[ConstraintTrials]:
    made = ConstraintTrials(cpu_s=1.0)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (SMALL, ""),
        (Constraint(REGEX, "("), "invalid regex"),
        (Constraint(CHOICE, '["a", "b"]'), ""),
        (Constraint(JSON_SCHEMA, '{"type": "object", "uniqueItems": true}'), "uniqueItems"),
        (Constraint(LARK, 'start: <[151657]> "a" <[*]>*'), ""),  # a token that only the model's vocabulary has
        (Constraint(GRAMMAR, 'start: <|tool|> "a"'), ""),
        (Constraint(GRAMMAR, 'root ::= "a" x'), "not found"),
        (Constraint("of a later build", ""), "unknown to this build"),
        (wide(9_000), TOO_LONG.format(1)),
        (chained(3_000), CRASHED),  # without a process of its own this ends the gateway
    ],
)
async def test_a_constraint_is_compiled_or_refused_with_its_reason(
    trials: ConstraintTrials, constraint: Constraint, reason: str
) -> None:
    trial = await trials.of(constraint, "acme")
    assert reason in trial.reason
    assert bool(trial.reason) == bool(reason)
    assert trial.lasting == (reason not in (TOO_LONG.format(1), CRASHED))
    assert bool(trial.size_bytes) == (not reason)


async def test_a_tenants_large_schemas_delay_no_small_one(trials: ConstraintTrials) -> None:
    assert not (await trials.of(SMALL, "a")).reason
    large = [asyncio.create_task(trials.of(wide(9_000, f"p{number}_"), "b")) for number in range(16)]
    await asyncio.sleep(0)  # so that they are all before the small ones
    assert trials.waiting >= 15
    assert not (await trials.of(Constraint(REGEX, "[a-z]+"), "a")).reason
    assert not (await trials.of(Constraint(REGEX, "[A-Z]+"), "b")).reason
    assert not any(each.done() and not each.result().reason for each in large)
    assert sum(not each.done() for each in large) >= 12
    for each in large:
        each.cancel()
    await asyncio.gather(*large, return_exceptions=True)
    assert trials.waiting == 0


async def test_time_in_the_queue_counts_for_nothing_and_equal_constraints_are_tried_once(
    trials: ConstraintTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    plain = constraint_trials._Process.ask

    async def ask(self: Any, job: Any) -> Any:
        asked.append(job.text)
        return await plain(self, job)

    monkeypatch.setattr(constraint_trials._Process, "ask", ask)
    slow = [wide(2_000, f"p{number}_") for number in range(4)]  # 0.4 s each, of 1 s
    found = await asyncio.gather(*(trials.of(each, "a") for each in (*slow, *slow, SMALL, SMALL)))
    assert [each.reason for each in found] == [""] * 10
    assert len(asked) <= 4 * 2 + 1  # each large one in both lanes


async def test_a_full_queue_refuses_and_one_tenant_cannot_fill_it() -> None:
    trials = ConstraintTrials(cpu_s=1.0, limits=QueueLimits(tenant_entries=3))
    try:
        large = [asyncio.create_task(trials.of(wide(9_000, f"p{number}_"), "b")) for number in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(TrialsBusy) as refusal:
            await trials.of(SMALL, "b")
        assert refusal.value.retry_after >= 1
        assert not (await trials.of(SMALL, "a")).reason
    finally:
        await trials.close()
    ended = await asyncio.gather(*large, return_exceptions=True)
    assert all(isinstance(each, Trial | TrialsBusy) for each in ended)


async def test_a_turn_that_does_not_come_ends_the_wait() -> None:
    trials = ConstraintTrials(cpu_s=2.0, quick_s=2.0, wait_s=0.2)
    try:
        first = asyncio.create_task(trials.of(wide(9_000), "b"))
        second = asyncio.create_task(trials.of(wide(9_000, "q"), "b"))
        with pytest.raises(TrialsBusy, match="turn did not come"):
            await second
        assert (await first).reason == constraint_trials.TOO_LONG.format(2)
    finally:
        await trials.close()


async def test_a_process_that_dies_is_started_again(trials: ConstraintTrials) -> None:
    assert not (await trials.of(SMALL, "a")).reason
    process = trials.quick.process._process
    assert process is not None
    process.kill()
    await process.wait()
    assert not (await trials.of(Constraint(REGEX, "[a-z]+"), "a")).reason


async def test_no_process_is_left_behind() -> None:
    trials = ConstraintTrials()
    running = asyncio.create_task(trials.of(wide(9_000), "a"))
    await trials.of(SMALL, "a")
    children = [each for each in psutil.Process().children(recursive=True) if __package__ not in each.name()]
    ours = [each for each in children if "penstock.infra.constraints.constraint_process" in " ".join(each.cmdline())]
    assert ours
    await trials.close()
    with pytest.raises(TrialsBusy, match="stopping"):
        await running
    _, alive = psutil.wait_procs(ours, timeout=10)
    assert not alive


async def test_what_follows_a_trial_has_its_place_in_the_queue_and_its_error_is_the_callers(
    trials: ConstraintTrials,
) -> None:
    found = await trials.of(SMALL, "a", lambda trial: trial.size_bytes)
    assert found.made == found.size_bytes > 0

    def fails(trial: Trial) -> None:
        raise LookupError("no such model")

    with pytest.raises(LookupError, match="no such model"):
        await trials.of(SMALL, "a", fails)


async def test_the_processes_get_no_secrets_of_their_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NATS_URL", "nats://user:secret@broker")
    trials = ConstraintTrials()
    try:
        await trials.of(SMALL, "a")
        process = trials.quick.process._process
        assert process is not None
        assert "PENSTOCK_NATS_URL" not in psutil.Process(process.pid).environ()
    finally:
        await trials.close()


def test_constraints_of_different_kinds_have_different_digests() -> None:
    assert digest_of(Constraint(REGEX, "a")) != digest_of(Constraint(GRAMMAR, "a"))
