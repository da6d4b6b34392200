"""Compares a model's logits under paged attention with those under transformers' own, over a few tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.model import Model, UnsupportedModel
from penstock.workers.engines.native.model.pool import KvPool

ROUNDING = 0.1  # relative; bfloat16 through many layers stays well below
ROUNDING_FP8 = 0.3  # with weights of 8 bits, where kernels differ in whether activations are of 8 bits, too


class Expected(NamedTuple):
    """Logits of a few tokens.

    Attributes:
        noise: how much they change, relatively, if the input is rounded otherwise; 0: it was not measured.
    """

    logits: Tensor
    noise: float = 0.0


def reference_attention(pool: KvPool, start: int, stop: int) -> attention.Paged:
    return attention.ReferenceAttention(pool, [attention.TokenSpan(0, start, stop - start, [1, 0])])


def _trial(model: Model, tokens: int = 12) -> Tensor:
    return (torch.arange(tokens, device=model.device) * 37 + 1) % model.vocab_size


def reference(model: Model) -> Expected:
    """Logits of a few tokens, by transformers' own attention.

    Of mixtures of experts also their noise: the choice of experts can be a near tie so often, above all with random
    weights, that rounding alone changes the logits by more than ``ROUNDING``.
    """
    language = model.forward.get_decoder() if model.multimodal else model.forward
    language.set_attn_implementation("eager")
    try:
        logits = _logits(model)
        if model.dtype == torch.float32 or not any(
            name.endswith("experts") for name, _ in model.forward.named_modules()
        ):
            return Expected(logits)
        hook = model.forward.get_input_embeddings().register_forward_hook(_rounded_otherwise)
        try:
            return Expected(logits, _apart(_logits(model), logits))
        finally:
            hook.remove()
    finally:
        language.set_attn_implementation(attention.NAME)


def _logits(model: Model) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model.forward(input_ids=_trial(model)[None], use_cache=False).logits[0].float()
    return logits


def _rounded_otherwise(module: Any, args: Any, output: Tensor) -> Tensor:
    """Embeddings whose values are a last bit larger or smaller, in turns."""
    signs = torch.arange(output.shape[-1], device=output.device) % 2 * 2 - 1
    factors: Tensor = (1 + signs * torch.finfo(output.dtype).eps).to(output.dtype)
    return output * factors


def _apart(found: Tensor, expected: Tensor) -> float:
    """The relative error of a row: the median, as an expert's near tie may throw off single ones."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(errors.median())


def verify(
    model: Model, expected: Expected, paged: Callable[[KvPool, int, int], attention.Paged], rounding: float = ROUNDING
) -> None:
    """Compare logits of a prefill and a decode step with ``reference``'s.

    Args:
        paged: of a pool, and tokens ``start`` to ``stop`` of a sequence in its blocks 1 and 0, of 8 tokens each.
        rounding: relative error that is allowed.
    Raises:
        UnsupportedModel: they differ by more than any dtype's rounding.
    """
    token_ids = _trial(model)
    tokens = len(token_ids)
    places = torch.arange(tokens, device=model.device)
    pool = KvPool(model.shape, 2, 8, model.dtype, model.device)
    with torch.inference_mode():
        ours = []
        for start, stop in ((0, tokens - 1), (tokens - 1, tokens)):
            rows = places[: stop - start]
            ours.append(model.logits(token_ids[start:stop], places[start:stop], rows, paged(pool, start, stop)))
    if not _apart(torch.cat(ours).float(), expected.logits) < max(rounding, 2 * expected.noise):
        name = type(model.forward).__name__
        raise UnsupportedModel(
            f"{name} computes attention in a way that cannot be paged; choose another model or engine"
        )
