"""Wheels and source distributions of this source tree, for tests."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("configs", "gateway", "infra", "router", "schemas", "workers")
PACKED = ("pyproject.toml", "README.md", "LICENSE", "penstock", *PARTS)


def copied(folder: Path, *without: str) -> Path:
    """What a build needs, links as links: a build leaves files behind, and the source tree is not for them.

    Args:
        without: patterns of names of files that are left out.
    """
    folder.mkdir(parents=True)
    for name in PACKED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", *without)
            )
        else:
            shutil.copy(source, folder)
    return folder


def built(kind: str, source: Path, folder: Path) -> Path:
    """The "wheel" or "sdist" of a copy, made by the setuptools of this environment."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)],
        cwd=source, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    (made,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made
