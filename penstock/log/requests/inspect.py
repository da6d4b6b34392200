"""``penstock inspect ID``: everything that happened to a request, and why."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from penstock.cli.terminal import reason, stdout
from penstock.configs.flags import Parser
from penstock.log.requests.inspection import Content, Inspection, inspect
from penstock.log.requests.show_inspection import show
from penstock.log.requests.texts import Texts
from penstock.log.sources.open_log import REQUEST_STREAMS, Source, add_flags, add_verify_flag, open_log, run_command
from penstock.log.timeline.read import read_timeline
from penstock.log.timeline.request_timeline import RequestTimeline
from penstock.schemas.ids import request_of_answer
from penstock.schemas.summary import as_dict


class Options(NamedTuple):
    """What to read and how to show it. ``html``: a file to write; "": none."""

    batches: bool
    text: bool
    tokens: bool
    as_json: bool
    html: str
    model_path: str


def run(argv: Sequence[str], name: str = "inspect") -> int:
    """Inspect one request as the command ``name``; returns the exit status."""
    parser = Parser(
        prog=f"penstock {name}",
        description="show everything that happened to a request, and why: running, ended, failed or cancelled",
    )
    parser.add_argument("request_id", metavar="ID", help="X-Request-Id header, or id, of the answer")
    parser.add_argument("--text", action="store_true", help="print its prompt and answer as text")
    parser.add_argument("--tokens", action="store_true", help="print its prompt and answer as token ids")
    parser.add_argument(
        "--model-path", default="", help="directory of the tokenizer for --text; default: by the model's name"
    )
    parser.add_argument(
        "--no-batches", action="store_true", help="leave out token batches: the largest stream is not read, or copied"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--html", default="", metavar="FILE", help="write one page that needs nothing else")
    add_flags(parser)
    add_verify_flag(parser)
    args = parser.parse_args(argv)
    options = Options(not args.no_batches, args.text, args.tokens, args.json, args.html, args.model_path)
    request_id = request_of_answer(args.request_id)
    console = stdout()
    return run_command(name, lambda: _run(request_id, Source.of(args), options, console))


async def _run(request_id: str, source: Source, options: Options, console: Console) -> None:
    streams = (*REQUEST_STREAMS, *(["TOKENS"] if options.batches else []))
    async with open_log(source, name="inspect", streams=streams, files=True) as log:
        timeline = await read_timeline(log.reader, request_id, with_tokens=options.batches)
    inspection = inspect(timeline, with_tokens=options.batches)
    content, missing = _content(timeline, options)
    inspection = msgspec.structs.replace(inspection, content=content, missing=(*inspection.missing, *missing))
    if options.html:
        from penstock.log.requests.inspection_page import page

        _write(Path(options.html), page(inspection))
    if options.as_json:
        console.file.write(as_json(inspection) + "\n")
    elif not options.html:
        show(inspection, console, now_ns=time.time_ns())


def as_json(inspection: Inspection) -> str:
    """The inspection with every field of its request, empty ones too."""
    plain = msgspec.to_builtins(inspection) | {"request": as_dict(inspection.request)}
    return msgspec.json.encode(plain).decode()


def _content(timeline: RequestTimeline, options: Options) -> tuple[Content, list[str]]:
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
