"""Copies of gigabytes between host memory or files and a GPU, at the speed of the bus rather than of one thread.

The driver copies pageable memory through its own buffer, piece by piece, and the first access to a page allocates it.
Threads with a pinned buffer each do both in parallel.
"""

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
MOST_THREADS = 8  # each has a pinned buffer of PIECE_BYTES


_Item = TypeVar("_Item")


class _Piece(NamedTuple):
    """Bytes of two tensors; one of them is on the device."""

    to: Tensor
    of: Tensor


def copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first; returns when all are there.

    Args:
        pairs: of equal shapes. Those that are contiguous, of one type and on both sides of the bus are copied by
            threads, others as torch does.
    """
    pieces: list[_Piece] = []
    device = None
    for to, of in pairs:
        whole = to.is_contiguous() and of.is_contiguous() and to.dtype == of.dtype and to.is_cuda != of.is_cuda
        if not whole or not to.numel():
            to.copy_(of)
            continue
        device = to.device if to.is_cuda else of.device
        pieces += [_Piece(*each) for each in zip(_parts(to), _parts(of), strict=True)]
    if device is None:
        return
    torch.cuda.current_stream(device).synchronize()  # what is read was written there
    _shared_out(pieces, lambda mine: _copy(mine, device))


def write(descriptor: int, offset: int, tensor: Tensor) -> None:
    """Write a contiguous tensor's bytes to a file.

    Raises:
        OSError: there is no room for them.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    places = [(offset + number * PIECE_BYTES, part) for number, part in enumerate(_parts(tensor))]
    _shared_out(places, lambda mine: _write(descriptor, mine))


def _parts(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]


def _shared_out(items: list[_Item], work: Callable[[list[_Item]], None]) -> None:
    if not items:
        return
    threads = min(MOST_THREADS, len(items), os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="host-copy") as pool:
        done = [pool.submit(work, items[number::threads]) for number in range(threads)]
    for each in done:
        each.result()


def _copy(pieces: list[_Piece], device: torch.device) -> None:
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
                ctypes.memmove(to.data_ptr(), part.data_ptr(), len(part))


def _write(descriptor: int, places: list[tuple[int, Tensor]]) -> None:
    pinned = torch.empty(PIECE_BYTES if places[0][1].is_cuda else 0, dtype=torch.uint8, pin_memory=places[0][1].is_cuda)
    for offset, part in places:
        source = part
        if part.is_cuda:
            source = pinned[: len(part)]
            _copy_now(source, part)
        data = source.numpy().data
        while data:
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count


def _copy_now(to: Tensor, of: Tensor) -> None:
    stream = torch.cuda.Stream(of.device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(of.device), torch.cuda.stream(stream), torch.inference_mode():
        to.copy_(of, non_blocking=True)
        stream.synchronize()
