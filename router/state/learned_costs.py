"""The speed of each target in computing prompts and in decoding, learnt from measured times. No clock, no NATS.

All targets of a model together give the time of a prompt as ``a + b · tokens``, by least squares over recent prompts.
A target's slowness is the time that its prompts took over the time that they should have taken, relative to the median
of the model's targets. It begins at 1, moves with ``PRIOR`` prompts, forgets after ``MEMORY`` prompts, and counts as 1
while it is within ``NOISE`` of it: equally fast targets must not look different because of what else they had to do.

Decoding is learnt in the same way, from the time between a computed prompt and the end of its request. Its tokens are
those of the context that the target read in each step. How many tokens a request generated is not known, which is the
same for all targets on average; what is left of it is within ``DECODE_NOISE``.
"""

from statistics import median

from penstock.router.state.depths import TargetId

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
