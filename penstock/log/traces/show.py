"""A trace on a terminal, as a waterfall."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from penstock.cli.bars import bar
from penstock.cli.terminal import escape
from penstock.log.traces.span import Span, in_order

WIDTH = 48  # columns of the waterfall, at most
NARROWEST = 12
TEXT = 84  # columns of the text beside it
_COLOURS = {"gateway": "cyan", "router": "magenta", "worker": "green"}


def show(spans: Sequence[Span], console: Console) -> None:
    """Print spans, root first, each with a bar for its place in the request's time."""
    root = spans[0]
    whole = max(1, root.end_ns - root.start_ns)
    console.print(f"trace [bold]{root.trace_id}[/]" + (f", part of span {root.parent_id}" if root.parent_id else ""))
    width = max(NARROWEST, min(WIDTH, console.width - TEXT))
    table = Table("span", "where", f"0 … {_ms(whole)}", "from", "took", "", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[3].justify = table.columns[4].justify = "right"
    for depth, span in in_order(spans):
        colour = "red" if span.error is not None else _COLOURS[span.service]
        table.add_row(
            f"{'  ' * depth}[bold {colour}]{escape(span.name)}[/]",
            escape(_where(span, short=width < WIDTH)),
            f"[{colour}]{bar(span.start_ns - root.start_ns, span.end_ns - root.start_ns, whole, width)}[/]",
            _ms(span.start_ns - root.start_ns),
            _ms(span.end_ns - span.start_ns),
            escape(_details(span)),
        )
    console.print(table)


def _where(span: Span, short: bool) -> str:
    """The process. ``short``: without the suffix that changes with each of its starts."""
    name = span.instance or span.service
    return name.rpartition("-")[0] or name if short else name


def _details(span: Span) -> str:
    """The few attributes that fit into a line."""
    if span.error is not None:
        return span.error
    got = span.attributes.get
    details = []
    match span.name:
        case "route":
            details += [f"{got('penstock.router.mode')} → {got('penstock.router.worker')}"]
            details += [f"overlap {got('penstock.router.overlap_blocks', 0)}/{got('penstock.router.prompt_blocks')}"]
        case "transfer":
            size = got("penstock.transfer.bytes")
            details += [f"{got('penstock.transfer.blocks')} blocks"]
            details += [f"{size / 2**20:.2f} MiB"] if isinstance(size, int) and size else []
            details += [f"over {got('penstock.transfer.backend')}"]
    for name, unit in (
        ("gen_ai.usage.input_tokens", "in"),
        ("gen_ai.usage.cache_read.input_tokens", "cached"),
        ("gen_ai.usage.output_tokens", "out"),
        ("penstock.worker.preemptions", "preempted"),
    ):
        if got(name):
            details.append(f"{got(name)} {unit}")
    reasons = got("gen_ai.response.finish_reasons")
    details += [",".join(reasons)] if isinstance(reasons, list) else []
    details += [str(got("error.type"))] if got("error.type") else []
    return ", ".join(details)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms" if abs(ns) < 10e9 else f"{ns / 1e9:.2f} s"
