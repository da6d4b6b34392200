"""Families beside those of the parity suite answer as transformers does, in a batch and in small chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from tests.properties import some
from tests.workers.engines.native.model.test_sliding import handed_off
from tests.workers.engines.native.models import (
    COMMON,
    GROUPED,
    LATENT,
    VOCAB,
    YARN,
    expected,
    prompt,
    request,
    run,
    tokens,
)

LENGTHS, COUNT = (1, 9, 33), 12
WINDOW: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GPT: dict[str, Any] = {
    **{name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")},
    "vocab_size": VOCAB,
}
LATENTS: dict[str, Any] = {**COMMON, "num_key_value_heads": 4, "head_dim": 8, **LATENT, "q_lora_rank": 24}
FAMILIES: dict[str, dict[str, Any]] = {  # by model type, and what else is special
    "deepseek_v2 with groups": {**LATENTS, **GROUPED, "topk_method": "group_limited_greedy"},
    "deepseek_v3 with whole queries": {**LATENTS, **GROUPED, "q_lora_rank": None, "rope_parameters": YARN},
    "glm4_moe_lite": {**LATENTS, **GROUPED, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "longcat_flash": {
        **LATENTS,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "n_routed_experts": 8,
        "zero_expert_num": 2,
        "moe_topk": 3,
    },
    "minicpm3": LATENTS,
    "youtu": LATENTS,
    "qwen2": COMMON,
    "granite": {**COMMON, "attention_multiplier": 0.25, "residual_multiplier": 0.7, "logits_scaling": 0.5},
    "olmo2": COMMON,
    "cohere": {**COMMON, "logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {**COMMON, **WINDOW, "logit_scale": 0.5},
    "starcoder2": {**COMMON, "sliding_window": 12},
    "gemma": COMMON,
    "exaone4": {**COMMON, **WINDOW},
    "ministral": {**COMMON, **WINDOW},
    "olmo3": {**COMMON, **WINDOW},
    "glm4": {**COMMON, "partial_rotary_factor": 0.5},
    "smollm3": {**COMMON, "no_rope_layers": [1, 1, 0]},
    "seed_oss": COMMON,
    "ernie4_5": COMMON,
    "hunyuan_v1_dense": COMMON,
    "helium": COMMON,
    "gpt_neox": {**COMMON, "rotary_pct": 0.25},
    "opt": {
        **GPT,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "init_std": 0.25,
    },
    "gpt2": {
        **GPT,
        "n_embd": 64,
        "n_inner": 96,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "initializer_range": 0.25,
    },
}


def saved(family: str, directory: Path) -> Path:
    """A model with random weights, spread so that the next token depends on the context."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.split()[0], **FAMILIES[family]))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight.normal_(std=0.5)
    model.save_pretrained(directory)
    return directory


# What others have alone or together: latents, windows, no positions, one KV head, parts of heads, sums of experts.
DISTINCT = (
    *("cohere2", "deepseek_v2 with groups", "exaone4", "glm4", "glm4_moe_lite", "gpt2", "gpt_neox", "granite"),
    *("longcat_flash", "minicpm3", "olmo3", "opt", "smollm3"),
)


@pytest.mark.parametrize("family", some(["cohere2", "exaone4", "ministral", "olmo3", "starcoder2"], "cohere2", "olmo3"))
def test_a_family_with_sliding_windows_continues_after_a_handoff(family: str, tmp_path: Path) -> None:
    handed_off(saved(family, tmp_path), 33)


@pytest.mark.parametrize("family", some(sorted(FAMILIES), *DISTINCT))
def test_a_family_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    wanted = {n: expected(tmp_path, prompt(n), COUNT) for n in LENGTHS}
    assert len({token for answer in wanted.values() for token in answer}) > COUNT // 2
    for chunk in (64, 7):
        options = NativeOptions(block_size=8, kv_blocks=64, device="cpu", max_batched_tokens=chunk)
        native = build(str(tmp_path), options)
        executor: Any = native.executor
        assert bool(executor.pool.shape.latent) == ("kv_lora_rank" in FAMILIES[family])
        requests = [request(n, prompt(n), COUNT) for n in LENGTHS]
        assert tokens(run(native, requests)) == wanted
        assert tokens(run(native, requests)) == wanted, "from the prefix cache"
