"""LLaVA-NeXT on TensorRT-LLM: pictures of several shapes in a prompt, and as embeddings of an encode worker."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.workers.engines.native.build import build as native_engine
from penstock.workers.engines.trtllm import encoder_from_settings, from_settings
from tests.workers.engines.native import llava_next
from tests.workers.engines.native.test_llava_next import COUNT, asking, encoded, options, prompt
from tests.workers.engines.trtllm.conftest import run

PICTURES = ((1,), (3, 2))  # one, and two of different sizes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    return modeldir.load(llava_next.write(tmp_path_factory.mktemp("llava-next")))


@pytest.fixture
def settings(standin: None, model: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))

    def make(**more: Any) -> WorkerSettings:
        return WorkerSettings(
            engine="trtllm", model=str(model.path), max_model_len=1024, embed_slots=16, dtype="float32", **more
        )

    return make


def test_pictures_and_their_embeddings_are_answered_as_transformers_answers_them(
    model: ModelDir, settings: Any
) -> None:
    native = native_engine(str(model.path), options())
    whole, encoder = from_settings(settings(), model.path), encoder_from_settings(settings(role="encode"), model.path)
    for numbers in PICTURES:
        mine = encoded(native.vision, model, numbers)
        wanted = run(native, asking(model, numbers, mine.slots)).tokens(numbers)
        assert len(wanted) == COUNT
        seen = encoded(whole.vision, model, numbers)
        assert run(whole, asking(model, numbers, seen.slots)).tokens(numbers) == wanted
        made = encoded(encoder.vision, model, numbers)
        for slots, ours in zip(made.slots, mine.slots, strict=True):
            rows = [engine.vision.encoder.pool.data[list(each)] for engine, each in ((encoder, slots), (native, ours))]
            torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)
    for engine in (native, whole, encoder):
        engine.close()


def test_a_prompt_has_as_many_places_as_the_gateway_counts(model: ModelDir) -> None:
    assert model.vision is not None
    places = [prompt(model, (number,)).count(model.vision.image_token_id) for number in range(4)]
    assert len(set(places)) == 4
