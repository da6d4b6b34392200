"""TensorRT-LLM's stand-in, importable while a test module runs, and engines on it that end with their test."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.engine_protocol import Engine, SequenceRequest, StepResult
from tests import standins
from tests.workers.engines.contract import BOUND_S, Seen

MODEL = modeldir.DEMO
BLOCK = 16
LIMIT = 512
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def standin() -> Iterator[None]:
    with standins.installed():
        yield


@pytest.fixture
def quirks(standin: None) -> Iterator[Any]:
    """How the stand-in behaves where nobody is sure; as before after the test."""
    from tensorrt_llm._standin import variant

    before = dict(vars(variant.QUIRKS))
    yield variant.QUIRKS
    vars(variant.QUIRKS).update(before)


@pytest.fixture(scope="session")
def vocabulary() -> modeldir.ModelDir:
    return modeldir.load(MODEL)


@pytest.fixture
def make(standin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Engines from settings; those that a test left open are closed, and no thread stays behind."""
    from penstock.workers.engines import trtllm

    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))
    threads = set(threading.enumerate())
    made: list[Engine] = []

    def build(**options: Any) -> Any:
        defaults: dict[str, Any] = {
            "engine": "trtllm",
            "model": str(MODEL),
            "block_size": BLOCK,
            "max_model_len": LIMIT,
            "max_running": 8,
            "kv_blocks": 128,
        }
        engine = trtllm.from_settings(WorkerSettings(**defaults | options), MODEL)
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()
    deadline = time.monotonic() + 10
    while (left := {t for t in threading.enumerate() if t.is_alive()} - threads) and time.monotonic() < deadline:
        for thread in left:
            thread.join(0.1)
    assert not left, "threads outlive their engine"


@dataclass
class Results(Seen):
    steps: list[StepResult] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        super().add(result)
        self.steps.append(result)


def until(engine: Engine, done: Callable[[Results], bool], results: Results | None = None) -> Results:
    """Step until that is so."""
    results = results or Results()
    deadline = time.monotonic() + BOUND_S
    while not done(results):
        assert time.monotonic() < deadline, "it does not come"
        results.add(engine.step())
    return results


def run(engine: Engine, *requests: SequenceRequest) -> Results:
    """Submit and step until all have ended."""
    for request in requests:
        engine.submit(request)
    keys = {request.key for request in requests}
    return until(engine, lambda results: keys <= results.ended())


def ask(key: object, prompt: Any, max_tokens: int = 8, sampling: Sampling = GREEDY, **more: Any) -> SequenceRequest:
    """``more``: fields of SequenceRequest or of Stop."""
    stop = {name: more.pop(name) for name in ("min_tokens", "token_ids", "ignore_eos") if name in more}
    return SequenceRequest(key, prompt, sampling, Stop(max_tokens, **stop), **more)
