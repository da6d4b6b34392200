"""What a stopped deployment has stored about requests that have no record: they have not ended."""

from collections.abc import Iterator
from typing import NamedTuple

from infra.store.blocks import Place, message, message_id, subject_of
from infra.store.log import StoredLog

_ID = 36  # characters of a request's id


class Left(NamedTuple):
    """A message about such a request. ``stream``: without the namespace."""

    stream: str
    subject: str
    data: bytes


def left_open(log: StoredLog, since_ns: int) -> Iterator[Left]:
    """The messages of REQUESTS and WORK about requests without a record, of those stored since a time (Unix, ns)."""
    over: set[bytes] = set()
    for data, places in _blocks(log, "DONE", since_ns):
        over.update([subject_of(data, at)[-_ID:] for _, _, at in places])
    for name in ("REQUESTS", "WORK"):
        for data, places in _blocks(log, name, since_ns):
            for _, _, at in places:
                if message_id(data, at)[:_ID] not in over:
                    stored = message(data, at)
                    yield Left(name, stored.subject, stored.data)


def _blocks(log: StoredLog, name: str, since_ns: int) -> Iterator[tuple[bytes, list[Place]]]:
    stored = log.stream(log.subjects.stream(name))
    if stored is not None:
        yield from stored.by_block(since_ns=since_ns)
