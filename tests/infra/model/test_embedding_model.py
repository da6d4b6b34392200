"""What the files of a model directory say about its vectors."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.model.embedding_model import describe, makes_vectors
from penstock.infra.model.modeldir import DEMO, ModelError


def folder(path: Path, **files: Any) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_encoders_and_sentence_transformers_make_vectors_and_decoders_generate(tmp_path: Path) -> None:
    assert not makes_vectors(DEMO)
    assert not makes_vectors(tmp_path), "there is no config.json"
    assert not makes_vectors(folder(tmp_path, config={"model_type": "qwen3"}))
    assert makes_vectors(folder(tmp_path, config={"model_type": "xlm-roberta"}))
    assert makes_vectors(folder(tmp_path, config={"model_type": "qwen3"}, modules=[]))


@pytest.mark.parametrize(
    ("config", "files", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, {}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514}, {}, 512),
        (
            {"model_type": "bert", "max_position_embeddings": 512},
            {"sentence_bert_config": {"max_seq_length": 256}, "tokenizer_config": {"model_max_length": 300}},
            256,
        ),
        ({"model_type": "bert", "max_position_embeddings": 512}, {"tokenizer_config": {"model_max_length": 1e30}}, 512),
        ({"model_type": "bert"}, {}, 512),
    ],
)
def test_the_shortest_of_all_limits_counts(tmp_path: Path, config: Any, files: Any, limit: int) -> None:
    assert describe(folder(tmp_path, config=config, **files)).max_tokens == limit


def test_pooling_defaults_to_what_the_architecture_can_do(tmp_path: Path) -> None:
    found = describe(folder(tmp_path, config={"model_type": "bert"}))
    assert (found.pooling, found.normalize) == ("mean", True)
    nested = {"model_type": "qwen3", "matryoshka_dimensions": [64, 32]}
    found = describe(folder(tmp_path, config=nested))
    assert (found.pooling, found.normalize, found.matryoshka) == ("lasttoken", True, (64, 32))


def test_several_poolings_at_once_are_refused(tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "."}]
    both = {"model_type": "bert", "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    with pytest.raises(ModelError, match=r"pooling by \['mean', 'max'\]; one of cls, mean"):
        describe(folder(tmp_path, config=both, modules=modules))
