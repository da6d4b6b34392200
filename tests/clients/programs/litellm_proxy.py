"""LiteLLM's proxy in front of a gateway: the ``openai`` and ``anthropic`` packages ask the proxy."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
from harness import (
    BASE,
    KEY,
    MODEL,
    PERSON,
    PERSON_IS,
    PERSON_SCHEMA,
    SUM,
    SUM_IS,
    TOOL,
    URL,
    WEATHER,
    check,
    run,
    several,
)

MODELS = {
    "by-openai": {"model": f"openai/{MODEL}", "api_base": BASE},
    "by-vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": BASE},
    "by-anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
}
START_S = 150
PROXY_KEY = "sk-of-this-test-alone"


@contextlib.contextmanager
def proxy() -> Iterator[str]:
    """URL of a proxy that runs."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as name:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        config = {
            "model_list": [
                {"model_name": name, "litellm_params": {**each, "api_key": KEY}} for name, each in MODELS.items()
            ],
            "litellm_settings": {"telemetry": False},
        }
        path = Path(name) / "config.yaml"
        path.write_text(json.dumps(config))
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(path), "--port", str(port)]
        with (Path(name) / "log").open("wb") as out:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1"], stdout=out, stderr=out, cwd=name,
                env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": PROXY_KEY},
            )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, process, Path(name) / "log")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200:
                return
        ended = process.poll() is not None or time.monotonic() > deadline
        assert not ended, f"the proxy did not start: {log.read_text(errors='replace')[-600:]}"
        time.sleep(0.5)


def checks(url: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key=PROXY_KEY, max_retries=0)
    ask, question = [{"role": "user", "content": SUM}], [{"role": "user", "content": WEATHER}]

    for name in MODELS:

        @check("chat", f"{name}: chat.completions.create")
        def chat(name: str = name) -> None:
            answer = client.chat.completions.create(model=name, messages=ask, temperature=0, max_tokens=50)
            assert SUM_IS in answer.choices[0].message.content

        @check("stream", f"{name}: streamed")
        def stream(name: str = name) -> None:
            chunks = client.chat.completions.create(model=name, messages=ask, temperature=0, max_tokens=50, stream=True)
            pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
            several([piece for piece in pieces if piece])
            assert SUM_IS in "".join(piece or "" for piece in pieces)

        @check("tools", f"{name}: a call")
        def tools(name: str = name) -> None:
            answer = client.chat.completions.create(
                model=name, messages=question, tools=[TOOL], temperature=0, max_tokens=50
            )
            call = answer.choices[0].message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"city": "Oslo"}

        @check("forced", f"{name}: tool_choice required")
        def forced(name: str = name) -> None:
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hello!"}], tools=[TOOL], max_tokens=50,
                tool_choice="required",
            )  # fmt: skip
            assert isinstance(json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"], str)

        @check("schema", f"{name}: response_format json_schema")
        def schema(name: str = name) -> None:
            wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": PERSON}], response_format=wanted, max_tokens=80,
                temperature=0,
            )  # fmt: skip
            assert json.loads(answer.choices[0].message.content) == PERSON_IS

    @check("responses", "by-openai: responses.create")
    def responses() -> None:
        assert SUM_IS in client.responses.create(model="by-openai", input=SUM, temperature=0).output_text

    @check("messages", "by-anthropic and by-openai: /v1/messages")
    def messages() -> None:
        for name in ("by-anthropic", "by-openai"):
            body = {"model": name, "max_tokens": 50, "messages": ask, "temperature": 0}
            answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": PROXY_KEY}, timeout=50)
            assert SUM_IS in answer.json()["content"][-1]["text"], answer.text


with proxy() as address:
    checks(address)
    run("litellm")
