"""A replay's report as one HTML file: no script, no other file, light and dark.

Distributions as inline SVG: the share of values below each time, recorded and replayed. Pure.

The style sheet of HTML reports: light and dark, from a phone's width up.
"""

import math
from collections.abc import Sequence
from html import escape

from penstock.log.replay.comparison import RECOVERED, SAME, Comparison, TextDifference
from penstock.log.replay.report import Measured, Report, Series, same_routes
from penstock.log.sources.export_file import writing

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 12, 34
LOG_FROM = 30.0  # the largest is so many times the smallest: logarithmic axis
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_STEPS = (1, 2, 5)


class _Axis:
    """Milliseconds to pixels."""

    def __init__(self, low: float, high: float) -> None:
        self._log = low > 0 and high / low > LOG_FROM
        if high <= low:
            low, high = low * 0.9, (high or 1.0) * 1.1
        self._low, self._high = (math.log10(low), math.log10(high)) if self._log else (min(0.0, low), high * 1.02)

    def x(self, value: float) -> float:
        at = math.log10(max(value, 1e-9)) if self._log else value
        share = (at - self._low) / (self._high - self._low)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        if self._log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            values = [step * 10.0**power for power in powers for step in _STEPS]
            values = [value for value in values if self._low <= math.log10(value) <= self._high]
            return values if len(values) <= 6 else [value for value in values if _is_power(value)] or values[:6]
        step = _nice((self._high - self._low) / 4)
        return [step * number for number in range(int(self._high / step) + 1)]


def _is_power(value: float) -> bool:
    return abs(math.log10(value) - round(math.log10(value))) < 1e-9


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= step), step)


def distribution(title: str, recorded: Series | None, replayed: Series | None) -> str:
    """One plot, "" without values."""
    present = [each for each in (recorded, replayed) if each is not None]
    if not present:
        return ""
    low = min(each.points[0] for each in present)
    high = max(_top(each) for each in present)
    axis = _Axis(low, high)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for share in SHARES:
        y = _y(share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for value in axis.ticks():
        x = axis.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{duration(value)}</text>'
        )
    for name, series in (("recorded", recorded), ("replayed", replayed)):
        if series is not None:
            parts.append(f'<polyline class="{name}" points="{_line(series.points, axis)}"/>')
            x = axis.x(series.p50)
            parts.append(f'<circle class="{name}" cx="{x:.1f}" cy="{_y(0.5):.1f}" r="3.5"/>')
    parts.append("</svg>")
    return "".join(parts)


def _top(series: Series) -> float:
    """The last point that is drawn, so that a few outliers do not compress all others."""
    return series.max if series.max <= 3 * series.p99 else series.p99 * 1.5


def _y(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def _line(points: Sequence[float], axis: _Axis) -> str:
    last = max(1, len(points) - 1)
    shown = [f"{axis.x(points[0]):.1f},{_y(0):.1f}"]
    shown += [
        f"{axis.x(value):.1f},{_y(number / last if len(points) > 1 else 1.0):.1f}"
        for number, value in enumerate(points)
    ]
    return " ".join(shown)


def duration(ms: float) -> str:
    """ "850 µs", "12 ms", "1.5 s"."""
    if ms == 0:
        return "0"
    if ms < 1:
        return f"{ms * 1e3:.3g} µs"
    if ms < 1000:
        return f"{ms:.3g} ms"
    return f"{ms / 1e3:.3g} s"


CSS = """
:root{--page:#f7f7f5;--card:#fff;--ink:#1c1e21;--soft:#62676e;--line:#e2e3e0;--recorded:#3565c4;--replayed:#d9730d;
--good:#1f7a45;--bad:#b3261e;--warn:#8a6100;--goodbg:#e4f3ea;--badbg:#fbe6e4;--warnbg:#fbf1d9}
@media (prefers-color-scheme:dark){:root{--page:#131519;--card:#1c1f25;--ink:#e8e9eb;--soft:#9aa0a8;--line:#31353d;
--recorded:#7ea6f4;--replayed:#f0a04b;--good:#6fcf97;--bad:#f2938c;--warn:#e6c06a;--goodbg:#1b3226;--badbg:#3d2220;
--warnbg:#3a3120}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}
code,.ids,td{font-variant-numeric:tabular-nums}
code,.ids,.text{font-family:ui-monospace,"SF Mono","DejaVu Sans Mono",Menlo,monospace;font-size:13px}
.kind{margin:0;color:var(--soft);font-size:13px;letter-spacing:.06em;text-transform:uppercase}
h1{margin:4px 0 6px;font-size:30px;line-height:1.2;font-weight:650}
h1.good{color:var(--good)}h1.bad{color:var(--bad)}
h2{margin:0 0 12px;font-size:19px;font-weight:650}
h3{margin:0;font-size:14px;font-weight:500;overflow-wrap:anywhere}
section{margin-top:36px}
.where{margin:0;color:var(--soft);overflow-wrap:anywhere}
.chips{display:flex;flex-wrap:wrap;gap:8px;margin:14px 0 0;padding:0;list-style:none}
.chips li{padding:2px 10px;border:1px solid var(--line);border-radius:99px;background:var(--card);font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:24px}
.tile,figure,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:14px 16px}
.tile b{display:block;font-size:22px;font-weight:650;white-space:nowrap}
.tile span{color:var(--soft);font-size:13px}
.tile.same b{color:var(--good)}.tile.recovered b{color:var(--warn)}
.tile.tokens b,.tile.finish b,.tile.error b,.tile.unanswered b{color:var(--bad)}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:14px}
figure{margin:0;padding:14px 16px}
figcaption{font-weight:600;margin-bottom:4px}
.none{color:var(--soft)}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--line);stroke-width:1}
.tick{fill:var(--soft);font-size:11px}
polyline{fill:none;stroke-width:2.2;stroke-linejoin:round}
polyline.recorded{stroke:var(--recorded)}polyline.replayed{stroke:var(--replayed);stroke-dasharray:7 3}
circle.recorded{fill:var(--recorded)}circle.replayed{fill:var(--replayed)}
.legend{margin:-6px 0 10px;color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:22px;border-top:3px solid var(--recorded);vertical-align:middle;margin-right:6px}
.legend i.replayed{border-top:3px dashed var(--replayed);margin-left:14px}
table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;font-weight:500;color:var(--soft)}
td,th{padding:4px 10px 4px 0;vertical-align:top}
figure td,figure th{text-align:right}figure th:first-child{text-align:left}
.cards{display:grid;gap:12px}
.card{padding:14px 16px}
.card p{margin:4px 0}
.again{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.badge{padding:1px 9px;border-radius:99px;font-size:12px;font-weight:600;background:var(--badbg);color:var(--bad)}
.badge.same{background:var(--goodbg);color:var(--good)}
.badge.recovered{background:var(--warnbg);color:var(--warn)}
.sides{margin-top:8px}
.sides th{width:80px}
.text{white-space:pre-wrap;overflow-wrap:anywhere}
.before,.ids{color:var(--soft)}
mark{color:inherit;background:none;border-bottom:2px solid}
mark.recorded{color:var(--recorded)}mark.replayed{color:var(--replayed)}
.wide{overflow-x:auto}
.routes td,.requests td{border-top:1px solid var(--line);white-space:nowrap}
.bar{width:34%;min-width:90px}
.bar i{display:block;height:12px;margin-top:4px;border-radius:3px;background:var(--recorded)}
.bar.moved i{background:var(--replayed)}
summary{cursor:pointer}summary h2{display:inline}summary span{color:var(--soft)}
"""


CARDS = 40
LABELS = {
    "same": "the same answer",
    "tokens": "other tokens",
    "finish": "another ending",
    "error": "failed now",
    "unanswered": "without an answer",
    "recovered": "had failed, now whole",
}
ROUTES = 24


def write_html(name: str, report: Report) -> None:
    """
    Raises:
        ValueError: the file cannot be written.
    """
    with writing(name) as file:
        file.write(html(report).encode())


def html(report: Report) -> str:
    """The whole document."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>Replay of {escape(report.source)}</title><style>{CSS}</style></head><body><main>",
        _head(report),
        _tiles(report),
        _times(report),
        _differences(report),
        _routes(report),
        _requests(report),
        "</main></body></html>\n",
    ]
    return "".join(parts)


def _head(report: Report) -> str:
    wrong, errors = report.differences, report.errors
    if not wrong:
        verdict, style = f"All {report.requests:,} answers are the same", "good"
    else:
        answer = "answer differs" if wrong == 1 else "answers differ"
        failed = f"; {errors:,} got no answer" if errors else ""
        verdict, style = f"{wrong:,} of {report.requests:,} {answer}{failed}", "bad"
    chips = "".join(f"<li><b>{escape(name)}</b> {escape(value)}</li>" for name, value in report.settings.items())
    return (
        f'<header><p class="kind">Penstock replay</p><h1 class="{style}">{escape(verdict)}</h1>'
        f'<p class="where"><span>{escape(report.source)}</span> → <span>{escape(report.target)}</span></p>'
        f'<ul class="chips">{chips}</ul></header>'
    )


def _tiles(report: Report) -> str:
    tiles = [
        (f"{report.compared_tokens:,}", "equal tokens"),
        (f"{report.rate:,.0f}/s", f"replayed in {report.seconds:.1f} s"),
        (_change(_hits(report.recorded), _hits(report.replayed)), "prompt tokens from the cache"),
        (f"{report.moved:,}" if report.routes else "–", "routed elsewhere"),
    ]
    if report.logprob_gap is not None:
        tiles.append((f"{report.logprob_gap:.2g}", "largest log-probability gap"))
    outcomes = [(f"{count:,}", LABELS[name], name) for name, count in report.outcomes.items() if count]
    shown = "".join(
        f'<div class="tile {style}"><b>{value}</b><span>{name}</span></div>' for value, name, style in outcomes
    )
    shown += "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in tiles)
    left = "".join(f"<p>Not run again: {count:,} {escape(reason)}</p>" for reason, count in report.skipped.items())
    return f'<section class="tiles">{shown}</section>{left}'


def _hits(measured: Measured) -> float | None:
    return measured.cached_tokens / measured.prompt_tokens if measured.prompt_tokens else None


def _change(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "–"
    return f"{old:.1%} → {new:.1%}"


def _times(report: Report) -> str:
    panels = []
    for name, title in (("ttft", "Time to first token"), ("itl", "Between tokens"), ("e2e", "Whole answer")):
        old: Series | None = getattr(report.recorded, name)
        new: Series | None = getattr(report.replayed, name)
        plot = distribution(title, old, new)
        if not plot:
            panels.append(f'<figure><figcaption>{title}</figcaption><p class="none">not recorded</p></figure>')
            continue
        rows = "".join(
            f"<tr><th>{label}</th><td>{_at(old, label)}</td><td>{_at(new, label)}</td>"
            f"<td>{_ratio(old, new, label)}</td></tr>"
            for label in ("p50", "p90", "p99", "max")
        )
        table = f"<table><tr><td></td><th>recorded</th><th>replayed</th><th>change</th></tr>{rows}</table>"
        panels.append(f"<figure><figcaption>{title}</figcaption>{plot}{table}</figure>")
    legend = '<p class="legend"><i class="recorded"></i>recorded <i class="replayed"></i>replayed</p>'
    return f'<section><h2>Times</h2>{legend}<div class="panels">{"".join(panels)}</div></section>'


def _at(series: Series | None, label: str) -> str:
    return duration(getattr(series, label)) if series is not None else "–"


def _ratio(old: Series | None, new: Series | None, label: str) -> str:
    before, after = getattr(old, label, 0.0), getattr(new, label, 0.0)
    return f"× {after / before:.2f}" if before and after else ""


def _differences(report: Report) -> str:
    shown = [each for each in report.comparisons if each.outcome not in (SAME, RECOVERED)]
    if not shown:
        return ""
    cards = "".join(_card(report, each) for each in shown[:CARDS])
    more = f"<p>{report.differences - CARDS:,} more are in the JSON report.</p>" if report.differences > CARDS else ""
    return f'<section><h2>Differences</h2><div class="cards">{cards}</div>{more}</section>'


def _card(report: Report, each: Comparison) -> str:
    head = f'<h3><span class="badge {each.outcome}">{each.outcome}</span> <code>{escape(each.id)}</code></h3>'
    again = f'<p class="again">run again as <code>{escape(each.replay_id or "–")}</code></p>'
    if each.text_difference is not None:
        return f'<article class="card">{head}{again}{_texts(each.text_difference)}</article>'
    one = each.difference
    if one is None:
        said = each.replayed_code or ", ".join(each.replayed_finish) or "no answer"
        was = each.recorded_code or ", ".join(each.recorded_finish)
        body = f"<p>ended with <b>{escape(was)}</b>, now with <b>{escape(said)}</b> {escape(each.message)}</p>"
        return f'<article class="card">{head}{again}{body}</article>'
    margin = ""
    if one.margin is not None:
        near = "a near tie" if one.margin < 0.1 else "no near tie"
        margin = f" · margin of the two best tokens {one.margin:.4f} ({one.margin_of}): {near}"
    where = f"<p>choice {one.choice}, token {one.position}{margin}</p>"
    texts = report.texts.get(each.id)
    rows = "".join(
        f'<tr><th>{label}</th><td class="text">{_side(one.before, tokens, texts, label)}</td></tr>'
        for label, tokens in (("recorded", one.recorded), ("replayed", one.replayed))
    )
    return f'<article class="card">{head}{again}{where}<table class="sides">{rows}</table></article>'


def _texts(one: TextDifference) -> str:
    rows = "".join(
        f'<tr><th>{label}</th><td class="text"><span class="before">{escape(one.before)}</span>'
        f'<mark class="{label}">{escape(text) or "(the answer ends here)"}</mark></td></tr>'
        for label, text in (("recorded", one.recorded), ("replayed", one.replayed))
    )
    return f'<p>choice {one.choice}, character {one.position}</p><table class="sides">{rows}</table>'


def _side(before: tuple[int, ...], tokens: tuple[int, ...], texts: dict[str, str] | None, label: str) -> str:
    ids = " ".join(map(str, before[-4:])) + f' <mark class="{label}">{tokens[0] if tokens else "end"}</mark> '
    ids += " ".join(map(str, tokens[1:6]))
    tokens_shown = f'<span class="ids">{ids}</span>'
    if texts is None:
        return tokens_shown
    said = escape(texts[label]) or "(the answer ends here)"
    return f'<span class="before">{escape(texts["before"])}</span><mark class="{label}">{said}</mark><br>{tokens_shown}'


def _routes(report: Report) -> str:
    if not report.routes:
        return ""
    most = max(count for _, _, count in report.routes)
    same = same_routes({(old, new): count for old, new, count in report.routes})
    rows = "".join(
        f"<tr><td><code>{escape(old)}</code></td><td><code>{escape(new)}</code></td>"
        f'<td class="bar{"" if same.get(old) == new else " moved"}">'
        f'<i style="width:{max(1.0, 100 * count / most):.1f}%"></i></td><td>{count:,}</td></tr>'
        for old, new, count in report.routes[:ROUTES]
    )
    more = (
        f"<p>{len(report.routes) - ROUTES} more pairs are in the JSON report.</p>"
        if len(report.routes) > ROUTES
        else ""
    )
    total = sum(count for _, _, count in report.routes)
    text = (
        f"{report.moved:,} of {total:,} requests were routed elsewhere. Ids of workers are new with each start: the "
        "worker that got most of a recorded worker's requests counts as the same one."
    )
    return (
        f'<section><h2>Routes</h2><p>{text}</p><div class="wide"><table class="routes">'
        f"<tr><th>recorded</th><th>replayed</th><th>share</th><th>requests</th></tr>{rows}</table></div>{more}</section>"
    )


def _requests(report: Report) -> str:
    rows = "".join(_row(each) for each in report.comparisons)
    head = "".join(
        f"<th>{name}</th>" for name in ("request", "outcome", "tokens", "TTFT", "ITL", "whole", "cached", "worker")
    )
    shown, count = len(report.comparisons), report.requests
    note = f"{shown:,} of {count:,}, those that differ first" if shown < count else f"{count:,}"
    return (
        f"<section><details><summary><h2>Requests</h2> <span>{note}</span></summary>"
        f'<div class="wide"><table class="requests"><tr>{head}</tr>{rows}</table></div></details></section>'
    )


def _row(each: Comparison) -> str:
    old, new = each.recorded_timing, each.replayed_timing
    pairs = ((old.ttft_ms, new.ttft_ms), (old.itl_ms, new.itl_ms), (old.e2e_ms, new.e2e_ms))
    times = "".join(f"<td>{_ms(before)} → {_ms(after)}</td>" for before, after in pairs)
    route = " → ".join(each.replayed_route)
    return (
        f'<tr><td><code>{escape(each.id)}</code></td><td><span class="badge {each.outcome}">{each.outcome}</span></td>'
        f"<td>{each.compared}</td>{times}<td>{each.recorded_cached} → {each.replayed_cached}</td>"
        f"<td><code>{escape(route)}</code></td></tr>"
    )


def _ms(value: float | None) -> str:
    return duration(value) if value is not None else "–"
