"""Runs one level at one endpoint: sends its requests, and watches errors, the server's metrics and its own load."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock.cli.figures import quantile
from penstock.measure.load_generator import ClosedLoop, ConnectionPool, Exchange, LagMeter, send_in_time
from penstock.measure.sweep.bodies import PlannedRequest
from penstock.measure.sweep.endpoints import Scraper, SweptEndpoint
from penstock.measure.sweep.figures import RequestRecord, Slo, figures, record
from penstock.measure.sweep.results import ClientFigures, LevelRun
from penstock.measure.sweep.workload import LoadLevel

_SHOW_S = 0.25
_BUSY = 0.85  # share of a core from which the generator is itself the limit
_SHORT_S = 1.0  # the clock of CPU time is too coarse for less
_LATE_MS = 5.0  # p99 of the event loop, from which times are not the server's
_SENT_LATE_MS = 20.0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """
    Attributes:
        failed: requests of a run that may fail before it is aborted.
        timeout_s: of one request.
        scrape_s: between two reads of the server's metrics.
        slo: limits that good requests keep.
    """

    failed: int = 10
    timeout_s: float = 600.0
    scrape_s: float = 1.0
    slo: Slo | None = None


@dataclass(slots=True)
class _Progress:
    """The progress of a run's requests."""

    planned: Sequence[PlannedRequest]
    most_failed: int
    done: list[Exchange] = field(default_factory=list)
    failed: int = 0
    error: str = ""  # the last one
    sent: int = 0
    due: list[int] = field(default_factory=list)  # next turns of conversations whose last turn was answered
    over: asyncio.Event = field(default_factory=asyncio.Event)  # all are done, or too many have failed

    def following(self) -> Exchange | None:
        if self.aborted:
            return None
        if self.due:
            return self._exchange(self.due.pop())
        while self.sent < len(self.planned) and self.planned[self.sent].follows:
            self.sent += 1
        if self.sent == len(self.planned):
            return None
        self.sent += 1
        return self._exchange(self.sent - 1)

    def _exchange(self, number: int) -> Exchange:
        return Exchange(self.planned[number].request, self.count, key=number)

    def count(self, exchange: Exchange) -> None:
        self.done.append(exchange)
        following = exchange.key + 1
        if following < len(self.planned) and self.planned[following].follows:
            self.due.append(following)  # also of a turn that failed: the others have the recorded answer before them
        if exchange.error:
            self.failed += 1
            self.error = exchange.error
        if len(self.done) == len(self.planned) or self.aborted:
            self.over.set()

    @property
    def aborted(self) -> str:
        if self.failed <= self.most_failed:
            return ""
        return f"{self.failed} of {len(self.done)} requests failed, the last one: {self.error}"


async def run_level(
    endpoint: SweptEndpoint,
    level: LoadLevel,
    planned: Sequence[PlannedRequest],
    limits: RunLimits,
    *,
    number: int = 1,
    show: Callable[[int, int], None] = lambda done, failed: None,
) -> tuple[LevelRun, list[RequestRecord]]:
    """Send all requests of a level once. Failures are counted, and too many of them end the run.

    Args:
        number: of the run.
        show: called from time to time with the number of finished and of failed requests.
    """
    progress = _Progress(planned, min(limits.failed, len(planned) - 1))  # nothing but failures is not a result
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    async with (
        Scraper(endpoint.pages, limits.scrape_s) as scraper,
        LagMeter() as lag,
        ConnectionPool(endpoint.target, timeout_s=limits.timeout_s) as pool,
    ):
        began = time.perf_counter()
        await _send(pool, level, progress, began, show)
    begin = min((each.sent for each in progress.done if each.sent), default=began)
    records = [record(each, planned[each.key], begin) for each in sorted(progress.done, key=lambda each: each.key)]
    run = LevelRun(
        number=number,
        began=began_at,
        figures=figures(records, endpoint.gpus, limits.slo),
        server=scraper.figures(),
        client=_client(lag, progress.done),
        aborted=progress.aborted,
    )
    return run, records


async def _send(
    pool: ConnectionPool, level: LoadLevel, progress: _Progress, began: float, show: Callable[[int, int], None]
) -> None:
    sender: asyncio.Task[None] | None = None
    if level.kind == "concurrency":
        ClosedLoop(pool, min(int(level.value), len(progress.planned)), progress.following)
    else:
        due = ((each.at_s or 0.0, exchange) for each in progress.planned if (exchange := progress.following()))
        sender = asyncio.create_task(send_in_time(pool, due, began), name="arrivals")
    try:
        while not progress.over.is_set():
            show(len(progress.done), progress.failed)
            try:
                async with asyncio.timeout(_SHOW_S):
                    await progress.over.wait()
            except TimeoutError:
                continue
        show(len(progress.done), progress.failed)
    finally:
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)


def _client(lag: LagMeter, done: Sequence[Exchange]) -> ClientFigures:
    loop_late = quantile(sorted(lag.late_s), 0.99, 0.0) * 1e3
    late = sorted((each.sent - each.due) * 1e3 for each in done if each.due and each.sent)
    sent_late = quantile(late, 0.99, 0.0) if late else None
    warnings = []
    if lag.cpu_share > _BUSY and lag.seconds > _SHORT_S:
        warnings.append(
            f"the load generator used {lag.cpu_share:.0%} of a core: the server may be faster than shown; "
            "run it on another machine, or share the load among several"
        )
    if loop_late > _LATE_MS:
        warnings.append(
            f"the load generator's event loop was {loop_late:.0f} ms late (p99): times are too long by as much"
        )
    if sent_late is not None and sent_late > _SENT_LATE_MS:
        warnings.append(f"requests were sent {sent_late:.0f} ms after they were due (p99)")
    return ClientFigures(
        cpu_share=round(lag.cpu_share, 3),
        loop_late_p99_ms=round(loop_late, 3),
        sent_late_p99_ms=None if sent_late is None else round(sent_late, 3),
        warnings=tuple(warnings),
    )


async def warm_up(
    endpoint: SweptEndpoint, planned: Sequence[PlannedRequest], concurrency: int, timeout_s: float
) -> str:
    """Send requests that are not measured. Returns the last error, "" if there was none."""
    progress = _Progress(planned, len(planned))
    async with ConnectionPool(endpoint.target, timeout_s=timeout_s) as pool:
        await _send(pool, LoadLevel("concurrency", concurrency, len(planned)), progress, 0.0, lambda done, failed: None)
    return progress.error
