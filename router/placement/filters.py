"""Whether a target can take a request, and if not, why. Pure."""

from collections.abc import Callable, Iterable

from penstock.router.placement.routing import RoutingRequest
from penstock.router.state.load import ENCODE, RoutingTarget, serves
from penstock.schemas.errors import Code
from penstock.schemas.fleet import APART, Registration, State, reads
from penstock.schemas.requests import CONSTRAINT_MARKS

Requirement = Callable[[Registration], str]  # a further filter: returns a reason, or "" if the worker passes

# Reasons that may pass. One of them is enough to let the request wait, whatever is wrong with the other workers.
_TEMPORARY = (
    "full", "better_full", "prefill_full", "no_partner", "draining", "other_revision", "other_tokenizer", "no_encoder",
)  # fmt: skip
# Reasons that end the request.
_PERMANENT = {
    "other_kind": (Code.invalid_request, "the named worker does not produce this kind of output"),
    "no_transfer": (Code.unsupported, "no worker can receive image embeddings"),
    "too_small": (Code.out_of_blocks, "the prompt does not fit into any worker's KV cache"),
    "too_long": (Code.context_length_exceeded, "prompt and max_tokens exceed every worker's max_model_len"),
    "no_vision": (Code.unsupported, "no worker accepts images: start an encode worker or a worker with a vision model"),
    "no_processor": (Code.invalid_request, "no worker has all the requested logits processors"),
    "no_constraints": (
        Code.unsupported,
        "no worker applies structured output: install penstock[structured] where native and mock workers run",
    ),
    "encode_only": (Code.invalid_request, "the named worker only encodes media"),
    "unknown_worker": (Code.invalid_request, "the named worker is not registered"),
    "pair_only": (Code.invalid_request, "the named worker runs requests only together with another one; name none"),
    "worker_not_named": (Code.invalid_request, "routing mode direct requires a worker name in the request"),
}


def common_reason(reasons: Iterable[str]) -> str:
    """The one reason to report when every target was rejected; temporary reasons come first."""
    distinct = set(reasons)
    return next((reason for reason in (*_TEMPORARY, *_PERMANENT) if reason in distinct), "no_worker")


def error_code(reason: str) -> Code | None:
    """The error that ends a request rejected for this reason; None: the request can wait."""
    return _PERMANENT[reason][0] if reason in _PERMANENT else None


def describe(reason: str) -> str:
    """A reason with its explanation, for error messages."""
    return f"{reason}: {_PERMANENT[reason][1]}" if reason in _PERMANENT else reason


def rejection(request: RoutingRequest, target: RoutingTarget, requirement: Requirement | None = None) -> str:
    """Why ``target`` cannot take the stage of its role now; "": it can."""
    registration = target.registration
    if not serves(registration, request.model):
        return "other_model"
    if request.worker and not request.names(registration):
        return "other_worker"
    if request.revision is not None and request.revision != registration.revision:
        return "other_revision"
    if not reads(registration, request.tokenizer):
        return "other_tokenizer"
    if request.output or registration.role in APART:
        return _rejection_apart(request, target)
    if registration.role == ENCODE:
        if request.worker:
            return "encode_only"
        if registration.state is not State.ready:
            return "draining"
        return "" if target.capacity else "full"
    if requirement is not None and (reason := requirement(registration)):
        return reason
    if request.processors and not request.processors.issubset(registration.logits_processors):
        missing = request.processors.difference(registration.logits_processors)
        return "no_constraints" if missing & CONSTRAINT_MARKS else "no_processor"
    if request.prompt_tokens + request.max_tokens > registration.max_model_len:
        return "too_long"
    if request.prompt_tokens >= registration.total_blocks * registration.block_size:
        return "too_small"
    if registration.state is not State.ready:
        return "draining"
    if target.load.sequences and request.n > target.capacity:  # an idle target takes any one request
        return "full"
    return ""


def _rejection_apart(request: RoutingRequest, target: RoutingTarget) -> str:
    """Of requests for images, videos or vectors, and of workers that make them."""
    registration = target.registration
    if registration.output != request.output:
        return "other_kind" if request.worker else "other_model"
    if registration.state is not State.ready:
        return "draining"
    return "" if target.capacity else "full"
