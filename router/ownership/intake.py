"""The requests that this router handles: those of its models from the log, and those that other routers pass on.

One router places the requests of a model, because decisions are best with one queue and one view of the load. A router
is one process on one core, so its rate is limited; requests beyond it go to other cells.

Requests that a lost router had read and not placed are delivered again at once, not only after the consumer's ack_wait.
No API of the broker lists the messages that a consumer waits for. But a client that may publish to an acknowledgement
subject can reject any message, and rejecting one that is not waited for has no effect. So every sequence between the
acknowledgement floor and the last delivered one is rejected, without reading any.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get
from penstock.infra.bus.jetstream import Message
from penstock.infra.bus.puller import NAK, Puller, config_of, is_of, make_again, present, sequence
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.turns import TimeSlice
from penstock.router.held.held_requests import READ_AHEAD, HeldRequests
from penstock.router.ownership.membership import Membership
from penstock.router.placement.pending import PendingRequest
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas import routers
from penstock.schemas.requests import Priority, stored_as_fallback
from penstock.schemas.routers import LostLeases
from penstock.schemas.streams import LONGEST_DEADLINE_S, ConsumerSpec, topology
from penstock.schemas.subjects import request_of, token


class BackgroundTasks:
    """Tasks for single requests. A failure is logged and ends nothing else: the request is delivered again.

    Its message is delivered again after ack_wait, and the scan for orphans finds a request that was placed.
    """

    def __init__(self, bus: Bus, tasks: Tasks) -> None:
        self._bus = bus
        self._tasks = tasks

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        def failed(error: BaseException) -> None:
            log.error("router_task_failed", task=name, error=repr(error), exc_info=error)

        self._tasks.spawn(work, name=name, on_failure=failed)

    def acknowledge(self, reply: str, verdict: bytes) -> None:
        """Send the verdict on a message, without waiting for it."""
        if not self._bus.nc.post(reply, verdict, later=True):
            self.spawn(self._bus.nc.publish(reply, verdict), "verdict")


log = structlog.get_logger("router")

INFO_S = 2.0
MOST = 200_000  # further back, requests wait for ack_wait


async def redeliver(bus: Bus, stream: str, consumer: str, held: Collection[int]) -> int:
    """Reject what is delivered and not acknowledged; returns how many that were, ``held`` included.

    Args:
        held: sequences that this router holds itself.
    Raises:
        nats.errors.Error, TimeoutError: the broker did not answer; ack_wait does the same a second later.
    """
    info = await bus.js.consumer_info(stream, consumer, timeout=INFO_S)
    if not info.num_ack_pending or info.ack_floor is None or info.delivered is None:
        return 0
    first = max(info.ack_floor.stream_seq + 1, info.delivered.stream_seq - MOST)
    time_slice = TimeSlice()
    for seq in range(first, info.delivered.stream_seq + 1):
        if seq not in held:
            # Deliveries, stream sequence, consumer sequence (any that is in range), time, pending.
            await bus.nc.publish(f"$JS.ACK.{stream}.{consumer}.1.{seq}.{info.delivered.consumer_seq}.0.0", NAK)
        await time_slice.yield_if_spent()
    log.info("unplaced_requests_returned", consumer=consumer, pending=info.num_ack_pending, first=first)
    return int(info.num_ack_pending)


# A stopped router's open requests still take messages. They end soon, and not at once together: a class without one may
# look to gateways as if there were no router.
EXPIRES_S = {Priority.interactive: 0.9, Priority.standard: 1.0, Priority.batch: 1.1}
# After a lease ended. Until then a stopped router's pull requests may take a part of the redelivered messages.
AGAIN_S = max(EXPIRES_S.values()) - routers.LEASE_S + 0.1
PASS_ON_S = 1.0
READ_AGAIN_S = 5.0  # at most, in a cluster also from another server
STANDBY_PAUSE_S = 0.02  # between two reads of a router that owns nothing: a takeover comes later by as much
_RESERVED = "$"  # the server refuses messages whose reply is "$JS.ACK…", so it travels without


class PassedOn(NamedTuple):
    """A request that another router read from the log."""

    subject: str
    data: bytes
    reply: str
    headers: dict[str, str] | None = None


async def read_again(bus: Bus, pending: PendingRequest) -> bool:
    """Read what was left in the log of a held request (``PendingRequest.raw``); False: the log has it no longer.

    Raises:
        ServingError: the broker did not answer.
    """
    if pending.raw:
        return True
    if not pending.reply:  # the stream with its message was lost
        return False
    entry = await get(bus, bus.subjects.stream("REQUESTS"), sequence(pending.reply), within_s=READ_AGAIN_S)
    if entry is None or request_of(entry.headers) != pending.request.id:
        return False
    pending.raw, request = entry.data, pending.request
    if request.fallback:  # the log has what was asked for
        try:
            _, pending.raw = stored_as_fallback(entry.data, request.fallback, request.fell_back_at)
        except (msgspec.MsgspecError, IndexError) as error:
            log.error("fallback_unreadable", request=request.id, error=repr(error))
            pending.raw = b""
            return False
    return True


class Intake:
    """
    Args:
        handle: takes one request of this router.
        space: further requests of a class that may be read from the log.
        owners_changed: called at once when this router owns more models, or fewer.
        taken_over: called after another router was lost, whose models this one may own now.
        resuming: requests that are neither placed nor held yet (``Recovery.resuming``).
        lost_leases: of workers, for operators.
    """

    def __init__(
        self,
        bus: Bus,
        router: str,
        *,
        tracker: LoadTracker,
        held: HeldRequests,
        background: BackgroundTasks,
        handle: Callable[[Message], Awaitable[None]],
        space: Callable[[Priority], int],
        owners_changed: Callable[[], None],
        taken_over: Callable[[], None],
        resuming: Callable[[], Iterable[PendingRequest]],
        lost_leases: Callable[[], tuple[LostLeases, ...]] = lambda: (),
    ) -> None:
        self._bus = bus
        self._id = router = token(router)  # it is a key and the end of a subject
        self._tracker = tracker
        self._held = held
        self._background = background
        self._handle = handle
        self._space = space
        self._owners_changed = owners_changed
        self._taken_over = taken_over
        self._resuming = resuming
        self._stream = bus.subjects.stream("REQUESTS")
        self._names: Mapping[str, str] = {}
        self._version = -1
        self.membership = Membership(
            bus,
            router,
            models=self._model_names,
            held=held.by_tenant,
            queued=held.by_model,
            lost_leases=lost_leases,
            gained=self._on_gained,
            lost=self._on_lost,
        )
        specs = {spec.name: spec for spec in topology(bus.subjects).consumers if spec.stream == self._stream}
        self.pullers: dict[Priority, Puller] = {}
        for priority in Priority:
            self.pullers[priority] = Puller(
                bus,
                self._stream,
                f"router-{priority.value}",
                self._on_pulled,
                functools.partial(self._room, priority),
                remake=functools.partial(self._make_again, specs[f"router-{priority.value}"]),
                expires_s=EXPIRES_S[priority],
                most=READ_AHEAD,
            )

    async def _make_again(self, spec: ConsumerSpec, last: str) -> bool:
        """From the oldest request on that is not placed; what comes twice is recognised.

        From the first one if the stream was lost and recreated. What is held of the lost one has no message any
        more: its verdict would be one on a message of the new stream.
        """
        stream = await present(self._bus, self._stream)
        start = 0
        if last and is_of(last, stream):
            start = sequence(last) + 1
        for pending in (*self._held, *self._resuming()):
            if pending.reply and not is_of(pending.reply, stream):
                pending.reply = ""
            elif pending.reply:
                start = min(start, sequence(pending.reply))
        return await make_again(self._bus, self._stream, config_of(spec), start_seq=start, since_s=LONGEST_DEADLINE_S)

    async def start(self, tasks: Tasks) -> None:
        await self._bus.nc.subscribe(self._bus.subjects.routed(self._id), cb=self._on_passed_on)
        await self.membership.start(tasks)
        for puller in self.pullers.values():
            await puller.start()
        if self.membership.alone:  # unacknowledged messages were read by a router that is gone
            self._background.spawn(self._take_over(), "own")
        tasks.spawn(self._pass_on_forever(), name="pass-on")

    async def stop(self) -> None:
        """Stop reading; other routers take over. Requests that they pass on are still handled."""
        await self.membership.stop()
        for puller in self.pullers.values():
            await puller.drain()

    async def top_up(self) -> None:
        """Read more requests, if there is space."""
        for puller in self.pullers.values():
            await puller.top_up()

    def owns(self, model: str) -> bool:
        """
        Args:
            model: any of its names.
        """
        return self.membership.owns(token(model))

    def _room(self, priority: Priority) -> int:
        return self._space(priority) if self.membership.reads else 0

    def _model_names(self) -> Mapping[str, str]:
        """The models with workers: every name as a subject token, and the model's own name as one."""
        if self._version != self._tracker.version:
            self._names = {token(name): token(model) for name, model in self._tracker.models().items()}
            self._version = self._tracker.version
        return self._names

    async def _on_pulled(self, message: Message) -> None:
        name = message.subject.split(".", 3)[2]
        if self.membership.owns(name):
            await self._handle(message)
        else:  # if that router has died, the message is delivered again
            await self._send(self.membership.owner(name), message.data, message.reply)

    async def _on_passed_on(self, message: Message) -> None:
        await self._handle(PassedOn(message.subject, message.data, _RESERVED + message.reply))

    async def _send(self, owner: str, request: bytes, reply: str) -> None:
        await self._bus.nc.publish(self._bus.subjects.routed(owner), request, reply=reply.removeprefix(_RESERVED))

    def _on_gained(self, after_loss: bool) -> None:
        self._on_owners_changed()
        self._background.spawn(self._take_over() if after_loss else self.top_up(), "own")

    def _on_owners_changed(self) -> None:
        self._bus.nc.read_pause_s = 0.0 if self.membership.reads else STANDBY_PAUSE_S
        self._owners_changed()

    async def _take_over(self) -> None:
        await self.top_up()  # first, so that requests returned below find a reader
        self._taken_over()
        try:
            await self._redeliver()
            await asyncio.sleep(AGAIN_S)
            await self._redeliver()
        except (NatsError, TimeoutError) as error:
            log.warning("unplaced_requests_not_returned", error=repr(error), action="redelivered after their ack_wait")

    async def _redeliver(self) -> None:
        held = {sequence(pending.reply) for pending in self._held if pending.reply}
        for priority in Priority:
            await redeliver(self._bus, self._stream, f"router-{priority.value}", held)

    # Held requests whose model another router owns

    def _on_lost(self) -> None:
        self._on_owners_changed()
        self._background.spawn(self._pass_on(), "pass-on")

    async def _pass_on_forever(self) -> None:
        while True:
            await asyncio.sleep(PASS_ON_S)
            await self._pass_on()

    async def _pass_on(self) -> None:
        """Pass a request on. Later attempts stay: they have no message, and every router may place them."""
        if not self.membership.shared or not self._bus.connected:
            return
        for pending in self._held:
            if not pending.reply:
                continue
            name = token(pending.request.model)
            if not self.membership.owns(name) and self._held.remove(pending.request.id) is not None:
                try:
                    if pending.raw:
                        await self._send(self.membership.owner(name), pending.raw, pending.reply)
                    else:  # the next router gets the whole message, and can pass it on
                        await self._bus.nc.publish(pending.reply, NAK)
                except (NatsError, OSError) as error:  # it is delivered again
                    log.debug("request_not_forwarded", request=pending.request.id, error=repr(error))
