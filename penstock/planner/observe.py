"""Observes the last interval in a deployment's log and fleet: the inputs of a decision.

Requests are counted by the sequence of their stream, which all models share: where there are several, a model's part is
its part of the requests that ended.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import product

from penstock.cli.figures import quantile
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import stream_end
from penstock.infra.bus.worker_leases import registrations
from penstock.operate.observe import EndsFollower
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.plans import ROLES, Observation, Pool, Role, Times
from penstock.schemas.requests import Priority
from penstock.schemas.summary import DONE, RequestSummary


def times(values: list[float]) -> Times | None:
    """Of unordered values; None: there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p95 = (quantile(ordered, share, 0.0) for share in (0.5, 0.95))
    return Times(round(sum(ordered) / len(ordered), 3), round(p50, 3), round(p95, 3))


STARVED_PERCENT = 25  # of the time, without a core: what a thread does takes a third longer, or more
MOST = 2000  # ends that are looked at of one interval


class LoadReader:
    """
    Args:
        model: whose requests and workers count; any of its names.
        others: buses of further cells, whose requests and workers count, too.
    """

    def __init__(self, bus: Bus, model: str, others: Sequence[Bus] = ()) -> None:
        self._buses = [bus, *others]
        self._model = model
        self._accepted = 0
        self._ended = 0
        self._ends_seen = [EndsFollower(each, MOST) for each in self._buses]
        self._at = 0.0

    async def begin(self) -> None:
        """The first interval begins now.

        Raises:
            ServingError: a stream cannot be read.
        """
        for each in self._ends_seen:
            await each.open()
            each.take()
        self._accepted, self._ended = await self._ends()
        self._at = time.monotonic()

    async def look(self, counts: Mapping[Role, int] | None = None) -> Observation:
        """What happened since the last look, or since ``begin``.

        Args:
            counts: workers that were asked for, by role; those that are not registered are starting.

        Raises:
            ServingError: a stream or the fleet cannot be read.
        """
        accepted, ended = await self._ends()
        now = time.monotonic()
        fleet = [worker for bus in self._buses for worker in await registrations(bus)]
        mine = [each for each in fleet if self._model in (each.model, *each.aliases)]
        names = {self._model, *(name for each in mine for name in (each.model, *each.aliases))}
        seen_ended = [end for follower in self._ends_seen for end in follower.take()]
        records = [each for each in seen_ended if each.model in names]
        others = len(seen_ended) - len(records)
        share = len(records) / (len(records) + others) if others else 1.0
        seen = observation(
            records,
            seconds=now - self._at,
            arrived=round((accepted - self._accepted) * share),
            ended=round((ended - self._ended) * share),
            queued=await self._queued(),
            pools=pools(mine, counts or {}),
        )
        self._accepted, self._ended, self._at = accepted, ended, now
        return seen

    async def _ends(self) -> tuple[int, int]:
        accepted, ended = 0, 0
        for bus in self._buses:
            accepted += (await stream_end(bus, bus.subjects.stream("REQUESTS")))[0]
            ended += (await stream_end(bus, bus.subjects.stream("DONE")))[0]
        return accepted, ended

    async def _queued(self) -> int:
        """Requests of any model that no worker has."""
        total = 0
        for bus, priority in product(self._buses, Priority):
            consumer = await bus.js.consumer_info(bus.subjects.stream("REQUESTS"), f"router-{priority.value}")
            total += (consumer.num_pending or 0) + (consumer.num_ack_pending or 0)
        return total


def observation(
    records: list[RequestSummary], *, seconds: float, arrived: int, ended: int, queued: int, pools: dict[Role, Pool]
) -> Observation:
    """
    Args:
        records: of requests that ended; only those that finished say how long they were and took.
    """
    done = [each for each in records if each.state == DONE and each.completion_tokens]
    prompt = sum(each.prompt_tokens for each in done)
    ttft = [each.ttft_ms for each in done if each.ttft_ms is not None]
    itl = [
        (each.duration_ms - each.ttft_ms) / (each.completion_tokens - 1)
        for each in done
        if each.duration_ms is not None and each.ttft_ms is not None and each.completion_tokens > 1
    ]
    return Observation(
        seconds=round(seconds, 3),
        arrived=max(0, arrived),
        ended=max(0, ended) if done else 0,
        isl=prompt / len(done) if done else 0.0,
        osl=sum(each.completion_tokens for each in done) / len(done) if done else 0.0,
        hit_rate=sum(each.cached_tokens for each in done) / prompt if prompt else 0.0,
        ttft=times(ttft),
        itl=times(itl),
        queued=queued,
        pools=pools,
    )


def pools(fleet: list[Registration], counts: Mapping[Role, int]) -> dict[Role, Pool]:
    """Workers by role; roles of which none is there or was asked for are left out."""
    found: dict[Role, Pool] = {}
    for role in ROLES:
        ready = [each for each in fleet if each.role == role and each.state is WorkerState.ready]
        starting = max(0, counts.get(role, 0) - len(ready))
        if ready or starting:
            starved = sum(each.load.core_wait_percent >= STARVED_PERCENT for each in ready)
            found[role] = Pool(
                ready=len(ready),
                starting=starting,
                waiting=sum(each.load.waiting for each in ready),
                starved=starved,
                running=sum(each.load.running for each in ready),
                asleep=sum(each.weights.asleep for each in ready),
            )
    return found
