"""Samples tokens on the device: by kernels for temperature, min_p, top_k and top_p, after ``sampler`` for the rest.

What top_k and top_p leave of few rows is found by sorting, which is faster there: of 128,256 tokens on an H200, a draw
of one row with top_p took 1.5 ms by kernels and 0.8 by sorting, one of 256 rows 3.6 and 9.2 (``tests.gpu.times``).
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

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
CUT_BLOCK = 2048  # of the vocabulary, at a time
MOST_TOP_K = (1 << 31) - 1


class Cuts(NamedTuple):
    """What is cut from each row's distribution.

    Attributes:
        top_ks: (rows,) int32; 0: nothing.
        log_min_ps: (rows,) float32; minus infinity: nothing.
        top_ps: (rows,) float64; 1: nothing.
    """

    top_ks: Tensor
    log_min_ps: Tensor
    top_ps: Tensor


class DrawParameters(NamedTuple):
    """How each row is drawn.

    Attributes:
        temperatures: (rows,) float32; 0: greedily.
        keys: (rows,) int64, see ``sampler.key``.
        cuts: None: nothing is cut from any row.
    """

    temperatures: Tensor
    keys: Tensor
    cuts: Cuts | None = None


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
        self._least = torch.zeros(max_samples, dtype=torch.float32, device=device)  # of the values that may be drawn
        self._last = torch.zeros(max_samples, dtype=torch.int32, device=device)  # token with that value

    def parameters(self, draws: Seq[Draw]) -> DrawParameters | None:
        """None if all are greedy."""
        if not any(draw.table_row.random for draw in draws):
            return None
        temperatures = np.zeros(len(draws), np.float32)
        keys = np.zeros(len(draws), np.uint64)
        for row, (sequence, table_row, length, _) in enumerate(draws):
            if table_row.random:
                temperatures[row] = max(sequence.sampling.temperature, 1e-5)
                keys[row] = sampler.key(sequence.sampling.seed, sequence.choice, length - sequence.prompt_len)
        upload = self._upload
        return DrawParameters(
            upload.put(temperatures.view(np.int32)).view(torch.float32),
            upload.put(keys.view(np.int32)).view(torch.int64),
            self._cuts(draws) if any(draw.table_row.cut for draw in draws) else None,
        )

    def _cuts(self, draws: Seq[Draw]) -> Cuts:
        top_ks, top_ps = np.zeros(len(draws), np.int32), np.ones(len(draws))
        log_min_ps = np.full(len(draws), -np.inf, np.float32)
        for row, (sequence, table_row, _, _) in enumerate(draws):
            if table_row.cut:
                sampling = sequence.sampling
                top_ks[row] = min(max(0, sampling.top_k), MOST_TOP_K)
                top_ps[row] = sampling.top_p
                if sampling.min_p > 0:
                    log_min_ps[row] = np.log(np.float32(sampling.min_p))
        upload = self._upload
        return Cuts(
            upload.put(top_ks),
            upload.put(log_min_ps.view(np.int32)).view(torch.float32),
            upload.put(top_ps.view(np.int32)).view(torch.float64),
        )

    def sample(
        self,
        logits: Tensor,
        draws: Seq[Draw],
        targets: Tensor,
        parameters: DrawParameters | None,
        masks: PendingMasks | None = None,
    ) -> "Tensor | sampler.Chosen":
        """
        Args:
            logits: (draws, vocab).
            targets: (draws,) int32, ``Draw.target`` of each, on the device.
            parameters: the result of ``parameters``.
            masks: of the draws whose sequences are constrained.
        """
        used = DrawParameters(self._sampled, self._sampled) if parameters is None else parameters
        random = parameters is not None
        sorts = used.cuts is not None and logits.numel() <= sampler.DRAWN_LOGITS
        if sorts or any(table_row.adjusted or length < sequence.stoppable for sequence, table_row, length, _ in draws):
            sequences = [draw.sequence for draw in draws]

            def pick(shaped: Tensor) -> Tensor:
                if sorts:
                    given = used.temperatures[:, None]
                    narrowed = sampler.narrow(shaped / torch.where(given > 0, given, 1.0), sequences)
                    drawn = DrawParameters((used.temperatures > 0).float(), used.keys)
                    self._launch(narrowed, targets, drawn, self._sampled, random=True)
                else:
                    self._launch(shaped, targets, used, self._sampled, random=random)
                return self._sampled[: len(draws)].to(torch.int64)

            allowed = masks.allowed(self._device) if masks is not None else None
            return sampler.choose(logits, sequences, [draw.length for draw in draws], allowed, pick)
        by_row = None if masks is None else masks.by_row(len(draws), self._device)
        self._launch(logits, targets, used, self._sampled, by_row, random=random)
        return self._sampled[: len(draws)]

    def sample_random(self, logits: Tensor, targets: Tensor, temperatures: Tensor, keys: Tensor, out: Tensor) -> None:
        """Sample a token per row by temperature alone; 0: greedily. A CUDA graph can contain it.

        Args:
            targets: (rows,) int32, where the tokens are kept for the next step.
            temperatures: (rows,) float32.
            keys: (rows,) int64, see ``sampler.key``.
            out: (rows,) int32, or more.
        """
        self._launch(logits, targets, DrawParameters(temperatures, keys), out, random=True)

    def _launch(
        self,
        logits: Tensor,
        targets: Tensor,
        parameters: DrawParameters,
        out: Tensor,
        allowed: tuple[Tensor, Tensor] | None = None,
        *,
        random: bool,
    ) -> None:
        numbers, masks = (self._counters, self._counters[None]) if allowed is None else allowed
        masked, words = allowed is not None, masks.shape[1] if allowed is not None else 0
        temperatures, keys, cuts = parameters
        if cuts is not None:
            rows.cutoff[(len(logits),)](
                logits, temperatures, *cuts, self._least, self._last, numbers, masks, logits.shape[-1],
                logits.stride(0), BLOCK=CUT_BLOCK, MASKED=masked, WORDS=words, num_warps=8,
            )  # fmt: skip
        rows.sample[(len(logits), self._chunks)](
            logits, keys, temperatures, targets, self._chunk_values, self._chunk_tokens, self._counters,
            self._latest, out, numbers, masks, self._least, self._last,
            logits.shape[-1], logits.stride(0), CHUNKS=self._chunks, CHUNKS_P=1 << (self._chunks - 1).bit_length(),
            CHUNK=CHUNK, BLOCK=BLOCK, RANDOM=random, MASKED=masked, WORDS=words, CUT=cuts is not None, num_warps=4,
        )  # fmt: skip
