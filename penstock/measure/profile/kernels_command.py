"""``penstock profile kernels``: the shares of attention and dense layers in a trace of torch's profiler."""

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.configs.flags import Parser
from penstock.measure.profile.kernels import BadTrace, read_trace, shares


def run(argv: Sequence[str]) -> int:
    """Print one line per kind. Returns 1 if the file is no trace."""
    parser = Parser(prog="penstock profile kernels", description="shares of attention and dense layers in a trace")
    parser.add_argument("trace", metavar="FILE", help="Chrome trace of torch's profiler: .json or .json.gz")
    path = Path(parser.parse_args(argv).trace)
    try:
        table = shares(read_trace(path))
    except BadTrace as error:
        print(f"penstock profile kernels: {error}", file=sys.stderr)
        return 1
    for each in table:
        print(f"{each.share:6.1%}  {each.kind:<22} {each.seconds * 1e3:10.2f} ms  {each.calls:>8,} calls")
    return 0
