"""An inspection as one HTML page that needs nothing else: light and dark, on a phone, to be printed. Pure."""

from collections.abc import Iterator
from html import escape

from penstock.cli.figures import counted, span
from penstock.log_tools.requests.inspection import InspectedEvent, Inspection, Phase, line_of
from penstock.log_tools.requests.neighbours import FIRST_NUMBER, HEADINGS, SHOWN, Neighbours, rows, sentences
from penstock.schemas.summary import NOT_SAMPLED, settings_text

_STYLE = """
:root { color-scheme: light dark; --line: #d8dbe0; --dim: #5b6470; --wait: #d9a400; --prompt: #2f6fde;
  --generate: #1e8e4e; --router: #8a4fd3; --gateway: #12828f; --bad: #c8322b; --ground: #f5f6f8 }
@media (prefers-color-scheme: dark) { :root { --line: #353b44; --dim: #9aa4b1; --wait: #e0b83a; --prompt: #6ba0ff;
  --generate: #4cc380; --router: #b98bf0; --gateway: #4bc0cc; --bad: #ff7a70; --ground: #1c2026 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.15rem; overflow-wrap: anywhere } h2 { font-size: 1rem; margin-top: 2rem }
.bad { color: var(--bad) } .dim { color: var(--dim) }
dl { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 0 } dt { color: var(--dim); font-size: .85em }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.row { display: grid; grid-template-columns: 17rem 1fr 6rem; gap: .6rem; align-items: center; padding: .15rem 0 }
.lane { background: var(--ground); border-radius: 3px; height: 1rem; position: relative }
.lane i { position: absolute; top: 0; bottom: 0; border-radius: 3px; min-width: 3px; background: var(--generate) }
.took { text-align: right; font-variant-numeric: tabular-nums } .name small { color: var(--dim) }
table { border-collapse: collapse; width: 100% } .scroll { overflow-x: auto }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; vertical-align: top; border-bottom: 1px solid var(--line) }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--ground); padding: .8rem; border-radius: 4px }
@media (max-width: 40rem) { .row { grid-template-columns: 8rem 1fr 5rem } .name small { display: none } }
"""
_COLOURS = {"wait": "wait", "prompt": "prompt", "first token": "prompt", "transfer": "gateway"}


def page(inspection: Inspection) -> str:
    """The whole document."""
    title = f"{inspection.request.model} {inspection.request.id}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>\n"
        + body(inspection)
        + "\n</main></body></html>\n"
    )


def body(inspection: Inspection, *, links: bool = False) -> str:
    """What the page shows, without its style, for pages that have their own.

    Args:
        links: other requests are links to their pages on the dashboard.
    """
    return "\n".join(_body(inspection, links))


def _body(inspection: Inspection, links: bool) -> Iterator[str]:
    request = inspection.request
    bad = ' class="bad"' if request.code else ""
    yield f"<h1>{escape(request.id)} <span{bad}>{escape(request.code or request.state)}</span></h1>"
    if request.message:
        yield f'<p class="bad">{escape(request.message)}</p>'
    yield "<dl>" + "".join(_facts(inspection)) + "</dl>"
    yield "<h2>Where its time went</h2>"
    yield '<div role="table" aria-label="Phases">'
    yield from _waterfall(inspection)
    yield "</div>"
    if inspection.neighbours is not None:
        yield '<h2 id="beside">What ran beside it</h2>'
        yield from _neighbours(inspection.neighbours, request.created_ns, links)
    elif links:
        yield '<p><a href="?neighbours=1#beside">What ran beside it</a></p>'
    yield "<h2>What happened</h2>"
    yield '<div class="scroll"><table><thead><tr><th class="n">after</th><th class="n">attempt</th><th>event</th>'
    yield "<th>details</th></tr></thead><tbody>"
    for entry in inspection.events:
        yield _event(entry, request.created_ns)
    yield "</tbody></table></div>"
    yield from (f'<p class="dim">Missing: {escape(text)}.</p>' for text in inspection.missing)
    yield from _content(inspection)


def _neighbours(neighbours: Neighbours, begin_ns: int, links: bool) -> Iterator[str]:
    if not neighbours.workers and not neighbours.routers:
        yield "<p>No worker has had it yet, and no router held it.</p>"
    for text, requests in sentences(neighbours, begin_ns):
        yield f"<p>{escape(text)}</p>"
        if not requests:
            continue
        yield '<div class="scroll"><table><thead><tr>'
        yield "".join(f"<th{_number(at)}>{name}</th>" for at, name in enumerate(HEADINGS)) + "</tr></thead><tbody>"
        for row in rows(requests, begin_ns):
            link = f'<a href="/requests/{escape(row[0])}">{escape(row[0])}</a>' if links else escape(row[0])
            cells = [link, *map(escape, row[1:])]
            yield "<tr>" + "".join(f"<td{_number(at)}>{cell}</td>" for at, cell in enumerate(cells)) + "</tr>"
        yield "</tbody></table></div>"
        if len(requests) > SHOWN:
            yield f'<p class="dim">And {len(requests) - SHOWN:,} more.</p>'


def _number(at: int) -> str:
    return ' class="n"' if at >= FIRST_NUMBER else ""


def _facts(inspection: Inspection) -> Iterator[str]:
    request = inspection.request
    facts = {
        "model": request.model,
        "class": request.priority,
        "tenant": request.tenant,
        "user": request.user,
        "gateway": inspection.gateway,
        "workers" if len(request.workers) > 1 else "worker": " → ".join(request.workers),
        "attempts": str(request.attempts or ""),
        "prompt": f"{counted(request.prompt_tokens, 'token')}, {request.cached_tokens} cached",
        "output": counted(request.completion_tokens, "token") if request.ended_ns else "",
        "first token": span(request.ttft_ms),
        "in all": span(request.duration_ms),
        "revision": request.revision,
        "before": ", ".join(f"{counted(sum(each.tokens), 'token')} of {each.revision}" for each in request.before),
        "engine": f"{request.engine} ({request.build})" if request.engine else "",
        "adapter": request.adapter,
        "sampling": "" if request.endpoint in NOT_SAMPLED else settings_text(request.sampling),
    }
    for name, value in facts.items():
        if value:
            yield f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"


def _waterfall(inspection: Inspection) -> Iterator[str]:
    root = inspection.phases[0]
    whole = max(1, root.end_ns - root.start_ns)
    for phase in inspection.phases:
        left = 100 * (phase.start_ns - root.start_ns) / whole
        width = max(0.0, 100 * (phase.end_ns - phase.start_ns) / whole)
        start, took = span((phase.start_ns - root.start_ns) / 1e6), span((phase.end_ns - phase.start_ns) / 1e6)
        attempt = f" #{phase.attempt}" if phase.attempt > 1 else ""
        title = escape(f"{phase.name}{attempt} at {phase.where}: from {start}, {took} {phase.error}".strip())
        yield (
            f'<div class="row" role="row" title="{title}"><span role="cell" class="name" '
            f'style="padding-left:{phase.depth * 0.9:.1f}rem">{escape(phase.name)}{attempt} '
            f"<small>{escape(phase.where)}</small></span>"
            f'<span role="cell" class="lane" aria-label="from {start}"><i style="left:{left:.3f}%;width:{width:.3f}%;'
            f'background:var(--{_colour(phase)})"></i></span><span role="cell" class="took">{took}</span></div>'
        )


def _colour(phase: Phase) -> str:
    if phase.error:
        return "bad"
    return _COLOURS.get(phase.name, phase.service if phase.service in ("router", "gateway") else "generate")


def _event(entry: InspectedEvent, begin_ns: int) -> str:
    text = escape(line_of(entry))
    if entry.candidates:
        targets = counted(len(entry.candidates), "target")
        text += f"<details><summary>scores of {targets}</summary>{_scores(entry)}</details>"
    attempt = str(entry.attempt or "")
    after = span((entry.at_ns - begin_ns) / 1e6)
    return f'<tr><td class="n">{after}</td><td class="n">{attempt}</td><td>{entry.kind}</td><td>{text}</td></tr>'


def _scores(entry: InspectedEvent) -> str:
    names = (
        "target",
        "stage",
        "score",
        "overlap blocks",
        "to bring back",
        "to read",
        "active blocks",
        "prefill tokens",
        "running",
        "excluded",
    )
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for each in entry.candidates:
        name = f"{each.worker}/{each.rank}" if each.rank else each.worker
        cells = (
            f"{name} ✓" if name in entry.chosen else name,
            each.role,
            "" if each.excluded else f"{each.score:.2f}",
            f"{each.overlap_blocks}/{entry.decided_at.get('prompt_blocks', 0)}",
            entry.brought_back(each),
            entry.read(each),
            str(each.active_blocks),
            str(each.prefill_tokens),
            f"{each.running}/{each.slots}",
            each.excluded,
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "<table>" + "".join(rows) + "</table>"


def _content(inspection: Inspection) -> Iterator[str]:
    content = inspection.content
    parts = [("Prompt", content.prompt)] if content.prompt is not None else []
    parts += [("Answer", text) for text in content.answers]
    ids = [("Prompt tokens", content.prompt_tokens)] if content.prompt_tokens else []
    ids += [("Answer tokens", each) for each in content.answer_tokens]
    parts += [(name, " ".join(map(str, tokens))) for name, tokens in ids]
    for name, text in parts:
        yield f"<h2>{name}</h2><pre>{escape(text)}</pre>"
