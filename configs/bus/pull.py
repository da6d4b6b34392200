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

from configs.bus.connection import Bus

log = structlog.get_logger("bus")

EXPIRES_S = 30.0
HEARTBEAT_S = 5.0
DRAIN_S = 5.0
ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
NAK = b"-NAK"
TERM = b"+TERM"


class Puller:
    """Keeps as many messages requested as ``room()`` says. More may arrive after a reconnect: the handler copes.

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
        self._requested = 0
        self._generation = 0
        self._inbox = ""
        self._sub: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._stopped = False
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._subscribe()
        self._bus.on_reconnect.append(self._restart)
        self._watch = asyncio.create_task(self._watchdog(), name=f"pull-{self._consumer}")
        await self.top_up()

    async def _subscribe(self) -> None:
        """A new inbox for each generation of requests: a stored message does not tell which request it answers."""
        self._inbox = self._bus.nc.new_inbox()
        generation = self._generation

        async def arrived(message: Any) -> None:
            await self._on_message(message, generation == self._generation)

        self._sub = await self._bus.nc.subscribe(self._inbox, cb=arrived)

    async def stop(self) -> None:
        """Ask for nothing more; what is already on its way is still handed over."""
        self._stopped = True
        if self._restart in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._restart)
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    async def drain(self) -> None:
        """Stop, and return when everything that was on its way has been handed over; nothing comes after it."""
        await self.stop()
        if self._sub is not None and not self._bus.nc.is_closed:
            with contextlib.suppress(NatsError, TimeoutError):
                await asyncio.wait_for(self._sub.drain(), DRAIN_S)

    async def close(self) -> None:
        """Stop, and take nothing more: what the server still sends is delivered again to someone else."""
        await self.stop()
        for task in self._retiring:
            task.cancel()
        if self._sub is not None and not self._bus.nc.is_closed:
            await self._sub.unsubscribe()

    async def top_up(self) -> None:
        """Request more if there is room for clearly more than is requested."""
        if self._stopped or not self._bus.connected:
            return
        room = self._room()
        if room > 0 and self._requested * 2 <= room:
            batch = room - self._requested
            self._requested = room
            await self._request(batch)

    async def _request(self, batch: int) -> None:
        body = (
            f'{{"batch":{batch},"expires":{int(EXPIRES_S * 1e9)},"idle_heartbeat":{int(HEARTBEAT_S * 1e9)}}}'
        ).encode()
        await self._bus.nc.publish(self._subject, body, reply=self._inbox)

    async def _on_message(self, message: Any, current: bool) -> None:
        self._heard = time.monotonic()
        headers = message.headers
        if headers is not None and not message.reply:
            status = headers.get("Status", "")
            if status == "100":
                return
            if current and status in ("404", "408"):
                self._requested = max(0, self._requested - int(headers.get("Nats-Pending-Messages", "0") or 0))
                await self.top_up()
            elif current:  # consumer deleted, no leader, nobody there: the watchdog asks again; at once would spin
                log.info("pull_ended", consumer=self._consumer, status=status, text=headers.get("Description"))
                self._requested = 0
            return
        generation = self._generation
        try:
            await self._handle(message)
        finally:
            # Only now: while it is being taken in, the handler's room may not count it yet.
            if current and generation == self._generation and self._requested:
                self._requested -= 1
        await self.top_up()

    async def _restart(self) -> None:
        self._generation += 1
        self._requested = 0
        old = self._sub
        await self._subscribe()
        self._heard = time.monotonic()
        await self.top_up()
        self._retire(old)

    def _retire(self, sub: Any) -> None:
        """Drop a subscription, but not the messages that it still holds, nor the one being handled."""

        async def drain() -> None:
            with contextlib.suppress(NatsError):
                await sub.drain()

        task = asyncio.create_task(drain(), name=f"retire-{self._consumer}")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _watchdog(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            silent = time.monotonic() - self._heard
            try:
                if self._bus.connected and self._requested and silent > 2.5 * HEARTBEAT_S:
                    log.warning("pull_silent", consumer=self._consumer, seconds=round(silent, 1))
                    await self._restart()
                else:
                    await self.top_up()
            except Exception as error:
                log.warning("pull_failed", consumer=self._consumer, error=repr(error))
