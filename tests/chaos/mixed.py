"""``penstock up`` whose processes come from two builds in turn.

``python -m tests.chaos.mixed up FLAGS`` is the supervisor, of this build. It starts every process through this module
again, which becomes (exec) the process of the build whose turn it is.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from tests.chaos.builds import ROOT, VARIABLE, OtherBuild, source_of


def main(argv: Sequence[str]) -> int:
    role, *flags = argv
    return _supervise(flags) if role == "up" else _become(role, flags)


def _become(role: str, flags: list[str]) -> NoReturn:
    other = msgspec.json.decode(os.environ[VARIABLE], type=OtherBuild)
    name = next((flag.partition("=")[2] for flag in flags if flag.startswith("--name=")), role)
    starts = Path(other.starts)
    earlier = starts.read_text().split().count(name) if starts.exists() else 0
    turn = other.takes_turn(role, name, earlier)
    with starts.open("a") as out:
        out.write(f"{name} {'other' if turn else 'this'}\n")
    environ = other.environ() if turn else source_of(ROOT)
    flags = other.adapted(role, flags) if turn else flags
    module = "tests.chaos.shared" if other.share and role == "router" else "infra.cli"
    os.execve(sys.executable, [sys.executable, "-m", module, role, *flags], environ)


def _supervise(flags: Sequence[str]) -> int:
    from configs.flags import parse
    from configs.up_settings import UpSettings
    from infra.launch.main import run

    settings = parse(UpSettings, flags, prog="penstock up")
    return run(settings, command=lambda planned: [sys.executable, "-m", "tests.chaos.mixed", *planned.argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
