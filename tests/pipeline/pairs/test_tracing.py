"""Traces of real processes, shown by ``penstock inspect`` and sent to a real OTLP collector."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import nats
import pytest

from penstock.infra.bus.connection import Bus
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas.subjects import HEADER_FINAL, HEADER_REPLY_TO, HEADER_REQUEST
from tests.penstock.log_tools.traces.collector import Collector, Got
from tests.pipeline.support import Deployment, ending, ok, parse_sse, registrations, token_prompt, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["decode", "decode", "prefill", "prefill"]
TRACE, SPAN = PARENT[3:35], PARENT[36:52]
pytestmark = pytest.mark.timeout(120)


def body(seed: int, tokens: int = 300, **more: Any) -> dict[str, Any]:
    prompt = token_prompt(tokens, seed)
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}


async def ask(http: httpx.AsyncClient, asked: dict[str, Any], traceparent: str = "", **headers: str) -> str:
    """The request's id."""
    answer = await ok(
        http.post(
            "/v1/completions", json=asked, headers=headers | ({"traceparent": traceparent} if traceparent else {})
        )
    )
    return str(answer.headers["x-request-id"])


async def arrived(collector: Collector, request_id: str, within_s: float = 30.0) -> list[Got]:
    async def come() -> list[Got]:
        return collector.of(request_id)

    found: list[Got] = await until(come, f"the trace of {request_id}", within_s)
    return found


def named(spans: list[Got], name: str, attempt: int = 1) -> Got:
    (found,) = [s for s in spans if s.name == name and s.attributes.get("penstock.attempt", attempt) == attempt]
    return found


def check(spans: list[Got]) -> None:
    by_id = {span.span_id: span for span in spans}
    assert len({span.trace_id for span in spans}) == 1
    for span in spans[1:]:
        parent = by_id[span.parent_id]
        assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns
        assert set(span.links) <= by_id.keys()


async def penstock(deployment: Deployment, *argv: str) -> str:
    """What a command prints."""
    status, printed, errors = await deployment.command(*argv)
    assert status == 0, errors
    return printed


def pid_of(deployment: Deployment, name: str) -> int:
    (pid,) = [process.pid for process in deployment.state.processes if process.name == name]
    return pid


async def test_one_trace_goes_through_gateway_router_prefill_and_decode_below_the_clients_span(
    collector: Collector, http: httpx.AsyncClient
) -> None:
    request_id = await ask(http, body(60_001), PARENT, tracestate="vendor=1")
    spans = await arrived(collector, request_id)
    check(spans)
    assert {span.trace_id for span in spans} == {TRACE}
    root = spans[0]
    assert (root.name, root.service, root.parent_id, root.state) == (
        "text_completion tiny",
        "penstock-gateway",
        SPAN,
        "vendor=1",
    )
    stages = sorted((span for span in spans if span.parent_id == root.span_id), key=lambda span: span.start_ns)
    assert [(span.service, span.name) for span in stages] == [
        ("penstock-router", "route"),
        ("penstock-worker", "prefill"),
        ("penstock-worker", "decode"),
    ]
    route, prefill, decode = stages
    assert prefill.instance.startswith("prefill-")
    assert route.attributes["penstock.router.route"] == [f"prefill {prefill.instance}", f"decode {decode.instance}"]
    assert decode.links == (prefill.span_id,)
    transfer = named(spans, "transfer")
    assert transfer.parent_id == decode.span_id
    assert (transfer.attributes["penstock.transfer.blocks"], transfer.attributes["penstock.transfer.source"]) == (
        10,
        prefill.instance,
    )
    below = [span.name for span in spans if span.parent_id == decode.span_id]
    assert sorted(below) == ["first token", "generate", "transfer", "wait"]
    assert root.attributes["gen_ai.usage.input_tokens"] == 300
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert decode.attributes["penstock.worker.preemptions"] == 0


async def test_a_request_without_a_caller_has_its_own_id_as_trace_id(
    collector: Collector, http: httpx.AsyncClient
) -> None:
    request_id = await ask(http, body(60_002, 20))
    spans = await arrived(collector, request_id)
    check(spans)
    assert spans[0].trace_id == request_id.replace("-", "")
    assert spans[0].parent_id == ""
    assert sorted(span.name for span in spans[1:]) == ["decode", "generate", "prompt", "route", "wait"]


async def test_what_the_client_does_not_want_sampled_is_not_sent(collector: Collector, http: httpx.AsyncClient) -> None:
    unsampled = await ask(http, body(60_003, 20), PARENT[:-1] + "0")
    await arrived(collector, await ask(http, body(60_004, 20)))
    assert collector.of(unsampled) == []


async def test_nats_takes_the_same_headers(pairs: Deployment, collector: Collector) -> None:
    parent = PARENT.replace(TRACE, "1" * 32)
    nc = await nats.connect(pairs.state.client_nats_url)
    try:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        inbox = nc.new_inbox()
        await nc.subscribe(inbox, cb=answers.put)
        asked = json.dumps(body(60_005, 20)).encode()
        headers = {HEADER_REPLY_TO: inbox, "traceparent": parent}
        await nc.jetstream().publish("ps.submit.tiny", asked, headers=headers)
        answer = await asyncio.wait_for(answers.get(), 20)
        assert HEADER_FINAL in answer.headers, answer.data
    finally:
        await nc.close()
    spans = await arrived(collector, answer.headers[HEADER_REQUEST])
    assert {span.trace_id for span in spans} == {"1" * 32}
    assert spans[0].parent_id == SPAN


async def test_a_killed_workers_attempt_is_a_span_with_an_error(
    pairs: Deployment, collector: Collector, http: httpx.AsyncClient, bus: Bus
) -> None:
    asked = body(60_006, stream=True, max_tokens=250)
    async with http.stream("POST", "/v1/completions", json=asked) as answer:
        request_id = answer.headers["x-request-id"]
        raw, killed = b"", ""
        async for piece in answer.aiter_bytes():
            raw += piece
            if not killed and raw.count(b"\n\n") > 5:
                (job,) = (await read_timeline(bus, request_id)).routed
                killed = job.decision.route[-1].worker
                os.kill(pid_of(pairs, killed.rpartition("-")[0]), signal.SIGKILL)
    assert parse_sse(raw)[-1].data == "[DONE]"
    _, end = await ending(bus, request_id)
    assert end.attempt == 2
    spans = await arrived(collector, request_id)
    check(spans)
    lost = named(spans, "decode", 1)
    assert (lost.instance, lost.failed) == (killed, True)
    assert lost.attributes["error.type"] == "worker_lost"
    again = [span for span in spans if span.instance == end.worker and span.parent_id == spans[0].span_id]
    assert [span.failed for span in again] == [False]
    assert not spans[0].failed
    assert spans[0].attributes["penstock.attempts"] == 2
    retried = named(spans, "route", 2)
    assert lost.span_id in retried.links
    assert str(retried.attributes["penstock.router.reason"]).partition(":")[0] == "worker_lost"

    async def all_serve() -> bool:
        found = await registrations(bus)
        return killed not in found and sorted(each.role for each in found.values()) == STAGES

    await until(all_serve, "a successor of the killed worker is registered")


async def test_a_killed_exporter_continues_where_it_stopped(
    pairs: Deployment, collector: Collector, http: httpx.AsyncClient
) -> None:
    await arrived(collector, await ask(http, body(60_010, 20)))
    os.kill(pid_of(pairs, "trace-0"), signal.SIGKILL)
    missed = [await ask(http, body(60_011 + number, 20)) for number in range(5)]
    for request_id in missed:
        check(await arrived(collector, request_id))


async def test_while_the_collector_is_away_requests_run_and_their_traces_come_later(
    pairs: Deployment, collector: Collector, http: httpx.AsyncClient
) -> None:
    with collector.away():
        missed = [await ask(http, body(60_020 + number, 20)) for number in range(3)]

        async def noticed() -> bool:
            return "span_export_failed" in pairs.logs("trace")

        await until(noticed, "the exporter finds nobody", 25)
    with collector.answering(503):
        missed += [await ask(http, body(60_030, 20))]

        async def refused() -> bool:
            return collector.refused > 0

        await until(refused, "the collector refuses a batch", 25)
    for request_id in missed:
        check(await arrived(collector, request_id, 40))


async def test_a_trace_is_inspected_and_sent_again_with_the_same_ids(
    pairs: Deployment, collector: Collector, http: httpx.AsyncClient
) -> None:
    request_id = await ask(http, body(60_040))
    first = await arrived(collector, request_id)
    inspected = json.loads(await penstock(pairs, "inspect", f"cmpl-{request_id}", "--json"))
    assert [phase["name"] for phase in inspected["phases"]] == [
        *("request", "route", "prefill", "wait", "prompt"),
        *("decode", "transfer", "wait", "first token", "generate"),
    ]
    other = Collector()
    other.start()
    try:
        await penstock(pairs, "trace", "--otlp-endpoint", other.url, "--since", "10m", "--once", "--name", "again")
    finally:
        other.stop()
    assert sorted(other.of(request_id)) == sorted(first)
