"""``penstock completion``: what a shell offers, in the shell itself."""

import shutil
import subprocess

import pytest

from infra.cli import COMMANDS, main
from infra.completion import SHELLS, completed


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
        (["up", "--engine", ""], {"auto", "native", "mock", "trtllm", "vllm"}),
        (["up", "--engine", "=", "m"], {"mock"}),
        (["up", "--engine", "="], {"auto", "native", "mock", "trtllm", "vllm"}),
        (["bench", "http", "--url", "x", "--conc"], {"--concurrency"}),
        (["worker", "--model", ""], set()),  # a file: left to the shell
        (["explain", ""], set()),
    ],
)
def test_bash_offers_commands_flags_and_values(
    words: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered(script("bash", capsys), *words) == expected


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
