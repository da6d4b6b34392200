"""``penstock bench split``: how much time a KV handoff adds between the first and second token of a request.

Asks two deployments alternately, one with aggregated workers and one with separate prefill and decode workers, for two
tokens after prompts that neither has seen. With separate workers the second token waits for the handoff: message to
the decode worker, transfer of the prompt's KV, first decode step.
"""

import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from penstock.launch.readiness import get

ANSWER_S = 60.0
FIRST_ID = 16  # token ids below may be special ones


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench split``."""

    whole: Annotated[str, Meta(description="URL of the deployment whose workers do everything")] = (
        "http://127.0.0.1:8000"
    )
    split: Annotated[str, Meta(description="URL of the deployment with --prefill and --decode")] = (
        "http://127.0.0.1:8001"
    )
    prompt_tokens: Annotated[int, Meta(ge=1, description="tokens per prompt")] = 4000
    vocabulary: Annotated[int, Meta(ge=32, description="token ids are drawn below this")] = 1000
    rounds: Annotated[int, Meta(ge=1, description="requests to each deployment")] = 20
    seed: Annotated[int, Meta(description="seed of the prompts; 0: other prompts each time")] = 0
    json: Annotated[str, Meta(description="file to write the figures to")] = ""


class Times(Struct, frozen=True):
    """Medians in ms."""

    ttft_ms: float
    second_ms: float  # from the first token to the second


def run(settings: Settings) -> int:
    """Measure and print a table. Returns 1 if a deployment does not answer."""
    try:
        whole, split = asyncio.run(_measure(settings))
    except (OSError, ValueError, TimeoutError) as error:
        print(f"penstock bench split: {error}", file=sys.stderr)
        return 1
    print(f"{settings.rounds} prompts of {settings.prompt_tokens} tokens each, medians in ms")
    print("              TTFT   first to second token")
    print(f"one worker {whole.ttft_ms:7.1f} {whole.second_ms:23.1f}")
    print(f"split      {split.ttft_ms:7.1f} {split.second_ms:23.1f}")
    print(f"difference {split.ttft_ms - whole.ttft_ms:7.1f} {split.second_ms - whole.second_ms:23.1f}")
    if settings.json:
        figures: dict[str, Any] = {"settings": settings, "whole": whole, "split": split}
        Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    return 0


async def _measure(settings: Settings) -> tuple[Times, Times]:
    rng = random.Random(settings.seed or None)
    places = [await _place(settings.whole), await _place(settings.split)]
    samples: list[list[tuple[float, float]]] = [[], []]
    for turn in range(settings.rounds + 1):
        for number, (host, port, model) in enumerate(places):
            prompt = rng.choices(range(FIRST_ID, settings.vocabulary), k=settings.prompt_tokens)
            times = await asyncio.wait_for(_ask(host, port, model, prompt), ANSWER_S)
            if turn:  # the first warms connections up
                samples[number].append(times)
    whole, split = (
        Times(*(statistics.median(each[part] for each in times) * 1e3 for part in range(2))) for times in samples
    )
    return whole, split


async def _place(url: str) -> tuple[str, int, str]:
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    status, body = await get(host, port, "/v1/models")
    if status != 200:
        said = f"answers /v1/models with status {status}" if status else "does not answer"
        raise ValueError(f"{url} {said}: start both deployments first, and name them with --whole and --split")
    return host, port, str(msgspec.json.decode(body)["data"][0]["id"])


async def _ask(host: str, port: int, model: str, prompt: list[int]) -> tuple[float, float]:
    """Send one request. Returns seconds to the first token, and from there to the second."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True, "temperature": 0}
    body = msgspec.json.encode(asked)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        began = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        arrived: list[float] = []
        while line := await reader.readline():
            if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                raise ValueError(f"{line.decode().strip()}: {(await reader.read()).decode()[-300:]}")
            if line.startswith(b"data: {") and b'"text"' in line:
                arrived.append(time.perf_counter())
    finally:
        writer.close()
    if len(arrived) < 2:
        raise ValueError("both tokens came in one event: nothing to measure (use the native engine)")
    return arrived[0] - began, arrived[1] - arrived[0]
