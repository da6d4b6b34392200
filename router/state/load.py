"""Load as data: an active request, what it costs at each stage, and the resulting load of a target.

The speed of each target in computing prompts and in decoding, learnt from measured times. No clock, no NATS.

All targets of a model together give the time of a prompt as ``a + b · tokens``, by least squares over recent prompts.
A target's slowness is the time that its prompts took over the time that they should have taken, relative to the median
of the model's targets. It begins at 1, moves with ``PRIOR`` prompts, forgets after ``MEMORY`` prompts, and counts as 1
while it is within ``NOISE`` of it: equally fast targets must not look different because of what else they had to do.

Decoding is learnt in the same way, from the time between a computed prompt and the end of its request. Its tokens are
those of the context that the target read in each step. How many tokens a request generated is not known, which is the
same for all targets on average; what is left of it is within ``DECODE_NOISE``.
"""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import msgspec

from penstock.router.state.depths import TargetId
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import Stage

ENCODE = "encode"  # the role that computes no part of a prompt


class StageLoad(NamedTuple):
    """What one request costs at one target."""

    target_id: TargetId
    sequences: int
    blocks: int
    uncached_tokens: int  # prompt tokens to compute


class ActiveRequest(msgspec.Struct, omit_defaults=True):
    """A request that was sent to a worker and has not ended. Snapshots store it: fields keep their names.

    Only ``echoed`` and ``seq`` change: what it costs does not.
    """

    request: str
    attempt: int
    worker: str  # at its present stage
    prompt_tokens: int
    cached_tokens: int
    blocks: int  # prompt blocks to compute at the prefill worker
    deadline_ns: int
    rank: int = 0
    n: int = 1  # sequences
    gateway: str = ""
    priority: str = ""
    echoed: bool = False  # read from the log; False: only decided by this router
    seq: int = 0  # of its newest message in WORK; 0: not read yet
    role: str = ""  # of ``worker``
    later: tuple[Stage, ...] = ()  # the stages after this one
    prompt_blocks: int = 0  # all prompt blocks, which a decode worker takes over with the KV
    handed: bool = False  # an earlier stage computed the prompt
    suspect: str = ""  # as in ``Job``

    @property
    def target_id(self) -> TargetId:
        return (self.worker, self.rank)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The present stage and all later ones."""
        return (Stage(self.role, self.worker, self.rank), *self.later)

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)

    def stage_loads(self) -> list[StageLoad]:
        """The cost at each stage that is left. A function of this entry alone: what is added is also subtracted."""
        if not self.later and not self.handed and self.role != ENCODE:
            return [StageLoad((self.worker, self.rank), self.n, self.blocks, self.uncached_tokens)]
        loads, computed = [], self.handed
        for stage in self.stages:
            target_id = (stage.worker, stage.rank)
            if stage.role == ENCODE:
                loads.append(StageLoad(target_id, 1, 0, 0))
            elif computed:
                loads.append(StageLoad(target_id, self.n, self.prompt_blocks, 0))
            else:
                loads.append(StageLoad(target_id, self.n, self.blocks, self.uncached_tokens))
                computed = True
        return loads


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """The load of one target, including requests that are still on their way to it."""

    requests: int = 0
    sequences: int = 0
    active_blocks: int = 0  # prompt blocks of its active requests; cached blocks count where they were computed
    prefill_tokens: float = 0.0  # prompt tokens still to compute
    computing: int = 0  # sequences whose prompt is known not to be computed yet
    slowness: float = 1.0  # time per prompt token, relative to the other targets of the model
    context_blocks: int = 0  # prompt blocks of its active sequences, shared ones counted for each
    decode_slowness: float = 1.0  # time per step, relative to the other targets of the model
    served_tokens: int = 0  # of prompts that this router sent there lately; more if another router prefers it


class RoutingTarget(msgspec.Struct, frozen=True):
    """A worker, or one attention data-parallel rank of it, that requests can be sent to."""

    id: TargetId
    registration: Registration
    load: Load

    @property
    def capacity(self) -> int:
        """Further sequences that it accepts."""
        return max(0, self.registration.slots + self.registration.queue - self.load.sequences)


class LoadState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a ``LoadTracker`` for a snapshot. Registrations come from the bucket and are not part of it."""

    unfinished: tuple[ActiveRequest, ...] = ()
    closed: tuple[tuple[str, int], ...] = ()  # request, highest attempt that ended
    backlogs: tuple[tuple[str, int, float, int], ...] = ()  # worker, rank, tokens, at_ns
    returned: tuple[tuple[str, int, str], ...] = ()  # request, attempt, ``Returned.crashed``
    losses: tuple[tuple[str, str, str, int], ...] = ()  # of leases, see ``LeaseLosses``
    losses_together: tuple[tuple[str, str, str, int], ...] = ()


def merge(parts: Iterable[LoadState]) -> LoadState:
    """Join the parts of ``LoadTracker.parts``."""
    states = list(parts)
    return LoadState(
        tuple(entry for state in states for entry in state.unfinished),
        tuple(entry for state in states for entry in state.closed),
        tuple(entry for state in states for entry in state.backlogs),
        tuple(entry for state in states for entry in state.returned),
        tuple(entry for state in states for entry in state.losses),
        tuple(entry for state in states for entry in state.losses_together),
    )


def serves(registration: Registration, model: str) -> bool:
    """Whether the worker serves ``model``, by name or alias."""
    return model == registration.model or model in registration.aliases


MEMORY = 200
PRIOR = 20
NOISE = 0.2
DECODE_NOISE = 0.35
MEDIAN_EVERY = 32  # prompts of a model
SLOWEST, FASTEST = 8.0, 0.125
_FADE = 1 - 1 / MEMORY
_FIT_FADE = 1 - 1 / (10 * MEMORY)


class _Fit:
    """Sums for a least squares line through (tokens, seconds), where old points fade."""

    __slots__ = ("count", "products", "seconds", "squares", "tokens")

    def __init__(self) -> None:
        self.count = self.tokens = self.seconds = self.squares = self.products = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.count = self.count * _FIT_FADE + 1
        self.tokens = self.tokens * _FIT_FADE + tokens
        self.seconds = self.seconds * _FIT_FADE + seconds
        self.squares = self.squares * _FIT_FADE + tokens * tokens
        self.products = self.products * _FIT_FADE + tokens * seconds

    def expected(self, tokens: float) -> float:
        """Seconds for a prompt with so many tokens to compute, by the mean of all targets."""
        spread = self.count * self.squares - self.tokens * self.tokens
        mean = self.seconds / self.count
        if spread <= 1e-9 * self.squares * self.count:
            return mean
        slope = max(0.0, (self.count * self.products - self.tokens * self.seconds) / spread)
        return max(mean + slope * (tokens - self.tokens / self.count), 0.05 * mean)


class LearnedCosts:
    """Slowness by target.

    Args:
        noise: so close to 1 it counts as 1.

    Attributes:
        samples: prompts that were learnt from.
    """

    def __init__(self, noise: float = NOISE) -> None:
        self.samples = 0
        self._noise = noise
        self._fits: dict[str, _Fit] = {}  # by model
        self._ratios: dict[str, dict[TargetId, float]] = {}  # by model: time over expected time
        self._medians: dict[str, float] = {}
        self._targets: dict[TargetId, tuple[float, float]] = {}  # seconds that prompts took, and should have taken

    def computed(self, model: str, target: TargetId, tokens: float, seconds: float) -> float:
        """A target computed ``tokens`` of prompts in ``seconds``; returns its slowness from now on."""
        fit = self._fits.setdefault(model, _Fit())
        fit.add(tokens, seconds)
        self.samples += 1
        took, expected = self._targets.get(target, (0.0, 0.0))
        took, expected = took * _FADE + seconds, expected * _FADE + fit.expected(tokens)
        self._targets[target] = took, expected
        prior = PRIOR * fit.seconds / fit.count
        if prior <= 0:
            return 1.0
        ratios = self._ratios.setdefault(model, {})
        ratios[target] = (took + prior) / (expected + prior)
        if self.samples % MEDIAN_EVERY == 0 or model not in self._medians:
            self._medians[model] = median(ratios.values())
        slowness = min(max(ratios[target] / self._medians[model], FASTEST), SLOWEST)
        return 1.0 if abs(slowness - 1) < self._noise else slowness

    def expected(self, model: str, tokens: int, least_samples: int) -> float | None:
        """Seconds that a prompt with so many tokens to compute takes, by the mean of the model's targets.

        None: it would rest on fewer samples.
        """
        fit = self._fits.get(model)
        return fit.expected(tokens) if fit is not None and fit.count >= least_samples else None

    def forget(self, target: TargetId) -> None:
        self._targets.pop(target, None)
        for ratios in self._ratios.values():
            ratios.pop(target, None)
