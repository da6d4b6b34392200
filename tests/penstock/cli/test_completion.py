"""``penstock completion``: what a shell offers, in the shell itself."""

import os
import pty
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.cli.commands import COMMANDS, main
from penstock.cli.completion import SHELLS, completed


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def offered(text: str, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("penstock", *words))
    code = f'{text}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _penstock; printf "%s\\n" "${{COMPREPLY[@]}}"'
    run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ga"], {"gateway"}),
        (["recipe", ""], {"list", "show", "check", "generate", "matrix"}),
        (["up", "--http-p"], {"--http-port"}),
        (["up", "--rec"], {"--recipe", "--record"}),
        (["up", "--no-rec"], {"--no-record"}),
        (["up", "--engine", ""], {"auto", "native", "mock", "trtllm", "vllm", "sglang", "openai"}),
        (["up", "--engine", "=", "m"], {"mock"}),
        (["up", "--engine", "="], {"auto", "native", "mock", "trtllm", "vllm", "sglang", "openai"}),
        (["bench", "http", "--url", "x", "--conc"], {"--concurrency"}),
        (["worker", "--model", ""], set()),  # a file: left to the shell
        (["inspect", ""], set()),
        (["completion", ""], {"bash", "fish", "zsh"}),
        (["tenants", "r"], {"rotate", "remove", "restore"}),
        (["tenants", "add", ""], set()),
    ],
)
def test_bash_offers_commands_flags_and_values(
    words: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered(script("bash", capsys), *words) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_printed_where_the_package_is_installed_without_its_tests(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.commands.CLONE", tmp_path)
    text = script(shell, capsys)
    assert "sweep" in text
    assert "eval" not in text


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ga", {"gateway"}),
        ("recipe ", {"list", "show", "check", "generate", "matrix"}),
        ("up --http-p", {"--http-port"}),
        ("up --no-rec", {"--no-record"}),
        ("up --engine ", {"auto", "native", "mock", "trtllm", "vllm", "sglang", "openai"}),
        ("up --engine=m", {"--engine=mock"}),
        ("bench http --conc", {"--concurrency"}),
        ("completion ", {"bash", "fish", "zsh"}),
        ("tenants r", {"rotate", "remove", "restore"}),
        ("worker --model ", set()),
    ],
)
def test_fish_offers_commands_flags_and_values(
    line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "penstock.fish").write_text(script("fish", capsys))
    (tmp_path / "empty").mkdir()  # where no file is offered
    code = f"source ../penstock.fish; complete -C 'penstock {line}'"
    environ = os.environ | {"HOME": str(tmp_path)}
    command = ["fish", "--no-config", "-c", code]
    run = subprocess.run(command, cwd=tmp_path / "empty", env=environ, capture_output=True, text=True, check=True)
    assert {offer.partition("\t")[0] for offer in run.stdout.splitlines()} == expected
    assert run.stderr == ""


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_completes_commands_flags_and_values_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "penstock.zsh").write_text(script("zsh", capsys))
    typed = {
        "ga": "gateway ",
        "recipe mat": "recipe matrix ",
        "streams a": "streams apply ",
        "up --http-p": "up --http-port=",
        "up --no-rec": "up --no-record ",
        "up --engine mo": "up --engine mock ",
        "up --engine=mo": "up --engine=mock ",
        "up --engine mock --work": "up --engine mock --workers=",
        "bench http --conc": "bench http --concurrency=",
        "completion z": "completion zsh ",
        "plan sim": "plan simulate ",
        "plan --kubernetes-u": "plan --kubernetes-url=",
        "tenants ro": "tenants rotate ",
        "worker --model penstock.": "worker --model penstock.zsh ",
    }
    assert on_zsh(tmp_path, [f"penstock {line}" for line in typed]) == [f"penstock {line}" for line in typed.values()]


def on_zsh(home: Path, lines: list[str]) -> list[str]:
    """What becomes of each line when Tab is pressed behind it, in an interactive zsh."""
    seen = home / "seen"
    seen.touch()
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(home)
        os.execvpe("zsh", ["zsh", "-f", "-i"], os.environ | {"TERM": "dumb", "HOME": str(home)})
    try:
        setup = (
            "autoload -U compinit; compinit -u -D; source penstock.zsh; bindkey '^U' kill-whole-line; "
            f"note() {{ print -r -- \"$BUFFER\" >> {seen} }}; zle -N note; bindkey '^P' note; PS1=rea''dy\n"
        )
        os.write(terminal, setup.encode())
        said = b""
        while b"ready" not in said:  # the prompt: from now on, keys go to its line editor
            said += os.read(terminal, 4096)
        for number, line in enumerate(lines):  # Tab, note it, clear it
            os.write(terminal, line.encode() + b"\t\x10\x15")
            while len(seen.read_text().splitlines()) <= number:  # the time limit of the test ends it
                if select.select([terminal], [], [], 0.02)[0]:
                    os.read(terminal, 4096)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return seen.read_text().splitlines()


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_every_command_and_flag_is_in_each_script_and_the_shell_can_read_it(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for command in completed():
        for word in command.words:
            assert word in text
        for flag in command.flags:
            assert flag.name[2:] in text
    if shutil.which(shell):
        run = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (0, "")


def test_each_command_is_completed_and_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {" ".join(command.words) for command in completed()} == COMMANDS.keys()
    with pytest.raises(SystemExit) as ended:
        main(["completion", "csh"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
