"""What a request costs at one connection before anything is computed: its messages, and nothing else.

python -m tests.perf.floor             # 10 s

Three processes in place of gateway, router and worker pass the messages of a request, in their sizes, through the
streams of a real broker: the request, its job, the first token, the other tokens with KV events and the end, and all
acknowledgements. They are bare protocols of one event loop each, and neither tokenise, render, route nor schedule.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nats.js.api import AckPolicy, ConsumerConfig

from penstock.infra.bus.client import Frame, FrameReader, publish_command
from penstock.infra.bus.puller import ACK, pull_request
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at, connect_operator
from penstock.measure.generator.lag import loop_factory
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from tests.perf.cpu import cpu_of

REQUEST, JOB, FIRST, REST, KV, DONE = (os.urandom(size) for size in (1500, 2600, 120, 400, 350, 1600))
HTTP_REQUEST, HTTP_BEGIN, HTTP_REST = (b"." * size for size in (1_600, 500, 14_000))
PULLED = 20_000  # messages, at once; more than the benchmark sends
PULL_S = 600.0
WARM_UP = 200
ROLES = ("gateway", "router", "worker")
SUBJECTS = Subjects()


class Floor(NamedTuple):
    """
    Attributes:
        first_s: to the first token, by request; ``end_s``: to the last.
        cpu_us: per request, by process.
    """

    first_s: list[float]
    end_s: list[float]
    cpu_us: dict[str, float]


class Link(asyncio.Protocol):
    """A connection to the broker."""

    def __init__(self, role: str, url: str) -> None:
        parts = urlsplit(url)
        login = {"user": parts.username, "pass": parts.password, "verbose": False, "headers": True}
        self.inbox = f"_INBOX_operator.{role}"
        self._hello = b"CONNECT %b\r\n" % json.dumps(login).encode()
        self._handlers: dict[int, Callable[[Frame], object]] = {}  # by subscription
        self._frames = FrameReader()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.read(data):
            if isinstance(frame, Frame):
                self._handlers[frame.sid](frame)
            elif frame == b"PING\r\n":
                self._transport.write(b"PONG\r\n")

    def subscribe(self, subject: str, handler: Callable[[Frame], object]) -> None:
        sid = len(self._handlers) + 1
        self._handlers[sid] = handler
        self._transport.write(f"SUB {subject} {sid}\r\n".encode())

    def send(self, subject: str, payload: bytes, reply: str = "", message_id: str = "") -> None:
        headers = {HEADER_MSG_ID: message_id} if message_id else None
        self._transport.write(publish_command(subject, payload, reply, headers) or b"")

    def pull(self, stream: str, consumer: str, handler: Callable[[Frame], object]) -> None:
        inbox = f"{self.inbox}.pull"
        self.subscribe(inbox, handler)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{SUBJECTS.stream(stream)}.{consumer}"
        self.send(subject, pull_request(PULLED, PULL_S), inbox)


class Front(asyncio.Protocol):
    """The connection of the client, in the gateway."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._left = len(HTTP_REQUEST)
        self._sent = 0
        link.subscribe(link.inbox, stored)
        link.subscribe(SUBJECTS.live(SUBJECTS.tokens("g")), self._on_tokens)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if not self._left:
            self._left, self._sent = len(HTTP_REQUEST), self._sent + 1
            request = f"{self._sent:03d}"
            self._link.send(SUBJECTS.request("m", "interactive", request), REQUEST, self._link.inbox, request)

    def _on_tokens(self, frame: Frame) -> None:
        self._transport.write(HTTP_BEGIN if len(frame.data) == len(FIRST) else HTTP_REST)


def stored(ack: Frame) -> None:
    """
    Raises:
        RuntimeError: the broker refused a message; the connection ends with it.
    """
    if b'"error"' in ack.data or b'"duplicate"' in ack.data:
        raise RuntimeError(f"the broker refused a message: {ack.data!r}")


def route(link: Link) -> None:
    """Make a job of each request, and acknowledge it once that is stored."""
    waiting: list[str] = []
    sent = 0

    def on_request(frame: Frame) -> None:
        nonlocal sent
        sent += 1
        waiting.append(frame.reply.decode())
        link.send(SUBJECTS.work("aggregated", "w"), JOB, link.inbox, f"{sent}")

    def on_stored(ack: Frame) -> None:
        stored(ack)
        link.send(waiting.pop(0), ACK)

    link.subscribe(link.inbox, on_stored)
    for kind in ("work", "kv", "done"):
        link.subscribe(SUBJECTS.live(SUBJECTS.all(kind)), lambda entry: None)
    link.pull("REQUESTS", "router-interactive", on_request)


def work(link: Link) -> None:
    """Answer each job: the first token, then everything else. The job is acknowledged once its end is stored."""
    loop = asyncio.get_running_loop()
    waiting: list[str] = []
    sent = 0

    def on_job(frame: Frame) -> None:
        nonlocal sent
        sent += 1
        waiting.append(frame.reply.decode())
        link.send(SUBJECTS.tokens("g"), FIRST, message_id=f"{sent}:1")
        loop.call_soon(finish, sent)

    def finish(number: int) -> None:
        link.send(SUBJECTS.tokens("g"), REST, message_id=f"{number}:2")
        link.send(SUBJECTS.kv("m", "w"), KV, message_id=f"{number}:kv")
        link.send(SUBJECTS.done("default", "m", f"{number}"), DONE, link.inbox, f"{number}")

    def on_stored(ack: Frame) -> None:
        stored(ack)
        link.send(waiting.pop(0), ACK)

    link.subscribe(link.inbox, on_stored)
    link.pull("WORK", "w", on_job)


async def serve(role: str, url: str) -> None:
    """One of the three processes, until it is terminated. The gateway prints its port."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    _, link = await loop.create_connection(lambda: Link(role, url), parts.hostname or "", parts.port or 0)
    port = 0
    if role == "gateway":
        server = await loop.create_server(lambda: Front(link), "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
    else:
        (route if role == "router" else work)(link)
    print(port, flush=True)
    await asyncio.Event().wait()


def load(client: socket.socket, requests: int) -> list[tuple[float, float]]:
    """Send one request after the other; returns the seconds to the first token and to the end of each.

    Raises:
        OSError: an answer did not come.
    """
    took = []
    for _ in range(requests):
        began = time.perf_counter()
        client.sendall(HTTP_REQUEST)
        left, first = len(HTTP_BEGIN) + len(HTTP_REST), 0.0
        while left:
            part = client.recv(left)
            if not part:
                raise ConnectionError("the gateway closed the connection")
            left -= len(part)
            first = first or time.perf_counter() - began
        took.append((first, time.perf_counter() - began))
    return took


def measure(requests: int) -> Floor:
    """Start a broker and the three processes, and stop them when ``requests`` were answered."""
    with tempfile.TemporaryDirectory(prefix="floor-") as folder, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_measure(requests, Path(folder)))


async def _measure(requests: int, folder: Path) -> Floor:
    broker = EmbeddedNats(folder)
    await broker.start()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        url = broker.url("operator")
        await apply_at(url, SUBJECTS)
        nc = await connect_operator(url)
        durable = ConsumerConfig(
            durable_name="w", filter_subject=SUBJECTS.work("aggregated", "w"), ack_policy=AckPolicy.EXPLICIT
        )
        await nc.jetstream().add_consumer(SUBJECTS.stream("WORK"), durable)
        await nc.close()
        for role in ROLES:
            command = [sys.executable, "-m", "tests.perf.floor", "--role", role, "--url", url]
            processes[role] = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - a few ms
        ports = [await asyncio.to_thread(process.stdout.readline) for process in processes.values()]  # type: ignore[union-attr]
        pids = {"broker": broker.pid or 0} | {role: process.pid for role, process in processes.items()}
        with socket.create_connection(("127.0.0.1", int(ports[0])), timeout=10) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.to_thread(load, client, WARM_UP)
            before = cpu_of(pids.values())
            took = await asyncio.to_thread(load, client, requests)
            after = cpu_of(pids.values())
    finally:
        for process in processes.values():
            process.terminate()
            process.communicate()
        await broker.stop()
    first, end = map(list, zip(*took, strict=True))
    return Floor(first, end, {role: (after[pid] - before[pid]) / requests * 1e6 for role, pid in pids.items()})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.floor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=3_000, metavar="N", help="to send (default: 3000)")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.role:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(args.role, args.url))
    found = measure(args.requests)
    first, last = (statistics.quantiles(column, n=10) for column in (found.first_s, found.end_s))
    print(f"ms to the first token: {first[0] * 1e3:.2f} (p10), {first[4] * 1e3:.2f} (p50); last: {last[4] * 1e3:.2f}")
    parts = ", ".join(f"{role} {us:.0f}" for role, us in found.cpu_us.items())
    print(f"CPU-µs per request: {sum(found.cpu_us.values()):.0f} ({parts})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
