"""Requests without a worker, in a bounded room: earliest deadline class first come, first served. Pure."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from schemas.requests import GenerateRequest


class Waiter(Protocol):
    @property
    def request(self) -> GenerateRequest: ...
    @property
    def since_ns(self) -> int: ...


W = TypeVar("W", bound=Waiter)

URGENT_NS = 2_000_000_000  # this close to its deadline a request passes the others


class WaitingRoom(Generic[W]):
    """One priority class. First come, first served, but a request about to miss its deadline goes first.

    ``limit`` bounds what is taken from the log; requests that are steered again are let in beyond it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[str, W] = {}
        self._order: list[tuple[int, str]] = []  # (since, id), may hold ids that left
        self._deadlines: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[W]:
        return iter(list(self._waiting.values()))

    @property
    def space(self) -> int:
        """How many more may be taken from the log."""
        return max(0, self._limit - len(self._waiting))

    def get(self, request_id: str) -> W | None:
        return self._waiting.get(request_id)

    def push(self, waiter: W) -> None:
        request = waiter.request
        if request.id not in self._waiting:
            heappush(self._order, (waiter.since_ns, request.id))
            heappush(self._deadlines, (request.deadline_ns, request.id))
        self._waiting[request.id] = waiter

    def pop(self, now_ns: int) -> W | None:
        """The next one to place; None: nobody waits."""
        self._clean(self._deadlines)
        if self._deadlines and self._deadlines[0][0] < now_ns + URGENT_NS:
            return self._waiting.pop(heappop(self._deadlines)[1])
        self._clean(self._order)
        return self._waiting.pop(heappop(self._order)[1]) if self._order else None

    def remove(self, request_id: str) -> W | None:
        waiter = self._waiting.pop(request_id, None)
        if len(self._order) > 2 * len(self._waiting) + 64:  # mostly ids that left
            self._order = [entry for entry in self._order if entry[1] in self._waiting]
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._waiting]
            heapify(self._order)
            heapify(self._deadlines)
        return waiter

    def expired(self, now_ns: int) -> list[W]:
        """Take out those whose deadline has passed."""
        out = []
        while self._clean(self._deadlines) and self._deadlines[0][0] <= now_ns:
            out.append(self._waiting.pop(heappop(self._deadlines)[1]))
        return out

    def drain(self) -> list[W]:
        """Take out all."""
        out = list(self._waiting.values())
        self._waiting.clear()
        return out

    def _clean(self, heap: list[tuple[int, str]]) -> bool:
        while heap and heap[0][1] not in self._waiting:
            heappop(heap)
        return bool(heap)
