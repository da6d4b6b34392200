"""How long an engine takes for a prompt and for a token, at any load: a profile, carried on beyond its points.

``penstock profile sla`` guesses nothing beyond what was measured. A planner has to decide also then, so the last slope
goes on, and a context beyond the longest one counts as more requests of that context with as many tokens in all.
"""

from penstock.measure.profile.data import BadProfile, Profile
from penstock.measure.profile.interpolate import DecodeSurface, between

_UNKNOWN = 1 << 30


class EngineTiming:
    """Of one worker.

    Raises:
        BadProfile: prefill or decode has no points.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.gpus = profile.setup.gpus
        self.dp = profile.setup.attention_dp
        self._surface = DecodeSurface(profile.decode)
        if not profile.prefill.prefill_isl or not self._surface.contexts:
            raise BadProfile(f"the profile of {profile.setup.model} needs points of prefill and of decode")

    def prefill_ms(self, tokens: float) -> float:
        """To compute ``tokens`` of a prompt that is alone at a rank."""
        lengths, times = self.profile.prefill.prefill_isl, self.profile.prefill.prefill_ttft
        if tokens <= lengths[0]:
            return times[0]
        inside = between(tokens, lengths, times)
        if inside is not None:
            return inside
        if len(lengths) == 1:
            return times[0] * tokens / lengths[0]
        slope = (times[-1] - times[-2]) / (lengths[-1] - lengths[-2])
        return times[-1] + max(0.0, slope) * (tokens - lengths[-1])

    def itl_ms(self, context: float, concurrency: float) -> float:
        """Per token, while ``concurrency`` requests of ``context`` tokens decode at once."""
        contexts = self._surface.contexts
        known = min(max(context, contexts[0]), contexts[-1])
        concurrency *= max(1.0, context / known)
        low, high = self._surface.levels(known)
        if not high:  # no level was measured at both of the nearest contexts: the longer one alone
            known = next(each for each in contexts if each >= known)
            low, high = self._surface.levels(known)
        inside = self._at(known, min(max(concurrency, low), high))
        if concurrency <= high or high == low:
            return inside
        middle = (low + high) / 2
        slope = (inside - self._at(known, middle)) / (high - middle)
        return inside + max(0.0, slope) * (concurrency - high)

    def most(self, tokens: float) -> int:
        """Requests of ``tokens`` each, prompt and answer, that decode at once; at least one."""
        setup = self.profile.setup
        fit = int(setup.max_kv_tokens / tokens) if setup.max_kv_tokens else _UNKNOWN
        return max(1, min(fit, setup.max_batch or _UNKNOWN))

    def _at(self, context: float, concurrency: float) -> float:
        found = self._surface.itl(context, concurrency)
        assert found is not None, (context, concurrency)
        return found
