"""Samples tokens on the device: by one kernel if only temperature applies, otherwise by ``sampler``."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from penstock.workers.engines.native.cuda import rows
from penstock.workers.engines.native.cuda.copies import Upload
from penstock.workers.engines.native.cuda.packing import Draw
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.masks import PendingMasks

CHUNK = 4096  # of the vocabulary, per program
BLOCK = 1024


class DeviceSampler:
    """Samples up to ``max_samples`` tokens per step.

    Args:
        upload: carries the parameters of the draws to the device.
        latest: (targets,) int32, receives the sampled tokens for the next step.
    """

    def __init__(self, vocab: int, max_samples: int, upload: Upload, latest: Tensor) -> None:
        device = latest.device
        self._device, self._upload, self._latest = device, upload, latest
        self._chunks = chunks = -(-vocab // CHUNK)
        self._chunk_values = torch.empty(max_samples * chunks, dtype=torch.float32, device=device)
        self._chunk_tokens = torch.empty(max_samples * chunks, dtype=torch.int32, device=device)
        self._counters = torch.zeros(max_samples, dtype=torch.int32, device=device)
        self._sampled = torch.zeros(max_samples, dtype=torch.int32, device=device)

    def parameters(self, draws: Seq[Draw]) -> tuple[Tensor, Tensor] | None:
        """Temperatures and keys of the draws; None if all are greedy."""
        if not any(draw.table_row.random for draw in draws):
            return None
        temperatures = np.zeros(len(draws), np.float32)
        keys = np.zeros(len(draws), np.uint64)
        for row, (sequence, table_row, length, _) in enumerate(draws):
            if table_row.random:
                temperatures[row] = max(sequence.sampling.temperature, 1e-5)
                keys[row] = sampler.key(sequence.sampling.seed, sequence.choice, length - sequence.prompt_len)
        upload = self._upload
        return (
            upload.put(temperatures.view(np.int32)).view(torch.float32),
            upload.put(keys.view(np.int32)).view(torch.int64),
        )

    def sample(
        self,
        logits: Tensor,
        draws: Seq[Draw],
        targets: Tensor,
        parameters: tuple[Tensor, Tensor] | None,
        masks: PendingMasks | None = None,
    ) -> "Tensor | sampler.Chosen":
        """
        Args:
            logits: (draws, vocab).
            targets: (draws,) int32, ``Draw.target`` of each, on the device.
            parameters: the result of ``parameters``.
            masks: of the draws whose sequences are constrained.
        """
        if not all(table_row.plain and length >= sequence.stoppable for sequence, table_row, length, _ in draws):
            lengths = [draw.length for draw in draws]
            allowed = masks.allowed(self._device) if masks is not None else None
            chosen = sampler.choose(logits.float(), [draw.sequence for draw in draws], lengths, allowed)
            self._latest.index_copy_(0, targets.to(torch.int64), chosen.tokens.to(torch.int32))
            return chosen
        temperatures, keys = (self._sampled, self._sampled) if parameters is None else parameters
        by_row = None if masks is None else masks.by_row(len(draws), self._device)
        self._launch(logits, targets, temperatures, keys, self._sampled, by_row, random=parameters is not None)
        return self._sampled[: len(draws)]

    def sample_random(self, logits: Tensor, targets: Tensor, temperatures: Tensor, keys: Tensor, out: Tensor) -> None:
        """Sample a token per row by temperature alone; 0: greedily. A CUDA graph can contain it.

        Args:
            targets: (rows,) int32, where the tokens are kept for the next step.
            temperatures: (rows,) float32.
            keys: (rows,) int64, see ``sampler.key``.
            out: (rows,) int32, or more.
        """
        self._launch(logits, targets, temperatures, keys, out, random=True)

    def _launch(
        self,
        logits: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        keys: Tensor,
        out: Tensor,
        allowed: tuple[Tensor, Tensor] | None = None,
        *,
        random: bool,
    ) -> None:
        numbers, masks = (self._counters, self._counters[None]) if allowed is None else allowed
        rows.sample[(len(logits), self._chunks)](
            logits, keys, temperatures, targets, self._chunk_values, self._chunk_tokens, self._counters,
            self._latest, out, numbers, masks,
            logits.shape[-1], logits.stride(0), CHUNKS=self._chunks, CHUNKS_P=1 << (self._chunks - 1).bit_length(),
            CHUNK=CHUNK, BLOCK=BLOCK, RANDOM=random, MASKED=allowed is not None,
            WORDS=masks.shape[1] if allowed is not None else 0, num_warps=4,
        )  # fmt: skip
