"""Lengths of models by every form in which files write them. ``compare_lengths`` compares them with vLLM's own."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.infra.model.defaults import DEFAULTS, ROPE_TYPES, context_length

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GEMMA3 = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
GEMMA4 = {"full_attention": {"rope_type": "proportional"}, "sliding_attention": {"rope_type": "default"}}

# name: (config.json, tokens, most). The names are also those of ``compare_lengths``.
FORMS: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain": ({"max_position_embeddings": 8192}, 8192, 8192),
    "Llama 3.2": ({"max_position_embeddings": 131_072, "rope_scaling": LLAMA3}, 131_072, 131_072),
    "Llama 3.2 of transformers 5": ({"max_position_embeddings": 131_072, "rope_parameters": LLAMA3}, 131_072, 131_072),
    "YaRN as in Qwen3's cards": ({"max_position_embeddings": 40_960, "rope_scaling": YARN}, 40_960, 131_072),
    "YaRN as in Qwen2.5's cards": (
        {"max_position_embeddings": 32_768, "rope_scaling": {**YARN, "type": "yarn"}}, 32_768, 131_072,
    ),
    "YaRN of DeepSeek-V3": (
        {"max_position_embeddings": 163_840, "rope_scaling": {"type": "yarn", "factor": 40,
         "original_max_position_embeddings": 4096}}, 163_840, 163_840,
    ),
    "YaRN that reaches less": ({"max_position_embeddings": 262_144, "rope_scaling": YARN}, 262_144, 262_144),
    "YaRN without an original length": (
        {"max_position_embeddings": 32_768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 32_768, 131_072,
    ),
    "linear": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384, 16_384,
    ),
    "dynamic": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192, 8192,
    ),
    "longrope of Phi-4 mini": (
        {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
         "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, 4096, 131_072,
    ),
    "Gemma 3": (
        {"text_config": {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
         "model_type": "gemma3"}, 131_072, 131_072,
    ),
    "Gemma 3 of transformers 5": (
        {"model_type": "gemma3_text", "max_position_embeddings": 32_768, "rope_parameters": GEMMA3}, 32_768, 32_768,
    ),
    "Gemma 4": (
        {"model_type": "gemma4_text", "max_position_embeddings": 131_072, "rope_parameters": GEMMA4}, 131_072, 131_072,
    ),
    "M-RoPE of Qwen2-VL": (
        {"max_position_embeddings": 32_768, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        32_768, 32_768,
    ),
    "Command R": ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072, 131_072),
    "a key of another family": ({"n_positions": 1024, "n_ctx": 1024}, 1024, 1024),
    "a float": ({"max_position_embeddings": 4096.0}, 4096, 4096),
    "without a length": ({"model_type": "qwen2"}, 32_768, 32_768),
    "without anything": ({}, 2048, 2048),
    "malformed": ({"max_position_embeddings": "many", "rope_scaling": {"factor": "big"}}, 2048, 2048),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_length_is_what_every_engine_takes_unless_more_is_asked_for(name: str) -> None:
    config, tokens, most = FORMS[name]
    found = context_length(config)
    assert (found.tokens, found.most) == (tokens, most)
    assert found.limit(0) == found.limit(tokens) == tokens
    assert found.limit(tokens + 1) == most


def test_the_source_names_the_key_the_file_and_what_may_be_asked_for() -> None:
    config, _, _ = FORMS["YaRN as in Qwen3's cards"]
    assert context_length(config).source == (
        "max_position_embeddings in config.json; RoPE scaling yarn, up to 131,072 with --max-model-len"
    )
    assert context_length({}, {"model_max_length": 512}) == (512, 512, "model_max_length in tokenizer_config.json")
    assert context_length({}, {"model_max_length": 1e30}).tokens == 2048
    assert "no file names one" in context_length({}).source
    assert "default of qwen2" in context_length({"model_type": "qwen2"}).source


def test_every_form_of_rope_that_transformers_knows_is_known() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= ROPE_TYPES


def test_defaults_are_those_of_transformers() -> None:
    known = {kind.model_type: kind for kind in AutoModelForCausalLM._model_mapping}
    for kind, tokens in DEFAULTS.items():
        config = known[kind]() if kind in known else AutoConfig.for_model(kind)
        text = config.get_text_config()
        assert getattr(text, "max_position_embeddings", None) == tokens, kind
