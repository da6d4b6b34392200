"""``penstock decode``: turns Penstock's messages in the output of the ``nats`` command into readable lines."""

import sys
import time
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import msgspec
from rich.console import Console

from penstock.cli.figures import clock
from penstock.cli.terminal import print_hanging, stdout
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import format_time
from penstock.log.requests.describe import plain
from penstock.log.requests.nats_output import Message, NatsOutput
from penstock.log.requests.tail import markup


def run(argv: Sequence[str]) -> int:
    """Decode standard input; returns the exit status."""
    parser = Parser(
        prog="penstock decode",
        description="decode Penstock messages in the output of the `nats` command: pipe `nats sub`, `nats stream view` "
        "or `nats stream get` into it. Other lines pass through unchanged",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per message, with the whole message")
    args = parser.parse_args(argv)
    try:
        decode(sys.stdin.buffer, stdout(), as_json=args.json)
    except BrokenPipeError:  # the reader of the output has exited
        sys.stderr.close()
    except KeyboardInterrupt:
        pass
    return 0


def decode(source: BinaryIO, console: Console, *, as_json: bool = False) -> None:
    """Print each message as soon as it is complete."""
    output = NatsOutput()
    for line in source:
        _print(output.feed(line), console, as_json)
    _print(output.end(), console, as_json)


def _print(messages: Iterable[Message | bytes], console: Console, as_json: bool) -> None:
    for each in messages:
        if isinstance(each, bytes):
            console.file.write(each.decode("utf-8", "replace"))
        elif as_json:
            line = {
                "subject": each.subject,
                "seq": each.seq,
                "time": format_time(each.time_ns) if each.time_ns else "",
                "headers": {name: value for name, value in each.headers.items() if not name.startswith("Nats-")},
                "kind": each.about.kind,
                "message": plain(each.about.content),
            }
            console.file.write(msgspec.json.encode(line).decode() + "\n")
        else:
            at = clock(each.time_ns, time.time_ns()) if each.time_ns else ""
            kind = each.subject.split(".")[1] if "." in each.subject else ""
            where = f"{kind}#{each.seq}" if each.seq else kind
            print_hanging(console, *markup(at, where, each.about))
    console.file.flush()
