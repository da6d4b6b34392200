"""Taking messages from a durable pull consumer as fast as there is room, over one long-lived request.

Not a FastStream subscriber: that takes batches behind a barrier, spins when the connection closes, and idles for
seconds after the broker restarts. Here the caller says how much room there is, requests are renewed before they
run out and at once after a reconnect, and a lost request shows by its missing heartbeat.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.pull_window import HEARTBEAT_S, Window
from infra.bus.tasks import end

log = structlog.get_logger("bus")

EXPIRES_S = 30.0
DRAIN_S = 5.0
FLUSH_S = 2  # a round trip to the server
ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
NAK = b"-NAK"
TERM = b"+TERM"


class Puller:
    """Keeps as many messages requested as ``room()`` says. More may arrive after a reconnect: the handler copes.

    Each generation of requests has a subscription of its own: a stored message does not tell which request it answers.
    The one before it ends when what it holds has been handed over.

    Args:
        handle: called with each message, in order; must not raise.
        room: how many more messages could be started now.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        handle: Callable[[Any], Awaitable[None]],
        room: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._consumer = consumer
        self._handle = handle
        self._room = room
        self._window = Window(time.monotonic())
        self._inbox = ""
        self._subs: list[Any] = []  # the last one is of this generation, the others are retiring
        self._turn = asyncio.Lock()  # of making and ending subscriptions
        self._tasks = bus.tasks.group(f"pull-{consumer}")
        self._over = False  # nothing is handed over any more

    async def start(self) -> None:
        await self._subscribe()
        self._bus.on_reconnect.append(self._restart)
        self._tasks.spawn(self._watchdog(), name=f"pull-{self._consumer}")
        await self.top_up()

    async def _subscribe(self) -> None:
        self._inbox = self._bus.nc.new_inbox()
        generation = self._window.generation

        async def arrived(message: Any) -> None:
            await self._on_message(message, generation)

        self._subs.append(await self._bus.nc.subscribe(self._inbox, cb=arrived))

    async def stop(self) -> None:
        """Ask for nothing more; what is already on its way is still handed over."""
        self._window.close()
        if self._restart in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._restart)

    async def drain(self) -> None:
        """Stop, and return when everything that was on its way has been handed over; nothing is handed over after it.

        What takes longer than ``DRAIN_S``, because a handler or the broker does not go on, is delivered again later.
        """
        await self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S), self._turn:  # behind a restart that is under way: it is the last
                await asyncio.gather(*(self._empty(sub) for sub in self._subs))
        await self._end()

    async def close(self) -> None:
        """Stop, and take nothing more: what the server still sends is delivered again to someone else."""
        await self.stop()
        await self._end()

    async def _end(self) -> None:
        self._over = True
        await self._tasks.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S), self._turn:
                while self._subs:
                    await self._drop(self._subs.pop())

    async def _empty(self, sub: Any) -> None:
        """Until nothing of a subscription is on its way, and what came has been handed over."""
        nc = self._bus.nc
        if self._bus.connected:
            with contextlib.suppress(NatsError, OSError):  # what was on its way on a broken link never comes
                await nc._send_unsubscribe(sub._id)
                # The server's answer is behind its last message. The first PING may overtake what is buffered here.
                await nc.flush(timeout=FLUSH_S)
                await nc.flush(timeout=FLUSH_S)
        await sub._pending_queue.join()

    async def _drop(self, sub: Any) -> None:
        with contextlib.suppress(NatsError, OSError):
            await sub.unsubscribe()
        await end([sub._wait_for_msgs_task])  # it may be within the handler

    async def top_up(self) -> None:
        """Request more if there is room for clearly more than is requested."""
        if self._window.closed or not self._bus.connected:
            return
        batch = self._window.ask(self._room())
        if batch:
            body = (
                f'{{"batch":{batch},"expires":{int(EXPIRES_S * 1e9)},"idle_heartbeat":{int(HEARTBEAT_S * 1e9)}}}'
            ).encode()
            await self._bus.nc.publish(self._subject, body, reply=self._inbox)

    async def _on_message(self, message: Any, generation: int) -> None:
        if self._over:
            return
        self._window.heard(time.monotonic())
        headers = message.headers
        if headers is not None and not message.reply:
            status = headers.get("Status", "")
            if status == "100":
                return
            pending = int(headers.get("Nats-Pending-Messages", "0") or 0)
            if self._window.ended(generation, status, pending):
                await self.top_up()
            elif generation == self._window.generation:  # the watchdog asks again
                log.info("pull_ended", consumer=self._consumer, status=status, text=headers.get("Description"))
            return
        try:
            await self._handle(message)
        finally:
            # Only now: while it is being taken in, the handler's room may not count it yet.
            self._window.took(generation)
        await self.top_up()

    async def _restart(self) -> None:
        async with self._turn:
            if self._window.closed:
                return
            self._window.restart(time.monotonic())
            old = self._subs[-1:]
            await self._subscribe()
            await self.top_up()
        for sub in old:
            self._tasks.spawn(self._retire(sub), name=f"retire-{self._consumer}", on_failure=self._not_retired)

    async def _retire(self, sub: Any) -> None:
        """Drop a subscription, but not the messages that it still holds, nor the one being handled."""
        await self._empty(sub)
        async with self._turn:
            if sub in self._subs:
                self._subs.remove(sub)
                await self._drop(sub)

    def _not_retired(self, error: BaseException) -> None:  # it goes with the puller
        log.warning("pull_not_retired", consumer=self._consumer, error=repr(error))

    async def _watchdog(self) -> None:
        while not self._window.closed:
            await asyncio.sleep(1.0)
            try:
                silent = self._window.silent(time.monotonic())
                if self._bus.connected and silent:
                    log.warning("pull_silent", consumer=self._consumer, seconds=round(silent, 1))
                    await self._restart()
                else:
                    await self.top_up()
            except Exception as error:
                log.warning("pull_failed", consumer=self._consumer, error=repr(error))
