"""Finds requests that repeat one that crashed every worker: the first repeat runs alone, later ones are refused.

A request that differs a little is not a repeat. So verdicts are counted by tenant, too: the requests of a tenant with
several within an hour are watched, which spares a worker each; from one with many, nothing more is accepted.
"""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last
from penstock.infra.bus.jetstream import compare_and_set
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.verdicts import HOLDS_S, SECRET, Announced, Verdict, decode, decode_announced, key_of
from penstock.schemas.wire import encode

log = structlog.get_logger("gateway")

MOST = 100_000  # verdicts; the oldest are forgotten
WITHIN_S = 2.0
AGAIN_S = 30.0  # without the bucket: an operator may make it at any time
WATCHED_FROM = 3  # verdicts of a tenant within an hour: from here on, a further one takes two workers instead of three
REFUSED_FROM = 10  # from here on its new requests are refused. Never of the default tenant, which clients share


class Verdicts:
    """The verdicts of the last hour, of all gateways. Without the bucket there are none.

    Attributes:
        table: each verdict by key, with its revision in the bucket; 0: it is in memory only.
        of_tenant: the keys of a tenant's verdicts, and when each was found.
        storing: what is being stored or withdrawn.
    """

    def __init__(self, bus: Bus) -> None:
        bucket = bus.subjects.bucket("verdicts")
        self._stream, self._prefix = f"KV_{bucket}", f"$KV.{bucket}."
        self._tail = LogTail.of_bucket(bus, "verdicts", self._on_entry)
        self._bus = bus
        self.table: dict[str, tuple[Verdict, int]] = {}
        self.of_tenant: dict[str, dict[str, int]] = {}
        self._secret: bytes | None = None
        self._announced: Any = None
        self._tasks: Tasks | None = None  # None: there is no bucket
        self.storing: set[asyncio.Task[None]] = set()

    async def open(self, tasks: Tasks) -> None:
        if error := await self._follow(tasks):
            log.warning("no_verdicts", error=error, fix="penstock streams apply")
            tasks.spawn(self._follow_later(tasks), name="verdicts")

    async def _follow(self, tasks: Tasks) -> str:
        """Why the bucket cannot be followed; "": it is."""
        try:
            await self._tail.start()
        except ServingError as error:
            return error.message
        self._tasks = tasks
        self._announced = await self._bus.nc.subscribe(self._bus.subjects.verdict, cb=self._on_announced)
        return ""

    async def _follow_later(self, tasks: Tasks) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            if not await self._follow(tasks):
                log.info("verdicts_followed")
                return

    async def close(self) -> None:
        if self._announced is not None and not self._bus.nc.is_closed:
            await self._announced.unsubscribe()
        await self._tail.stop()

    async def check(self, request: GenerateRequest) -> GenerateRequest:
        """The request as it is to be accepted: the first repeat is marked, and those of a tenant with several verdicts.

        Raises:
            ServingError: poisoned_request.
        """
        if self.storing:  # clients may repeat immediately
            await asyncio.wait(set(self.storing), timeout=WITHIN_S)
        if not self.table or self._secret is None:
            return request
        if (count := self._count(request.tenant)) >= WATCHED_FROM:
            if count >= REFUSED_FROM and request.tenant != DEFAULT_TENANT:
                raise ServingError(
                    Code.poisoned_request,
                    f"{count} different requests of tenant {request.tenant!r} crashed every worker that ran them, all "
                    "within the last hour: no more of its requests are accepted until less than "
                    f"{REFUSED_FROM} of them are that recent; `penstock dead list` shows them",
                )
            request = msgspec.structs.replace(request, watched=True)
        key = key_of(request, self._secret)
        verdict, revision = self.table.get(key, (None, 0))
        if verdict is None:
            return request
        left_s = (verdict.at_ns - self._bus.clock.now_ns()) / 1e9 + HOLDS_S
        if left_s <= 0:
            self._forget(key)
            return request
        claimed = msgspec.structs.replace(verdict, repeated=request.id)
        if verdict.repeated == request.id or (
            not verdict.repeated and await self._put(key, claimed, revision, no_store=request.no_store, left_s=left_s)
        ):
            log.warning("poisonous_request_repeated", request=request.id, first=verdict.request)
            return msgspec.structs.replace(request, repeats_poison=True)
        raise ServingError(
            Code.poisoned_request,
            f"a request with the same content crashed every worker that ran it ({verdict.request}); it was tried once "
            f"more, alone, and further repeats are refused for {max(1, round(left_s / 60))} more minutes",
        )

    def follow(self, inflight: InflightRequest) -> None:
        """A request runs: note how it ends."""
        inflight.on_poisoned = self._condemn

    def released(self, inflight: InflightRequest) -> None:
        """This gateway follows a request no longer. If it was a repeat, and has an answer, the verdict was wrong."""
        request = inflight.request
        if request.repeats_poison and inflight.answered and self._secret is not None:
            key = key_of(request, self._secret)
            if self._forget(key):
                log.info("verdict_withdrawn", request=request.id)
                self._spawn(self._withdraw(key, no_store=request.no_store))

    def _condemn(self, request: GenerateRequest) -> None:
        self._spawn(self._store(request))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            work.close()
            return
        task = self._tasks.spawn(work, name="verdict", on_failure=_not_stored)
        self.storing.add(task)
        task.add_done_callback(self.storing.discard)

    async def _store(self, request: GenerateRequest) -> None:
        secret = await self._known_secret()
        if secret is None:
            return
        key = key_of(request, secret)
        known, revision = self.table.get(key, (None, 0))
        repeated = request.id if request.repeats_poison else known.repeated if known is not None else ""
        first = known.request if known is not None else request.id
        verdict = Verdict(first, self._bus.clock.now_ns(), repeated)
        await self._put(key, verdict, revision, no_store=request.no_store, left_s=HOLDS_S)

    async def _known_secret(self) -> bytes | None:
        if self._secret is None:
            made = os.urandom(32)
            if await self._write(SECRET, made, 0):
                self._secret = made
            else:  # another gateway made one
                subject = self._prefix + SECRET
                entry = await get_last(self._bus, self._stream, subject, newest=True, within_s=WITHIN_S)
                self._secret = entry.data or None if entry is not None else None
        return self._secret

    async def _put(self, key: str, verdict: Verdict, revision: int, *, no_store: bool, left_s: float) -> bool:
        """Whether no other gateway has changed it meanwhile."""
        if no_store:
            self._remember(key, verdict, 0)
            await self._announce(Announced(key, verdict))
            return True
        stored = await self._write(key, encode(verdict), revision, ttl_s=max(1, int(left_s)))
        if stored:
            self._remember(key, verdict, stored)
        return stored > 0

    async def _withdraw(self, key: str, *, no_store: bool) -> None:
        if no_store:
            await self._announce(Announced(key))
            return
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": "5"}
        await self._bus.nc.request(self._prefix + key, b"", timeout=WITHIN_S, headers=headers)

    async def _announce(self, announced: Announced) -> None:
        await self._bus.nc.publish(self._bus.subjects.verdict, encode(announced))

    async def _write(self, key: str, value: bytes, revision: int, ttl_s: int = 0) -> int:
        """The new revision; 0: another gateway was first, or the broker does not answer."""
        try:
            reply = await compare_and_set(self._bus.nc, self._prefix + key, value, revision, WITHIN_S, ttl_s=ttl_s)
        except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            log.warning("verdict_not_stored", error=repr(error))
            return 0
        return reply.seq if reply.error is None else 0

    def _count(self, tenant: str) -> int:
        """Verdicts of a tenant that hold."""
        keys, oldest_ns = self.of_tenant.get(tenant, {}), self._bus.clock.now_ns() - HOLDS_S * 1_000_000_000
        for key in [key for key, at_ns in keys.items() if at_ns <= oldest_ns]:
            self._forget(key)
        return len(keys)

    def _remember(self, key: str, verdict: Verdict, revision: int) -> None:
        self._forget(key)
        self.table[key] = verdict, revision
        self.of_tenant.setdefault(_tenant_of(key), {})[key] = verdict.at_ns
        if len(self.table) > MOST:
            self._forget(next(iter(self.table)))

    def _forget(self, key: str) -> bool:
        """Whether it was known."""
        tenant = _tenant_of(key)
        keys = self.of_tenant.get(tenant, {})
        keys.pop(key, None)
        if not keys:
            self.of_tenant.pop(tenant, None)
        return self.table.pop(key, None) is not None

    def _on_entry(self, entry: Entry) -> None:
        key = entry.subject.removeprefix(self._prefix)
        if key == SECRET:
            self._secret = entry.data or None
        elif not entry.data or "KV-Operation" in entry.headers:
            self._forget(key)
        else:
            self._remember(key, decode(entry.data), entry.seq)

    async def _on_announced(self, message: Any) -> None:
        try:
            announced = decode_announced(message.data)
        except msgspec.MsgspecError as error:
            log.warning("verdict_unreadable", error=str(error))
            return
        known = self.table.get(announced.key)
        if announced.verdict is None:
            self._forget(announced.key)
        elif known is None or announced.verdict.repeated or not known[0].repeated:  # else ours, from before a repeat
            self._remember(announced.key, announced.verdict, 0)


def _tenant_of(key: str) -> str:
    return key.rpartition(".")[0]


def _not_stored(error: BaseException) -> None:
    log.warning("verdict_not_stored", error=repr(error))
