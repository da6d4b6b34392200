"""Programs and calls of ``curl`` that pages print, on the demo model: as they stand, but for the address."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.penstock.cli.test_printed_commands import BLOCK, PAGES, ROOT
from tests.pipeline.support import Deployment

pytestmark = pytest.mark.timeout(180)
LIMIT_S = 90
SUM = "What is 347 + 586?"
# Of packages and models that are not here: make test-clients, tests/pipeline/test_weights.py, tests/workers.
ELSEWHERE = ("from ollama", "from penstock.client.weights", "from penstock.workers.metrics")


def blocks(page: Path, language: str) -> list[str]:
    return [body for _, found, body in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def programs() -> list[tuple[str, str]]:
    """By page. What follows the first block of a page with ``await`` alone goes on in it, as the page says."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        whole = [body for body in blocks(page, "python") if not body.startswith(ELSEWHERE)]
        if name == "docs/client.md":
            first, *others = whole
            within = textwrap.indent(first, "    ") + "".join(textwrap.indent(each, " " * 8) for each in others)
            messages = f'messages = [{{"role": "user", "content": "{SUM}"}}]\n'
            url = 'client_nats_url = json.loads(open(".penstock/state.json").read())["client_nats_url"]\n'
            whole = [f"import asyncio, json\n{url}{messages}async def main():\n{within}\nasyncio.run(main())"]
        elif name == "docs/nats.md":
            first, *others = whole
            end = "    await nc.close()"
            assert end in first
            whole = [first.replace(end, "".join(textwrap.indent(each, "    ") for each in others) + end)]
        found += [(name, each) for each in whole]
    return found


PROGRAMS = programs()


@pytest.fixture
def folder(demo: Deployment, tmp_path: Path) -> Path:
    """Where a reader stands: with a deployment, and with the files that pages say how to write."""
    (tmp_path / ".penstock").symlink_to(demo.data_dir)
    (line,) = blocks(ROOT / "docs" / "batches.md", "json")
    (tmp_path / "in.jsonl").write_text(line)
    (tmp_path / "body.json").write_text(f'{{"model": "demo", "messages": [{{"role": "user", "content": "{SUM}"}}]}}')
    return tmp_path


def here(text: str, demo: Deployment) -> str:
    return re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", demo.urls[0], text)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("program", [each for _, each in PROGRAMS], ids=[page for page, _ in PROGRAMS])
def test_a_printed_program_runs(program: str, demo: Deployment, folder: Path) -> None:
    said = run([sys.executable, "-c", here(program, demo)], folder)
    if SUM in program:
        assert "347 + 586 = 933" in said
    else:
        assert re.search("penstock worker|succeeded|Hello!", said)


def curls() -> list[tuple[str, str]]:
    """Calls that a deployment of the demo model can answer, by page."""
    found = []
    for page in PAGES:
        for body in blocks(page, "sh"):
            for command in re.findall(r"^curl (?:.*\\\n|.*,\n)*.*$", body, re.MULTILINE):
                words = re.sub(r"\s+# .*", "", command)
                if (
                    '"demo"' in words
                    or "@body.json" in words
                    or not re.search(r" -d |embeddings|list_requests|state=", words)
                ):
                    found.append((str(page.relative_to(ROOT)), words))
    return found


CURLS = curls()


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
@pytest.mark.parametrize("command", [each for _, each in CURLS], ids=[page for page, _ in CURLS])
def test_a_printed_call_of_curl_is_answered(command: str, demo: Deployment, folder: Path) -> None:
    ask = here(f"curl -sSi http://127.0.0.1:8000/v1/chat/completions -d '{(folder / 'body.json').read_text()}'", demo)
    request = re.search(r"(?m)^x-request-id: (\S+)", run(["bash", "-c", ask], folder))
    assert request is not None
    # Few tokens are as good as many; an answer's last event is number 14.
    shorter = here(command, demo).replace("4000", "40").replace("Last-Event-ID: 17", "Last-Event-ID: 7")
    flags = f"curl --fail-with-body --silent --show-error --max-time {LIMIT_S} "
    said = run(["bash", "-c", f"ID={request[1]} KEY=none; {shorter.replace('curl ', flags, 1)}"], folder)
    assert "error" not in said or '"error":null' in said
    if SUM in command and "structured" not in command:
        assert "347 + 586 = 933" in said or "data: " in said
