"""The transports of an engine's ranks as one: each rank moves the heads that it has of every block.

Each rank is a process with memory of its own, and so has an agent of its own. Rank 0 has the others move their heads
through a channel, in a thread that no step holds up. Engines of different widths hand off to each other: a rank reads
each of its heads from a rank that has it.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import msgspec

from penstock.schemas import wire
from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.agent import common_heads, pools_bytes
from penstock.workers.kv_transfer.transport_protocol import (
    TIMEOUT_S,
    TransferError,
    TransferResult,
    Transport,
    TransportStats,
    TransportUnavailable,
    completed_future,
    failed,
    when_done,
)

OPEN_S = 60.0  # for an agent's test of itself, on a loaded machine


class OpenTransport(Protocol):
    """As ``transport_thread.open_transport``."""

    def __call__(
        self,
        backend: Literal["auto", "nixl"],
        agent: str,
        pools: Mapping[str, Memory],
        *,
        on_renewed: Callable[[Endpoint], None],
        quarantine_s: float,
    ) -> Transport: ...


class Channel(Protocol):
    """Messages between two processes; ``receive`` returns nothing when the other end is closed."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes: ...


class RankCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of a rank's transport; ``peer`` and the fields after it are its arguments."""

    number: int
    name: str
    peer: Endpoint | None = None
    agent: str = ""
    pool: str = ""
    remote: bytes = b""
    local: bytes = b""
    seconds: float = 0.0
    reads: bool = True


class RankAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of a call.

    Attributes:
        number: of the call; 0: the agent was renewed.
        settled: of a failed one, the blocks may be used again; if not, another answer says when.
        buffer_bytes: of the rank's transport by then.
    """

    number: int
    endpoint: Endpoint | None = None
    bytes: int = 0
    seconds: float = 0.0
    cause: str = ""
    message: str = ""
    settled: bool = True
    buffer_bytes: int = 0


_decode_call = msgspec.msgpack.Decoder(RankCall).decode
_decode_answer = msgspec.msgpack.Decoder(RankAnswer).decode


class RankTransports:
    """Implements ``Transport`` over those of all ranks; rank 0 may be the only one."""

    def __init__(self, own: Transport, others: Sequence[Transport] = ()) -> None:
        self._own, self._others = own, tuple(others)
        self._ranks_of: dict[str, tuple[str, ...]] = {}  # agents of the other ranks of a peer, by its own

    @property
    def endpoint(self) -> Endpoint:
        own = self._own.endpoint
        return (
            msgspec.structs.replace(own, ranks=tuple(each.endpoint for each in self._others)) if self._others else own
        )

    def read(
        self,
        peer: Endpoint,
        pool: str,
        remote: Sequence[int],
        local: Sequence[int],
        *,
        generations: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> "Future[TransferResult]":
        if not (self._others or peer.ranks):
            return self._own.read(peer, pool, remote, local, generations=generations, layers=layers, timeout=timeout)
        result: Future[TransferResult] = Future()
        result.set_running_or_notify_cancel()
        began = time.monotonic()
        try:
            if layers is not None:
                raise TransferError("refused", "blocks that ranks share are read with all layers")
            pairs = self._pairs(peer, pool)
        except TransferError as error:
            result.set_exception(error)
            return result
        reads = [own.read(each, pool, remote, local, timeout=timeout) for own, each in pairs]

        def ended() -> None:
            """All have read. Whether the blocks are still the owner's is compared last, for all of them."""
            if failed(reads, result):
                return
            compared: list[Future[TransferResult]] = []
            if generations:
                left = timeout - (time.monotonic() - began)
                compared = [self._own.read(peer, pool, remote, (), generations=generations, timeout=left)]
            when_done(compared, lambda: report(compared))

        def report(compared: "Sequence[Future[TransferResult]]") -> None:
            if not failed(compared, result):
                moved = sum(each.result().bytes for each in reads)
                result.set_result(TransferResult(moved, time.monotonic() - began))

        when_done(reads, ended)
        return result

    def _pairs(self, peer: Endpoint, pool: str) -> list[tuple[Transport, Endpoint]]:
        """Which of our ranks reads from which of the peer's, so that each has all of its heads.

        Raises:
            TransferError: some heads are nowhere.
        """
        self._ranks_of[peer.agent] = tuple(each.agent for each in peer.ranks)
        pairs = []
        for own in (self._own, *self._others):
            mine = own.endpoint.pools.get(pool)
            missing = set(_heads(mine)) if mine is not None else {0}
            for each in (peer, *peer.ranks):
                theirs = each.pools.get(pool)
                common = set(common_heads(mine, theirs)) if mine is not None and theirs is not None else set()
                if common & missing:
                    pairs.append((own, each))
                    missing -= common
            if missing:
                raise TransferError(
                    "refused",
                    f"agent {peer.agent}: in pool {pool!r} its ranks have no heads {sorted(missing)}, or blocks of "
                    "another model, data type or size",
                )
        return pairs

    def write(
        self, peer: Endpoint, pool: str, local: Sequence[int], remote: Sequence[int], *, timeout: float = TIMEOUT_S
    ) -> "Future[TransferResult]":
        return self._own.write(peer, pool, local, remote, timeout=timeout)  # which refuses a part of the heads

    def connect(self, peer: Endpoint, *, reads: bool = True, timeout: float = TIMEOUT_S) -> "Future[None]":
        pairs = [(self._own, peer)]
        if self._others or peer.ranks:
            with contextlib.suppress(TransferError):  # which the first transfer says
                pairs = self._pairs(peer, "kv")
        connected = [own.connect(each, reads=reads, timeout=timeout) for own, each in pairs]
        return _all_of(connected)

    def drained(self) -> "Future[None]":
        return _all_of([each.drained() for each in (self._own, *self._others)])

    def forget(self, agent: str) -> None:
        for name in (agent, *self._ranks_of.pop(agent, ())):
            for each in (self._own, *self._others):
                each.forget(name)

    def renew(self) -> None:
        for each in (self._own, *self._others):
            each.renew()

    def stats(self) -> TransportStats:
        """Of rank 0, but with what all ranks have registered."""
        own, others = self._own.stats(), [each.stats() for each in self._others]
        return own._replace(
            registered_bytes=own.registered_bytes + sum(each.registered_bytes for each in others),
            buffer_bytes=own.buffer_bytes + sum(each.buffer_bytes for each in others),
        )

    def close(self) -> None:
        for each in (*self._others, self._own):
            each.close()


class RemoteTransport:
    """Implements ``Transport`` for the agent of another rank. What is written is refused.

    Args:
        agent: a name that no other incarnation of any worker ever has.
        on_renewed: called with the new endpoint, in a thread of this object.

    Raises:
        TransportUnavailable: the rank cannot open an agent.
    """

    def __init__(
        self, channel: Channel, agent: str, on_renewed: Callable[[Endpoint], None], quarantine_s: float
    ) -> None:
        self._channel = channel
        self._on_renewed = on_renewed
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._settling: dict[int, Future[None]] = {}
        self._closed = False
        self._buffer_bytes = 0
        threading.Thread(target=self._receive, name=f"transfer-{agent}", daemon=True).start()
        try:
            opened: RankAnswer = self._call("open", agent=agent, seconds=quarantine_s).result(OPEN_S)
        except (TransferError, TimeoutError) as error:
            raise TransportUnavailable(f"{agent}: {error}") from error
        assert opened.endpoint is not None
        self.endpoint = opened.endpoint

    def read(
        self,
        peer: Endpoint,
        pool: str,
        remote: Sequence[int],
        local: Sequence[int],
        *,
        generations: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> "Future[TransferResult]":
        assert not generations, "rank 0 compares them"
        assert layers is None, "refused before"
        answer = self._call(
            "read",
            peer=peer,
            pool=pool,
            remote=wire.pack_tokens(list(remote)),
            local=wire.pack_tokens(list(local)),
            seconds=timeout,
        )
        return _mapped(answer, lambda answer: TransferResult(answer.bytes, answer.seconds))

    def write(
        self, peer: Endpoint, pool: str, local: Sequence[int], remote: Sequence[int], *, timeout: float = TIMEOUT_S
    ) -> "Future[TransferResult]":
        refused: Future[TransferResult] = Future()
        refused.set_exception(TransferError("refused", "blocks that ranks share are read, not written"))
        return refused

    def connect(self, peer: Endpoint, *, reads: bool = True, timeout: float = TIMEOUT_S) -> "Future[None]":
        return _mapped(self._call("connect", peer=peer, reads=reads, seconds=timeout), lambda answer: None)

    def drained(self) -> "Future[None]":
        return completed_future()  # no transfer writes

    def forget(self, agent: str) -> None:
        self._call("forget", agent=agent)

    def renew(self) -> None:
        self._call("renew")

    def stats(self) -> TransportStats:
        registered = pools_bytes(self.endpoint)
        return TransportStats(len(self._open), 0, 0, 0, 0, 0, 0, 0.0, {}, 0, registered, self._buffer_bytes)

    def close(self) -> None:
        """The rank closes its agent when it ends, with the engine."""

    def _call(self, name: str, **arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:  # one message at a time
            number = next(self._numbers)
            if not self._closed:
                self._open[number] = future
                try:
                    self._channel.send(msgspec.msgpack.encode(RankCall(number, name, **arguments)))
                    return future
                except OSError:
                    del self._open[number]
        future.set_exception(TransferError("unavailable", "the rank has ended"))
        return future

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while message := self._channel.receive():
                self._answered(_decode_answer(message))
        with self._lock:
            self._closed = True
            left, self._open = self._open, {}
            settling, self._settling = self._settling, {}
        for future in left.values():
            future.set_exception(TransferError("unavailable", "the rank has ended"))
        for settled in settling.values():
            settled.set_result(None)  # its memory is gone

    def _answered(self, answer: RankAnswer) -> None:
        if not answer.number:
            assert answer.endpoint is not None
            self.endpoint = answer.endpoint
            self._on_renewed(answer.endpoint)
            return
        if (settled := self._settling.pop(answer.number, None)) is not None:
            settled.set_result(None)
            return
        self._buffer_bytes = max(self._buffer_bytes, answer.buffer_bytes)
        with self._lock:
            future = self._open.pop(answer.number)
        if not answer.cause:
            future.set_result(answer)
            return
        settled = None
        if not answer.settled:
            settled = self._settling[answer.number] = Future()
        cause: Any = answer.cause
        future.set_exception(TransferError(cause, answer.message, settled))


def serve_transport(channel: Channel, pools: Mapping[str, Memory], open_transport: OpenTransport) -> None:
    """Be the far end of a ``RemoteTransport``, until its channel is closed."""
    lock = threading.Lock()
    transport: Transport | None = None

    def answer(each: RankAnswer) -> None:
        with lock, contextlib.suppress(OSError):
            channel.send(msgspec.msgpack.encode(each))

    def done(number: int, future: "Future[Any]") -> None:
        error = future.exception()
        if isinstance(error, TransferError):
            settled = error.settled.done()
            answer(RankAnswer(number, cause=error.cause, message=error.message, settled=settled))
            if not settled:
                error.settled.add_done_callback(lambda _: answer(RankAnswer(number)))
        elif error is not None:
            answer(RankAnswer(number, cause="unavailable", message=repr(error)))
        else:
            moved = future.result()
            counted = (moved.bytes, moved.seconds) if isinstance(moved, TransferResult) else (0, 0.0)
            buffers = transport.stats().buffer_bytes if transport is not None else 0
            answer(RankAnswer(number, None, *counted, buffer_bytes=buffers))

    def run(call: RankCall) -> "Future[Any]":
        assert transport is not None
        if call.name == "forget":
            transport.forget(call.agent)
        elif call.name == "renew":
            transport.renew()
        else:
            assert call.peer is not None
            if call.name == "connect":
                return transport.connect(call.peer, reads=call.reads, timeout=call.seconds)
            remote, local = wire.unpack_tokens(call.remote), wire.unpack_tokens(call.local)
            return transport.read(call.peer, call.pool, list(remote), list(local), timeout=call.seconds)
        return completed_future()

    try:
        while message := channel.receive():
            call = _decode_call(message)
            if call.name != "open":
                number = call.number
                run(call).add_done_callback(lambda future, number=number: done(number, future))  # type: ignore[misc]
                continue
            try:
                transport = open_transport(
                    "auto",
                    call.agent,
                    pools,
                    on_renewed=lambda endpoint: answer(RankAnswer(0, endpoint)),
                    quarantine_s=call.seconds,
                )
                answer(RankAnswer(call.number, transport.endpoint))
            except TransportUnavailable as error:
                answer(RankAnswer(call.number, cause="unavailable", message=str(error)))
    finally:
        if transport is not None:
            transport.close()


def _heads(pool: Memory) -> range:
    return common_heads(pool, pool)


def _all_of(futures: "Sequence[Future[None]]") -> "Future[None]":
    result: Future[None] = Future()
    result.set_running_or_notify_cancel()

    def then() -> None:
        if not failed(futures, result):
            result.set_result(None)

    when_done(futures, then)
    return result


def _mapped(future: "Future[Any]", turn: Callable[[Any], Any]) -> "Future[Any]":
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()

    def done(ended: "Future[Any]") -> None:
        error = ended.exception()
        if error is None:
            result.set_result(turn(ended.result()))
        else:
            result.set_exception(error)

    future.add_done_callback(done)
    return result
