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

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.log_tools.timeline.request_timeline import (
    PromptPrefilled,
    RequestAccepted,
    RequestRouted,
    RequestTimeline,
    StageRun,
)
from penstock.log_tools.traces import spans as attributes
from penstock.schemas.done import Done
from penstock.schemas.errors import Code
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.trace import Stamps, read_parent, span_id, stage_name, trace_id
from penstock.schemas.transfer import PREFIX

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]


class SpanLink(msgspec.Struct, frozen=True):
    """To another span of the same trace; ``why``: "retry" or "handoff"."""

    span_id: str
    why: str


class SpanEvent(msgspec.Struct, frozen=True):
    name: str
    at_ns: int
    attributes: Attributes = {}


class Span(msgspec.Struct):
    """One span. ``error``: what went wrong, as text; None: nothing."""

    name: str
    service: str  # "gateway", "router", "worker"
    instance: str  # which one
    trace_id: str
    span_id: str
    parent_id: str  # "": the trace starts here
    start_ns: int
    end_ns: int
    kind: str = "internal"  # "server", "internal", "consumer", "client"
    attributes: dict[str, Value] = {}
    links: list[SpanLink] = []
    events: list[SpanEvent] = []
    error: str | None = None
    state: str = ""  # W3C tracestate


def covered(spans: Sequence[Span]) -> list[Span]:
    """The same spans, root first, where no span ends before it starts and each lies within its parent.

    Clocks of several hosts differ, and what a worker does for others outlasts its own part. A parent grows to contain
    its children, so that no time is cut off or invented.
    """
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        span.end_ns = max(span.start_ns, span.end_ns)
    for span in reversed(_parents_first(spans, by_id)):
        parent = by_id.get(span.parent_id)
        if parent is not None:
            parent.start_ns = min(parent.start_ns, span.start_ns)
            parent.end_ns = max(parent.end_ns, span.end_ns)
    return list(spans)


def in_order(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Spans with their depths: root first, each before its children, children by their start."""
    below: dict[str, list[Span]] = {}
    for span in spans[1:]:
        below.setdefault(span.parent_id, []).append(span)

    def walk(span: Span, depth: int) -> list[tuple[int, Span]]:
        spans = [(depth, span)]
        for child in sorted(below.get(span.span_id, []), key=lambda each: (each.start_ns, -each.end_ns)):
            spans += walk(child, depth + 1)
        return spans

    return walk(spans[0], 0)


def _parents_first(spans: Sequence[Span], by_id: Mapping[str, Span]) -> list[Span]:
    def depth(span: Span) -> int:
        above = by_id.get(span.parent_id)
        return 0 if above is None else 1 + depth(above)

    return sorted(spans, key=depth)


PROVIDER = "penstock"

_OPERATIONS = {
    "chat": "chat",
    "response": "chat",
    "compaction": "chat",
    "message": "chat",
    "text": "text_completion",
    "embedding": "embeddings",
    "rerank": "rerank",
    "score": "score",
    "image": "generate_content",
    "video": "generate_content",
}
# The names under which engines that export spans themselves (vLLM, TensorRT-LLM) report the same.
_ENGINE = {
    "queue_s": "gen_ai.latency.time_in_queue",
    "prefill_s": "gen_ai.latency.time_in_model_prefill",
    "decode_s": "gen_ai.latency.time_in_model_decode",
    "ttft_s": "gen_ai.latency.time_to_first_token",
    "e2e_s": "gen_ai.latency.e2e",
}


def operation(request: GenerateRequest) -> str:
    return _OPERATIONS.get(request.endpoint, "generate_content")


def of_accepted(accepted: RequestAccepted) -> dict[str, Value]:
    """What the client asked for: parameters and counts, never the content of its prompt."""
    request = accepted.request
    sampling = request.sampling
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation(request),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.output.type": request.output or "text",
        "gen_ai.response.id": request.id,
        "penstock.request.id": request.id,
        "penstock.request.class": request.priority.value,
    }
    if request.diffusion is not None:
        return attributes | {"penstock.request.steps": request.diffusion.steps}
    if request.embedding is not None:
        scored = request.embedding.scores
        return attributes | ({} if scored else {"gen_ai.embeddings.dimension.count": request.embedding.dimensions})
    attributes |= {
        "gen_ai.usage.input_tokens": accepted.prompt_tokens,
        "gen_ai.request.max_tokens": request.stop.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
    }
    limits: dict[str, tuple[Any, Any]] = {
        "gen_ai.request.choice.count": (request.n, 1),
        "gen_ai.request.top_k": (sampling.top_k, 0),
        "gen_ai.request.frequency_penalty": (sampling.frequency_penalty, 0.0),
        "gen_ai.request.presence_penalty": (sampling.presence_penalty, 0.0),
        "penstock.request.media": (accepted.media, 0),
        "penstock.request.lora": (request.lora, ""),
    }
    return attributes | {name: value for name, (value, default) in limits.items() if value != default}


def of_end(done: Done) -> dict[str, Value]:
    """How the request ended."""
    attributes: dict[str, Value] = {
        "gen_ai.response.model": done.model,
        "gen_ai.usage.input_tokens": done.usage.prompt,
        "gen_ai.usage.output_tokens": done.usage.completion,
        "gen_ai.usage.cache_read.input_tokens": done.usage.cached,
        "penstock.attempts": done.attempt,
    }
    reasons = [choice.reason for choice in done.choices if choice.reason]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    first, created = done.timings.client_first_token_ns, done.timings.created_ns
    if first > created > 0:
        attributes["gen_ai.response.time_to_first_chunk"] = (first - created) / 1e9
    return attributes | of_code(done.code)


def of_code(code: str) -> dict[str, Value]:
    if not code:
        return {}
    return {"error.type": code, "http.response.status_code": status(code)}


def status(code: str) -> int:
    """The HTTP status of an error code; 500 for codes of later versions."""
    return Code(code).status if code in Code.__members__ else 500


def of_routed(routed: RequestRouted) -> dict[str, Value]:
    """Why these workers. The score table itself stays in the log: ``penstock inspect`` prints it."""
    decision = routed.decision
    attributes: dict[str, Value] = {
        "penstock.attempt": routed.attempt,
        "penstock.router.mode": decision.mode,
        "penstock.router.worker": decision.chosen,
        "penstock.router.reason": decision.reason or "new",
        "penstock.router.candidates": routed.candidates,
        "penstock.router.excluded": routed.excluded,
        "penstock.router.prompt_blocks": decision.prompt_blocks,
        "penstock.router.waited": decision.waited_ns / 1e9,
        "penstock.router.kv_sequence": decision.kv_seq,
    }
    if decision.route:
        attributes["penstock.router.route"] = [f"{stage.role} {stage.worker}" for stage in decision.route]
    if decision.how:
        attributes["penstock.router.why"] = decision.how
    if routed.overlap_blocks is not None and routed.score is not None:
        attributes["penstock.router.overlap_blocks"] = routed.overlap_blocks
        attributes["penstock.router.score"] = routed.score
    return attributes


def of_stamps(stamps: Stamps) -> dict[str, Value]:
    """Measurements of the worker and its engine."""
    attributes: dict[str, Value] = {"penstock.worker.preemptions": stamps.preemptions}
    for name, value in stamps.engine.items():
        stem = f"{name.removesuffix('_s')}.duration" if name.endswith("_s") else name
        attributes[_ENGINE.get(name, f"penstock.engine.{stem}")] = value
    return attributes


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
        self, parent: Span, stage: StageRun, name: str, ticket: str, backend: str = "", links: Sequence[SpanLink] = ()
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
