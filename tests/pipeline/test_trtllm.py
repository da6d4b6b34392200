"""Workers on TensorRT-LLM's stand-in in the real pipeline: prefill and decode apart, KV moved by the engine itself."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from infra.bus.connection import Bus, connect
from infra.model.modeldir import DEMO
from infra.timeline.leases import leases
from infra.timeline.request_timeline import RequestTimeline
from infra.timeline.tracing.spans import spans
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import ROOT, Deployment, ending, idle_workers, stopped, until
from tests.standins import FOLDER, VARIANT

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def broker_and_gateway(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--engine", "native", "--workers", "0", "--local-prefill-tokens", "16")


@pytest.fixture
async def bus(broker_and_gateway: Deployment) -> AsyncIterator[Bus]:
    made = await connect(broker_and_gateway.state.nats_url, role="client", name="test")
    yield made
    await made.close()


def check_measurements(timeline: RequestTimeline) -> None:
    """What both engines measured is in the client's trace."""
    trace = spans(timeline)
    assert {span.trace_id for span in trace} == {PARENT[3:35]}
    prefill, decode = ({**span.attributes} for name in ("prefill", "decode") for span in trace if span.name == name)
    for stage in (prefill, decode):
        assert stage["gen_ai.latency.e2e"] > 0
        assert stage["gen_ai.latency.time_in_queue"] >= 0
    assert prefill["gen_ai.latency.time_in_model_prefill"] > 0
    assert decode["penstock.engine.kv_transfer.duration"] > 0
    assert decode["penstock.engine.kv_transfer_bytes"] > 0
    assert "penstock.engine.kv_transfer.duration" not in prefill


async def test_prefill_and_decode_on_tensorrt_llm_hand_over_under_our_leases(
    broker_and_gateway: Deployment, bus: Bus
) -> None:
    standin = {"PYTHONPATH": f"{FOLDER}:{ROOT}", VARIANT: "1.2.1"}
    flags = ("--engine", "trtllm", "--model", str(DEMO), "--max-model-len", "2048", "--max-running", "8")
    workers = [
        broker_and_gateway.also("worker", *flags, "--role", role, "--name", role, **standin)
        for role in ("prefill", "decode")
    ]
    await asyncio.gather(*(asyncio.to_thread(worker.wait_for, "worker_registered") for worker in workers))
    question = "The code of the red door is 4711. The code of the blue door is 1234. " * 3 + "What is 347 + 586?"
    async with httpx.AsyncClient(base_url=broker_and_gateway.urls[0], trust_env=False, timeout=60) as http:
        body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
        for path in ("split", "again"):
            answer = await http.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
            assert answer.status_code == 200, answer.text
            timeline, done = await ending(bus, answer.headers["x-request-id"])
            assert not done.code
            if path == "split":
                assert [stage.role for stage in timeline.routed[0].decision.route] == ["prefill", "decode"]
                assert done.worker.startswith("decode")
                check_measurements(timeline)
                first = answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["choices"][0]["message"]["content"] == first

    async def nothing_held() -> bool:
        now = time.time_ns()
        return await idle_workers(bus) and not any(each.is_open(now) for each in (await leases(bus, now)).values())

    await until(nothing_held, "all is let go of")
    found = await leases(bus, time.time_ns())
    assert {lease.last.state for lease in found.values()} == {"released"}
    assert await stopped(workers) == [0, 0]
