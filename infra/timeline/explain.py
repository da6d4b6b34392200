"""``penstock explain REQUEST_ID``: where a request went and why, from the log alone."""

from collections.abc import Sequence

from rich.console import Console

from configs.flags import Parser
from infra.terminal import stdout
from infra.timeline.open_log import REQUEST_STREAMS, Source, add_flags, open_log, run_command
from infra.timeline.read import read_timeline
from infra.timeline.show_timeline import show


def run(argv: Sequence[str]) -> int:
    """Print the timeline of one request; returns the exit status."""
    parser = Parser(prog="penstock explain", description="explain what happened to a request, and why")
    parser.add_argument("request_id", metavar="REQUEST_ID", help="X-Request-Id header, or id, of the answer")
    parser.add_argument("--tokens", action="store_true", help="list token batches too, while TOKENS keeps them")
    add_flags(parser)
    args = parser.parse_args(argv)
    console = stdout()
    request_id = args.request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    return run_command("explain", lambda: _explain(request_id, Source.of(args), console, args.tokens))


async def _explain(request_id: str, source: Source, console: Console, tokens: bool) -> None:
    streams = (*REQUEST_STREAMS, *(["TOKENS"] if tokens else []))
    async with open_log(source, name="explain", streams=streams) as log:
        show(await read_timeline(log.bus, request_id, with_tokens=tokens), console)
