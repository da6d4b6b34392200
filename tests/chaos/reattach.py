"""Many streams of a killed gateway, re-attached to the one that is left: what they and bystanders wait, and its memory.

Run by hand: ``python -m tests.chaos.reattach --streams 200``. ``tests/pipeline/shared/test_reattach`` runs a small one.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from tests.pipeline.support import Deployment, connected, until

PATH = "/v1/completions"
_ID = re.compile(rb"^id: ([0-9.fu]+)$", re.MULTILINE)


class Figures(NamedTuple):
    """Seconds, and megabytes. ``next``: from the end of the old connection to the next token, by percentile.

    ``cpu_s``: of the gateway that is left until then, its ordinary work included. What else is slow is the machine.
    """

    streams: int
    refused: int
    next_p50_s: float
    next_p99_s: float
    next_max_s: float
    gap_s: float
    cpu_s: float
    grown_mb: float
    incomplete: int


def body(seed: int, tokens: int) -> dict[str, Any]:
    prompt = [(seed * 7919 + i * 31) % 4000 for i in range(40)]
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }


class Stream:
    """One client, which re-attaches to ``other`` when its gateway dies; on bare sockets, as those cost little."""

    def __init__(self, url: str, other: str, seed: int, tokens: int) -> None:
        self._url, self._other = url, other
        self._body = json.dumps(body(seed, tokens)).encode()
        self.events = 0
        self.refused = 0
        self.gap = 0.0
        self.next_s = -1.0
        self.request = self.last_id = b""
        self.done = False
        self._seen = 0.0

    async def run(self) -> None:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}\r\n\r\n"
        await self._read(self._url, head.encode() + self._body)
        broke = time.monotonic()
        while not self.done:
            last = b"last-event-id: " + self.last_id + b"\r\n" if self.last_id else b""
            asked = b"GET /v1/requests/" + self.request + b"/stream HTTP/1.1\r\nhost: x\r\n" + last + b"\r\n"
            await self._read(self._other, asked, since=broke)
            await asyncio.sleep(0.02)

    async def _read(self, url: str, asked: bytes, since: float = 0.0) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            async with connected(url) as (reader, writer):
                writer.write(asked)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    self.refused += 1
                    return
                self.request = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0]
                rest = b""
                while not self.done and (part := await reader.read(1 << 16)):
                    rest = self._take(rest + part, since)

    def _take(self, data: bytes, since: float) -> bytes:
        """Note whole events; what is left is a part of one."""
        whole, _, rest = data.rpartition(b"\n\n")
        if ids := _ID.findall(whole):
            now = time.monotonic()
            if since and self.next_s < 0:
                self.next_s = now - since
            elif self._seen and not since:
                self.gap = max(self.gap, now - self._seen)
            self._seen = now
            self.events += len(ids)
            self.last_id = ids[-1]
        self.done = b"data: [DONE]" in whole
        return rest


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(deployment: Deployment, streams: int, *, tokens: int = 400, bystanders: int = 10) -> Figures:
    """The deployment has two gateways; the first is killed when a third of the tokens have come."""
    victim_url, other_url = deployment.urls
    victim, other = (p for p in deployment.state.processes if p.role == "gateway")
    many = [Stream(victim_url, other_url, seed, tokens) for seed in range(streams)]
    beside = [Stream(other_url, other_url, 10_000 + seed, 2 * tokens) for seed in range(bystanders)]
    tasks = [asyncio.create_task(one.run()) for one in (*many, *beside)]

    async def under_way() -> bool:
        return all(one.events for one in many) and sum(one.events for one in many) > streams * tokens // 3

    await until(under_way, "the streams are under way", 120)
    before = top = rss_mb(other.pid)
    for one in beside:
        one.gap = 0.0
    os.kill(victim.pid, signal.SIGKILL)
    spent = cpu_s(other.pid)
    while not all(one.next_s >= 0 or one.done for one in many):
        await asyncio.sleep(0.1)
        top = max(top, rss_mb(other.pid))
    spent = cpu_s(other.pid) - spent
    gap = max((one.gap for one in beside), default=0.0)
    await asyncio.wait_for(asyncio.gather(*tasks), 180)
    waits = sorted(one.next_s for one in many if one.next_s >= 0)
    return Figures(
        streams,
        sum(one.refused for one in many),
        waits[len(waits) // 2],
        waits[int(len(waits) * 0.99)],
        waits[-1],
        gap,
        spent,
        top - before,
        sum(one.events < tokens for one in many),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--speedup", default="1")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        deployment = Deployment(
            Path(home), "--mock-speedup", asked.speedup, "--gateways", "2", "--max-running", "1200", "--workers", "1"
        )
        try:
            figures = uvloop.run(measure(deployment, asked.streams, tokens=asked.tokens))
        finally:
            deployment.stop()
    for name, value in figures._asdict().items():
        print(f"{name:12} {value:.3f}" if isinstance(value, float) else f"{name:12} {value}")


if __name__ == "__main__":
    main()
