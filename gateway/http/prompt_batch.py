"""Answers a completion of several prompts: a request for each, in the log and for its worker, and one answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from gateway.answer_shapes import Aggregator, aggregator_for
from gateway.http.answers import DISCONNECTED, JSON, Scope, Send, encode_answer, id_headers
from gateway.http.connections import SCOPE, Connection
from gateway.http.idempotency import ClientIds
from gateway.log.inflight import InflightRequest
from gateway.openai.errors import unsupported
from gateway.openai.prepare import PreparedRequest
from gateway.openai.prompt_batch import merge_answers, split_prompts
from gateway.service import Gateway


async def answer_prompts(
    gateway: Gateway,
    body: bytes,
    names: ClientIds,
    prepare: Callable[[bytes], Awaitable[PreparedRequest]],
    scope: Scope,
    send: Send,
) -> bool:
    """Answer a body of several prompts; False: there are not several.

    If a prompt cannot be served, none is; if a request fails, the others are cancelled.

    Raises:
        ServingError: of the first prompt that cannot be served, or the first request that failed.
    """
    bodies = await gateway.run_for(body, split_prompts, body)
    if not bodies:
        return False
    if names.key:
        raise unsupported("Idempotency-Key", "Idempotency-Key is not supported with several prompts")
    prepared = [await prepare(each) for each in bodies]
    await _answer(gateway, prepared, scope, send)
    return True


async def _answer(gateway: Gateway, prepared: Sequence[PreparedRequest], scope: Scope, send: Send) -> None:
    """
    Raises:
        ServingError: of the first request that failed.
    """
    inflights: list[InflightRequest] = []
    connection: Connection = scope[SCOPE]
    try:
        for each in prepared:
            gateway.metrics.prompt.inc(each.prompt_tokens)
            inflights.append(await gateway.submit(each.request))
        gone = partial(_fail, inflights)
        connection.on_lost = gone
        if connection.lost:
            gone()
        gateway.answering.update(inflights)
        collectors = await _collected(gateway, inflights)
        parts = [await encode_answer(collector) for collector in collectors]
        whole = await asyncio.to_thread(merge_answers, parts)
        headers = [JSON, (b"content-length", b"%d" % len(whole)), *id_headers(inflights[0].request)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": whole})
        for collector in collectors:
            gateway.metrics.output.inc(collector.usage.completion_tokens)
        gateway.metrics.response_bytes.inc(len(whole))
    finally:
        connection.on_lost = None
        for inflight in inflights:
            gateway.answering.discard(inflight)
            gateway.cancel_unfinished(inflight)


async def _collected(gateway: Gateway, inflights: Sequence[InflightRequest]) -> list[Aggregator]:
    """
    Raises:
        ServingError: of the first request that failed.
    """
    collectors = [aggregator_for(inflight.request, gateway.model.detokenizer) for inflight in inflights]
    try:
        async with asyncio.TaskGroup() as group:
            for collector, inflight in zip(collectors, inflights, strict=True):
                group.create_task(_collect(collector, inflight))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return collectors


async def _collect(collector: Aggregator, inflight: InflightRequest) -> None:
    """
    Raises:
        ServingError: the request failed, or the client went away.
    """
    while not collector.push(await inflight.take()):
        pass
    if collector.error is not None:
        raise collector.error


def _fail(inflights: Sequence[InflightRequest]) -> None:
    for inflight in inflights:
        inflight.fail(DISCONNECTED)
