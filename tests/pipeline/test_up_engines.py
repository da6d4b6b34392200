"""`penstock up` with each engine: stand-ins of TensorRT-LLM and vLLM, in real processes."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import httpx
import pytest

from penstock.infra.model.modeldir import DEMO
from penstock.infra.process.child import die_with_parent
from penstock.launch.readiness import get
from tests.pipeline.support import ROOT, START_S, Process, free_port, until
from tests.standins import FOLDER, VARIANT, real

pytestmark = pytest.mark.timeout(180)

STANDINS = {"PYTHONPATH": f"{FOLDER}:{ROOT}", VARIANT: "1.2.1"}
SMALL = ("--model", str(DEMO), "--max-model-len", "2048", "--max-running", "8")


def test_an_engine_that_is_not_installed_ends_the_start_with_the_line_that_installs_it(tmp_path: Path) -> None:
    """A worker by itself has one line per engine, too; see ``workers/engines/vllm/test_args.py``."""
    if real("tensorrt_llm"):
        pytest.skip("it is installed")
    data = str(tmp_path / "data")
    flags = ("--engine", "trtllm", *SMALL, "--gpus", "none", "--http-port", "0", "--data-dir", data)
    up = Process(tmp_path / "log", "up", *flags)
    assert up.wait(START_S) == 2
    (said,) = up.log.read_text().splitlines()
    assert said.startswith("penstock up: --engine trtllm needs tensorrt_llm: ")
    assert "--extra-index-url https://pypi.nvidia.com" in said


@pytest.mark.slow  # test_vllm serves with the stand-in, launch/recipes/test_recipes runs all scripts
async def test_the_quick_start_script_of_vllm_with_a_draft_serves(tmp_path: Path) -> None:
    command = tmp_path / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    command.chmod(0o755)
    port = free_port()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = STANDINS | {
        "PATH": path, "PENSTOCK": str(command), "MODEL_PATH": str(DEMO), "SERVED_MODEL_NAME": "demo",
        "HTTP_PORT": str(port), "NATS_PORT": str(free_port()), "DATA_DIR": str(tmp_path / "data"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # the recipe's share is of a GPU
    }  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        script = await asyncio.create_subprocess_exec(
            str(ROOT / "infra" / "examples" / "speculative_vllm.sh"), stdout=log, stderr=log, cwd=tmp_path,
            env=variables, start_new_session=True, preexec_fn=die_with_parent(),
        )  # fmt: skip

    async def ready() -> bool:
        assert script.returncode is None, (tmp_path / "log").read_text()
        return (await get("127.0.0.1", port, "/health/ready"))[0] == 200

    try:
        await until(ready, "the script's gateway is ready", 60)
        body = {"model": "demo", "messages": [{"role": "user", "content": "What is 347 + 586?"}], "temperature": 0}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
            answer = await http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "347 + 586 = 933"
    finally:
        with contextlib.suppress(ProcessLookupError):
            script.terminate()
        await asyncio.wait_for(script.wait(), 60)
