"""Copies of gigabytes between host memory and a GPU, at the speed of the bus rather than of one thread.

The driver copies pageable memory through a buffer of its own, one piece after the other, and pages that were never used
are made by whoever touches them first. Threads that have a pinned buffer each do both at once.
"""

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
MOST_THREADS = 8  # each has a pinned buffer of PIECE_BYTES


class _Piece(NamedTuple):
    """Bytes of two tensors; one of them is on the device."""

    to: Tensor
    of: Tensor


def copy(pairs: Iterable[tuple[Tensor, Tensor]], before: Callable[[Tensor], None] | None = None) -> None:
    """Copy each second tensor into the first; returns when all are there.

    Args:
        pairs: of equal shapes. Those that are contiguous, of one type and on both sides of the bus are copied by
            threads, others as torch does.
        before: called with each piece of host memory that is written, in the thread that writes it.
    """
    pieces: list[_Piece] = []
    device = None
    for to, of in pairs:
        whole = to.is_contiguous() and of.is_contiguous() and to.dtype == of.dtype and to.is_cuda != of.is_cuda
        if not whole or not to.numel():
            if before is not None and not to.is_cuda:
                before(to)
            to.copy_(of)
            continue
        device = to.device if to.is_cuda else of.device
        flat_to, flat_of = (each.detach().reshape(-1).view(torch.uint8) for each in (to, of))
        for start in range(0, len(flat_to), PIECE_BYTES):
            pieces.append(_Piece(flat_to[start : start + PIECE_BYTES], flat_of[start : start + PIECE_BYTES]))
    if device is None:
        return
    torch.cuda.current_stream(device).synchronize()  # what is read was written there
    threads = max(1, min(MOST_THREADS, len(pieces), os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="host-copy") as pool:
        done = [pool.submit(_copy, pieces[number::threads], device, before) for number in range(threads)]
    for each in done:
        each.result()


def _copy(pieces: list[_Piece], device: torch.device, before: Callable[[Tensor], None] | None) -> None:
    pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.inference_mode():
        for to, of in pieces:
            part = pinned[: len(to)]
            if to.is_cuda:
                ctypes.memmove(part.data_ptr(), of.data_ptr(), len(part))  # torch would start threads for each
                to.copy_(part, non_blocking=True)
                stream.synchronize()
            else:
                part.copy_(of, non_blocking=True)
                stream.synchronize()
                if before is not None:
                    before(to)
                ctypes.memmove(to.data_ptr(), part.data_ptr(), len(part))
