"""``penstock eval demo``: the demo model's accuracy on held-out questions, asked over HTTP."""

import base64
import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli.terminal import reason, stdout
from penstock.launch.state import read_state
from tests.demo_model import task_mix, vision
from tests.demo_model.sample import Sample, right, tool_call, valid_json
from tests.demo_model.template import IMAGE

_TASKS = (*task_mix.TASKS, *vision.TASKS)
_WRONG_SHOWN = 3


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock eval demo``."""

    url: Annotated[str, Meta(description="server, with or without /v1; default: the one in --state")] = ""
    state: Annotated[str, Meta(description="state.json of the deployment to ask")] = ".penstock/state.json"
    model: Annotated[str, Meta(description="model to ask; default: the first of /v1/models")] = ""
    count: Annotated[int, Meta(ge=1, description="questions per task")] = 200
    concurrency: Annotated[int, Meta(ge=1, description="requests at once")] = 16
    tasks: Annotated[tuple[str, ...], Meta(description="tasks to ask; default: all without images")] = ()
    vision: Annotated[bool, Meta(description="ask the tasks with images too")] = False
    seed: Annotated[int, Meta(description="seed of the questions")] = 1
    timeout_s: Annotated[float, Meta(gt=0, description="seconds for one answer")] = 300.0
    wrong: Annotated[bool, Meta(description="print some wrong answers")] = False
    json: Annotated[str, Meta(description="file to write the figures to")] = ""


class Score(Struct, frozen=True):
    """One row of the table. ``accuracy`` is a fraction of 1; ``target``: the minimum in the model card."""

    task: str
    questions: int
    accuracy: float
    target: float
    seconds: float

    @property
    def reached(self) -> bool:
        return self.accuracy >= self.target


class EvalFailed(Exception):
    """The evaluation cannot run."""


def run(settings: Settings) -> int:
    """Run all tasks and print a table; the exit status is 1 if a task misses its target."""
    try:
        client = Client(settings)
        scores = evaluate(client, settings)
    except EvalFailed as error:
        print(f"penstock eval demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _print(scores, client.model)
    if settings.json:
        figures = {"settings": settings, "model": client.model, "scores": scores}
        Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    return 0 if all(score.reached for score in scores) else 1


class Client:
    """A client of one server; thread-safe."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            EvalFailed: there is no server, or it has no model.
        """
        parts = urlsplit(_url(settings))
        if parts.scheme != "http" or not parts.hostname:
            raise EvalFailed(f"{parts.geturl()!r}: give a URL such as http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = settings.timeout_s
        self.model = settings.model or self._first_model()

    def answer(self, sample: Sample) -> str:
        """The model's greedy answer in the form of its chat template, including tool calls.

        Raises:
            EvalFailed: the server refused the request or did not answer.
        """
        body = {"model": self.model, "messages": messages_of(sample), "max_tokens": 1024, "temperature": 0}
        if sample.tools:
            body["tools"] = list(sample.tools)
        return text_of(self._json("POST", "/v1/chat/completions", body)["choices"][0]["message"])

    def _first_model(self) -> str:
        models = self._json("GET", "/v1/models", None)["data"]
        if not models:
            raise EvalFailed("the server has no model yet")
        return str(models[0]["id"])

    def _json(self, method: str, path: str, body: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise EvalFailed(f"{path} answered {answer.status}: {text[:300].decode(errors='replace')}")
            decoded: dict[str, Any] = json.loads(text)
            return decoded
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EvalFailed(f"{self._host}:{self._port}{path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()


def evaluate(client: Client, settings: Settings) -> list[Score]:
    """Run all tasks, one after another.

    Raises:
        EvalFailed: a task is unknown, or a request failed.
    """
    tasks = settings.tasks or (_TASKS if settings.vision else tuple(task_mix.TASKS))
    if unknown := set(tasks) - set(_TASKS):
        raise EvalFailed(f"unknown task {', '.join(sorted(unknown))}; tasks are {', '.join(_TASKS)}")
    scores: list[Score] = []
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ThreadPoolExecutor(settings.concurrency) as pool, Progress(*columns, console=Console(stderr=True)) as progress:
        for task in tasks:
            samples = (vision if task in vision.TASKS else task_mix).cases(task, settings.count, settings.seed)
            row, begin, answers = progress.add_task(task, total=len(samples)), time.monotonic(), []
            for answer in pool.map(client.answer, samples):
                answers.append(answer)
                progress.advance(row)
            scores += scores_of(task, samples, answers, time.monotonic() - begin)
            if settings.wrong:
                _show_wrong(samples, answers)
    return scores


def scores_of(task: str, samples: list[Sample], answers: list[str], seconds: float) -> list[Score]:
    """One row; for JSON also a row for valid shapes, whatever the values."""

    def row(name: str, check: Any, target: float) -> Score:
        good = sum(check(sample, answer) for sample, answer in zip(samples, answers, strict=True))
        return Score(name, len(samples), round(good / len(samples), 4), target, round(seconds, 1))

    if task == "json":
        return [row("json: valid", valid_json, 0.98), row("json: right", right, 0.95)]
    return [row(task, right, task_mix.TASKS.get(task) or vision.TASKS[task])]


def messages_of(sample: Sample) -> list[dict[str, Any]]:
    """The conversation as an OpenAI client sends it."""
    messages: list[dict[str, Any]] = []
    for role, text in sample.messages:
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "tool":
            message["tool_call_id"] = "call_0"
        if text.startswith(IMAGE):
            picture = base64.b64encode(vision.png(sample.scene)).decode()
            message["content"] = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
                {"type": "text", "text": text.replace(IMAGE, "").lstrip("\n")},
            ]
        messages.append(message)
    return messages


def text_of(message: dict[str, Any]) -> str:
    """The answer as the model wrote it: the server has split off thoughts and tool calls."""
    thought, text = message.get("reasoning_content"), message.get("content") or ""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    text += "".join(tool_call(call["name"], json.loads(call["arguments"])) for call in calls)
    return f"<think>\n{thought}\n</think>\n\n{text}" if thought else text


def _url(settings: Settings) -> str:
    if settings.url:
        return settings.url if "//" in settings.url else f"http://{settings.url}"
    try:
        return read_state(Path(settings.state)).http_url
    except (OSError, msgspec.DecodeError) as error:
        raise EvalFailed(
            f"--state {settings.state}: {reason(error)}; start one with `penstock up`, or name a server with --url"
        ) from None


def _show_wrong(samples: list[Sample], answers: list[str]) -> None:
    pairs = zip(samples, answers, strict=True)
    for sample, answer in [pair for pair in pairs if not right(*pair)][:_WRONG_SHOWN]:
        print(f"{sample.task}: {sample.messages[-1][1][-100:]!r} -> {answer[:200]!r}, not {sample.want!r}")


def _print(scores: list[Score], model: str) -> None:
    table = Table("task", "questions", "right", "target", "seconds", title=f"{model}: held-out questions")
    for score in scores:
        style = "" if score.reached else "red"
        table.add_row(
            score.task,
            str(score.questions),
            f"{score.accuracy:.1%}",
            f"{score.target:.0%}",
            f"{score.seconds:.1f}",
            style=style,
        )
    stdout().print(table)
