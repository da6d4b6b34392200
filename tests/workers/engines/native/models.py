"""Small random models of several architectures, what transformers itself makes of them, and a driver of engines."""

import time
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engine_loop.loop import BLOCKED_S
from penstock.workers.engines.engine_protocol import Engine, Output, SequenceRequest, StepResult
from penstock.workers.engines.native.model import quantize

VOCAB = 256
EOS = 255
GREEDY = Sampling(temperature=0)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.125,
}
LOCAL_AND_GLOBAL = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
}
CHOSEN: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED: dict[str, Any] = {  # sigmoid scores, a correction of the choice, and half of the groups
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "qwen3": Qwen3Config(**COMMON),
    "gemma3": Gemma3TextConfig(**COMMON, **LOCAL_AND_GLOBAL),
    "gemma2": Gemma2Config(**COMMON, **LOCAL_AND_GLOBAL, attn_logit_softcapping=5.0, final_logit_softcapping=30.0),
    "gpt_oss": GptOssConfig(
        **{**COMMON, "intermediate_size": 128},
        sliding_window=8,
        layer_types=LOCAL_AND_GLOBAL["layer_types"],
        **CHOSEN,
    ),
    "mistral": MistralConfig(**COMMON, sliding_window=12),
    "mixtral": MixtralConfig(**COMMON, **CHOSEN),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48),
    "qwen2_moe": Qwen2MoeConfig(
        **COMMON,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        norm_topk_prob=False,
    ),
    "olmoe": OlmoeConfig(**COMMON, num_experts=8, num_experts_per_tok=2),
    "granite_moe": GraniteMoeConfig(**COMMON, **CHOSEN, residual_multiplier=0.7, attention_multiplier=0.25),
    "phi3": Phi3Config(**COMMON),
    "phimoe": PhimoeConfig(**COMMON, **CHOSEN, router_jitter_noise=0.05),
    "deepseek_v2": DeepseekV2Config(
        **{**COMMON, "num_key_value_heads": 4, "head_dim": 8},
        **{**GROUPED, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        **LATENT,
        q_lora_rank=None,
        rope_parameters=YARN,
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4, "head_dim": 8}, **GROUPED, **LATENT, q_lora_rank=24
    ),
    "glm4_moe": Glm4MoeConfig(**COMMON, **GROUPED, use_qk_norm=True),
}


def save(name: str, directory: Path) -> Path:
    """Write a model with random weights, spread so that the next token depends on the context."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for kind, values in model.named_buffers():
            if kind.endswith("correction_bias"):
                values.uniform_()
        model.get_input_embeddings().weight.normal_()
        model.lm_head.weight.normal_(std=0.5)
    model.save_pretrained(directory / name)
    return directory / name


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest MXFP4 blocks and scales of (…, rows, columns); columns: a multiple of 32."""
    grouped = weight.float().contiguous().unflatten(-1, (-1, quantize.GROUP))
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponents = torch.ceil(torch.log2(largest / quantize.VALUES[-1]))
    bounds = torch.tensor([(low + high) / 2 for low, high in pairwise(quantize.VALUES)])
    scaled = grouped / torch.exp2(exponents)
    bits = torch.bucketize(scaled.abs(), bounds.to(weight.device)).to(torch.uint8)
    bits |= (scaled < 0).to(torch.uint8) << 3
    return bits[..., ::2] | bits[..., 1::2] << 4, (exponents.squeeze(-1) + 127).to(torch.uint8)


@cache
def reference(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


@cache
def expected(directory: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """``count`` greedy tokens by ``generate``. Rounding cannot decide any of them: the runner-up is far away."""
    out = reference(directory).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-4
    return out.sequences[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 + salt * 31 + i * i * 13 + i * 5) % (VOCAB - 2) + 1 for i in range(length))


def request(
    key: object, tokens: Sequence[int], count: int, sampling: Sampling = GREEDY, **more: Any
) -> SequenceRequest:
    stop = more.pop("stop", None) or Stop(count, ignore_eos=True)
    return SequenceRequest(key=key, prompt=tokens, sampling=sampling, stop=stop, **more)


def drain(engine: Engine) -> list[StepResult]:
    results = []
    while engine.has_work():
        results.append(engine.step())
        assert not results[-1].failures
        assert len(results) < 5000
        if engine.blocked:  # by files, which threads read
            time.sleep(BLOCKED_S)
    return results


def run(engine: Engine, requests: Iterable[SequenceRequest]) -> dict[object, list[Output]]:
    """Submit all, step to the end; outputs by key."""
    outputs: dict[object, list[Output]] = {}
    for item in requests:
        engine.submit(item)
    for result in drain(engine):
        for output in result.outputs:
            outputs.setdefault(output.key, []).append(output)
    return outputs


def tokens(outputs: dict[object, list[Output]]) -> dict[object, list[int]]:
    return {key: [output.token for output in several] for key, several in outputs.items()}
