"""``guidellm``: a few requests, by its default endpoint and by text completions."""

import json
import os
import tempfile
from pathlib import Path

from commands import run_tool
from harness import KEY, MODEL, URL, check, run

TOKENIZER = os.environ["CLIENTS_TOKENIZER"]
REQUESTS = 4


def benchmark(backend: str, *flags: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        run_tool(
            "guidellm", "run", "--backend", backend, "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12",
            "--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={report}",
            "--disable-console-interactive", *flags,
        )  # fmt: skip
        found = json.loads(report.read_text())["benchmarks"]
    assert found
    for each in found:
        requests = each["requests"]
        assert not requests["errored"], requests["errored"][0]
        assert len(requests["successful"]) >= REQUESTS
        assert all(one["output_tokens"] > 0 for one in requests["successful"])


@check("stream", "run with its default endpoint, one request at a time")
def default() -> None:
    benchmark(f"kind=openai_http,target={URL},api_key={KEY}", "--profile", "kind=synchronous")


@check("completions", "run with request_format=/v1/completions")
def completions() -> None:
    kind = f"kind=openai_http,target={URL},api_key={KEY},model={MODEL},request_format=/v1/completions"
    benchmark(kind, "--profile", "kind=concurrent,streams=2")


run("guidellm", limit_s=200)
