"""What ``penstock up`` finds out before it starts anything: engines and models that are not there."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.up_settings import UpSettings
from penstock.infra.model import modeldir
from penstock.infra.model.embedding_model import MODULES
from penstock.launch.deployment import Deployment
from penstock.launch.groups import PlanError, WorkerGroup
from penstock.launch.machine import check_startable
from tests.infra.model.test_mistral_format import folder


def checked(monkeypatch: pytest.MonkeyPatch, *installed: str, **settings: Any) -> None:
    """With these packages, as far as anybody asks."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    check_startable([WorkerGroup(settings.pop("role", "aggregated"), 1, settings)], lambda line: None)


def test_a_diffusion_worker_needs_what_its_own_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"role": "diffusion", "model": "owner/name"}
    checked(monkeypatch, "tensorrt_llm", engine="trtllm", **found)
    checked(monkeypatch, "diffusers", engine="native", **found)
    with pytest.raises(PlanError, match=r"--engine trtllm needs tensorrt_llm: pip install 'penstock\[trtllm\]'"):
        checked(monkeypatch, "diffusers", engine="trtllm", **found)
    with pytest.raises(PlanError, match=r"--engine native needs diffusers: pip install 'penstock\[diffusion\]'"):
        checked(monkeypatch, "tensorrt_llm", engine="native", **found)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_folder_in_mistral_s_own_format_needs_no_configuration(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = folder(tmp_path / "m")
    checked(monkeypatch, "torch", "transformers", "safetensors", "vllm", engine=engine, model=str(model))
    (model / "params.json").unlink()
    with pytest.raises(PlanError, match=r"config\.json is missing"):
        checked(monkeypatch, "torch", "transformers", "safetensors", "vllm", engine=engine, model=str(model))


def test_an_embedding_model_of_the_hub_is_planned_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether it is in the hub's cache or has to be fetched; one that cannot be is reported by the check."""
    (tmp_path / MODULES).write_text("[]")
    fetched: list[tuple[str, bool]] = []

    def resolve(model: str, *, weights: bool = False) -> Path:
        fetched.append((model, weights))
        if model == "owner/bge":
            return tmp_path
        raise modeldir.ModelError("not reached")

    monkeypatch.setattr(modeldir, "resolve", resolve)
    for model, role in (("owner/bge", "embed"), ("owner/lost", "aggregated")):
        deployment = Deployment(UpSettings(model=(model,), data_dir=str(tmp_path / "data")))
        assert [group.role for group in deployment._fleet.groups] == [role]
    assert fetched == [("owner/bge", False), ("owner/lost", False)]
