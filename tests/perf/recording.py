"""Writes a synthetic log of many requests, as gateways, routers and workers would have stored it.

    python -m tests.perf.recording --data-dir /tmp/recording --requests 100000

No process of a deployment runs: this one publishes the messages itself (requests, jobs with score tables, handoffs,
ledger lines, token batches, records), with the structs that the processes use, in the order and with the times in which
they publish them. So a log of any size is written in minutes, and everything that reads logs can be measured on it.
Half of the requests are disaggregated. Some fail, are cancelled, or are continued by a second worker. There are no KV
events, and no consumers: a deployment that starts on this log would run every request again.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from nats.js.api import StreamInfo

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import block_hashes, jobs, wire
from penstock.schemas.done import (
    Done,
    Outcome,
    Returned,
    Timings,
    Usage,
    encode_within,
    not_recorded,
    recorded,
    returned_header,
)
from penstock.schemas.jobs import Candidate, Decision, Job, Stage
from penstock.schemas.requests import GenerateRequest, Priority, Stop, new_request_id
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, HEADER_RETURNED, Subjects
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenBatch, TokenItem
from penstock.schemas.transfer import Endpoint, Handoff, Handoffs, Memory, Prefilled, Ticket

MODEL, GATEWAY, ROUTER, BLOCK = "tiny", "gateway-0-1a2b3c4d", "router-0-5e6f7a8b", 32
AGGREGATED = tuple(f"aggregated-{n}-{n:08x}" for n in range(4))
PREFILL = tuple(f"prefill-{n}-{n:08x}" for n in range(2))
DECODE = tuple(f"decode-{n}-{n:08x}" for n in range(2))
OPEN = 64  # requests at once
TOKENS_PER_BATCH = 8
ACKNOWLEDGED = (
    200  # one message in so many is acknowledged: the broker drops messages that arrive faster than it stores them
)
FAILURES = ("deadline_exceeded", "engine_error", "worker_lost")

Publish = Callable[[str, bytes, dict[str, str]], Awaitable[None]]


class _Running(msgspec.Struct):
    request: GenerateRequest
    raw: bytes
    tokens: list[int]
    code: str = ""  # how it fails, after half of its tokens
    breaks: bool = False  # its first worker gives it back after half of its tokens
    attempt: int = 1
    worker: str = ""
    sent: int = 0
    cached: int = 0
    routed_ns: int = 0
    started_ns: int = 0
    first_ns: int = 0


class Shape(NamedTuple):
    """Sizes of the recorded requests, in tokens."""

    prompt: int
    output: int


USUAL = Shape(240, 64)


class SyntheticLog:
    """Publishes the messages of requests from acceptance to record, ``OPEN`` requests at a time."""

    def __init__(self, publish: Publish, subjects: Subjects, seed: int = 1, shape: Shape = USUAL) -> None:
        self._publish = publish
        self._subjects = subjects
        self._rng = random.Random(seed)
        self._output = shape.output
        self._words = load_tokenizer(TINY).encode("The quick brown fox tells a story about numbers. " * 40).ids
        self._shared = [self._draw(shape.prompt // 2) for _ in range(50)]  # beginnings of prompts, such as system ones
        self._own = shape.prompt - shape.prompt // 2
        self._root = block_hashes.root("recorded")
        self._batches = dict.fromkeys((*AGGREGATED, *PREFILL, *DECODE), 0)
        self._epoch = time.time_ns()

    async def record(self, count: int, progress: Callable[[int], None] = lambda done: None) -> list[str]:
        """Returns the ids, in the order of acceptance."""
        ids: list[str] = []
        running: list[_Running] = []
        done = 0
        while done < count:
            while len(ids) < count and len(running) < OPEN:
                each = await self._accept()
                ids.append(each.request.id)
                running.append(each)
            await self._stream(running)
            ended = [each for each in running if each.sent == len(each.tokens) or (each.code and self._half(each))]
            for each in ended:
                await self._end(each)
                running.remove(each)
            done += len(ended)
            progress(done)
        return ids

    def _draw(self, count: int) -> list[int]:
        return self._rng.choices(self._words, k=count)

    @staticmethod
    def _half(each: _Running) -> bool:
        return each.sent >= len(each.tokens) // 2

    async def _accept(self) -> _Running:
        now, rng = time.time_ns(), self._rng
        prompt = wire.pack_tokens([*rng.choice(self._shared), *self._draw(self._own)])
        request = GenerateRequest(
            new_request_id(now),
            MODEL,
            GATEWAY,
            prompt,
            Stop(self._output),
            now,
            now + 600_000_000_000,
            block_hashes.chain(prompt, BLOCK, self._root),
            BLOCK,
            priority=rng.choices(tuple(Priority), (1, 8, 1))[0],
            user=f"user-{rng.randrange(200)}",
            endpoint=rng.choice(("chat", "text")),
            tenant=rng.choice(("default", "default", "acme")),
        )
        raw = wire.encode(request)
        subject = self._subjects.request(MODEL, request.priority.value, request.id)
        await self._publish(subject, raw, {HEADER_MSG_ID: request.id})
        each = _Running(request, raw, self._draw(rng.randrange(self._output // 2, self._output + 1)))
        luck = rng.random()
        each.code = "cancelled" if luck < 0.01 else rng.choice(FAILURES) if luck < 0.02 else ""
        each.breaks = 0.02 <= luck < 0.025
        await self._place(each)
        return each

    # --- routers ---

    async def _place(self, each: _Running, reason: str = "new") -> None:
        rng, now = self._rng, time.time_ns()
        split = rng.random() < 0.5
        if split:
            route: tuple[Stage, ...] = (Stage("prefill", rng.choice(PREFILL)), Stage("decode", rng.choice(DECODE)))
        else:
            route = (Stage("aggregated", rng.choice([name for name in AGGREGATED if name != each.worker])),)
        prompt_blocks = len(each.request.digests) // 16
        overlap = rng.randrange(prompt_blocks + 1)
        each.worker, each.routed_ns, each.cached = route[-1].worker, now, overlap * BLOCK
        decision = Decision(
            "kv",
            route[0].worker,
            ROUTER,
            now,
            self._candidates(route, overlap),
            prompt_blocks,
            waited_ns=min(rng.randrange(2_000_000), now - each.request.created_ns),
            reason=reason,
            route=route if split else (),
            how="split: the prompt is long" if split else "",
        )
        resume = (wire.pack_tokens(each.tokens[: each.sent]),) if each.sent else ()
        job = Job(msgspec.Raw(each.raw), each.attempt, decision, resume, route=route[1:])
        await self._work(each, route, job, wire.encode(job), f"{each.request.id}:{each.attempt}")
        each.started_ns = time.time_ns()
        if split:
            await self._hand_off(each, route, job)

    def _candidates(self, route: Sequence[Stage], overlap: int) -> tuple[Candidate, ...]:
        rng, chosen = self._rng, {stage.worker for stage in route}
        roles = {"prefill": PREFILL, "decode": DECODE} if len(route) > 1 else {"": AGGREGATED}
        return tuple(
            Candidate(
                name,
                overlap if name in chosen else rng.randrange(overlap + 1),
                rng.randrange(200),
                rng.randrange(900),
                rng.randrange(30),
                64,
                1.0 if name in chosen else 1.0 + rng.random(),
                role=role,
            )
            for role, names in roles.items()
            for name in names
        )

    async def _work(self, each: _Running, route: Sequence[Stage], job: Job, body: bytes, msg_id: str) -> None:
        request = each.request
        load = jobs.load_header(
            len(request.prompt) // 4, each.cached, GATEWAY, request.deadline_ns, request.priority.value, 1,
            tuple(route) if len(job.decision.route) else (),
        )  # fmt: skip
        subject = self._subjects.work(route[0].role, route[0].worker)
        await self._publish(subject, body, {HEADER_MSG_ID: msg_id, HEADER_LOAD: load})

    # --- workers ---

    async def _hand_off(self, each: _Running, route: Sequence[Stage], job: Job) -> None:
        """Publish the prefill worker's part: the first token, the handoff, and the ledger lines of both workers."""
        source, target, now = route[0].worker, route[1].worker, time.time_ns()
        await self._send(source, [each], 1)
        count = len(each.request.digests) // 16
        numbers = wire.pack_tokens(range(count))
        endpoint = Endpoint(f"{source}-1", "loopback", pools={"kv": Memory(0, 1 << 16, 4096)}, host="recorded")
        name = f"{each.request.id}:{each.attempt}:decode"
        ticket = Ticket(name, source, endpoint, "kv", numbers, numbers, now + 30_000_000_000)
        onward = msgspec.structs.replace(job, route=(), resume=(wire.pack_tokens(each.tokens[: each.sent]),))
        raw = msgspec.Raw(wire.encode(onward))
        made = Prefilled(
            each.request.id, each.attempt, raw, ticket, each.cached, started_ns=each.started_ns, first_token_ns=now
        )
        await self._work(each, route[1:], job, wire.encode(made), name)
        size = count << 16
        lines = (
            Handoff(name, "offered", source, target, now, count, size, lease_ns=ticket.lease_ns, pool="kv"),
            Handoff(name, "leased", source, target, time.time_ns(), count, size),
            Handoff(name, "read", source, target, time.time_ns(), count, size, 0.0004),
            Handoff(name, "released", source, target, time.time_ns(), count, size),
        )
        for worker, own in ((source, lines[:1]), (target, lines[1:3]), (source, lines[3:])):
            await self._publish(self._subjects.handoff(worker), wire.encode(Handoffs(worker, own)), {})

    async def _stream(self, running: Sequence[_Running]) -> None:
        """Publish one token batch for each worker that has requests."""
        for worker in {each.worker for each in running}:
            await self._send(worker, [each for each in running if each.worker == worker], TOKENS_PER_BATCH)
        for each in running:
            if each.breaks and self._half(each) and each.attempt == 1:
                await self._give_back(each)

    async def _send(self, worker: str, group: Sequence[_Running], count: int) -> None:
        items = []
        for each in group:
            part = each.tokens[each.sent : each.sent + count]
            last = each.sent + len(part) == len(each.tokens)
            finish = Finish("stop", None, each.cached) if last else None
            packed = wire.pack_tokens(part)
            items.append(TokenItem(each.request.id, each.attempt, 0, each.sent, packed, finish))
            each.first_ns = each.first_ns or time.time_ns()
            each.sent += len(part)
        number = self._batches[worker] = self._batches[worker] + 1
        batch = TokenBatch(worker, self._epoch, number, tuple(items))
        await self._publish(self._subjects.tokens(GATEWAY), wire.encode(batch), {HEADER_MSG_ID: f"{worker}:{number}"})

    async def _give_back(self, each: _Running) -> None:
        request, reason = each.request, "draining"
        event = Returned(request.id, MODEL, each.attempt, each.worker, reason)
        headers = {HEADER_MSG_ID: f"{request.id}:{each.attempt}:returned", HEADER_RETURNED: returned_header(event)}
        await self._publish(self._subjects.returned(MODEL), wire.encode(event), headers)
        each.attempt += 1
        fence = TokenBatch(ROUTER, 0, time.time_ns(), (TokenItem(request.id, each.attempt, WHOLE_REQUEST, 0),))
        fence_id = f"{request.id}:{each.attempt}:fence"
        await self._publish(self._subjects.tokens(GATEWAY), wire.encode(fence), {HEADER_MSG_ID: fence_id})
        await self._place(each, f"returned: {reason}")

    async def _end(self, each: _Running) -> None:
        request, ended = each.request, time.time_ns()
        reason = "cancelled" if each.code == "cancelled" else "error" if each.code else "stop"
        event = Done(
            request.id,
            MODEL,
            each.attempt,
            each.worker,
            (Outcome(wire.pack_tokens(each.tokens[: each.sent]), reason),),
            Usage(len(request.prompt) // 4, each.sent, each.cached),
            Timings(request.created_ns, each.routed_ns, each.started_ns, each.first_ns, ended),
            each.code,
            f"recorded as {each.code}" if each.code else "",
            request.user,
            submitted=recorded(request),
            left_out=not_recorded(request),
        )
        subject = self._subjects.done(request.tenant, MODEL, request.id)
        await self._publish(subject, encode_within(event, 7 << 20), {HEADER_MSG_ID: request.id})


async def record(bus: Bus, count: int, seed: int = 1, progress: Callable[[int], None] = lambda done: None) -> list[str]:
    """Store a log of ``count`` requests in existing streams. Returns their ids, in the order of acceptance.

    Raises:
        RuntimeError: the broker did not store everything.
    """
    sent: dict[str, int] = {}
    number = 0

    async def publish(subject: str, body: bytes, headers: dict[str, str]) -> None:
        nonlocal number
        number += 1
        kind = subject.split(".")[1]
        sent[kind] = sent.get(kind, 0) + 1
        if number % ACKNOWLEDGED:
            await bus.nc.publish(subject, body, headers=headers)
        else:
            await bus.js.publish(subject, body, headers=headers, timeout=30)

    before = {kind: await _stored(bus, kind) for kind in ("request", "work", "tokens", "handoff", "done")}
    ids = await SyntheticLog(publish, bus.subjects, seed).record(count, progress)
    await bus.nc.flush()
    for kind, earlier in before.items():
        expected = sent.get(kind, 0) + (sent.get("returned", 0) if kind == "done" else 0)
        if (stored := await _stored(bus, kind) - earlier) != expected:
            raise RuntimeError(f"the broker stored {stored} of {expected} messages of {kind}")
    return ids


async def _stored(bus: Bus, kind: str) -> int:
    name = {"request": "REQUESTS"}.get(kind, kind.upper())
    info: StreamInfo = await bus.js.stream_info(bus.subjects.stream(name))
    return int(info.state.last_seq)


async def _run(data_dir: Path, namespace: str, count: int, seed: int) -> None:
    server = EmbeddedNats(data_dir, namespace)
    await server.start()
    try:
        url = server.url()
        async with await connect(url, role="operator", name="recording", namespace=namespace) as bus:
            await apply(bus.nc, replace(topology(bus.subjects, record=True), consumers=()))
            await record(bus, count, seed, _Progress(count))
    finally:
        await server.stop()


class _Progress:
    """A line for each tenth of the requests."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._began = time.monotonic()
        self._said = 0

    def __call__(self, done: int) -> None:
        if done * 10 // self._count > self._said:
            self._said = done * 10 // self._count
            print(f"{done} requests, {done / (time.monotonic() - self._began):.0f} a second", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="store a log of many requests in a new data folder")
    parser.add_argument("--data-dir", required=True, type=Path, help="data folder, as of a stopped deployment")
    parser.add_argument("--namespace", default="ps")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    asyncio.run(_run(args.data_dir, args.namespace, args.requests, args.seed))


if __name__ == "__main__":
    main()
