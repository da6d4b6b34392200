"""Mistral's params.json: the configuration that it stands for, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelError
from penstock.infra.model.servable import problem as servable
from penstock.infra.model.weight_files import (
    is_mistral_format,
    mistral_configuration,
    mistral_length,
    mistral_problem,
    tensors,
)
from tests.infra.model.test_text_files import tekken

PARAMS: dict[str, Any] = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "hidden_dim": 32768,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-5,
    "vocab_size": 131072,
    "rope_theta": 1e8,
    "max_position_embeddings": 131072,
}
WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # of no tensor


def folder(path: Path, **changes: Any) -> Path:
    tekken(path)
    (path / "params.json").write_text(json.dumps(PARAMS | changes))
    (path / "consolidated.safetensors").write_bytes(WEIGHTS)
    return path


def test_a_configuration_is_made_of_the_parameters() -> None:
    assert mistral_configuration(PARAMS) == {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    }
    named = tensors(mistral_configuration(PARAMS))
    assert len(named) == 3 + 9 * 40
    assert named["layers.39.attention.wk.weight"] == ("model.layers.39.self_attn.k_proj.weight", (1024, 5120), 8)
    assert [name for name, each in named.items() if each.heads and ".wq." not in name and ".wk." not in name] == []
    assert set(named) - set(tensors(mistral_configuration(PARAMS | {"tied_embeddings": True}))) == {"output.weight"}


@pytest.mark.parametrize(
    ("changes", "tokens", "most", "source"),
    [
        ({}, 131072, 131072, "max_position_embeddings in params.json"),
        ({"max_seq_len": 32768}, 32768, 32768, "max_position_embeddings in params.json"),
        ({"max_position_embeddings": None}, 128_000, 128_000, "params.json names none"),
        (
            {"yarn": {"factor": 16, "original_max_position_embeddings": 16384}},
            131072, 262144, "RoPE scaling yarn, up to 262,144",
        ),
    ],
)  # fmt: skip
def test_lengths(changes: dict[str, Any], tokens: int, most: int, source: str) -> None:
    found = mistral_length(PARAMS | changes)
    assert (found.tokens, found.most) == (tokens, most)
    assert source in found.source


def test_a_folder_is_a_model_whose_parameters_decide_its_revision(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert is_mistral_format(path)
    assert servable(path, "native") == servable(path, "vllm") == ""
    model = modeldir.load(path)
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (131072, 131072, (2,))
    assert model.length.source == "max_position_embeddings in params.json"
    assert modeldir.load(folder(path, rope_theta=1e6)).revision != model.revision


def test_a_folder_with_a_configuration_is_an_ordinary_one(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", moe={"num_experts": 8})
    (path / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 500}))
    assert not is_mistral_format(path)
    assert servable(path, "native") == ""
    before = modeldir.load(path)
    assert before.vocab_size == 500
    (path / "params.json").unlink()
    assert modeldir.load(path).revision == before.revision


UNKNOWN: dict[str, Any] = {
    "moe": {"num_experts": 8, "num_experts_per_tok": 2},
    "vision_encoder": {"hidden_size": 1024},
    "multimodal": {"whisper_model_args": {}},
    "quantization": {"qformat_weight": "fp8_e4m3"},
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 16384},
    "q_lora_rank": 0,
    "use_biases": True,
    "model_type": "mamba",
    "activation": "gelu",
}


@pytest.mark.parametrize("field", UNKNOWN)
def test_a_field_that_is_not_understood_is_named_with_who_understands_it(field: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", **{field: UNKNOWN[field]})
    line = servable(path, "native")
    assert f"{path / 'params.json'} has {field!r}" in line
    assert "--engine vllm" in line
    assert "\n" not in line
    assert servable(path, "vllm") == ""  # which needs the folder's lengths and tokenizer all the same
    assert modeldir.load(path).max_model_len == 131072


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": None}, "missing required field `dim`"),
        ({"rope_theta": None}, "missing required field `rope_theta`"),
        ({"n_layers": "40"}, "$.n_layers"),
        ({"sliding_window": [4096, None]}, "$.sliding_window"),
        ({"yarn": {"factor": 4.0, "original_max_position_embeddings": 4096, "gamma": 1}}, "gamma"),
        ({"yarn": {"factor": 4.0}}, "original_max_position_embeddings"),
        ({"n_heads": 33}, "n_heads 33, n_kv_heads 8"),
        ({"head_dim": 127}, "head_dim 127"),
        ({"n_kv_heads": 0}, "n_kv_heads 0"),
    ],
)
def test_values_that_cannot_be_used_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", **changes)
    line = mistral_problem(path)
    assert words in line
    assert str(path / "params.json") in line
    assert "\n" not in line


def test_parameters_without_their_weights_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "consolidated.safetensors").rename(path / "model.safetensors")
    assert "no consolidated*.safetensors" in servable(path, "native")


def test_parameters_that_are_no_json_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "params.json").write_text("{")
    assert "params.json cannot be read" in servable(path, "native")
    with pytest.raises(ModelError, match=r"params\.json cannot be read"):
        modeldir.load(path)
