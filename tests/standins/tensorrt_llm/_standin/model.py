"""The model that the stand-ins really run: a Llama on the CPU, one sequence at a time, float32.

Written out, since most of an engine's start would be the import of transformers; that is there for images only.
"""

from __future__ import annotations

import copy
import json
import zlib
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from penstock.infra.model.weight_files import key_mapping, weight_files

Kv = Tensor  # (layers, 2, heads, tokens, dim)
PREFIX = "model."


class SequenceKv:
    """What one sequence has computed: (heads, tokens, dim) per layer, of keys and of values."""

    def __init__(self, parts: list[Kv], layers: int) -> None:
        whole = torch.cat(parts, dim=3) if parts else None
        self.layers: list[Any] = [None if whole is None else (whole[n, 0], whole[n, 1]) for n in range(layers)]

    @property
    def tokens(self) -> int:
        return 0 if self.layers[0] is None else int(self.layers[0][0].shape[1])

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if (old := self.layers[layer]) is not None:
            keys, values = torch.cat([old[0], keys], dim=1), torch.cat([old[1], values], dim=1)
        self.layers[layer] = keys, values
        return keys, values

    def crop(self, tokens: int) -> None:
        """``tokens``: as a slice's end."""
        self.layers = [(keys[:, :tokens], values[:, :tokens]) for keys, values in self.layers]


class Model:
    """Weights and limits. Stateless: the KV of a sequence is in its caller's hands."""

    def __init__(self, path: Path) -> None:
        from safetensors.torch import load_file

        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        text = config.get("text_config", config)
        if text["model_type"] != "llama" or text.get("hidden_act") != "silu":
            raise ValueError(f"the stand-in computes Llamas only, not {text['model_type']}")
        found: dict[str, Tensor] = {}
        for file in weight_files(path):
            found |= {name.removeprefix("language_model."): each.float() for name, each in load_file(file).items()}
        self._weights = found
        self.sees = config["model_type"] in ("llava", "llava_next")
        self.vocab = int(text["vocab_size"])
        self.max_positions = int(text["max_position_embeddings"])
        self.layers = int(text["num_hidden_layers"])
        self.heads = int(text["num_key_value_heads"])
        self._groups = int(text["num_attention_heads"]) // self.heads
        self.dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
        self._eps = float(text["rms_norm_eps"])
        self._rates = float(text["rope_parameters"]["rope_theta"]) ** (-torch.arange(0, self.dim, 2) / self.dim)
        self.image_token = int(config["image_token_index"]) if self.sees else -1
        generation = path / "generation_config.json"
        ends = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
        ends = text["eos_token_id"] if ends is None else ends
        self.eos: list[int] = list(ends) if isinstance(ends, list) else [ends]
        self.path = path

    @property
    def tied_head(self) -> Tensor | None:
        """The embeddings, where they are the head, too."""
        return None if "lm_head.weight" in self._weights else self._weights[f"{PREFIX}embed_tokens.weight"]

    def with_weights(self, path: Path, head: Tensor | None = None) -> tuple[Model, str]:
        """Those of another folder, one by one, in the place of these, and what stopped that; "": all are.

        As the real ones, it misses none that the folder lacks, and leaves unknown ones out.

        Args:
            head: a copy of the head that stays, as vLLM's CPU build has it where it is tied.
        """
        from safetensors.torch import load_file

        new = copy.copy(self)
        new._weights = dict(self._weights)
        for file in weight_files(path):
            for name, tensor in load_file(file).items():
                if name not in new._weights:
                    continue
                if new._weights[name].shape != tensor.shape:
                    return new, f"size mismatch for {name}"
                new._weights[name] = tensor.float()
        if head is not None:
            new._weights["lm_head.weight"] = head
        return new, ""

    def without_weights(self) -> Model:
        """What a device has where weights have left it."""
        new = copy.copy(self)
        new._weights = {name: torch.full_like(tensor, float("nan")) for name, tensor in self._weights.items()}
        return new

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.dim * 4

    def kv(self, parts: list[Kv]) -> SequenceKv:
        """A sequence's cache that begins with these pieces of KV."""
        return SequenceKv(parts, self.layers)

    def piece(self, cache: SequenceKv, start: int, end: int) -> Kv:
        """The KV of tokens ``start`` .. ``end`` of a sequence, copied."""
        return torch.stack([torch.stack([keys[:, start:end], values[:, start:end]]) for keys, values in cache.layers])

    def forward(self, tokens: list[int], cache: SequenceKv, embeds: list[tuple[int, Tensor]], every: bool) -> Tensor:
        """Logits of the tokens behind what ``cache`` holds: (len(tokens) or 1, vocab).

        Args:
            embeds: (row, (n, hidden)): what takes the place of placeholder tokens from a row on.
        """
        rows = embedding(torch.tensor(tokens), self._weights[f"{PREFIX}embed_tokens.weight"])
        for row, values in embeds:
            rows[row : row + len(values)] = values
        positions = torch.arange(cache.tokens, cache.tokens + len(tokens))
        angles = torch.cat([positions[:, None] * self._rates] * 2, dim=1)
        turn = angles.cos(), angles.sin()
        seen = torch.arange(cache.tokens + len(tokens)) <= positions[:, None]
        with torch.inference_mode():
            for layer in range(self.layers):
                rows = self._layer(layer, rows, cache, turn, seen)
            last = self._norm(f"{PREFIX}norm", rows if every else rows[-1:])
            head = self._weights.get("lm_head.weight", self._weights[f"{PREFIX}embed_tokens.weight"])
            return linear(last, head)

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, rows.shape[-1:], self._weights[f"{name}.weight"], self._eps)

    def _layer(self, number: int, rows: Tensor, cache: SequenceKv, turn: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        name = f"{PREFIX}layers.{number}."

        def project(part: str, of: Tensor) -> Tensor:
            return linear(of, self._weights[f"{name}{part}_proj.weight"])

        def heads(part: str, of: Tensor) -> Tensor:
            return project(f"self_attn.{part}", of).unflatten(1, (-1, self.dim)).transpose(0, 1)

        def turned(of: Tensor) -> Tensor:
            low, high = of.chunk(2, dim=-1)
            return of * turn[0] + torch.cat([-high, low], dim=-1) * turn[1]

        normed = self._norm(f"{name}input_layernorm", rows)
        keys, values = cache.add(number, turned(heads("k", normed)), heads("v", normed))
        keys, values = (each.repeat_interleave(self._groups, dim=0) for each in (keys, values))
        attended = scaled_dot_product_attention(turned(heads("q", normed)), keys, values, attn_mask=seen)
        rows = rows + project("self_attn.o", attended.transpose(0, 1).flatten(1))
        normed = self._norm(f"{name}post_attention_layernorm", rows)
        return rows + project("mlp.down", silu(project("mlp.gate", normed)) * project("mlp.up", normed))

    @cached_property
    def _tower(self) -> tuple[Any, Any]:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        tower: Any = AutoModelForImageTextToText.from_pretrained(
            self.path, dtype=torch.float32, key_mapping=dict(key_mapping(self.path)) or None
        )
        return tower.eval(), AutoImageProcessor.from_pretrained(self.path, backend="pil")

    def embed(self, images: list[Any]) -> list[Tensor]:
        """One (tokens, hidden) per image."""
        tower, processor = self._tower
        pixels = processor(images=images, return_tensors="pt")
        with torch.inference_mode():
            return [each.clone() for each in tower.get_image_features(**pixels).pooler_output]


@cache
def load(path: Path) -> Model:
    """Loaded once per process; weights are never changed."""
    return Model(path)


def lora_logits(folder: Path, vocab: int) -> Tensor:
    """What an adapter adds to the logits: the same for the same content, and another thing for any other.

    Raises:
        OSError: the folder has no adapter.
    """
    json.loads((folder / "adapter_config.json").read_text())
    seed = zlib.crc32((folder / "adapter_model.safetensors").read_bytes())
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def cut(position: int, values: Tensor, start: int, end: int) -> tuple[int, Tensor]:
    """Embeddings from a position on, as far as they are of the tokens ``start`` .. ``end``, with their row there."""
    low, high = max(position, start), min(position + len(values), end)
    return low - start, values[low - position : max(low, high) - position]
