"""One span, as plain data with the field names of OpenTelemetry; ids in lower-case hex, times in Unix ns.

Attributes of spans: named as in OpenTelemetry's GenAI conventions, else ``penstock.…``. Times are in seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.log_tools.timeline.events import RequestAccepted, RequestRouted
from penstock.schemas.done import Done
from penstock.schemas.errors import Code
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.trace import Stamps

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
