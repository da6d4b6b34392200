"""Logits processors behind TensorRT-LLM's own hook: the same classes, the same answers as from the native engine."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.requests import LogitsProcessor, Sampling
from penstock.workers.engines.engine_protocol import Engine, RequestError
from penstock.workers.engines.logits.registry import registry_from_settings
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.trtllm import logits_processors
from tests.workers.engines.logits.support import OWN, chosen
from tests.workers.engines.native.models import run as run_native
from tests.workers.engines.trtllm.conftest import BLOCK, LIMIT, MODEL, ask, run

TEXT = "Forced: 42 harbours!"
SETTINGS = WorkerSettings(
    engine="trtllm",
    block_size=BLOCK,
    max_model_len=LIMIT,
    max_running=8,
    kv_blocks=128,
    logits_processor=(f"{OWN}:RaisesHalfway", f"{OWN}:TopK"),
)


@pytest.fixture
def engine(standin: None) -> Iterator[Engine]:
    from penstock.workers.engines import trtllm

    made = trtllm.from_settings(SETTINGS, MODEL, logits_processors.from_settings(SETTINGS, MODEL))
    yield made
    made.close()


def sampling(*processors: LogitsProcessor, **more: Any) -> Sampling:
    return Sampling(temperature=0.0, logits_processors=processors, **more)


@pytest.fixture(scope="module")
def model() -> modeldir.ModelDir:
    return modeldir.load(MODEL)


def answers(engine: Engine, *asked: Any) -> dict[object, list[int]]:
    results = run(engine, *asked)
    return {each.key: results.tokens(each.key) for each in asked}


def test_the_same_processors_give_what_they_give_in_the_native_engine(engine: Engine, model: modeldir.ModelDir) -> None:
    prompt = model.tokenizer.encode("What is 347 + 586?").ids
    digits = [token for token in range(10, 60) if model.tokenizer.decode([token]).isdigit()]
    choices: dict[str, Sequence[LogitsProcessor]] = {
        "text": [chosen("forced_text", text=TEXT)],
        "mask": [chosen("allowed_tokens", tokens=digits)],
        "chain": [chosen("temperature", temperature=0.5), chosen("TopK", k=3)],
        "broken": [chosen("RaisesHalfway")],
        "plain": [],
    }
    asked = [ask(key, prompt, 24, sampling(*processors)) for key, processors in choices.items()]
    native = build(
        str(MODEL),
        NativeOptions(device="cpu", kv_blocks=64, block_size=BLOCK),
        processors=registry_from_settings(SETTINGS, MODEL),
    )
    expected = {key: [output.token for output in several] for key, several in run_native(native, asked).items()}
    got = answers(engine, *asked)
    assert got == expected
    assert model.tokenizer.decode(got["text"], skip_special_tokens=True) == TEXT
    assert got["broken"] == got["plain"] != got["text"]


def test_names_are_reported(engine: Engine) -> None:
    assert engine.info.logits_processors == ("RaisesHalfway", "TopK", "allowed_tokens", "forced_text", "temperature")


def test_what_is_not_registered_is_refused_before_it_reaches_tensorrt_llm(engine: Engine) -> None:
    with pytest.raises(RequestError, match="registered: RaisesHalfway, TopK, allowed_tokens"):
        engine.submit(ask("a", [1, 2, 3], 4, sampling(chosen("nobody"))))
