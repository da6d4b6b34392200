"""Checkpoints that are not whole: refused at the start, with the tensors' names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.infra.model.modeldir import MODELS
from penstock.infra.model.weight_files import INDEX
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from tests.workers.engines.native.models import COMMON, save

DOWN = "model.layers.2.mlp.down_proj.weight"
Tensors = dict[str, Tensor]


def load(model: Path) -> None:
    build(str(model), NativeOptions(device="cpu", kv_blocks=8, max_running=2, warm=False))


def refusal(model: Path) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        load(model)
    return str(refused.value)


@pytest.fixture
def llama(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may change: three layers."""
    copy: Path = shutil.copytree(model_dir("llama"), tmp_path / "llama")
    return copy


def change(model: Path, work: Callable[[Tensors], Tensors | None]) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    save_file(work(tensors) or tensors, file, {"format": "pt"})


def configure(model: Path, **values: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_whole_one_is_served(llama: Path) -> None:
    load(llama)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    change(llama, lambda tensors: {name: each for name, each in tensors.items() if name != DOWN})
    assert f"1 tensor ({DOWN})" in refusal(llama)


def test_a_missing_tensor_of_the_bundled_model_is_named(tmp_path: Path) -> None:
    model = shutil.copytree(MODELS / "demo", tmp_path / "demo")
    name = "model.layers.5.mlp.down_proj.weight"
    change(model, lambda tensors: {each: tensors[each] for each in tensors if each != name})
    assert name in refusal(model)


def test_a_missing_layer_is_named(llama: Path) -> None:
    change(llama, lambda tensors: {name: tensors[name] for name in tensors if ".layers.1." not in name})
    text = refusal(llama)
    assert "9 tensors (model.layers.1." in text
    assert "and 4 more" in text


def test_more_layers_than_the_configuration_says_are_named(llama: Path) -> None:
    configure(llama, num_hidden_layers=2)
    text = refusal(llama)
    assert "config.json says 2 layers" in text
    assert "model.layers.2." in text


def test_more_layers_in_the_configuration_than_there_are_are_named(llama: Path) -> None:
    configure(llama, num_hidden_layers=4)
    assert "model.layers.3." in refusal(llama)


@pytest.mark.parametrize("prefix", ["base.", "module.", "_orig_mod."])
def test_a_prefix_before_every_name_is_named(llama: Path, prefix: str) -> None:
    change(llama, lambda tensors: {prefix + name: each for name, each in tensors.items()})
    assert f"its names begin with {prefix!r}" in refusal(llama)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(llama: Path, value: float) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[DOWN][3, 5] = value

    change(llama, damage)
    text = refusal(llama)
    assert f"NaN or infinite weights in 1 tensor ({DOWN})" in text
    assert "attention" not in text


@pytest.mark.parametrize("name", [DOWN, "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_matrix_of_zeros_is_named(llama: Path, name: str) -> None:
    change(llama, lambda tensors: tensors | {name: torch.zeros_like(tensors[name])})
    assert f"all weights are zero in 1 tensor ({name})" in refusal(llama)


def test_a_tensor_of_another_size_is_named(llama: Path) -> None:
    change(llama, lambda tensors: tensors | {DOWN: torch.ones(8, 8)})
    assert f"{DOWN} is of size [8, 8], and by config.json it has [64, 96]" in refusal(llama)


# -- indexes ------------------------------------------------------------------------------------------------------


def split(model: Path) -> dict[str, str]:
    """The same checkpoint in two files with an index, which is returned."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + (number % 2)}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, model / file, {"format": "pt"})
    index(model, files)
    return files


def index(model: Path, files: dict[str, str]) -> None:
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_a_checkpoint_in_several_files_is_served(llama: Path) -> None:
    split(llama)
    load(llama)


def test_a_tensor_that_the_index_assigns_to_another_file_is_named(llama: Path) -> None:
    files = split(llama)
    other = next(file for file in files.values() if file != files[DOWN])
    index(llama, files | {DOWN: other})
    assert f"the index assigns 1 tensor ({DOWN}) to {other}" in refusal(llama)


def test_a_tensor_that_is_in_two_files_is_named(llama: Path) -> None:
    """Which of them transformers takes depends on the order in which it reads the files."""
    files = split(llama)
    other = next(file for file in files.values() if file != files[DOWN])
    tensors = load_file(llama / other)
    save_file(tensors | {DOWN: torch.ones(64, 96)}, llama / other, {"format": "pt"})
    assert f"{other} has 1 tensor ({DOWN}) too" in refusal(llama)


def test_a_file_that_the_index_names_and_is_not_there_is_named(llama: Path) -> None:
    files = split(llama)
    (llama / files[DOWN]).unlink()
    text = refusal(llama)
    assert files[DOWN] in text
    assert "the index assigns" in text


def test_an_old_file_beside_the_index_is_not_taken_for_the_model(llama: Path) -> None:
    old = load_file(llama / "model.safetensors")
    split(llama)
    save_file(old, llama / "model.safetensors", {"format": "pt"})
    assert "model.safetensors has" in refusal(llama)


# -- what is whole nevertheless -----------------------------------------------------------------------------------


def test_tied_embeddings_need_no_head_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON | {"tie_word_embeddings": True}))
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load(tmp_path)


def test_a_head_that_is_not_tied_and_not_there_is_named(llama: Path) -> None:
    change(llama, lambda tensors: {name: each for name, each in tensors.items() if name != "lm_head.weight"})
    assert "lm_head.weight" in refusal(llama)


def test_tensors_of_something_else_are_left_alone(llama: Path) -> None:
    extra = {
        "vision_tower.layers.7.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    change(llama, lambda tensors: tensors | extra)
    load(llama)


def test_a_layer_that_predicts_further_tokens_is_left_alone(llama: Path) -> None:
    configure(llama, num_nextn_predict_layers=1)
    change(llama, lambda tensors: tensors | {DOWN.replace(".2.", ".3."): torch.ones(64, 96)})
    load(llama)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "gpt_oss"])
def test_other_architectures_are_whole(name: str, tmp_path: Path) -> None:
    load(save(name, tmp_path))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_attention_heads": 3}, "config.json cannot be used: "),
        ({"hidden_size": "64"}, "config.json cannot be used: "),
        ({"hidden_act": "mystery"}, "KeyError: 'mystery'"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"pad_token_id": 5000}, "Padding_idx"),
        ({"num_hidden_layers": 0}, "none"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2", "rope_theta": 1e4}}, "TypeError"),
    ],
    ids=str,
)
def test_values_that_do_not_fit_each_other_end_in_one_line(llama: Path, values: dict[str, object], words: str) -> None:
    """Whatever transformers raises: a worker that ends in a traceback is started again and again."""
    configure(llama, **values)
    text = refusal(llama)
    assert words in text
    assert "\n" not in text
