"""`penstock up` with TensorRT-LLM's stand-in: prefill and decode apart, KV moved by the engine itself."""

import json
import time
from pathlib import Path

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import DEMO
from penstock.log_tools.requests.leases import leases
from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.log_tools.traces.spans import spans
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import ROOT, Deployment, bus_of, ending, idle_workers, metrics, ok, until
from tests.standins import FOLDER, VARIANT

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# engines/trtllm/test_handoff has the engines, test_vllm such an engine in a deployment.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A prefill and a decode worker, each with its engine arguments and two GPUs."""
    home = tmp_path_factory.mktemp("arguments")
    for role, batch in (("prefill", 4), ("decode", 8)):
        (home / f"{role}.yaml").write_text(f"max_batch_size: {batch}\ntensor_parallel_size: 2\n")
    return new_deployment(
        *("--engine", "trtllm", "--model", str(DEMO), "--max-model-len", "2048", "--max-running", "8"),
        *("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "16", "--gpus", "4,5,6,7"),
        *("--prefill-engine-args", f"{home}/prefill.yaml", "--decode-engine-args", f"{home}/decode.yaml"),
        **{"PYTHONPATH": f"{FOLDER}:{ROOT}", VARIANT: "1.2.1", "TENSORRT_LLM_STANDIN_QUIRKS": json.dumps({"gpus": 2})},
    )


bus = bus_of("deployment")


def environ_of(deployment: Deployment, name: str) -> dict[str, str]:
    """Of a running child."""
    pid = next(process.pid for process in deployment.state.processes if process.name == name)
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


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


async def test_prefill_and_decode_on_tensorrt_llm_hand_off_under_our_leases(deployment: Deployment, bus: Bus) -> None:
    codes = "The code of the red door is 4711. The code of the blue door is 1234. "
    question = codes * 3 + "What is the code of the red door?"
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60) as http:
        body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
        for path in ("split", "again"):
            answer = await ok(http.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT}))
            timeline, done = await ending(bus, answer.headers["x-request-id"])
            assert not done.code
            if path == "split":
                assert [stage.role for stage in timeline.routed[0].decision.route] == ["prefill", "decode"]
                assert done.worker.startswith("decode")
                check_measurements(timeline)
                first = answer.json()["choices"][0]["message"]["content"]
                assert "4711" in first
            assert answer.json()["choices"][0]["message"]["content"] == first

    async def nothing_held() -> bool:
        now = time.time_ns()
        return await idle_workers(bus) and not any(each.is_open(now) for each in (await leases(bus, now)).values())

    await until(nothing_held, "all blocks are free and all leases closed")
    found = await leases(bus, time.time_ns())
    assert {lease.last.state for lease in found.values()} == {"released"}


async def test_each_worker_has_its_own_gpus_and_is_measured(deployment: Deployment) -> None:
    assert environ_of(deployment, "prefill-0")["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert environ_of(deployment, "decode-0")["CUDA_VISIBLE_DEVICES"] == "6,7"
    pages = {process.name: process.metrics_url for process in deployment.state.processes if process.metrics_url}
    assert set(pages) == {"prefill-0", "decode-0", "router-0"}
    counted = {name: await metrics(url.removesuffix("/metrics")) for name, url in pages.items()}
    assert counted["decode-0"]["penstock_worker_tokens_total"] > 1
    assert counted["router-0"]["penstock_router_workers"] == 2
