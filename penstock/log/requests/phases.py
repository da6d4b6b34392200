"""How a request spent its time: the bars of its waterfall. Pure."""

from collections.abc import Iterator, Sequence

import msgspec

from penstock.log.timeline.events import TimelineEvent, TokensStored
from penstock.log.timeline.request_timeline import RequestTimeline
from penstock.log.traces.span import in_order
from penstock.log.traces.spans import spans


class Phase(msgspec.Struct, frozen=True):
    """A part of the request's time. ``depth`` 0: all of it; deeper ones lie within the one above.

    ``service``: "gateway", "router" or "worker"; ``where``: which one. Unix time in ns.
    """

    name: str
    depth: int
    service: str
    where: str
    start_ns: int
    end_ns: int
    attempt: int = 0
    error: str = ""


def phases(timeline: RequestTimeline, events: Sequence[TimelineEvent]) -> Iterator[Phase]:
    """The request's phases, depth first: its spans, and the periods in which tokens were stored."""
    all_spans = spans(timeline)
    if timeline.done is None:  # a running request has come as far as its last token
        last = max(event.at_ns for event in events)
        worker = timeline.stages[-1].worker if timeline.stages else ""
        for span in all_spans:
            if span is all_spans[0] or span.instance == worker:
                span.end_ns = max(span.end_ns, last)
    made = [
        Phase(
            "request" if depth == 0 else span.name,
            depth,
            span.service,
            span.instance,
            span.start_ns,
            span.end_ns,
            attempt if isinstance(attempt := span.attributes.get("penstock.attempt", 0), int) else 0,
            span.error or "",
        )
        for depth, span in in_order(all_spans)
    ]
    streamed: dict[tuple[int, str], list[int]] = {}
    for event in events:
        if isinstance(event, TokensStored) and event.count:
            streamed.setdefault((event.attempt, event.worker), []).append(event.at_ns)
    for place, phase in enumerate(made):
        yield phase
        if not any(_of(each) == _of(phase) for each in made[place + 1 :]) and phase.depth:
            yield from _generated(made, phase, streamed.get(_of(phase), []))


def _of(phase: Phase) -> tuple[int, str]:
    return phase.attempt, phase.where


def _generated(made: Sequence[Phase], last: Phase, streamed: Sequence[int]) -> Iterator[Phase]:
    """The period after a worker's ``last`` phase in which it streamed tokens, if no message has its times."""
    own = [each for each in made if _of(each) == _of(last)]
    if len(streamed) > 1 and not any(each.name in ("generate", "first token") for each in own):
        first, until = streamed[0], min(streamed[-1], own[0].end_ns)
        yield Phase("generate", 2, last.service, last.where, first, max(first, until), last.attempt)
