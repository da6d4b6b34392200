"""The encode role: pictures through MultimodalEncoder into our embedding pool."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.trtllm import encoder_from_settings
from tests.workers.engines.trtllm.conftest import MODEL

VISION = modeldir.MODELS / "demo-vision"


def settings(**options: Any) -> WorkerSettings:
    return WorkerSettings(engine="trtllm", role="encode", model=str(VISION), **options)


@pytest.fixture
def engine(standin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))
    built = encoder_from_settings(settings(embed_slots=4), VISION)
    yield built
    built.close()


def png(color: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (48, 32), color).save(out, "PNG")
    return out.getvalue()


def test_only_what_an_encoder_needs_is_given_to_it(engine: EncodeEngine) -> None:
    args = engine.vision.encoder.encoder.args  # type: ignore[attr-defined]
    assert args.mm_encoder_only
    assert args.kv_cache_config.event_buffer_max_size == 0
    assert args.enable_chunked_prefill is False


def test_a_picture_becomes_what_the_model_itself_makes_of_it(engine: EncodeEngine) -> None:
    vision = modeldir.load(VISION).vision
    assert vision is not None
    assert engine.vision.slot_tokens == vision.image_tokens
    reservation = engine.vision.reserve([(b"r" * 32, vision.image_tokens), (b"b" * 32, vision.image_tokens)])
    assert reservation is not None
    engine.vision.encode(
        reservation, {n: engine.vision.prepare(png(color), "image/png") for n, color in enumerate(["red", "blue"])}
    )
    encoder: Any = engine.vision.encoder
    wanted = encoder.encoder._model.embed([Image.new("RGB", (48, 32), color) for color in ("red", "blue")])
    for slots, rows in zip(reservation.slots, wanted, strict=True):
        torch.testing.assert_close(encoder.pool.data[slots[0]], rows)
    memory = engine.memory()["embeds"]
    assert (memory.blocks, memory.block_bytes) == (4, wanted[0].numel() * 4)
    engine.vision.release(reservation)
    again = engine.vision.reserve([(b"r" * 32, vision.image_tokens)])
    assert again is not None
    assert again.have == [True]


def test_broken_pictures_and_other_kinds_are_refused(engine: EncodeEngine) -> None:
    for raw, kind in ((b"nothing", "image/png"), (png("red"), "video/mp4"), (b"nothing", "embedding")):
        with pytest.raises(RequestError):
            engine.vision.prepare(raw, kind)


def test_an_encoder_that_fails_is_the_engines_end(engine: EncodeEngine, monkeypatch: Any) -> None:
    encoder: Any = engine.vision.encoder

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(encoder.encoder, "generate", fail)
    reservation = engine.vision.reserve([(b"r" * 32, engine.vision.slot_tokens)])
    assert reservation is not None
    with pytest.raises(EngineError, match="CUDA error"):
        engine.vision.encode(reservation, {0: engine.vision.prepare(png("red"), "image/png")})


def test_a_model_that_takes_no_pictures_needs_no_encoder(standin: None) -> None:
    with pytest.raises(modeldir.ModelError, match="needs no encode worker"):
        encoder_from_settings(settings(), MODEL)
