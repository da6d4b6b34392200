"""What the doctor says of GPUs and connectors while a prefill and a decode worker compute, beside nvidia-smi.

python -m tests.gpu.resources            # half a minute; without a GPU it shows the connectors only
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from penstock.operate.doctor.doctor_command import examine
from penstock.operate.doctor.finding import CheckResult, WorkerUse
from tests.pipeline.support import Deployment

REQUESTS = 64
TOKENS = 1_500
LOOKS = 4
LOOK_S = 4.0  # GPUs are read every 5 s


async def load(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        body = {"model": "demo", "max_tokens": TOKENS, "ignore_eos": True}
        asked = ({**body, "prompt": f"{number} " + "word " * 500} for number in range(REQUESTS))
        answers = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in asked))
    assert {answer.status_code for answer in answers} == {200}


async def looks(source: Any, url: str) -> list[list[CheckResult]]:
    running, found = asyncio.create_task(load(url)), []
    for _ in range(LOOKS):
        await asyncio.sleep(LOOK_S)
        found.append([each for each in (await examine(source)).findings if each.check != "containers"])
    running.cancel()
    return found


def smi() -> list[tuple[str, int]]:
    """Beginning of the UUID and MiB of each GPU."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    return [(uuid[:12], int(mib)) for uuid, mib in (line.split(", ") for line in lines)]


def main() -> int:
    from penstock.log_tools.sources.open_log import LogSource

    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as home:
        deployment = Deployment(Path(home), "--engine", "native", "--prefill", "1", "--decode", "1")
        try:
            source = LogSource(data_dir=deployment.data_dir)
            found = asyncio.run(looks(source, deployment.urls[0]))
        finally:
            deployment.stop()
    for findings in found:
        for each in findings:
            if each.use is not None or each.status != "ok":
                print(f"{each.status}: {each.check}: {each.what}")
    uses: list[WorkerUse] = [each.use for findings in found for each in findings if each.use is not None]
    assert {use.role for use in uses} == {"prefill", "decode"}
    assert all(use.connector is not None and use.connector.registered_bytes > 0 for use in uses)
    if shutil.which("nvidia-smi") is None:
        assert not any(use.gpus for use in uses)
        print(json.dumps({"ok": True, "gpus": 0}))
        return 0
    there = smi()
    for use in uses[2:]:  # at the first look, none may have been read
        assert [(gpu.id, gpu.total_bytes >> 20) for gpu in use.gpus] == there, (use.gpus, there)
        assert use.gpus[0].used_bytes > 1 << 28, "a CUDA context and the pool"
    assert max(gpu.busy_percent for use in uses for gpu in use.gpus) > 0, "while requests ran"
    print(json.dumps({"ok": True, "gpus": len(there)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
