"""While routers share requests, they also share the reading of WORK and DONE: each message goes to one of them.

It tells the others what it read: at once, or if it has just told something, together with what it reads in the
``TELL_S`` after that. So a further router costs the others little for each request, where it would otherwise have to
read all that they place. What nobody told of is read from the streams: after a router was lost at once (``group``),
otherwise after a second (``LogTail.read_gap``).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec
import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry
from infra.bus.log_tail import LogTail
from infra.bus.message import Message
from infra.bus.tasks import Tasks
from router.sent import read_sent
from schemas import readings, wire
from schemas.readings import Ended, Other, Placed, Readings
from schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, HEADER_NO_STORE, token

log = structlog.get_logger("router")

TELL_S = 0.005  # the later others know of a decision, the worse are theirs
GAPS_S = 0.25  # between two looks for gaps, and two tries to join a group
MOST = 2_000  # in a message, of each kind
_HEADERS = (HEADER_MSG_ID, HEADER_LOAD, HEADER_NO_STORE)


class DividedReading:
    """
    Args:
        router: id of this router.
        placed: called with what another router read of WORK.
        ended: called with the requests whose end another router read.
    """

    def __init__(
        self,
        bus: Bus,
        router: str,
        *,
        placed: Callable[[list[Placed]], None],
        ended: Callable[[list[str]], None],
    ) -> None:
        self._bus = bus
        self._subject = bus.subjects.readings(token(router))
        self._on_placed = placed
        self._on_ended = ended
        self._tails: tuple[LogTail, ...] = ()
        self._wanted = ""
        self._changed = asyncio.Event()
        self._group = ""
        self._told_at = float("-inf")  # monotonic
        self._telling: asyncio.TimerHandle | None = None
        self._placed: list[Placed] = []
        self._ended: list[Ended] = []
        self._others: tuple[list[Other], list[Other]] = ([], [])

    async def start(self, tasks: Tasks, work: LogTail, done: LogTail) -> None:
        """Divide nothing yet; both tails have started."""
        self._tails = work, done
        await self._bus.nc.subscribe_direct(self._bus.subjects.readings("*"), self._on_told)
        tasks.spawn(self._run(), name="divided-reading")

    def group(self, name: str) -> None:
        """Read as one of a group of routers, soon; "": read everything."""
        self._wanted = name
        self._changed.set()

    def read_work(self, entry: Entry) -> None:
        """Tell the others of a message of WORK."""
        headers = entry.headers
        try:
            sent = None if HEADER_NO_STORE in headers else read_sent(entry)
        except ValueError:
            sent = None
        if sent is None or sent.load.route or sent.is_copy or sent.handed:
            self._others[0].append(_other(entry))
        else:
            self._placed.append(Placed(entry.seq, sent.request, sent.attempt, sent.role, sent.worker, *sent.load[:6]))
        self._tell_soon()

    def read_done(self, entry: Entry) -> None:
        """Tell the others of a message of DONE."""
        if HEADER_NO_STORE in entry.headers:
            self._others[1].append(_other(entry))
        else:
            self._ended.append(Ended(entry.seq, entry.headers.get(HEADER_MSG_ID, "")))
        self._tell_soon()

    def _tell_soon(self) -> None:
        """Together with what was read by the same wake-up."""
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(max(loop.time(), self._told_at + TELL_S), self.tell)

    def tell(self) -> None:
        """Send what was read since the last time. What is lost on the way, the others read themselves."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling, self._told_at = None, asyncio.get_running_loop().time()
        while self._placed or self._ended or any(self._others):
            work, done = self._others
            message = Readings(
                tuple(self._placed[:MOST]), tuple(self._ended[:MOST]), tuple(work[:MOST]), tuple(done[:MOST])
            )
            for told in (self._placed, self._ended, work, done):
                del told[:MOST]
            self._bus.nc.post(self._subject, wire.encode(message))

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            if self._wanted != self._group:
                await self._regroup()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GAPS_S if self._group or self._wanted else None):
                    await self._changed.wait()
            now = time.monotonic()
            for tail in self._tails:
                tail.read_gap(now)

    async def _regroup(self) -> None:
        wanted = self._wanted
        try:
            for tail in self._tails:
                await tail.divide(wanted)
        except (NatsError, OSError) as error:  # the connection has just failed
            log.warning("reading_not_divided", error=repr(error))
            return  # the next look for gaps tries again
        self._group = wanted
        log.info("reading_divided", group=wanted)

    def _on_told(self, message: Message) -> None:
        if message.subject == self._subject:
            return
        try:
            told = readings.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("readings_unreadable", subject=message.subject, error=str(error))
            return
        work, done = self._tails
        if placed := [each for each in told.placed if work.accept(each.seq)]:
            self._on_placed(placed)
        if ended := [each.request for each in told.ended if done.accept(each.seq)]:
            self._on_ended(ended)
        for tail, others in zip(self._tails, (told.work, told.done), strict=True):
            for other in others:
                tail.told(Entry(other.subject, other.seq, b"", other.headers, stored_ns=time.time_ns()))


def _other(entry: Entry) -> Other:
    headers = {name: entry.headers[name] for name in _HEADERS if name in entry.headers}
    return Other(entry.seq, entry.subject, headers)
