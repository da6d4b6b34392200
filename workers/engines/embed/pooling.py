"""From the vectors of a text's tokens to one vector, as sentence-transformers computes it: pooling, dense layers."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.infra.model.embedding_model import Dense
from penstock.workers.engines.native.model.model import ModelError


def pool(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """
    Args:
        hidden: (inputs, width, dimensions), of each token. Padding is on the right.
        mask: (inputs, width), 1 for tokens and 0 for padding.
        how: one of ``penstock.infra.model.embedding_model.POOLINGS``.
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


def dense(layers: tuple[Dense, ...], size: int, device: torch.device) -> nn.Sequential:
    """The layers between pooling and normalisation, in float32.

    Args:
        size: of a pooled vector.
    Raises:
        ModelError: their weights are missing, or of other sizes.
    """
    found = nn.Sequential()
    for layer in layers:
        if layer.in_features != size:
            raise ModelError(f"{layer.path} takes vectors of {layer.in_features} values, and gets {size}")
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias)
        try:
            linear.load_state_dict({name.removeprefix("linear."): each for name, each in _weights(layer.path).items()})
        except (OSError, RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())
            raise ModelError(f"the weights in {layer.path} cannot be used: {line}") from error
        if not all(torch.isfinite(each).all() for each in linear.parameters()):
            raise ModelError(f"there are NaN or infinite weights in {layer.path}")
        found.extend([linear, getattr(nn, layer.activation)()])
        size = layer.out_features
    return found.to(device).eval().requires_grad_(False)


def _weights(folder: Path) -> dict[str, Tensor]:
    file = folder / "model.safetensors"
    if file.is_file():
        return load_file(file)
    found: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return found
