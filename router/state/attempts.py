"""The attempts of requests in the logs: sent to a worker, with their cost, returned, or ended. Pure.

A router that is not the owner of a model decides nothing for it, so it folds of its requests only what it needs to take
over (``UnownedRequests``): a message is kept as it came until the request ends. Most end before a takeover. ``take``
gives what is left, in the order in which requests came, to be folded as if it were read now, with the time at which it
was.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from penstock.infra.bus.direct_get import Entry
from penstock.router.state.holders import TargetId
from penstock.router.state.target_loads import ENCODE
from penstock.schemas import jobs
from penstock.schemas.done import CRASHES
from penstock.schemas.jobs import LoadHeader, Stage
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, HEADER_SUSPECT, KEPT


class StageLoad(NamedTuple):
    """What one request costs at one target."""

    target_id: TargetId
    sequences: int
    blocks: int
    uncached_tokens: int  # prompt tokens to compute


class ActiveRequest(msgspec.Struct, omit_defaults=True):
    """A request that was sent to a worker and has not ended. Snapshots store it: fields keep their names.

    Only ``echoed`` and ``seq`` change: what it costs does not.
    """

    request: str
    attempt: int
    worker: str  # at its present stage
    prompt_tokens: int
    cached_tokens: int
    blocks: int  # prompt blocks to compute at the prefill worker
    deadline_ns: int
    rank: int = 0
    n: int = 1  # sequences
    token_address: str = msgspec.field(default="", name="gateway")
    priority: str = ""
    echoed: bool = False  # read from the log; False: only decided by this router
    seq: int = 0  # of its newest message in WORK; 0: not read yet
    role: str = ""  # of ``worker``
    later: tuple[Stage, ...] = ()  # the stages after this one
    prompt_blocks: int = 0  # all prompt blocks, which a decode worker takes over with the KV
    handed: bool = False  # an earlier stage computed the prompt
    suspect: str = ""  # as in ``Job``

    @property
    def target_id(self) -> TargetId:
        return (self.worker, self.rank)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The present stage and all later ones."""
        return (Stage(self.role, self.worker, self.rank), *self.later)

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)

    def stage_loads(self) -> list[StageLoad]:
        """The cost at each stage that is left. A function of this entry alone: what is added is also subtracted."""
        if not self.later and not self.handed and self.role != ENCODE:
            return [StageLoad((self.worker, self.rank), self.n, self.blocks, self.uncached_tokens)]
        loads, computed = [], self.handed
        for stage in self.stages:
            target_id = (stage.worker, stage.rank)
            if stage.role == ENCODE:
                loads.append(StageLoad(target_id, 1, 0, 0))
            elif computed:
                loads.append(StageLoad(target_id, self.n, self.prompt_blocks, 0))
            else:
                loads.append(StageLoad(target_id, self.n, self.blocks, self.uncached_tokens))
                computed = True
        return loads


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
        suspect: as in ``Job``.
    """

    request: str
    attempt: int
    worker: str
    role: str
    load: LoadHeader
    is_copy: bool
    handed: bool
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
    return Sent(
        request,
        int(number),
        worker,
        role,
        load,
        is_copy,
        stage == ["decode"],
        entry.headers.get(HEADER_SUSPECT, ""),
    )


def read_revoked(entry: Entry) -> tuple[str, int]:
    """The request and the attempt that a revocation is about; -1: none."""
    request, _, rest = entry.headers.get(HEADER_MSG_ID, "").partition(":")
    attempt = rest.partition(":")[0]
    return request, int(attempt) if attempt.isdecimal() else -1


MOST_UNFOLDED = 10_000  # messages; all are folded in 0.3 s, within the lease of who takes over
MOST_UNFOLDED_BYTES = 64 << 20  # of all; one has about 1 kB
_ENTRY_BYTES = 1_024


class Unfolded(NamedTuple):
    entry: Entry
    read_ns: int


class UnownedRequests:
    """``full``: fold a message instead of adding it."""

    def __init__(self, most: int = MOST_UNFOLDED, most_bytes: int = MOST_UNFOLDED_BYTES) -> None:
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
        """The terminal event of a request was read; False: none of its messages were kept."""
        return bool(self.take_of(request))

    def take_of(self, request: str) -> list[Unfolded]:
        """Remove and return the messages of one request."""
        messages = self._messages.pop(request, [])
        self._remove(messages)
        return messages

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
    return _ENTRY_BYTES + sum(map(len, entry.headers.values()))  # earlier builds send up to 45 kB of block names


RETURNS_REMEMBERED = 20_000  # unfinished requests with returned attempts


class ReturnedAttempts:
    """A fold of DONE: which attempts of unfinished requests were returned, and which of them crashed."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, dict[int, str]] = OrderedDict()

    def add(self, request: str, attempt: int, crashed: str) -> None:
        """``crashed``: as in ``done.Returned``. Of several reports of one attempt, the first crash counts."""
        attempts = self._attempts.setdefault(request, {})
        known = attempts.get(attempt, "")
        attempts[attempt] = known if known in CRASHES else crashed or known
        if len(self._attempts) > RETURNS_REMEMBERED:
            self._attempts.popitem(last=False)

    def end(self, request: str) -> None:
        self._attempts.pop(request, None)

    def of(self, request: str) -> Mapping[int, str]:
        return self._attempts.get(request, {})

    def crashes(self, request: str) -> int:
        return count_crashes(self.of(request))

    def parts(self, size: int = 500) -> Iterator[tuple[tuple[str, int, str], ...]]:
        """For a snapshot, see ``update``."""
        entries = [(request, *each) for request, attempts in self._attempts.items() for each in attempts.items()]
        for start in range(0, len(entries), size):
            yield tuple(entries[start : start + size])

    def update(self, entries: Iterable[tuple[str, int, str]]) -> None:
        for entry in entries:
            self.add(*entry)


def count_crashes(returned: Mapping[int, str]) -> int:
    """``returned``: by attempt, as ``ReturnedAttempts`` has it."""
    return sum(crashed in CRASHES for crashed in returned.values())


ENDED_REMEMBERED = 65_536  # requests
EVERY = 1 << 62  # above every attempt: the request has ended


class EndedAttempts:
    """The highest ended attempt of each request; the requests that ended longest ago are forgotten."""

    def __init__(self) -> None:
        # Oldest first. The first key of a dict is found after all that were deleted before it: 15 µs at this size.
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def close(self, request: str, attempt: int) -> None:
        """An attempt, and all before it, have ended."""
        self._attempts[request] = attempt
        self._attempts.move_to_end(request)
        if len(self._attempts) > ENDED_REMEMBERED:
            self._attempts.popitem(last=False)

    def last(self, request: str) -> int:
        """The highest attempt that has ended; -1: none."""
        return self._attempts.get(request, -1)

    def update(self, closed: Iterable[tuple[str, int]]) -> None:
        """Add what ``parts`` yielded."""
        self._attempts.update(closed)

    def parts(self, size: int) -> Iterator[tuple[tuple[str, int], ...]]:
        """All of them as they were at first, ``size`` at a time. Attempts may end between two parts.

        Of 65,536 that is 3 ms at once and no more later; to look each up again took 60 ms every ten seconds.
        """
        attempts = list(self._attempts.items())
        for start in range(0, len(attempts), size):
            yield tuple(attempts[start : start + size])
