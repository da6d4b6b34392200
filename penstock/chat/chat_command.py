"""``penstock chat``: talk to a model in the terminal."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from penstock.chat.answer import Conversation, image_url, load
from penstock.chat.client import ChatClient
from penstock.chat.session import COMMANDS, ChatOptions, Session
from penstock.cli.terminal import visible
from penstock.configs.flags import Parser
from penstock.configs.settings import NatsSettings
from penstock.launch.state import read_state

INTERRUPTED = 130
HISTORY_LINES = 1000
INPUT_BYTES = 8 << 20  # of a question from standard input


def run(argv: Sequence[str]) -> int:
    """Answer one question, or hold a conversation; the exit status."""
    parser = Parser(
        prog="penstock chat",
        description="talk to a model in the terminal. With a question, print the answer and end; without one, hold a "
        "conversation.",
        epilog="examples: penstock chat 'What is 12 + 5?'   |   penstock chat - < report.txt   |   penstock chat",
    )
    parser.add_argument("question", nargs="*", help="what to ask; -: read it from standard input")
    parser.add_argument("--url", default="", help="an OpenAI-compatible server; default: the deployment in --data-dir")
    parser.add_argument(
        "--data-dir", default=os.environ.get("PENSTOCK_DATA_DIR", NatsSettings().data_dir), metavar="FOLDER",
        help="of a running `penstock up` (default: %(default)s)",
    )  # fmt: skip
    add_chat_flags(parser)
    args = parser.parse_args(argv)
    try:
        return talk(args, args.url or deployment_url(Path(args.data_dir)))
    except (ValueError, OSError) as error:
        print(f"penstock chat: {visible(str(error))}", file=sys.stderr)
        return 1


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """What ``penstock run`` has too."""
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", ""), help="API key; default: $OPENAI_API_KEY")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="show an image or video with the question; or a URL",
    )
    parser.add_argument(
        "--tools", default="", metavar="FILE", help="JSON list of tools that the model may call; you give the results"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer; default: the server's")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the model's")
    parser.add_argument(
        "--thoughts", action="store_true", help="print what a reasoning model thinks; otherwise it is folded"
    )
    parser.add_argument("--continue", dest="go_on", action="store_true", help="go on with the last conversation")
    if not any(action.dest == "model" for action in parser._actions):
        parser.add_argument("--model", default="", help="one of those that are served; default: the first")


def deployment_url(data_dir: Path) -> str:
    """Where the deployment in a data folder is reached.

    Raises:
        ValueError: none runs there.
    """
    try:
        return read_state(data_dir / "state.json").http_url
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"no deployment runs in {data_dir}: start one with `penstock up`, or name a server with --url"
        ) from error


def talk(args: argparse.Namespace, url: str) -> int:
    """Ask the question, or hold a conversation; the exit status.

    Raises:
        ValueError, OSError: it cannot be answered, and why.
    """
    question = _question(args.question)
    kept = _state_folder() / "last-conversation.json"
    conversation = load(kept) if args.go_on else Conversation()
    if args.system:
        conversation.set_system(args.system)
    images = [image_url(each) for each in args.image]
    options = ChatOptions(_extra(args), args.thoughts, kept)
    client = ChatClient(url, args.key)
    with asyncio.Runner() as runner:
        try:
            models = runner.run(client.models())
            conversation.model = _chosen(args.model, models)
            session = Session(runner, client, conversation, Console(), options)
            if question:
                session.question(question, images)
            else:
                _read_lines_well()
                session.run()
                _keep_lines()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            runner.run(client.aclose())
    return 0


def _question(words: Sequence[str]) -> str:
    if list(words) != ["-"] and (words or sys.stdin.isatty()):
        return " ".join(words)
    data = sys.stdin.buffer.read(INPUT_BYTES + 1)
    if len(data) > INPUT_BYTES:
        raise ValueError(f"the question is longer than {INPUT_BYTES >> 20} MiB")
    text = data.decode(errors="replace").strip()
    if not text:
        raise ValueError("no question: standard input is empty")
    return text


def _chosen(name: str, models: Sequence[str]) -> str:
    if not models:
        raise ValueError("the server has no model yet: `penstock doctor` says why")
    if name and name not in models:
        raise ValueError(f"model {name!r} is not served; served: {', '.join(models)}")
    return name or models[0]


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if args.max_tokens is not None:
        extra["max_tokens"] = args.max_tokens
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    if args.tools:
        try:
            extra["tools"] = msgspec.json.decode(Path(args.tools).read_bytes(), type=list[dict[str, Any]])
        except OSError as error:
            raise ValueError(f"--tools {args.tools}: {error.strerror or error}") from error
        except msgspec.MsgspecError as error:
            raise ValueError(f"--tools {args.tools} is no JSON list of tools: {error}") from error
    return extra


def _state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "penstock"


def _read_lines_well() -> None:
    """Line editing, history and completion of commands, where Python has readline."""
    with suppress(ImportError):
        import readline

        with suppress(OSError):
            readline.read_history_file(_state_folder() / "chat-history")
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer_delims(" ")
        readline.set_completer(
            lambda text, at: next(iter([each for each in COMMANDS if text and each.startswith(text)][at:]), None)
        )
        readline.parse_and_bind("tab: complete")


def _keep_lines() -> None:
    with suppress(ImportError, OSError):
        import readline

        _state_folder().mkdir(parents=True, exist_ok=True)
        readline.write_history_file(_state_folder() / "chat-history")
        (_state_folder() / "chat-history").chmod(0o600)
