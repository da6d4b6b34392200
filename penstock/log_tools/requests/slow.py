"""Where the slow requests differ from the others, and what those with each value of a property took. Pure.

What a property explains is the uncertainty coefficient (Theil's U): of the uncertainty about which requests are slow,
the share that is gone once the property is known. It is the mutual information of the two, divided by the entropy of
being slow, with the correction of Miller and Madow, since chance alone makes many values explain something. Numbers are
compared by eighths of all requests. A property is left out unless a G-test finds a difference that chance makes in less
than one of 10,000 cases.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from heapq import nlargest
from typing import Any, NamedTuple

import msgspec

from penstock.cli.figures import counted, quantile, span
from penstock.schemas.summary import FAILED, RequestSummary

LEAST = 20  # slow requests, below which chance decides
FEWEST = 5  # of them in a group that is named
GROUPS = 5  # named of each property
EXAMPLES = 3
_PARTS = 8
_Z = 3.72  # standard deviations: one of 10,000 is above


class Group(msgspec.Struct, frozen=True):
    """Requests with one value of a property: how many are slow, and how many are not."""

    value: str
    slow: int
    others: int
    slow_share: float
    others_share: float


class Difference(msgspec.Struct, frozen=True):
    """A property in which the slow differ.

    Attributes:
        explains: from 0 to 1.
        groups: the values that are more frequent among the slow, the largest difference first.
    """

    property: str
    explains: float
    groups: tuple[Group, ...]


class Slow(msgspec.Struct, frozen=True):
    """Attributes:
    measure: "duration", "ttft" or "itl".
    from_ms: those that took at least so long are the slow ones.
    examples: the ids of the slowest.
    """

    measure: str
    percent: float
    slow: int
    others: int
    from_ms: float
    slow_median_ms: float
    others_median_ms: float
    differences: tuple[Difference, ...]
    examples: tuple[str, ...]


class HeatMap(NamedTuple):
    """How many requests were accepted at a time and took so long.

    Attributes:
        begins_s: of the columns (Unix time), which are ``step_s`` wide.
        from_ms: of the rows, ascending; each ends where the next begins.
        counts: by row, then column.
    """

    begins_s: list[int]
    step_s: int
    from_ms: list[float]
    counts: list[list[int]]


def itl_ms(request: RequestSummary) -> float | None:
    """The mean gap between tokens; None: unknown, or there are fewer than two."""
    gaps = request.completion_tokens - 1
    known = gaps > 0 and request.first_token_ns and request.ended_ns
    return (request.ended_ns - request.first_token_ns) / 1e6 / gaps if known else None


MEASURES: dict[str, Callable[[RequestSummary], float | None]] = {
    "duration": lambda request: request.duration_ms,
    "ttft": lambda request: request.ttft_ms,
    "itl": itl_ms,
}


# The value of each property of a request; "" counts as one, too.
_NAMED: dict[str, Callable[[RequestSummary], str]] = {
    "worker": lambda request: request.worker,
    "first worker": lambda request: next(iter(request.workers), ""),
    "lost worker": lambda request: ", ".join(request.lost_workers),
    "router": lambda request: request.router,
    "attempts": lambda request: str(request.attempts),
    "model": lambda request: request.model,
    "revision": lambda request: request.revision,
    "engine": lambda request: f"{request.engine} {request.build}".strip(),
    "adapter": lambda request: request.adapter,
    "tenant": lambda request: request.tenant,
    "user": lambda request: request.user,
    "class": lambda request: request.priority,
    "endpoint": lambda request: request.endpoint,
    "state": lambda request: request.state,
}
_NUMBERS: dict[str, tuple[str, Callable[[RequestSummary], float]]] = {
    "prompt": ("tokens", lambda request: request.prompt_tokens),
    "computed prompt": ("tokens", lambda request: request.prompt_tokens - request.cached_tokens),
    "cached share": ("%", lambda request: 100 * request.cached_tokens / max(1, request.prompt_tokens)),
    "output": ("tokens", lambda request: request.completion_tokens),
    "wait for a worker": ("ms", lambda request: max(0, request.routed_ns - request.created_ns) / 1e6),
}
PROPERTIES = tuple(_NAMED)
_CELL = "cell"
_STEPS_S = (1, 10, 60, 600, 3600, 6 * 3600, 86400)
_MOST_STEPS = 50
_SHORTEST_MS = 0.01


class ComparedGroup(msgspec.Struct, frozen=True):
    """Requests with one value of a property. Percentiles are of those that have the measure; 0.0: none has.

    Attributes:
        failed: ended with an error.
        output_tokens: mean of an answer.
    """

    value: str
    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    duration_p50_ms: float
    duration_p99_ms: float
    output_tokens: float


class GroupComparison:
    """What requests took, by the value of a property. ``add`` those that have ended.

    Args:
        name: of ``PROPERTIES``.
    """

    def __init__(self, name: str) -> None:
        self._value_of = _NAMED[name]
        self._took: dict[str, dict[str, array[float]]] = {}
        self._counts: dict[str, list[int]] = {}  # requests, failed, output tokens

    def add(self, request: RequestSummary) -> None:
        value = self._value_of(request)
        counts = self._counts.setdefault(value, [0, 0, 0])
        counts[0] += 1
        counts[1] += request.state == FAILED
        counts[2] += request.completion_tokens
        took = self._took.setdefault(value, {name: array("d") for name in MEASURES})
        for name, measure in MEASURES.items():
            if (found := measure(request)) is not None:
                took[name].append(found)

    def groups(self) -> list[ComparedGroup]:
        """The values with most requests first."""
        found = []
        for value, (requests, failed, tokens) in self._counts.items():
            took = {name: sorted(values) for name, values in self._took[value].items()}
            found.append(
                ComparedGroup(
                    value,
                    requests,
                    failed,
                    quantile(took["ttft"], 0.5, 0.0),
                    quantile(took["ttft"], 0.99, 0.0),
                    quantile(took["itl"], 0.5, 0.0),
                    quantile(took["duration"], 0.5, 0.0),
                    quantile(took["duration"], 0.99, 0.0),
                    tokens / requests,
                )
            )
        return sorted(found, key=lambda each: (-each.requests, each.value))


def comparison_lines(name: str, groups: Sequence[ComparedGroup]) -> Iterator[str]:
    """For a terminal."""
    width = max([len(name), *(len(each.value or "none") for each in groups)])
    yield f"{name:<{width}}  requests  failed  ttft p50       p99   itl p50  duration p50       p99  tokens"
    for each in groups:
        took = (each.ttft_p50_ms, each.ttft_p99_ms, each.itl_p50_ms, each.duration_p50_ms, each.duration_p99_ms)
        ttft, ttft_p99, itl, duration, duration_p99 = map(span, took)
        yield (
            f"{each.value or 'none':<{width}}  {each.requests:>8}  {each.failed:>6}  {ttft:>8}  {ttft_p99:>8}  {itl:>8}"
            f"  {duration:>12}  {duration_p99:>8}  {each.output_tokens:>6.0f}"
        )


class _Values(NamedTuple):
    """A property by value: the place of each value, and that of each request's."""

    places: dict[str, int]
    of: "array[int]"


class Samples:
    """The properties of requests. ``add`` those that have ended; 100 bytes of each are kept.

    Args:
        measure: of ``MEASURES``.
    """

    def __init__(self, measure: str) -> None:
        self._measure = measure
        self._of = MEASURES[measure]
        self._took: array[float] = array("d")
        self._ids: list[str] = []
        self._named = {name: _Values({}, array("I")) for name in (*_NAMED, _CELL)}
        self._created = array("q")
        self._numbers: dict[str, array[float]] = {name: array("d") for name in _NUMBERS}

    def __len__(self) -> int:
        return len(self._took)

    def add(self, request: RequestSummary, cell: int | None = None) -> None:
        took = self._of(request)
        if took is None:
            return
        self._took.append(took)
        self._created.append(request.created_ns // 10**9)
        self._ids.append(request.id)
        for name, value_of in _NAMED.items():
            places, of = self._named[name]
            of.append(places.setdefault(value_of(request), len(places)))
        places, of = self._named[_CELL]
        of.append(places.setdefault("" if cell is None else str(cell), len(places)))
        for name, (_, number_of) in _NUMBERS.items():
            self._numbers[name].append(number_of(request))

    def slowest(self, percent: float) -> Slow:
        """The slowest ``percent`` of the requests against the others.

        Raises:
            ValueError: there are too few of them.
            ModuleNotFoundError: numpy is not installed.
        """
        import numpy as np

        count = math.ceil(len(self) * percent / 100)
        if count < LEAST or len(self) - count < LEAST:
            raise ValueError(
                f"{len(self)} requests have what is compared, and the slowest {percent:g} % are {count}: at least "
                f"{LEAST} are needed; choose a longer time with --since, or a larger --slowest"
            )
        took = np.frombuffer(self._took)
        from_ms = float(np.partition(took, len(took) - count)[len(took) - count])
        slow = took >= from_ms
        if slow.all():
            raise ValueError(f"all {len(self)} requests took {from_ms:g} ms: none is slower than the others")
        found = []
        for name, (places, of) in self._named.items():
            if name == "first worker" and of == self._named["worker"].of:  # none had two
                continue
            found.append(_difference(name, list(places), np.frombuffer(of, np.uint32), slow))
        found.append(self._when(slow))
        for name, numbers in self._numbers.items():
            if name == "computed prompt" and numbers == self._numbers["prompt"]:  # nothing was cached
                continue
            values = np.frombuffer(numbers)
            edges = np.unique(np.quantile(values, np.arange(_PARTS) / _PARTS, method="higher"))
            part = np.searchsorted(edges, values, side="right") - 1
            labels = _ranges(edges.tolist(), float(values.max()), _NUMBERS[name][0])
            found.append(_difference(name, labels, part, slow))
        ranked = sorted(filter(None, found), key=lambda each: each.explains, reverse=True)
        return Slow(
            self._measure,
            percent,
            int(slow.sum()),
            len(self) - int(slow.sum()),
            from_ms,
            float(np.median(took[slow])),
            float(np.median(took[~slow])),
            tuple(ranked),
            tuple(self._ids[at] for at in nlargest(EXAMPLES, range(len(took)), key=self._took.__getitem__)),
        )

    def _when(self, slow: Any) -> "Difference | None":
        """By the hour, or by other equal parts of the time in which the requests were accepted."""
        import numpy as np

        created = np.frombuffer(self._created, np.int64)
        first, last, step = self._steps()
        form = "%H:%M:%S" if step < 60 else "%H:%M" if last - first < 86400 else "%m-%d %H:%M"
        labels = [f"{_local(at):{form}} to {_local(at + step):{form}}" for at in range(first, last + 1, step)]
        return _difference("accepted", labels, (created - first) // step, slow)

    def _steps(self) -> tuple[int, int, int]:
        """The begin of the first of equal parts of the time, the last acceptance, and the length of a part."""
        first, last = min(self._created), max(self._created)
        step = next((each for each in _STEPS_S if (last - first) / each <= _MOST_STEPS), _STEPS_S[-1])
        return _midnight(first) + (first - _midnight(first)) // step * step, last, step

    def heat_map(self) -> HeatMap:
        """By acceptance and what is compared, in steps of 1, 2, 5, 10, ... ms. There is at least one request."""
        import numpy as np

        first, last, step = self._steps()
        took = np.maximum(np.frombuffer(self._took), _SHORTEST_MS)
        powers = range(math.floor(math.log10(took.min())), math.floor(math.log10(took.max())) + 1)
        edges = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        low = max(0, int(np.searchsorted(edges, took.min(), side="right")) - 1)
        edges = edges[low : int(np.searchsorted(edges, took.max(), side="right"))]
        begins = list(range(first, last + 1, step))
        rows = np.searchsorted(edges, took, side="right") - 1
        columns = (np.frombuffer(self._created, np.int64) - first) // step
        counts = np.zeros((len(edges), len(begins)), np.int64)
        np.add.at(counts, (rows, columns), 1)
        return HeatMap(begins, step, edges, counts.tolist())


def _local(at_s: int) -> datetime:
    """As lists show times: those of this machine."""
    return datetime.fromtimestamp(at_s)


def _midnight(at_s: int) -> int:
    return int(_local(at_s).replace(hour=0, minute=0, second=0).timestamp())


def _difference(name: str, labels: Sequence[str], part: Any, slow: Any) -> Difference | None:
    """None: it does not differ more than by chance.

    Args:
        part: the place of each request's value in ``labels``.
        slow: whether each request is slow.
    """
    import numpy as np

    of_slow_and_others = [np.bincount(part[each], minlength=len(labels)) for each in (slow, ~slow)]
    table = np.stack(of_slow_and_others).astype(float)
    total, of_values, of_slow = table.sum(), table.sum(0), table.sum(1)
    seen = int((of_values > 0).sum())
    if seen < 2:
        return None
    expected = np.outer(of_slow, of_values) / total
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(table > 0, table * np.log(table / expected), 0.0)
    information = float(terms.sum() / total)
    freedom = seen - 1
    if 2 * total * information < _chance(freedom):
        return None
    shares = of_slow / total
    entropy = -float((shares * np.log(shares)).sum())
    explains = (information - freedom / (2 * float(total))) / entropy
    if explains <= 0:
        return None
    slow_shares, others_shares = table / of_slow[:, None]
    order = np.argsort(others_shares - slow_shares)[:GROUPS]
    groups = tuple(
        Group(
            labels[at] or "none", int(table[0, at]), int(table[1, at]), float(slow_shares[at]), float(others_shares[at])
        )
        for at in map(int, order)
        if slow_shares[at] > others_shares[at] and table[0, at] >= FEWEST
    )
    return Difference(name, explains, groups) if groups else None


def _chance(freedom: int) -> float:
    """The G statistic that chance exceeds in one of 10,000 cases (chi-squared, by Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + _Z * math.sqrt(part)) ** 3


def _ranges(edges: Sequence[float], last: float, unit: str) -> list[str]:
    """The parts that begin at these values."""
    ends = [*edges[1:], last]
    whole = all(float(each).is_integer() for each in (*edges, last))
    labels = []
    for place, (begin, end) in enumerate(zip(edges, ends, strict=True)):
        final = place == len(edges) - 1
        if whole:
            end = end if final else end - 1
            text = f"{begin:,.0f}" if begin == end else f"{begin:,.0f} to {end:,.0f}"
        else:
            text = f"{begin:,.3g} and more" if final else f"{begin:,.3g} to {end:,.3g}"
        labels.append(f"{text} {unit}")
    return labels


# --- on a terminal ---

_MEASURED = {"duration": "took", "ttft": "waited for their first token", "itl": "took between two tokens"}
_SHOWN = 3  # groups of each property
_NARROWEST = 12  # columns of a value


def report(slow: Slow, width: int) -> Iterator[str]:
    """Lines that say where the slow differ, at most as wide as the terminal, except for the first ones."""
    total = slow.slow + slow.others
    yield (
        f"the slowest {slow.percent:g} % of {counted(total, 'request')} {_MEASURED[slow.measure]} {span(slow.from_ms)} "
        f"or more: {slow.slow:,}, {span(slow.slow_median_ms)} in the median; the others {span(slow.others_median_ms)}"
    )
    yield f"the slowest: {'  '.join(slow.examples)}"
    yield ""
    if not slow.differences:
        yield "nothing that is recorded sets them apart"
        return
    name_width = max(len("property"), *(len(each.property) for each in slow.differences))
    form = f"{{:>8}}  {{:<{name_width}}}  {{:<{{}}}}  {{:>11}}  {{:>13}}  {{:>9}}"
    rows = []
    for each in slow.differences:
        for place, group in enumerate(each.groups[:_SHOWN]):
            explained = f"{each.explains:.0%}" if each.explains >= 0.01 else "under 1%"
            head = (explained, each.property) if place == 0 else ("", "")
            among = f"{group.slow / (group.slow + group.others):.1%}"
            rows.append((*head, group.value, f"{group.slow_share:.0%}", f"{group.others_share:.0%}", among))
    room = width - len(form.format("", "", "", 0, "", "", ""))
    value_width = max(_NARROWEST, min(room, max(len(row[2]) for row in rows)))
    yield form.format("explains", "property", "value", value_width, "of the slow", "of the others", "slow here")
    for explained, name, value, *shares in rows:
        value = value if len(value) <= value_width else f"{value[: value_width - 1]}…"
        yield form.format(explained, name, value, value_width, *shares)
    yield ""
    yield "explains: of the uncertainty about which requests are slow, the share that is gone once this is known"
