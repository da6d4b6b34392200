"""Transfers in flight through one agent: checks, deadlines, quarantine, generations, renewal.

No thread and no clock: ``now`` is given. The library behind the agent does none of this. A posted transfer cannot be
cancelled, and never ends if its peer is stopped. So a transfer whose deadline has passed fails at once, but stays in
quarantine and is polled on. Its blocks are free when it has ended. If that takes too long, the agent is closed with
its connections, and a new one under a new name takes over.

A peer is loaded once, until it ends: loading and removing per request would leak a file descriptor each time. After an
error it is removed before it is loaded again, but only when all its transfers have ended: afterwards the library could
not report their end. Metadata are compared with their digest first, because one damaged blob makes a name unusable
until the agent is closed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer import agent as blocks
from penstock.workers.kv_transfer.agent import (
    Agent,
    CopyOp,
    HeadCopy,
    PeerLost,
    StagedPiece,
    TransferRejected,
    pools_bytes,
)
from penstock.workers.kv_transfer.staging import READS, STUCK_S, StagingBuffer
from penstock.workers.kv_transfer.transport_protocol import (
    CAUSES,
    DRAIN_S,
    RANK,
    Cause,
    TransferError,
    TransferResult,
    TransportStats,
    path_between,
    when_done,
)

SMALLEST_BYTES = 4096


class ScratchBuffers:
    """Buffers of one agent, kept until it is closed. Free one only when nothing can write to it any more."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._all: list[NDArray[np.uint32]] = []
        self._free: dict[int, list[NDArray[np.uint32]]] = defaultdict(list)

    def take(self, size: int) -> NDArray[np.uint32]:
        """At least ``size`` bytes."""
        room = max(SMALLEST_BYTES, 1 << (size - 1).bit_length())
        if self._free[room]:
            return self._free[room].pop()
        buffer = np.zeros(room // 4, np.uint32)
        self._agent.register(buffer.ctypes.data, room)
        self._all.append(buffer)
        return buffer

    @property
    def bytes(self) -> int:
        """Of all of them, in use or not."""
        return sum(buffer.nbytes for buffer in list(self._all))

    def free(self, buffer: NDArray[np.uint32]) -> None:
        self._free[buffer.nbytes].append(buffer)


DIGEST_BYTES = 16


def digest(metadata: bytes) -> bytes:
    """The value of ``Endpoint.digest``."""
    return blake3(metadata).digest(length=DIGEST_BYTES)


@dataclass(slots=True)
class _Peer:
    digest: bytes
    engine: str  # equal for its ranks
    posted: int = 0  # transfers that have not ended
    stuck: int = 0  # of these, those whose deadline has passed
    moved: float = 0.0  # when one of them last ended, or the first was posted
    ending: bool = False  # lost or forgotten: removed as soon as nothing of it is posted


class LoadedPeers:
    """The peers of one agent; used in its thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def load(self, peer: Endpoint) -> None:
        """Make sure that transfers with this peer can be posted.

        Raises:
            TransferError: refused (damaged metadata), or peer_lost (it ended, or an earlier transfer has not).
        """
        loaded = self._peers.get(peer.agent)
        if loaded is not None and loaded.ending:
            raise TransferError("peer_lost", f"agent {peer.agent} was lost, and transfers with it have not ended yet")
        if loaded is not None and loaded.stuck:
            raise TransferError("peer_lost", f"agent {peer.agent} is stuck: a transfer with it has not ended")
        if loaded is not None and loaded.digest == peer.digest:
            return
        if not peer.metadata or digest(peer.metadata) != peer.digest:
            raise TransferError("refused", f"agent {peer.agent}: its metadata were damaged on the way")
        if loaded is not None:
            raise TransferError("refused", f"agent {peer.agent} has other metadata than before; a name is used once")
        self._agent.remove(peer.agent)
        try:
            self._agent.add(peer)
        except PeerLost as error:
            self._agent.remove(peer.agent)
            raise TransferError("peer_lost", f"agent {peer.agent} cannot be reached: {error}") from error
        except TransferRejected as error:
            self._agent.remove(peer.agent)
            raise TransferError("refused", f"agent {peer.agent}: {error}") from error
        self._peers[peer.agent] = _Peer(peer.digest, peer.agent.partition(RANK)[0])

    def usable(self, name: str) -> bool:
        """Whether a transfer may be posted now, after an earlier ``load``."""
        return name in self._peers and not self._peers[name].ending

    def posted(self, name: str, now: float) -> None:
        peer = self._peers[name]
        if not peer.posted:
            peer.moved = now
        peer.posted += 1

    def silent(self, name: str, now: float) -> bool:
        """Whether nothing of a peer, or of a rank of its engine, has ended for longer than reads of running ones take.

        The ranks stop together, and each would hold parts.
        """
        engine = self._peers[name].engine
        ranks = (each for each in self._peers.values() if each.engine == engine)
        return any(each.posted and now - each.moved > STUCK_S for each in ranks)

    def stuck(self, name: str) -> None:
        """The deadline of a posted transfer has passed."""
        self._peers[name].stuck += 1

    def ended(self, name: str, now: float, *, stuck: bool = False, lost: bool = False) -> None:
        """A posted transfer has completed or failed."""
        peer = self._peers[name]
        peer.moved = now
        peer.posted -= 1
        peer.stuck -= stuck
        peer.ending |= lost
        self._remove(name)

    def lost(self, name: str) -> None:
        """The peer has ended or must be loaded again; unknown names are ignored."""
        if peer := self._peers.get(name):
            peer.ending = True
            self._remove(name)

    def _remove(self, name: str) -> None:
        if self._peers[name].ending and not self._peers[name].posted:
            del self._peers[name]
            self._agent.remove(name)


Op: TypeAlias = Literal["READ", "WRITE", "CONNECT", "COMPARE"]
WARM_BYTES = 4
BUFFERS = 2  # for staged reads
RETRY_S = 30.0  # to the next attempt at a staging buffer: one that fails has torch free what steps use again
TICK_S = 0.05  # a longer pause does not count as draining: this process may have been stopped


@dataclass(eq=False, slots=True, kw_only=True)
class TransferRequest:
    """One call of a transport's user. "CONNECT" reads a few bytes to open the connection, "COMPARE" generations."""

    op: Op
    peer: Endpoint
    pool: str = ""
    local: Sequence[int] = ()
    remote: Sequence[int] = ()
    generations: Sequence[int] = ()
    layers: tuple[int, int] | None = None
    reads: bool = True  # of "CONNECT", as in ``Transport.connect``
    started: float
    deadline: float
    future: "Future[TransferResult]" = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Posted:
    """What an agent moves, or a copy out of a part of the staging buffer, which has no handle."""

    handle: Any
    at_risk: int  # local blocks that it may touch
    part: int = -1  # of the staging buffer: read into, then copied from
    copy: HeadCopy | None = None


@dataclass(eq=False, slots=True)
class _Transfer:
    request: TransferRequest
    moves: Iterator[CopyOp | StagedPiece] = field(default_factory=lambda: iter(()))
    size: int = 0  # bytes
    move: CopyOp | StagedPiece | None = None  # the next
    posted: list[_Posted] = field(default_factory=list)  # one, but of a staged read several
    staging: StagingBuffer | None = None
    reloaded: bool = False
    scratch: "NDArray[np.uint32] | None" = None
    gpu: bool = False  # both sides are GPU memory

    @property
    def peer(self) -> str:
        return self.request.peer.agent


@dataclass(eq=False, slots=True)
class _Quarantined:
    """What a failed transfer has posted and has not ended."""

    transfer: _Transfer
    posted: _Posted
    since: float
    settled: "Future[None]"


@dataclass(eq=False, slots=True)
class _Drain:
    left: float  # seconds
    future: "Future[None]"


class InflightTransfers:
    """Args:
    make: makes an agent of the given name.
    name: of the first agent; later ones are called ``name.1``, ``name.2``.
    renewed: called with the new endpoint.
    quarantine_s: how long a given-up transfer may stay unfinished before the agent is renewed.
    """

    def __init__(
        self, make: Callable[[str], Agent], name: str, renewed: Callable[[Endpoint], None], quarantine_s: float
    ) -> None:
        self._make, self._name, self._renewed, self._quarantine_s = make, name, renewed, quarantine_s
        self._live: list[_Transfer] = []
        self._quarantined: list[_Quarantined] = []
        self._drains: list[_Drain] = []
        self._stepped = self._resumed = 0.0
        self._renewals = self._transfers = 0
        self._bytes: dict[Op, int] = {"READ": 0, "WRITE": 0}
        self._seconds = 0.0
        self._failures: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._closed = ""  # why there is no agent
        # By kind and device: made for the first such peer, and another when stopped peers hold all of its parts.
        self._staging: dict[tuple[str, int], list[StagingBuffer]] = {}
        self._unstaged: dict[tuple[str, int], tuple[float, str]] = {}  # not made: when it is tried again, and why
        self._open(name)

    def _open(self, name: str) -> None:
        self.agent = self._make(name)
        self._peers, self._scratch = LoadedPeers(self.agent), ScratchBuffers(self.agent)
        for key, (staging, *_) in list(self._staging.items()):
            self._staging[key] = [staging]
            try:
                staging.register(self.agent)
            except TransferError:
                del self._staging[key]  # made again for the next read
        self._closed = ""

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, quarantine included."""
        return bool(self._live or self._quarantined)

    def spins(self, since: float) -> bool:
        """Whether a transfer of GPU memory that began after ``since`` is in flight: a pause would be a part of it."""
        return any(transfer.gpu and transfer.request.started > since for transfer in self._live)

    def start(self, request: TransferRequest, now: float) -> None:
        """Check a request and start it; its future gets the error, if any."""
        transfer = _Transfer(request)
        try:
            if self._closed:
                raise TransferError("unavailable", self._closed)
            if request.deadline <= now:
                raise TransferError("timeout", "the deadline passed before it began")
            self._prepare(transfer)
        except TransferError as error:
            self._fail(transfer, error.cause, error.message)
        except (TypeError, ValueError) as error:  # not ids: an error of the caller's
            self._fail(transfer, "refused", repr(error))
        else:
            self._live.append(transfer)

    def forget(self, agent: str, now: float) -> None:
        """The peer has ended."""
        for transfer in [transfer for transfer in self._live if transfer.peer == agent]:
            self._abort(transfer, "peer_lost", f"agent {agent} has ended", now)
        self._peers.lost(agent)

    def drain(self, future: "Future[None]") -> None:
        """Complete the future when this agent has been driven for long enough that no old bytes can arrive any more."""
        if self._closed:
            future.set_result(None)
        else:
            self._drains.append(_Drain(DRAIN_S, future))

    def step(self, now: float, clock: Callable[[], float]) -> bool:
        """Drive everything once; returns whether anything began or ended."""
        self.agent.progress()
        self._drain(min(now - self._stepped, TICK_S))
        if now - self._stepped > TICK_S:
            self._resumed = now
        self._stepped = now
        moved = [self._advance(transfer, clock) for transfer in list(self._live)]
        ended = [self._settle(held) for held in list(self._quarantined)]
        for transfer in [transfer for transfer in self._live if transfer.request.deadline <= now]:
            waited = now - transfer.request.started
            self._abort(transfer, "timeout", f"nothing ended within {waited:.1f} s with agent {transfer.peer}", now)
        if self._quarantined and now - self._quarantined[0].since > self._quarantine_s:
            self.renew(now)
        return any(moved) or any(ended)

    def renew(self, now: float) -> None:
        """Replace the agent: only that ends a transfer whose peer is stopped.

        Raises:
            TransportUnavailable: no new agent can be made.
        """
        if self._closed:
            return
        self.end("peer_lost", "the agent had to be renewed", now)
        self._renewals += 1
        self._open(f"{self._name}.{self._renewals}")
        self._renewed(self.agent.endpoint)

    def end(self, cause: Cause, reason: str, now: float) -> None:
        """Fail everything and close the agent; afterwards nothing moves and all blocks are free."""
        self._closed = reason
        for transfer in list(self._live):
            self._abort(transfer, cause, reason, now)
        for held in self._quarantined:
            if held.posted.handle is not None:
                self.agent.release(held.posted.handle)
        self.agent.close()
        self._peers = LoadedPeers(self.agent)
        free, self._quarantined = self._quarantined, []
        for each in free:
            staging, (handle, part) = each.transfer.staging, (each.posted.handle, each.posted.part)
            if staging is not None and part >= 0 and (handle is not None or staging.wait(part)):
                staging.free(part)
            each.settled.set_result(None)
        self._drain(DRAIN_S)

    def stats(self) -> TransportStats:
        """From any thread; the figures may be of slightly different times."""
        held = list(self._quarantined)
        return TransportStats(
            live=len(self._live),
            quarantined_transfers=len(held),
            quarantined_blocks=sum(each.posted.at_risk for each in held),
            peers=len(self._peers),
            transfers=self._transfers,
            bytes_read=self._bytes["READ"],
            bytes_written=self._bytes["WRITE"],
            seconds=self._seconds,
            failures=dict(self._failures),
            renewals=self._renewals,
            registered_bytes=0 if self._closed else pools_bytes(self.agent.endpoint),
            buffer_bytes=0
            if self._closed
            else self._scratch.bytes + sum(each.bytes for made in list(self._staging.values()) for each in list(made)),
        )

    def _drain(self, seconds: float) -> None:
        for drain in list(self._drains):
            drain.left -= seconds
            if drain.left <= 0:
                self._drains.remove(drain)
                drain.future.set_result(None)

    def _prepare(self, transfer: _Transfer) -> None:
        """
        Raises:
            TransferError: it cannot be done.
        """
        request, own = transfer.request, self.agent.endpoint
        peer = request.peer
        if request.op == "CONNECT":
            blocks.check_peer(own, peer)
            reads = request.reads and path_between(own, peer) == "read"
            for name in own.pools.keys() & peer.pools.keys() if reads else ():
                if blocks.differ_in_heads(own.pools[name], peer.pools[name]):
                    self._staging_for(own.pools[name], request.started)
            self._peers.load(peer)
            if peer_pool := next((pool for pool in peer.pools.values() if pool.block_bytes), None):
                transfer.scratch = self._scratch.take(WARM_BYTES)
                transfer.moves = iter([blocks.first_bytes(peer_pool, transfer.scratch.ctypes.data, WARM_BYTES)])
            return
        blocks.check_pool(own, peer, request.pool)
        own_pool, peer_pool = own.pools[request.pool], peer.pools[request.pool]
        if request.op == "COMPARE":
            blocks.check_ids(peer_pool, peer_pool, request.remote, request.remote, ())
            blocks.check_generations(peer_pool, request.remote, request.generations)
            self._peers.load(peer)
            return
        split = own_pool.all_heads or peer_pool.all_heads
        if split and request.op == "WRITE":
            raise TransferError(
                "refused",
                f"agent {peer.agent}: blocks that ranks share are read, by shared memory or RDMA, not written",
            )
        blocks.check_ids(
            own_pool,
            peer_pool,
            request.local,
            request.remote,
            request.local if request.op == "READ" else request.remote,
        )
        if request.generations:
            blocks.check_generations(peer_pool, request.remote, request.generations)
        if split and request.layers is not None:
            raise TransferError("refused", f"agent {peer.agent}: blocks that ranks share are read with all layers")
        span = blocks.span_of(own_pool, request.layers)
        staged = blocks.differ_in_heads(own_pool, peer_pool)
        if staged:
            transfer.staging = self._staging_for(own_pool, request.started)
        self._peers.load(peer)
        # Only a direct copy between processes blocks the thread; an asynchronous one goes in one piece.
        direct = own_pool.kind == peer_pool.kind == "cpu" and own.host == peer.host != ""
        transfer.gpu = own_pool.kind == peer_pool.kind == "cuda"
        if transfer.staging is not None:
            transfer.moves, transfer.size = blocks.staged_pieces(
                own_pool, peer_pool, request.local, request.remote, transfer.staging.part_bytes
            )
            return
        transfer.size = len(request.local) * (span.end - span.start)
        transfer.moves = blocks.copy_ops(
            own_pool, peer_pool, request.local, request.remote, in_one_piece=not direct, span=span
        )

    def _staging_for(self, pool: Memory, now: float) -> StagingBuffer:
        """
        Raises:
            TransferError: unavailable; there is no memory for it, or it cannot be registered.
        """
        key = pool.kind, pool.device
        made = self._staging.get(key, [])
        if usable := next((each for each in made if not self._stuck(each, now)), None):
            return usable
        again, reason = self._unstaged.get(key, (now, ""))
        if now < again:
            raise TransferError("unavailable", reason)
        if len(made) == BUFFERS:
            held = sorted({each.transfer.peer for each in self._quarantined} | {each.peer for each in self._live})
            raise TransferError("unavailable", f"stopped peers hold all staging buffers; one or more of {held[:8]}")
        pools = [each for each in self.agent.endpoint.pools.values() if each.kind == pool.kind]
        try:
            # As large as the first: a transfer is cut into its pieces before it knows that it reads into another.
            largest = max(pools, key=blocks.whole_block_bytes)
            staging = StagingBuffer(largest, made[0].part_bytes if made else 0)
            staging.register(self.agent)
        except TransferError as error:
            self._unstaged[key] = now + RETRY_S, error.message
            raise
        self._staging[key] = [*made, staging]
        return staging

    def _stuck(self, staging: StagingBuffer, now: float) -> bool:
        """Whether stopped peers hold all parts; a pause of this process says nothing about peers."""
        return staging.stuck(now) and now - self._resumed > STUCK_S

    def _advance(self, transfer: _Transfer, clock: Callable[[], float]) -> bool:
        """Post the next pieces, and poll those posted; returns whether either made progress."""
        moved = posted = False
        try:
            moved = self._post_next(transfer, clock)
            posted = bool(transfer.posted)
            moved |= self._poll(transfer)
        except PeerLost as error:
            self._peers.lost(transfer.peer)
            if posted or transfer.posted or not self._reload(transfer):
                self._abort(transfer, "peer_lost", f"agent {transfer.peer}: {error}", clock())
            return True
        except TransferRejected as error:
            self._abort(transfer, "refused", f"agent {transfer.peer}: {error}", clock())
            return True
        except TransferError as error:
            self._abort(transfer, error.cause, error.message, clock())
            return True
        if not transfer.posted and self._complete(transfer):
            self._finish(transfer, clock())
            return True
        return moved

    def _post_next(self, transfer: _Transfer, clock: Callable[[], float]) -> bool:
        """Post what can be; False: nothing.

        Raises:
            PeerLost, TransferRejected: nothing more was posted.
            TransferError: stopped peers hold all parts that it could read into.
        """
        request, posted = transfer.request, False
        while self._has_room(transfer):
            transfer.move = transfer.move or next(transfer.moves, None)
            if transfer.move is None and request.generations and transfer.scratch is None and not transfer.posted:
                transfer.scratch = self._scratch.take(blocks.span_bytes(request.remote))
                peer_pool = request.peer.pools[request.pool]
                transfer.move = blocks.generation_read(peer_pool, request.remote, transfer.scratch.ctypes.data)
            if transfer.move is None:
                break
            if not self._peers.usable(transfer.peer):
                raise PeerLost("it was lost between two pieces")
            if isinstance(transfer.move, StagedPiece):
                if not self._post_staged(transfer, transfer.move, clock()):
                    break
            else:
                op = "WRITE" if request.op == "WRITE" else "READ"
                handle = self.agent.post(op, transfer.peer, transfer.move)
                transfer.posted.append(_Posted(handle, len(request.local) if transfer.scratch is None else 0))
                self._peers.posted(transfer.peer, self._stepped)
            transfer.move = None
            posted = True
        return posted

    def _has_room(self, transfer: _Transfer) -> bool:
        reads = READS if transfer.staging is not None else 1
        return sum(each.handle is not None for each in transfer.posted) < reads

    def _post_staged(self, transfer: _Transfer, piece: StagedPiece, now: float) -> bool:
        """Read whole blocks into a part of the staging buffer; False: all parts are taken, or its peer holds enough."""
        staging = transfer.staging
        assert staging is not None
        # One that is stopped would take the second buffer, too.
        part = None if self._peers.silent(transfer.peer, now) else staging.take(now)
        if part is None:
            if not transfer.posted and self._stuck(staging, now):
                transfer.staging = self._staging_for(self.agent.endpoint.pools[transfer.request.pool], now)
            return False
        peer_pool = transfer.request.peer.pools[transfer.request.pool]
        move = blocks.whole_blocks(staging.blocks(part, peer_pool.block_bytes), peer_pool, piece.remote)
        try:
            handle = self.agent.post("READ", transfer.peer, move)
        except (PeerLost, TransferRejected):
            staging.free(part)
            raise
        transfer.posted.append(_Posted(handle, 0, part, piece.copy))
        self._peers.posted(transfer.peer, self._stepped)
        return True

    def _poll(self, transfer: _Transfer) -> bool:
        """Whether something that was posted has ended; what was read into the staging buffer is copied from there.

        Raises:
            PeerLost: it has failed, and only it.
        """
        moved = False
        for each in list(transfer.posted):
            try:
                if not self._has_ended(transfer, each):
                    continue
            except PeerLost:
                self._ended(transfer, each)
                raise
            moved = True
            if each.handle is None or each.copy is None:
                self._ended(transfer, each)
                continue
            assert transfer.staging is not None
            self._release(transfer, each)
            own_pool = self.agent.endpoint.pools[transfer.request.pool]
            each.handle, each.at_risk = None, len(each.copy.blocks)
            transfer.staging.start(each.part, own_pool, each.copy)
        return moved

    def _has_ended(self, transfer: _Transfer, posted: _Posted) -> bool:
        """
        Raises:
            PeerLost: it has failed.
        """
        if posted.handle is not None:
            return self.agent.done(posted.handle)
        assert transfer.staging is not None
        return transfer.staging.copied(posted.part)

    def _reload(self, transfer: _Transfer) -> bool:
        """Load the peer again, once: it may be running, and only the earlier connection broken."""
        if transfer.reloaded:
            return False
        transfer.reloaded = True
        try:
            self._peers.load(transfer.request.peer)
        except TransferError:
            return False
        return True

    def _complete(self, transfer: _Transfer) -> bool:
        """Whether nothing is left to be posted."""
        transfer.move = transfer.move or next(transfer.moves, None)
        return transfer.move is None and (not transfer.request.generations or transfer.scratch is not None)

    def _finish(self, transfer: _Transfer, now: float) -> None:
        request = transfer.request
        if request.generations and transfer.scratch is not None:
            wrong = blocks.stale_blocks(transfer.scratch, request.remote, request.generations)
            if wrong:
                text = f"blocks {wrong[:8]} of agent {transfer.peer} have another owner by now"
                self._fail(transfer, "stale", text)
                return
        self._remove(transfer)
        seconds = now - request.started
        if request.op in self._bytes:
            self._transfers += 1
            self._bytes[request.op] += transfer.size
            self._seconds += seconds
        request.future.set_result(TransferResult(transfer.size, seconds))

    def _abort(self, transfer: _Transfer, cause: Cause, reason: str, now: float) -> None:
        """Fail it now; what is posted goes into quarantine."""
        risky = []
        for posted in transfer.posted:
            held = _Quarantined(transfer, posted, now, Future())
            held.settled.set_running_or_notify_cancel()
            self._quarantined.append(held)
            if posted.handle is not None:
                self._peers.stuck(transfer.peer)
            if posted.at_risk:
                risky.append(held.settled)
        settled: Future[None] = Future()
        when_done(risky, lambda: settled.set_result(None))
        self._fail(transfer, cause, reason, settled)

    def _settle(self, held: _Quarantined) -> bool:
        transfer, lost = held.transfer, False
        try:
            if not self._has_ended(transfer, held.posted):
                return False
        except PeerLost:
            lost = True
        self._quarantined.remove(held)
        self._ended(transfer, held.posted, stuck=True, lost=lost)
        if not transfer.posted:
            self._free_scratch(transfer)
        held.settled.set_result(None)
        return True

    def _ended(self, transfer: _Transfer, posted: _Posted, *, stuck: bool = False, lost: bool = False) -> None:
        if posted.handle is not None:
            self._release(transfer, posted, stuck=stuck, lost=lost)
        if transfer.staging is not None and posted.part >= 0:
            transfer.staging.free(posted.part)
        transfer.posted.remove(posted)

    def _release(self, transfer: _Transfer, posted: _Posted, *, stuck: bool = False, lost: bool = False) -> None:
        self.agent.release(posted.handle)
        self._peers.ended(transfer.peer, self._stepped, stuck=stuck, lost=lost)

    def _fail(self, transfer: _Transfer, cause: Cause, reason: str, settled: "Future[None] | None" = None) -> None:
        self._failures[cause] += 1
        self._remove(transfer)
        transfer.request.future.set_exception(TransferError(cause, reason, settled))

    def _remove(self, transfer: _Transfer) -> None:
        if transfer in self._live:
            self._live.remove(transfer)
        if not transfer.posted:
            self._free_scratch(transfer)

    def _free_scratch(self, transfer: _Transfer) -> None:
        if transfer.scratch is not None:
            self._scratch.free(transfer.scratch)
            transfer.scratch = None
