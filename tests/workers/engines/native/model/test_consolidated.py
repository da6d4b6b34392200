"""Folders in Mistral's own format, against transformers and against their tensors multiplied out as they are stored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import AutoModelForCausalLM, MistralConfig

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.loading import load, positions, written
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.runners.token_backend import model_path
from tests.infra.model.test_text_files import tekken
from tests.workers.engines.native.models import COMMON, VOCAB, prompt, request, run, tokens

HEADS, KV_HEADS, SIZE, LAYERS, THETA, EPS = 4, 2, 16, 3, 10_000.0, 1e-5
PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": LAYERS,
    "head_dim": SIZE,
    "hidden_dim": 96,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "norm_eps": EPS,
    "vocab_size": VOCAB,
    "rope_theta": THETA,
    "max_position_embeddings": 512,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta": 32, "alpha": 1}
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": THETA}
ROPE |= {"beta_fast": 32, "beta_slow": 1}
# name: (fields of params.json, those of transformers' configuration)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "tied": ({"tied_embeddings": True}, {"tie_word_embeddings": True}),
    "window": ({"sliding_window": 12}, {"sliding_window": 12}),
    "yarn": ({"yarn": YARN}, {"rope_parameters": ROPE}),
    "yarn without scale": (
        {"yarn": YARN | {"apply_scale": False}}, {"rope_parameters": ROPE | {"attention_factor": 1.0}},
    ),
    "fields that say nothing": ({"moe": None, "quantization": {}, "use_biases": False}, {}),
}  # fmt: skip
OUTER = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
INNER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
Tensors = dict[str, Tensor]


def stored(loaded: Any) -> Tensors:
    """The tensors of a transformers model as Mistral would have stored them."""
    found: Tensors = {}
    for name, tensor in loaded.named_parameters():
        part = name.removesuffix(".weight")
        if part in OUTER:
            found[f"{OUTER[part]}.weight"] = tensor.detach().clone()
            continue
        _, _, layer, inner = part.split(".", 3)
        rows = tensor.detach()
        if inner in ("self_attn.q_proj", "self_attn.k_proj"):
            order = [
                head * SIZE + half * (SIZE // 2) + at
                for head in range(len(rows) // SIZE)
                for at in range(SIZE // 2)
                for half in (0, 1)
            ]
            rows = rows[order]
        found[f"layers.{layer}.{INNER[inner]}.weight"] = rows.contiguous()
    return found


def by_hand(weights: Tensors, ids: tuple[int, ...]) -> Tensor:
    """Logits of all positions from the tensors as they are stored: adjacent values are one complex number each."""
    x = weights["tok_embeddings.weight"][torch.tensor(ids)]
    angles = torch.outer(torch.arange(len(ids)), THETA ** (-torch.arange(0, SIZE, 2) / SIZE))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(values: Tensor, heads: int) -> Tensor:
        pairs = torch.view_as_complex(values.view(len(ids), heads, SIZE // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(2)

    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer in range(LAYERS):

        def at(name: str, layer: int = layer) -> Tensor:
            return weights[f"layers.{layer}.{name}.weight"]

        y = rms_norm(x, (x.shape[1],), at("attention_norm"), EPS)
        query = turned(y @ at("attention.wq").T, HEADS)
        key = turned(y @ at("attention.wk").T, KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1)
        value = (y @ at("attention.wv").T).view(len(ids), KV_HEADS, SIZE).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / SIZE**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
        x = x + mixed.flatten(1) @ at("attention.wo").T
        y = rms_norm(x, (x.shape[1],), at("ffn_norm"), EPS)
        gated = silu(y @ at("feed_forward.w1").T) * (y @ at("feed_forward.w3").T)
        x = x + gated @ at("feed_forward.w2").T
    return rms_norm(x, (x.shape[1],), weights["norm.weight"], EPS) @ weights["output.weight"].T


def made(path: Path, form: str = "plain", files: int = 1) -> tuple[Path, Any]:
    """A folder in Mistral's own format, and the same model of transformers'."""
    own, theirs = FORMS[form]
    torch.manual_seed(1)
    config = MistralConfig(**{**COMMON, "sliding_window": None, "rms_norm_eps": EPS, "eos_token_id": 2, **theirs})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" in name:
                each.uniform_(0.5, 1.5)
        model.get_input_embeddings().weight.normal_()
    tekken(path)
    (path / "params.json").write_text(json.dumps(PARAMS | own))
    weights = stored(model)
    names = sorted(weights)
    for at in range(files):
        part = {name: weights[name] for name in names[at::files]}
        file = "consolidated.safetensors" if files == 1 else f"consolidated-{at + 1:05}-of-{files:05}.safetensors"
        save_file(part, path / file)
    return path, model


def generated(model: Any, ids: tuple[int, ...], count: int) -> list[int]:
    found = torch.tensor([ids])
    for _ in range(count):
        with torch.inference_mode():
            found = torch.cat([found, model(found, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return found[0, len(ids) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("form", "files"), [*((form, 1) for form in FORMS), ("plain", 3)])
def test_its_tokens_are_those_of_the_same_transformers_model(form: str, files: int, tmp_path: Path) -> None:
    path, model = made(tmp_path / "m", form, files)
    assert model_path(WorkerSettings(engine="native", model=str(path))) == path
    engine = build(str(path), NativeOptions(block_size=8, kv_blocks=64, device="cpu", warm=False))
    wanted = {n: generated(model, prompt(n), 16) for n in (1, 17, 47)}
    assert tokens(run(engine, [request(n, prompt(n), 16) for n in wanted])) == wanted
    native = load(str(path), device=torch.device("cpu"))
    for (name, here), (other, there) in zip(native.forward.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(here, there)
    assert native.forward.config.rope_parameters.items() >= model.config.rope_parameters.items()
    assert native.forward.config.sliding_window == model.config.sliding_window
    assert native.max_positions == 512
    assert native.eos_token_ids == modeldir.load(path).eos_token_ids == (2,)


def test_its_logits_are_those_of_its_tensors_as_they_are_stored(tmp_path: Path) -> None:
    path, model = made(tmp_path / "m")
    ids = prompt(40)
    wanted = by_hand(load_file(path / "consolidated.safetensors"), ids)
    native = load(str(path), device=torch.device("cpu"))
    model.load_state_dict(native.forward.state_dict())
    with torch.inference_mode():
        found = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_its_length_is_read_from_its_parameters(tmp_path: Path) -> None:
    path, model = made(tmp_path / "m")
    found = positions(model.config, written(str(path)))
    assert found.tokens == modeldir.load(path).max_model_len == 512


def changed(work: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "consolidated.safetensors")
        work(tensors)
        save_file(tensors, path / "consolidated.safetensors")

    return change


WQ = "layers.1.attention.wq.weight"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor is missing": (changed(lambda tensors: tensors.pop(WQ)), f"it lacks 1 tensor ({WQ})"),
    "a tensor is unknown": (
        changed(lambda tensors: tensors.update({"layers.0.gate.weight": torch.ones(2)})),
        "by params.json the model has no 1 tensor (layers.0.gate.weight)",
    ),
    "a layer too many": (
        changed(lambda tensors: tensors.update({"layers.3.ffn_norm.weight": torch.ones(64)})),
        "by params.json the model has no 1 tensor (layers.3.ffn_norm.weight)",
    ),
    "another size": (
        changed(lambda tensors: tensors.update({WQ: torch.ones(32, 64)})),
        f"{WQ} is of size [32, 64], and by params.json it has [64, 64]",
    ),
    "twice": (
        lambda path: save_file({"norm.weight": torch.ones(64)}, path / "consolidated-2.safetensors"),
        "has norm.weight, which another file has, too",
    ),
    "no such params": (lambda path: (path / "params.json").write_text(json.dumps({"dim": 64})), "n_layers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named_as_it_is_stored(fault: str, tmp_path: Path) -> None:
    path, _ = made(tmp_path / "m")
    change, words = FAULTS[fault]
    change(path)
    with pytest.raises(UnsupportedModel) as refused:
        load(str(path), device=torch.device("cpu"))
    assert words in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
