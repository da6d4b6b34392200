"""``penstock up`` whose processes start as a run wants them: another build's, on a shifted clock, over a link of ours.

``python -m tests.chaos.launch up FLAGS`` is the supervisor, of this build. It starts every process through this module
again, which becomes (exec) the process itself.
"""

import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from tests.chaos.builds import ROOT, VARIABLE, OtherBuild, module_of, source_of

CLOCKS = ROOT / "tests" / "chaos" / "clocks"
CLOCK = "CHAOS_CLOCK_S"
URLS = ("PENSTOCK_NATS_URL", "PENSTOCK_CELL_NATS_URLS", "PENSTOCK_SYS_NATS_URL")


class Starts(msgspec.Struct, frozen=True):
    """How processes start.

    Attributes:
        log: a file with one line per start: the process's name, "this" or "other", and its clock's shift in seconds.
        clock_s: clocks are up to so many seconds apart, each start's anew.
        links: by process name, and by the port of a broker: the port of its link there.
    """

    log: str
    seed: int = 1
    other: OtherBuild | None = None
    clock_s: float = 0.0
    links: dict[str, dict[str, int]] = {}

    def shift_s(self, name: str, earlier: int) -> float:
        """Of the clock of this process, at its next start: the first or the last that it may have, or one between."""
        rng = random.Random(f"clock-{self.seed}-{name}-{earlier}")
        return round(self.clock_s * rng.choice((-0.5, 0.5, rng.uniform(-0.5, 0.5))), 3)


def linked(environ: Mapping[str, str], ports: Mapping[str, int]) -> dict[str, str]:
    """The environment of a process that reaches brokers over other ports than their own."""
    found = dict(environ)
    for name in URLS:
        if url := found.get(name):
            found[name] = re.sub(r":(\d+)(?=[,;]|$)", lambda at: f":{ports.get(at[1], at[1])}", url)
    return found


def main(argv: Sequence[str]) -> int:
    role, *flags = argv
    return _supervise(flags) if role == "up" else _become(role, flags)


def _become(role: str, flags: list[str]) -> NoReturn:
    starts = msgspec.json.decode(os.environ[VARIABLE], type=Starts)
    name = next((flag.partition("=")[2] for flag in flags if flag.startswith("--name=")), role)
    log, other = Path(starts.log), starts.other
    lines = log.read_text().splitlines() if log.exists() else []
    earlier = sum(line.split()[0] == name for line in lines)
    turn = other is not None and other.takes_turn(role, name, earlier)
    shift_s = starts.shift_s(name, earlier)
    with log.open("a") as out:
        out.write(f"{name} {'other' if turn else 'this'} {shift_s:g}\n")
    environ, root = source_of(ROOT), ROOT
    if turn and other is not None:
        environ, root, flags = other.environ(), Path(other.root), other.adapted(role, flags)
    if ports := starts.links.get(name):
        environ = linked(environ, ports)
    if shift_s:
        environ |= {"PYTHONPATH": f"{CLOCKS}{os.pathsep}{environ['PYTHONPATH']}", CLOCK: f"{shift_s:g}"}
    os.execve(sys.executable, [sys.executable, "-m", module_of(root), role, *flags], environ)


def _supervise(flags: Sequence[str]) -> int:
    from penstock.configs.flags import parse
    from penstock.configs.up_settings import UpSettings
    from penstock.launch.up import run

    settings = parse(UpSettings, flags, prog="penstock up")
    return run(settings, command=lambda planned: [sys.executable, "-m", "tests.chaos.launch", *planned.argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
