"""Tokens from logits on the device: in one kernel where temperature is all that was asked for, else by ``sampler``."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from workers.engines.core.sequence import Slot
from workers.engines.native import sampler
from workers.engines.native.cuda import rows
from workers.engines.native.cuda.lanes import Lane
from workers.engines.native.cuda.upload import Upload

CHUNK = 4096  # of the vocabulary, per program
BLOCK = 1024


class Draws:
    """Up to ``most`` draws a step.

    Args:
        upload: of the step, which takes what the draws need.
        latest: (lanes,) int32, the token that was drawn last for each.
    """

    def __init__(self, vocab: int, most: int, upload: Upload, latest: Tensor) -> None:
        device = latest.device
        self._device, self._upload, self._latest = device, upload, latest
        self._chunks = chunks = -(-vocab // CHUNK)
        self._best = torch.empty(most * chunks, dtype=torch.float32, device=device)
        self._where = torch.empty(most * chunks, dtype=torch.int32, device=device)
        self._counters = torch.zeros(most, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(most, dtype=torch.int32, device=device)

    def parameters(self, slots: Seq[Slot], used: Seq[Lane]) -> tuple[Tensor, Tensor] | None:
        """Temperatures and keys of the draws, if any is at random."""
        if not any(lane.draws for lane in used):
            return None
        temperatures = np.zeros(len(slots), np.float32)
        keys = np.zeros(len(slots), np.uint64)
        for row, (slot, lane) in enumerate(zip(slots, used, strict=True)):
            if lane.draws:
                sequence = slot.sequence
                temperatures[row] = max(sequence.sampling.temperature, 1e-5)
                position = slot.start + slot.count - sequence.prompt_len
                keys[row] = sampler.key(sequence.sampling.seed, sequence.choice, position)
        upload = self._upload
        return (
            upload.put(temperatures.view(np.int32)).view(torch.float32),
            upload.put(keys.view(np.int32)).view(torch.int64),
        )

    def draw(
        self,
        logits: Tensor,
        slots: Seq[Slot],
        used: Seq[Lane],
        targets: Tensor,
        parameters: tuple[Tensor, Tensor] | None,
    ) -> "Tensor | sampler.Chosen":
        count = len(slots)
        plain = all(
            lane.plain and slot.start + slot.count >= slot.sequence.stoppable
            for slot, lane in zip(slots, used, strict=True)
        )
        if not plain:
            lengths = [slot.start + slot.count for slot in slots]
            chosen = sampler.choose(logits.float(), [slot.sequence for slot in slots], lengths)
            self._latest.index_copy_(0, targets.to(torch.int64), chosen.tokens.to(torch.int32))
            return chosen
        temperatures, keys = (self._drawn, self._drawn) if parameters is None else parameters
        rows.draw[(count, self._chunks)](
            logits, keys, temperatures, targets, self._best, self._where, self._counters, self._latest, self._drawn,
            logits.shape[-1], logits.stride(0), CHUNKS=self._chunks, CHUNKS_P=1 << (self._chunks - 1).bit_length(),
            CHUNK=CHUNK, BLOCK=BLOCK, RANDOM=parameters is not None, num_warps=4,
        )  # fmt: skip
        return self._drawn[:count]
