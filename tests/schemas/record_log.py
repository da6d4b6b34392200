"""Write ``tests/data/log-BUILD.jsonl``, the log of a small deployment of this build, which later builds must read.

Run by hand when a release is made: ``python -m tests.schemas.record_log``. The files of earlier builds stay.
"""

import base64
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import uvloop

from penstock.infra.bus.connection import connect
from penstock.infra.bus.direct_get import read
from tests.pipeline.support import MODEL_NAME, Deployment
from tests.schemas.test_evolution import DATA, DECODERS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12}),
    (CHAT, {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12, "stream": True}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "two choices"}],
            "max_tokens": 8,
            "n": 2,
            "seed": 5,
            "temperature": 0.7,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "with logprobs"}],
            "max_tokens": 6,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (COMPLETIONS, {"prompt": "word " * 400, "max_tokens": 8}),
    (COMPLETIONS, {"prompt": "a text", "max_tokens": 5, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "too late"}], "max_tokens": 2000, "timeout_s": 0.3}),
]


def answers(url: str) -> list[dict[str, Any]]:
    found = []
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        for path, body in BODIES:
            asked = {"model": MODEL_NAME, **body}
            answer = http.post(path, json=asked)
            found.append(
                {
                    "path": path,
                    "body": asked,
                    "status": answer.status_code,
                    "id": answer.headers["x-request-id"],
                    "answer": answer.text,
                }
            )
    return found


async def messages(nats_url: str) -> list[dict[str, Any]]:
    bus = await connect(nats_url, role="operator", name="record")
    try:
        return [
            {
                "stream": name,
                "seq": entry.seq,
                "subject": entry.subject,
                "time_ns": entry.time_ns,
                "headers": dict(entry.headers),
                "data": base64.b64encode(entry.data).decode(),
            }
            for name in DECODERS
            async for entry in read(bus, bus.subjects.stream(name), ">")
        ]
    finally:
        await bus.close()


def main() -> None:
    build = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as home:
        flags = ("--mock-speedup", "1", "--workers", "1", "--prefill", "1", "--decode", "1")
        deployment = Deployment(Path(home), *flags)
        try:
            head = {"model": MODEL_NAME, "answers": answers(deployment.urls[0])}
            lines = [head, *uvloop.run(messages(deployment.state.nats_url))]
        finally:
            deployment.stop()
    path = DATA / f"log-{build.stdout.strip()}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{path}: {len(lines) - 1} messages, answers {[each['status'] for each in lines[0]['answers']]}")


if __name__ == "__main__":
    main()
