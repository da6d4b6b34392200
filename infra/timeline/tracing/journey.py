"""What the log says of one request, folded into spans. Pure: no broker, no clock, no OpenTelemetry.

    chat tiny                    gateway   accepted .. the terminal event
    ├─ route                     router    in its hands .. decided; one per attempt
    ├─ prefill                   worker    given .. handed on; one per stage and attempt
    │  ├─ wait, prompt                     until the engine began; until its first token
    ├─ decode                    worker    given .. ended
    │  ├─ transfer                         the blocks that the ledger tells of
    │  └─ wait, first token, generate

Stages are siblings: each begins when the one before has handed over, so links, not parents, tell what caused what.
Prompts and tokens are not kept, so that many unfinished requests fit into memory.
"""

from collections.abc import Iterator

import msgspec

from infra.timeline.tracing import attributes
from infra.timeline.tracing.facts import Facts, GivenBack, Handed, Routed, Visit, routed
from infra.timeline.tracing.span import Event, Link, Span, covered
from schemas.done import Done, Returned
from schemas.jobs import Job, Revoke, WorkMessage
from schemas.trace import Stamps, read_parent, span_id, stage_name, trace_id
from schemas.transfer import Encoded, HandOff, Prefilled

WORKER, ROUTER, GATEWAY = "worker", "router", "gateway"


class Journey:
    """Feed it the request's messages in any order between streams; each stream's in its own."""

    def __init__(self, told: Facts) -> None:
        self.facts = told
        self._visits: list[Visit] = []
        self._routes: list[Routed] = []
        self._ledger: list[HandOff] = []
        self._returned: dict[int, GivenBack] = {}
        self._done: Done | None = None

    @property
    def created_ns(self) -> int:
        return self.facts.request.created_ns

    # --- in ---

    def work(self, role: str, worker: str, at_ns: int, message: WorkMessage) -> None:
        """A message in WORK, for this worker, stored at that time."""
        if isinstance(message, Revoke):
            for visit in self._visits:
                if visit.attempt <= message.attempt and visit.worker == worker:
                    visit.revoked = True
            return
        if any((visit.attempt, visit.role) == (message.attempt, role) for visit in self._visits):
            return  # stored again, after the time in which the broker would have known it
        if isinstance(message, Job):
            self._routes.append(routed(message.attempt, message.decision))
        else:
            self._handed(role, at_ns, message)
        self._visits.append(Visit(message.attempt, role, worker, at_ns))

    def _handed(self, role: str, at_ns: int, message: Encoded | Prefilled) -> None:
        first, cached = (message.first_token_ns, message.cached) if isinstance(message, Prefilled) else (0, 0)
        for visit in self._visits:
            if (visit.attempt, visit.worker) == (message.attempt, message.ticket.worker) and visit.handed is None:
                visit.handed = Handed(
                    at_ns,
                    message.ticket.id,
                    role,
                    message.started_ns,
                    first,
                    cached,
                    message.stamps,
                    message.ticket.endpoint.backend,
                )

    def ledger(self, line: HandOff) -> None:
        """What a worker says of one of its tickets."""
        self._ledger.append(line)

    def end(self, event: Done | Returned, at_ns: int) -> None:
        """It, or one of its attempts, has ended."""
        if isinstance(event, Returned):
            self._returned[event.attempt] = GivenBack(event, at_ns)
        elif self._done is None:
            tokens = tuple(msgspec.structs.replace(choice, tokens=b"", files=()) for choice in event.choices)
            self._done = msgspec.structs.replace(event, choices=tokens)

    # --- out ---

    def spans(self) -> list[Span]:
        """The trace, root first; of a request that has not ended, as far as it went."""
        root = self._root()
        found = [root]
        found += [self._route(root, decision) for decision in self._routes]
        refused = self._refused(root)
        found += [] if refused is None else [refused]
        for visit in self._visits:
            found += self._stage(root, visit)
        if self._done is None:
            root.end_ns = max(span.end_ns for span in found)
        return covered(found)

    def _span(self, parent: Span | None, key: str, name: str, start: int, end: int, **more: object) -> Span:
        request = self.facts.request
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
        request, done = self.facts.request, self._done
        span = self._span(
            None,
            "",
            f"{attributes.operation(request)} {request.model}",
            request.created_ns,
            done.timings.ended_ns if done is not None else request.created_ns,
            service=GATEWAY,
            instance=request.gateway,
            kind="server",
            attributes=dict(self.facts.attributes),
        )
        parent = read_parent(request.trace.parent) if request.trace is not None else None
        span.parent_id = parent.span_id if parent is not None else ""
        if done is not None:
            span.attributes |= attributes.of_end(done)
            # As for any HTTP server: what the client did wrong, or gave up, is no error of ours.
            if done.code and attributes.status(done.code) >= 500:
                span.error = done.message or done.code
            first = done.timings.first_token_ns
            span.events = [Event("first token", first)] if first else []
        return span

    def _route(self, root: Span, decision: Routed) -> Span:
        attempt = decision.attempt
        before = [visit for visit in self._visits if visit.attempt == attempt - 1]
        return self._span(
            root,
            f"{attempt} route",
            "route",
            decision.since_ns,
            decision.at_ns,
            service=ROUTER,
            instance=decision.router,
            kind="consumer",
            attributes=dict(decision.attributes),
            links=[Link(self._id(visit), "retry") for visit in before],
        )

    def _refused(self, root: Span) -> Span | None:
        """The router's part in a request, or in its last attempt, that it gave to nobody."""
        done = self._done
        if done is None or done.worker or any(each.attempt == done.attempt for each in self._routes):
            return None
        last = max((self._end_of(visit)[0] for visit in self._visits), default=self.created_ns)
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

    def _stage(self, root: Span, visit: Visit) -> Iterator[Span]:
        end, error, kind = self._end_of(visit)
        handed, done, stamps = visit.handed, self._ends_at(visit), self._stamps(visit)
        span = self._span(
            root,
            stage_name(visit.attempt, visit.role),
            visit.role,
            visit.given_ns,
            end,
            service=WORKER,
            instance=visit.worker,
            kind="consumer",
            attributes={
                "penstock.worker.id": visit.worker,
                "penstock.worker.role": visit.role,
                "penstock.attempt": visit.attempt,
                "gen_ai.request.model": self.facts.request.model,
                **(attributes.of_stamps(stamps) if stamps is not None else {}),
            },
            error=error,
        )
        if error is not None:
            span.attributes["error.type"] = kind
        source = self._source(visit)
        if source is not None:
            span.links = [Link(self._id(source), "handover")]
        elif visit.attempt > 1:
            span.links = [Link(self._id(each), "retry") for each in self._visits if each.attempt == visit.attempt - 1]
        if handed is not None and isinstance(handed.cached, int) and visit.role != "encode":
            span.attributes["gen_ai.usage.cache_read.input_tokens"] = handed.cached
        if done is not None:
            span.attributes |= {
                name: value
                for name, value in attributes.of_end(done).items()
                if name.startswith(("gen_ai.usage.output", "gen_ai.response.finish", "error.", "http."))
                or (source is None and name.startswith("gen_ai.usage."))
            }
        if stamps is not None and stamps.received_ns:
            span.events = [Event("received", stamps.received_ns)]
        span.events = [*span.events, *self._told(visit)]
        yield span
        yield from self._transfers(span, visit)
        yield from self._phases(span, visit, end)

    def _phases(self, span: Span, visit: Visit, end: int) -> Iterator[Span]:
        """Until the engine began, until its first token, and the rest; of those that are known."""
        stamps, handed, done = self._stamps(visit), visit.handed, self._ends_at(visit)
        if stamps is not None and (stamps.started_ns or stamps.first_token_ns):
            started, first = stamps.started_ns, stamps.first_token_ns
        elif handed is not None:
            started, first = handed.started_ns, handed.first_token_ns
        elif done is not None and self._source(visit) is None:
            started, first = done.timings.started_ns, done.timings.first_token_ns
        else:
            return  # what the terminal event says is of the stage before
        began = visit.given_ns
        moved = [line.at_ns for line in self._ledger if line.ticket == self._ticket(visit) and line.state == "read"]
        phases = [("wait", max([began, *moved]), started)]
        if visit.role == "encode":
            phases.append(("embeddings", started, end))
        else:
            phases.append(("first token" if moved and visit.role == "decode" else "prompt", started, first))
            if handed is None:
                phases.append(("generate", first, end))
        for name, start, until in phases:
            if start and until and until >= start:
                yield self._span(
                    span,
                    f"{stage_name(visit.attempt, visit.role)} {name}",
                    name,
                    start,
                    until,
                    service=WORKER,
                    instance=visit.worker,
                    attributes={"penstock.attempt": visit.attempt},
                )

    def _transfers(self, parent: Span, visit: Visit) -> Iterator[Span]:
        """Blocks that were brought here."""
        source, ticket = self._source(visit), self._ticket(visit)
        if source is None or source.handed is None:
            return
        began = 0
        for line in self._ledger:
            if line.ticket != ticket or line.target != visit.worker:
                continue
            if line.state == "leased":
                began = line.at_ns
            if line.state not in ("read", "failed"):
                continue
            yield self._span(
                parent,
                f"{stage_name(visit.attempt, visit.role)} transfer",
                "transfer",
                began or line.at_ns - int(line.seconds * 1e9),
                line.at_ns,
                service=WORKER,
                instance=visit.worker,
                kind="client",
                attributes={
                    "penstock.attempt": visit.attempt,
                    "penstock.transfer.source": line.source,
                    "penstock.transfer.backend": source.handed.backend,
                    "penstock.transfer.pool": line.pool,
                    "penstock.transfer.blocks": line.blocks,
                    "penstock.transfer.bytes": line.bytes,
                    "penstock.transfer.duration": line.seconds,
                    **({"error.type": line.cause} if line.cause else {}),
                },
                links=[Link(self._id(source), "handover")],
                error=(line.message or line.cause) if line.state == "failed" else None,
            )
            return

    def _told(self, visit: Visit) -> list[Event]:
        """What else the ledger says of the blocks that this worker offered, or got."""
        mine, other = visit.handed.ticket if visit.handed is not None else "", self._ticket(visit)
        shown = {mine: ("offered", "released", "expired"), other: ("quarantined", "settled")}
        shown.pop("", None)
        return [
            Event(line.state, line.at_ns, {"penstock.transfer.blocks": line.blocks})
            for line in self._ledger
            if line.state in shown.get(line.ticket, ())
        ]

    # --- what follows from what ---

    def _id(self, visit: Visit) -> str:
        return span_id(self.facts.request.id, stage_name(visit.attempt, visit.role))

    def _source(self, visit: Visit) -> Visit | None:
        """The stage that handed over to this one."""
        handed = (v for v in self._visits if v.attempt == visit.attempt and v.handed is not None and v is not visit)
        return next((v for v in handed if v.handed is not None and v.handed.target == visit.role), None)

    def _ticket(self, visit: Visit) -> str:
        source = self._source(visit)
        return source.handed.ticket if source is not None and source.handed is not None else ""

    def _ends_at(self, visit: Visit) -> Done | None:
        """The terminal event, if this worker sent it."""
        done = self._done
        same = done is not None and (done.attempt, done.worker) == (visit.attempt, visit.worker)
        return done if same and visit.handed is None else None

    def _stamps(self, visit: Visit) -> Stamps | None:
        if visit.handed is not None:
            return visit.handed.stamps
        done = self._ends_at(visit)
        return done.stamps if done is not None else None

    def _end_of(self, visit: Visit) -> tuple[int, str | None, str]:
        """When a worker was through with it; what went wrong, for people and for programs."""
        if visit.handed is not None:
            return visit.handed.at_ns, None, ""
        done = self._ends_at(visit)
        if done is not None:
            failed = done.code and attributes.status(done.code) >= 500
            return done.timings.ended_ns, (done.message or done.code) if failed else None, done.code
        back = self._returned.get(visit.attempt)
        if back is not None and back.event.worker == visit.worker:
            return back.at_ns, f"given back: {back.event.reason}", "returned"
        return self._lost(visit)

    def _lost(self, visit: Visit) -> tuple[int, str | None, str]:
        """It has not said how its part ended: another attempt began, or another worker of its route was lost."""
        after = next((each for each in self._routes if each.attempt > visit.attempt), None)
        if after is not None:
            reason = "revoked" if visit.revoked else after.reason or "worker_lost"
            return after.since_ns, reason, reason.partition(":")[0]
        if self._done is not None:
            code = self._done.code or "worker_lost"
            return self._done.timings.ended_ns, self._done.message or code, code
        return visit.given_ns, None, ""
