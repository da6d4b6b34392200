"""``penstock slurm layout``: within a job, on which nodes and GPUs its workers run."""

import sys
from collections.abc import Sequence
from os import environ
from pathlib import Path

import msgspec

from penstock.configs.flags import Parser
from penstock.measure.slurm.placement import BadAllocation, nodes_of, place
from penstock.measure.slurm.script import JobPoint, instances


def run(argv: Sequence[str]) -> int:
    """Print the lines of shell that start the workers. Returns 1 if they do not fit the allocation."""
    parser = Parser(prog="penstock slurm layout", description="within a job: on which nodes and GPUs its workers run")
    parser.add_argument("point", metavar="point.json", help="what `penstock slurm submit` has written")
    parser.add_argument("--nodes", default="", metavar="A[1-3]", help="default: SLURM_JOB_NODELIST")
    parser.add_argument("--tasks", default="", metavar="4(x3)", help="of each node; default: SLURM_TASKS_PER_NODE")
    parser.add_argument("--first-port", type=int, default=9100, metavar="PORT", help="of the workers' metrics")
    parser.add_argument("--devices", action="store_true", help="set CUDA_VISIBLE_DEVICES")
    args = parser.parse_args(argv)
    try:
        point = msgspec.json.decode(Path(args.point).read_bytes(), type=JobPoint)
        names = args.nodes or environ.get("SLURM_JOB_NODELIST", "")
        placed = place(point.groups, nodes_of(names, args.tasks or environ.get("SLURM_TASKS_PER_NODE", "")))
    except BadAllocation as error:
        print(f"penstock slurm layout: {error}", file=sys.stderr)
        return 1
    except msgspec.DecodeError as error:
        print(f"penstock slurm layout: {args.point}: {error}", file=sys.stderr)
        return 1
    print(instances(placed, point, args.first_port, devices=args.devices), end="")
    return 0
