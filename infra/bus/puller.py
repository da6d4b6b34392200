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

from infra.bus.connection import Bus
from infra.bus.message import Message
from infra.bus.pull_subscription import PullSubscription
from infra.bus.pull_window import EXPIRES_S, PullWindow, Received, pull_request

log = structlog.get_logger("bus")

DRAIN_S = 5.0
WATCH_S = 1.0
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
        expires_s: float = EXPIRES_S,
    ) -> None:
        self._bus = bus
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._consumer = consumer
        self._handle = handle
        self._room = room
        self._expires_s = expires_s
        self._window = PullWindow(time.monotonic())
        self._subs: list[PullSubscription] = []  # the last one is of this generation, the others are retiring
        self._turn = asyncio.Lock()  # held while subscriptions are opened and closed
        self._tasks = bus.tasks.group(f"pull-{consumer}")
        self._over = False  # nothing is delivered any more

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
                else:
                    await self.top_up()
            except Exception as error:
                log.warning("pull_failed", consumer=self._consumer, error=repr(error))
