"""Decides which messages of the log belong to the selected requests. Pure."""

from typing import NamedTuple

import msgspec

from penstock.log.sources.log_line import LogLine
from penstock.schemas import done, jobs, tokens, transfer, wire
from penstock.schemas.subjects import HEADER_MSG_ID

_ID = 36  # characters of a UUID


class Selection(NamedTuple):
    """Requests by their ids, or by the time that is in their ids. All by default.

    Attributes:
        ids: these; empty: those accepted from ``since_ns`` until before ``until_ns`` (0: without that end).
        kv: with the KV events, which belong to no request.
    """

    ids: frozenset[str] = frozenset()
    since_ns: int = 0
    until_ns: int = 0
    kv: bool = True

    @property
    def everything(self) -> bool:
        return not self.ids and not self.since_ns and not self.until_ns

    def has(self, request: str) -> bool:
        """Whether a request is selected."""
        if self.ids:
            return request in self.ids
        try:
            at_ns = int(request[:8] + request[9:13], 16) * 1_000_000
        except ValueError:
            return False
        return at_ns >= self.since_ns // 1_000_000 * 1_000_000 and (not self.until_ns or at_ns < self.until_ns)

    def part(self, record: LogLine) -> LogLine | None:
        """The selected part of a message: all of it, the items about selected requests, or None.

        A message that cannot be decoded is selected only if everything is.
        """
        if record.stream == "KV":
            return record if self.kv else None
        if self.everything:
            return record
        try:
            if record.stream == "TOKENS":
                return self._items(record)
            if record.stream == "HANDOFF":
                return self._ledger(record)
            return record if self.has(_request_of(record)) else None
        except msgspec.MsgspecError:
            return None

    def _items(self, record: LogLine) -> LogLine | None:
        batch = tokens.decode(record.data)
        items = tuple(item for item in batch.items if self.has(item.request))
        if len(items) == len(batch.items):
            return record if items else None
        batch = msgspec.structs.replace(batch, items=items)
        return record._replace(data=wire.encode(batch)) if items else None

    def _ledger(self, record: LogLine) -> LogLine | None:
        ledger = transfer.decode_ledger(record.data)
        events = tuple(event for event in ledger.events if self.has(event.ticket[:_ID]))
        if len(events) == len(ledger.events):
            return record if events else None
        ledger = msgspec.structs.replace(ledger, events=events)
        return record._replace(data=wire.encode(ledger)) if events else None


def _request_of(record: LogLine) -> str:
    """The request that a message of REQUESTS, WORK or DONE is about."""
    name = record.headers.get(HEADER_MSG_ID, "")
    if len(name) >= _ID and name.count("-", 0, _ID) == 4:
        return name[:_ID]
    if record.stream == "DONE":
        return str(done.decode(record.data).request)
    if record.stream == "WORK":
        message = jobs.decode(record.data)
        return "" if isinstance(message, jobs.Job) else message.request
    return ""
