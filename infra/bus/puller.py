"""Takes messages from a durable pull consumer, as many as there is room for, over one long-lived request.

FastStream's own subscriber takes batches behind a barrier, hangs the event loop when the connection is closed, and
idles for seconds after the broker restarts. Here the caller reports its room, requests are renewed before they expire
and at once after a reconnect, and a lost request is noticed by its missing heartbeat. ``PullWindow`` decides (pure:
time is an argument), ``Puller`` sends, and ``PullSubscription`` is the inbox of one generation of requests, which needs
nats-py's private parts.

Requests are counted in generations. After a reconnect, or when the server has been silent for too long, the requests
made before no longer count. A message of an earlier generation is taken nevertheless, but not counted in this one.

A shared consumer that was deleted on the broker is made again: without it, its stream would never be read.
"""

import asyncio
import contextlib
import enum
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.client import Frame, read_headers
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Lifetime, before_time, lifetime
from penstock.infra.bus.jetstream import ApiError, Message
from penstock.infra.bus.tasks import end
from penstock.schemas.errors import ServingError
from penstock.schemas.streams import ConsumerSpec

FLUSH_S = 2  # a round trip to the server


class PullSubscription:
    """The messages of one generation of requests, in order: ``next``, and ``handled`` once that was.

    No more can wait here than were requested. nats-py's own subscription wakes one task more for each of them.

    Args:
        deliver: takes them, in a task that ends with ``close``.
    """

    def __init__(
        self, bus: Bus, generation: int, deliver: Callable[["PullSubscription"], Coroutine[Any, Any, None]]
    ) -> None:
        self.inbox: str = bus.nc.new_inbox()
        self.generation = generation
        self._bus = bus
        self._deliver = deliver
        self._arrived: asyncio.Queue[Frame] = asyncio.Queue()
        self._sub: Any = None
        self._delivering: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._sub = await self._bus.nc.subscribe_direct(self.inbox, self._arrived.put_nowait)
        self._delivering = asyncio.create_task(self._deliver(self), name="deliver-pulled")

    async def next(self) -> Message:
        frame, nc = await self._arrived.get(), self._bus.nc
        headers = read_headers(frame.headers) if frame.headers else None
        if headers is None and frame.headers:  # a status
            headers = await nc._process_headers(frame.headers)
        message: Message = nc._build_message(frame.sid, frame.subject, frame.reply, frame.data, headers)
        return message

    def handled(self) -> None:
        self._arrived.task_done()

    async def drain(self) -> None:
        """Return when no message is in flight any more and all received ones have been delivered."""
        nc = self._bus.nc
        if self._bus.connected:
            with contextlib.suppress(NatsError, OSError):  # messages in flight on a broken connection are lost
                await nc._send_unsubscribe(self._sub._id)
                await nc.flush(timeout=FLUSH_S)  # the server's answer is after its last message
        await self._arrived.join()

    async def close(self) -> None:
        """Deliver nothing more; messages that are still here are delivered again later."""
        with contextlib.suppress(NatsError, OSError):
            await self._sub.unsubscribe()
        await end([self._delivering])  # it may be inside the handler


EXPIRES_S = 30.0  # a request that is not filled by then ends
HEARTBEAT_S = 5.0
SILENT_S = 2.5 * HEARTBEAT_S  # the server sends heartbeats for an open request


class Received(enum.Enum):
    """What a message on the inbox of a pull request is."""

    job = enum.auto()
    heartbeat = enum.auto()
    ended = enum.auto()  # a request has ended; ask again at once
    refused = enum.auto()  # a request was refused (consumer deleted, no leader); ask again later, or asking would spin
    stale = enum.auto()  # about a request of an earlier generation


class PullWindow:
    """How much is requested, and when to request more.

    Guarantees: never more is requested than there is room for; while there is room, a request is open, was refused
    (then the caller's clock tries again), or is missed after ``SILENT_S``.

    Attributes:
        generation: of the current requests.
        requested: messages that they may still bring.
        closed: nothing more is requested.
    """

    def __init__(self, now: float) -> None:
        self.generation = 0
        self.requested = 0
        self.closed = False
        self._last_received = now

    def next_batch(self, room: int) -> int:
        """How many messages to request now, given room for ``room`` more; 0: none.

        Only if there is room for clearly more than is requested, so that few requests are made.
        """
        if self.closed or room <= 0 or self.is_filled(room):
            return 0
        batch, self.requested = room - self.requested, room
        return batch

    def is_filled(self, room: int) -> bool:
        """Whether enough is requested for so much room."""
        return self.requested * 2 > room

    def receive(self, message: Message, generation: int, now: float) -> Received:
        """Classify a message of a generation's inbox, and count the end of its request.

        A job counts as requested until ``taken``: before that, the caller's room may not count it yet.
        """
        self._last_received = now
        headers = message.headers
        if headers is None or message.reply:
            return Received.job
        status = headers.get("Status", "")
        if status == "100":
            return Received.heartbeat
        if generation != self.generation:
            return Received.stale
        if status in ("404", "408"):  # no messages; expired
            self.requested = max(0, self.requested - int(headers.get("Nats-Pending-Messages", "0") or 0))
            return Received.ended
        self.requested = 0
        return Received.refused

    def taken(self, generation: int) -> None:
        """A job was taken, and the caller's room counts it."""
        if generation == self.generation and self.requested:
            self.requested -= 1

    def silent(self, now: float) -> float:
        """Seconds since an open request should have sent a heartbeat; 0: nothing is missing."""
        silent = now - self._last_received
        return silent if self.requested and silent > SILENT_S else 0.0

    def restart(self, now: float) -> None:
        """Begin a generation: no earlier request counts any more."""
        self.generation += 1
        self.requested = 0
        self._last_received = now

    def close(self) -> None:
        self.closed = True


def pull_request(batch: int, expires_s: float = EXPIRES_S) -> bytes:
    """The body of a request for ``batch`` messages; heartbeats only if it lasts long enough to miss one."""
    expires, heartbeat = int(expires_s * 1e9), int(HEARTBEAT_S * 1e9)
    beats = b',"idle_heartbeat":%d' % heartbeat if expires_s > 2 * HEARTBEAT_S else b""
    return b'{"batch":%d,"expires":%d%b}' % (batch, expires, beats)


log = structlog.get_logger("bus")

DRAIN_S = 5.0
WATCH_S = 1.0
WARN_S = 10.0
ACTION = "run 'penstock streams apply'; jobs on its stream wait until then"
ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
NAK = b"-NAK"
TERM = b"+TERM"


class Puller:
    """Keeps as many messages requested as ``room()`` returns.

    Guarantees: the handler gets the messages of one generation of requests in order, one at a time. Without a
    reconnect no more come than there was room for; after one, messages that were already on their way come on top, and
    the handler copes. Nothing is delivered after ``drain`` or ``close``.

    Each generation has a subscription of its own, since a stored message does not name the request that it answers. The
    one before ends when its messages have been delivered.

    Call ``start``, and later ``drain`` or ``close``.

    Args:
        handle: called with each message; must not raise.
        remake: creates the consumer again after it was deleted, from after the message on whose acknowledgement
            subject it is called ("": nothing was received); False: it is there. Raises OSError if it cannot.
        room: how many more messages could be started now.
        expires_s: a request that is not filled by then is repeated. To a process that was stopped, messages are sent
            for this long.
        most: that ``room`` returns; it is not called while so much is requested that no answer would change that.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        handle: Callable[[Message], Awaitable[None]],
        room: Callable[[], int],
        *,
        remake: Callable[[str], Awaitable[bool]] | None = None,
        expires_s: float = EXPIRES_S,
        most: int = sys.maxsize,
    ) -> None:
        self._bus = bus
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._consumer = consumer
        self._handle = handle
        self._room = room
        self._remake = remake
        self._expires_s = expires_s
        self._most = most
        self._window = PullWindow(time.monotonic())
        self._subs: list[PullSubscription] = []  # the last one is of this generation, the others are retiring
        self._turn = asyncio.Lock()  # held while subscriptions are opened and closed
        self._tasks = bus.tasks.group(f"pull-{consumer}")
        self._over = False  # nothing is delivered any more
        self._refused = False  # since the last look of the watchdog
        self._last_reply = ""  # of the last message
        self._gone_since = 0.0  # monotonic; the consumer is missing, 0: it is not
        self._warned = 0.0

    async def start(self) -> None:
        await self._subscribe()
        self._bus.on_reconnect.append(self._restart)
        self._tasks.spawn(self._watchdog(), name=f"pull-{self._consumer}")
        await self.top_up()

    async def stop(self) -> None:
        """Request nothing more. Messages on their way are still delivered."""
        self._window.close()
        if self._restart in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._restart)

    async def drain(self) -> None:
        """Stop pulling, handle the messages that are on their way, and close.

        Messages that take longer than ``DRAIN_S``, because a handler or the broker hangs, are delivered again later.
        """
        await self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S), self._turn:  # after a restart that is under way: it is the last
                await asyncio.gather(*(sub.drain() for sub in self._subs))
        await self._end()

    async def close(self) -> None:
        """Stop, and deliver nothing more: what the server still sends is delivered again to someone else."""
        await self.stop()
        await self._end()

    async def top_up(self) -> None:
        """Request more if there is room for clearly more than is requested. Call it when room was freed.

        Before ``start`` has subscribed, nothing happens: ``start`` asks itself.
        """
        if self._window.is_filled(self._most) or not self._subs or self._window.closed or not self._bus.connected:
            return
        batch = self._window.next_batch(self._room())
        if batch:
            await self._bus.nc.publish(self._subject, pull_request(batch, self._expires_s), reply=self._subs[-1].inbox)

    async def _deliver(self, sub: PullSubscription) -> None:
        while True:
            message = await sub.next()
            try:
                if self._over:
                    continue
                match self._window.receive(message, sub.generation, time.monotonic()):
                    case Received.job:
                        self._last_reply = message.reply
                        try:
                            await self._handle(message)
                        finally:
                            self._window.taken(sub.generation)
                        await self.top_up()
                    case Received.ended:
                        await self.top_up()
                    case Received.refused:  # the watchdog asks again
                        headers = message.headers or {}
                        status, text = headers.get("Status"), headers.get("Description")
                        log.info("pull_refused", consumer=self._consumer, status=status, text=text)
                        self._refused = True
                    case Received.heartbeat | Received.stale:
                        pass
            except Exception as error:
                await self._bus.nc._error_cb(error)
            finally:
                sub.handled()

    async def _subscribe(self) -> None:
        sub = PullSubscription(self._bus, self._window.generation, self._deliver)
        self._subs.append(sub)  # at once: a request that is made meanwhile is one of this generation
        try:
            await sub.open()
        except BaseException:
            self._subs.remove(sub)
            raise

    async def _restart(self) -> None:
        async with self._turn:
            if self._window.closed:
                return
            self._window.restart(time.monotonic())
            old = self._subs[-1:]
            await self._subscribe()
            await self.top_up()
        for sub in old:
            self._tasks.spawn(self._retire(sub), name=f"retire-{self._consumer}", on_failure=self._retire_failed)

    async def _retire(self, sub: PullSubscription) -> None:
        """Close a subscription once its messages have been delivered."""
        await sub.drain()
        async with self._turn:
            if sub in self._subs:
                self._subs.remove(sub)
                await sub.close()

    def _retire_failed(self, error: BaseException) -> None:  # it is closed with the puller
        log.warning("pull_not_retired", consumer=self._consumer, error=repr(error))

    async def _end(self) -> None:
        self._over = True
        await self._tasks.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S), self._turn:
                while self._subs:
                    await self._subs.pop().close()

    async def _watchdog(self) -> None:
        while not self._window.closed:
            await asyncio.sleep(WATCH_S)
            try:
                silent = self._window.silent(time.monotonic())
                if self._bus.connected and silent:
                    log.warning("pull_silent", consumer=self._consumer, seconds=round(silent, 1))
                    await self._restart()
                elif self._refused and self._remake is not None and self._bus.connected:
                    await self._make_again(self._remake)
                else:
                    self._gone_since = 0.0
                    await self.top_up()
            except Exception as error:
                log.warning("pull_failed", consumer=self._consumer, error=repr(error))

    async def _make_again(self, remake: Callable[[str], Awaitable[bool]]) -> None:
        """Create the consumer again. A server that refuses a pull lacks it, or it has no leader at the moment."""
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        try:
            made = await remake(self._last_reply)
        except OSError as error:
            if now - self._warned >= WARN_S:
                self._warned = now
                log.warning("consumer_missing", consumer=self._consumer, error=str(error), action=ACTION)
            return
        if made:
            log.warning("consumer_made_again", consumer=self._consumer, why="it was deleted on the broker")
        self._refused, self._gone_since = False, 0.0
        await self._restart()

    def missing_s(self, now: float) -> float:
        """How long its consumer has been missing, and could not be made again; 0: it is there."""
        return now - self._gone_since if self._gone_since else 0.0


def sequence(reply: str) -> int:
    """The stream sequence of a message, from its acknowledgement subject (with domain and account, or without)."""
    tokens = reply.split(".")
    return int(tokens[5 if len(tokens) < 11 else 7])


def stored_ns(reply: str) -> int:
    """When the broker stored a message, Unix time, from its acknowledgement subject."""
    tokens = reply.split(".")
    return int(tokens[7 if len(tokens) < 11 else 9])


def is_of(reply: str, stream: Lifetime) -> bool:
    """Whether the message with this acknowledgement subject is one of ``stream``, and not of a lost one."""
    return stream.has(sequence(reply), stored_ns(reply))


async def present(bus: Bus, stream: str) -> Lifetime:
    """As ``lifetime``.

    Raises:
        OSError: there is no such stream, the broker did not answer, or this process may not ask.
    """
    try:
        return await lifetime(bus, stream)
    except ServingError as error:
        raise OSError(error.message) from None


EXISTS = 10148  # it is there, configured otherwise
TIMEOUT_S = 2.0
_NS = 1_000_000_000


class _Delivered(msgspec.Struct, frozen=True):
    consumer_seq: int = 0


class _Reply(msgspec.Struct):
    error: ApiError | None = None
    delivered: _Delivered = _Delivered()


_decode = msgspec.json.Decoder(_Reply).decode


def config_of(spec: ConsumerSpec) -> dict[str, Any]:
    """As the JetStream API takes it."""
    subjects = spec.filter_subjects
    return {
        "durable_name": spec.name,
        "name": spec.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(spec.ack_wait_s * _NS),
        "max_deliver": -1,
        "max_ack_pending": spec.max_ack_pending,
        "max_waiting": 512,
        # The server wants one subject and several in different fields.
        **({"filter_subject": subjects[0]} if len(subjects) == 1 else {"filter_subjects": list(subjects)}),
        "replay_policy": "instant",
    }


async def make_again(
    bus: Bus, stream: str, config: dict[str, Any], *, start_seq: int = 0, since_s: float = 0.0, filtered: bool = False
) -> bool:
    """Create a consumer, unless it is there; False: it is.

    Args:
        config: as the JetStream API takes it.
        start_seq: of the first message that it is to deliver; 0: not given. It must be one of the stream as it is now
            (``present``): the broker would deliver nothing before it, although the stream has not got that far.
        since_s: deliver what was stored in the last seconds; 0: everything.
        filtered: ask with its filter in the subject, as the permissions of workers want it.
    Raises:
        OSError: the broker refused it, or did not answer.
    """
    config = dict(config)
    if start_seq:
        config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": start_seq}
    elif since_s:
        try:
            before = await before_time(bus, stream, bus.clock.now_ns() - int(since_s * 1e9))
        except ServingError as error:
            raise OSError(error.message) from None
        config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": before + 1}
    body = json.dumps({"stream_name": stream, "config": config, "action": "create"}).encode()
    subject = f"$JS.API.CONSUMER.CREATE.{stream}.{config['name']}"
    if filtered:
        subject += f".{config['filter_subject']}"
    try:
        reply = _decode((await bus.nc.request(subject, body, timeout=TIMEOUT_S)).data)
    except (NatsError, TimeoutError, msgspec.MsgspecError) as problem:
        raise OSError(f"the broker does not answer ({problem!r}); may this process create it?") from problem
    if reply.error is not None:
        if reply.error.err_code == EXISTS:
            return False
        raise OSError(str(reply.error))
    return not reply.delivered.consumer_seq
