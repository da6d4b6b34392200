"""Processes of two builds side by side: where the other build is, and what its processes are started with."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "CHAOS_STARTS"
ROLES = ("gateway", "router", "worker")
START_S = 60.0
STOP_S = 30.0


class OtherBuild(msgspec.Struct, frozen=True):
    """A second build, which runs on the dependencies of this one.

    Attributes:
        root: its source tree.
        flags: what each role that it takes part in understands.
        nats: its gateways serve NATS clients as those of this build do: numbered answers, which can be read again.
    """

    root: str
    flags: dict[str, tuple[str, ...]]
    nats: bool = True

    def takes_turn(self, role: str, name: str, earlier: int) -> bool:
        """Whether the next start of this process runs the other build. Neighbours begin with different builds."""
        number = re.search(r"\d*$", name)
        return role in self.flags and (int(number[0] or 0 if number else 0) + earlier) % 2 == 1

    def adapted(self, role: str, argv: Sequence[str]) -> list[str]:
        """Flags of this build, without those the other one does not have."""
        known, found = self.flags[role], []
        for word in argv:
            flag, equals, value = word.partition("=")
            if flag in known or flag.replace("--no-", "--", 1) in known:
                found.append(flag + equals + value)
        return found

    def environ(self) -> dict[str, str]:
        """Of a process of that build."""
        return source_of(Path(self.root))


def module_of(root: Path) -> str:
    """What ``python -m`` runs as the ``penstock`` of a source tree: older ones have no package of this name."""
    return "penstock" if (root / "penstock" / "__main__.py").exists() else "infra.cli"


def source_of(root: Path) -> dict[str, str]:
    """The environment in which ``python -m`` with ``module_of(root)`` is the ``penstock`` below ``root``."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", VARIABLE)}
    return kept | {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}


def prepare(source: str, home: Path, roles: Iterable[str] = ROLES) -> OtherBuild:
    """The build in a folder or of a git revision, which is unpacked below ``home``.

    Raises:
        ValueError: there is no such folder or revision, or it has no ``penstock``.
    """
    root = Path(source).resolve() if Path(source).is_dir() else _unpacked(source, home / "other-build")
    flags = {role: _flags(root, role) for role in roles}
    numbered = "HEADER_SEQ" in (root / "schemas" / "subjects.py").read_text()
    return OtherBuild(str(root), flags, numbered)


def snapshot(name: str, home: Path) -> Path:
    """A bundled model as a folder of Hugging Face's cache, whose revision is its name in every build.

    Of other folders the revision is a digest, of other things in other builds: their workers would stand by.
    """
    folder = home / f"models--penstock--{name}" / "snapshots" / "chaos"
    from tests.demo_model.shared_weights import join  # late: it imports torch

    join(ROOT / "configs" / "models" / name, folder)  # older builds read no weights of another directory
    return folder


def begin(other: OtherBuild, data_dir: Path) -> None:
    """Let the other build make the data folder and the streams, as they are when an upgrade begins.

    Raises:
        ValueError: its broker does not start.
    """
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    log = data_dir.parent / "other-nats.log"
    command = [sys.executable, "-m", module_of(Path(other.root)), "nats", f"--data-dir={data_dir}", "--nats-port=0"]
    with log.open("wb") as errors:
        broker = subprocess.Popen(command, env=other.environ(), stdout=subprocess.PIPE, stderr=errors)
    assert broker.stdout is not None
    try:
        if b"nats-server" not in broker.stdout.readline():  # it is said once the streams are there
            raise ValueError(f"the other build's broker does not start: {log.read_text(errors='replace')}")
    finally:
        broker.terminate()
        broker.wait(STOP_S)
        broker.stdout.close()


def counted(starts: Path) -> Counter[tuple[str, str]]:
    """How many processes of each role's name ("gateway", "decode") were started, by build, of the log of starts."""
    lines = starts.read_text().splitlines() if starts.exists() else []
    return Counter((line.split()[0].rpartition("-")[0], line.split()[1]) for line in lines)


def _unpacked(revision: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], capture_output=True)
    if archive.returncode:
        raise ValueError(f"{revision!r} is neither a folder nor a git revision: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def _flags(root: Path, role: str) -> tuple[str, ...]:
    """What a role's ``--help`` lists."""
    command = [sys.executable, "-m", module_of(root), role, "--help"]
    shown = subprocess.run(command, env=source_of(root), capture_output=True, text=True, timeout=START_S)
    if shown.returncode:
        raise ValueError(f"{root}: `penstock {role} --help` fails: {shown.stderr.strip()}")
    return tuple(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", shown.stdout)))
