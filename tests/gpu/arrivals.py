"""Long prompts that arrive at a rate of their own, however fast they are answered: the load beside running answers."""

import asyncio
import contextlib
import json
import random
import time
from typing import Any
from urllib.parse import urlsplit

ANSWER = 4  # tokens
LATE_S = 60.0
IDS = (16, 4000)  # token ids of prompts


async def arrive(url: str, model: str, rate: float, seconds: float, tokens: int, seed: int) -> dict[str, Any]:
    """Ask for ``rate`` prompts a second on average, with exponential gaps; the same prompts for the same seed."""
    draw, asked = random.Random(seed), []
    began, at = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while (at := at + draw.expovariate(rate)) < seconds:
            prompt = draw.choices(range(*IDS), k=tokens)
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            asked.append(group.create_task(first_tokens(url, model, prompt)))
    took = time.perf_counter() - began
    found = [each.result() for each in asked]
    first = sorted(each[0] for each in found if each is not None)
    gaps = sorted(each[1] for each in found if each is not None)

    def of(share: float, seconds: list[float] = first) -> float:
        return seconds[min(len(seconds) - 1, int(share * len(seconds)))] * 1e3 if seconds else 0.0

    return {
        "asked": len(asked),
        "failed": len(asked) - len(first),
        "tokens": tokens,
        "requests_per_s": len(first) / took,
        "ttft_p50_ms": of(0.5),
        "ttft_p99_ms": of(0.99),
        "second_p50_ms": of(0.5, gaps),
        "second_p99_ms": of(0.99, gaps),
    }


async def first_tokens(url: str, model: str, prompt: list[int]) -> tuple[float, float] | None:
    """Seconds to the first token of an answer, which is traced, and to the second; None if it did not end well."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    parts, ended = urlsplit(url), False
    at: list[float] = []
    payload = json.dumps(body).encode()
    parent = f"00-{random.getrandbits(128) | 1:032x}-{random.getrandbits(64) | 1:016x}-01"
    began = time.perf_counter()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LATE_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
            try:
                head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
                head += f"traceparent: {parent}\r\n"
                writer.write(f"{head}content-length: {len(payload)}\r\nconnection: close\r\n\r\n".encode() + payload)
                while line := await reader.readline():
                    if line.startswith(b"data: {") and b'"text"' in line:
                        at.append(time.perf_counter())
                    ended = ended or line.startswith(b"data: [DONE]")
            finally:
                writer.close()
    return (at[0] - began, at[1] - at[0]) if ended and len(at) > 1 else None
