"""What the programs of this folder share: named checks, run one after the other, and their results as JSON.

A program runs in an environment of its own, so this module imports nothing but the standard library.
"""

import asyncio
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

URL = os.environ.get("CLIENTS_URL", "http://127.0.0.1:8000")
BASE = URL + "/v1"
MODEL = os.environ.get("CLIENTS_MODEL", "demo")
KEY = os.environ.get("CLIENTS_KEY", "none")
RANKER = "ranker"  # name of the cross-encoder
SEEING = "seeing"  # name of the vision model
PICTURE, FILM = (os.environ.get(f"CLIENTS_{name}", "") for name in ("PICTURE", "FILM"))  # data: URLs
CHECK_S = 60

SUM, SUM_IS = "What is 347 + 586?", "933"
WEATHER = "What is the weather in Oslo?"
REPORT, REPORTED = json.dumps({"result": "7 degrees"}), "7 degrees"
PERSON = "Answer in JSON with the keys name and age. Mia is 31 years old."
PERSON_IS = {"name": "Mia", "age": 31}
PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Current weather of a city", "parameters": CITY_SCHEMA},
}

TEXTS = ["How deep is the sea?", "How high is the mountain?", "How deep is the sea?"]

_checks: list[tuple[str, str, Callable[[], Any]]] = []


def check(feature: str, what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a check, a function or a coroutine function that raises if the client does not get what it should.

    Args:
        feature: a column of the table (``tests.clients.catalogue``).
        what: a few words for the list below the table.
    """

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((feature, what, function))
        return function

    return add


def several(pieces: list[Any]) -> None:
    """Of a streamed answer, which came as a stream."""
    assert len(pieces) >= 3, f"{len(pieces)} pieces: {pieces}"


def vectors(found: list[list[float]]) -> None:
    """Those of ``TEXTS``: of one length, equal for equal texts, and not equal for others."""
    assert len(found) == len(TEXTS)
    assert len({len(vector) for vector in found}) == 1
    assert found[0] == found[2]
    assert max(abs(a - b) for a, b in zip(found[0], found[1], strict=True)) > 0.001
    assert abs(sum(number * number for number in found[0]) - 1) < 0.01


def run(*packages: str, versions: dict[str, str] | None = None, limit_s: int = CHECK_S) -> None:
    """Run every check and write the results.

    Args:
        packages: whose versions are named, beside ``versions``.
        limit_s: for each check.
    """
    results = []
    for feature, what, function in _checks:
        problem = ""
        try:
            with _limit(limit_s):
                found = function()
                if inspect.isawaitable(found):
                    asyncio.run(_awaited(found))
        except BaseException as error:  # also what a client raises to end the program
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}".strip()[:400]
        print(f"  {'failed' if problem else 'passed'}  {feature}: {what}", file=sys.stderr)
        results.append({"feature": feature, "what": what, "problem": problem})
    found_versions = {name: version(name) for name in packages} | (versions or {})
    written = json.dumps({"versions": found_versions, "checks": results})
    Path(os.environ.get("CLIENTS_RESULTS", "/dev/stdout")).write_text(written + "\n", encoding="utf-8")


async def _awaited(found: Any) -> Any:
    return await found


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not finished in {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
