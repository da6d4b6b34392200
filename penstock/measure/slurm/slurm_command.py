"""``penstock slurm``: measure the deployments of a sweep file as jobs of a Slurm cluster."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from penstock.cli.terminal import reason, stdout
from penstock.configs.flags import Parser, read
from penstock.infra.engine_args.tree import Tree, parse_yaml
from penstock.launch.recipes.catalogue import shape_at
from penstock.measure.pareto import pareto_command as pareto
from penstock.measure.pareto import records
from penstock.measure.slurm import script
from penstock.measure.slurm.engines import Worker, load_of, workers_of
from penstock.measure.slurm.jobs import (
    QUEUED,
    PointState,
    SlurmFailed,
    argv_of_sbatch,
    jobs_of,
    queue,
    remember,
    sbatch,
    scancel,
    states,
)
from penstock.measure.slurm.placement import BadAllocation, node_count
from penstock.measure.slurm.script import FOLDER
from penstock.measure.slurm.sweep_file import BadSweep, SweepFile, SweepPoint, deployment_of, parse, select
from penstock.measure.sweep import plot
from penstock.measure.sweep.results import BadResults
from penstock.measure.sweep.sweep_command import SweepSettings
from penstock.measure.sweep.workload import LoadLevel, levels_of

_STYLES = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "dim", "FAILED": "red", "LOST": "red", "TIMEOUT": "red"}
_REFUSED = (BadSweep, BadAllocation, BadResults, SlurmFailed, OSError, UnicodeDecodeError)


def run(argv: Sequence[str]) -> int:
    """Run a sub-command. Returns 1 if something is refused or a point has failed."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except _REFUSED as error:
        print(f"penstock slurm {args.command}: {_told(error)}", file=sys.stderr)
        return 1


def _submit(args: Namespace) -> int:
    sweep = _read(args.sweep)
    out = Path(sweep.out).resolve()
    found = {state.point: state for state in _states(sweep, out, sweep.points)}
    points = _wanted(_chosen(sweep, out, args), found, again=args.again)
    made = {point.name: write(sweep, point, out) for point in points}  # a job that waits reads its own files
    for workers, _ in made.values():
        for warning in (warning for each in workers for warning in each.warnings):
            print(warning, file=sys.stderr)
    nodes = {name: count for name, (_, count) in made.items()}
    scripts = _scripts(sweep, points, nodes, out)
    running = [state.job for state in found.values() if state.running]
    before = max(running, key=_number) if running and sweep.slurm.order == "chain" else ""
    if args.dry_run:
        for path, _ in scripts:
            print(f"{shlex.join(argv_of_sbatch(path, after=before))}{_tested(path) if args.test else ''}")
            before = "JOB" if sweep.slurm.order == "chain" else ""
    else:
        _send(sweep, scripts, out, before)
    if not scripts:
        print("nothing to submit")
    return 0


def _wanted(points: Sequence[SweepPoint], found: Mapping[str, PointState], *, again: bool) -> list[SweepPoint]:
    """Those to submit. Of the others it is said why they are not."""
    wanted = []
    for point in points:
        state = found[point.name]
        if again or not (state.complete or state.running):
            wanted.append(point)
        else:
            print(f"{point.name}: {'complete' if state.complete else f'job {state.job} is {state.state.lower()}'}")
    return wanted


def _number(job: str) -> int:
    return int(job.partition("_")[0])


def _tested(path: Path) -> str:
    sbatch(path, test_only=True)
    return "  # Slurm would accept it"


def _scripts(
    sweep: SweepFile, points: Sequence[SweepPoint], nodes: dict[str, int], out: Path
) -> list[tuple[Path, list[SweepPoint]]]:
    """What is submitted, and the points each of them measures."""
    if sweep.slurm.order != "array":
        return [(out / point.name / FOLDER / "job.sh", [point]) for point in points]
    alike = groupby(sorted(points, key=lambda point: nodes[point.name]), key=lambda point: nodes[point.name])
    scripts = []
    for count, of_size in alike:
        together = list(of_size)
        folder = out / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"array-{count}.sh"
        jobs = [out / point.name / FOLDER / "job.sh" for point in together]
        path.write_text(script.array(sweep.slurm, f"{count}-nodes", count, jobs, folder), encoding="utf-8")
        scripts.append((path, together))
    return scripts


def _send(sweep: SweepFile, scripts: Sequence[tuple[Path, list[SweepPoint]]], out: Path, before: str) -> None:
    """
    Args:
        before: job of the sweep that the first of a chain waits for; "": none.
    """
    for path, points in scripts:
        job = sbatch(path, after=before)
        before = job if sweep.slurm.order == "chain" else ""
        for index, point in enumerate(points):
            own = f"{job}_{index}" if sweep.slurm.order == "array" else job
            remember(out / point.name / FOLDER, own)
            print(f"{point.name}: job {own}")


def write(sweep: SweepFile, point: SweepPoint, out: Path) -> tuple[list[Worker], int]:
    """Write what the job of a point needs; its workers, and how many nodes they take.

    Raises:
        BadSweep, BadAllocation: the point cannot be measured.
    """
    own = out / point.name / FOLDER
    workers = workers_of(sweep, point, _tree, shape_at, str(own / "{role}.yaml"))
    groups = tuple(each.group for each in workers)
    nodes = node_count(groups, sweep.slurm.tasks_per_node)
    load = load_of(sweep, point)
    own.mkdir(parents=True, exist_ok=True)
    own.chmod(0o700)  # variables and flags may be secret
    for each in workers:
        if each.arguments:
            (own / f"{each.group.role}.yaml").write_text(each.arguments, encoding="utf-8")
    argv = {each.group.role: each.argv for each in workers}
    described = script.JobPoint(point.name, sweep.penstock, groups, argv, point.cells)
    (own / "point.json").write_bytes(msgspec.json.encode(described))
    document = msgspec.json.format(msgspec.json.encode(deployment_of(sweep, point)), indent=2) + b"\n"
    (out / point.name / records.FILE).write_bytes(document)
    numa = own / "numa.sh"
    numa.write_bytes(script.NUMA.read_bytes())
    numa.chmod(0o755)
    body = script.BODY.read_text(encoding="utf-8")
    (own / "job.sh").write_text(script.job(sweep, point, nodes, load, out, body), encoding="utf-8")
    return workers, nodes


def _status(args: Namespace) -> int:
    sweep = _read(args.sweep)
    out = Path(sweep.out).resolve()
    found = _states(sweep, out, _chosen(sweep, out, args))
    table = Table(box=SIMPLE_HEAD)
    for heading in ("point", "job", "state", "levels", "reason"):
        table.add_column(heading, justify="right" if heading == "levels" else "left", overflow="fold")
    for each in found:
        state = f"[{_STYLES.get(each.state, 'yellow')}]{each.state or 'not submitted'}"
        table.add_row(each.point, each.job, state, f"{each.levels_done}/{each.levels}", each.reason)
    stdout().print(table)
    return 0


def _collect(args: Namespace) -> int:
    sweep = _read(args.sweep)
    out = Path(sweep.out).resolve()
    found = _states(sweep, out, _chosen(sweep, out, args))
    folders = [str(out / each.point) for each in found if each.levels_done]
    for each in found:
        if not each.complete:
            progress = f"{each.levels_done} of {each.levels} levels; {each.state.lower() or 'not submitted'}"
            print(f"{each.point}: {progress}{f': {each.reason}' if each.reason else ''}", file=sys.stderr)
    if not folders:
        raise BadSweep(f"{out}: no point has results yet; see `penstock slurm status {args.sweep}`")
    target = str(out / "plots")
    failed = plot.run([*folders, "--out", target, "--title", sweep.slurm.job_name])
    prices = ["--prices", args.prices] if args.prices else []
    failed |= pareto.run([*folders, "--out", target, *prices])
    return failed or int(not all(each.complete for each in found))


def _cancel(args: Namespace) -> int:
    sweep = _read(args.sweep)
    out = Path(sweep.out).resolve()
    points = _chosen(sweep, out, args)
    jobs = {job: point.name for point in points for job in jobs_of(out / point.name / FOLDER)}
    running = [job for job, (state, _) in queue(list(jobs)).items() if job in jobs and state in QUEUED]
    scancel(running)
    print("\n".join(f"{jobs[job]}: job {job} is cancelled" for job in running) or "no job is running or waiting")
    return 0


def _chosen(sweep: SweepFile, out: Path, args: Namespace) -> list[SweepPoint]:
    words = [word for each in args.points for word in each.split(",") if word]
    best: list[str] = []
    if "pareto" in words:
        path = out / "plots" / "pareto.json"
        try:
            page = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            raise BadSweep(f"--points pareto: {path} cannot be read; run `penstock slurm collect` first") from None
        best = [each["name"] for each in page["records"] if each["on_front"]]
    return select(sweep.points, words, best, args.mtp)


def _states(sweep: SweepFile, out: Path, points: Sequence[SweepPoint]) -> list[PointState]:
    loads = {point.name: read(SweepSettings, load_of(sweep, point)) for point in points}
    levels: dict[str, list[LoadLevel]] = {name: levels_of(load) for name, load in loads.items()}
    return states(out, points, levels, max((load.repeat for load in loads.values()), default=1))


def _read(path: str) -> SweepFile:
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except BadSweep as error:
        raise BadSweep(f"{path}: {error}") from None


def _tree(path: str) -> Tree:
    return parse_yaml(Path(path).read_text(encoding="utf-8"))


def _told(error: Exception) -> str:
    name = getattr(error, "filename", None)
    return f"{name}: {reason(error)}" if name else reason(error)


def _parser() -> Parser:
    parser = Parser(prog="penstock slurm", description="measure deployments on a Slurm cluster, each as a job")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function, about in (
        ("submit", _submit, "write the jobs' scripts, and submit those of points that are not complete"),
        ("status", _status, "show the job and the finished levels of each point"),
        ("collect", _collect, "plot what is finished: by load, per GPU, and by cost"),
        ("cancel", _cancel, "cancel the jobs of the sweep"),
    ):
        one = commands.add_parser(name, help=about, description=about)
        one.set_defaults(run=function)
        one.add_argument("sweep", metavar="SWEEP.yaml", help="the sweep file")
        one.add_argument(
            "--points",
            metavar="A,B",
            action="append",
            default=[],
            help="names with * and ?, or all, aggregated, disaggregated, tp, tep, dep, 8gpu, pareto (default: all)",
        )
        one.add_argument("--mtp", choices=("any", "on", "off"), default="any", help="points with or without MTP")
        _add_flags(name, one)
    return parser


def _add_flags(name: str, parser: ArgumentParser) -> None:
    if name == "submit":
        parser.add_argument("--dry-run", action="store_true", help="write the scripts, print what would be submitted")
        parser.add_argument("--test", action="store_true", help="with --dry-run: ask Slurm about them")
        parser.add_argument("--again", action="store_true", help="submit points that are complete or running, too")
    if name == "collect":
        parser.add_argument("--prices", default="", metavar="FILE", help="YAML file with prices, for the cost curve")
