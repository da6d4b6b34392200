"""Links between processes and the broker that can stall in one direction, in a process of their own.

``python -m tests.chaos.links NAME=PORT...`` listens on a port for each name, which it prints as JSON, and forwards to
the broker's port. A line ``NAME out|in SECONDS`` on its standard input stops one direction of all connections of that
name, which stay open, and is repeated when that is done: what is sent waits in the kernel's buffers, then the sender
does, as behind a router that drops all.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Self

from penstock.infra.process.child import die_with_parent
from tests.chaos.plan import Way

LOOPBACK = "127.0.0.1"
READ_BYTES = 1 << 16
STOP_S = 5.0
ROOT = Path(__file__).resolve().parents[2]


class Links:
    """The process; ``ports``: by the name of whose link it is."""

    def __init__(self, process: "Popen[bytes]", ports: dict[str, int]) -> None:
        self._process, self.ports = process, ports

    @classmethod
    def started(cls, ports: Mapping[str, int]) -> Self:
        """``ports``: of the broker behind each link, which need not run yet."""
        command = [sys.executable, "-m", "tests.chaos.links", *(f"{name}={port}" for name, port in ports.items())]
        process = Popen(command, stdin=PIPE, stdout=PIPE, cwd=ROOT, preexec_fn=die_with_parent())
        assert process.stdout is not None
        return cls(process, json.loads(process.stdout.readline()))

    def stall(self, name: str, way: Way, seconds: float) -> None:
        """Returns once nothing passes any more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {way} {seconds:.3f}\n".encode())
        self._process.stdin.flush()
        self._process.stdout.readline()

    def stop(self) -> None:
        """Cut them all; the process ends with its standard input."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()


class Link:
    """One name's connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._flows = {way: asyncio.Event() for way in Way}
        self._until = dict.fromkeys(Way, 0.0)
        for flow in self._flows.values():
            flow.set()

    async def serve(self) -> int:
        """The port that it listens on."""
        server = await asyncio.start_server(self._connected, LOOPBACK, 0, limit=READ_BYTES)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def stall(self, way: Way, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._until[way] = max(self._until[way], loop.time() + seconds)
        self._flows[way].clear()
        loop.call_later(seconds, self._go_on, way)

    def _go_on(self, way: Way) -> None:
        if asyncio.get_running_loop().time() >= self._until[way] - 0.001:
            self._flows[way].set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._port, limit=READ_BYTES)
        except OSError:  # the broker is away: refused here as there
            writer.transport.abort()
            return
        await asyncio.gather(
            self._forward(reader, far_writer, self._flows[Way.out]),
            self._forward(far_reader, writer, self._flows[Way.into]),
        )

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flow: asyncio.Event) -> None:
        """Until one side ends; then the other one's end follows, also only when the link carries something again."""
        with suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await flow.wait()
                writer.write(data)
                await writer.drain()
        await flow.wait()
        writer.close()


async def serve(ports: Mapping[str, int]) -> None:
    links = {name: Link(port) for name, port in ports.items()}
    print(json.dumps({name: await link.serve() for name, link in links.items()}), flush=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        name, way, seconds = line.decode().split()
        links[name].stall(Way(way), float(seconds))
        print(line.decode().strip(), flush=True)


if __name__ == "__main__":
    asyncio.run(serve({name: int(port) for name, _, port in (each.rpartition("=") for each in sys.argv[1:])}))
