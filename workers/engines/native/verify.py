"""Compares a model's logits under paged attention with those under transformers' own, over a few tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.engines.native import attention
from workers.engines.native.model import Model, ModelError
from workers.engines.native.pool import Pool

ROUNDING = 0.1  # relative; bfloat16 through many layers stays well below
ROUNDING_FP8 = 0.3  # with weights of 8 bits, where kernels differ in whether activations are of 8 bits, too


def reference_attention(pool: Pool, start: int, stop: int) -> attention.Paged:
    return attention.ReferenceAttention(pool, [attention.Span(0, start, stop - start, [1, 0])])


def _trial(model: Model, tokens: int = 12) -> Tensor:
    return (torch.arange(tokens, device=model.device) * 37 + 1) % model.vocab_size


def reference(model: Model) -> Tensor:
    """Logits of a few tokens, by transformers' own attention."""
    language = model.forward.get_decoder() if model.multimodal else model.forward
    language.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: Tensor = model.forward(input_ids=_trial(model)[None], use_cache=False).logits[0].float()
            return logits
    finally:
        language.set_attn_implementation(attention.NAME)


def verify(
    model: Model,
    expected: Tensor,
    paged: Callable[[Pool, int, int], attention.Paged],
    rounding: float = ROUNDING,
) -> None:
    """Compare logits of a prefill and a decode step with ``reference``'s.

    Args:
        paged: of a pool, and tokens ``start`` to ``stop`` of a sequence in its blocks 1 and 0, of 8 tokens each.
        rounding: relative error that is allowed.
    Raises:
        ModelError: they differ by more than any dtype's rounding.
    """
    token_ids = _trial(model)
    tokens = len(token_ids)
    places = torch.arange(tokens, device=model.device)
    pool = Pool(model.shape, 2, 8, model.dtype, model.device)
    with torch.inference_mode():
        ours = []
        for start, stop in ((0, tokens - 1), (tokens - 1, tokens)):
            rows = places[: stop - start]
            ours.append(model.logits(token_ids[start:stop], places[start:stop], rows, paged(pool, start, stop)))
    error = (torch.cat(ours).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    if not float(error.median()) < rounding:  # the median: an expert's near-tie may throw off a single row
        name = type(model.forward).__name__
        raise ModelError(f"{name} computes attention in a way that cannot be paged; choose another model or engine")
