"""Gateways in the tests' own process on a real broker, and an engine that computes what a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from nats.aio.msg import Msg

from penstock.configs.settings import GatewaySettings
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.nats.protocol import key_of
from penstock.gateway.nats.services import NatsApi
from penstock.gateway.service.gateway import CellLink, Gateway
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Publisher
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import requests, wire
from penstock.schemas.done import Done, Outcome
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import HEADER_ERROR, HEADER_FINAL, HEADER_MSG_ID, HEADER_SEQ, Subjects, cell_namespace
from penstock.schemas.tokens import Finish, TokenBatch, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.infra.bus.support import eventually, opened

BODY = {"model": "tiny", "prompt": "one two three", "max_tokens": 8, "temperature": 0}
WITHIN_S = 30.0


class Engine:
    """In the place of router and worker: sees each accepted request, and streams tokens when it is asked to."""

    def __init__(self, bus: Bus) -> None:
        self.accepted: list[GenerateRequest] = []
        self._bus = bus
        self._sent = 0

    async def start(self) -> None:
        async def take(message: Msg) -> None:
            self.accepted.append(requests.decode(message.data))

        await self._bus.nc.subscribe(self._bus.subjects.all("request"), cb=take)
        await self._bus.nc.flush()

    async def stream(self, request: GenerateRequest, first: int, count: int, *, end: bool = False) -> None:
        """Store tokens ``first`` .. of an accepted request, and their end."""
        item = TokenItem(
            request.id, 1, 0, first, pack_tokens(range(100 + first, 100 + first + count)), _finish if end else None
        )
        self._sent += 1
        batch = wire.encode(TokenBatch("w", 1, self._sent, (item,)))
        await self._bus.js.publish(
            self._bus.subjects.tokens(request.token_address), batch, headers={HEADER_MSG_ID: f"w-1-{self._sent}"}
        )

    async def record(self, request: GenerateRequest, count: int, left_out: tuple[str, ...] = ()) -> None:
        """Store the terminal event of a request that ended after ``count`` tokens."""
        tokens = b"" if "tokens" in left_out else pack_tokens(range(100, 100 + count))
        end = Done(
            request.id, request.model, 1, choices=(Outcome(tokens, "length"),), left_out=left_out,
            submitted=wire.encode(request),
        )  # fmt: skip
        await self._bus.js.publish(self._bus.subjects.done(request.tenant, request.model, request.id), wire.encode(end))

    async def answer_all(self) -> None:
        """Answer each request with one token as soon as it is accepted. Runs until it is cancelled."""
        answered = 0
        while True:
            for request in self.accepted[answered:]:
                await self.stream(request, 0, 1, end=True)
                answered += 1
            await asyncio.sleep(0.005)


_finish = Finish("length")


class Running(NamedTuple):
    """A gateway and its NATS API."""

    gateway: Gateway
    api: NatsApi

    async def stop(self, drain_s: float) -> None:
        if not self.gateway.draining:
            self.gateway.draining = True
            await self.api.close(drain_s)


@asynccontextmanager
async def gateway_on(
    broker: EmbeddedNats,
    subjects: Subjects,
    model: ModelDir,
    *,
    cells: Sequence[EmbeddedNats] = (),
    change: Callable[[Gateway], object] = lambda gateway: None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """One gateway, stopped at once in the end.

    Args:
        cells: brokers of the cells after the first.
        change: called before the gateway is opened.
    """
    async with AsyncExitStack() as stack:
        links = []
        for cell, server in enumerate((broker, *cells)):
            own = Subjects(cell_namespace(subjects.namespace, cell))
            bus = await stack.enter_async_context(opened(server, own, skip_subject_validation=True))
            publisher = Publisher(bus)
            await publisher.open()
            stack.push_async_callback(publisher.close)
            connecting = bus.tasks.spawn(asyncio.sleep(0), name="connected") if cell else None
            if connecting is not None:
                await connecting
            links.append(CellLink(bus, publisher, connecting))
        bus = links[0].bus
        gateway = Gateway(
            links,
            [model],
            GatewaySettings(served_model_name="tiny", name=f"gw{id(bus)}", cells=len(links), **settings),
            GatewayMetrics(MetricScope()),
        )
        one = Running(gateway, NatsApi(gateway, bus.tasks.group("nats-api")))
        change(gateway)
        await gateway.open()
        stack.push_async_callback(gateway.close)
        await one.api.open()
        stack.push_async_callback(one.stop, 0.0)
        await bus.nc.flush()
        yield one


class Submitter:
    """A client in the pipeline's own account, or of a tenant. ``received``: every message at its subjects, in order."""

    def __init__(self, bus: Bus, tenant: str = "") -> None:
        self._bus = bus
        self._tenant = tenant
        self._namespace = bus.subjects.namespace
        self.received: list[Msg] = []

    async def listen(self, *subjects: str) -> None:
        async def take(message: Msg) -> None:
            self.received.append(message)

        for subject in subjects:
            await self._bus.nc.subscribe(subject, cb=take)
        await self._bus.nc.flush()

    def answer_subject(self, message_id: str) -> str:
        return f"{self._namespace}.answer.{key_of(message_id)}"

    async def submit(self, body: dict[str, Any] | bytes = BODY, **headers: str) -> bool:
        """Whether the broker took it for a repeat. Headers as keywords: ``Nats_Msg_Id``."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        model = f"{self._tenant}.tiny" if self._tenant else "tiny"
        ack = await self._bus.js.publish(f"{self._namespace}.submit.{model}", data, headers=named, timeout=WITHIN_S)
        return bool(ack.duplicate)

    async def settled(self) -> None:
        """Wait until every stored submission was answered, and its messages have arrived."""
        stream = self._bus.subjects.stream("SUBMIT")
        async with asyncio.timeout(WITHIN_S):
            while (await self._bus.js.stream_info(stream)).state.messages:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.005)
        await self._bus.nc.flush()

    async def got(self, holds: Callable[[list[Msg]], Any]) -> list[Msg]:
        """The messages, once something holds of them."""
        await eventually(lambda: holds(self.received), WITHIN_S)
        return self.received


def finals(messages: list[Msg]) -> int:
    return sum(HEADER_FINAL in (message.headers or {}) for message in messages)


def number_of(message: Msg) -> int:
    """-1: it is not part of an answer."""
    return int((message.headers or {}).get(HEADER_SEQ, -1))


def error_of(message: Msg) -> str:
    return str((message.headers or {}).get(HEADER_ERROR, ""))


@asynccontextmanager
async def answering(engine: Engine) -> AsyncIterator[None]:
    """The engine answers everything at once."""
    task = asyncio.create_task(engine.answer_all())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
