"""What a request costs before anything is computed: its messages, and nothing else.

python -m tests.perf.floor             # 10 s, one connection
python -m tests.perf.floor --connections 32 --request-bytes 12000 --by-sequence

Three processes in place of gateway, router and worker pass the messages of a request, in their sizes, through the
streams of a real broker: the request, its job, the first token, the other tokens with KV events and the end, and all
acknowledgements. They are bare protocols of one event loop each, and neither tokenise, render, route nor schedule.

With ``--by-sequence`` a job has no prompt: it names the sequence of its request, which the worker reads with a direct
get.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nats.js.api import AckPolicy, ConsumerConfig

from penstock.infra.bus.client import Frame, FrameReader, publish_command
from penstock.infra.bus.puller import ACK, pull_request, sequence
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at, connect_operator
from penstock.measure.load_generator import loop_factory
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from tests.perf.cpu import cpu_of

REQUEST_BYTES = 1_500
JOB_BYTES = 1_100  # of a job, without the prompt
FIRST, REST, KV, DONE = (os.urandom(size) for size in (120, 400, 350, 1600))
NUMBER = 8  # bytes at the beginning of each message: which request it is of; in a job, then the request's sequence
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
        self._unsent: list[bytes] = []

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
        """Send with everything else of this turn of the event loop."""
        headers = {HEADER_MSG_ID: message_id} if message_id else None
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append(publish_command(subject, payload, reply, headers) or b"")

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        self._transport.write(b"".join(unsent))

    def pull(self, stream: str, consumer: str, handler: Callable[[Frame], object]) -> None:
        inbox = f"{self.inbox}.pull"
        self.subscribe(inbox, handler)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{SUBJECTS.stream(stream)}.{consumer}"
        self.send(subject, pull_request(PULLED, PULL_S), inbox)


class Requests:
    """The requests in the gateway whose answers are under way."""

    def __init__(self, link: Link, request_bytes: int) -> None:
        self._link = link
        self._content = os.urandom(request_bytes - NUMBER)
        self._count = 0
        self._waiting: dict[bytes, asyncio.WriteTransport] = {}
        link.subscribe(link.inbox, stored)
        link.subscribe(SUBJECTS.live(SUBJECTS.tokens("g")), self._on_tokens)

    def begin(self, client: asyncio.WriteTransport) -> None:
        self._count += 1
        number, request = self._count.to_bytes(NUMBER, "little"), f"{self._count:03d}"
        self._waiting[number] = client
        subject = SUBJECTS.request("m", "interactive", request)
        self._link.send(subject, number + self._content, self._link.inbox, request)

    def _on_tokens(self, frame: Frame) -> None:
        number = frame.data[:NUMBER]
        if len(frame.data) == len(FIRST):
            self._waiting[number].write(HTTP_BEGIN)
        else:
            self._waiting.pop(number).write(HTTP_REST)


class Front(asyncio.Protocol):
    """The connection of a client, in the gateway."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._left = len(HTTP_REQUEST)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if not self._left:
            self._left = len(HTTP_REQUEST)
            self._requests.begin(self._transport)


def stored(ack: Frame) -> None:
    """
    Raises:
        RuntimeError: the broker refused a message; the connection ends with it.
    """
    if b'"error"' in ack.data or b'"duplicate"' in ack.data:
        raise RuntimeError(f"the broker refused a message: {ack.data!r}")


def route(link: Link, *, by_sequence: bool) -> None:
    """Make a job of each request, and acknowledge it once that is stored."""
    waiting: list[str] = []
    sent, decision = 0, os.urandom(JOB_BYTES - 2 * NUMBER)

    def on_request(frame: Frame) -> None:
        nonlocal sent
        sent += 1
        reply, number = frame.reply.decode(), frame.data[:NUMBER]
        waiting.append(reply)
        job = number + sequence(reply).to_bytes(NUMBER, "little") + decision
        content = b"" if by_sequence else frame.data
        link.send(SUBJECTS.work("aggregated", "w"), job + content, link.inbox, f"{sent}")

    def on_stored(ack: Frame) -> None:
        stored(ack)
        link.send(waiting.pop(0), ACK)

    link.subscribe(link.inbox, on_stored)
    for kind in ("work", "kv", "done"):
        link.subscribe(SUBJECTS.live(SUBJECTS.all(kind)), lambda entry: None)
    link.pull("REQUESTS", "router-interactive", on_request)


def work(link: Link, *, by_sequence: bool) -> None:
    """Answer each job: the first token, then everything else. The job is acknowledged once its end is stored."""
    loop = asyncio.get_running_loop()
    waiting: list[str] = []
    begun, contents = 0, f"{link.inbox}.content"

    def on_job(frame: Frame) -> None:
        waiting.append(frame.reply.decode())
        if by_sequence:
            seq = int.from_bytes(frame.data[NUMBER : 2 * NUMBER], "little")
            link.send(f"$JS.API.DIRECT.GET.{SUBJECTS.stream('REQUESTS')}", b'{"seq":%d}' % seq, contents)
        else:
            begin(frame)

    def begin(frame: Frame) -> None:
        """
        Args:
            frame: a job with its prompt, or its request.
        """
        nonlocal begun
        begun += 1
        number = frame.data[:NUMBER]
        link.send(SUBJECTS.tokens("g"), number + FIRST[NUMBER:], message_id=f"{begun}:1")
        loop.call_soon(finish, begun, number)

    def finish(place: int, number: bytes) -> None:
        link.send(SUBJECTS.tokens("g"), number + REST[NUMBER:], message_id=f"{place}:2")
        link.send(SUBJECTS.kv("m", "w"), KV, message_id=f"{place}:kv")
        link.send(SUBJECTS.done("default", "m", f"{place}"), DONE, link.inbox, f"{place}")

    def on_stored(ack: Frame) -> None:
        stored(ack)
        link.send(waiting.pop(0), ACK)

    link.subscribe(link.inbox, on_stored)
    link.subscribe(contents, begin)
    link.pull("WORK", "w", on_job)


async def serve(role: str, url: str, request_bytes: int, *, by_sequence: bool) -> None:
    """One of the three processes, until it is terminated. The gateway prints its port."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    _, link = await loop.create_connection(lambda: Link(role, url), parts.hostname or "", parts.port or 0)
    port = 0
    if role == "gateway":
        requests = Requests(link, request_bytes)
        server = await loop.create_server(lambda: Front(requests), "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
    else:
        (route if role == "router" else work)(link, by_sequence=by_sequence)
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


def measure(
    requests: int, *, connections: int = 1, request_bytes: int = REQUEST_BYTES, by_sequence: bool = False
) -> Floor:
    """Start a broker and the three processes, and stop them when ``requests`` were answered."""
    with tempfile.TemporaryDirectory(prefix="floor-") as folder, asyncio.Runner(loop_factory=loop_factory()) as runner:
        options = ["--request-bytes", str(request_bytes), *(["--by-sequence"] if by_sequence else [])]
        return runner.run(_measure(requests, connections, options, Path(folder)))


async def _measure(requests: int, connections: int, options: list[str], folder: Path) -> Floor:
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
            command = [sys.executable, "-m", "tests.perf.floor", "--role", role, "--url", url, *options]
            processes[role] = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - a few ms
        ports = [await asyncio.to_thread(process.stdout.readline) for process in processes.values()]  # type: ignore[union-attr]
        pids = {"broker": broker.pid or 0} | {role: process.pid for role, process in processes.items()}
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connected(int(ports[0]))) for _ in range(connections)]
            await _load_all(clients, WARM_UP)
            before = cpu_of(pids.values())
            took = await _load_all(clients, requests)
            after = cpu_of(pids.values())
    finally:
        for process in processes.values():
            process.terminate()
            process.communicate()
        await broker.stop()
    first, end = map(list, zip(*took, strict=True))
    return Floor(first, end, {role: (after[pid] - before[pid]) / len(took) * 1e6 for role, pid in pids.items()})


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


async def _load_all(clients: list[socket.socket], requests: int) -> list[tuple[float, float]]:
    """As ``load``, over all connections at once."""
    loop, each = asyncio.get_running_loop(), -(-requests // len(clients))
    with ThreadPoolExecutor(len(clients)) as threads:
        loaded = await asyncio.gather(*(loop.run_in_executor(threads, load, client, each) for client in clients))
    return [times for part in loaded for times in part]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3_000, metavar="N", help="to send (default: 3000)")
    parser.add_argument("--connections", type=int, default=1, metavar="N", help="at once (default: 1)")
    parser.add_argument("--request-bytes", type=int, default=REQUEST_BYTES, metavar="N", help="of a stored request")
    parser.add_argument("--by-sequence", action="store_true", help="jobs name their request, and workers read it")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.role:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(args.role, args.url, args.request_bytes, by_sequence=args.by_sequence))
    found = measure(
        args.requests, connections=args.connections, request_bytes=args.request_bytes, by_sequence=args.by_sequence
    )
    first, last = (statistics.quantiles(column, n=10) for column in (found.first_s, found.end_s))
    print(f"ms to the first token: {first[0] * 1e3:.2f} (p10), {first[4] * 1e3:.2f} (p50); last: {last[4] * 1e3:.2f}")
    parts = ", ".join(f"{role} {us:.0f}" for role, us in found.cpu_us.items())
    print(f"CPU-µs per request: {sum(found.cpu_us.values()):.0f} ({parts})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
