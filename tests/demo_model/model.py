"""The demo model for training: a Llama over packed conversations, with the parameter names of transformers."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.demo_model.vision import MEAN, PATCH, STD, TOKENS

# Parts of a batch: number of tokens, starts of the conversations, (conversations + 1,) int32, and longest conversation.
# A start at the end is an empty conversation. The cost of attention follows the longest conversation of a part.
Parts = tuple[tuple[int, Tensor, int], ...]


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 448
    theta: float = 100_000.0
    eps: float = 1e-5
    vision_hidden: int = 0  # hidden size of the vision tower; 0: none
    vision_layers: int = 4
    vision_heads: int = 4


VISION = {"vision_hidden": 192}
DRAFT = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "inner": 320}
SMOKE = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "inner": 128}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, parts: Parts) -> Tensor:
        n, d = x.shape[0], self.shape.head_dim
        q = _rotate(self.q_proj(x).view(n, -1, d), cos, sin)
        k = _rotate(self.k_proj(x).view(n, -1, d), cos, sin)
        v = self.v_proj(x).view(n, -1, d)
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out, begin = [], 0
        for size, starts, longest in parts:
            rows = slice(begin, begin := begin + size)
            out.append(attend(q[rows], k[rows], v[rows], starts, longest))
        return self.o_proj(torch.cat(out).reshape(n, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, parts: Parts) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, parts)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)


class Tower(nn.Module):
    """CLIP's vision transformer, up to its last layer, without the class token's output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.vision_hidden
        self.class_embedding = nn.Parameter(torch.randn(size) * 0.02)
        self.patch_embedding = nn.Conv2d(3, size, PATCH, PATCH, bias=False)
        self.position_embedding = nn.Embedding(TOKENS + 1, size)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        self.pre_layrnorm = nn.LayerNorm(size)  # CLIP's spelling
        self.layers = nn.ModuleList(TowerLayer(size, shape.vision_heads) for _ in range(shape.vision_layers))

    def forward(self, pictures: Tensor) -> Tensor:
        """(n, 3, SIDE, SIDE) → (n, TOKENS, size)."""
        x = self.patch_embedding(pictures).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_embedding.to(x.dtype).expand(len(x), 1, -1), x), 1) + self.position_embedding.weight
        x = self.pre_layrnorm(x)
        for layer in self.layers:
            x = layer(x)
        return x[:, 1:]  # type: ignore[no-any-return]


class TowerLayer(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(size, 3 * size), nn.Linear(3 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer_norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.layer_norm2(x))))  # type: ignore[no-any-return]


class Projector(nn.Module):
    """LLaVA's projector: from the width of the tower to that of the language model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(shape.vision_hidden, shape.hidden)
        self.linear_2 = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))  # type: ignore[no-any-return]


class Demo(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        if shape.vision_hidden:
            self.vision = Tower(shape)
            self.projector = Projector(shape)
        for name, weight in self.named_parameters():
            if weight.dim() > 1 and not name.startswith(("vision", "projector")):
                small = name.endswith(("o_proj.weight", "down_proj.weight"))  # they add to the residual stream
                nn.init.normal_(weight, std=0.03 / (2 * shape.layers) ** 0.5 if small else 0.03)

    def logits(self, x: Tensor, places: Tensor, parts: Parts) -> Tensor:
        """
        Args:
            x: (n, hidden) embedded tokens.
            places: (n,) position of each token within its conversation.
            parts: of the batch.
        """
        half = self.shape.head_dim // 2
        rates = self.shape.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = places.float()[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for layer in self.model.layers:
            x = layer(x, cos, sin, parts)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(
        self, tokens: Tensor, weights: Tensor, places: Tensor, parts: Parts, pictures: Tensor, spots: Tensor
    ) -> Tensor:
        """The weighted mean loss of predicting ``tokens`` (n,), each from those before it in its conversation."""
        x = self.model.embed_tokens(tokens)
        if self.shape.vision_hidden:
            seen = self.projector(self.vision((pictures.float() / 255 - MEAN) / STD))
            x = x.index_copy(0, spots, seen.reshape(len(spots), -1).to(x.dtype))
        logits = self.logits(x, places, parts)
        losses = F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="none")
        return (losses * weights[1:]).sum() / weights[1:].sum()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within each conversation; (n, heads, head_dim) each."""
    if q.is_cuda:  # torch's own flash attention, the form for packed sequences
        flash = torch.ops.aten._flash_attention_forward
        return flash(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0]  # type: ignore[no-any-return]
    bounds = starts.tolist()
    out = []
    for begin, end in pairwise(bounds):
        if begin < end:
            a, b, c = (each[begin:end].transpose(0, 1)[None] for each in (q, k, v))
            out.append(F.scaled_dot_product_attention(a, b, c, is_causal=True)[0].transpose(0, 1))
    if bounds[-1] < len(q):
        raise ValueError("the conversations do not cover the batch")
    return torch.cat(out)


def places_of(parts: Parts) -> Tensor:
    """(n,) position of each token within its conversation."""
    places = []
    for size, starts, _ in parts:
        steps = torch.arange(size, device=starts.device, dtype=starts.dtype)
        places.append(steps - starts[torch.searchsorted(starts, steps, right=True) - 1])
    return torch.cat(places)
