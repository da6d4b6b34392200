"""Memory storage: the streams that hold the content and output of requests with ``no_store``, and access to them.

In a cluster, replicas keep the streams while one server is down. A single server loses them when it restarts. Every
process that uses them therefore declares them again after a reconnect, and calls ``on_renewed`` so that gateways can
put back what was lost. The sequences of a renewed stream begin at 1.
"""

import asyncio
import functools
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec
import structlog
from blake3 import blake3
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from penstock.infra.bus.client import Frame, Headers, has_status
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import BATCH_BYTES, get_last, parse_time, read
from penstock.infra.bus.jetstream import STREAM_NOT_FOUND, ApiError
from penstock.infra.bus.object_store import CHUNK, PUT_S
from penstock.infra.bus.publisher import Ack, Publisher
from penstock.schemas import contents, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Media
from penstock.schemas.streams import MEMORY_GRACE_S, memory_streams, stream_config

log = structlog.get_logger("bus")

ASK_S = 2.0
FILL_S = 10.0
DECLARE_S = 5.0  # after a reconnect; the other hooks wait, because what they resend needs the streams
AGAIN_S = 0.1
SETTLE_S = 15.0  # after a restart, during which gateways put back the contents of their open requests
ABSENT_S = 10.0  # for this long, a gateway that does not answer may still be reconnecting
LOOK_S = 0.25
WATCH_S = 1.0
ASKED_PARTS = 256  # parts per question
SENT_BYTES = 32 << 20  # of contents that arrived before their jobs
SENT_S = 10.0  # how long those are kept at least; at most twice as long
_EXISTS = 10058  # the stream exists with another configuration: an operator's, or another build's


class _StreamState(msgspec.Struct):
    messages: int = 0
    bytes: int = 0
    last_seq: int = 0
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct):
    config: dict[str, Any] = {}
    created: str = ""
    state: _StreamState = msgspec.field(default_factory=_StreamState)
    error: ApiError | None = None


class _Sent(NamedTuple):
    data: bytes
    came: float  # monotonic


class Fill(NamedTuple):
    """How full a stream is, in bytes. A ``limit`` of 0 means that it has none."""

    used: int
    limit: int


_decode = msgspec.json.Decoder(_Info).decode


class MemoryStreams:
    """Declares the streams. Open it before anything that publishes to them after a reconnect.

    Attributes:
        on_renewed: called after the streams were lost and declared again. Errors are logged.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._specs = memory_streams(bus.subjects)
        self._configs: dict[str, dict[str, Any]] = {}  # as last seen, because an operator may have enlarged them
        self._created: dict[str, str] = {}
        self._renewed = -math.inf
        self._renewed_ns = 0  # by the broker's clock
        self._link = bus.reconnects  # the connection on which the streams were last declared
        self._declaring = asyncio.Lock()
        self.on_renewed: list[Callable[[], Awaitable[None]]] = []

    async def open(self) -> None:
        """Declare the streams. Never raises: without them, the process still serves requests that are stored."""
        self._bus.on_reconnect.insert(0, self._reconnected)
        try:
            await self._declare_all()
            # Their contents may have been lost shortly before this process began. Gateways then put them back.
            self._renewed_ns = max(map(parse_time, self._created.values()))
            age_s = (self._bus.clock.now_ns() - self._renewed_ns) / 1e9
            self._renewed = time.monotonic() - max(0.0, age_s)
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            action = "run `penstock streams apply`; on a broker of your own, give its users the rights of this build"
            log.warning("memory_streams_missing", error=str(error), action=action)

    def close(self) -> None:
        if self._reconnected in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._reconnected)

    @property
    def since_renewed_s(self) -> float:
        """Seconds since the streams were made, or since this process noticed their loss. Infinite if unknown."""
        return time.monotonic() - self._renewed

    @property
    def settling(self) -> bool:
        """Whether contents may still be missing after the restart of a single server."""
        return self.since_renewed_s < SETTLE_S

    def misses(self, stored_ns: int) -> bool:
        """Whether the content of a request that was stored at this time (the broker's clock) may be missing."""
        return self.settling and stored_ns <= self._renewed_ns

    async def fill(self) -> tuple[Fill, Fill]:
        """How full the streams of contents and of tokens are. Missing streams are declared again first.

        Raises:
            ServingError: unsupported, if a stream never existed; broker_unavailable, if it is gone or the broker did
                not answer in time.
        """
        try:
            async with asyncio.timeout(FILL_S):
                try:
                    return await self._fill()
                except ServingError:  # a single server has just restarted, or the stream was deleted
                    await self.declare(DECLARE_S, again=True)
                    return await self._fill()
        except (NatsError, OSError, TimeoutError) as error:
            raise ServingError(
                Code.broker_unavailable,
                f"the broker did not say within {FILL_S:g} s how full memory storage is ({error!r}); try again later",
                retry_after=1.0,
            ) from None

    async def _fill(self) -> tuple[Fill, Fill]:
        found = []
        for spec in self._specs:
            info = await self._answered(f"STREAM.INFO.{spec.name}")
            if info.error is not None:
                raise self._missing(spec.name, str(info.error))
            found.append(Fill(info.state.bytes, max(0, int(info.config.get("max_bytes") or 0))))
        return found[0], found[1]

    async def subjects(self) -> list[str]:
        """All subjects that hold a message.

        Raises:
            ServingError: a stream is missing.
            nats.errors.Error, TimeoutError: the broker did not answer.
        """
        found: list[str] = []
        for spec in self._specs:
            body = json.dumps({"subjects_filter": spec.subjects[0]}).encode()
            info = await self._ask(f"STREAM.INFO.{spec.name}", body)
            if info.error is not None:
                raise self._missing(spec.name, str(info.error))
            found += info.state.subjects or {}
        return found

    async def watch(self, in_use: Callable[[], bool], on_replaced: Callable[[], Awaitable[None]] | None = None) -> None:
        """Check every second that the streams are still those that this process declared. Never returns.

        Publishers do not notice that a stream was deleted while the broker runs, so it is declared again here.

        Args:
            in_use: asked before each check; False skips it.
            on_replaced: called if the streams were replaced while the link held. After a reconnect, other hooks run.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if not in_use() or not self._bus.connected:
                continue
            link = self._bus.reconnects
            try:
                if await self._as_known():
                    continue
                await self.declare(DECLARE_S, again=True)
                if on_replaced is not None and self._bus.reconnects == link:
                    await on_replaced()
            except (ServingError, NatsError, OSError, TimeoutError) as error:  # the link broke
                log.debug("memory_streams_unknown", error=repr(error))

    async def _as_known(self) -> bool:
        for spec in self._specs:
            info = await self._ask(f"STREAM.INFO.{spec.name}", b"")
            if info.created != self._created.get(spec.name, info.created) or info.error is not None:
                return False
        return True

    async def _reconnected(self) -> None:
        await self.declare(DECLARE_S)

    async def declare(self, within_s: float, *, again: bool = False) -> None:
        """Declare the streams once per connection, or ``again`` in any case. Never raises."""
        try:
            async with asyncio.timeout(within_s), self._declaring:
                link = self._bus.reconnects
                if again or link != self._link:
                    await self._declare_again()
                    self._link = link
        except TimeoutError:
            log.warning("memory_streams_missing", error=f"they were not declared within {within_s:g} s")

    async def _declare_again(self) -> None:
        while True:  # the caller's timeout ends it
            try:
                renewed = await self._declare_all()
                break
            except ServingError as error:
                log.warning("memory_streams_missing", error=error.message)
                return
            except (NatsError, OSError, TimeoutError) as error:
                log.debug("memory_streams_unknown", error=repr(error))
            await asyncio.sleep(AGAIN_S)
        if renewed:
            log.warning("memory_streams_renewed", action="contents of open requests with no_store are put back")
            self._renewed = time.monotonic()
            self._renewed_ns = max(map(parse_time, self._created.values()))
            for hook in list(self.on_renewed):
                try:
                    await hook()
                except Exception as error:
                    log.warning("contents_not_put_again", error=repr(error))

    async def _declare_all(self) -> bool:
        """Declare all streams. True if one of them is not the one that this process knew."""
        renewed = False
        for spec in self._specs:
            created = await self._declare(spec.name, stream_config(spec))
            renewed |= self._created.get(spec.name, created) != created
            self._created[spec.name] = created
        return renewed

    async def _declare(self, name: str, config: dict[str, Any]) -> str:
        """When the stream was created. A single server that does not have it creates it now."""
        info = await self._ask(f"STREAM.INFO.{name}", b"")
        if info.error is not None and info.error.err_code == STREAM_NOT_FOUND and not self._bus.clustered:
            wanted = self._configs.get(name, config)
            info = await self._ask(f"STREAM.CREATE.{name}", json.dumps(wanted).encode())
            if info.error is not None and info.error.err_code == _EXISTS:
                info = await self._ask(f"STREAM.INFO.{name}", b"")
        if info.error is not None:
            raise self._missing(name, str(info.error))
        metadata = {k: v for k, v in info.config.get("metadata", {}).items() if not k.startswith("_nats.")}
        self._configs[name] = info.config | {"metadata": metadata}
        return info.created

    def _missing(self, name: str, why: str) -> ServingError:
        known = name in self._created  # it existed before, so the next request may find it again
        return ServingError(
            Code.broker_unavailable if known else Code.unsupported,
            f"no_store cannot be kept: stream {name} is not there ({why}); run 'penstock streams apply'",
            param=None if known else "no_store",
            retry_after=1.0 if known else None,
        )

    async def _answered(self, verb: str) -> _Info:
        """Ask until there is an answer: in a cluster, what is asked during an election gets none, not even later."""
        while True:  # the caller's timeout ends it
            with suppress(NatsTimeoutError):
                return await self._ask(verb, b"")

    async def _ask(self, verb: str, body: bytes) -> _Info:
        reply = await self._bus.nc.request(f"$JS.API.{verb}", body, timeout=ASK_S)
        return _decode(reply.data)


async def put(
    bus: Bus,
    publisher: Publisher,
    request: GenerateRequest,
    part: str,
    payload: bytes,
    *,
    now_ns: int,
    timeout: float = 10.0,
    insist: bool = True,
    again: bool = False,
) -> "asyncio.Future[Ack]":
    """Send a part of a request's content to memory storage. The returned future is its acknowledgement.

    The part expires some time after the request's deadline.

    Args:
        part: see ``penstock.schemas.contents``.
        again: the part was put before. It is stored only if it is no longer there.
        insist, timeout: as for ``Publisher.send``.
    Raises:
        ServingError: as for ``Publisher.send``.
    """
    left_s = max(1, math.ceil((request.deadline_ns - now_ns) / 1e9 + MEMORY_GRACE_S))
    # Two gateways may try to store one request. That of each has its own content: the log decides which is accepted.
    name = f"{request.gateway}:{request.id}:{part}"
    return await publisher.send(
        bus.subjects.contents(request.gateway, request.id, part),
        payload,
        f"{name}:again" if again else name,
        headers={"Nats-TTL": f"{left_s}s"},
        timeout=timeout,
        insist=insist,
        once=again,
    )


async def find(bus: Bus, request: GenerateRequest, part: str) -> bytes | None:
    """Look up a part of a request's content. None if it is not, or no longer, stored.

    Raises:
        ServingError: the broker did not answer.
    """
    subject = bus.subjects.contents(request.gateway, request.id, part)
    entry = await get_last(bus, bus.subjects.stream("MEMORY_CONTENTS"), subject, newest=bus.clustered)
    return entry.data if entry is not None else None


async def find_request(bus: Bus, request: GenerateRequest) -> GenerateRequest | None:
    """Look up a request with its content. None if it is not, or no longer, stored.

    Raises:
        ServingError: the broker did not answer.
        msgspec.MsgspecError: a later build wrote it, and this one cannot read it.
    """
    data = await find(bus, request, contents.REQUEST)
    return requests.decode(data) if data is not None else None


async def put_file(
    bus: Bus,
    publisher: Publisher,
    gateway: str,
    request_id: str,
    part: str,
    data: bytes,
    *,
    keep_s: float,
    again: bool = False,
) -> None:
    """Store a file of a request: an input (``media_part``), or an output under its name.

    Args:
        gateway: the gateway that accepted the request.
        again: the file was put before. What is left of it is replaced.
    Raises:
        ServingError: broker_unavailable, if it was not confirmed in time or memory storage is full.
    """
    subject = bus.subjects.contents(gateway, request_id, part)
    suffix = ":again" if again else ""
    for number, at in enumerate(range(0, len(data), CHUNK)):
        # Sent one at a time, so that a resent chunk is dropped by its id and cannot land after its successors.
        await publisher.publish(
            subject,
            data[at : at + CHUNK],
            f"{request_id}:{part}:{number}{suffix}",
            headers={"Nats-TTL": f"{max(1, math.ceil(keep_s + MEMORY_GRACE_S))}s"},
            timeout=PUT_S,
            insist=False,
        )


async def get_file(bus: Bus, gateway: str, request_id: str, part: str, *, size: int = 0) -> bytes | None:
    """Read a file of ``size`` bytes, or of any size if that is 0. None if it is missing or not whole.

    Raises:
        ServingError: the broker did not answer.
    """
    parts, received = [], 0
    subject = bus.subjects.contents(gateway, request_id, part)
    async for entry in read(bus, bus.subjects.stream("MEMORY_CONTENTS"), subject):
        parts.append(entry.data)
        received += len(entry.data)
        if size and received >= size:
            break
    return b"".join(parts) if received and size in (0, received) else None


def media_part(owner: str, digest: bytes) -> str:
    """The part name of an input image. Names do not show that two requests have the same image."""
    return f"media.{blake3(owner.encode() + digest).hexdigest(16)}"


async def fetch_medium(bus: Bus, memory: MemoryStreams, request: GenerateRequest, medium: Media) -> bytes:
    """Read an input image of a request. The caller checks its digest.

    Raises:
        ServingError: as for ``fetch``.
    """
    part = media_part(medium.private, medium.digest)
    look = functools.partial(get_file, bus, request.gateway, medium.private, part, size=medium.size)
    return await _wait_for(bus, memory, request, look)


def send_content(bus: Bus, request: GenerateRequest, inbox: str) -> None:
    """Ask the broker to send a request's content to a worker's ``Registration.inbox`` while the job is on its way.

    If nothing arrives, because the content is not stored yet or the link has just failed, the worker asks for it.
    """
    subject = bus.subjects.contents(request.gateway, request.id, contents.REQUEST)
    ask = f"$JS.API.DIRECT.GET.{bus.subjects.stream('MEMORY_CONTENTS')}.{subject}"  # asks for its last message
    bus.nc.post(ask, b"", f"{inbox}.{request.id}")


class _Question:
    __slots__ = ("answer", "found", "single", "timer")

    def __init__(self, answer: "asyncio.Future[dict[str, bytes]]", single: bool, timer: asyncio.TimerHandle) -> None:
        self.answer = answer
        self.found: dict[str, bytes] = {}
        self.single = single  # one message answers it; otherwise a message without content ends the answer
        self.timer = timer


class ContentReader:
    """Reads the contents of many requests with one question, without a subscription or task per request.

    It returns only what is stored right now; use ``fetch`` for the rest. Call ``open`` first and ``close`` last.

    Attributes:
        inbox: where ``send_content`` delivers contents before anyone asks for them.
        sent: what was delivered there and not read yet, by request, in the order in which it came.
        sent_bytes: the size of all that.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._subject = f"$JS.API.DIRECT.GET.{bus.subjects.stream('MEMORY_CONTENTS')}"
        self._replies = bus.nc.new_inbox()
        self.inbox = bus.nc.new_inbox()
        self._next = 0
        self._questions: dict[str, _Question] = {}
        self.sent: dict[str, _Sent] = {}
        self.sent_bytes = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._subs: list[Any] = []

    async def open(self) -> None:
        for inbox, handler in ((self._replies, self._on_reply), (self.inbox, self._on_sent)):
            self._subs.append(await self._bus.nc.subscribe_direct(inbox + ".*", handler))

    async def close(self) -> None:
        for token in list(self._questions):
            self._end(token)
        self.sent.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        if not self._bus.nc.is_closed:
            for sub in self._subs:
                await sub.unsubscribe()

    def take(self, request_id: str) -> bytes | None:
        """Take the content that was sent ahead for a request. None if it has to be asked for."""
        sent = self.sent.pop(request_id, None)
        if sent is None:
            return None
        self.sent_bytes -= len(sent.data)
        return sent.data

    def _on_sent(self, frame: Frame) -> None:
        if has_status(frame.headers):
            return  # it was not stored yet
        request_id = frame.subject.rpartition(b".")[2].decode()
        self.take(request_id)
        self.sent[request_id] = _Sent(frame.data, time.monotonic())
        self.sent_bytes += len(frame.data)
        while self.sent_bytes > SENT_BYTES:
            self.take(next(iter(self.sent)))
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(SENT_S, self._expire)

    def _expire(self) -> None:
        """Drop contents whose jobs went to another worker."""
        oldest = time.monotonic() - SENT_S
        for request_id, _ in list(takewhile(lambda each: each[1].came <= oldest, self.sent.items())):
            self.take(request_id)
        self._expiry = asyncio.get_running_loop().call_later(SENT_S, self._expire) if self.sent else None

    async def find(self, subjects: Sequence[str]) -> dict[str, bytes]:
        """What is stored under these subjects (``Subjects.contents``). Those without a message are left out."""
        found: dict[str, bytes] = {}
        for at in range(0, len(subjects), ASKED_PARTS):
            found |= await self._ask(subjects[at : at + ASKED_PARTS])
        return found

    def _ask(self, subjects: Sequence[str]) -> "asyncio.Future[dict[str, bytes]]":
        loop = asyncio.get_running_loop()
        token, self._next = str(self._next), self._next + 1
        single = len(subjects) == 1
        query = {"last_by_subj": subjects[0]} if single else {"multi_last": subjects, "max_bytes": BATCH_BYTES}
        answer: asyncio.Future[dict[str, bytes]] = loop.create_future()
        if self._bus.nc.post(self._subject, msgspec.json.encode(query), f"{self._replies}.{token}"):
            self._questions[token] = _Question(answer, single, loop.call_later(ASK_S, self._end, token))
        else:
            answer.set_result({})  # the link is down
        return answer

    def _on_reply(self, frame: Frame) -> None:
        token = frame.subject.rpartition(b".")[2].decode()
        question = self._questions.get(token)
        if question is None:
            return
        stored = not has_status(frame.headers)
        if stored:
            question.found[Headers(frame.headers)["Nats-Subject"]] = frame.data
        if question.single or not stored:
            self._end(token)

    def _end(self, token: str) -> None:
        question = self._questions.pop(token)
        question.timer.cancel()
        if not question.answer.done():
            question.answer.set_result(question.found)


async def fetch(bus: Bus, memory: MemoryStreams, request: GenerateRequest, part: str) -> bytes:
    """Read a part of a request's content, and wait if it has to be put back after a broker's restart.

    The request itself was stored before it was accepted. Parts of later attempts and stages may arrive after their
    jobs. They can be made again as long as the request is there.

    Raises:
        ServingError: content_lost, if the request is gone; deadline_exceeded; broker_unavailable, if the broker did
            not answer or only this part is missing.
    """
    look = functools.partial(find, bus, request, part)
    if part == contents.REQUEST:
        return await _wait_for(bus, memory, request, look)
    return await _wait_for(bus, memory, request, look, functools.partial(find, bus, request, contents.REQUEST))


async def _wait_for(
    bus: Bus,
    memory: MemoryStreams,
    request: GenerateRequest,
    look: Callable[[], Awaitable[bytes | None]],
    source: Callable[[], Awaitable[bytes | None]] | None = None,
) -> bytes:
    """
    Args:
        source: looks for what the part can be made from again.
    """
    until = time.monotonic() + SETTLE_S
    while True:
        data = await look()
        if data is not None:
            return data
        late = time.monotonic() >= until
        if late or (memory.since_renewed_s > ABSENT_S and not await answers(bus, request.gateway, request.id)):
            kept = source is not None and await source() is not None
            data = await look()  # it may have been stored between the two looks
            if data is not None:
                return data
            if not kept:
                raise lost(request.id)
            if late:
                message = f"a part of request {request.id} did not arrive within {SETTLE_S:g} s; it is made again"
                raise ServingError(Code.broker_unavailable, message, retry_after=1.0)
        if bus.clock.now_ns() >= request.deadline_ns:
            raise ServingError(Code.deadline_exceeded, "the deadline passed before the request could start")
        await asyncio.sleep(LOOK_S)


async def answers(bus: Bus, gateway: str, request_id: str = "") -> bool:
    """Whether a gateway is running, so that it could put back the contents of its open requests."""
    try:
        await bus.nc.request(bus.subjects.progress(gateway), request_id.encode(), timeout=ASK_S)
    except NoRespondersError:
        return False
    except (NatsError, OSError, TimeoutError):
        return True
    return True


def lost(request_id: str) -> ServingError:
    return ServingError(
        Code.content_lost,
        f"the content of request {request_id} was lost: with no_store it was kept in memory only, and both the broker "
        "and its gateway have stopped; send the request again",
    )
