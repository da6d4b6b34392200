"""The model that the stand-in really runs: transformers on the CPU, one sequence at a time, float32."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, DynamicCache
from transformers import LlavaForConditionalGeneration as Llava
from transformers.utils import logging

Kv = Tensor  # (layers, 2, heads, tokens, dim)


class Model:
    """Weights and limits. Stateless: the KV of a sequence is a ``DynamicCache`` in its caller's hands."""

    def __init__(self, path: Path) -> None:
        logging.disable_progress_bar()
        config: Any = AutoConfig.from_pretrained(path)
        self.sees = config.model_type == "llava"
        kind: Any = Llava if self.sees else AutoModelForCausalLM
        with contextlib.redirect_stderr(io.StringIO()):
            self.torch = kind.from_pretrained(path, dtype=torch.float32).eval()
        text = config.get_text_config()
        self.vocab = int(text.vocab_size)
        self.max_positions = int(text.max_position_embeddings)
        self.layers = int(text.num_hidden_layers)
        self.heads = int(text.num_key_value_heads)
        self.dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        self.image_token = int(config.image_token_id) if self.sees else -1
        generation = path / "generation_config.json"
        found = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
        found = text.eos_token_id if found is None else found
        self.eos: list[int] = list(found) if isinstance(found, list) else [found]
        self.path = path

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.dim * 4

    def kv(self, parts: list[Kv]) -> DynamicCache:
        """A sequence's cache that begins with these pieces of KV."""
        cache = DynamicCache()
        if parts:
            whole = torch.cat(parts, dim=3)
            for layer in range(self.layers):
                cache.update(whole[layer, 0][None], whole[layer, 1][None], layer)
        return cache

    def piece(self, cache: DynamicCache, start: int, end: int) -> Kv:
        """The KV of tokens ``start`` .. ``end`` of a sequence, copied."""
        layers: Any = cache.layers
        return torch.stack([torch.stack([e.keys[0, :, start:end], e.values[0, :, start:end]]) for e in layers]).clone()

    def forward(self, tokens: list[int], cache: DynamicCache, embeds: list[tuple[int, Tensor]], every: bool) -> Tensor:
        """Logits of the tokens behind what ``cache`` holds: (len(tokens) or 1, vocab).

        Args:
            embeds: (row, (n, hidden)): what takes the place of placeholder tokens from a row on.
        """
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
        if embeds:
            rows = self.torch.get_input_embeddings()(inputs.pop("input_ids")).clone()
            for row, values in embeds:
                rows[0, row : row + len(values)] = values
            inputs = {"inputs_embeds": rows}
        with torch.inference_mode():
            keep = 0 if every else 1
            logits: Tensor = self.torch(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits[0]
        return logits.float()

    def embed(self, images: list[Any]) -> list[Tensor]:
        """One (tokens, hidden) per image."""
        processor = AutoImageProcessor.from_pretrained(self.path, backend="pil")
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            return [each.clone() for each in self.torch.get_image_features(pixel_values=pixels).pooler_output]


@cache
def load(path: Path) -> Model:
    """Loaded once per process; weights are never changed."""
    return Model(path)
