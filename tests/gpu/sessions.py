"""Conversations on a prefill and a decode worker on two GPUs: which of them should compute the next user message?

python -m tests.gpu.sessions --folder /dev/shm/random-8b [--sessions 64,160]

The folder is written by `python -m tests.gpu.pipeline --write`. Each session's next prompt is the whole conversation so
far and a message of the user. The decode worker has all of it but the message; the prefill worker has it up to the
previous answer. With `--local-prefill-tokens` above the message's length the decode worker computes it, with 0 the
prefill worker computes answer and message. Tokens of answers are read from the broker, as text does not give them back.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.infra.bus.connection import connect
from penstock.launch.state import DeploymentState
from penstock.schemas import tokens
from tests.gpu.disaggregated import logs, stop, up
from tests.gpu.pipeline import ints, of

IDS = (16, 4000)  # token ids of prompts
LATE_S = 60.0
TEXT, USAGE = b'"text"', b'"usage":{'


class Turn(msgspec.Struct):
    """One request and its answer; times from ``time.perf_counter``."""

    turn: int
    prompt: int
    sent: float
    id: str = ""
    cached: int = 0
    arrivals: list[float] = []
    whole: bool = False


class Answers:
    """Token ids of each request's answer, as the broker passes them on."""

    def __init__(self) -> None:
        self._ids: dict[str, dict[int, int]] = defaultdict(dict)
        self._more = asyncio.Event()

    async def on_message(self, message: Any) -> None:
        for item in tokens.decode(message.data).items:
            self._ids[item.request].update(enumerate(memoryview(item.tokens).cast("I"), item.first))
        self._more.set()

    async def take(self, request: str, count: int) -> list[int]:
        """All ``count`` of them, which may come a moment after the answer itself."""
        async with asyncio.timeout(2):
            while len(self._ids[request]) < count:
                self._more.clear()
                await self._more.wait()
        found = self._ids.pop(request)
        return [found[place] for place in range(count)]


async def ask(state: DeploymentState, prompt: list[int], answer: int, turn: int) -> Turn:
    """Stream one completion of ``answer`` tokens."""
    body = {"model": state.model, "prompt": prompt, "max_tokens": answer, "stream": True, "ignore_eos": True,
            "temperature": 0, "stream_options": {"include_usage": True}}  # fmt: skip
    parts, payload = urlsplit(state.http_url), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    made = Turn(turn, len(prompt), time.perf_counter())
    async with asyncio.timeout(LATE_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        try:
            writer.write(f"{head}content-length: {len(payload)}\r\nconnection: close\r\n\r\n".encode() + payload)
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    _read(line, made)
                made.whole = made.whole or line.startswith(b"data: [DONE]")
        finally:
            writer.close()
    return made


def _read(line: bytes, made: Turn) -> None:
    if TEXT in line:
        made.arrivals.append(time.perf_counter())
        if not made.id:
            made.id = json.loads(line[6:])["id"].removeprefix("cmpl-")
    if USAGE in line:
        usage = json.loads(line[6:])["usage"]
        made.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def converse(
    asked: argparse.Namespace, state: DeploymentState, answers: Answers, draw: random.Random, until: float
) -> list[Turn]:
    """One user: conversations one after the other, the first one shortened so that users are not in step."""
    done: list[Turn] = []
    turns = draw.randint(1, asked.turns)
    while True:
        prompt = draw.choices(range(*IDS), k=asked.first)
        for turn in range(turns):
            if time.perf_counter() > until:
                return done
            length = draw.randint(asked.answer // 2, asked.answer * 3 // 2)
            try:
                made = await ask(state, prompt, length, turn)
                if made.whole:
                    prompt = prompt + await answers.take(made.id, length)
            except (OSError, TimeoutError):
                made = Turn(turn, len(prompt), time.perf_counter())
            done.append(made)
            if not made.whole:
                break
            prompt = prompt + draw.choices(range(*IDS), k=asked.message)
        turns = asked.turns


async def load(asked: argparse.Namespace, state: DeploymentState, sessions: int, seed: int) -> dict[str, Any]:
    answers = Answers()
    bus = await connect(state.nats_url, role="client", name="sessions")
    try:
        await bus.nc.subscribe(bus.subjects.all("tokens"), cb=answers.on_message)
        began = time.perf_counter()
        start, end = began + asked.warm_s, began + asked.warm_s + asked.seconds
        draws = [random.Random(f"{seed}.{number}") for number in range(sessions)]
        found = await asyncio.gather(*(converse(asked, state, answers, draw, end) for draw in draws))
    finally:
        await bus.close()
    return figures(list(itertools.chain(*found)), start, end)


def figures(turns: list[Turn], start: float, end: float) -> dict[str, Any]:
    """Of what happened in the window."""
    within = [turn for turn in turns if start <= turn.sent < end]
    good = [turn for turn in within if turn.whole]
    gaps = [after - before for turn in turns for before, after in itertools.pairwise(turn.arrivals)
            if start <= after < end]  # fmt: skip
    first, later = ([t for t in good if bool(t.turn) is kind] for kind in (False, True))
    out = {
        "tokens_per_s": sum(start <= at < end for turn in turns for at in turn.arrivals) / (end - start),
        "itl_p50_ms": of(gaps, 0.5),
        "itl_p99_ms": of(gaps, 0.99),
        "failed": len(within) - len(good),
        "later_prompt": round(sum(t.prompt for t in later) / max(1, len(later))),
        "later_cached": round(sum(t.cached for t in later) / max(1, len(later))),
    }
    for name, some in (("first", first), ("later", later)):
        times = [turn.arrivals[0] - turn.sent for turn in some]
        out |= {f"{name}": len(some), f"{name}_ttft_p50_ms": of(times, 0.5), f"{name}_ttft_p99_ms": of(times, 0.99)}
    return out


def rows(asked: argparse.Namespace, layout: str) -> list[dict[str, Any]]:
    data = Path(tempfile.mkdtemp(prefix="sessions-"))
    process, state = up(asked, layout, data)
    found = []
    try:
        for sessions in asked.sessions:
            each = asyncio.run(load(asked, state, sessions, sessions))
            found.append({"sessions": sessions, **each})
            times = " | ".join(f"{each[f'{name}_ttft_{share}_ms']:.0f}" for name in ("first", "later")
                               for share in ("p50", "p99"))  # fmt: skip
            print(f"| {layout} | {sessions} | {each['tokens_per_s']:,.0f} | {times} | {each['itl_p50_ms']:.1f} | "
                  f"{each['itl_p99_ms']:.1f} | {each['later_prompt']:,} | {each['later_cached']:,} | "
                  f"{each['first']} + {each['later']} | {each['failed']} |", flush=True)  # fmt: skip
        return found
    finally:
        stop(process)
        logs(data)
        shutil.rmtree(data, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--engine-args", default="{}", help="this and layouts: as tests.gpu.disaggregated")
    parser.add_argument("--layouts", default="split,apart")
    parser.add_argument("--sessions", type=ints, default=(64, 160))
    parser.add_argument("--first", type=int, default=1000, help="tokens of the first prompt")
    parser.add_argument("--message", type=int, default=100, help="tokens of a user's later message")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer on average")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--warm-s", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(f"{asked.engine}, tokens: first prompts {asked.first}, messages {asked.message}, answers {asked.answer}")
    print("| layout | sessions | tokens/s | TTFT of first prompts p50 | p99 | of later ones p50 | p99 (ms) | ITL p50 | "
          "p99 (ms) | tokens of later prompts | of them cached | turns | failed |")  # fmt: skip
    found = {layout: rows(asked, layout) for layout in asked.layouts.split(",")}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
