"""``penstock inspect ID``: everything that happened to a request, and why.

On a terminal it shows a summary, a waterfall of the phases, and the events. It is readable without colour.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from penstock.cli.figures import clock, counted, span
from penstock.cli.terminal import Column, bar, escape, fitting_table, print_hanging, reason, stdout, visible
from penstock.configs.flags import Parser
from penstock.log_tools.requests.describe import Texts
from penstock.log_tools.requests.inspection import Content, InspectedEvent, Inspection, Phase, inspect, line_of
from penstock.log_tools.sources.open_log import (
    REQUEST_STREAMS,
    LogSource,
    add_flags,
    add_verify_flag,
    cells_for,
    open_log,
    run_command,
)
from penstock.log_tools.timeline.read import UnknownRequest, read_timeline, whole_ids
from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.schemas.requests import request_of_answer
from penstock.schemas.summary import NOT_SAMPLED, RequestSummary, as_dict, settings_text

if TYPE_CHECKING:  # few inspections have some, and it loads slowly
    from penstock.log_tools.requests.neighbours import Neighbours

WIDEST = 64  # columns of the waterfall, at most
NARROWEST = 12
BESIDE = 62  # columns of the text beside it
INDENT = 4  # of a score table
NARROW = 100  # a terminal below this width shows no names of processes
_COLOURS = {"gateway": "cyan", "router": "magenta", "worker": "green"}
_PHASES = {"wait": "yellow", "prompt": "blue", "transfer": "cyan", "generate": "green", "first token": "blue"}
_EVENTS = {
    "done": "bold",
    "returned": "red",
    "revoked": "red",
    "continued": "yellow",
    "routed": "magenta",
    "tokens": "dim",
}
_STATES = {
    "done": "green",
    "failed": "red",
    "cancelled": "yellow",
    "running": "cyan",
    "queued": "magenta",
    "unknown": "red",
}


def show(inspection: Inspection, console: Console, *, now_ns: int) -> None:
    """Print an inspection; ``now_ns``: Unix time, so that dates are left out if they are today's."""
    _show_request(inspection, console, now_ns)
    console.print()
    console.print(_waterfall(inspection, console.width))
    console.print()
    if inspection.neighbours is not None:
        from penstock.log_tools.requests.neighbours import show as show_neighbours

        show_neighbours(inspection.neighbours, console, inspection.request.created_ns)
    _show_events(inspection, console)
    for text in inspection.missing:
        console.print(f"missing: {escape(text)}", style="yellow", highlight=False, soft_wrap=True)
    _show_content(inspection, console)


def _model(request: RequestSummary) -> str:
    return f"{request.model} in place of {request.asked}" if request.asked else request.model


def _show_request(inspection: Inspection, console: Console, now_ns: int) -> None:
    request = inspection.request
    state = f"[{_STATES[request.state]}]{request.state}[/]"
    state += f" [red]{request.code}[/]" if request.code not in ("", request.state) else ""
    about = [f"[bold]{request.id}[/]", state, f"model {escape(_model(request))}", request.endpoint]
    about += [f"class {request.priority}", f"tenant {escape(request.tenant)}", f"via {escape(inspection.gateway)}"]
    about += [f"user {escape(request.user)}"] if request.user else []
    broken = not console.is_terminal  # by its reader, anywhere
    console.print("  ".join(filter(None, about)), highlight=False, soft_wrap=broken)
    parts = [f"accepted {clock(request.created_ns, now_ns)}", f"prompt {counted(request.prompt_tokens, 'token')}"]
    if request.ended_ns:
        parts[-1] += f" ({request.cached_tokens} from the cache)"
        parts.append(f"output {request.completion_tokens}")
        parts += [f"first token after {span(request.ttft_ms)}"] if request.ttft_ms is not None else []
        parts.append(f"{span(request.duration_ms)} in all")
    parts += [f"{request.attempts} attempts"] if request.attempts > 1 else []
    parts += [f"workers {escape(' → '.join(request.workers))}"] if len(request.workers) > 1 else []
    parts += [f"lost {escape(', '.join(request.lost_workers))}"] if request.lost_workers else []
    console.print(", ".join(parts), highlight=False, soft_wrap=broken)
    console.print(escape(", ".join(_made_with(request))), highlight=False, soft_wrap=broken)
    if request.message:
        console.print(escape(request.message), style="red", highlight=False, soft_wrap=broken)


def _made_with(request: RequestSummary) -> list[str]:
    """What the tokens depend on besides the prompt."""
    parts = [f"revision {request.revision or 'unknown'}"]
    parts += [f"the first {counted(sum(each.tokens), 'token')} from {each.revision}" for each in request.before]
    parts += [f"engine {request.engine} ({request.build})"] if request.engine else []
    parts += [f"adapter {request.adapter}"] if request.adapter else []
    settings = "" if request.endpoint in NOT_SAMPLED else settings_text(request.sampling)
    return [*parts, settings] if settings else parts


def _waterfall(inspection: Inspection, columns: int) -> Table:
    root = inspection.phases[0]
    whole = max(1, root.end_ns - root.start_ns)
    narrow = columns < NARROW
    width = max(NARROWEST, min(WIDEST, columns - (BESIDE - 20 if narrow else BESIDE)))
    attempts = any(phase.attempt > 1 for phase in inspection.phases)
    names = ["phase", *([] if narrow else ["where"]), f"0 … {span(whole / 1e6)}", "from", "took"]
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
    table.columns[-1].justify = table.columns[-2].justify = "right"
    for phase in inspection.phases:
        colour = _colour(phase)
        name = "  " * phase.depth + phase.name + (f" #{phase.attempt}" if attempts and phase.depth == 1 else "")
        start, end = phase.start_ns - root.start_ns, phase.end_ns - root.start_ns
        drawn = bar(start, end, whole, width)
        drawn = drawn.replace("█", "░") if phase.name == "wait" else drawn
        table.add_row(
            f"[{colour}]{escape(name)}{' !' if phase.error else ''}[/]",
            *([] if narrow else [escape(phase.where)]),
            f"[{colour}]{drawn}[/]",
            span(start / 1e6),
            span((end - start) / 1e6),
        )
    return table


def _colour(phase: Phase) -> str:
    return "red" if phase.error else _PHASES.get(phase.name, _COLOURS.get(phase.service, "default"))


def _show_events(inspection: Inspection, console: Console) -> None:
    begin = inspection.request.created_ns
    attempts = max((entry.attempt for entry in inspection.events), default=0) > 1
    for entry in inspection.events:
        offset = f"+{span((entry.at_ns - begin) / 1e6)}" if entry.at_ns >= begin else "before"
        attempt = f"{f'attempt {entry.attempt}' if entry.attempt else '':<9}  " if attempts else ""
        style = _EVENTS.get(entry.kind, "")
        style = "bold red" if entry.kind == "done" and inspection.request.code else style
        kind = f"[{style}]{entry.kind:<10}[/]" if style else f"{entry.kind:<10}"
        print_hanging(console, f"{offset:>11}  {attempt}{kind}  ", escape(line_of(entry)))
        if entry.candidates:
            console.print(Padding(_scores(entry, console.width - INDENT), (0, 0, 0, INDENT)))


_SCORES = (
    Column("worker"),
    Column("score", right=True),
    Column("overlap\nblocks", right=True),
    Column("to bring\nback"),
    Column("to read"),
    Column("active\nblocks", 4, right=True),
    Column("prefill\ntokens", 1, right=True),
    Column("running", 3, right=True),
    Column("stage", 2),
    Column("excluded"),
)


def _scores(entry: InspectedEvent, width: int) -> Table:
    blocks = entry.decided_at.get("prompt_blocks", 0)
    rows = []
    for candidate in entry.candidates:
        name = f"{candidate.worker}/{candidate.rank}" if candidate.rank else candidate.worker
        row = (
            f"[bold green]{escape(name)}[/] ←" if name in entry.chosen else escape(name),
            "" if candidate.excluded else f"{candidate.score:,.2f}",
            f"{candidate.overlap_blocks}/{blocks}",
            entry.brought_back(candidate),
            entry.read(candidate),
            str(candidate.active_blocks),
            str(candidate.prefill_tokens),
            f"{candidate.running}/{candidate.slots}",
            candidate.role or "all",
            candidate.excluded,
        )
        rows.append(row)
    roles = any(candidate.role for candidate in entry.candidates)
    excluded = any(candidate.excluded for candidate in entry.candidates)
    shown = {"stage": roles, "excluded": excluded, "to bring\nback": bool(entry.lower_tiers)}
    shown["to read"] = entry.move is not None
    named = [at for at, column in enumerate(_SCORES) if shown.get(column.name, True)]
    table = fitting_table([_SCORES[at] for at in named], [[row[at] for at in named] for row in rows], width)
    table.caption = ", ".join(f"{name} {value}" for name, value in entry.decided_at.items() if name != "prompt_blocks")
    table.caption_justify = "left"
    return table


def _show_content(inspection: Inspection, console: Console) -> None:
    content = inspection.content
    answers = [
        (f"answer {n}" if len(content.answers) > 1 else "answer", text) for n, text in enumerate(content.answers)
    ]
    for name, text in ([("prompt", content.prompt)] if content.prompt is not None else []) + answers:
        console.print(f"\n[bold]{name}[/]")
        console.print(visible(text) if console.is_terminal else text, markup=False, highlight=False, soft_wrap=True)
    ids = [("answer tokens", each) for each in content.answer_tokens]
    for name, tokens in ([("prompt tokens", content.prompt_tokens)] if content.prompt_tokens else []) + ids:
        console.print(f"\n[bold]{name}[/]")
        console.print(" ".join(map(str, tokens)), markup=False, highlight=False, soft_wrap=True)


class InspectOptions(NamedTuple):
    """What to read and how to show it. ``html``: a file to write; "": none."""

    batches: bool
    text: bool
    tokens: bool
    as_json: bool
    html: str
    model_path: str
    neighbours: str = ""  # "ids", "counts"; "": not read


def run(argv: Sequence[str], name: str = "inspect") -> int:
    """Inspect one request as the command ``name``; returns the exit status."""
    parser = Parser(
        prog=f"penstock {name}",
        description="show everything that happened to a request, and why: running, ended, failed or cancelled",
    )
    parser.add_argument(
        "request_id", metavar="ID", help="X-Request-Id header, or id, of the answer, or the beginning of it"
    )
    parser.add_argument("--text", action="store_true", help="print its prompt and answer as text")
    parser.add_argument("--tokens", action="store_true", help="print its prompt and answer as token ids")
    parser.add_argument(
        "--model-path", default="", help="directory of the tokenizer for --text; default: by the model's name"
    )
    parser.add_argument(
        "--no-batches", action="store_true", help="leave out token batches, so that the largest stream is not read"
    )
    parser.add_argument(
        "--neighbours",
        nargs="?",
        const="ids",
        default="",
        choices=("ids", "counts"),
        help="show what ran beside it at its workers, and what its router held; counts: without ids and tenants",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--html", default="", metavar="FILE", help="write one self-contained page")
    add_flags(parser)
    add_verify_flag(parser)
    args = parser.parse_args(argv)
    options = InspectOptions(not args.no_batches, args.text, args.tokens, args.json, args.html, args.model_path)
    options = options._replace(neighbours=args.neighbours)
    request_id = request_of_answer(args.request_id)
    console = stdout()
    return run_command(name, lambda: _run(request_id, LogSource.of(args), options, console))


async def _run(request_id: str, source: LogSource, options: InspectOptions, console: Console) -> None:
    streams = (*REQUEST_STREAMS, *(["TOKENS"] if options.batches else []))
    timeline, neighbours = await _timeline(request_id, source, streams, options)
    inspection = inspect(timeline, with_tokens=options.batches)
    inspection = msgspec.structs.replace(inspection, neighbours=neighbours)
    content, missing = _content(timeline, options)
    inspection = msgspec.structs.replace(inspection, content=content, missing=(*inspection.missing, *missing))
    if options.html:
        from penstock.log_tools.requests.inspection_page import page

        _write(Path(options.html), page(inspection))
    if options.as_json:
        console.file.write(as_json(inspection) + "\n")
    elif not options.html:
        show(inspection, console, now_ns=time.time_ns())


async def _timeline(
    request_id: str, source: LogSource, streams: Sequence[str], options: InspectOptions
) -> "tuple[RequestTimeline, Neighbours | None]":
    """From the cell in the id, or from another one."""
    unknown: ValueError | None = None
    (request_id,) = await whole_ids(source, [request_id])
    for cell in cells_for(source, request_id):
        async with open_log(cell.source, name="inspect", streams=streams, files=True) as log:
            try:
                timeline = await read_timeline(log.reader, request_id, with_tokens=options.batches)
                if not options.neighbours:
                    return timeline, None
                from penstock.log_tools.requests.neighbours import counts_only, read_neighbours

                neighbours = await read_neighbours(log.reader, timeline, stopped=log.stopped)
                return timeline, neighbours if options.neighbours == "ids" else counts_only(neighbours)
            except UnknownRequest as error:
                unknown = unknown or error
    assert unknown is not None
    raise unknown


def as_json(inspection: Inspection) -> str:
    """The inspection with every field of its request, empty ones too."""
    plain = msgspec.to_builtins(inspection) | {"request": as_dict(inspection.request)}
    return msgspec.json.encode(plain).decode()


def _content(timeline: RequestTimeline, options: InspectOptions) -> tuple[Content, list[str]]:
    """The requested parts of prompt and answer, and the reasons for those that are unavailable."""
    request, done, texts = timeline.request, timeline.done, Texts(options.model_path)
    content, missing = Content(), list[str]()
    if (options.text or options.tokens) and done is None:
        missing.append("the answer: it has not ended, and only its record holds the whole answer")
    if options.tokens:
        answers = tuple(texts.token_ids(choice.tokens) for choice in done.choices) if done is not None else ()
        content = Content(prompt_tokens=texts.token_ids(request.prompt), answer_tokens=answers)
    if options.text:
        try:
            outputs = tuple(texts.outputs(done)) if done is not None else ()
            content = msgspec.structs.replace(content, prompt=texts.prompt(request), answers=outputs)
        except ValueError as error:
            missing.append(str(error))
    return content, missing


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {reason(error)}") from error
    print(f"wrote {path}", file=sys.stderr)
