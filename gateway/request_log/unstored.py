"""This gateway's requests with ``no_store``: their messages in memory storage, until a grace period after their end.

The gateway that accepted a request keeps its content and streamed output in its own memory for the same time. If a
broker without a cluster restarts, everything is stored again, and neither the worker nor the client notices.

A pure core decides which messages no open request needs any more. Messages are deleted from the front of one gateway's
subjects: one command deletes any number of them. Each request therefore prevents the deletion of everything that was
stored after its beginning, until its grace period is over. A long request would prevent all deletions; see ``late``.
"""

import asyncio
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import Records
from penstock.gateway.request_log.subscriptions import TokenSubscription, TokenSubscriptions
from penstock.infra.bus import memory_storage
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import ApiError
from penstock.infra.bus.memory_storage import MemoryStreams
from penstock.infra.bus.publisher import Ack, Publisher
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.turns import TimeSlice
from penstock.schemas import contents, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import MEMORY
from penstock.schemas.tokens import COUNTS, Logprob, TokenBatch, TokenItem
from penstock.schemas.wire import decoder, encode

REMEMBERED = 4096  # ended requests that are remembered; messages of others expire


class Fronts(NamedTuple):
    """The first sequences of a gateway's contents and tokens that are still needed; 0: nothing new to delete."""

    contents: int
    tokens: int


class _Floor(msgspec.Struct, gc=False):
    """All messages of a request come after the sequences ``contents`` and ``tokens``, since the time ``since``."""

    contents: int
    tokens: int
    since: float
    first_contents: int  # these as they were at its beginning: no later request had lower ones
    first_tokens: int
    began: float
    has_parts: bool = False  # stored before the request's content


class MemoryLedger:
    """Decides what can be deleted. All times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._live: dict[str, _Floor] = {}
        # Ended, and perhaps not deleted yet. The first one of a ``dict`` is behind all that were deleted before it.
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._contents = 0  # the last sequences known
        self._tokens = 0
        self._deleted = Fronts(1, 1)

    def __len__(self) -> int:
        """Requests that are open, or in their grace period."""
        return len(self._live)

    def began(self, request: str, now: float) -> None:
        """A request, or a part of it, is about to be stored. May be called again."""
        floor = self._live.get(request)
        if floor is None:
            contents, tokens = self._contents, self._tokens
            self._live[request] = _Floor(contents, tokens, now, contents, tokens, now)
        else:
            floor.has_parts = True

    def stored(self, request: str, seq: int) -> None:
        """The request's content was stored, before its other messages."""
        if seq > self._contents:
            self._contents = seq
        floor = self._live.get(request)
        if floor is not None and seq > floor.contents and not floor.has_parts:
            floor.contents = seq - 1

    def read(self, seq: int) -> None:
        """A message of tokens was read; later ones have higher sequences."""
        if seq > self._tokens:
            self._tokens = seq

    def over(self, request: str) -> None:
        """The request is no longer needed."""
        if self._live.pop(request, None) is not None:
            self._dead[request] = None
            if len(self._dead) > REMEMBERED:
                self._dead.popitem(last=False)

    def renewed(self) -> None:
        """The streams were lost: sequences begin again, and open requests are stored again."""
        self._contents = self._tokens = 0
        self._deleted = Fronts(1, 1)
        self._dead.clear()
        for floor in self._live.values():
            floor.contents = floor.tokens = floor.first_contents = floor.first_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether anything is open, or may have to be deleted."""
        return bool(self._live or self._dead) or any(self.fronts())

    def fronts(self) -> Fronts:
        """What can be deleted now; call ``deleted`` afterwards."""
        contents, tokens = self._contents, self._tokens
        for floor in self._live.values():
            if floor.first_contents >= contents and floor.first_tokens >= tokens:
                break  # nor has any later one a lower floor: tens of thousands may be in their grace period
            contents, tokens = min(contents, floor.contents), min(tokens, floor.tokens)
        deleted = self._deleted
        return Fronts(
            contents + 1 if contents >= deleted.contents else 0, tokens + 1 if tokens >= deleted.tokens else 0
        )

    def deleted(self, fronts: Fronts) -> None:
        self._deleted = Fronts(max(self._deleted.contents, fronts.contents), max(self._deleted.tokens, fronts.tokens))

    def late(self, now: float, after_s: float, limit: int) -> list[str]:
        """Requests that have prevented deletions for this long: store their tokens again.

        Then ``moved`` is called with the last sequence that was read before.
        """
        if not self._dead:
            return []
        late = []
        for name, floor in self._live.items():
            if now - floor.began <= after_s:
                break
            if now - floor.since > after_s:
                late.append((floor.tokens, name))
        return [name for tokens, name in sorted(late)[:limit] if tokens < self._tokens]

    @property
    def position(self) -> int:
        """The last sequence of the tokens that was read."""
        return self._tokens

    def moved(self, request: str, position: int, now: float) -> None:
        floor = self._live.get(request)
        if floor is not None:
            floor.tokens, floor.since = max(floor.tokens, position), now

    def left(self, limit: int) -> list[str]:
        """The latest ended requests that may have messages left, stored by routers or workers, or not yet deletable.

        They are deleted one by one.
        """
        return list(self._dead)[-limit:]

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._dead.pop(request, None)


log = structlog.get_logger("gateway")

SWEEP_S = 1.0
LATE_S = 60.0  # a longer request is stored again, so that it prevents fewer deletions
LATE_AT_ONCE = 16
SINGLY = 64  # contents deleted individually in one pass, after a long request
DELETE_S = 2.0
MOST_ENDED_BYTES = 32 << 20  # of requests in their grace period, kept to be stored again; the oldest are dropped
MOST_MEDIA_BYTES = 256 << 20  # of images of open requests, kept to be stored again
OTHERS_S = 15.0
OTHERS_AT_ONCE = 256


class _Purged(msgspec.Struct):
    error: ApiError | None = None


class _Media(msgspec.Struct):
    """Images of one request, by their parts."""

    until: float  # monotonic; the images are dropped if their request is not accepted before
    request: str = ""  # id of the accepted request
    parts: dict[str, bytes] = {}


class _Open(msgspec.Struct):
    inflight: InflightRequest
    content: bytes


class _Ended(msgspec.Struct, gc=False):
    """A request in its grace period. There are thousands, so they contain nothing that garbage collection tracks.

    ``until``: when it is deleted, monotonic. ``content`` and ``items`` are stored again after a restart of the broker;
    they are empty if they were too large. ``items``: encoded, of its last ``attempt``.
    """

    until: float
    content: bytes
    items: bytes
    attempt: int

    @property
    def size(self) -> int:
        return len(self.content) + len(self.items)


_purged = msgspec.json.Decoder(_Purged).decode
_items = decoder(list[TokenItem])


class UnstoredRequests:
    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        gateway: str,
        grace_s: float,
        *,
        subscriptions: TokenSubscriptions,
        records: Records,
        tasks: Tasks,
    ) -> None:
        self._records = records
        self.streams = MemoryStreams(bus)
        self._bus = bus
        self._publisher = publisher
        self._gateway = gateway
        self._grace_s = grace_s
        self._subscriptions = subscriptions
        self._tasks = tasks.group("unstored")
        self._key = secrets.token_bytes(32)
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()  # in order of deletion
        self._ended_bytes = 0
        self._ledger = MemoryLedger()
        self._media: dict[str, _Media] = {}
        self._media_bytes = 0
        self._batch = 0
        self._subscription: TokenSubscription | None = None

    async def start(self) -> None:
        await self.streams.open()
        self.streams.on_renewed.append(self.put_again)
        self._tasks.spawn(self.streams.watch(lambda: bool(self._open or self._ended)), name="watch")
        self._tasks.spawn(self._sweep_forever(), name="sweep")
        self._tasks.spawn(self._sweep_others_forever(), name="sweep-others")

    async def close(self) -> None:
        self.streams.close()
        await self._tasks.aclose()

    def __len__(self) -> int:
        """Number of requests with messages in memory storage."""
        return len(self._ledger)

    @property
    def open(self) -> Iterable[InflightRequest]:
        return [each.inflight for each in self._open.values()]

    # --- accepting ---

    async def subscription(self) -> TokenSubscription:
        """Where the tokens of these requests arrive.

        Raises:
            ServingError: the stream cannot be read.
        """
        if self._subscription is None:
            found = await self._subscriptions.open(f"{MEMORY}.{self._gateway}")
            found.on_read = self._ledger.read
            self._subscription = found
        return self._subscription

    def without_content(self, request: GenerateRequest) -> GenerateRequest:
        return contents.without_content(request, self._key)

    async def keep_medium(self, owner: str, digest: bytes, data: bytes, keep_s: float) -> None:
        """Store an image for a request that is about to be accepted, under this id or another.

        Raises:
            ServingError: broker_unavailable: memory storage is full, or did not confirm it.
        """
        if self._media_bytes + len(data) > MOST_MEDIA_BYTES:
            raise ServingError(
                Code.broker_unavailable,
                f"images of open requests with no_store take {self._media_bytes >> 20} MiB of this gateway's memory, "
                f"and the limit is {MOST_MEDIA_BYTES >> 20} MiB; try again later",
                retry_after=1.0,
            )
        media = self._media.setdefault(owner, _Media(time.monotonic() + keep_s))
        self._ledger.began(owner, time.monotonic())
        part = memory_storage.media_part(owner, digest)
        if part not in media.parts:
            media.parts[part] = data
            self._media_bytes += len(data)
        await memory_storage.put_file(self._bus, self._publisher, self._gateway, owner, part, data, keep_s=keep_s)

    def _drop_media(self, owner: str) -> None:
        media = self._media.pop(owner, None)
        if media is not None:
            self._media_bytes -= sum(map(len, media.parts.values()))

    async def put(self, inflight: InflightRequest, content: bytes, timeout: float) -> "asyncio.Future[Ack]":
        """Send the content of a new request to memory storage; the returned future is its acknowledgement.

        Once it has come, call ``stored``.

        Raises:
            ServingError: it is too large for a message.
        """
        request = inflight.request
        inflight.kept = []
        for medium in request.media:
            if medium.private in self._media:
                self._media[medium.private].request = request.id
        # A repeat of one whose acceptance was not confirmed: what is there of that one stays until it has ended.
        self._open.setdefault(request.id, _Open(inflight, content))
        self._ledger.began(request.id, time.monotonic())
        return await memory_storage.put(
            self._bus,
            self._publisher,
            request,
            contents.REQUEST,
            content,
            now_ns=self._bus.clock.now_ns(),
            timeout=timeout,
            insist=False,
        )

    def stored(self, request_id: str, ack: Ack) -> None:
        """The content was stored. Without this call, it is deleted with later messages, or at the end."""
        self._ledger.stored(request_id, ack.seq)

    def _stored(self, request_id: str, done: "asyncio.Future[Ack]") -> None:
        if not done.cancelled() and done.exception() is None:
            self.stored(request_id, done.result())

    def drop(self, inflight: InflightRequest) -> None:
        """The request was not accepted, or is a repeat of another one."""
        request_id = inflight.request.id
        found = self._open.get(request_id)
        if found is not None and found.inflight is inflight:
            del self._open[request_id]
            if request_id not in self._ended:
                self._over(request_id)

    def _over(self, request_id: str) -> None:
        self._ledger.over(request_id)
        if self._media:
            for owner in [owner for owner, media in self._media.items() if media.request == request_id]:
                self._drop_media(owner)
                self._ledger.over(owner)

    def release(self, inflight: InflightRequest) -> bool:
        """The request has no reader any more. If it has ended, its grace period begins.

        False: this gateway follows it until its end.
        """
        found = self._open.get(inflight.request.id)
        if found is None or found.inflight is not inflight:
            return True
        if not inflight.ended:
            return False
        self._end(found, time.monotonic())
        return True

    # --- ending and deleting ---

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._ledger.busy:
                await _until_refused(self.sweep(time.monotonic()))

    async def sweep(self, now: float) -> None:
        time_slice = TimeSlice()
        for inflight in self.open:
            if inflight.ended and (each := self._open.get(inflight.request.id)) is not None:
                self._end(each, now)
            await time_slice.yield_if_spent()
        while self._ended:
            request_id, ended = next(iter(self._ended.items()))
            if ended.until > now:
                break
            del self._ended[request_id]
            self._ended_bytes -= ended.size
            self._over(request_id)
            await time_slice.yield_if_spent()
        for owner in [owner for owner, media in self._media.items() if not media.request and media.until < now]:
            self._drop_media(owner)  # its request was never accepted
            self._ledger.over(owner)
        await self._store_late_again(now)
        await self._delete(self._ledger.fronts())

    def _end(self, each: _Open, now: float) -> None:
        inflight, request_id = each.inflight, each.inflight.request.id
        del self._open[request_id]
        ended = _Ended(now + self._grace_s, each.content, encode(inflight.kept or ()), inflight.fold.attempt)
        inflight.kept = None
        if (before := self._ended.pop(request_id, None)) is not None:
            self._ended_bytes -= before.size
        self._ended[request_id] = ended
        self._ended_bytes += ended.size
        if self._ended_bytes > MOST_ENDED_BYTES:
            self._shorten()

    def _shorten(self) -> None:
        for older in self._ended.values():
            self._ended_bytes -= older.size
            older.content = older.items = b""
            if self._ended_bytes <= MOST_ENDED_BYTES // 2:
                break

    async def _store_late_again(self, now: float) -> None:
        position = self._ledger.position
        late = self._ledger.late(now, LATE_S, LATE_AT_ONCE)
        for request_id in late:
            each = self._open.get(request_id)
            if each is not None:
                await self._put_tokens(so_far(each.inflight))
            self._ledger.moved(request_id, position, now)
        if late or not len(self._ledger):
            for request_id in (dead := self._ledger.left(SINGLY)):
                subject = self._bus.subjects.contents(self._gateway, request_id, ">")
                await self._purge("MEMORY_CONTENTS", subject, 0)
            self._ledger.forget(dead)

    async def _delete(self, fronts: Fronts) -> None:
        subjects = self._bus.subjects
        if fronts.contents:
            every = f"{subjects.namespace}.{MEMORY}.contents.{self._gateway}.>"
            await self._purge("MEMORY_CONTENTS", every, fronts.contents)
        if fronts.tokens:
            await self._purge("MEMORY_TOKENS", subjects.tokens(f"{MEMORY}.{self._gateway}"), fronts.tokens)
        self._ledger.deleted(fronts)

    # --- departed gateways ---

    async def _sweep_others_forever(self) -> None:
        while True:
            await asyncio.sleep(OTHERS_S * random.uniform(0.5, 1.0))
            if self._bus.connected and not self.streams.settling:
                await _until_refused(self.sweep_others(self._bus.clock.now_ns()))

    async def sweep_others(self, now_ns: int) -> None:
        """Delete messages of ended requests that departed gateways left. The rest expires after its deadline."""
        requests: dict[str, set[str]] = {}
        prefix = f"{self._bus.subjects.namespace}.{MEMORY}."
        own = f"{prefix}contents.{self._gateway}.", f"{prefix}tokens.{self._gateway}"  # tens of thousands
        time_slice = TimeSlice()
        for subject in await self.streams.subjects():
            if subject.startswith(own):
                continue
            kind, gateway, *rest = subject.removeprefix(prefix).split(".")
            of = requests.setdefault(gateway, set())
            if kind == "contents":
                of.add(rest[0])
            await time_slice.yield_if_spent()
        for gateway, names in requests.items():
            if not await memory_storage.answers(self._bus, gateway):
                await self._delete_left(gateway, sorted(names), now_ns)

    async def _delete_left(self, gateway: str, requests: Sequence[str], now_ns: int) -> None:
        deleted = 0
        for request_id in requests[:OTHERS_AT_ONCE]:
            record = await self._records.ended_ns(request_id)
            if record and record + int(self._grace_s * 1e9) < now_ns:
                await self._purge("MEMORY_CONTENTS", self._bus.subjects.contents(gateway, request_id, ">"), 0)
                deleted += 1
        if deleted == len(requests):
            await self._purge("MEMORY_TOKENS", self._bus.subjects.tokens(f"{MEMORY}.{gateway}"), 0)
        if deleted:
            log.info("contents_left_deleted", gateway=gateway, requests=deleted)

    async def _purge(self, stream: str, subject: str, before: int) -> None:
        """Delete what is stored under a subject, if ``before``: below that sequence."""
        body = msgspec.json.encode({"filter": subject} | ({"seq": before} if before else {}))
        name = self._bus.subjects.stream(stream)
        reply = await self._bus.nc.request(f"$JS.API.STREAM.PURGE.{name}", body, timeout=DELETE_S)
        error = _purged(reply.data).error
        if error is not None:
            log.warning("contents_not_deleted", stream=name, error=str(error))

    # --- after the restart of a broker without a cluster ---

    async def put_again(self) -> None:
        self._ledger.renewed()
        now_ns = self._bus.clock.now_ns()
        open_ = list(self._open.values())
        ended = [each for each in self._ended.values() if each.content]
        wanted = [(each.inflight.request, each.content) for each in open_]
        wanted += [(requests.decode(each.content), each.content) for each in ended]
        waits = [
            await memory_storage.put(
                self._bus, self._publisher, request, contents.REQUEST, content, now_ns=now_ns, again=True
            )
            for request, content in wanted
        ]
        for (request, _), future in zip(wanted, waits, strict=True):
            future.add_done_callback(partial(self._stored, request.id))
        for owner, media in list(self._media.items()):
            for part, data in media.parts.items():
                await memory_storage.put_file(
                    self._bus, self._publisher, self._gateway, owner, part, data, keep_s=LATE_S, again=True
                )
        items = [item for each in open_ for item in so_far(each.inflight)]
        items += [item for each in ended if each.items for item in merged(_items(each.items), each.attempt)]
        waits += await self._put_tokens(items)
        results = await asyncio.gather(*waits, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        log.info("contents_put_again", requests=len(wanted), failed=len(failed))

    async def _put_tokens(self, items: Iterable[TokenItem]) -> "list[asyncio.Future[Ack]]":
        return [await self._put_batch(part) for part in portions(items, self._bus.max_message // 2)]

    async def _put_batch(self, items: Sequence[TokenItem]) -> "asyncio.Future[Ack]":
        self._batch += 1
        batch = TokenBatch(self._gateway, 0, self._batch, tuple(items))
        subject = self._bus.subjects.tokens(f"{MEMORY}.{self._gateway}")
        return await self._publisher.send(subject, encode(batch), f"{self._gateway}:again:{self._batch}", timeout=10.0)


async def _until_refused(sweep: Coroutine[Any, Any, None]) -> None:
    try:
        await sweep
    except (ServingError, NatsError, OSError, TimeoutError) as error:  # the broker is away; sweep again later
        log.debug("unstored_sweep_failed", error=repr(error))
    except Exception:
        log.exception("unstored_sweep_failed")


def so_far(inflight: InflightRequest) -> list[TokenItem]:
    """The output of an open request that a gateway has read."""
    return merged(inflight.kept or (), inflight.fold.attempt)


def merged(items: Iterable[TokenItem], attempt: int) -> list[TokenItem]:
    """The output that a gateway has read, as items of the present attempt: the counts, then one for each choice."""
    found: dict[tuple[int, int], list[TokenItem]] = {}
    for item in items:
        found.setdefault((item.choice, item.first if item.choice == COUNTS else 0), []).append(item)
    # The fence of the present attempt comes first, so that nothing of earlier ones counts.
    whole = []
    for (choice, _), parts in sorted(found.items(), key=lambda each: each[0][0] != COUNTS):
        last = parts[-1]
        logprobs: list[Logprob] | None = None
        if any(part.logprobs is not None for part in parts):
            logprobs = [each for part in parts for each in part.logprobs or ()]
        whole.append(
            TokenItem(
                last.request,
                attempt,
                choice,
                parts[0].first,
                b"".join(part.tokens for part in parts),
                last.finish,
                None if logprobs is None else tuple(logprobs),
            )
        )
    return whole


def portions(items: Iterable[TokenItem], limit: int) -> Iterable[list[TokenItem]]:
    """Group items into messages of about ``limit`` bytes at most; only a single item may be larger."""
    portion: list[TokenItem] = []
    size = 0
    for item in items:
        more = 64 + len(item.tokens) + sum(16 + 16 * len(each.top) for each in item.logprobs or ())
        if portion and size + more > limit:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += more
    if portion:
        yield portion
