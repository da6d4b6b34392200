"""``penstock bench convert``: converts results of aiperf or guidellm into our format."""

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.configs.flags import Parser
from penstock.measure.sweep import results
from penstock.measure.sweep.endpoints import BadEndpoint, name_of
from penstock.measure.sweep.peers import NotConvertible, aiperf, as_runs, guidellm
from penstock.measure.sweep.report import print_report

_TOOLS = {"aiperf": aiperf, "guidellm": guidellm}


def run(argv: Sequence[str]) -> int:
    """Write the results. Returns 1 if a file cannot be read."""
    parser = Parser(
        prog="penstock bench convert",
        description="take over what aiperf or guidellm has measured, for `penstock bench plot` and `compare`",
    )
    parser.add_argument("tool", choices=sorted(_TOOLS), help="which tool's results")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="--artifact-dir of aiperf, or JSON file of guidellm")
    parser.add_argument("--name", default="", help="of the endpoint; default: the tool's")
    parser.add_argument("--out", metavar="FOLDER", default="bench-results", help="(default: bench-results)")
    parser.add_argument("--gpus", metavar="N", type=int, default=0, help="that the endpoint uses (default: unknown)")
    args = parser.parse_args(argv)
    try:
        name = name_of(f"{args.name or args.tool}=file", "--name")
        converted = [each for path in args.paths for each in _TOOLS[args.tool](Path(path), name, args.gpus)]
    except (NotConvertible, BadEndpoint) as error:
        print(f"penstock bench convert: {error}", file=sys.stderr)
        return 1
    out = Path(args.out)
    for result, records in as_runs(converted):
        folder = results.level_folder(out, name, result.level)
        for number, each in enumerate(records, 1):
            results.save_records(folder, number, each)
        results.save(folder, result)
    print_report(results.read_series([out / name]))
    return 0
