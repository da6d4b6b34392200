"""The native embedding engine: encoders and decoders of transformers, without a head, or with one that scores pairs.

From the vectors of a text's tokens to one vector, as sentence-transformers computes it: pooling, dense layers. From a
pair of texts to one score, as its cross-encoders do: sequence classification with one label, and an activation.
"""

import inspect
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForSequenceClassification

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import embedding_model, modeldir
from penstock.infra.model.embedding_model import Dense, describe
from penstock.schemas.fleet import Embedder
from penstock.workers.engines.embed.embedding_protocol import SECOND, TokenIds, pair_tokens, tokenized
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.native.build import find_device, set_threads
from penstock.workers.engines.native.model.loading import configuration, first_line, weights
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.pool import out_of_memory


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
        UnsupportedModel: their weights are missing, or of other sizes.
    """
    found = nn.Sequential()
    for layer in layers:
        if layer.in_features != size:
            raise UnsupportedModel(f"{layer.path} takes vectors of {layer.in_features} values, and gets {size}")
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias)
        try:
            linear.load_state_dict({name.removeprefix("linear."): each for name, each in _weights(layer.path).items()})
        except (OSError, RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())
            raise UnsupportedModel(f"the weights in {layer.path} cannot be used: {line}") from error
        if not all(torch.isfinite(each).all() for each in linear.parameters()):
            raise UnsupportedModel(f"there are NaN or infinite weights in {layer.path}")
        found.extend([linear, getattr(nn, layer.activation)()])
        size = layer.out_features
    return found.to(device).eval().requires_grad_(False)


def _weights(folder: Path) -> dict[str, Tensor]:
    file = folder / "model.safetensors"
    if file.is_file():
        return load_file(file)
    found: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return found


UNUSED = ("pooler.",)  # encoders' own pooling, which many checkpoints leave out: ours is described beside them


class NativeEmbeddingEngine:
    """See ``EmbeddingEngine``.

    Attributes:
        tokenizer: of the model.
    Raises:
        UnsupportedModel: the model cannot be served here; the text says what to change.
        EngineError: the weights do not fit into memory, or the device is missing.
    """

    name = "native"

    def __init__(self, path: Path, *, device: str = "auto", dtype: str = "auto", threads: int = 0, max_len: int = 0):
        began = time.perf_counter()
        self._described = describe(path)
        self.tokenizer = modeldir.load_tokenizer(path)
        self.model, self.revision = modeldir.name_of(path), embedding_model.revision(path)
        self._device = find_device(device)
        set_threads(threads, self._device)
        config = configuration(str(path))
        if config.is_encoder_decoder:
            raise UnsupportedModel(
                f"{config.model_type} is an encoder-decoder; embeddings come from encoders or decoders"
            )
        scores = self._described.scores
        if scores and config.model_type not in embedding_model.ENCODERS and config.pad_token_id is None:
            raise UnsupportedModel(f"{path / 'config.json'} has no pad_token_id, which a decoder needs to score pairs")
        loader, unused = (AutoModelForSequenceClassification, ()) if scores else (AutoModel, UNUSED)
        self._activation = getattr(nn, self._described.activation)()
        try:
            self._model = weights(loader, str(path), config, device=self._device, dtype=dtype, unused=unused)
            known = "token_type_ids" in inspect.signature(self._model.forward).parameters
            several = int(getattr(config, "type_vocab_size", 0) or 0) > 1
            self._types = scores and known and several and self._described.token_types
            self._dense = nn.Sequential()
            pooled = len(self._vectors([[0]])[0])
            self._dense = dense(self._described.dense, pooled, self._device)
            dimensions = len(self._vectors([[0]])[0])
        except torch.OutOfMemoryError as error:
            raise EngineError(out_of_memory(error)) from error
        except (AttributeError, TypeError, RuntimeError) as error:
            raise UnsupportedModel(f"{config.model_type} makes no vectors of tokens: {first_line(error)}") from error
        limit = self._described.max_tokens
        self.embedder = Embedder(
            dimensions,
            min(limit, max_len or limit),
            self._described.vocab_size,
            "" if scores else self._described.pooling,
            self._described.matryoshka,
            tuple(self._described.prompts),
            min(self._described.dimensions, dimensions),
            scores,
        )
        self.load_seconds = time.perf_counter() - began

    def prompt(self, name: str) -> str | None:
        return self._described.prompts.get(name or self._described.default_prompt, None if name else "")

    def tokenize(self, texts: Sequence[str], longest: int = 0) -> list[list[int]]:
        if self._described.lower_case:
            texts = [text.lower() for text in texts]
        return tokenized(self.tokenizer, texts, longest, self.embedder.max_tokens)

    def tokenize_pairs(self, query: str, texts: Sequence[str], longest: int = 0, document: int = 0) -> list[TokenIds]:
        return pair_tokens(self.tokenizer, query, texts, self.embedder.max_tokens, longest=longest, document=document)

    def embed(self, batch: Sequence[TokenIds]) -> list[bytes]:
        return [row.numpy().tobytes() for row in self._vectors(batch)]

    def _vectors(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        """(inputs, dimensions), float32, on the CPU. Of scores, dimensions is 1."""
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), self._described.pad_token_id, dtype=torch.int64)
        mask = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            mask[row, : len(tokens)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        with torch.inference_mode():
            if self._described.scores:
                types = {"token_type_ids": ids // SECOND} if self._types else {}
                logits = self._model(input_ids=ids % SECOND, attention_mask=mask, **types).logits
                scores: torch.Tensor = self._activation(logits.float())
                return scores.cpu()
            hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            vectors: torch.Tensor = self._dense(pool(hidden, mask, self._described.pooling))
            if self._described.normalize:
                vectors = normalize(vectors, dim=1)
            return vectors.cpu()

    def close(self) -> None:
        """Nothing to do: the process ends."""


def from_settings(settings: WorkerSettings, path: Path) -> NativeEmbeddingEngine:
    """The engine of an embed worker; raises as ``NativeEmbeddingEngine``."""
    return NativeEmbeddingEngine(
        path, device=settings.device, dtype=settings.dtype, threads=settings.threads, max_len=settings.max_model_len
    )
