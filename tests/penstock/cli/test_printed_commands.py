"""Every command line of ours that the documentation prints is one that the command accepts."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.commands import ARGV, COMMANDS, NOTHING, load, split
from penstock.configs import flags

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
OPERATORS = set("|&;<>()")
# Words of the shell after which a command begins.
BEFORE = frozenset({"do", "then", "else", "exec", "sudo", "nohup", "time", "--", "!"})

PLACEHOLDER = re.compile(r"[NX…]|COMMAND")  # of numbers, which would be refused


class Accepted(Exception):
    """A command's own parser took its arguments."""


def lines_of(text: str) -> Iterator[str]:
    """Command lines in the blocks of a page: of shell blocks all, of others those after a prompt."""
    for _, language, body in BLOCK.findall(text):
        if language not in ("sh", "bash", "console", "text", ""):
            continue
        prompted = re.search(r"^\s*\$ ", body, re.MULTILINE) is not None
        if language not in ("sh", "bash") and not prompted:
            continue
        for line in body.replace("\\\n", " ").splitlines():
            if prompted and not line.lstrip().startswith("$ "):
                continue
            yield line.lstrip().removeprefix("$ ")


def commands_of(line: str) -> Iterator[list[str]]:
    """Arguments of each call of ``penstock`` in a command line."""
    lexer = shlex.shlex(re.sub(r"(?<= )2>", ">", line.replace("$(", " ( ")), posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    words, skip = list[str](), False
    found = list[list[str]]()
    for word in lexer:
        if skip:  # the file of a redirection
            skip = False
        elif word and set(word) <= OPERATORS:
            skip = word.strip("&") in ("<", ">", ">>")
            if not skip:
                found.append(words)
                words = []
        else:
            words.append(word)
    for each in (*found, words):
        while each and re.match(r"[A-Za-z_]\w*=", each[0]):  # a variable for this command
            each = each[1:]
        starts = [i for i, word in enumerate(each) if word == "penstock" and (i == 0 or each[i - 1] in BEFORE)]
        if starts:
            yield each[starts[0] + 1 :]


def refusal(words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says against its arguments; "": it takes them. Nothing is run."""
    if not words or words[0] in ("--help", "--version"):
        return ""
    name, arguments = split(words)
    if name is None:
        return f"no command {' '.join(words[:2])!r}"
    if "--help" in arguments or COMMANDS[name].settings == NOTHING:
        return ""
    command = COMMANDS[name]
    parse = flags.Parser.parse_args

    def parse_only(parser: flags.Parser, args: Any = None, namespace: Any = None) -> Any:
        parse(parser, args, namespace)
        raise Accepted

    try:
        if command.settings == ARGV:
            run = load(command.run)
            with monkeypatch.context() as patch:
                patch.setattr(flags.Parser, "parse_args", parse_only)
                run(list(arguments))
            return f"`penstock {name}` does not read its arguments by penstock.configs.flags.Parser"
        kind = load(command.settings if ":" in command.settings else f"penstock.configs.settings:{command.settings}")
        flags.parse(kind, list(arguments), environ={}, prog=f"penstock {name}")
    except Accepted:
        pass
    except SystemExit:
        return capsys.readouterr().err.strip() or "it exits"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_command_lines_of_a_page_are_accepted(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # files that commands name are those of the repository
    wrong = []
    for line in lines_of(page.read_text(encoding="utf-8")):
        if "penstock" not in line:
            continue
        for words in commands_of(line):
            if problem := refusal(words, monkeypatch, capsys):
                wrong.append(f"penstock {' '.join(words)}: {problem}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_with_flags_in_the_text_of_a_page_are_accepted(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    wrong = []
    for span in re.findall(r"`penstock ([^`]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
        words = shlex.split(span)
        if not any(word.startswith("--") for word in words) or any(map(PLACEHOLDER.fullmatch, words)):
            continue
        problem = refusal(words, monkeypatch, capsys)
        if problem and not (words[-1].startswith("--") and f"{words[-1]} needs a value" in problem):  # only named
            wrong.append(f"penstock {span}: {problem}")
    assert wrong == []


def test_command_lines_are_found_and_wrong_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = """
```sh
A=1 penstock keys create --tenant acme > key.txt   # a comment
penstock streams set DONE \\
  --max-bytez 16GiB && penstock up --workerz 3
for n in a b; do penstock nats --print-config --node $n > $n.conf; done
kubectl exec deploy/x -- penstock top --once 2>/dev/null | head -2
pip install penstock
```
```text
$ penstock drainn x
penstock is not a command here
```
"""
    found = [words for line in lines_of(page) for words in commands_of(line)]
    assert [words[:2] for words in found] == [
        ["keys", "create"],
        ["streams", "set"],
        ["up", "--workerz"],
        ["nats", "--print-config"],
        ["top", "--once"],
        ["drainn", "x"],
    ]
    said = [refusal(words, monkeypatch, capsys) for words in found]
    assert "unknown flag --max-bytez" in said[1]
    assert "unknown flag --workerz" in said[2]
    assert "no command 'drainn x'" in said[5]
    assert (said[0], said[4]) == ("", "")
