"""Containers as processes here: the arguments and variables of a manifest or a compose file, with addresses and
folders of this machine instead of those in the container."""

import re
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.pipeline.support import Process, until

VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")


def expanded(variables: Mapping[str, str]) -> dict[str, str]:
    """``$(NAME)`` by the variables before, as Kubernetes expands them."""
    done: dict[str, str] = {}
    for name, value in variables.items():
        done[name] = VARIABLE.sub(lambda match: done[match[1]], value)
    return done


class Here:
    """Replacements in arguments and variables: what is in the container, and what it is here."""

    def __init__(self, folder: Path, replaced: Mapping[str, str]) -> None:
        self._folder, self._replaced = folder, replaced

    def local(self, text: str) -> str:
        for inside, here in self._replaced.items():
            text = text.replace(inside, here)
        return text

    def start(self, name: str, arguments: list[str], variables: Mapping[str, str]) -> Process:
        """Start a container's process, with no variables but its own."""
        argv = [self.local(word) for word in arguments]
        environ = {key: self.local(value) for key, value in expanded(variables).items()}
        return Process(self._folder / f"{name}.log", *argv, **environ)


async def answers(url: str, within_s: float = 60.0) -> None:
    """Until a probe of this URL would pass."""
    async with httpx.AsyncClient(trust_env=False, timeout=5) as http:

        async def passes() -> bool:
            try:
                return (await http.get(url)).status_code < 400
            except httpx.TransportError:
                return False

        await until(passes, f"{url} answers", within_s)


async def ask(url: str, model: str) -> str:
    """The text that a chat completion gives."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        return str(answer.json()["choices"][0]["message"]["content"])
