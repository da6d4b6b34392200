"""From the vectors of a text's tokens to one vector, as sentence-transformers computes it."""

import torch
from torch import Tensor


def pool(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """
    Args:
        hidden: (inputs, width, dimensions), of each token. Padding is on the right.
        mask: (inputs, width), 1 for tokens and 0 for padding.
        how: one of ``infra.model.embedding_model.POOLINGS``.
    Returns: (inputs, dimensions), float32.
    """
    hidden = hidden.float()
    rows = torch.arange(len(hidden), device=hidden.device)
    match how:
        case "cls":
            return hidden[:, 0]
        case "lasttoken":
            return hidden[rows, mask.sum(1) - 1]
        case "max":
            return hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)
    weights = mask.unsqueeze(-1).float()
    if how == "weightedmean":  # later tokens count more: those of a decoder have seen more
        weights = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device).view(1, -1, 1)
    total = weights.sum(1).clamp(min=1e-9)
    return (hidden * weights).sum(1) / (total.sqrt() if how == "mean_sqrt_len_tokens" else total)
