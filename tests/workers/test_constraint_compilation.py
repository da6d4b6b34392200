"""Constraints of requests are compiled beside the engine, and no tenant's delay another's."""

import json
from collections.abc import AsyncIterator

import pytest

from penstock.infra.model import modeldir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code
from penstock.schemas.requests import CONSTRAINT, Constraint, GenerateRequest, LogitsProcessor, Sampling
from penstock.schemas.subjects import Subjects
from penstock.workers.runners import token_runner
from tests.workers.support import LogClient, WorkerHarness, engine, request, run_worker

MODEL = modeldir.load(modeldir.DEMO)


def asking(constraint: Constraint, tenant: str, deadline_s: float = 60.0) -> GenerateRequest:
    sampling = Sampling(temperature=0.0, logits_processors=(LogitsProcessor(CONSTRAINT),))
    return request(max_tokens=4, deadline_s=deadline_s, constraint=constraint, tenant=tenant, sampling=sampling)


def wide(number: int) -> Constraint:
    properties = {f"p{number}_{each}": {"type": "string"} for each in range(9_000)}
    return Constraint("json_schema", json.dumps({"type": "object", "properties": properties}))


@pytest.fixture
async def worker(
    broker: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[WorkerHarness]:
    monkeypatch.setattr(token_runner, "TRIAL_CPU_S", 1.0)
    held = engine(tokenizer=MODEL.tokenizer, vocab_size=MODEL.vocab_size, eos_token_ids=MODEL.eos_token_ids)
    async with run_worker(broker, pipeline, held) as made:
        yield made


async def test_a_small_constraint_is_served_while_another_tenants_large_ones_wait(
    log: LogClient, worker: WorkerHarness
) -> None:
    large = [asking(wide(number), "b") for number in range(6)]
    small = asking(Constraint("choice", '["x", "y"]'), "a")
    for each in (*large, small):
        await log.send_job(worker.id, each)
    assert (await log.end(small)).code == ""
    assert sum(bool(log.ends(each)) for each in large) < 6
    end = await log.end(large[0])
    assert (end.code, "CPU time" in end.message) == (Code.invalid_request, True)


async def test_a_constraint_that_would_crash_the_worker_is_refused(log: LogClient, worker: WorkerHarness) -> None:
    """The compiler's stack overflows, which ends the process it runs in."""
    names = {f"a{at}": {"properties": {"x": {"$ref": f"#/$defs/a{at + 1}"}}} for at in range(3_000)}
    chain = {"$defs": names | {"a3000": {"type": "string"}}, "$ref": "#/$defs/a0"}
    asked = asking(Constraint("json_schema", json.dumps(chain)), "b")
    await log.send_job(worker.id, asked)
    end = await log.end(asked)
    assert (end.code, "nested too deeply" in end.message) == (Code.invalid_request, True)


async def test_a_deadline_ends_the_wait_for_a_turn(log: LogClient, worker: WorkerHarness) -> None:
    for number in range(3):
        await log.send_job(worker.id, asking(wide(number), "b"))
    late = asking(wide(9), "b", deadline_s=0.3)
    await log.send_job(worker.id, late)
    assert (await log.end(late)).code == Code.deadline_exceeded
