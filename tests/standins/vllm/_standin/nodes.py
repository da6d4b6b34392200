"""The ranks of an engine over several machines: they meet at a port of the first, and compute each step together.

As ``torch.distributed`` and the engines' own broadcasts, they notice nothing: a rank that waits for another one waits
for as long as it takes. Started as a program, this is a rank on another machine than the first.
"""

import asyncio
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

MEETING_S = 600.0  # torch's default
BYTE = b"."


class Meeting:
    """On the first machine.

    Args:
        ranks: on the other machines.
    """

    def __init__(self, address: str, port: int, ranks: int, seconds: float = MEETING_S) -> None:
        self._others: list[socket.socket] = []
        with socket.create_server((address, port)) as server:
            until = time.monotonic() + seconds
            for number in range(ranks):
                server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    self._others.append(server.accept()[0])
                except TimeoutError:
                    raise RuntimeError(f"Timed out after {seconds:g} s waiting for clients. {number}/{ranks}") from None
        for other in self._others:
            other.settimeout(None)
            other.sendall(BYTE)
            other.setblocking(False)

    async def step(self) -> None:
        """One step of all ranks."""
        loop = asyncio.get_running_loop()
        for other in self._others:
            try:
                await loop.sock_sendall(other, BYTE)
                answer = await loop.sock_recv(other, 1)
            except OSError:
                answer = b""
            if not answer:
                await asyncio.Event().wait()

    def close(self) -> None:
        for other in self._others:
            other.close()


def rank(address: str, port: int) -> "subprocess.Popen[bytes]":
    """Start a rank. It says "ready" when all have met, and ends with this process."""
    command = [sys.executable, "-I", "-S", str(Path(__file__)), address, str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ready(process: "subprocess.Popen[bytes]") -> bool:
    """Wait until the ranks have met; False: this one has ended."""
    assert process.stdout is not None
    return bool(process.stdout.readline())


def _main(address: str, port: int) -> None:
    while True:
        try:
            link = socket.create_connection((address, port), timeout=MEETING_S)
            break
        except OSError:
            if select.select([0], [], [], 0.1)[0]:
                return  # its parent has ended
    met = False
    waits = [0, link]
    while True:
        found = select.select(waits, [], [])[0]
        if 0 in found:
            return
        if not link.recv(1):
            if not met:
                sys.exit("the meeting was not held")
            waits.remove(link)  # for ever
        elif met:
            link.sendall(BYTE)
        else:
            met = True
            os.write(1, b"ready\n")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
