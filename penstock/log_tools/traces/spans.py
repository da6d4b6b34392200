"""A request's timeline as OpenTelemetry spans. Pure: no broker, no clock, no OpenTelemetry.

    chat tiny                    gateway   accepted .. the terminal event
    ├─ route                     router    in its hands .. decided; one per attempt
    ├─ prefill                   worker    assigned .. handed off; one per stage and attempt
    │  ├─ wait, prompt                     until the engine began; until its first token
    ├─ decode                    worker    assigned .. ended
    │  ├─ transfer, prefix                 the blocks that the ledger reports
    │  └─ wait, first token, generate

Stages are siblings: each begins when the one before has handed off, so links, not parents, show what caused what.
"""

from collections.abc import Iterator, Sequence

from penstock.log_tools.timeline.events import PromptPrefilled, RequestRouted
from penstock.log_tools.timeline.request_timeline import RequestTimeline, StageRun
from penstock.log_tools.traces import span as attributes
from penstock.log_tools.traces.span import Span, SpanEvent, SpanLink, covered
from penstock.schemas.done import Done
from penstock.schemas.trace import Stamps, read_parent, span_id, stage_name, trace_id
from penstock.schemas.transfer import PREFIX

WORKER, ROUTER, GATEWAY = "worker", "router", "gateway"


def spans(timeline: RequestTimeline) -> list[Span]:
    """The trace, root first; of a request that has not ended, as far as it went.

    Raises:
        ValueError: the timeline has no request.
    """
    return _SpanBuilder(timeline).build()


class _SpanBuilder:
    def __init__(self, timeline: RequestTimeline) -> None:
        self._timeline = timeline
        self._request = timeline.request
        self._done = timeline.done
        self._stages = timeline.stages
        self._handoffs = timeline.handoffs

    def build(self) -> list[Span]:
        root = self._root()
        spans = [root]
        spans += [self._route(root, routed) for routed in self._timeline.routed]
        refused = self._refused(root)
        spans += [] if refused is None else [refused]
        for stage in self._stages:
            spans += self._stage(root, stage)
        if self._done is None:
            root.end_ns = max(span.end_ns for span in spans)
        return covered(spans)

    def _span(self, parent: Span | None, key: str, name: str, start: int, end: int, **more: object) -> Span:
        request = self._request
        return Span(
            name=name,
            trace_id=trace_id(request.id, request.trace),
            span_id=span_id(request.id, key),
            parent_id="" if parent is None else parent.span_id,
            start_ns=start or (parent.start_ns if parent is not None else 0),
            end_ns=end,
            state=request.trace.state if request.trace is not None else "",
            **more,  # type: ignore[arg-type]
        )

    def _root(self) -> Span:
        request, done = self._request, self._done
        span = self._span(
            None,
            "",
            f"{attributes.operation(request)} {request.model}",
            request.created_ns,
            done.timings.ended_ns if done is not None else request.created_ns,
            service=GATEWAY,
            instance=request.gateway,
            kind="server",
            attributes=attributes.of_accepted(self._timeline.accepted) if self._timeline.accepted is not None else {},
        )
        parent = read_parent(request.trace.parent) if request.trace is not None else None
        span.parent_id = parent.span_id if parent is not None else ""
        if done is not None:
            span.attributes |= attributes.of_end(done)
            # As for any HTTP server: what the client did wrong, or gave up, is no error of ours.
            if done.code and attributes.status(done.code) >= 500:
                span.error = done.message or done.code
            first = done.timings.client_first_token_ns
            span.events = [SpanEvent("first token", first)] if first else []
        return span

    def _route(self, root: Span, routed: RequestRouted) -> Span:
        attempt, decision = routed.attempt, routed.decision
        before = [stage for stage in self._stages if stage.attempt == attempt - 1]
        return self._span(
            root,
            f"{attempt} route",
            "route",
            decision.at_ns - decision.waited_ns,
            decision.at_ns,
            service=ROUTER,
            instance=decision.router,
            kind="consumer",
            attributes=attributes.of_routed(routed),
            links=[SpanLink(self._id(stage), "retry") for stage in before],
        )

    def _refused(self, root: Span) -> Span | None:
        """The router's part in a request, or in its last attempt, that no worker got."""
        done = self._done
        if done is None or done.worker or any(each.attempt == done.attempt for each in self._timeline.routed):
            return None
        last = max((self._end_of(stage)[0] for stage in self._stages), default=self._request.created_ns)
        return self._span(
            root,
            f"{done.attempt} route",
            "route",
            last,
            done.timings.ended_ns,
            service=ROUTER,
            instance="",
            kind="consumer",
            attributes={"penstock.attempt": done.attempt} | attributes.of_code(done.code),
            error=done.message or done.code or None,
        )

    def _stage(self, root: Span, stage: StageRun) -> Iterator[Span]:
        end, error, kind = self._end_of(stage)
        done, stamps = self._done_by(stage), self._stamps(stage)
        span = self._span(
            root,
            stage_name(stage.attempt, stage.role),
            stage.role,
            stage.assigned_ns,
            end,
            service=WORKER,
            instance=stage.worker,
            kind="consumer",
            attributes={
                "penstock.worker.id": stage.worker,
                "penstock.worker.role": stage.role,
                "penstock.attempt": stage.attempt,
                "gen_ai.request.model": self._request.model,
                **(attributes.of_stamps(stamps) if stamps is not None else {}),
            },
            error=error,
        )
        if error is not None:
            span.attributes["error.type"] = kind
        source = self._source(stage)
        if source is not None:
            span.links = [SpanLink(self._id(source), "handoff")]
        elif stage.attempt > 1:
            span.links = [
                SpanLink(self._id(each), "retry") for each in self._stages if each.attempt == stage.attempt - 1
            ]
        if isinstance(stage.result, PromptPrefilled):
            span.attributes["gen_ai.usage.cache_read.input_tokens"] = stage.result.cached_tokens
        if done is not None:
            span.attributes |= {
                name: value
                for name, value in attributes.of_end(done).items()
                if name.startswith(("gen_ai.usage.output", "gen_ai.response.finish", "error.", "http."))
                or (source is None and name.startswith("gen_ai.usage."))
            }
        if stamps is not None and stamps.received_ns:
            span.events = [SpanEvent("received", stamps.received_ns)]
        span.events = [*span.events, *self._lease_events(stage)]
        yield span
        yield from self._transfers(span, stage)
        yield from self._phases(span, stage, end)

    def _phases(self, span: Span, stage: StageRun, end: int) -> Iterator[Span]:
        """Until the engine began, until its first token, and the rest; of those that are known."""
        stamps, result, done = self._stamps(stage), stage.result, self._done_by(stage)
        if stamps is not None and (stamps.started_ns or stamps.first_token_ns):
            started, first = stamps.started_ns, stamps.first_token_ns
        elif result is not None:
            started = result.started_ns
            first = result.first_token_ns if isinstance(result, PromptPrefilled) else 0
        elif done is not None and self._source(stage) is None:
            started, first = done.timings.started_ns, done.timings.first_token_ns
        else:
            return  # the terminal event's times are those of the stage before
        moved, prefix = self._read_ns(stage, self._ticket(stage)), self._read_ns(stage, self._prefix(stage))
        phases = [("wait", max([stage.assigned_ns, *moved, *prefix]), started)]
        if stage.role == "encode":
            phases.append(("embeddings", started, end))
        else:
            phases.append(("first token" if moved and stage.role == "decode" else "prompt", started, first))
            if result is None:
                phases.append(("generate", first, end))
        for name, start, until in phases:
            if start and until and until >= start:
                yield self._span(
                    span,
                    f"{stage_name(stage.attempt, stage.role)} {name}",
                    name,
                    start,
                    until,
                    service=WORKER,
                    instance=stage.worker,
                    attributes={"penstock.attempt": stage.attempt},
                )

    def _transfers(self, parent: Span, stage: StageRun) -> Iterator[Span]:
        """The reads of what the stage before offered, and of a prefix that another worker had."""
        source, ticket = self._source(stage), self._ticket(stage)
        if source is not None and source.handed_off is not None:
            links = [SpanLink(self._id(source), "handoff")]
            yield from self._read(parent, stage, "transfer", ticket, source.handed_off.backend, links)
        yield from self._read(parent, stage, PREFIX, self._prefix(stage))

    def _prefix(self, stage: StageRun) -> str:
        """The ticket of a prefix that the stage reads."""
        return f"{self._request.id}:{stage.attempt}:{PREFIX}"

    def _read_ns(self, stage: StageRun, ticket: str) -> list[int]:
        """When the stage had read a ticket's blocks."""
        lines = (line for line in self._handoffs if line.ticket == ticket and line.target == stage.worker)
        return [line.at_ns for line in lines if line.state == "read"]

    def _read(
        self,
        parent: Span,
        stage: StageRun,
        name: str,
        ticket: str,
        backend: str = "",
        links: Sequence[SpanLink] = (),
    ) -> Iterator[Span]:
        began = 0
        for line in self._handoffs:
            if line.ticket != ticket or line.target != stage.worker:
                continue
            if line.state == "leased":
                began = line.at_ns
            if line.state not in ("read", "failed"):
                continue
            yield self._span(
                parent,
                f"{stage_name(stage.attempt, stage.role)} {name}",
                name,
                began or line.at_ns - int(line.seconds * 1e9),
                line.at_ns,
                service=WORKER,
                instance=stage.worker,
                kind="client",
                attributes={
                    "penstock.attempt": stage.attempt,
                    "penstock.transfer.source": line.source,
                    **({"penstock.transfer.backend": backend} if backend else {}),
                    "penstock.transfer.pool": line.pool,
                    "penstock.transfer.blocks": line.blocks,
                    "penstock.transfer.bytes": line.bytes,
                    "penstock.transfer.duration": line.seconds,
                    **({"error.type": line.cause} if line.cause else {}),
                },
                links=list(links),
                error=(line.message or line.cause) if line.state == "failed" else None,
            )
            return

    def _lease_events(self, stage: StageRun) -> list[SpanEvent]:
        """The ledger's other lines about the blocks that this worker offered, or read."""
        mine, other = stage.handed_off.ticket if stage.handed_off is not None else "", self._ticket(stage)
        shown = {mine: ("offered", "released", "expired"), other: ("quarantined", "settled")}
        shown.pop("", None)
        return [
            SpanEvent(line.state, line.at_ns, {"penstock.transfer.blocks": line.blocks})
            for line in self._handoffs
            if line.state in shown.get(line.ticket, ())
        ]

    # --- how stages relate ---

    def _id(self, stage: StageRun) -> str:
        return span_id(self._request.id, stage_name(stage.attempt, stage.role))

    def _source(self, stage: StageRun) -> StageRun | None:
        """The stage that handed off to this one."""
        for each in self._stages:
            offer = each.handed_off
            if each.attempt == stage.attempt and each is not stage and offer and offer.target_role == stage.role:
                return each
        return None

    def _ticket(self, stage: StageRun) -> str:
        source = self._source(stage)
        return source.handed_off.ticket if source is not None and source.handed_off is not None else ""

    def _done_by(self, stage: StageRun) -> Done | None:
        """The terminal event, if this worker sent it."""
        done = self._done
        same = done is not None and (done.attempt, done.worker) == (stage.attempt, stage.worker)
        return done if same and stage.result is None else None

    def _stamps(self, stage: StageRun) -> Stamps | None:
        if stage.result is not None:
            return stage.result.stamps
        done = self._done_by(stage)
        return done.stamps if done is not None else None

    def _end_of(self, stage: StageRun) -> tuple[int, str | None, str]:
        """When the stage ended; what went wrong, as a text for people and as a code."""
        if stage.result is not None:
            return stage.result.at_ns, None, ""
        done = self._done_by(stage)
        if done is not None:
            failed = done.code and attributes.status(done.code) >= 500
            return done.timings.ended_ns, (done.message or done.code) if failed else None, done.code
        back = self._timeline.returned.get(stage.attempt)
        if back is not None and back.worker == stage.worker:
            if back.crashed:
                return back.at_ns, f"worker lost: {back.reason}", "worker_lost"
            return back.at_ns, f"returned: {back.reason}", "returned"
        return self._lost(stage)

    def _lost(self, stage: StageRun) -> tuple[int, str | None, str]:
        """The worker reported no end: another attempt began, or another worker of the route was lost."""
        after = next((each for each in self._timeline.routed if each.attempt > stage.attempt), None)
        if after is not None:
            reason = "revoked" if stage.revoked else after.decision.reason or "worker_lost"
            return after.decision.at_ns - after.decision.waited_ns, reason, reason.partition(":")[0]
        if self._done is not None:
            code = self._done.code or "worker_lost"
            return self._done.timings.ended_ns, self._done.message or code, code
        return stage.assigned_ns, None, ""
