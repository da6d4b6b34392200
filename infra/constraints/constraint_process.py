"""The process in which constraints are compiled to see whether they can be: each in a fork, under limits of the kernel.

Its parent is ``trials``. It reads jobs from standard input and answers them in order.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
from typing import Any

import msgspec

from penstock.infra.constraints import constraint_grammar
from penstock.schemas.requests import Constraint

QUICK_S = 0.2  # CPU time in the first lane: an object of 100 properties takes 5 ms, one of 1,000 takes 140
_WORKING_BYTES = 1 << 30  # of the address space while it is compiled
_STACK_BYTES = 4 << 20
_BYTES_A_CHARACTER = 256  # of a compiled grammar, where malloc does not count
_TOKENS = 1 << 18  # ids of a vocabulary to which grammars may refer
_ABOUT_TOKENS = re.compile("special token|[Tt]oken range|token id", re.I)  # which only a model's vocabulary has
_SPECIAL = re.compile(r"<[^<>\s\[\]/]{1,128}>")
PREFIX = 4  # bytes of a frame's length


class TrialJob(msgspec.Struct, array_like=True):
    kind: str
    text: str
    cpu_s: float


class TrialAnswer(msgspec.Struct, array_like=True):
    """``ended``: "" as it should, "cpu" by the limit, "crash" by a signal."""

    ended: str
    reason: str = ""
    size_bytes: int = 0


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(PREFIX, "big") + data


def main() -> None:
    """Answer jobs from standard input, each in a fork, until it ends."""
    with contextlib.suppress(AttributeError, OSError):  # whatever the parent is
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    vocabulary = None
    with contextlib.suppress(constraint_grammar.LibraryError):  # the workers compile with theirs
        vocabulary = _Vocabulary(_TOKENS)
    with open(0, "rb", buffering=0) as source, open(1, "wb", buffering=0) as sink:
        while frame := _read(source, PREFIX):
            job = msgspec.msgpack.decode(_read(source, int.from_bytes(frame, "big")), type=TrialJob)
            sink.write(framed(msgspec.msgpack.encode(_forked(job, vocabulary))))


def _read(source: Any, size: int) -> bytes:
    """``size`` bytes; fewer: the source has ended."""
    data = b""
    while len(data) < size and (part := source.read(size - len(data))):
        data += part
    return data


def _forked(job: TrialJob, vocabulary: "_Vocabulary | None") -> TrialAnswer:
    if vocabulary is None:
        return TrialAnswer("", "", _estimated(job.text))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit(job.cpu_s)
            os.write(writer, msgspec.msgpack.encode(_compile(job, vocabulary)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as results:
        data = results.read()
    _, status = os.waitpid(pid, 0)
    if data:
        return msgspec.msgpack.decode(data, type=TrialAnswer)
    return TrialAnswer("cpu" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF else "crash")


def _limit(cpu_s: float) -> None:
    """Have the kernel end this process: after ``cpu_s`` of its own time by SIGPROF, or beyond a limit of memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _WORKING_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if cpu_s > QUICK_S:
        os.nice(10)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _compile(job: TrialJob, vocabulary: "_Vocabulary") -> TrialAnswer:
    constraint = Constraint(job.kind, job.text)
    try:
        size = vocabulary.compiled_bytes(constraint)
    except constraint_grammar.ConstraintError as error:
        return TrialAnswer("", str(error))
    except constraint_grammar.LibraryError:
        return TrialAnswer("", "", _estimated(job.text))  # the workers compile with theirs
    except MemoryError:
        return TrialAnswer("crash")
    except BaseException as error:  # also of the library's own, which are not Exception
        return TrialAnswer("", f"{type(error).__name__}: {error}"[: constraint_grammar.MAX_MESSAGE])
    return TrialAnswer("", "", size)


class _Vocabulary:
    """A vocabulary of the 256 bytes in place of the model's: compiling takes as long, and reading it no time.

    Args:
        tokens: ids to which grammars may refer besides.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._plain = constraint_grammar.byte_tokenizer(tokens, ())

    def compiled_bytes(self, constraint: Constraint) -> int:
        """
        Raises:
            ConstraintError: it cannot be compiled.
        """
        try:
            return _size(constraint, self._plain)
        except constraint_grammar.ConstraintError as error:
            if not _ABOUT_TOKENS.search(str(error)):
                raise
        named = constraint_grammar.byte_tokenizer(self._tokens, sorted(set(_SPECIAL.findall(constraint.text))))
        try:
            return _size(constraint, named)
        except constraint_grammar.ConstraintError as error:
            if not _ABOUT_TOKENS.search(str(error)):
                raise
        constraint_grammar.check(constraint)
        return _estimated(constraint.text)  # the workers know the model's tokens


def _size(constraint: Constraint, tokenizer: Any) -> int:
    """Bytes of a compiled constraint."""
    before = _allocated()
    matcher = constraint_grammar.compiled(constraint, tokenizer)
    after = _allocated()
    del matcher
    return max(after - before, len(constraint.text)) if before else _estimated(constraint.text)


def _estimated(text: str) -> int:
    return _BYTES_A_CHARACTER * (len(text) + 1_024)


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library 2.33 and newer."""

    _fields_ = (
        ("arena", ctypes.c_size_t), ("ordblks", ctypes.c_size_t), ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t), ("hblkhd", ctypes.c_size_t), ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t), ("uordblks", ctypes.c_size_t), ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )  # fmt: skip


def _allocated() -> int:
    """Bytes that malloc has given out; 0: this C library does not tell."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0
    count.restype = _Heap
    heap = count()
    return int(heap.uordblks + heap.hblkhd)


if __name__ == "__main__":
    main()
