"""Passes requests from stage to stage: encode → prefill → decode.

    encode     load and encode the media, hand off the embeddings (``Encoded``)
    prefill    compute the prompt, sample the first token, hand off the KV (``Prefilled``)
    decode     fetch the KV, generate the rest

Whatever could not be transferred is computed here; a request never fails because a transfer did.

A worker that computes a prompt may also read its first blocks from the prefix cache of another one, which the router
names (``jobs.Move``). The source finds them at once and pins them under a short lease; here they enter the prefix cache
before the request does, which then starts like any other whose prefix is cached.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog

from penstock.infra.bus import memory_storage
from penstock.infra.bus.client import Frame
from penstock.infra.bus.puller import ACK
from penstock.schemas import contents, control, jobs, wire
from penstock.schemas.control import Fetch, Ok, PinPrefix, PrefixPinned, Push, Pushed, Release, Reserve
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import ConnectorUse
from penstock.schemas.jobs import Stage
from penstock.schemas.subjects import HEADER_LOAD
from penstock.schemas.transfer import PREFIX, Encoded, Prefilled, Ticket
from penstock.workers.disagg.block_reserver import AnnouncedPrompts, BlockReserver, freeing, to_read
from penstock.workers.disagg.embedding_stage import EmbeddingStage
from penstock.workers.disagg.ledger import TransferLedger
from penstock.workers.disagg.owner import Owner
from penstock.workers.disagg.reader import BlockReader, PeerWatcher
from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engines.engine_protocol import (
    BlockReservation,
    Engine,
    EngineInfo,
    EngineStats,
    KvTransfer,
    PinnedPrompt,
    RequestError,
    VisionEngine,
    kv_transfer_of,
)
from penstock.workers.kv_transfer.transport_protocol import DRAIN_S, TransferError, Transport
from penstock.workers.session.request_runner import SessionContext, StageInput
from penstock.workers.session.requests import RunningRequest, next_job, prompt_digests, stamps, ticket_id

log = structlog.get_logger("worker")

ANNOUNCED = "-announced"  # after a worker's id, in the subject of what is announced to it
OTHER_WEIGHTS = "its first tokens came from another revision of the model"
BLOCK_WAIT_S = 5.0  # how long a handoff waits for free blocks before the prompt is queued like any other
LEASE_MARGIN_NS = 1_000_000_000
TRUST_POLL_S = 0.02
MOVE_S, MOVE_TOKEN_S = 0.25, 50e-6  # for reading a prefix: to begin, and of each token; computing takes about as long
SILENT_S = 5.0  # for so long a source that did not answer, or could not be reached, is not asked again
STAGE_PUBLISH_S = 30.0  # how long publishing to the next stage is tried


class Submit(Protocol):
    def __call__(
        self, running: RunningRequest, reservation: BlockReservation | None = None, opaque: bytes = b""
    ) -> None:
        """Give a request to the engine, with its reservation or with what the engine needs to fetch the KV."""


class DisaggCoordinator:
    """The stages of one session. Each wait is bounded by the deadline, the lease, or the transfer timeout.

    Args:
        prefixes: of the engine, to read prefixes from other workers, and have them read its own; None: neither.
        computing_s: how long computing this many tokens of a prompt takes; 0: unknown. For the ledger.
    Attributes:
        reader: reads blocks from other workers.
        reserver: sets blocks aside for them.
    """

    def __init__(
        self,
        context: SessionContext,
        engine: EngineLoop,
        info: EngineInfo,
        transport: Transport | None,
        vision: VisionEngine | None,
        submit: Submit,
        prefixes: KvTransfer | None = None,
        computing_s: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        settings, bus, metrics = context.settings, context.bus, context.metrics
        self._context = context
        self._bus = bus
        self._requests = context.requests
        self._terminal = context.terminal
        self._info = info
        self._transport = transport
        self._submit = submit
        self._metrics = metrics
        self._prefixes = prefixes if transport is not None else None
        self._computing_s = computing_s
        self._silent: dict[str, float] = {}  # source -> when it may be asked for a prefix again, monotonic
        quarantine_s = settings.transfer_timeout_s + settings.quarantine_s + DRAIN_S
        self.reserver = BlockReserver(engine, context.requests, quarantine_s)
        self._ledger = TransferLedger(bus, context.outbox, context.id, metrics)
        self._owner: Owner | None = None
        self._announcements: Any = None  # the subscription
        self._announced: AnnouncedPrompts | None = None  # by prefill workers
        # Request for which a decode worker probably has blocks -> whether it was asked to read all layers.
        self._announced_to: dict[str, bool] = {}
        self.reader: BlockReader | None = None
        self._peers: PeerWatcher | None = None
        if transport is not None or info.handoff_layout:
            self._owner = Owner(
                engine, transport, self._ledger, context.id, settings.handoff_lease_s, metrics, context.tasks, bus.clock
            )
            self.reader = BlockReader(
                bus, transport, self._ledger, context.id, settings.transfer_timeout_s, settings.quarantine_s
            )
        if transport is not None:
            self._peers = PeerWatcher(
                bus,
                transport,
                context.id,
                context.model.name,
                settings.role,
                self._on_peer_lost,
                moves_prefixes=prefixes is not None,
            )
            if settings.role == "decode" and self.reader is not None:
                self._announced = AnnouncedPrompts(engine, self.reserver, context.tasks, self.reader)
        self._embeddings = EmbeddingStage(context, engine, vision, self.reserver, self._owner, self.reader)

    # --- start and stop ---

    async def open(self) -> None:
        """
        Raises:
            ServingError: the workers bucket cannot be read.
        """
        if self.reader is not None:
            await self.reader.open()
        if self._announced is not None:
            # FastStream's own turns, in a worker that was idle, take half a millisecond: as long as the message.
            # A subject of their own: where two subscriptions have a request, the broker refuses its answer.
            subject = self._bus.subjects.control(self._context.id + ANNOUNCED)
            self._announcements = await self._bus.nc.subscribe_direct(subject, self._on_control)
        if self._peers is not None:
            await self._peers.start()

    def sweep(self, now: float) -> None:
        """End expired leases and peers; called several times a second."""
        if self._owner is not None:
            self._owner.sweep(now)
        if self._peers is not None:
            self._peers.sweep()

    @property
    def open_leases(self) -> int:
        """Blocks held for other workers' requests, by ticket."""
        return (self._owner.open if self._owner is not None else 0) + len(self._announced or ())

    @property
    def announces(self) -> bool:
        """Whether this worker says so when a prompt is about to end."""
        return self._peers is not None and self._context.settings.role == "prefill"

    @property
    def reserves(self) -> bool:
        """Whether it takes such announcements."""
        return self._announced is not None

    def use(self, stats: EngineStats) -> ConnectorUse | None:
        """What is held for handoffs; None: this worker makes none. ``stats``: the engine's latest."""
        if self._owner is None:
            return None
        info, leases = self._info, self._owner.open
        if self._transport is None:
            # Its leases name no blocks: the engine counts those itself.
            return ConnectorUse(
                info.connector, leases=leases, pinned_blocks=stats.pinned_blocks, buffer_tokens=info.connector_tokens
            )
        moved = self._transport.stats()
        return ConnectorUse(
            self._transport.endpoint.backend,
            moved.registered_bytes,
            moved.buffer_bytes,
            moved.live,
            leases,
            self._owner.pinned_blocks,
            stats.reserved_blocks,
            moved.quarantined_blocks,
        )

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.stop()
        if self._announced is not None:
            if self._announcements is not None and not self._bus.nc.is_closed:
                await self._announcements.unsubscribe()
            await self._announced.close()
        if self._owner is not None:
            await self._owner.close()
        if self.reader is not None:
            await self.reader.close()
        self._embeddings.close()
        await self._ledger.close()

    def _on_peer_lost(self, worker: str) -> None:
        self._silent.pop(worker, None)
        if self._owner is not None and self.reader is not None:
            self._owner.lost(worker)
            self.reader.lost(worker)
        if self._announced is not None:
            self._announced.lost(worker)

    # --- control requests ---

    def _on_control(self, frame: Frame) -> None:
        order = control.decode_worker(frame.data)
        if isinstance(order, Reserve | Fetch):
            self.expect(order)

    def expect(self, order: Reserve | Fetch) -> None:
        """The prefill of a request that is to continue here ends soon, or has ended."""
        if self._announced is None:
            return
        if isinstance(order, Fetch):
            self._announced.fetch(order.ticket, order.layers)
            return
        request, attempt, _ = order.ticket.rsplit(":", 2)
        if not (self._requests.knows(request, int(attempt)) or self._context.lease.gone):
            self._announced.reserve(order)

    def release(self, order: Release) -> Ok:
        if self._announced is not None and self._announced.drop(order.ticket):
            return Ok()
        return self._owner.release(order) if self._owner is not None else Ok(error="this worker pins no blocks")

    async def push(self, order: Push) -> Pushed:
        if self._owner is None:
            return Pushed("refused", "this worker pins no blocks")
        return await self._owner.push(order)

    def pin_prefix(self, order: PinPrefix) -> PrefixPinned:
        if self._owner is None or self._prefixes is None:
            return PrefixPinned(cause="this worker has no prefixes read")
        return self._owner.pin_prefix(order, self._prefixes)

    # --- prefixes of other workers ---

    def may_read_prefix(self, running: RunningRequest) -> bool:
        """Whether ``read_prefix`` is worth a try."""
        move = jobs.move_of(running.job) if running.job is not None else None
        if move is None or self._prefixes is None or self.reader is None:
            return False
        request = running.request
        if request.media or request.sampling.prompt_logprobs is not None:
            return False
        if time.monotonic() < self._silent.get(move.source, 0.0):
            self._metrics.moves.failed.labels("silent").inc()
            return False
        return True

    async def read_prefix(self, running: RunningRequest) -> None:
        """Read a prefix that another worker caches, as far as it has it, then run the request."""
        try:
            await self._read_prefix(running)
        except TransferError as error:
            source = _move_of(running).source
            if error.cause in ("timeout", "peer_lost"):
                self._silent[source] = time.monotonic() + SILENT_S
            self._metrics.moves.failed.labels(error.cause).inc()
            log.info("prefix_not_read", request=running.request.id, source=source, cause=error.cause, error=str(error))
        except Exception:
            self._metrics.moves.failed.labels("internal").inc()
            log.exception("prefix_not_read", request=running.request.id, cause="internal")
        if self._requests.is_current(running):
            self._submit(running)

    async def _read_prefix(self, running: RunningRequest) -> None:
        """
        Raises:
            TransferError: nothing was read.
        """
        request, size = running.request, self._info.block_size
        move, cache, reader = _move_of(running), self._prefixes, self.reader
        assert cache is not None
        assert reader is not None
        began = time.monotonic()
        most = min(move.blocks, (request.prompt_tokens - 1) // size)  # the last token is computed, for its logits
        names = prompt_digests(request, self._context.model.revision, size)[:most]
        have = len(cache.find(names).blocks)
        if have == len(names):
            return
        within_s = MOVE_S + MOVE_TOKEN_S * size * (len(names) - have)
        ticket_id = f"{request.id}:{running.attempt}:{PREFIX}"
        ticket = await reader.pin_prefix(move.source, ticket_id, names, within_s)
        try:
            names = names[: len(ticket.blocks) // 4]
            if len(names) <= have:
                raise TransferError("stale", "the source has no more than is cached here")
            reservation = await self.reserver.reserve(
                running,
                0.0,  # blocks that are not free now are not waited for
                "kv",
                lambda engine: kv_transfer_of(engine).reserve(names, 0, 0),
                lambda engine, blocks: kv_transfer_of(engine).release(blocks),
            )
            if reservation is None:
                raise TransferError("refused", "there are too few free blocks here")
            blocks = len(names) - reservation.have
            with self.reserver.freed_if_it_fails(freeing(reservation)):
                if not (blocks or reservation.fills):
                    raise TransferError("stale", "the prefix was computed here meanwhile")
                positions = range(reservation.have, len(names))
                local = reservation.blocks[reservation.have :]
                computing_s = self._computing_s(size * blocks)
                moved = await reader.fetch(ticket, positions, local, reservation.fills, within_s, computing_s)
        finally:
            reader.release(ticket)
        self.reserver.free(lambda engine: _enter_cache(kv_transfer_of(engine), reservation))
        self._metrics.moves.moved(blocks, moved.bytes, time.monotonic() - began)

    # --- encode ---

    async def encode(self, running: RunningRequest) -> None:
        """Encode stage: hand the embeddings to the next stage."""
        encoded = await self._embeddings.encode(running)
        if encoded is not None:
            await self._publish_stage(running, encoded)

    async def load_embeddings(self, running: RunningRequest, stage_input: StageInput | None) -> None:
        """Get the embeddings of a request's media, then run it."""
        encoded = stage_input if isinstance(stage_input, Encoded) else None
        if await self._embeddings.load(running, encoded):
            self._submit(running)

    # --- prefill ---

    def announce(self, running: RunningRequest) -> None:
        """The rest of a prompt is being computed: have the decode worker reserve blocks meanwhile, if it can."""
        request, size, stage = running.request, self._info.block_size, running.route[0]
        if (
            self._peers is None
            or not self._peers.reserves(stage.worker)
            or request.stop.max_tokens == 1  # it ends here
            or not self._requests.is_current(running)
            or not self._context.lease.trusted()
        ):
            return
        names = prompt_digests(request, self._context.model.revision, size)
        users = sum(outcome is None for outcome in running.outcomes)
        tails = users if request.prompt_tokens % size else 0
        self._announced_to[request.id] = False
        tokens, ticket = request.prompt_tokens, ticket_id(running, stage)
        ends_s = self._computing_s(tokens)  # of the whole prompt: its last step takes no longer
        self._tell(stage, Reserve(ticket, self._context.id, b"".join(names), tails, users, tokens, ends_s))

    def written(self, running: RunningRequest, prompt: PinnedPrompt, layers: int) -> None:
        """Ask the decode worker to read the layers that an announced prompt's last step has computed so far.

        The blocks are not pinned before ``offer``. If their content changes until then, the generations show it.

        Args:
            layers: number of leading layers; 0: all.
        """
        request, stage = running.request, running.route[0]
        if (
            self._owner is None
            or self._peers is None
            or self._announced_to.get(request.id) is not False
            or not self._peers.reads(stage.worker, layers)
            or not self._requests.is_current(running)
            or not self._context.lease.trusted()
        ):
            return
        self._announced_to[request.id] = not layers
        ticket = self._owner.ticket(ticket_id(running, stage), "kv", prompt.blocks, prompt.generations)
        self._tell(stage, Fetch(ticket, layers))

    def withdraw(self, running: RunningRequest) -> None:
        """A request ends here: if it was announced, it is not handed off."""
        if self._announced_to.pop(running.request.id, None) is not None:
            stage = running.route[0]
            self._tell(stage, Release(ticket_id(running, stage), self._context.id))

    def _tell(self, stage: Stage, order: Reserve | Fetch | Release) -> None:
        """Ask for no answer: what is lost, or not sent while the connection is down, is done later or ends itself."""
        to = stage.worker + ("" if isinstance(order, Release) else ANNOUNCED)
        self._bus.nc.post(self._bus.subjects.control(to), wire.encode(order))

    def offer(self, running: RunningRequest) -> Ticket | None:
        """All sequences have their first token, or leave it to the next engine: the decode worker may read the KV.

        It does so at once if it has reserved blocks. Otherwise it needs the request, too (``send_prefilled``).
        """
        stage, pinned = running.route[0], running.pinned
        if pinned is None:
            return None
        assert self._owner is not None
        holder = pinned.key

        def free(engine: Engine) -> object:
            return engine.release_pinned(holder)

        ticket = self._owner.offer(
            ticket_id(running, stage),
            stage.worker,
            "kv",
            pinned.blocks,
            pinned.generations,
            free,
            windows=pinned.windows,
        )
        if self._announced_to.get(running.request.id) is False and self._context.lease.trusted():
            self._tell(stage, Fetch(ticket))
        return ticket

    async def send_prefilled(self, running: RunningRequest, ticket: Ticket | None) -> None:
        """Hand a request over with the ticket of its KV."""
        pinned = running.pinned
        if pinned is None or ticket is None:
            self._terminal.requeue(running, "no blocks to hand off")
            return
        job = msgspec.Raw(wire.encode(next_job(running, self._context.model.revision)))
        offset_ns = self._bus.clock.offset_ns
        prefilled = Prefilled(
            running.request.id,
            running.attempt,
            job,
            ticket,
            running.cached,
            *running.times(offset_ns),
            pinned.opaque,
            stamps(running, offset_ns),
        )
        await self._publish_stage(running, prefilled)

    async def _publish_stage(self, running: RunningRequest, message: StageInput) -> None:
        """Store the message for the next stage, then acknowledge this stage's job."""
        assert self._owner is not None
        request, stage, ticket = running.request, running.route[0], message.ticket
        try:
            if not await self._wait_for_lease(running, min(ticket.lease_ns, request.deadline_ns)):
                self._owner.release_ticket(ticket.id, "not_published")
                self._terminal.requeue(running, "the handoff could not be published: the lease is in doubt")
                return
            body, part = await self._encode(running, message)
            await self._context.publisher.publish(
                self._bus.subjects.work(stage.role, stage.worker),
                body,
                f"{request.id}:{running.attempt}:{stage.role}",
                headers=jobs.headers_of(
                    _load_header(running, message),
                    wire.content_type(type(message)),
                    no_store=request.no_store,
                    part=part,
                    suspect=running.job.suspect if running.job is not None else "",
                ),
                timeout=STAGE_PUBLISH_S,
            )
        except ServingError as error:
            self._owner.release_ticket(ticket.id, "not_published")
            if error.code is Code.body_too_large:
                await self._terminal.end(running, error.code, error.message)
            else:
                self._terminal.requeue(running, f"the handoff could not be published: {error.message}")
            return
        except Exception:
            self._owner.release_ticket(ticket.id, "not_published")
            raise
        await self._bus.nc.publish(running.delivery.reply, ACK)
        self._on_handed_off(running)

    async def _encode(self, running: RunningRequest, message: StageInput) -> tuple[bytes, str]:
        """A message as WORK holds it, and the part that has it whole, which is stored in memory storage first.

        Raises:
            ServingError: it could not be put there.
        """
        request, body = running.request, wire.encode(message)
        if not (request.no_store and contents.has_content(message)):
            return body, ""
        part = contents.part_of(running.attempt, running.route[0].role)
        stored = await memory_storage.put(
            self._bus,
            self._context.publisher,
            request,
            part,
            body,
            now_ns=self._bus.clock.now_ns(),
            timeout=STAGE_PUBLISH_S,
        )
        await stored
        return wire.encode(contents.shell_of(message)), part

    async def _wait_for_lease(self, running: RunningRequest, until_ns: int) -> bool:
        """Wait until this worker's lease is trusted: another worker may have the request by now."""
        while not self._context.lease.trusted():
            if self._bus.clock.now_ns() >= until_ns or not self._requests.owns(running):
                return False
            await asyncio.sleep(TRUST_POLL_S)
        return self._requests.owns(running)

    def _on_handed_off(self, running: RunningRequest) -> None:
        """The next stage has the request."""
        self._announced_to.pop(running.request.id, None)
        self._context.metrics.handed_off(running.routed_ns, *running.times(self._bus.clock.offset_ns))
        self._requests.mark_ended(running.request.id, running.attempt)
        running.kv_holder = None  # the ticket's lease holds the blocks
        self._requests.remove(running, cancel=False)

    # --- decode ---

    async def on_prefilled(self, running: RunningRequest, prefilled: Prefilled) -> None:
        """Fetch the prompt's KV, or compute it here, and run the request."""
        running.cached = prefilled.cached
        running.prefilled = True
        offset_ns = self._bus.clock.offset_ns  # those of a request are by this machine's clock
        running.started_ns = prefilled.started_ns and prefilled.started_ns - offset_ns
        running.first_token_ns = prefilled.first_token_ns and prefilled.first_token_ns - offset_ns
        if prefilled.opaque and self.reader is not None and self._bus.clock.now_ns() < prefilled.ticket.lease_ns:
            if running.request.media and self._info.media_with_kv and not await self._embeddings.load(running, None):
                self.release_input(prefilled)
                return
            if self._replaced(running):
                self.release_input(prefilled)
                self._terminal.requeue(running, OTHER_WEIGHTS)
                return
            running.fetching = prefilled.ticket
            for sequence in running.sequences if prefilled.started_ns else ():  # else handed over ahead of the prompt
                sequence.adopted_cached = prefilled.cached
            self._submit(running, opaque=prefilled.opaque)
            return
        reservation: BlockReservation | None = None
        try:
            reservation = await self._fetch_kv(running, prefilled.ticket)
        finally:
            self.release_input(prefilled)
        replaced = self._replaced(running)
        if replaced or not self._requests.is_current(running):
            if reservation is not None:
                self.reserver.free(freeing(reservation))
            if replaced and self._requests.is_current(running):
                self._terminal.requeue(running, OTHER_WEIGHTS)
        elif reservation is not None or not running.request.media:
            for sequence in running.sequences if reservation is not None else ():
                sequence.adopted_cached = prefilled.cached
            self._submit(running, reservation)
        else:
            await self.load_embeddings(running, None)

    def _replaced(self, running: RunningRequest) -> bool:
        """Whether the weights were, since the request came, which may have waited for its constraint or its KV."""
        return self._context.model.revision != running.revision

    def release_input(self, stage_input: StageInput) -> None:
        """Release the previous stage's blocks: they are no longer needed."""
        if self._announced is not None:
            self._announced.drop(stage_input.ticket.id)
        if self.reader is not None:
            self.reader.release(stage_input.ticket)

    def on_fetched(self, running: RunningRequest) -> None:
        """The engine has fetched what the previous stage's engine kept for it."""
        ticket, running.fetching = running.fetching, None
        if ticket is not None and self.reader is not None:
            self.reader.record_fetched(ticket, 0.0)
            self.reader.release(ticket)

    async def _fetch_kv(self, running: RunningRequest, ticket: Ticket) -> BlockReservation | None:
        """Blocks with the prompt's KV; None: there are no free blocks, or the transfer failed."""
        request, size = running.request, self._info.block_size
        tokens = request.prompt_tokens
        full, rest = divmod(tokens, size)
        count = len(ticket.blocks) // 4
        if self.reader is None or count != full + bool(rest):
            log.warning("ticket_mismatch", ticket=ticket.id, blocks=count, tokens=tokens, block_size=size)
            return None
        digests = prompt_digests(request, self._context.model.revision, size)
        users = sum(outcome is None for outcome in running.outcomes)
        tails = users if rest else 0
        if full + tails > self._info.total_blocks:
            return None  # the engine refuses the sequences and names the limit, or runs them without these blocks
        try:
            if self._announced is not None and (announced := await self._announced.take(ticket, digests, tails, users)):
                return announced
        except TransferError:
            return None
        now_ns = self._bus.clock.now_ns()
        try:
            reservation = await self.reserver.reserve(
                running,
                min((min(ticket.lease_ns - LEASE_MARGIN_NS, request.deadline_ns) - now_ns) / 1e9, BLOCK_WAIT_S),
                "kv",
                lambda engine: kv_transfer_of(engine).reserve(digests, tails, users, tokens),
                lambda engine, blocks: kv_transfer_of(engine).release(blocks),
            )
        except RequestError:
            return None  # likewise
        if reservation is None:
            return None
        positions, local = to_read(reservation)
        try:
            if positions or reservation.fills:
                with self.reserver.freed_if_it_fails(freeing(reservation)):
                    await self.reader.fetch(ticket, positions, local, reservation.fills)
        except TransferError:
            return None
        return reservation


def _move_of(running: RunningRequest) -> jobs.Move:
    move = jobs.move_of(running.job) if running.job is not None else None
    assert move is not None
    return move


def _enter_cache(cache: KvTransfer, reservation: BlockReservation) -> None:
    """Blocks that were read are cached from now on, like those of a prompt that was computed and has ended."""
    cache.adopt(reservation)
    cache.release(reservation)


def _load_header(running: RunningRequest, message: StageInput) -> str:
    request = running.request
    return jobs.load_header(
        request.prompt_tokens,
        running.cached if isinstance(message, Prefilled) else _expected_cached(running),
        request.token_address,
        request.deadline_ns,
        request.priority.value,
        request.n,
        running.route,
    )


def _expected_cached(running: RunningRequest) -> int:
    """Prompt tokens that the router expects the next stage to have cached, as of placing the request."""
    try:
        return jobs.read_load_header(running.delivery.headers[HEADER_LOAD]).cached_tokens
    except (KeyError, TypeError, ValueError):
        return 0
