"""How many requests per second one broker can store: the upper limit for any number of gateways and workers.

python -m tests.perf.broker                            # 1, 2, 4, 8 publishers: < 1 min

Each publisher is a process that sends the stored messages of a request, encoded in advance, and reads the
acknowledgements: one in REQUESTS, WORK, KV and DONE, and three in TOKENS, in the sizes of 200 words → 64 tokens.
There are no consumers. In a deployment, the reads of the pipeline (live subjects, pull consumers) come on top.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from tests.perf.cpu import cpu_seconds

# Kind and bytes of what one request stores.
MESSAGES = (
    ("request", 850),
    ("work", 1350),
    ("kv", 200),
    *[("tokens", 100)] * 3,
    ("done", 1250),
)
AT_ONCE = 40  # requests that a publisher sends before it waits for their acknowledgements
WARM_UP_S = 0.5


class BrokerFigures(NamedTuple):
    """
    Attributes:
        cores: CPU cores that the broker used.
        memory_mb: resident, at the end.
        memory_bytes: more of it than at first, per request.
    """

    publishers: int
    requests_per_s: float
    messages_per_s: float
    cores: float
    cpu_us: float  # of the broker, per request
    memory_mb: float = 0.0
    memory_bytes: float = 0.0


def measure(publishers: int, seconds: float) -> BrokerFigures:
    """Start a broker with all streams, load it with ``publishers`` processes, and stop it."""
    with tempfile.TemporaryDirectory(prefix="broker-") as folder:
        return asyncio.run(_measure(Path(folder), publishers, seconds))


async def _measure(folder: Path, publishers: int, seconds: float) -> BrokerFigures:
    broker = EmbeddedNats(folder)
    await broker.start()
    filling: list[subprocess.Popen[bytes]] = []
    try:
        await apply_at(broker.url("operator"), broker.subjects)
        for number in range(publishers):
            filling.append(
                subprocess.Popen(  # noqa: ASYNC220 - a few ms each
                    [
                        sys.executable,
                        "-m",
                        "tests.perf.broker",
                        "--publish",
                        broker.url("operator"),
                        "--number",
                        str(number),
                        "--seconds",
                        str(seconds),
                    ],
                    stdout=subprocess.PIPE,
                )
            )
        for process in filling:
            await asyncio.to_thread(process.stdout.readline)  # type: ignore[union-attr]
        assert broker.pid is not None
        before, began, empty = cpu_seconds(broker.pid), time.monotonic(), _resident(broker.pid)
        await asyncio.sleep(0.8 * seconds)
        cores = (cpu_seconds(broker.pid) - before) / (time.monotonic() - began)
        outputs = [(await asyncio.to_thread(process.communicate, timeout=seconds + 30))[0] for process in filling]
        rate, resident = sum(json.loads(output) for output in outputs), _resident(broker.pid)
    finally:
        for process in filling:
            process.kill()
            process.wait()
        await broker.stop()
    cpu_us, memory = cores / max(rate, 1e-9) * 1e6, (resident - empty) / max(1, rate * seconds)
    return BrokerFigures(publishers, rate, rate * len(MESSAGES), cores, cpu_us, resident / 1e6, memory)


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def publish(url: str, number: int, seconds: float) -> float:
    """Publish over one connection, and return the requests stored per second.

    Raises:
        RuntimeError: the broker refused something.
    """
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as link:
        inbox = f"_INBOX_operator.fill{number}"
        login = {"user": parts.username, "pass": parts.password, "verbose": False, "headers": True}
        link.sendall(b"CONNECT %b\r\nSUB %b 1\r\nPING\r\n" % (json.dumps(login).encode(), inbox.encode()))
        answers = link.makefile("rb")
        while (line := answers.readline()) != b"PONG\r\n":
            if not line or line.startswith(b"-ERR"):
                raise RuntimeError(f"the broker refused the connection: {line!r}")
        batches = _batches(Subjects(), inbox, number)
        began = counted = 0.0
        until = time.monotonic() + WARM_UP_S
        while (now := time.monotonic()) < until or not began:
            if now >= until:
                began, counted, until = now, 0, now + seconds
                print("filling", flush=True)
            link.sendall(next(batches))
            _read_acks(answers, AT_ONCE * len(MESSAGES))
            counted += AT_ONCE
        return counted / (time.monotonic() - began)


def _batches(subjects: Subjects, inbox: str, number: int) -> Iterator[bytes]:
    sent = 0
    bodies = {size: os.urandom(size) for _, size in MESSAGES}
    while True:
        batch = []
        for _ in range(AT_ONCE):
            sent += 1
            request = f"{number}-{sent}"
            where = {
                "request": f"{subjects.namespace}.request.m.standard.{sent % 4096:03x}",
                "work": subjects.work("aggregated", f"w{sent % 8}"),
                "kv": subjects.kv("m", f"w{sent % 8}"),
                "tokens": subjects.tokens(f"g{number}"),
                "done": subjects.done("default", "m", request),
            }
            for at, (kind, size) in enumerate(MESSAGES):
                head = f"NATS/1.0\r\n{HEADER_MSG_ID}: {request}:{at}\r\n\r\n".encode()
                line = f"HPUB {where[kind]} {inbox} {len(head)} {len(head) + size}\r\n".encode()
                batch.append(line + head + bodies[size] + b"\r\n")
        yield b"".join(batch)


def _read_acks(answers: BufferedReader, count: int) -> None:
    while count:
        line = answers.readline()
        if line.startswith((b"MSG", b"HMSG")):
            body = answers.read(int(line.split()[-1]) + 2)
            if b'"error"' in body or line.startswith(b"HMSG"):
                raise RuntimeError(f"the broker refused a message: {body!r}")
            count -= 1
        elif not line or line.startswith(b"-ERR"):
            raise RuntimeError(f"the broker ended the connection: {line!r}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.broker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publishers", default="1,2,4,8", metavar="N,N", help="processes (default: 1,2,4,8)")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="for each (default: 4)")
    parser.add_argument("--publish", default="", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.publish:
        print(publish(args.publish, args.number, args.seconds))
        return 0
    print("publishers   req/s   messages/s   cores of the broker   its CPU-µs per request   its MB   bytes per request")
    for count in map(int, args.publishers.split(",")):
        result = measure(count, args.seconds)
        print(
            f"{result.publishers:10} {result.requests_per_s:7,.0f} {result.messages_per_s:12,.0f} "
            f"{result.cores:21.1f} {result.cpu_us:24.0f} {result.memory_mb:8.0f} {result.memory_bytes:19.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
