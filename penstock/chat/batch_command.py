"""``penstock batch run``: run the requests of a file, and write the answers to another one."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpcore2
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock.chat.chat_command import INTERRUPTED, deployment_url
from penstock.chat.client import BROKEN, CONNECT_S, message_of
from penstock.cli.figures import counted
from penstock.cli.terminal import visible
from penstock.configs.flags import Parser
from penstock.configs.settings import NatsSettings

POLL_S = 1.0
ANSWER_S = 300.0  # for a file to be stored or read
AWAY_S = 300.0  # for which a server that does not answer is asked again
ENDED = ("completed", "failed", "expired", "cancelled")
BOUNDARY = "penstock-7f3a1d5c9e"
EXIT_ERRORS = 1  # some line has no answer


class BegunBatch(msgspec.Struct):
    """What is kept beside the output while the batch runs. ``size``, ``changed_ns``: of the input file."""

    batch: str
    url: str
    size: int
    changed_ns: int


class BatchApi:
    """
    Args:
        url: of the server, with or without /v1.
        key: bearer token; "": none.
    """

    def __init__(self, url: str, key: str) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._headers = [(b"Authorization", f"Bearer {key}".encode())] if key else []
        self._pool = httpcore2.ConnectionPool(max_connections=1)

    def close(self) -> None:
        self._pool.close()

    def _asked(self, method: str, path: str, content: bytes = b"", kind: str = "application/json") -> bytes:
        headers = [*self._headers, (b"Content-Type", kind.encode())]
        times = {"timeout": {"connect": CONNECT_S, "read": ANSWER_S, "write": ANSWER_S, "pool": CONNECT_S}}
        try:
            answer = self._pool.request(
                method, f"{self._base}/v1/{path}", headers=headers, content=content, extensions=times
            )
        except httpcore2.UnsupportedProtocol:
            raise ValueError(f"--url {self._base}: expected http://HOST:PORT") from None
        if answer.status >= 500:
            raise ConnectionError(message_of(answer.status, answer.content))
        if answer.status != 200:
            raise ValueError(message_of(answer.status, answer.content))
        return bytes(answer.content)

    def patiently(self, method: str, path: str, content: bytes = b"") -> bytes:
        """Ask again while the server is away. For what may be asked twice.

        Raises:
            ValueError: it refuses, or was away for ``AWAY_S``.
        """
        until = time.monotonic() + AWAY_S
        while True:
            try:
                return self._asked(method, path, content)
            except BROKEN as error:
                if time.monotonic() > until:
                    raise ValueError(f"no answer from {self._base} for {AWAY_S:g} s: {error}") from error
            time.sleep(POLL_S)

    def upload(self, name: str, content: bytes) -> str:
        """The id of the stored file."""
        shown = name.replace('"', "_").encode("ascii", "replace")
        edge = BOUNDARY.encode()
        form = (
            b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n--%b--\r\n'
        ) % (edge, edge, shown, content, edge)
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        return str(msgspec.json.decode(self._asked("POST", "files", form, kind))["id"])

    def create(self, file: str, endpoint: str, window: str) -> str:
        """The id of the new batch."""
        body = {"input_file_id": file, "endpoint": endpoint, "completion_window": window}
        return str(msgspec.json.decode(self._asked("POST", "batches", msgspec.json.encode(body)))["id"])

    def state(self, batch: str) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.patiently("GET", f"batches/{batch}"))
        return found


def run(argv: Sequence[str]) -> int:
    """Run a batch, or wait for a running one, and return the exit status."""
    parser = Parser(
        prog="penstock batch run",
        description="run the requests of a file (JSON lines, as for OpenAI's Batch API) and write their answers to "
        "another one. When it is interrupted, the batch continues: the same command waits for it again.",
    )
    parser.add_argument("input", type=Path, help="file with a request on each line")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where the answers go")
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="where lines without an answer go; default: beside the answers"
    )
    parser.add_argument("--window", default="24h", metavar="TIME", help="how long it may take, from 1h to 30d")
    parser.add_argument("--url", default="", help="of the server; default: that of --data-dir")
    parser.add_argument(
        "--data-dir", default=os.environ.get("PENSTOCK_DATA_DIR", NatsSettings().data_dir), metavar="FOLDER",
        help="of a running `penstock up` (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", ""), help="API key; default: $OPENAI_API_KEY")
    args = parser.parse_args(list(argv))
    kept = args.output.with_name(args.output.name + ".batch")
    try:
        return _run(args, kept)
    except (ValueError, OSError) as error:
        print(f"penstock batch run: {visible(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if kept.exists():
            print("\nThe batch continues. The same command waits for it again.", file=sys.stderr)
        return INTERRUPTED


def _run(args: argparse.Namespace, kept: Path) -> int:
    url = args.url or deployment_url(Path(args.data_dir))
    with closing(BatchApi(url, args.key)) as client:
        return _run_with(client, args, kept, url)


def _run_with(client: BatchApi, args: argparse.Namespace, kept: Path, url: str) -> int:
    content, seen = args.input.read_bytes(), args.input.stat()
    if kept.exists():
        job = msgspec.json.decode(kept.read_bytes(), type=BegunBatch)
        if (job.size, job.changed_ns) != (seen.st_size, seen.st_mtime_ns):
            raise ValueError(
                f"{args.input} was changed since its batch {job.batch} began: delete {kept} to run it again"
            )
    else:
        if args.output.exists():
            raise ValueError(f"{args.output} exists: delete it, or name another --output")
        endpoint = _endpoint(content, args.input)
        file = client.upload(args.input.name, content)
        job = BegunBatch(client.create(file, endpoint, args.window), url, seen.st_size, seen.st_mtime_ns)
        kept.write_bytes(msgspec.json.encode(job))
    batch = _wait(client, job.batch)
    for problem in (batch["errors"] or {"data": ()})["data"]:
        print(f"{args.input}:{problem['line'] or ''}: {visible(problem['message'])}", file=sys.stderr)
    errors = args.errors or args.output.with_suffix(".errors" + args.output.suffix)
    for file, path in ((batch["output_file_id"], args.output), (batch["error_file_id"], errors)):
        if file:
            part = path.with_name(path.name + ".part")
            part.write_bytes(client.patiently("GET", f"files/{file}/content"))
            part.replace(path)
    kept.unlink()
    counts = batch["request_counts"]
    ended = f"{counted(counts['completed'], 'answer')}, {counted(counts['failed'], 'error')}"
    print(f"{batch['status']}: {ended}", file=sys.stderr)
    if batch["error_file_id"]:
        print(f"lines without an answer: {errors}", file=sys.stderr)
    return 0 if batch["status"] == "completed" and not counts["failed"] else EXIT_ERRORS


def _endpoint(content: bytes, path: Path) -> str:
    """The endpoint of the first line, which all lines have."""
    first = content.lstrip().partition(b"\n")[0]
    try:
        return str(msgspec.json.decode(first)["url"])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the first line is not a request with a url: {error}") from error


def _wait(client: BatchApi, name: str) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        shown = progress.add_task(name, total=None)
        while True:
            batch = client.state(name)
            counts = batch["request_counts"]
            progress.update(
                shown,
                description=batch["status"],
                completed=counts["completed"] + counts["failed"],
                total=counts["total"] or None,
            )
            if batch["status"] in ENDED:
                return batch
            time.sleep(POLL_S)
