"""``penstock run``: serve a model for one conversation."""

import argparse
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import httpcore2
import msgspec
from rich.console import Console

from penstock.chat.chat_command import INTERRUPTED, add_chat_flags, talk
from penstock.chat.client import BROKEN
from penstock.cli.terminal import visible
from penstock.configs.flags import Parser
from penstock.infra.model.modeldir import ModelError, resolve
from penstock.infra.nats_server.datadir import Lock, holder
from penstock.infra.process.child import die_with_parent
from penstock.infra.process.supervisor import leave_closed_terminal
from penstock.launch.state import read_state

READY_S = 3600.0  # larger models take minutes to load; `up` gives up earlier by its own --ready-s
STOP_S = 60.0
PREFIX = "penstock-run-"  # of the folders of conversations that are not kept
NEW_S = 10.0  # a run may be about to take the lock of its folder
CLAIM = "run.lock"  # in them, held while they are in use
POLL_S = 0.1
ANSWER_S = 5.0  # for the gateway to say that it is ready
SHOWN_BYTES = 4000  # of the output of a start that failed


class StartFailed(ValueError):
    """``penstock up`` ended before it was ready."""


def run(argv: Sequence[str]) -> int:
    """Start a deployment, answer, stop it; the exit status."""
    parser = Parser(
        prog="penstock run",
        description="serve a model for one question or conversation: start what is needed, answer, stop. A model of "
        "the Hugging Face hub is downloaded first.",
        epilog="flags of `penstock up` go after --, as in: penstock run demo 'What is 12 + 5?' -- --threads 2",
    )
    parser.add_argument("model", help="model directory, Hugging Face id, or a bundled model such as demo")
    question_help = "what to ask; -: read it from standard input; without one: talk"
    parser.add_argument("question", nargs="*", default=[], help=question_help)
    parser.add_argument("--data-dir", default="", metavar="FOLDER", help="keep the log here; default: it is deleted")
    add_chat_flags(parser)
    own, flags = _split(list(argv))
    args = parser.parse_args(own)
    try:
        with _signals_end_it():
            resolve(args.model, weights="mock" not in flags)  # downloads it here, where its progress is seen
            if args.data_dir:
                return _serve(args, Path(args.data_dir), flags)
            remove_left_behind()
            # If the deployment had to be killed, its processes may still write while the folder is deleted.
            with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
                claim = Lock(Path(folder) / CLAIM)
                claim.acquire("penstock run")
                return _serve(args, Path(folder), flags)
    except (ModelError, ValueError, OSError) as error:
        print(f"penstock run: {visible(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def remove_left_behind() -> None:
    """Delete the folders of runs that were killed, so that they could not delete them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
                continue
            if time.time() - about.st_mtime < NEW_S:
                continue
            locks = [folder / CLAIM, folder / "up.lock"]  # the deployment ends a moment after its run
            if locks[0].exists() and all(holder(lock) is None for lock in locks):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``SystemExit``, so that the deployment is stopped and its folder deleted."""

    def end(number: int, _frame: FrameType | None) -> None:
        leave_closed_terminal()
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _serve(args: argparse.Namespace, data_dir: Path, flags: Sequence[str]) -> int:
    data_dir.mkdir(parents=True, exist_ok=True)
    output = data_dir / "run.log"
    command = [sys.executable, "-m", "penstock", "up", "--model", args.model, "--data-dir", str(data_dir)]
    command += ["--http-port", "0", "--dashboard-port", "-1", "--metrics-port", "-1", *flags]
    with output.open("wb") as log:
        up = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends an answer, not the deployment
            preexec_fn=die_with_parent(),
        )
    try:
        with Console(stderr=True).status(f"starting {args.model}"):
            url = _ready_url(data_dir / "state.json", up.poll, output)
        args.model = ""
        return talk(args, url)
    finally:
        _stop(up)


def _ready_url(state: Path, ended: Callable[[], int | None], output: Path) -> str:
    """Where the deployment serves, once it does."""
    deadline = time.monotonic() + READY_S
    limits = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), ANSWER_S)}
    while time.monotonic() < deadline:
        if ended() is not None:
            raise StartFailed(
                output.read_bytes()[-SHOWN_BYTES:].decode(errors="replace").strip().removeprefix("penstock up: ")
            )
        try:
            url = read_state(state).http_url
            if httpcore2.request("GET", f"{url}/health/ready", extensions=limits).status == 200:
                return url
        except (*BROKEN, msgspec.DecodeError):
            pass
        time.sleep(POLL_S)
    raise StartFailed(f"not ready within {READY_S:g} s; {output} says more")


def _stop(up: "subprocess.Popen[bytes]") -> None:
    """Stop the deployment; a second Ctrl-C or signal meanwhile kills it."""
    up.terminate()
    try:
        up.wait(STOP_S)
    except BaseException as error:
        up.kill()
        up.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
