"""The planner's shell: looks at the deployment, decides, has workers started and drained, and logs each decision.

One planner of a model works at a time, by a lease: a key that the broker makes only where there is none, renews only
for the one who wrote it last, and removes when it is not renewed. A planner that cannot renew in time stops deciding
before its key expires.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.js.errors import APIError

from penstock.configs.planner_settings import PATIENCE
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, read
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE
from penstock.infra.bus.publisher import Publisher
from penstock.planner.connectors import Connector, ConnectorFailed, DryRun, put_to_sleep
from penstock.planner.observe import LoadReader
from penstock.planner.worker_counts import HISTORY, Planner, PlannerState
from penstock.schemas import plans
from penstock.schemas.errors import ServingError
from penstock.schemas.plans import PlanDecision, Planned, Role, Rules
from penstock.schemas.subjects import HEADER_LAST_ON_SUBJECT
from penstock.schemas.wire import encode

log = structlog.get_logger("plan")

TTL_S = 10
RENEW_S = 2.5
LEASE_STORE_S = 2.0


class PlannerLease:
    """
    Args:
        planner: its id.
    """

    def __init__(self, bus: Bus, model: str, planner: str) -> None:
        self._bus = bus
        self._subject = bus.subjects.planner(model)
        self._stream = f"KV_{bus.subjects.bucket('planners')}"
        self._planner = planner
        self._revision = 0
        self._until = 0.0  # monotonic; the key lasts at least so long

    @property
    def held(self) -> bool:
        return time.monotonic() < self._until

    async def take(self) -> str:
        """Take the lease, or renew it.

        Returns: "": it is held. Else the planner that holds it, or "?" if that is not known.

        Raises:
            ServingError: the bucket cannot be read.
            NatsError, TimeoutError: the broker does not answer.
        """
        if not self._revision:
            last = await get_last(self._bus, self._stream, self._subject)
            if last is not None and last.data and last.data.decode() != self._planner:
                return last.data.decode(errors="replace")
            self._revision = last.seq if last is not None else 0
        began = time.monotonic()
        headers = {HEADER_LAST_ON_SUBJECT: str(self._revision), "Nats-TTL": str(TTL_S)}
        try:
            ack = await self._bus.js.publish(
                self._subject, self._planner.encode(), timeout=LEASE_STORE_S, headers=headers, stream=self._stream
            )
        except APIError as error:
            if error.err_code != WRONG_LAST_SEQUENCE:
                raise
            self._revision, self._until = 0, 0.0  # it expired, and another planner may have taken it
            return "?"
        self._revision, self._until = ack.seq, began + TTL_S - RENEW_S
        return ""

    async def give_up(self) -> None:
        """Let another planner take over at once."""
        if not self._revision or not self._bus.connected:
            return
        self._until = 0.0
        headers = {
            "KV-Operation": "PURGE",
            "Nats-Rollup": "sub",
            "Nats-TTL": "5",
            HEADER_LAST_ON_SUBJECT: str(self._revision),
        }
        try:
            await self._bus.js.publish(self._subject, b"", timeout=LEASE_STORE_S, headers=headers, stream=self._stream)
        except (NatsError, TimeoutError) as error:
            log.debug("lease_not_given_up", error=repr(error))


STANDBY_S = 2.5  # between two looks at a lease that another planner holds
TAKEN_OVER_S = TTL_S + STANDBY_S  # until a lease that is not renewed is taken over
STORE_S = 10.0
_NO_REQUEST = "no request has ended yet, and only those that did tell how long prompts and answers are"
_UNREACHABLE = (ServingError, NatsError, TimeoutError, OSError)


class NoDecision(Exception):
    """A planner that was to make some decisions could make none for ``PATIENCE`` intervals."""


class PlannerLoop:
    """
    Args:
        planner_id: of this process.
        model: whose workers are planned.
        say: called with each decision.
        others: buses of the cells after the first, which has the lease and the decisions.
    """

    def __init__(
        self,
        bus: Bus,
        planner: Planner,
        connector: Connector,
        *,
        planner_id: str,
        model: str,
        say: Callable[[Planned], None],
        others: Sequence[Bus] = (),
    ) -> None:
        self._bus = bus
        self._buses = [bus, *others]
        self._planner = planner
        self._connector = connector
        self._id = planner_id
        self._model = model
        self._say = say
        self._lease = PlannerLease(bus, model, planner_id)
        self._state = planner.begin()
        self._reader = LoadReader(bus, model, others)
        self._why_not = "its lease could not be taken"
        self._until = math.inf

    @property
    def rules(self) -> Rules:
        return self._planner.rules

    async def run(self, decisions: int = 0) -> None:
        """Decide once an interval, for as long as the lease is held; wait for it otherwise.

        Args:
            decisions: end after this many; 0: never.

        Raises:
            NoDecision: ``decisions``, and none was made for ``PATIENCE`` intervals.
        """
        made = 0
        # What another planner left behind when it died lasts as long as its lease.
        self._wait_for_the_next(decisions, TAKEN_OVER_S)
        async with Publisher(self._bus) as publisher:
            try:
                while True:
                    await self._until_held()
                    if not await self._begin():
                        await self._stand_by()
                        continue
                    self._wait_for_the_next(decisions)
                    while await self._interval():
                        if await self._decide(publisher):
                            made += 1
                            if made == decisions:
                                return
                            self._wait_for_the_next(decisions)
                        self._check()
            finally:
                await self._lease.give_up()

    def _wait_for_the_next(self, decisions: int, more_s: float = 0.0) -> None:
        if decisions:
            self._until = time.monotonic() + PATIENCE * self.rules.interval_s + more_s

    def _check(self) -> None:
        if time.monotonic() >= self._until:
            raise NoDecision(f"no decision in {PATIENCE} intervals of {self.rules.interval_s:g} s: {self._why_not}")

    async def _stand_by(self) -> None:
        self._check()
        await asyncio.sleep(STANDBY_S)

    async def _until_held(self) -> None:
        logged = ""
        while other := await self._take():
            if other not in (logged, "?"):
                log.info("another_planner_decides", planner=other, model=self._model)
                logged = other
                self._why_not = f"another planner, {other}, decides for {self._model}"
            await self._stand_by()

    async def _begin(self) -> bool:
        """Read what the last planner knew; False: the broker does not answer."""
        try:
            await self._catch_up()
            await self._reader.begin()
        except _UNREACHABLE as error:
            self._unknown(error)
            return False
        return True

    def _unknown(self, error: Exception) -> None:
        self._why_not = f"the load is unknown ({str(error) or repr(error)})"
        log.warning("load_unknown", error=str(error) or repr(error))

    async def _take(self) -> str:
        try:
            return await self._lease.take()
        except _UNREACHABLE as error:
            self._why_not = f"the lease is unknown ({str(error) or repr(error)})"
            log.warning("lease_unknown", error=str(error) or repr(error))
            return "?"

    async def _interval(self) -> bool:
        """Wait for the end of the interval; False: the lease was lost."""
        until = time.monotonic() + self.rules.interval_s
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(RENEW_S, left))
            if await self._take() and not self._lease.held:
                log.warning("lease_lost", model=self._model)
                return False
        return self._lease.held

    async def _catch_up(self) -> None:
        """Know what the last planner knew: fold the observations of its decisions."""
        rules = self.rules
        since_ns = time.time_ns() - int(HISTORY * rules.interval_s * 1e9)
        self._state = self._planner.begin()
        stream, subject = self._bus.subjects.stream("PLAN"), self._bus.subjects.plan(self._model)
        count = 0
        async for entry in read(self._bus, stream, subject, since_ns=since_ns):
            try:
                planned = plans.decode(entry.data)
            except msgspec.MsgspecError as error:  # of another build
                log.warning("decision_unreadable", seq=entry.seq, error=str(error))
                continue
            self._state = folded(self._planner, self._state, planned)
            count += 1
        if count:
            log.info("caught_up", decisions=count, model=self._model)

    async def _decide(self, publisher: Publisher) -> bool:
        """Whether something could be decided."""
        try:
            seen = await self._reader.look(await self._connector.counts())
        except (ConnectorFailed, *_UNREACHABLE) as error:
            self._unknown(error)
            return False
        seen = msgspec.structs.replace(seen, one_machine=self._connector.one_machine)
        at_ns = time.time_ns()
        self._state, decision = self._planner.step(self._state, seen, at_ns / 1e9)
        if decision is None:
            if self._why_not != _NO_REQUEST:
                log.info("no_request_yet", model=self._model)
            self._why_not = _NO_REQUEST
            return False
        planned = Planned(
            planner=self._id,
            model=self._model,
            at_ns=at_ns,
            connector=self._connector.name,
            rules=self.rules,
            decision=decision,
            failure=await self._apply(decision),
            zero_after_s=self._planner.zero_after_s,
        )
        self._say(planned)
        try:
            subject = self._bus.subjects.plan(self._model)
            await (await publisher.send(subject, encode(planned), f"{self._id}:{at_ns}", timeout=STORE_S))
        except ServingError as error:
            log.warning("decision_not_stored", error=str(error))
        return True

    async def _apply(self, decision: PlanDecision) -> str:
        """Why workers could not be changed; "": they were, or nothing was to be done."""
        if not decision.moves and not decision.sleep:
            return ""
        if not self._lease.held:
            return "another planner may decide"
        try:
            if decision.moves:
                await self._connector.apply(moved(decision))
            if decision.sleep and self._connector.name != DryRun.name:
                await put_to_sleep(self._buses, self._model)
        except (ConnectorFailed, *_UNREACHABLE) as error:
            return str(error) or repr(error)
        return ""


def moved(decision: PlanDecision) -> Mapping[Role, int]:
    """The targets that differ from what there is."""
    return {role: change.target for role, change in decision.changes.items() if change.target != change.current}


def folded(planner: Planner, state: PlannerState, planned: Planned) -> PlannerState:
    """The state after a logged decision."""
    after, _ = planner.step(state, planned.decision.observed, planned.at_ns / 1e9)
    return after
