"""Images encoded on one GPU and answered on the other: embeddings go from GPU to GPU, answers are those of one worker.

python -m tests.gpu.images [--pictures 8]
"""

import argparse
import asyncio
import base64
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from penstock.launch.state import read_state
from tests.demo_model import vision
from tests.gpu.disaggregated import reads, ready, stop
from tests.gpu.pipeline import penstock

IMAGES = 4  # of a request


def body(model: str, seed: int, **more: Any) -> dict[str, Any]:
    """A question about some pictures."""
    drawn = random.Random(seed)
    content: list[dict[str, Any]] = []
    for _ in range(IMAGES):
        raw = base64.b64encode(vision.png(vision.scene(drawn, True))).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{raw}"}})
    content.append({"type": "text", "text": "What do you see in the last picture?"})
    return {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}


async def measure(asked: argparse.Namespace, path: Path) -> None:
    state = read_state(path)
    worker = next(each.name for each in state.processes if each.role == "worker" and "encode" not in each.name)
    same, answers = 0, set()
    async with httpx.AsyncClient(base_url=state.http_url, trust_env=False, timeout=60) as http:

        async def answer(seed: int, **more: Any) -> str:
            found = await http.post("/v1/chat/completions", json=body(state.model, seed, max_tokens=24, **more))
            assert found.status_code == 200, found.text
            return str(found.json()["choices"][0]["message"]["content"])

        await answer(999)
        since_ns = time.time_ns()
        for seed in range(asked.pictures):
            apart = await answer(seed, cache_salt="apart")
            whole = await answer(seed, cache_salt="whole", worker=worker)
            same += apart == whole
            answers.add(apart)
    found = await reads(state, since_ns)
    good = [each for each in found if each.state == "read" and each.bytes]
    times = [each.seconds * 1e3 for each in good]
    print(f"{same} of {asked.pictures} answers about {IMAGES} pictures are those of one worker alone; "
          f"{len(answers)} different; {len(good)} transfers, {len(found) - len(good)} failed")  # fmt: skip
    if good:
        size, pools = statistics.median(each.bytes for each in good) / 1e3, sorted({each.pool for each in good})
        print(f"each of {size:.1f} KB in {statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f}); "
              f"pools {pools}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=8)
    asked = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="images-"))
    log = data / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            penstock("up", "--model", "demo-vision", "--engine", "native", "--encode", 1, "--workers", 1,
                     "--data-dir", data / "penstock", "--http-port", 0, "--kv-blocks", 600, "--log-format", "json",
                     "--ready-s", 150, "--drain-s", 3), stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    ready(process, log, "encoder and worker")
    try:
        asyncio.run(measure(asked, data / "penstock" / "state.json"))
    finally:
        stop(process)
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    main()
