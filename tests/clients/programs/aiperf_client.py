"""``aiperf``: a short load, streamed, on each endpoint that it knows and we serve."""

import json
import os
import tempfile
from pathlib import Path

from commands import run_tool
from harness import KEY, MODEL, URL, check, run

TOKENIZER = os.environ["CLIENTS_TOKENIZER"]
REQUESTS = 8


def profile(kind: str, *flags: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        run_tool(
            "aiperf", "profile", "-m", MODEL, "--url", URL, "--endpoint-type", kind, "--tokenizer", TOKENIZER,
            "--concurrency", "2", "--request-count", str(REQUESTS), "--isl", "40", "--osl", "12", "--api-key", KEY,
            "--output-artifact-dir", name, "--ui", "none", *flags,
        )  # fmt: skip
        lines = [json.loads(line) for line in (Path(name) / "profile_export.jsonl").read_text().splitlines()]
    assert len(lines) == REQUESTS
    for line in lines:
        assert line.get("error") is None, line["error"]
        assert line["metrics"]["output_sequence_length"]["value"] > 0
        assert not flags or line["metrics"]["time_to_first_token"]["value"] > 0


@check("stream", "profile --endpoint-type chat --streaming")
def chat() -> None:
    profile("chat", "--streaming")


@check("completions", "profile --endpoint-type completions --streaming")
def completions() -> None:
    profile("completions", "--streaming")


run("aiperf", limit_s=200)
