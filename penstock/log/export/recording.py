"""Recorded requests with their results, times and workers: a fold of the log. Pure."""

from array import array
from itertools import pairwise

import msgspec

from penstock.infra.bus.direct_get import parse_time
from penstock.log.sources.log_line import LogLine
from penstock.schemas import done, jobs, requests, tokens
from penstock.schemas.done import Done
from penstock.schemas.jobs import Job, Revoke
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import KEPT

MS = 1e6


class Run(msgspec.Struct):
    """One request, which may still be running.

    Attributes:
        done: its record; None: it has not ended.
        attempts: routing decisions.
        route: the workers of the last attempt, one per stage.
        stored: when its token items were stored (broker clock, Unix ns) and how many tokens each has, by choice.
    """

    id: str
    request: GenerateRequest | None = None
    done: Done | None = None
    attempts: int = 0
    route: tuple[str, ...] = ()
    stored: dict[int, list[tuple[int, int]]] = {}

    @property
    def ttft_ms(self) -> float | None:
        """From acceptance to the first token; None: there was none."""
        times = self.done.timings if self.done is not None else None
        first = times.client_first_token_ns if times is not None else 0
        return (first - times.created_ns) / MS if times is not None and first else None

    @property
    def e2e_ms(self) -> float | None:
        """From acceptance to the end; None: unknown."""
        times = self.done.timings if self.done is not None else None
        return (times.ended_ns - times.created_ns) / MS if times is not None and times.ended_ns else None

    def itl_ms(self) -> "array[float]":
        """Times between tokens. Tokens that were stored together share the time since those before them."""
        times: array[float] = array("d")
        for items in self.stored.values():
            items.sort()
            for (before, _), (at, count) in pairwise(items):
                times.extend([(at - before) / MS / count] * count)
        return times

    @property
    def cached_tokens(self) -> int:
        return self.done.usage.cached if self.done is not None else 0


class Recording:
    """Runs by request id, in the order of their first message. Streams may be added in any order."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}

    def add(self, record: LogLine) -> None:
        """Add one message. A message that cannot be decoded, or is about no request, changes nothing."""
        try:
            if record.stream == "REQUESTS":
                request = requests.decode(record.data)
                self._run(request.id).request = request
            elif record.stream == "WORK":
                self._add_work(record)
            elif record.stream == "TOKENS":
                self._add_tokens(record)
            elif record.stream == "DONE":
                self._add_end(record)
        except msgspec.MsgspecError:
            return

    def _run(self, request: str) -> Run:
        run = self.runs.get(request)
        if run is None:
            run = self.runs[request] = Run(request, stored={})
        return run

    def _add_work(self, record: LogLine) -> None:
        if KEPT in record.subject.split("."):
            return
        message = jobs.decode(record.data)
        if isinstance(message, Revoke) or not isinstance(message, Job):
            return
        request = requests.decode(message.request)
        run = self._run(request.id)
        run.request = run.request or request
        if message.attempt < run.attempts:
            return
        run.attempts = message.attempt
        run.route = tuple(stage.worker for stage in message.decision.route) or (message.decision.chosen,)

    def _add_tokens(self, record: LogLine) -> None:
        at = parse_time(record.time)
        for item in tokens.decode(record.data).items:
            if item.choice >= 0 and item.tokens:
                self._run(item.request).stored.setdefault(item.choice, []).append((at, len(item.tokens) >> 2))

    def _add_end(self, record: LogLine) -> None:
        event = done.decode(record.data)
        if not isinstance(event, Done):
            return
        run = self._run(event.request)
        if run.done is None:
            run.done = event
            if run.request is None or not run.request.prompt:
                run.request = done.request_of(event) or run.request
