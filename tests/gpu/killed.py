"""Workers on two GPUs killed while KV moves between them: every answer is right, and nothing stays held.

python -m tests.gpu.killed --folder /dev/shm/random-kv [--kills 6]

The folder is written by `python -m tests.gpu.pipeline --write --shape kv`: a small model with much KV per token, whose
transfers take milliseconds. An undisturbed part shows when a transfer begins and ends after the handoff is stored;
then one side after the other is killed in between. Answers are batch-invariant, so each must be the undisturbed one.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from penstock.infra.bus.connection import Bus, connect
from penstock.launch.state import DeploymentState, read_state
from penstock.schemas.transfer import Handoff
from tests.chaos.log import held, open_leases, registered, residue, until_none
from tests.gpu.disaggregated import reads, ready, stop
from tests.gpu.pipeline import penstock

BACK_S = 60.0
IDLE_S = 45.0
TOGETHER = 3  # requests under way at each kill
PARTS = (0.2, 0.5, 0.8)  # of a transfer, when the kill comes


class Watch:
    """Sees each handoff when it is stored. ``kill``: the next one's, so many seconds later."""

    def __init__(self) -> None:
        self.seen_ns: dict[str, int] = {}  # by request
        self.victim = 0
        self.delay_s = 0.0
        self.killed: asyncio.Event = asyncio.Event()
        self.after_ms = 0.0

    async def on_message(self, message: Any) -> None:
        now = time.time_ns()
        if b"prefilled" not in message.data[:40]:
            return
        request = message.headers["Nats-Msg-Id"].partition(":")[0]
        self.seen_ns[request] = now
        if self.victim:
            while time.time_ns() < now + self.delay_s * 1e9:
                pass  # a sleep is not as exact as this needs to be
            os.kill(self.victim, signal.SIGKILL)
            self.after_ms, self.victim = (time.time_ns() - now) / 1e6, 0
            self.killed.set()


class Deployed(NamedTuple):
    path: Path  # of state.json
    bus: Bus
    http: httpx.AsyncClient
    watch: Watch

    @property
    def state(self) -> DeploymentState:
        return read_state(self.path)


def up(asked: argparse.Namespace, data: Path) -> subprocess.Popen[bytes]:
    log = data / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            penstock("up", "--engine", "native", "--model", asked.folder, "--data-dir", data / "penstock",
                     "--http-port", 0, "--prefill", 1, "--decode", 1, "--batch-invariant", "--max-running", 16,
                     "--handoff-lease-s", 10, "--ready-s", 150, "--log-format", "json", "--drain-s", 3),
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    ready(process, log, "prefill and decode")
    return process


async def answer(made: Deployed, asked: argparse.Namespace, number: int, salt: str) -> str:
    """The text of one prompt's answer. The salt keeps the prompt out of every cache."""
    prompt = random.Random(number).choices(range(16, 4000), k=asked.prompt)
    body = {"model": made.state.model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    found = await made.http.post("/v1/completions", json=body | {"cache_salt": salt})
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


def spans(lines: list[Handoff], seen_ns: dict[str, int]) -> tuple[float, float]:
    """Medians of when a transfer begins and ends, in seconds after the handoff was seen."""
    ends = [
        ((line.at_ns - seen_ns[request]) / 1e9, line.seconds)
        for line in lines
        if line.state == "read" and (request := line.ticket.partition(":")[0]) in seen_ns
    ]
    end = statistics.median(at for at, _ in ends)
    return end - statistics.median(seconds for _, seconds in ends), end


async def workers(made: Deployed) -> dict[str, int]:
    """Process ids by role, once both are registered."""
    until = time.monotonic() + BACK_S
    while time.monotonic() < until:
        named = {each.name.partition("-")[0]: each.pid for each in made.state.processes}
        pids = {role: named[role] for role in ("prefill", "decode") if named.get(role)}
        alive = [name for name, (_, age_s) in (await registered(made.bus)).items() if age_s < 2]
        if len(pids) == 2 and len(alive) == 2:
            return {role: pid for role, pid in pids.items() if pid is not None}
        await asyncio.sleep(0.2)
    raise SystemExit(f"workers did not come back within {BACK_S:g} s")


async def strike(made: Deployed, asked: argparse.Namespace, number: int, span: tuple[float, float]) -> list[str]:
    """The answers of requests during which a worker was killed; prints a row."""
    watch, role, part = made.watch, ("prefill", "decode")[number % 2], PARTS[number // 2 % len(PARTS)]
    pids = await workers(made)
    since_ns, began = time.time_ns(), time.perf_counter()
    watch.killed.clear()
    watch.delay_s, watch.victim = span[0] + part * (span[1] - span[0]), pids[role]
    found = await asyncio.gather(*(answer(made, asked, n, f"{number}.{n}") for n in range(TOGETHER)))
    assert watch.killed.is_set(), "nothing was handed over"
    took = time.perf_counter() - began
    await workers(made)
    ended = [f"{line.state} {line.cause}".strip() for line in await reads(made.state, since_ns)]
    said = ", ".join(f"{ended.count(each)} {each}" for each in sorted(set(ended))) or "nothing"
    print(f"| {number + 1} | {role} | {watch.after_ms:.2f} | {took:.1f} | {time.perf_counter() - began:.1f} | {said} |",
          flush=True)  # fmt: skip
    return list(found)


async def measure(asked: argparse.Namespace, path: Path) -> None:
    state = read_state(path)
    bus = await connect(state.nats_url, role="client", name="killed")
    watch = Watch()
    await bus.nc.subscribe(bus.subjects.work("decode", "*"), cb=watch.on_message)
    async with httpx.AsyncClient(base_url=state.http_url, trust_env=False, timeout=120) as http:
        made = Deployed(path, bus, http, watch)
        await answer(made, asked, 99, "first")
        since_ns = time.time_ns()
        expected = [await answer(made, asked, number, "undisturbed") for number in range(TOGETHER)]
        again = await asyncio.gather(*(answer(made, asked, number, "together") for number in range(TOGETHER)))
        assert list(again) == expected, "answers depend on what runs beside them"
        span = spans(await reads(state, since_ns), watch.seen_ns)
        print(f"transfers of {asked.prompt} tokens run from {span[0] * 1e3:.2f} to {span[1] * 1e3:.2f} ms after the "
              "handoff is stored")  # fmt: skip
        print("| kill | of | ms after the handoff | all answered after (s) | both back after (s) | transfers |")
        wrong = 0
        for number in range(asked.kills):
            found = await strike(made, asked, number, span)
            wrong += sum(one != other for one, other in zip(found, expected, strict=True))
        left = {
            "open leases": await until_none(lambda: open_leases(bus), IDLE_S),
            "blocks in use": await until_none(lambda: held(bus), IDLE_S),
            "residue": await until_none(lambda: residue(bus, [], asked.kills), IDLE_S),
        }
        print(f"{asked.kills * TOGETHER} answers, {wrong} wrong; {asked.kills} kills; left: "
              + ", ".join(f"{len(what)} {name} {what or ''}".strip() for name, what in left.items()))  # fmt: skip
    await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens")
    parser.add_argument("--kills", type=int, default=6)
    asked = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="killed-"))
    process = up(asked, data)
    try:
        asyncio.run(measure(asked, data / "penstock" / "state.json"))
    finally:
        stop(process)
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    main()
