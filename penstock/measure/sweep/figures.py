"""The figures of one run of a level, from the measurements of each request. Times are in ms, lengths in tokens."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from penstock.cli.figures import quantile
from penstock.measure.load_generator import Exchange
from penstock.measure.sweep.bodies import PlannedRequest

_MOST_REASONS = 20
FEW = 100  # samples; percentiles of fewer are marked


class BadSlo(ValueError):
    """Limits that cannot be read."""


class Slo(Struct, frozen=True):
    """Limits that a request must keep to count as good, in ms; 0: none. A time that is unknown keeps no limit."""

    ttft: float = 0.0
    itl: float = 0.0
    latency: float = 0.0

    def kept(self, ttft_ms: float, itl_ms: float, latency_ms: float, *, tokens: int) -> bool:
        """Whether a request kept all limits; one of a single token has no ITL to keep."""
        return (
            (not self.ttft or 0 <= ttft_ms <= self.ttft)
            and (not self.itl or tokens < 2 or 0 <= itl_ms <= self.itl)
            and (not self.latency or 0 <= latency_ms <= self.latency)
        )

    def __str__(self) -> str:
        return ",".join(f"{name}={value:g}" for name in self.__struct_fields__ if (value := getattr(self, name)))


def slo_of(text: str) -> Slo | None:
    """The limits of a flag such as "ttft=500,itl=50"; None: it is empty.

    Raises:
        BadSlo: it cannot be read.
    """
    if not text.strip():
        return None
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, mark, value = part.strip().partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if not mark or name not in Slo.__struct_fields__ or not 0 < limits[name] < float("inf"):
            names = ", ".join(Slo.__struct_fields__)
            raise BadSlo(f"--slo {text!r}: give limits in ms, as in ttft=500,itl=50; there are {names}")
    return Slo(**limits)


def itl_s(first: float, last: float, tokens: int) -> float:
    """The mean gap between the tokens of an answer, whatever arrived together; -1: it has fewer than two.

    Args:
        first, last: when its first and its last text arrived, in seconds; 0: it had none.
    """
    return (last - first) / (tokens - 1) if tokens > 1 and first else -1.0


class RequestRecord(Struct, frozen=True, omit_defaults=True):
    """One request; a line of ``records-<run>.jsonl``.

    Attributes:
        number: of the request within the run.
        due_ms: when it should have been sent, after the run's first request; -1: as soon as possible.
        sent_ms: when it was sent.
        ttft_ms: to the first text; -1: not streamed.
        itl_ms: see ``itl_s``.
        gaps_ms: between reads that carried text.
        isl, osl: as the server counted them; -1: it did not say.
        cached: of ``isl``, those that the server says were in its cache; -1: it did not say.
        error: "": answered.
    """

    number: int
    sent_ms: float
    latency_ms: float = -1.0
    due_ms: float = -1.0
    ttft_ms: float = -1.0
    itl_ms: float = -1.0
    gaps_ms: tuple[float, ...] = ()
    isl_asked: int = 0
    osl_asked: int = 0
    isl: int = -1
    osl: int = -1
    cached: int = -1
    events: int = 0
    error: str = ""


class Distribution(Struct, frozen=True):
    mean: float
    stddev: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class RunFigures(Struct, frozen=True, kw_only=True):
    """
    Attributes:
        seconds: from the first request's start to the last answer's end.
        tokens_counted: by the answers' usage, or as events (or single answers) that carried text.
        tokens_per_s_per_user: mean over the requests of 1 / ITL: the pace at which a reader sees text.
        tokens_per_s_per_gpu: of output; None: --gpus was not given.
        itl_ms: of each request, its mean; ``gap_ms``: of all requests, between two reads that carried text.
        isl, osl: as the server counted them; None: it did not.
        cached_share: of all prompt tokens, by the answers' usage; None: it does not say.
        slo: limits of good requests, as given; "": none.
        good_share: of all requests, failed ones too; ``good_per_s``: goodput.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_s_per_user: float | None
    tokens_per_s_per_gpu: float | None
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    gap_ms: Distribution | None
    latency_ms: Distribution | None
    isl: Distribution | None
    osl: Distribution | None
    isl_asked: Distribution | None
    osl_asked: Distribution | None
    cached_share: float | None
    tokens_counted: str
    slo: str = ""
    good_share: float | None = None
    good_per_s: float | None = None


def record(exchange: Exchange, planned: PlannedRequest, began: float) -> RequestRecord:
    """Make the record of an exchange. ``began`` is when the run's first request was sent, as ``perf_counter``."""
    streamed = bool(exchange.events)
    tokens = exchange.output_tokens if exchange.output_tokens >= 0 else len(exchange.gaps_s) + bool(exchange.first)
    itl = itl_s(exchange.first, exchange.last, tokens) if streamed else -1.0
    return RequestRecord(
        number=exchange.key,
        sent_ms=_ms(exchange.sent - began) if exchange.sent else -1.0,
        latency_ms=_ms(exchange.ended - exchange.sent) if exchange.ended and exchange.sent else -1.0,
        due_ms=_ms(exchange.due - began) if exchange.due else -1.0,
        ttft_ms=_ms(exchange.first - exchange.sent) if streamed and exchange.first else -1.0,
        itl_ms=round(itl * 1e3, 4) if itl >= 0 else -1.0,
        gaps_ms=tuple(_ms(gap) for gap in exchange.gaps_s) if streamed else (),
        isl_asked=planned.isl,
        osl_asked=planned.osl,
        isl=exchange.prompt_tokens,
        osl=exchange.output_tokens,
        cached=exchange.cached_tokens,
        events=exchange.events,
        error=exchange.error or ("" if exchange.first or exchange.output_tokens > 0 else "answered without text"),
    )


def figures(records: Sequence[RequestRecord], gpus: int, slo: Slo | None = None) -> RunFigures:
    """The figures of the requests that were answered; failed ones are only counted.

    Args:
        gpus: that the endpoint uses; 0: unknown.
    """
    done = [each for each in records if not each.error]
    errors = Counter(each.error for each in records if each.error)
    counted = all(each.osl >= 0 for each in done)
    output = sum(each.osl if counted else len(each.gaps_ms) + 1 for each in done)
    prompts = sum(each.isl if each.isl >= 0 else each.isl_asked for each in done)
    begin = min((each.sent_ms for each in done), default=0.0)
    seconds = max((each.sent_ms + each.latency_ms for each in done), default=0.0) / 1e3 - begin / 1e3
    rate = 1 / seconds if seconds > 0 else 0.0
    itl = [each.itl_ms for each in done if each.itl_ms >= 0]
    pace = [1e3 / value for value in itl if value > 0]
    good = sum(_is_good(each, slo) for each in done) if slo is not None else 0
    cached = [each for each in done if each.cached >= 0 and each.isl > 0]
    return RunFigures(
        requests=len(done),
        failed=len(records) - len(done),
        errors=dict(errors.most_common(_MOST_REASONS)),
        seconds=round(seconds, 3),
        requests_per_s=len(done) * rate,
        output_tokens_per_s=output * rate,
        total_tokens_per_s=(output + prompts) * rate,
        tokens_per_s_per_user=statistics.fmean(pace) if pace else None,
        tokens_per_s_per_gpu=output * rate / gpus if gpus else None,
        ttft_ms=distribution(each.ttft_ms for each in done if each.ttft_ms >= 0),
        itl_ms=distribution(itl),
        gap_ms=distribution(gap for each in done for gap in each.gaps_ms),
        latency_ms=distribution(each.latency_ms for each in done),
        isl=distribution(each.isl for each in done if each.isl >= 0),
        osl=distribution(each.osl for each in done if each.osl >= 0),
        isl_asked=distribution(each.isl_asked for each in done),
        osl_asked=distribution(each.osl_asked for each in done),
        cached_share=sum(each.cached for each in cached) / sum(each.isl for each in cached) if cached else None,
        tokens_counted="usage" if counted else "events",
        slo=str(slo) if slo is not None else "",
        good_share=good / len(records) if slo is not None and records else None,
        good_per_s=good * rate if slo is not None else None,
    )


def _is_good(request: RequestRecord, slo: Slo) -> bool:
    tokens = request.osl if request.osl >= 0 else len(request.gaps_ms) + 1
    return slo.kept(request.ttft_ms, request.itl_ms, request.latency_ms, tokens=tokens)


def distribution(values: Iterable[float]) -> Distribution | None:
    """The distribution of some values. None: there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p95, p99 = (quantile(ordered, share, 0.0) for share in (0.5, 0.9, 0.95, 0.99))
    return Distribution(
        statistics.fmean(ordered), statistics.pstdev(ordered), ordered[0], p50, p90, p95, p99, ordered[-1]
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
