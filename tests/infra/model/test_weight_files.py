"""Weights of a model in the directory of another one."""

import json
from pathlib import Path

import pytest

from penstock.infra.model.modeldir import MODELS, revision
from penstock.infra.model.weight_files import INDEX, elsewhere, key_mapping, weight_files


@pytest.fixture
def sharing(tmp_path: Path) -> Path:
    """A model that has a file of its own and one of the directory beside it."""
    for name in ("own", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    files = {"a": "model.safetensors", "b": "../text/model.safetensors", "c": "../text/missing.safetensors"}
    (tmp_path / "own" / INDEX).write_text(json.dumps({"metadata": {"total_size": 7}, "weight_map": files}))
    return tmp_path / "own"


def test_files_of_other_directories_belong_to_the_model(sharing: Path) -> None:
    assert elsewhere(sharing) == {"../text/model.safetensors"}
    assert [file.read_bytes() for file in weight_files(sharing)] == [b"text", b"own"]
    assert key_mapping(sharing) == {}


def test_other_weights_of_the_shared_file_are_another_revision(sharing: Path) -> None:
    before = revision(sharing)
    (sharing.parent / "text" / "model.safetensors").write_bytes(b"tree")
    assert revision(sharing) != before


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"weight_map": 3}', b'{"metadata": {"key_mapping": [1]}}'])
def test_a_malformed_index_names_nothing(sharing: Path, content: bytes) -> None:
    (sharing / INDEX).write_bytes(content)
    assert (elsewhere(sharing), key_mapping(sharing)) == (set(), {})
    assert weight_files(sharing) == [sharing / "model.safetensors"]


def test_the_text_weights_of_the_bundled_vision_model_are_the_text_models() -> None:
    assert elsewhere(MODELS / "demo-vision") == {"../demo/model.safetensors"}
    assert not any(elsewhere(MODELS / name) for name in ("demo", "tiny"))
