"""A replay's report as one HTML file: no script, no other file, light and dark."""

from html import escape

from penstock.log.replay.comparison import RECOVERED, SAME, Comparison, TextDifference
from penstock.log.replay.plots import distribution, duration
from penstock.log.replay.report import Measured, Report, Series, same_routes
from penstock.log.replay.style import CSS
from penstock.log.sources.export_file import writing

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
