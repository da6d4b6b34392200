"""The inputs and the result of a routing decision. Data only.

A ``RoutingContext`` holds every input of a decision: a recorded context can be decided again, with the same result.
"""

from collections.abc import Mapping, Sequence
from math import exp
from random import Random
from typing import Literal

import msgspec

from penstock.configs.settings import RouterMode
from penstock.router.state.holders import TargetId
from penstock.router.state.target_loads import ENCODE, RoutingTarget
from penstock.schemas.errors import Code
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import Candidate, Stage

PREFILL_QUEUE_TOKENS = 18_432
LOCAL_PREFILL_TOKENS = 256  # of a decode worker without a GPU, unless a limit is set
TIE = 1e-6  # scores closer than this are equal
PATIENCE_S = 0.004  # per prompt token that a better target saves: for so long a request waits for it

RouteKind = Literal["aggregated", "local", "local_behind", "split"]


class RoutingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of a request that routing depends on. ``*_tokens`` are token counts, ``*_blocks`` full blocks."""

    model: str
    prompt_tokens: int
    max_tokens: int
    prompt_blocks: int = 0
    n: int = 1  # sequences
    worker: str = ""  # the only worker allowed, by id or name; empty: any
    avoid: frozenset[str] = frozenset()  # worker ids to use only if no other worker is left
    resumed_tokens: int = 0  # streamed by earlier attempts, computed together with the prompt
    medium: bytes = b""  # digest of its first medium; empty: text only
    output: str = ""  # "image", "video" or "embedding"; empty: tokens
    processors: frozenset[str] = frozenset()  # logits processors that the worker must have
    revision: str | None = None  # of the model; None: any
    tokenizer: str = ""  # digest of the tokenizer that encoded the prompt
    shared_blocks: int = 0  # leading ones that many prompts begin with (``SharedPrefixes``)
    session: tuple[TargetId, ...] = ()  # targets of its session's last request (``Sessions``)
    adapter: str = ""  # id of the LoRA adapter that the worker must have

    def names(self, registration: Registration) -> bool:
        """Whether the request names this worker."""
        return bool(self.worker) and self.worker in (registration.worker, registration.name)


class Weights(msgspec.Struct, frozen=True):
    """Weights of the score's terms; ``placement.cost`` has the formula.

    Attributes:
        temperature: 0 takes the lowest score; above 0 draws by softmax over the scores, scaled to 0..1.
        local_prefill_tokens: a decode worker computes up to this many prompt tokens itself; -1: see ``local_tokens``.
        prefill_queue_tokens: beyond so many at every prefill worker (``decide.queue_tokens``), a decode worker computes
            any prompt itself where that costs less; 0: never.
    """

    overlap: float = 1.0
    prefill: float = 1.0
    temperature: float = 0.0
    transfer: float = 1.0
    local_prefill_tokens: int = -1
    prefill_queue_tokens: int = PREFILL_QUEUE_TOKENS

    def local_tokens(self, *, gpu: bool) -> int:
        """Prompt tokens up to which a decode worker computes a prompt itself.

        Unless a limit is set, none on a GPU: there a prompt delays the answers beside it by more than a transfer does.
        """
        if self.local_prefill_tokens >= 0:
            return self.local_prefill_tokens
        return 0 if gpu else LOCAL_PREFILL_TOKENS


class RoutingContext(msgspec.Struct, frozen=True):
    """All inputs of one decision.

    Attributes:
        targets: in the order of ``LoadTracker.targets``.
        overlaps: leading prompt blocks cached, by target (``PrefixIndex.match``); absent: none.
        seed: breaks ties and draws in mode "random" and at a temperature above 0.
        number: of the decision, for mode "round_robin".
        leading: leading prompt blocks that active requests have, by target; absent: none.
        waited_s: since its arrival; None: it waits for no better target.
    """

    request: RoutingRequest
    targets: Sequence[RoutingTarget]
    overlaps: Mapping[TargetId, int]
    mode: RouterMode
    weights: Weights
    seed: int
    number: int = 0
    leading: Mapping[TargetId, int] = {}
    waited_s: float | None = None

    def overlap(self, target: RoutingTarget) -> int:
        """Leading prompt blocks that ``target`` caches, or will have computed for an active request."""
        blocks = max(self.overlaps.get(target.id, 0), self.leading.get(target.id, 0))
        return min(blocks, self.request.prompt_blocks)

    def pick(self, scores: Sequence[float], stage: int = 0) -> int:
        """The position of the score to take; each ``stage`` draws independently."""
        seed = draw(self.seed, stage)
        if self.mode == "round_robin":
            return self.number % len(scores)
        if self.mode == "random":
            return seed % len(scores)
        return lowest(scores, self.weights.temperature, seed)

    def without_avoided(self, targets: list[RoutingTarget]) -> list[RoutingTarget]:
        """``targets`` without the workers to avoid, unless no other is left."""
        avoid = self.request.avoid
        return [target for target in targets if target.id[0] not in avoid] or targets if avoid else targets


class RoutingDecision(msgspec.Struct, frozen=True):
    """Where a request goes. An empty ``route`` means nowhere: ``reason`` says why.

    Attributes:
        route: the stages in order.
        candidates: the score table that is stored with the job.
        overlap_blocks: prompt blocks cached at the worker that computes the prompt.
        code: without a route, the error to end the request with; None: the request can wait.
        how: for people, why this kind of route was taken.
        kind: "local" means that one worker of a disaggregated pool runs all stages; "local_behind" that a decode worker
            does since the prefill workers are behind.
    """

    route: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]
    overlap_blocks: int = 0
    reason: str = ""
    code: Code | None = None
    how: str = ""
    kind: RouteKind = "aggregated"

    @property
    def present_blocks(self) -> int:
        """Prompt blocks that need not be computed, because they are cached or read from another worker."""
        move = self.route[0].move if self.route else None
        return self.overlap_blocks if move is None else move.blocks

    @property
    def chosen(self) -> TargetId | None:
        """The target of the first stage."""
        return (self.route[0].worker, self.route[0].rank) if self.route else None

    @property
    def prefill_worker(self) -> str:
        """The worker that computes the prompt; the route must not be empty."""
        return next(stage.worker for stage in self.route if stage.role != ENCODE)


def draw(seed: int, stage: int = 0) -> int:
    """20 bits of a seed, others for each stage: multiplicative hashing by odd constants without a pattern in bits."""
    return ((seed + 1) * (0x85EBCA6B if stage else 0x9E3779B1) & 0xFFFFFFFF) >> 12


def lowest(scores: Sequence[float], temperature: float, seed: int) -> int:
    """The position of the lowest score, or of one drawn by softmax at a temperature above 0."""
    best = min(scores)
    if temperature <= 0:
        ties = [at for at, value in enumerate(scores) if value - best <= TIE]
        return ties[seed % len(ties)]  # seeding a generator would cost as much as the rest of a decision
    scale = (max(scores) - best) * temperature
    if scale <= 0:
        return Random(seed).randrange(len(scores))
    return Random(seed).choices(range(len(scores)), [exp((best - value) / scale) for value in scores])[0]
