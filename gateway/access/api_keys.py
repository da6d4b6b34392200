"""The keys as this gateway knows them: the ``keys`` bucket as a live table, and whether it is current.

A change arrives within milliseconds, over the republished subject. Once a second the gateway also compares its place
with the end of the bucket: a table that was not confirmed for ``STALE_S`` admits nobody, because a key may have been
revoked meanwhile.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.errors import ServingError
from penstock.schemas.keys import ApiKey, decode
from penstock.schemas.tenants import check_name

log = structlog.get_logger("gateway")

CONFIRM_S = 1.0
STALE_S = 5.0


class KeyTable:
    """``keys`` by id.

    Args:
        changed: called with the id of a key that was added, changed or removed.
        confirmed: called whenever the table was found to be as the bucket is.
    """

    def __init__(
        self,
        bus: Bus,
        changed: Callable[[str], None],
        confirmed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bucket = bus.subjects.bucket("keys")
        self._stream, self._subject = f"KV_{bucket}", f"$KV.{bucket}.>"
        self.tail = LogTail.of_bucket(bus, "keys", self._on_entry, self._forget)
        self._bus = bus
        self._changed = changed
        self._on_confirmed = confirmed
        self._clock = clock
        self._read = False  # everything was read that was there at the start
        self._confirmed = 0.0  # when the comparison began that found this table current
        self.keys: dict[str, ApiKey] = {}
        self.unreadable: set[str] = set()  # entries that are no key, by id

    async def start(self, tasks: Tasks) -> None:
        """
        Raises:
            ServingError: the bucket cannot be read.
        """
        began = self._clock()
        await self.tail.start()
        self._read, self._confirmed = True, began
        log.info("keys_read", keys=len(self.keys))
        tasks.spawn(self.confirm(), name="confirm-keys")

    async def stop(self) -> None:
        await self.tail.stop()

    @property
    def current(self) -> bool:
        """Whether everything is known that was changed more than ``STALE_S`` ago."""
        return self._clock() - self._confirmed < STALE_S

    async def confirm(self) -> None:
        while True:
            await asyncio.sleep(CONFIRM_S)
            began = self._clock()
            try:
                async with asyncio.timeout(STALE_S):
                    end = await get_last(self._bus, self._stream, self._subject, newest=True, within_s=STALE_S)
                    # It ends elsewhere: something was missed, or a broker that lost its disk has another bucket.
                    if (end.seq if end is not None else 0) != self.tail.position:
                        await self.tail.catch_up()
            except (ServingError, TimeoutError) as error:
                log.debug("keys_not_confirmed", error=repr(error))
                continue
            if end is None or end.seq <= self.tail.position:
                self._confirmed = began
                self._on_confirmed()

    def _forget(self) -> None:
        """The bucket was made anew: a key that it does not have is valid no longer."""
        names = [*self.keys, *self.unreadable]
        self.keys.clear()
        self.unreadable.clear()
        for name in names:
            self._changed(name)

    def _on_entry(self, entry: Entry) -> None:
        name = entry.subject.rpartition(".")[2]
        self.unreadable.discard(name)
        if not entry.data:
            self.keys.pop(name, None)
            self._changed(name)
            return
        try:
            key = decode(entry.data)
            check_name(key.tenant)
            if key.id != name:
                raise ValueError("it has the id of another key")
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("key_unreadable", key=name, error=str(error))
            self.unreadable.add(name)
            self.keys.pop(name, None)  # rather refused than admitted by what it said before
        else:
            before, self.keys[name] = self.keys.get(name), key
            if self._read:
                event = "key_added" if before is None else "key_changed"
                log.info("key_revoked" if key.revoked_ns else event, key=key.prefix, tenant=key.tenant, by=key.made_by)
        self._changed(name)
