"""A message of WORK as routers read it: that a request was sent to a worker. Pure.

Unfinished requests of models that another router owns, as they were read from WORK. Pure.

A router that is not the owner of a model decides nothing for it, so it folds of its requests only what it needs to take
over: a message is kept as it came until the request ends. Most end before anybody asks. ``take`` gives what is left, in
the order in which requests came, to be folded as if it were read now, with the time at which it was.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.infra.bus.direct_get import Entry
from penstock.schemas import jobs
from penstock.schemas.blocks import read_keys
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.subjects import HEADER_KEYS, HEADER_LOAD, HEADER_MSG_ID, HEADER_SUSPECT, KEPT


def parse_stage(parts: list[str]) -> tuple[list[str], bool]:
    """
    Args:
        parts: of a message id in WORK, after the request and the attempt.
    Returns: what names the stage, and whether the message is a copy.
    """
    if KEPT in parts:
        return parts[: parts.index(KEPT)], True
    return parts, False


class Positions(NamedTuple):
    """Stream sequences that a router has folded."""

    kv: int
    work: int
    done: int


class Sent(msgspec.Struct, frozen=True):
    """
    Attributes:
        is_copy: of a running job, for routers only.
        handed: to a decode worker, by the prefill worker that computed the prompt.
        keys: of the full blocks of its prompt, if the router that placed it sent them.
        suspect: as in ``Job``.
    """

    request: str
    attempt: int
    worker: str
    role: str
    load: LoadHeader
    is_copy: bool
    handed: bool
    keys: Sequence[int] = ()
    suspect: str = ""


def read_sent(entry: Entry) -> Sent | None:
    """None: a revocation, which says nothing about loads.

    Raises:
        ValueError: it cannot be read.
    """
    header = entry.headers.get(HEADER_LOAD)
    if header is None:
        return None
    role, worker = entry.subject.split(".")[-2:]
    load = jobs.read_load_header(header)
    request, number, *numbers = entry.headers.get(HEADER_MSG_ID, "").split(":")
    stage, is_copy = parse_stage(numbers)
    if load.route and load.route[0].worker != worker:
        raise ValueError("the route begins at another worker")
    keys = entry.headers.get(HEADER_KEYS)
    return Sent(
        request,
        int(number),
        worker,
        role,
        load,
        is_copy,
        stage == ["decode"],
        read_keys(keys) if keys else (),
        entry.headers.get(HEADER_SUSPECT, ""),
    )


def read_revoked(entry: Entry) -> tuple[str, int]:
    """The request and the attempt that a revocation is about; -1: none."""
    request, _, rest = entry.headers.get(HEADER_MSG_ID, "").partition(":")
    attempt = rest.partition(":")[0]
    return request, int(attempt) if attempt.isdecimal() else -1


MOST = 10_000  # messages; all are folded in 0.3 s, within the lease of who takes over
MOST_BYTES = 64 << 20  # of all; one has about 1 kB, and the block names of a long prompt
_ENTRY_BYTES = 1_024


class Unfolded(NamedTuple):
    entry: Entry
    read_ns: int


class UnownedRequests:
    """``full``: fold a message instead of adding it."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._messages: OrderedDict[str, list[Unfolded]] = OrderedDict()  # by request, oldest first
        self._count = self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, request: str) -> bool:
        return request in self._messages

    @property
    def full(self) -> bool:
        return self._count >= self._most or self._bytes >= self._most_bytes

    def add(self, request: str, entry: Entry, read_ns: int) -> None:
        headers_only = msgspec.structs.replace(entry, data=b"")  # messages read from the stream have the whole job
        self._messages.setdefault(request, []).append(Unfolded(headers_only, read_ns))
        self._count += 1
        self._bytes += _size(headers_only)

    def end(self, request: str) -> bool:
        """The terminal event of a request was read; False: nothing of it was kept."""
        messages = self._messages.pop(request, None)
        if messages is None:
            return False
        self._remove(messages)
        return True

    def take(self) -> Iterator[Unfolded]:
        """Remove and yield all messages, those of one request together, the oldest request first.

        Messages that were not yielded yet stay, so another caller gets them. Those added meanwhile are left for later.
        """
        for _ in range(len(self._messages)):
            if not self._messages:
                return
            _, messages = self._messages.popitem(last=False)
            self._remove(messages)
            yield from messages

    def _remove(self, messages: list[Unfolded]) -> None:
        self._count -= len(messages)
        self._bytes -= sum(_size(each.entry) for each in messages)


def _size(entry: Entry) -> int:
    return _ENTRY_BYTES + len(entry.headers.get(HEADER_KEYS, ""))
