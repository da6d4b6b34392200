"""Memory of processes that serve. What garbage collections cost is in ``tests/router/state/test_event_loop.py``."""

import contextlib
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.process.gc_policy import HUGE_PAGE, loaded, loading, use_huge_pages
from tests.conftest import huge_pages

SMAPS = """\
55d0c0000000-55d0c0800000 rw-p 00000000 00:00 0                          [heap]
Size:               8192 kB
Rss:                8000 kB
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Rss:                4096 kB
7f1000000000-7f1000800000 rw-p 00000000 00:00 0
Rss:                  16 kB
7f2000000000-7f2000800000 rw-p 00000000 08:01 77                         /usr/lib/libexample.so
Rss:                8192 kB
7f3000000000-7f3000800000 rw-s 00000000 00:01 0
Rss:                8192 kB
7f4000000000-7f4100000000 rw-p 00000000 00:00 0
Rss:             4194304 kB
7f5000000000-7f5000800000 r--p 00000000 00:00 0
Rss:                8192 kB
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
Rss:                8192 kB
VmFlags: rd wr mr mw me gd ac
"""


def test_only_memory_of_its_own_that_is_in_use_is_put_into_huge_pages() -> None:
    """Not a thread's stack, of which little is used, nor gigabytes of an engine, files and what is shared."""
    assert loaded(SMAPS) == [(0x55D0C0000000, 0x55D0C0800000), (0x7F0000000000, 0x7F0000400000)]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_file_in_memory_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.so"
    with open(path, "wb+") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), 0):
            use_huge_pages()


def has_huge_pages() -> bool:
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(bytes(len(memory)))
        huge_pages(True)
        try:
            memory.madvise(25)  # MADV_COLLAPSE
        except OSError:
            return False
        finally:
            huge_pages(False)
    return True


@pytest.mark.skipif(not has_huge_pages(), reason="Linux before 6.1, or without transparent huge pages")
@pytest.mark.timeout(60)
def test_a_process_that_is_ready_to_serve_has_huge_pages() -> None:
    program = (
        "from penstock.infra.process.gc_policy import freeze_loaded\n"
        "kept = [str(number) * 9 for number in range(300_000)]\n"
        "freeze_loaded()\n"
        "print(next(line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('AnonHugePages')))\n"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=50, preexec_fn=lambda: huge_pages(True)
    )
    assert int(shown.stdout) << 10 >= HUGE_PAGE


@pytest.mark.parametrize("there", [False, True])
def test_no_collection_visits_what_is_imported_unless_it_is_there_already(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with contextlib.suppress(ImportError), loading("os" if there else "not.there.yet"):
        assert gc.isenabled() == there
        raise ImportError
    assert gc.isenabled()
    assert frozen == [True] * (not there)
