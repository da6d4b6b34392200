"""Whether a worker can take a request, and what that would cost: filter and score of one worker at a time. Pure."""

from collections.abc import Callable
from typing import Literal

import msgspec

from infra.bus.revisions import reads
from router.load_tracker import DIFFUSION, ENCODE, RoutingTarget, serves
from schemas.errors import Code
from schemas.fleet import Registration, State

Mode = Literal["kv", "round_robin", "random", "least_loaded", "direct"]
Need = Callable[[Registration], str]  # what else excludes a worker

LOCAL_PREFILL_TOKENS = 256


class RoutingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the policy must know of a request. Sizes in tokens; ``prompt_blocks`` full blocks."""

    model: str
    prompt_tokens: int
    max_tokens: int
    prompt_blocks: int = 0
    n: int = 1
    worker: str = ""  # this one and no other: a worker's id or name
    avoid: frozenset[str] = frozenset()  # workers that failed this request; taken only if nobody else is left
    resumed_tokens: int = 0  # of earlier attempts: to be computed as the prompt is
    medium: bytes = b""  # digest of its first medium; empty: it has none
    picture: str = ""  # "image" or "video", if it asks for one; else for tokens
    processors: frozenset[str] = frozenset()  # logits processors that it names
    revision: str | None = None  # of the model, that must answer it; None: any
    tokenizer: str = ""  # digest of the one that made the prompt

    def names(self, registration: Registration) -> bool:
        """Whether the request asks for this very worker."""
        return bool(self.worker) and self.worker in (registration.worker, registration.name)


class Weights(msgspec.Struct, frozen=True):
    """Of the terms of the score; ``temperature`` above 0 draws by softmax over scores scaled to 0..1.

    ``local_prefill_tokens``: a decode worker computes so many prompt tokens itself.
    """

    overlap: float = 1.0
    prefill: float = 1.0
    temperature: float = 0.0
    transfer: float = 1.0
    local_prefill_tokens: int = LOCAL_PREFILL_TOKENS


# Why a worker was not scored. First what may pass: then waiting helps, whatever is wrong with the other workers.
_PASSING = ("full", "prefill_full", "draining", "other_revision", "other_tokenizer", "no_encoder")
_HOPELESS = {
    "other_kind": (Code.invalid_request, "the worker that it names makes something else"),
    "no_transfer": (Code.unsupported, "nobody can be handed what encode workers make of images"),
    "too_small": (Code.out_of_blocks, "its prompt is larger than any worker's cache"),
    "too_long": (Code.context_length_exceeded, "prompt and max_tokens exceed every worker's max_model_len"),
    "no_vision": (Code.unsupported, "no worker takes images: start an encode worker, or one whose model has vision"),
    "no_processor": (Code.invalid_request, "no worker has all the logits processors that it names"),
    "encode_only": (Code.invalid_request, "the worker that it names only encodes media"),
    "unknown_worker": (Code.invalid_request, "the worker that it names is not registered"),
    "worker_not_named": (Code.invalid_request, "in routing mode direct a request has to name its worker"),
}


def common_reason(reasons: set[str]) -> str:
    """Why nobody is left."""
    return next((reason for reason in (*_PASSING, *_HOPELESS) if reason in reasons), "no_worker")


def verdict(reason: str) -> Code | None:
    """The error of a request for which no worker is left for this reason; None: it should wait."""
    return _HOPELESS[reason][0] if reason in _HOPELESS else None


def explained(reason: str) -> str:
    """A reason with what it means, for whoever asked."""
    return f"{reason}: {_HOPELESS[reason][1]}" if reason in _HOPELESS else reason


def excluded(request: RoutingRequest, target: RoutingTarget, need: Need | None = None) -> str:
    """Why ``target`` cannot take the request now, at the stage of its role; empty: it can."""
    registration = target.registration
    if not serves(registration, request.model):
        return "other_model"
    if request.worker and not request.names(registration):
        return "not_asked_for"
    if request.revision is not None and request.revision != registration.revision:
        return "other_revision"
    if not reads(registration, request.tokenizer):
        return "other_tokenizer"
    if request.picture or registration.role == DIFFUSION:
        return _excluded_from_pictures(request, target)
    if registration.role == ENCODE:
        if request.worker:
            return "encode_only"
        if registration.state is not State.ready:
            return "draining"
        return "" if target.room else "full"
    if need is not None and (why := need(registration)):
        return why
    if request.processors and not request.processors.issubset(registration.logits_processors):
        return "no_processor"
    if request.prompt_tokens + request.max_tokens > registration.max_model_len:
        return "too_long"
    if request.prompt_tokens >= registration.total_blocks * registration.block_size:
        return "too_small"
    if registration.state is not State.ready:
        return "draining"
    if target.load.sequences and request.n > target.room:
        return "full"
    return ""


def _excluded_from_pictures(request: RoutingRequest, target: RoutingTarget) -> str:
    registration = target.registration
    made = registration.diffusion.kind if registration.role == DIFFUSION and registration.diffusion else ""
    if made != request.picture:
        return "other_kind" if request.worker else "other_model"
    if registration.state is not State.ready:
        return "draining"
    return "" if target.room else "full"


def score(request: RoutingRequest, target: RoutingTarget, overlap: int, mode: Mode, weights: Weights) -> float:
    """The cost of ``target`` doing everything but the encoding; see ``policy``."""
    load = target.load
    if mode != "kv":
        return load.sequences / max(1, target.registration.slots)
    # As prefill_cost + burden; written out, since this runs for every worker and every request.
    size = target.registration.block_size
    overlap = min(overlap, request.prompt_blocks)
    prefill = (load.prefill_tokens + request.prompt_tokens + request.resumed_tokens) / size - weights.overlap * overlap
    return weights.prefill * max(0.0, prefill) + load.active_blocks + request.prompt_tokens // size - overlap


def busy(target: RoutingTarget) -> float:
    """How much of a worker's slots is taken."""
    return target.load.sequences / max(1, target.registration.slots)


def prefill_cost(request: RoutingRequest, target: RoutingTarget, overlap: int, weights: Weights) -> float:
    """Blocks to be computed before the first token; ``overlap``: leading blocks held."""
    tokens = target.load.prefill_tokens + request.prompt_tokens + request.resumed_tokens
    blocks = tokens / target.registration.block_size - weights.overlap * min(overlap, request.prompt_blocks)
    return weights.prefill * max(0.0, blocks)


def burden(request: RoutingRequest, target: RoutingTarget, overlap: int) -> float:
    """Blocks in use on ``target`` with this request."""
    added = request.prompt_tokens // target.registration.block_size - min(overlap, request.prompt_blocks)
    return target.load.active_blocks + added


def uncached_tokens(request: RoutingRequest, target: RoutingTarget, overlap: int) -> int:
    """What ``target`` would have to compute itself."""
    held = min(overlap, request.prompt_blocks) * target.registration.block_size
    return max(0, request.prompt_tokens + request.resumed_tokens - held)
