"""Memory settings of serving processes: when to collect garbage, and the size of pages."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

# New objects between two collections of the young ones (1 ms in a burst of requests), how many of these between two of
# the middle generation (2 ms; 0: every second one is), and how many of those between two of everything (20 to 40 ms
# with 2,500 open streams; with Python's default, several in a burst). For 400,000 objects of 2,500 streams, collections
# take 1.9 instead of 5.5 ms in all, and 0.8 instead of 1.3 at most (``python -m tests.perf.tuning garbage``).
SERVING_OBJECTS, SERVING_YOUNG, SERVING_MIDDLE = 5_000, 0, 800

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # from Linux 6.1 on
_MOST_BYTES = 64 << 20  # of a mapping; larger ones are an engine's, and would take long
_IN_MEMORY = 0.75  # of a mapping; a thread's stack, of which little is used, would take 2 MiB


@contextlib.contextmanager
def loading(module: str) -> Iterator[None]:
    """Import ``module`` in this context: garbage collections never visit what is imported, now or later.

    Without effect if the module is loaded already.

    Collections would take a tenth of the CPU time that a gateway needs to start (0.05 s); with torch and transformers,
    a fifth (0.65 of 3.3 s).
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_loaded() -> None:
    """Exempt everything that is loaded by now from garbage collection, once a process is ready to serve.

    A full collection of a gateway's or worker's modules stops it for 30 to 50 ms (a model's for 200 ms), once in a few
    thousand requests. From here on only young objects are collected often, so what is made for each request must not be
    left behind in reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(SERVING_OBJECTS, SERVING_YOUNG, SERVING_MIDDLE)
    use_huge_pages()


def use_huge_pages() -> None:
    """Put what is loaded by now into huge pages, where the system can.

    A process that has slept finds few addresses of its memory in the processor's caches for them. With pages of 2 MiB
    instead of 4 KiB it needs far fewer.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    with contextlib.suppress(OSError):
        for start, end in loaded(Path("/proc/self/smaps").read_text(errors="replace")):
            first, beyond = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            if first < beyond:  # it is an advice: what cannot be moved stays
                madvise(first, beyond - first, _MADV_COLLAPSE)


def loaded(smaps: str) -> list[tuple[int, int]]:
    """Where private memory without a file begins and ends.

    Args:
        smaps: as in /proc.
    """
    found, start, end = [], 0, 0
    for line in smaps.splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            private = rest[0] == "rw-p" and rest[3] == "0" and (len(rest) == 4 or not rest[4].startswith("[stack"))
            if not private or end - start > _MOST_BYTES:
                end = start
        elif name == "Rss:" and int(rest[0]) << 10 >= _IN_MEMORY * (end - start) > 0:
            found.append((start, end))
    return found
