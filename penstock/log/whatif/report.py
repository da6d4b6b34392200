"""The effect of a change on recorded decisions, in figures. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.cli.quantile import quantile
from penstock.log.whatif.change import ChosenTargets, Redecided


class Distribution(msgspec.Struct, frozen=True):
    """The distribution of requests. ``ahead``: prompt tokens computed before the first token, queued ones included.

    Attributes:
        cached_share: of all prompt tokens, those that came from a cache.
        ahead_p50, ahead_p95: None: no request was placed.
        balance: prompt tokens to compute at the busiest worker, relative to the mean; 1 is even.
        by_worker: number of requests whose prompt the worker computes.
        decoded_by: number of requests that the worker decodes after another one computed the prompt.
    """

    requests: int
    cached_share: float
    ahead_p50: float | None
    ahead_p95: float | None
    balance: float
    by_worker: dict[str, int]
    decoded_by: dict[str, int] = {}


class Report(msgspec.Struct, frozen=True):
    """
    Attributes:
        decisions: number in the log, within the times.
        usable: decisions whose record suffices to repeat them.
        left_out: the others, by the reason.
        reproduced: decisions that this build repeats as recorded.
        moved: requests that go to another worker with the change.
        waiting: requests for which no worker is left.
    """

    decisions: int
    usable: int
    reproduced: int
    moved: int
    waiting: int
    first_ns: int
    last_ns: int
    recorded: Distribution
    then: Distribution
    ms_per_token: float | None  # from work ahead to the first token, as measured; None: unknown
    left_out: dict[str, int] = {}


def report(
    decisions: int,
    redecided: Sequence[Redecided],
    ms_per_token: float | None = None,
    left_out: Mapping[str, int] = {},  # only read
) -> Report:
    """Compute the figures of all repeated decisions."""
    return Report(
        decisions,
        len(redecided),
        sum(each.reproduced for each in redecided),
        sum(each.then is not None and each.then.route != each.recorded.route for each in redecided),
        sum(each.then is None for each in redecided),
        min((each.at_ns for each in redecided), default=0),
        max((each.at_ns for each in redecided), default=0),
        _placement((each.recorded, each.prompt_tokens) for each in redecided),
        _placement((each.then, each.prompt_tokens) for each in redecided if each.then is not None),
        ms_per_token,
        dict(left_out),
    )


def _placement(choices: Iterable[tuple[ChosenTargets, int]]) -> Distribution:
    requests: Counter[str] = Counter()
    work: Counter[str] = Counter()
    decoded: Counter[str] = Counter()
    prompt = cached = 0
    ahead = []
    for choice, tokens in choices:
        requests[choice.worker] += 1
        work[choice.worker] += tokens - choice.cached
        if len(choice.route) > 1:
            decoded[choice.route[-1][0]] += 1
        prompt += tokens
        cached += choice.cached
        ahead.append(choice.ahead)
    ahead.sort()
    mean = sum(work.values()) / len(work) if work else 0.0
    return Distribution(
        len(ahead),
        cached / prompt if prompt else 0.0,
        quantile(ahead, 0.5, None),
        quantile(ahead, 0.95, None),
        max(work.values()) / mean if mean else 1.0,
        dict(sorted(requests.items())),
        dict(sorted(decoded.items())),
    )


def ms_per_token(measured: Iterable[tuple[float, float]]) -> float | None:
    """The median ratio of time to first token and work ahead.

    Args:
        measured: (ms from the decision to the first token, tokens of work ahead).
    """
    return quantile(sorted(ms / ahead for ms, ahead in measured if ahead > 0), 0.5, None)
