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
            asked.append(group.create_task(first_token(url, model, prompt)))
    took = time.perf_counter() - began
    found = [each.result() for each in asked]
    first = sorted(each for each in found if each is not None)

    def of(share: float) -> float:
        return first[min(len(first) - 1, int(share * len(first)))] * 1e3 if first else 0.0

    return {
        "asked": len(asked),
        "failed": len(asked) - len(first),
        "tokens": tokens,
        "requests_per_s": len(first) / took,
        "ttft_p50_ms": of(0.5),
        "ttft_p99_ms": of(0.99),
    }


async def first_token(url: str, model: str, prompt: list[int]) -> float | None:
    """Seconds to the first token of an answer; None if it did not end well."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    parts, first, ended = urlsplit(url), 0.0, False
    payload = json.dumps(body).encode()
    began = time.perf_counter()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LATE_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
            try:
                head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
                writer.write(f"{head}content-length: {len(payload)}\r\nconnection: close\r\n\r\n".encode() + payload)
                while line := await reader.readline():
                    if line.startswith(b"data: {") and b'"text"' in line:
                        first = first or time.perf_counter() - began
                    ended = ended or line.startswith(b"data: [DONE]")
            finally:
                writer.close()
    return first if ended and first else None
