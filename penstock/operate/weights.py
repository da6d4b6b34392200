"""``penstock weights``: show, pause, update, sleep and wake the weights of a running model, through a gateway."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpcore2
import msgspec
from rich.console import Console

from penstock.cli.terminal import Column, escape, fail, fitting_table, stdout
from penstock.configs.flags import Parser
from penstock.configs.settings import NatsSettings
from penstock.launch.state import read_state

CONNECT_S = 10.0
LOAD_S = 660.0  # that workers have beside the time for running requests
VERBS = {
    "show": "show the weights of each worker",
    "pause": "start no request until resume; new ones wait",
    "update": "replace the weights by those of a folder",
    "resume": "end a pause",
    "sleep": "move the weights to host memory",
    "wake": "bring them back",
}


def run(argv: Sequence[str]) -> int:
    """Do what the first argument says; the exit status."""
    args = _parser().parse_args(argv)
    try:
        answer = _asked(args)
    except (ValueError, OSError, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as error:
        return fail("weights", error)
    _print(answer, stdout())
    return 0


def _parser() -> Parser:
    parser = Parser(prog="penstock weights", description="change the weights of a model while its workers run")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar=f"{{{','.join(VERBS)}}}")
    for name, about in VERBS.items():
        verb = verbs.add_parser(name, help=about, description=about)
        if name == "update":
            verb.add_argument("path", help="within the workers' --weights-folder")
        verb.add_argument("--model", default="", help="which one, where several are served")
        if name in ("pause", "update"):
            verb.add_argument(
                "--continue", dest="running", action="store_const", const="continue", default="finish",
                help="running requests pause and continue afterwards; default: they end first",
            )  # fmt: skip
        if name in ("sleep", "wake"):
            verb.add_argument("--worker", default="", metavar="NAME", help="only this one")
        if name not in ("show", "resume"):
            verb.add_argument(
                "--timeout", type=float, default=120.0, metavar="SECONDS",
                help="for running requests to finish (default: %(default)g)",
            )  # fmt: skip
        verb.add_argument("--url", default="", help="of a gateway; default: that of the deployment in --data-dir")
        verb.add_argument(
            "--key", default=os.environ.get("OPENAI_API_KEY", ""), help="an operator's; default: $OPENAI_API_KEY"
        )
        verb.add_argument(
            "--data-dir", default=os.environ.get("PENSTOCK_DATA_DIR", NatsSettings().data_dir), metavar="FOLDER",
            help="of a running `penstock up` (default: %(default)s)",
        )  # fmt: skip
    return parser


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """The gateway's answer."""
    url = args.url or read_state(Path(args.data_dir) / "state.json").http_url
    base = url.rstrip("/").removesuffix("/v1")
    fields = {name: value for name in ("model", "path", "running", "worker") if (value := getattr(args, name, ""))}
    within_s = getattr(args, "timeout", 0.0)
    if hasattr(args, "timeout"):
        fields["timeout_s"] = within_s
    headers = [("Content-Type", "application/json")] + ([("Authorization", f"Bearer {args.key}")] if args.key else [])
    verb, path, body = "POST", f"/v1/admin/{args.verb}", msgspec.json.encode(fields)
    if args.verb == "update":
        path = "/v1/admin/update_weights"
    elif args.verb == "show":
        verb, path, body = "GET", f"/v1/admin/weights?model={quote(args.model)}", b""
    times = {"connect": CONNECT_S, "read": within_s + LOAD_S, "write": CONNECT_S, "pool": CONNECT_S}
    with httpcore2.ConnectionPool(max_connections=1) as pool:
        answer = pool.request(verb, base + path, headers=headers, content=body, extensions={"timeout": times})
    try:
        found: dict[str, Any] = msgspec.json.decode(answer.content, type=dict[str, Any])
        if answer.status == 200:
            return found
        raise ValueError(found["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{base} answers with status {answer.status}") from error


def _print(answer: dict[str, Any], console: Console) -> None:
    columns, rows = [Column(name) for name in ("worker", "revision", "update", "state", "last change")], []
    for each in answer["workers"]:
        state = "asleep" if each["asleep"] else "paused" if each["paused"] else "awake"
        took = f"{each['seconds']:.1f} s" if each["seconds"] else ""
        rows.append((escape(each["worker"]), each["revision"], str(each["update"]), state, took))
    console.print(f"{escape(answer['model'])}: revision {answer['revision']}, update {answer['update']}")
    console.print(fitting_table(columns, rows, console.width))
