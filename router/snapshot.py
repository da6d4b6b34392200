"""A router's load state in the object store: a restart reads the tail of the logs instead of their last hour.

The state is made in parts, and the event loop runs in between. Each part is stored after its length.
"""

from collections.abc import Iterator, Sequence

import msgspec
import structlog

from infra.bus.connection import Bus
from infra.bus.object_store import get, replace
from router.load import LoadState, merge
from schemas import wire
from schemas.errors import ServingError

log = structlog.get_logger("router")

_TIMEOUT_S = 5.0
_MOST_BYTES = 1 << 30  # as much as the bucket holds
_LENGTH = 4  # bytes


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The head of a snapshot: the fold of WORK and DONE up to these sequences, and perhaps somewhat further."""

    taken_ns: int
    work_seq: int
    done_seq: int
    returned_seq: int


encode_part = wire.encode
_decode_part = wire.decoder(LoadState)
_decode = wire.decoder(Snapshot)


class Snapshots:
    """One object per router name, replaced by newer ones. Losing it only makes the next start slower."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"fleet-{router or 'router'}"

    async def load(self) -> tuple[Snapshot, LoadState] | None:
        try:
            found = await get(self._bus, "snapshots", self._name, limit=_MOST_BYTES, newest=True, timeout=_TIMEOUT_S)
            head, *parts = _split(found)
            return _decode(head), merge(map(_decode_part, parts))
        except (ServingError, msgspec.MsgspecError, ValueError) as error:
            log.info("no_snapshot", reason=repr(error)[:200])
            return None

    async def save(self, snapshot: Snapshot, parts: Sequence[bytes]) -> None:
        """
        Args:
            parts: as made by ``encode_part``.
        """
        try:
            data = _join([wire.encode(snapshot), *parts])
            await replace(self._bus, "snapshots", self._name, data, timeout=_TIMEOUT_S)
        except ServingError as error:
            log.warning("snapshot_not_saved", error=error.message)


def _join(parts: Sequence[bytes]) -> bytes:
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(_LENGTH, "little"), part))


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
