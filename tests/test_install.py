"""Installed in a new environment, beside packages of other people that have the names of our folders.

Run by ``make test-install`` and ``make test-slow``. Dependencies are those of the environment that runs the tests.
"""

import json
import os
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest

from tests.builds import PARTS, ROOT, built, copied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KINDS = ("wheel", "sdist", "editable", "checkout")
START_S = 60.0
# Every process notes where it would find the six names; run by ``site``, before the process's own code.
NOTE = """
import importlib.util, os, sys
if folder := os.environ.get("SEEN"):
    found = {name: importlib.util.find_spec(name) for name in %r}
    with open(os.path.join(folder, str(os.getpid())), "w") as out:
        print(*("" if spec is None else spec.origin for spec in found.values()), sep="\\n", file=out)
"""


class Installed(NamedTuple):
    """``command``: what runs ``penstock`` there; ``theirs``: the folder that holds the other people's packages."""

    kind: str
    python: Path
    command: list[str]
    folder: Path
    theirs: Path

    def environ(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return kept | more

    def run(self, *command: str, **more: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ(**more), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=KINDS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    kind, home = str(request.param), tmp_path_factory.mktemp(str(request.param))
    venv.create(home / "venv", with_pip=False)
    python = home / "venv" / "bin" / "python"
    (packages,) = (home / "venv" / "lib").glob("python*/site-packages")
    for name in PARTS:
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("THEIRS = True\n")
    (packages / "sitecustomize.py").write_text(NOTE % (PARTS,))
    # Plain paths: the .pth files that lie there, of an editable install of ours among them, are not read.
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    source = copied(home / "source")
    if kind == "checkout":
        return Installed(kind, python, [str(python), "-m", "penstock"], source, packages)
    what = {"editable": ["-e", str(source)]}.get(kind) or [str(built(kind, source, home))]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, *what], cwd=home, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    work = home / "work"
    for name in PARTS:  # a folder with such names is no danger either
        (work / name).mkdir(parents=True)
    return Installed(kind, python, [str(python.with_name("penstock"))], work, packages)


def test_both_are_imported_each_by_its_name(installed: Installed) -> None:
    if installed.kind == "checkout":
        pytest.skip("where the source tree is the working directory, its folders come first")
    names = ", ".join(PARTS)
    code = (
        f"import {names}; print(all(each.THEIRS for each in ({names})))\n"
        f"from penstock import {names}, Client; print(any(hasattr(each, 'THEIRS') for each in ({names})))"
    )
    assert installed.run(str(installed.python), "-P", "-c", code).split() == ["True", "False"]


def test_the_plugins_of_engines_load(installed: Installed) -> None:
    if installed.kind == "checkout":
        pytest.skip("entry points are those of an installed package")
    code = (
        "from importlib.metadata import entry_points\n"
        "for group in ('vllm.general_plugins', 'sglang.srt.plugins', 'console_scripts'):\n"
        "    (each,) = entry_points(group=group, name='penstock')\n"
        "    print(each.value, each.load().__module__)"
    )
    for line in installed.run(str(installed.python), "-P", "-c", code).splitlines():
        value, module = line.split()
        assert value.partition(":")[0] == module
        assert module.startswith("penstock.")


def test_the_version_and_completions_are_printed(installed: Installed) -> None:
    assert installed.run(*installed.command, "version").startswith("penstock ")
    # What needs a clone with its tests is not offered where there are none.
    assert "bench http" not in installed.run(*installed.command, "completion", "bash")
    assert "bench http" not in installed.run(*installed.command, "--help")


@pytest.fixture
def deployment(installed: Installed, tmp_path: Path) -> Iterator[dict[str, str]]:
    data, seen = tmp_path / "data", tmp_path / "seen"
    seen.mkdir()
    flags = ["up", "--engine=mock", "--http-port=0", f"--data-dir={data}"]
    environ = installed.environ(SEEN=str(seen), PENSTOCK_DASHBOARD_PORT="0")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*installed.command, *flags], cwd=installed.folder, env=environ, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_S
        while not (data / "state.json").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        state = json.loads((data / "state.json").read_text())
        yield {"url": state["http_url"], "seen": str(seen)}
    finally:
        process.terminate()
        process.wait(60)


def test_a_deployment_answers_and_its_processes_see_the_packages_of_others(
    installed: Installed, deployment: dict[str, str]
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    asked = Request(
        f"{deployment['url']}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(asked, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
    if installed.kind == "checkout":
        return  # nothing else than its root leads to the package
    seen = [path.read_text().splitlines() for path in Path(deployment["seen"]).iterdir()]
    assert len(seen) >= 4  # up, router, worker, gateway
    for places in seen:
        assert places == [str(installed.theirs / name / "__init__.py") for name in PARTS]


def test_a_source_archive_begins_with_the_links_and_runs_as_it_is(tmp_path: Path) -> None:
    done = subprocess.run(["git", "archive", "HEAD", "--output", tmp_path / "source.tar"], cwd=ROOT, check=False)
    if done.returncode:
        pytest.skip("no git here")
    with tarfile.open(tmp_path / "source.tar") as archive:
        links = {each.name: each.linkname for each in archive if each.issym() and each.name.startswith("penstock/")}
        assert links == {f"penstock/{part}": f"../{part}" for part in PARTS}
        archive.extractall(tmp_path / "source", filter="data")
    command = [sys.executable, "-m", "penstock", "--help"]
    run = subprocess.run(command, cwd=tmp_path / "source", capture_output=True, text=True, timeout=60, check=False)
    assert "penstock COMMAND" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "needs Python 3.11 or newer"),
        # As where Debian's python3-venv is missing: without this, the next `make up` would find a Python without pip.
        (
            '[ "$2" = venv ] && mkdir -p "$3/bin" && : > "$3/bin/python" && echo no ensurepip && exit 1; exit 0',
            "no ensurepip",
        ),
    ],
)
def test_make_says_at_once_that_a_python_cannot_be_used(script: str, said: str, tmp_path: Path) -> None:
    python, folder = tmp_path / "python", tmp_path / "venv"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    command = ["make", "up", f"PYTHON={python}", f"VENV={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert said in done.stdout
    assert not (folder / "bin" / "python").exists()
