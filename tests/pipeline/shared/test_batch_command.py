"""``penstock batch run`` against a deployment."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from penstock.cli.commands import main
from tests.pipeline.support import Deployment, until

URL = "/v1/chat/completions"


def write(path: Path, count: int, tokens: int, **more: object) -> Path:
    body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True} | more
    lines = [
        {
            "custom_id": str(at),
            "method": "POST",
            "url": URL,
            "body": body | {"messages": [{"role": "user", "content": str(at)}]},
        }
        for at in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_file_is_run_and_its_answers_are_written(
    fast: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", 20, 4), tmp_path / "out.jsonl"
    command = ["batch", "run", str(source), "-o", str(output), "--url", fast.urls[0]]
    assert main(command) == 0
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == [str(at) for at in range(20)]
    assert "20 answers, 0 errors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert main(command) == 1
    assert "exists" in capsys.readouterr().err


def test_lines_without_an_answer_are_written_beside_the_answers(
    fast: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", 2, 4, model="nobody")
    assert main(["batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", fast.urls[0]]) == 1
    errors = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"]["status_code"] for line in errors] == [404, 404]
    assert "0 answers, 2 errors" in capsys.readouterr().err


async def test_an_interrupted_command_leaves_its_batch_running_and_waits_for_it_again(
    slow: Deployment, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", 30, 10), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "penstock", "batch", "run", str(source), "-o", str(output)]
    command += ["--url", slow.urls[0]]
    first = await asyncio.create_subprocess_exec(
        *command,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it for background jobs
    )
    kept = tmp_path / "out.jsonl.batch"

    async def begun() -> bool:
        return kept.exists() and kept.stat().st_size > 0

    await until(begun, "the batch is made")
    os.kill(first.pid, signal.SIGINT)
    async with asyncio.timeout(20):
        _, said = await first.communicate()
    assert (first.returncode, b"The batch continues" in said) == (130, True), said
    batch = json.loads(kept.read_text())["batch"]
    second = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        _, said = await second.communicate()
    assert (second.returncode, b"30 answers" in said) == (0, True), said
    assert len(output.read_text().splitlines()) == 30
    assert not kept.exists()
    assert batch.startswith("batch_")
