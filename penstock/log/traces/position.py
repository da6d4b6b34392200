"""Where an export of traces begins, and where it stopped: a position in the log, kept in a bucket."""

import time

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.schemas import wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import token

log = structlog.get_logger("trace")

KEPT_S = 5.0  # to load or save the position
BEFORE_NS = 600_000_000_000  # how long before its end a request may have begun; the stages of older ones are unknown

_FAILED = (NatsError, JetStreamError, TimeoutError)


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an export stopped: it has sent all ends up to ``done_seq``; unfinished requests begin at ``since_ns``."""

    done_seq: int
    since_ns: int


async def begin(bus: Bus, kept: Position | None) -> Position:
    """Where to begin: where an earlier export stopped, or at the present end.

    Raises:
        ServingError: there is no such stream.
    """
    last = await last_seq(bus)
    if kept is not None and kept.done_seq <= last:
        return kept
    return Position(last, time.time_ns() - BEFORE_NS)


async def last_seq(bus: Bus) -> int:
    """The sequence of the newest terminal event.

    Raises:
        ServingError: there is no such stream.
    """
    stream = bus.subjects.stream("DONE")
    try:
        return int((await bus.js.stream_info(stream)).state.last_seq)
    except _FAILED as error:
        raise ServingError(
            Code.broker_unavailable, f"stream {stream} does not answer ({error!r}); run 'penstock streams apply'"
        ) from error


class PositionStore:
    """The position of the exporter of one name, in a bucket. Losing it loses traces of the time in between."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._stream = f"KV_{bus.subjects.bucket('exporters')}"
        key = token(f"trace-{name or 'trace'}")
        self._subject = f"$KV.{bus.subjects.bucket('exporters')}.{key}"

    async def load(self) -> Position | None:
        try:
            entry = await get_last(self._bus, self._stream, self._subject, newest=True, within_s=KEPT_S)
            return _decode(entry.data) if entry is not None else None
        except (ServingError, msgspec.MsgspecError) as error:
            log.info("no_position", reason=repr(error)[:200])
            return None

    async def save(self, position: Position) -> None:
        try:
            await self._bus.js.publish(self._subject, wire.encode(position), timeout=KEPT_S, stream=self._stream)
        except _FAILED as error:
            log.warning("position_not_saved", error=repr(error)[:200])


_decode = wire.decoder(Position)
