"""Every request counts once, with its end, and histograms reach the longest value that their limit allows."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import nats
import pytest

from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.infra.metrics.scope import MetricScope
from penstock.router.state.router_metrics import Metrics as RouterMetrics
from penstock.schemas.streams import LONGEST_DEADLINE_S
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from tests.pipeline.support import Deployment, metrics, until, words

GATEWAY = "penstock_gateway_"
TOKENS = 7
OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True}


class Counted:
    """What one gateway counts from now on."""

    def __init__(self, url: str, before: dict[str, float]) -> None:
        self._url, self._before = url, before

    async def __call__(self, *names: str) -> list[float]:
        now = await metrics(self._url)
        return [now.get(GATEWAY + name, 0) - self._before.get(GATEWAY + name, 0) for name in names]

    async def becomes(self, expected: dict[str, float]) -> None:
        seen: list[float] = []

        async def reached() -> bool:
            seen[:] = await self(*expected)
            return seen == list(expected.values())

        await until(reached, f"{expected}")


@pytest.fixture
async def counted(fast: Deployment) -> Counted:
    return Counted(fast.urls[0], await metrics(fast.urls[0]))


@pytest.fixture
async def gateway(fast: Deployment) -> Any:
    async with httpx.AsyncClient(base_url=fast.urls[0], trust_env=False, timeout=30) as client:
        yield client


async def test_a_background_response_counts_when_it_ends(counted: Counted, gateway: httpx.AsyncClient) -> None:
    body = OPTIONS | {"input": words(20, 1), "max_output_tokens": TOKENS, "background": True}
    assert (await gateway.post("/v1/responses", json=body)).json()["status"] == "queued"
    await counted.becomes(
        {
            'requests_total{api="http",code="ok"}': 1,
            "output_tokens_total": TOKENS,
            "request_output_tokens_count": 1,
            "request_output_tokens_sum": TOKENS,
            "request_seconds_count": 1,
            "ttft_seconds_count": 1,
        }
    )


async def test_a_background_response_that_fails_counts_as_such(slow: Deployment) -> None:
    counted = Counted(slow.urls[0], await metrics(slow.urls[0]))
    async with httpx.AsyncClient(base_url=slow.urls[0], trust_env=False, timeout=30) as client:
        body = OPTIONS | {"input": words(20, 2), "max_output_tokens": 2_000, "background": True, "timeout_s": 0.5}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        names = {
            'requests_total{api="http",code="ok"}': 0.0,
            'requests_total{api="http",code="deadline_exceeded"}': 1.0,
        }
        await counted.becomes(names)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_prompts_counts(counted: Counted, gateway: httpx.AsyncClient, stream: bool) -> None:
    prompts = [words(20, 30 + number) for number in range(3)]
    body = OPTIONS | {"prompt": prompts, "max_tokens": TOKENS, "stream": stream}
    assert (await gateway.post("/v1/completions", json=body)).status_code == 200
    await counted.becomes(
        {
            'requests_total{api="http",code="ok"}': 1,
            "output_tokens_total": 3 * TOKENS,
            "request_output_tokens_count": 3,
            "request_prompt_tokens_count": 3,
            "ttft_seconds_count": 3 if stream else 0,
        }
    )


async def test_of_several_prompts_a_failure_in_the_stream_counts_as_such(slow: Deployment) -> None:
    counted = Counted(slow.urls[0], await metrics(slow.urls[0]))
    async with httpx.AsyncClient(base_url=slow.urls[0], trust_env=False, timeout=30) as client:
        body = OPTIONS | {"prompt": ["a b", "c d"], "max_tokens": 2_000, "stream": True, "timeout_s": 1}
        assert "deadline_exceeded" in (await client.post("/v1/completions", json=body)).text
    await counted.becomes(
        {'requests_total{api="http",code="ok"}': 0, 'requests_total{api="http",code="deadline_exceeded"}': 1}
    )


async def test_an_answer_that_is_read_again_counts_no_second_time(counted: Counted, gateway: httpx.AsyncClient) -> None:
    body = OPTIONS | {"prompt": words(20, 5), "max_tokens": TOKENS, "stream": True}
    request_id = (await gateway.post("/v1/completions", json=body)).headers["x-request-id"]
    expected = {
        'requests_total{api="http",code="ok"}': 1.0,
        "output_tokens_total": float(TOKENS),
        "request_output_tokens_count": 1.0,
        "ttft_seconds_count": 1.0,
    }
    await counted.becomes(expected)
    assert (await gateway.get(f"/v1/requests/{request_id}/stream")).status_code == 200
    assert await counted(*expected) == list(expected.values())


async def test_what_clients_send_makes_no_series(gateway: httpx.AsyncClient) -> None:
    """A label by a text of the client, such as a model or a path, adds series until the process is restarted."""
    tag = "q7j0xw"
    headers = dict.fromkeys(("User-Agent", "X-Request-Id", "Idempotency-Key", "X-Forwarded-For", "OpenAI-Project"), tag)
    chat = {"messages": [{"role": "user", "content": tag}], "max_tokens": 2}
    tool = {"type": "function", "function": {"name": tag}}
    for fields in ({"model": tag}, {"user": tag, "prompt_cache_key": tag}, {"tools": [tool], "tool_choice": "none"}):
        await gateway.post("/v1/chat/completions", json=chat | fields, headers=headers)
    for path in (f"/{tag}", f"/v1/models/{tag}", f"/v1/requests/{tag}", f"/v1/files/{tag}", f"/v1/responses/{tag}"):
        await gateway.get(path, headers=headers)
    await gateway.request(tag.upper(), "/v1/chat/completions", headers=headers)
    page = (await gateway.get("/metrics")).text
    assert f'{GATEWAY}requests_total{{api="http",code="model_not_found"' in page
    assert tag not in page.lower()


async def test_answers_over_nats_count_their_tokens(fast: Deployment) -> None:
    before = [await metrics(url) for url in fast.urls]
    client = await nats.connect(fast.state.client_nats_url)
    try:
        for stream in (False, True):
            body = json.dumps(OPTIONS | {"prompt": words(20, 6), "max_tokens": TOKENS, "stream": stream}).encode()
            inbox = client.new_inbox()
            replies = await client.subscribe(inbox)
            await client.publish("ps.ask.tiny", body, reply=inbox)
            while "Penstock-Final" not in ((await replies.next_msg(timeout=30)).headers or {}):
                pass
    finally:
        await client.close()

    async def all_counted() -> bool:
        now = [await metrics(url) for url in fast.urls]
        return all(
            sum(page.get(GATEWAY + name, 0) - old.get(GATEWAY + name, 0) for page, old in zip(now, before, strict=True))
            == value
            for name, value in (
                ('requests_total{api="nats",code="ok"}', 2),
                ("output_tokens_total", 2 * TOKENS),
                ("request_output_tokens_count", 2),
            )
        )

    await until(all_counted, "both are counted")


@pytest.mark.parametrize(
    ("made", "limited_otherwise"),
    [
        (lambda scope: GatewayMetrics(scope).of("m").scope, ()),
        (lambda scope: RouterMetrics(scope), ("decision_seconds",)),
        (lambda scope: WorkerMetrics(scope), ("read_seconds", "moves_seconds")),
    ],
)
def test_histograms_of_times_reach_the_longest_deadline(
    made: Callable[[MetricScope], Any], limited_otherwise: tuple[str, ...]
) -> None:
    found = 0
    for family in made(MetricScope()).registry.collect():
        if family.type == "histogram" and family.name.endswith("_seconds"):
            bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
            found += 1
            if not family.name.endswith(limited_otherwise or ("?",)):
                assert sorted(bounds)[-2] >= LONGEST_DEADLINE_S, family.name
    assert found
