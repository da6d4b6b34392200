"""Takes messages from a durable pull consumer, as many as there is room for, over one long-lived request.

Not a FastStream subscriber: that takes batches behind a barrier, spins when the connection closes, and idles for
seconds after the broker restarts. Here the caller reports its room, requests are renewed before they expire and at
once after a reconnect, and a lost request is noticed by its missing heartbeat. ``pull_window`` decides, this sends.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.message import Message
from penstock.infra.bus.pull_subscription import PullSubscription
from penstock.infra.bus.pull_window import EXPIRES_S, PullWindow, Received, pull_request

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
        remake: creates the consumer again after it was deleted, from behind the stream's sequence that it is given
            (0: nothing was received) on; False: it is there. Raises OSError if it cannot.
        room: how many more messages could be started now.
        expires_s: a request that is not filled by then is repeated. To a process that was stopped, messages are sent
            for this long.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        handle: Callable[[Message], Awaitable[None]],
        room: Callable[[], int],
        *,
        remake: Callable[[int], Awaitable[bool]] | None = None,
        expires_s: float = EXPIRES_S,
    ) -> None:
        self._bus = bus
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._consumer = consumer
        self._handle = handle
        self._room = room
        self._remake = remake
        self._expires_s = expires_s
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
            async with asyncio.timeout(DRAIN_S), self._turn:  # behind a restart that is under way: it is the last
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
        if not self._subs or self._window.closed or not self._bus.connected:
            return
        batch = self._window.next_batch(self._room())
        if batch:
            await self._bus.nc.publish(self._subject, pull_request(batch, self._expires_s), reply=self._subs[-1].inbox)

    async def _on_message(self, message: Message, generation: int) -> None:
        if self._over:
            return
        match self._window.receive(message, generation, time.monotonic()):
            case Received.job:
                self._last_reply = message.reply
                try:
                    await self._handle(message)
                finally:
                    self._window.taken(generation)
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

    async def _subscribe(self) -> None:
        sub = PullSubscription(self._bus, self._window.generation, self._on_message)
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

    async def _make_again(self, remake: Callable[[int], Awaitable[bool]]) -> None:
        """Have the consumer there again: whoever refused a pull has none, or no leader at the moment."""
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        try:
            made = await remake(sequence(self._last_reply) if self._last_reply else 0)
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
