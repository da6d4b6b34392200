"""EAGLE-3 heads: random ones in all published forms, what a head computes in plain torch, and one for the demo model.

``python -m tests.demo_model.eagle DIR`` trains it. Answers to held-out questions show how many proposals are right.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from penstock.infra.model import modeldir
from tests.demo_model.task_mix import conversation
from tests.demo_model.template import segments
from tests.demo_model.train import rate

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
}
LONGEST, FURTHER = 320, 1  # tokens of a conversation; proposals behind the first that training covers


def random_head(
    folder: Path,
    *,
    vocab: int,
    inputs: int,
    hidden: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    inner: int = 96,
    proposed: int = 0,
    form: str = "sglang",
    own_embedding: bool = False,
    seed: int = 1,
    std: float = 0.1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **config: Any,
) -> Path:
    """Write a head with random weights.

    Args:
        inputs: size of the target's hidden states.
        hidden: of the head's; 0: the same, and embeddings are the target's unless ``own_embedding``.
        proposed: tokens of its own vocabulary; 0: the target's, and so are the output embeddings.
        form: "sglang", "vllm", "speculators" or "bin" (as SafeAILab's).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def spread(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * std).to(dtype)

    hidden = hidden or inputs
    layer = {
        "input_layernorm.weight": 1 + spread(hidden),
        "hidden_norm.weight": 1 + spread(hidden),
        "post_attention_layernorm.weight": 1 + spread(hidden),
        "self_attn.q_proj.weight": spread(heads * head_dim, 2 * hidden),
        "self_attn.k_proj.weight": spread(kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj.weight": spread(kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj.weight": spread(hidden, heads * head_dim),
        "mlp.gate_proj.weight": spread(inner, hidden),
        "mlp.up_proj.weight": spread(inner, hidden),
        "mlp.down_proj.weight": spread(hidden, inner),
    }
    tensors = {"fc.weight": spread(hidden, 3 * inputs), "norm.weight": 1 + spread(hidden)}
    if own_embedding or hidden != inputs:
        tensors["embed_tokens.weight"] = spread(vocab, hidden) * 10
    if proposed:
        places = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:proposed].sort().values
        tensors["lm_head.weight"] = spread(proposed, hidden)
        tensors["d2t"] = places - torch.arange(proposed)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, places, True)
    inside = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    write_head(folder, tensors, layer, inside, {"draft_vocab_size": proposed or None} | config, form)
    return folder


def write_head(
    folder: Path,
    tensors: Mapping[str, Tensor],
    layer: Mapping[str, Tensor],
    inside: Mapping[str, Any],
    config: Mapping[str, Any],
    form: str = "sglang",
) -> None:
    """Write a head in one of its published forms; ``inside``: the configuration of its layer."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "layers.0." if form in ("vllm", "speculators") else "midlayer."
    named = {**tensors, **{prefix + name: value for name, value in layer.items()}}
    if form == "bin":
        torch.save(named, folder / "pytorch_model.bin")
    else:
        save_file(named, folder / "model.safetensors")
    kind = {"vllm": "Eagle3LlamaForCausalLM", "speculators": "Eagle3Speculator"}.get(form, "LlamaForCausalLMEagle3")
    written: dict[str, Any] = {"architectures": [kind], **config}
    shape = {**SHAPE, **inside}
    written |= {"transformer_layer_config": shape} if form == "speculators" else shape
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


class PlainHead:
    """What a head computes, over whole sequences. Weights are named as in SGLang's form.

    Args:
        weights: those that it shares with its target included.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self._w, self._config = weights, config

    def fused(self, states: Tensor) -> Tensor:
        return states @ self._w["fc.weight"].T

    def __call__(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            state: (…, slots, hidden), fused or of an earlier call.
            tokens: (…, slots), those behind.
        Returns: (…, slots, proposed) logits, and the next state of each slot.
        """
        w, config = self._w, self._config
        embedded = F.embedding(tokens, w["embed_tokens.weight"])
        normal = self._norm("midlayer.hidden_norm", state)
        residual = normal if config.get("norm_before_residual") else state
        joined = torch.cat([self._norm("midlayer.input_layernorm", embedded), normal], -1)
        heads, dim = config["num_attention_heads"], config["head_dim"]
        query, key, value = (
            (product := joined @ w[f"midlayer.self_attn.{name}_proj.weight"].T)
            .view(*product.shape[:-1], -1, dim)
            .transpose(-2, -3)
            for name in "qkv"
        )
        query, key = self._rotated(query), self._rotated(key)
        shared = heads // key.shape[-3]
        key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(-2, -3).flatten(-2)
        state = residual + attended @ w["midlayer.self_attn.o_proj.weight"].T
        normal = self._norm("midlayer.post_attention_layernorm", state)
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        state = state + (F.silu(normal @ gate.T) * (normal @ up.T)) @ down.T
        return self._norm("norm", state) @ w["lm_head.weight"].T, state

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self._config["rms_norm_eps"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self._w[f"{name}.weight"]

    def _rotated(self, x: Tensor) -> Tensor:
        dim, places = x.shape[-1], torch.arange(x.shape[-2])
        frequencies = self._config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = places[:, None] * frequencies
        low, high = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def hidden_states(model: Any, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """(rows, tokens, all) of the inputs of these layers, one after the other; ``tokens``: (rows, tokens)."""
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([found[layer] for layer in layers], -1)


def train(folder: Path, steps: int, batch: int, seed: int = 5) -> None:
    """Train a head on conversations of the demo model's training mix."""
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(modeldir.DEMO / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(modeldir.DEMO, dtype=torch.float32).eval()
    hidden, vocab, depth = model.config.hidden_size, model.config.vocab_size, model.config.num_hidden_layers
    inside = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 256, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 100000.0}  # fmt: skip
    layer = {
        "self_attn.q_proj.weight": (256, 2 * hidden), "self_attn.k_proj.weight": (128, 2 * hidden),
        "self_attn.v_proj.weight": (128, 2 * hidden), "self_attn.o_proj.weight": (hidden, 256),
        "mlp.gate_proj.weight": (256, hidden), "mlp.up_proj.weight": (256, hidden),
        "mlp.down_proj.weight": (hidden, 256), "input_layernorm.weight": (hidden,), "hidden_norm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    sizes = {f"midlayer.{name}": size for name, size in layer.items()}
    sizes |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    weights = {
        name: torch.nn.Parameter(torch.ones(size) if len(size) == 1 else torch.randn(size) / size[1] ** 0.5)
        for name, size in sizes.items()
    }
    shared = {"embed_tokens.weight": model.get_input_embeddings().weight, "lm_head.weight": model.lm_head.weight}
    head = PlainHead({**weights, **{name: each.detach() for name, each in shared.items()}}, SHAPE | inside)
    optimizer = torch.optim.AdamW(weights.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    rng, begin = Random(seed), time.monotonic()
    for step in range(steps):
        tokens, counted = _batch(rng, tokenizer, batch)
        state = head.fused(hidden_states(model, tokens, (2, depth // 2, depth - 3)))
        loss, right, inputs = torch.zeros(()), [], tokens
        for further in range(1 + FURTHER):
            state, inputs = state[:, :-1], inputs[:, 1:]  # of a slot, and its token: the one behind
            logits, state = head(state, inputs)
            wanted, mask = inputs[:, 1:], counted[:, 2 + further :]
            loss = loss + F.cross_entropy(logits[:, :-1][mask], wanted[mask]) * 0.8**further
            right.append(float((logits[:, :-1].argmax(-1) == wanted)[mask].float().mean()))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, 2e-3)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.3f} right {[round(each, 3) for each in right]} "
                  f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    values = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in weights.items()}
    inner = {name.removeprefix("midlayer."): each for name, each in values.items() if name.startswith("midlayer.")}
    outer = {name: each for name, each in values.items() if not name.startswith("midlayer.")}
    write_head(folder, outer, inner, inside, {"draft_vocab_size": None})


def _batch(rng: Random, tokenizer: PreTrainedTokenizerFast, rows: int) -> tuple[Tensor, Tensor]:
    """Tokens of conversations, and which of them the assistant says; padded on the right."""
    found: list[tuple[list[int], list[bool]]] = []
    while len(found) < rows:
        sample, messages = conversation(rng)
        tokens, said = [], []
        for text, by_assistant in segments(messages, sample.tools):
            part = tokenizer.encode(text, add_special_tokens=False)
            tokens += part
            said += [by_assistant] * len(part)
        if len(tokens) <= LONGEST:
            found.append((tokens, said))
    longest = max(len(tokens) for tokens, _ in found)
    padded = [tokens + [0] * (longest - len(tokens)) for tokens, _ in found]
    counted = [said + [False] * (longest - len(said)) for _, said in found]
    return torch.tensor(padded), torch.tensor(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.folder, options.steps, options.batch)


if __name__ == "__main__":
    main()
