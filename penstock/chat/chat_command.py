"""``penstock chat``: talk to a model in the terminal."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from penstock.chat.client import (
    AnswerDelta,
    ChatClient,
    Conversation,
    StreamedAnswer,
    StreamedToolCall,
    image_url,
    load,
    save,
)
from penstock.cli.terminal import visible
from penstock.configs.flags import Parser
from penstock.configs.settings import NatsSettings
from penstock.launch.state import read_state

THOUGHT = "dim italic"
_ERASED_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class AnswerPrinter:
    """
    Args:
        console: standard output.
        thoughts: whether thoughts are printed; folded, a line says that the model thinks.
    """

    def __init__(self, console: Console, *, thoughts: bool) -> None:
        self._console = console
        self._thoughts = thoughts
        self._kind = ""  # of what was printed last
        self._open = False  # the line is not ended

    def part(self, part: AnswerDelta) -> None:
        if part.thought:
            if self._kind != "thought":
                self._begin("thought")
                if not self._thoughts:
                    self._write("(thinking ...)" if self._console.is_terminal else "", THOUGHT)
            if self._thoughts:
                self._write(part.thought, THOUGHT)
        if part.text:
            text = part.text
            if self._kind == "thought":
                self._fold()
                text = text.lstrip("\n")
            self._begin("text")
            self._write(text, "")

    def end(self, answer: StreamedAnswer) -> None:
        """The answer is complete, or broke off."""
        if self._kind == "thought":
            self._fold()
        for call in answer.calls:
            self._begin("call")
            self._write(call_line(call), "cyan")
            self.newline()
        self.newline()

    def newline(self) -> None:
        """End the line, unless nothing stands in it."""
        if self._open:
            self._console.print()
            self._open = False

    def _begin(self, kind: str) -> None:
        if self._kind not in ("", kind):
            self.newline()
        self._kind = kind

    def _fold(self) -> None:
        if not self._thoughts and self._console.is_terminal and self._open:
            self._console.control(_ERASED_LINE)
            self._open = False

    def _write(self, text: str, style: str) -> None:
        if not text:
            return
        shown = visible(text)
        self._console.print(Text(shown, style), end="", soft_wrap=True)
        self._open = not shown.endswith("\n")


def call_line(call: StreamedToolCall) -> str:
    """A tool call as a line: its arguments in order, or as they came if they are not a JSON object."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict)
    except msgspec.MsgspecError:
        return f"-> {call.name}({call.arguments})"
    values = ", ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in arguments.items())
    return f"-> {call.name}({values})"


HELP = """\
/new             begin a new conversation
/system TEXT     set the system message; without TEXT: remove it
/model NAME      ask another model; without NAME: list them
/image FILE      show an image or video with the next question; a URL will do
/retry           ask the last question again
/undo            take back the last question and its answer
/save FILE       write the conversation to a file
/load FILE       continue a saved conversation
/quit            end; Ctrl-D does too
A line that ends in \\ continues in the next one. Ctrl-C ends an answer."""
COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))


class ChatOptions(NamedTuple):
    """
    Attributes:
        extra: further fields of each request, such as ``temperature`` and ``tools``.
        thoughts: whether thoughts are printed.
        kept: where the conversation is written after each answer; None: nowhere.
    """

    extra: dict[str, Any]
    thoughts: bool = False
    kept: Path | None = None


class Session:
    """
    Args:
        runner: runs the client; Ctrl-C ends what it runs.
        read: reads a line at a prompt; raises ``EOFError`` at the end.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        client: ChatClient,
        conversation: Conversation,
        console: Console,
        options: ChatOptions,
        read: Callable[[str], str] = input,
    ) -> None:
        self._runner = runner
        self._client = client
        self._conversation = conversation
        self._console = console
        self._options = options
        self._read = read
        self._images: list[str] = []

    def run(self) -> None:
        """Read and answer until the end of input."""
        say = self._console.print
        model = visible(self._conversation.model)
        say(f"{model}: /help lists commands, Ctrl-D ends", style="dim", highlight=False, markup=False)
        while True:
            try:
                line = self._line()
            except EOFError:
                say()
                return
            except KeyboardInterrupt:
                say("\n(Ctrl-D ends)", style="dim")
                continue
            if line in ("/quit", "/exit"):
                return
            try:
                self._do(line)
            except (EOFError, KeyboardInterrupt):
                say("(stopped)", style="dim")
            except (ValueError, OSError) as error:
                say(visible(str(error)), style="red", markup=False, highlight=False, soft_wrap=True)

    def question(self, text: str, images: list[str]) -> StreamedAnswer:
        """Ask and print the answer.

        Raises:
            ValueError: there is no answer, and why.
            KeyboardInterrupt: Ctrl-C ended it; what had come of it is kept.
        """
        self._conversation.ask(text, images)
        return self._runner.run(self._answer())

    def _line(self) -> str:
        line = self._read("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._read(". ")
        return line.strip()

    def _do(self, line: str) -> None:
        if line.startswith("/"):
            self._command(line)
        elif line:
            images, self._images = self._images, []
            answer = self.question(line, images)
            while answer.calls:
                for call in answer.calls:
                    self._conversation.tool_result(call.id, self._read(f"result of {visible(call.name)}> "))
                answer = self._runner.run(self._answer())

    async def _answer(self) -> StreamedAnswer:
        """The answer to the messages so far; without any, the question is taken back."""
        conversation = self._conversation
        answer, printer = StreamedAnswer(), AnswerPrinter(self._console, thoughts=self._options.thoughts)
        body = {"model": conversation.model, "messages": conversation.messages, **self._options.extra}
        try:
            async with aclosing(self._client.ask(body, answer)) as parts:
                async for part in parts:
                    printer.part(part)
        except (ValueError, asyncio.CancelledError):
            answer.calls.clear()  # their arguments may be incomplete
            if not answer.text:
                conversation.take_back()
            raise
        finally:
            printer.end(answer)
            if answer.text or answer.calls:
                conversation.answer(answer)
                if self._options.kept is not None:
                    try:
                        save(conversation, self._options.kept)
                    except OSError as error:
                        self._options = self._options._replace(kept=None)
                        print(f"penstock chat: not kept for --continue: {visible(str(error))}", file=sys.stderr)
        if answer.finish == "length":
            self._console.print("(cut off: --max-tokens, or the model's context, is used up)", style="dim")
        return answer

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        say, conversation = self._console.print, self._conversation
        match name:
            case "/help":
                say(HELP, highlight=False, markup=False)
            case "/new":
                conversation.clear()
            case "/system":
                conversation.set_system(rest)
            case "/model":
                self._model(rest)
            case "/image":
                self._images.append(image_url(rest))
                say(f"{rest}: goes with the next question", style="dim", highlight=False, markup=False)
            case "/undo":
                if not conversation.take_back():
                    raise ValueError("there is no question to take back")
            case "/retry":
                self._retry()
            case "/save":
                save(conversation, Path(rest or "conversation.json").expanduser())
            case "/load":
                loaded = load(Path(rest).expanduser())
                conversation.messages = loaded.messages
            case _:
                raise ValueError(f"no command {name}; /help lists them")

    def _model(self, name: str) -> None:
        models = self._runner.run(self._client.models())
        if name and name not in models:
            raise ValueError(f"model {name!r} is not served; served: {', '.join(models)}")
        self._conversation.model = name or self._conversation.model
        for each in models if not name else ():
            mark = "*" if each == self._conversation.model else " "
            self._console.print(f"{mark} {visible(each)}", highlight=False, markup=False)

    def _retry(self) -> None:
        messages = self._conversation.messages
        asked = [message for message in messages if message.get("role") == "user"]
        if not asked:
            raise ValueError("there is no question to ask again")
        self._conversation.take_back()
        self._conversation.messages.append(asked[-1])
        self._runner.run(self._answer())


INTERRUPTED = 130
HISTORY_LINES = 1000
INPUT_BYTES = 8 << 20  # of a question from standard input


def run(argv: Sequence[str]) -> int:
    """Answer one question, or hold a conversation; the exit status."""
    parser = Parser(
        prog="penstock chat",
        description="talk to a model in the terminal. With a question, print the answer and exit; without one, start a "
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
        "--thoughts", action="store_true", help="print the thoughts of a reasoning model, which are folded otherwise"
    )
    parser.add_argument("--continue", dest="go_on", action="store_true", help="continue the last conversation")
    if not any(action.dest == "model" for action in parser._actions):
        parser.add_argument("--model", default="", help="a served model; default: the first")


def deployment_url(data_dir: Path) -> str:
    """Where the deployment in a data folder is reached.

    Raises:
        ValueError: none runs there.
    """
    try:
        return read_state(data_dir / "state.json").http_url
    except PermissionError as error:
        raise ValueError(
            f"{error.filename}: permission denied; run as its owner, or name a server with --url"
        ) from error
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
    folder = _state_folder()
    kept = folder / "last-conversation.json" if folder else None
    if args.go_on and kept is None:
        raise ValueError("--continue: no conversation was kept, as this user has no home folder; set HOME")
    conversation = load(kept) if args.go_on and kept else Conversation()
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
                _read_lines_well(folder)
                session.run()
                _keep_lines(folder)
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
            raise ValueError(f"--tools {args.tools} is not a JSON list of tools: {error}") from error
    return extra


def _state_folder() -> Path | None:
    """None: without ``HOME``, for a user id that the system does not know, as containers may have."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "penstock"
    except RuntimeError:
        return None


def _read_lines_well(folder: Path | None) -> None:
    """Line editing, history and completion of commands, where Python has readline."""
    with suppress(ImportError):
        import readline

        with suppress(OSError):
            if folder:
                readline.read_history_file(folder / "chat-history")
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer_delims(" ")
        readline.set_completer(
            lambda text, at: next(iter([each for each in COMMANDS if text and each.startswith(text)][at:]), None)
        )
        readline.parse_and_bind("tab: complete")


def _keep_lines(folder: Path | None) -> None:
    with suppress(ImportError, OSError):
        import readline

        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(folder / "chat-history")
            (folder / "chat-history").chmod(0o600)
