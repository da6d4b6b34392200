"""What a router knows, in the object store: a restart reads the tail of the logs instead of their last hour.

Snapshots are made in parts, and the event loop runs in between. Each part is stored after its length.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.object_store import get, replace
from penstock.router.state.encoding import encoding, read_head, restoring
from penstock.router.state.load import LoadState, merge
from penstock.router.state.loader import run_in_steps
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import wire
from penstock.schemas.errors import Code, ServingError

log = structlog.get_logger("router")

_TIMEOUT_S = 5.0
_INDEX_TIMEOUT_S = 30.0  # it has 8 bytes a block
_MOST_BYTES = 1 << 30  # as much as the bucket holds
_LENGTH = 4  # bytes


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The head of a snapshot: the fold of WORK and DONE up to these sequences, and perhaps somewhat further."""

    taken_ns: int
    work_seq: int
    done_seq: int
    returned_seq: int


_decode_part = wire.decoder(LoadState)
_decode = wire.decoder(Snapshot)


class Snapshots:
    """One object per router name, replaced by newer ones. Losing it only makes the next start slower."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"fleet-{router or 'router'}"

    async def load(self) -> tuple[Snapshot, LoadState] | None:
        try:
            stored = await get(self._bus, "snapshots", self._name, limit=_MOST_BYTES, newest=True, timeout=_TIMEOUT_S)
            head, *parts = _split(stored)
            return _decode(head), merge(map(_decode_part, parts))
        except (ServingError, msgspec.MsgspecError, ValueError) as error:
            log.info("no_snapshot", reason=repr(error)[:200])
            return None

    async def save(self, head: Snapshot, state: Iterable[LoadState]) -> None:
        """
        Args:
            state: ``LoadTracker.parts``.
        """
        parts = [_prefixed(wire.encode(head))]
        for part in state:
            parts.append(_prefixed(wire.encode(only_logged(part))))
            await asyncio.sleep(0)
        try:
            await replace(self._bus, "snapshots", self._name, parts, timeout=_TIMEOUT_S)
        except ServingError as error:
            log.warning("snapshot_not_saved", error=error.message)


class IndexSnapshots:
    """The prefix index, one object per router name. Losing it only makes the next start ask all workers for dumps."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"index-{router or 'router'}"

    async def load(self, max_blocks: int) -> tuple[PrefixIndex, int] | None:
        """The stored index and the KV sequence up to which it was folded.

        None: there is none, or it is damaged, or the stream does not have everything after it any more.
        """
        began = time.monotonic()
        try:
            data = await get(
                self._bus, "snapshots", self._name, limit=_MOST_BYTES, newest=True, timeout=_INDEX_TIMEOUT_S
            )
            parts = _split(data)
            head = read_head(next(parts))
            await self._check_stream(head.kv_seq)
            index = PrefixIndex(max_blocks)
            if await run_in_steps(restoring(index, head, parts)):
                log.info("index_restored", kv_seq=head.kv_seq, blocks=index.blocks, seconds=time.monotonic() - began)
                return index, head.kv_seq
            log.warning("index_snapshot_wrong", kv_seq=head.kv_seq, expected=head.checksum, found=index.checksum())
        except (ServingError, msgspec.MsgspecError, ValueError, LookupError) as error:
            log.info("no_index_snapshot", reason=repr(error)[:200])
        return None

    async def save(self, index: PrefixIndex, kv_seq: int) -> None:
        parts = []
        for part in encoding(index, kv_seq, time.time_ns()):
            parts.append(_prefixed(part))
            await asyncio.sleep(0)
        try:
            await replace(self._bus, "snapshots", self._name, parts, timeout=_INDEX_TIMEOUT_S)
        except ServingError as error:
            log.warning("index_snapshot_not_saved", error=error.message)

    async def _check_stream(self, kv_seq: int) -> None:
        """
        Raises:
            ServingError: the KV stream cannot be read, or does not go on where the snapshot ends.
        """
        try:
            state = (await self._bus.js.stream_info(self._bus.subjects.stream("KV"))).state
        except Exception as error:
            raise ServingError(Code.broker_unavailable, f"the KV stream cannot be read: {error!r}") from error
        if not state.first_seq <= kv_seq + 1 <= state.last_seq + 1:
            raise ValueError(f"the KV stream has {state.first_seq} to {state.last_seq}, the snapshot ends at {kv_seq}")


def _prefixed(part: bytes) -> bytes:
    return len(part).to_bytes(_LENGTH, "little") + part


def _split(data: bytes) -> Iterator[bytes]:
    """
    Raises:
        ValueError: the data is truncated, or no snapshot.
    """
    at = 0
    while at < len(data) or not at:
        size = int.from_bytes(data[at : at + _LENGTH], "little")
        at += _LENGTH + size
        if not size or at > len(data):
            raise ValueError(f"no snapshot: {len(data)} bytes, a part ends at {at}")
        yield data[at - size : at]


def only_logged(part: LoadState) -> LoadState:
    """Without decisions of this router that were not read from the log: their jobs may never be stored."""
    if all(entry.echoed for entry in part.unfinished):
        return part
    return msgspec.structs.replace(part, unfinished=tuple(entry for entry in part.unfinished if entry.echoed))
