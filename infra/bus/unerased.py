"""Where requests with ``no_store`` are in REQUESTS.

They share a subject, so that routers find what is to be erased, and no id leads to one of them. This index reads each
of them once: a refresh reads those that were stored since the last one.
"""

import asyncio
import math
import time
from collections.abc import ItemsView, Iterator

import msgspec
import structlog

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, read
from infra.bus.private_objects import media_owners
from schemas import requests
from schemas.subjects import request_of

log = structlog.get_logger("bus")

REREAD_S = 300.0  # all are read again so often: the stream may have lost its end, or have been made anew
SPARE = 1_000  # and earlier if so many, and as many again as there were, were added: most of them are erased


class Unerased(msgspec.Struct, gc=False):
    """One request.

    Attributes:
        done: subject of its terminal event, with wildcards if this release cannot read the request.
        owners: see ``media_owners``.
        stored_ns: when the earliest message was stored.
        seqs: of its message and that one's copies. They may have been erased, and after the stream was made anew they
            are other requests' messages.
    """

    done: str
    owners: frozenset[str]
    stored_ns: int
    seqs: list[int]


class UnerasedRequests:
    """``refresh``, then ``get``."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._found: dict[str, Unerased] = {}
        self._position = 0
        self._reread_at = 0.0
        self._most = math.inf
        self._reading = asyncio.Lock()
        self._begun = 0  # reads
        self._read = 0  # the last one that succeeded

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __contains__(self, request: object) -> bool:
        return request in self._found

    def items(self) -> ItemsView[str, Unerased]:
        return self._found.items()

    def get(self, request: str) -> Unerased | None:
        return self._found.get(request)

    def drop(self, request: str) -> None:
        """All its messages were erased."""
        self._found.pop(request, None)

    async def refresh(self) -> None:
        """Read at least all that were stored before the call. Concurrent calls share a read.

        Raises:
            ServingError: the stream did not answer.
        """
        wanted = self._begun + 1
        async with self._reading:
            if self._read >= wanted:
                return
            self._begun = number = self._begun + 1
            if len(self._found) > self._most or time.monotonic() >= self._reread_at:
                self._found.clear()
                self._position, self._most = 0, math.inf
                self._reread_at = time.monotonic() + REREAD_S
            subjects = self._bus.subjects
            stored = read(self._bus, subjects.stream("REQUESTS"), subjects.to_be_erased, after=self._position)
            async for entry in stored:
                self._add(entry)
            if self._most == math.inf:
                self._most = 2 * len(self._found) + SPARE
            self._read = number

    def _add(self, entry: Entry) -> None:
        self._position = entry.seq
        name = request_of(entry.headers)
        found = self._found.get(name)
        if found is not None:
            found.seqs.append(entry.seq)
            return
        done, owners = self._bus.subjects.done_of(name), frozenset[str]()
        try:
            request = requests.decode(entry.data)
        except msgspec.MsgspecError as error:  # of a later release
            log.warning("request_unreadable", subject=entry.subject, error=str(error))
        else:
            done = self._bus.subjects.done(request.tenant, request.model, request.id)
            owners = media_owners(request)
        self._found[name] = Unerased(done, owners, entry.time_ns, [entry.seq])
