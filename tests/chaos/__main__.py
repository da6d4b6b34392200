"""``python -m tests.chaos``: run it, print the table; the exit status is 0 if every promise was kept."""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from penstock.configs.logs import setup
from tests.chaos import builds, recipes
from tests.chaos.plan import Act
from tests.chaos.run import Options, run
from tests.chaos.topology import TOPOLOGIES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to disturb (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of disturbances, questions and clients (default: 1)")
    parser.add_argument("--topology", choices=sorted(TOPOLOGIES), default="aggregated")
    parser.add_argument("--clients", type=int, default=12, help="questions asked at once (default: 12)")
    parser.add_argument("--every-s", type=float, default=3.0, help="seconds between disturbances (default: 3)")
    parser.add_argument("--kinds", default="", help=f"kinds of clients, of {','.join(recipes.KINDS)} (default: all)")
    parser.add_argument(
        "--clock-s", type=float, metavar="SECONDS", help="clocks are up to so far apart (default: the topology's)"
    )
    parser.add_argument("--acts", default="", help=f"what may happen, of {','.join(Act)} (default: all)")
    parser.add_argument("--other-build", metavar="DIR_OR_REV", help="take every other start of a process from there")
    parser.add_argument("--other-roles", default=",".join(builds.ROLES), help="for these roles (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="write the result there as well")
    parser.add_argument("--home", type=Path, help="folder for data and logs, which is kept")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    home.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    setup("text", "error", name="chaos")  # the runner's own connection breaks as everybody's does

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f}  {line}", file=sys.stderr, flush=True)

    kinds = tuple(filter(None, args.kinds.split(",")))
    if unknown := {*kinds} - {*recipes.KINDS}:
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}")
    roles = filter(None, args.other_roles.split(","))
    try:
        acts = tuple(map(Act, filter(None, args.acts.split(",")))) or tuple(Act)
        other = builds.prepare(args.other_build, home, roles) if args.other_build else None
    except ValueError as error:
        parser.error(str(error))
    options = Options(
        args.minutes * 60,
        args.seed,
        args.topology,
        args.clients,
        args.every_s,
        kinds,
        other=other,
        clock_s=args.clock_s,
        acts=acts,
    )
    report = asyncio.run(run(home, options, say))
    mixed = f", mixed with {args.other_build}" if other is not None else ""
    head = f"seed {args.seed}, {args.topology}, {args.minutes:g} minutes, {args.clients} clients{mixed}"
    verdict = "every promise was kept" if report.clean else f"{len(report.judgement.problems)} broken; data in {home}"
    text = f"{head}\n\n{report.text}\n\n{verdict}\n"
    print(text)
    if args.report:
        args.report.write_text(text)
    if report.clean and not args.home:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
