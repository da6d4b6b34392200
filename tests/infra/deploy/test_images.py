"""The container images: what they copy, and what they leave to an engine's own image."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_containerfile_copies_every_package_and_keeps_an_engine_s_own_torch() -> None:
    text = (ROOT / "infra" / "Containerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]} - {
        "penstock"
    }  # gateway/client
    for package in packages:
        assert f"COPY {package} {package}" in text
    ignored = (ROOT / "infra" / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{package}" for package in packages} <= set(ignored)
    code = re.search(r'python -c "(.*?)" >', text, re.DOTALL)
    assert code is not None
    run = subprocess.run(
        [sys.executable, "-c", code[1].replace("\\\n", "")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    needed = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in run.stdout.splitlines()}
    assert {"msgspec", "nats-py", "faststream"} <= needed
    assert needed.isdisjoint({"torch", "transformers"})
    pinned = re.search(r"nixl-cu12==([\d.]+)", " ".join(project["project"]["optional-dependencies"]["trtllm"]))
    assert pinned is not None
    assert f"ARG NIXL={pinned[1]}\n" in text
