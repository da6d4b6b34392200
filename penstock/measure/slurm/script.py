"""The text of job scripts (what they ask Slurm for, the settings of their point, ``job.sh``; pure), and ``penstock
slurm layout``: within a job, on which nodes and GPUs its workers run.
"""

import math
import re
import shlex
from collections.abc import Sequence
from os import environ
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.cli.terminal import fail
from penstock.configs.flags import Parser
from penstock.launch.plan import cell_of
from penstock.measure.slurm.placement import BadAllocation, Instance, SlurmGroup, nodes_of, place
from penstock.measure.slurm.sweep_file import Container, SlurmKey, SweepFile, SweepPoint, argv_of
from penstock.schemas.streams import GIB, divided, limits_bytes, topology
from penstock.schemas.subjects import Subjects

BODY = Path(__file__).parent / "job.sh"
NUMA = Path(__file__).parent / "numa.sh"
FOLDER = "slurm"  # in the point's own, beside its levels
JOINED = frozenset(["--engine=vllm"])  # of workers whose nodes find each other, without a launcher
BEFORE_END_S = 120  # of the time limit, for stopping in order
_PLAIN = re.compile(r"[\w./:=%+,@-]+", re.ASCII)


class JobPoint(Struct, frozen=True):
    """``point.json``: what a job must know to place its workers.

    Attributes:
        argv: of `penstock`, for each role.
        cells: over which the workers of each role are dealt.
    """

    name: str
    penstock: str
    groups: tuple[SlurmGroup, ...]
    argv: dict[str, tuple[str, ...]]
    cells: int = 1


def job(sweep: SweepFile, point: SweepPoint, nodes: int, load: Sequence[str], out: Path, body: str) -> str:
    """The script of one point."""
    own = out / point.name / FOLDER
    container = sweep.container
    served = {"model": sweep.model, "served-model-name": sweep.served_model_name}
    values = {
        "POINT": point.name,
        "OWN": str(own),
        "OUT": str(out),
        "PENSTOCK": sweep.penstock,
        "GPUS": str(point.gpus),
        "CELLS": str(point.cells),
        "STORE_GIB": _store_gib(point.cells),
        "LOCAL_FOLDER": sweep.slurm.local_folder,
        "GRES": _gres(sweep.slurm),
        "BIND": sweep.slurm.bind,
        "READY_S": f"{sweep.slurm.ready_s:g}",
        "RUNTIME": container.runtime if container else "none",
        "IMAGE": container.image if container else "",
        "MOUNTS": _mounts(container, out, sweep.slurm.local_folder) if container else "",
    }
    arrays = {
        "ROUTER": argv_of(sweep.router),
        "GATEWAY": argv_of({key: value for key, value in served.items() if value}),
        "LOAD": list(load),
    }
    environment = dict(sweep.environment)
    lines = [
        *directives(sweep.slurm, point.name, nodes, own),
        "# Made by `penstock slurm submit`; edits are lost.",
        *([sweep.slurm.setup.strip()] if sweep.slurm.setup.strip() else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
        *(f"{name}=({' '.join(map(shlex.quote, words))})" for name, words in arrays.items()),
        f"OTLP_ENDPOINT=${{OTLP_ENDPOINT:-{shlex.quote(sweep.otlp_endpoint)}}}",
        "",
        body,
    ]
    return "\n".join(lines)


def directives(cluster: SlurmKey, name: str, nodes: int, own: Path, *, array: str = "") -> list[str]:
    """The lines at the top of a script that say what it needs."""
    options = {
        "job-name": f"{cluster.job_name}-{name}",
        "partition": cluster.partition,
        "account": cluster.account,
        "nodes": str(nodes),
        "ntasks-per-node": str(cluster.tasks_per_node),
        "gres": _gres(cluster),
        "time": cluster.time,
        "signal": f"B:TERM@{BEFORE_END_S}",
        "array": array,
        "output": str(own).replace("%", "%%") + ("/job-%A_%a.out" if array else "/job-%j.out"),
    }
    lines = [f"#SBATCH --{key}={_quoted(value)}" for key, value in options.items() if value]
    lines += ["#SBATCH --exclusive"] if cluster.exclusive else []
    return ["#!/usr/bin/env bash", *lines, *(f"#SBATCH {each}" for each in cluster.options)]


def _quoted(value: str) -> str:
    """As sbatch reads it: a backslash escapes within quotes of both kinds."""
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def array(cluster: SlurmKey, name: str, nodes: int, scripts: Sequence[Path], folder: Path) -> str:
    """A script that runs several others, one for each index of an array of jobs."""
    at_once = f"%{cluster.at_once}" if cluster.at_once else ""
    lines = directives(cluster, name, nodes, folder, array=f"0-{len(scripts) - 1}{at_once}")
    points = " ".join(shlex.quote(str(path)) for path in scripts)
    return "\n".join([*lines, f"POINTS=({points})", 'exec bash "${POINTS[$SLURM_ARRAY_TASK_ID]}"', ""])


def instances(placed: Sequence[Instance], point: JobPoint, first_port: int, *, devices: bool) -> str:
    """``instances.sh``: a call of ``instance`` for each worker, and where their metrics are.

    Args:
        first_port: of the workers' metrics; each has its own.
        devices: whether each gets a list of its GPUs.
    """
    lines = [f"WORKERS={len(placed)}"]
    metrics = []
    meeting = first_port + len(placed)  # of the nodes of an engine; it has them alone
    for number, each in enumerate(placed):
        port = first_port + number
        shown = ",".join(map(str, each.devices)) if devices else ""
        nodes, argv = ",".join(each.nodes), point.argv[each.role]
        cell = cell_of(each.name, point.cells)
        own = [f"--name={each.name}", "--metrics-host=0.0.0.0", f"--metrics-port={port}"]
        launched = len(each.nodes) > 1 and JOINED.isdisjoint(argv)
        # An engine on one node starts its own ranks, as a process on each of several nodes does.
        tasks = each.size if launched else len(each.nodes)
        if tasks > 1 and not launched:
            own += [f"--nodes={tasks}", f"--leader-address={each.nodes[0]}", f"--leader-port={meeting}"]
        words = ["instance", each.name, str(cell), nodes, str(len(each.nodes)), str(tasks), shown, point.penstock]
        lines.append(" ".join(map(shlex.quote, [*words, *argv, *own])))
        if launched:  # otherwise each node's process has a page of its own
            lines += [f"ranks {each.name} {shlex.quote(node)} {port}" for node in each.nodes[1:]]
        metrics += [shlex.quote(f"--metrics={point.name}=http://{node}:{port}/metrics") for node in each.nodes]
    return "\n".join([*lines, f"METRICS=({' '.join(metrics)})", ""])


def _gres(cluster: SlurmKey) -> str:
    return f"{cluster.gres}:{cluster.tasks_per_node}" if cluster.gres else ""


def _store_gib(cells: int) -> str:
    """What the streams of a cell may take, so that those of all cells take together as much as those of one.

    0: a cell alone has the streams' own sizes.
    """
    size = limits_bytes(divided(topology(Subjects()), cells)) / GIB
    return f"{math.ceil(size * 100) / 100:.2f}" if cells > 1 else "0"


def _mounts(container: Container, out: Path, local: str) -> str:
    return ",".join(dict.fromkeys([*container.mounts, f"{out}:{out}", f"{local}:{local}"]))


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
        return fail("slurm layout", error)
    except msgspec.DecodeError as error:
        return fail("slurm layout", f"{args.point}: {error}")
    print(instances(placed, point, args.first_port, devices=args.devices), end="")
    return 0
