"""``penstock slurm``: measure the deployments of a sweep file as jobs of a Slurm cluster."""

import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

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
from penstock.measure.slurm.placement import BadAllocation, Worker, load_of, node_count, workers_of
from penstock.measure.slurm.script import FOLDER
from penstock.measure.slurm.sweep_file import BadSweep, SweepFile, SweepPoint, deployment_of, parse, select
from penstock.measure.sweep import plot
from penstock.measure.sweep.results import BadResults, load
from penstock.measure.sweep.sweep_command import SweepSettings
from penstock.measure.sweep.workload import LoadLevel, levels_of

TIMEOUT_S = 60.0
# States of jobs that Slurm still has.
QUEUED = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
)  # fmt: skip
_JOBS = "jobs"  # ids of a point's jobs, the last one at the end
_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
_REASON = re.compile(r"\d\d:\d\d:\d\d (?!stopping|done, status)")
_LAST_LINES = 3


class SlurmFailed(Exception):
    """A command of Slurm failed; the text has its last line."""


class PointState(NamedTuple):
    """How far a point is.

    Attributes:
        job: "": none was submitted.
        state: of the queue or the accounting, else by the job's own exit status; "": not submitted.
        reason: why it waits or failed.
    """

    point: str
    job: str
    state: str
    reason: str
    levels: int
    levels_done: int

    @property
    def complete(self) -> bool:
        return self.levels_done >= self.levels

    @property
    def running(self) -> bool:
        """Whether Slurm still has it."""
        return self.state in QUEUED


def sbatch(script: Path, *, after: str = "", test_only: bool = False) -> str:
    """Submit a script; the id of its job.

    Args:
        after: id of a job that must have ended.
        test_only: Slurm only says whether and when it would run.

    Raises:
        SlurmFailed: it is refused, or there is no sbatch.
    """
    output = _run(argv_of_sbatch(script, after=after, test_only=test_only))
    return "" if test_only else output.strip().partition(";")[0]


def argv_of_sbatch(script: Path, *, after: str = "", test_only: bool = False) -> list[str]:
    argv = ["sbatch", "--parsable"]
    argv += [f"--dependency=afterany:{after}"] if after else []
    argv += ["--test-only"] if test_only else []
    return [*argv, str(script)]


def scancel(ids: Sequence[str]) -> None:
    """
    Raises:
        SlurmFailed: Slurm refuses.
    """
    if ids:
        _run(["scancel", *ids])


def remember(own: Path, job: str) -> None:
    """Note that this job measures the point."""
    own.mkdir(parents=True, exist_ok=True)
    with (own / _JOBS).open("a", encoding="utf-8") as file:
        file.write(f"{job}\n")


def jobs_of(own: Path) -> list[str]:
    """The point's jobs, the last one at the end."""
    try:
        lines = (own / _JOBS).read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [line for line in lines if _ID.fullmatch(line)]


def states(
    out: Path, points: Sequence[SweepPoint], levels: Mapping[str, Sequence[LoadLevel]], repeat: int
) -> list[PointState]:
    """How far each point is.

    Raises:
        SlurmFailed: squeue does not answer.
        BadResults: a result is damaged.
    """
    jobs = {point.name: (jobs_of(out / point.name / FOLDER) or [""])[-1] for point in points}
    queued = queue([job for job in jobs.values() if job])
    found = []
    for point in points:
        job = jobs[point.name]
        state, reason = queued.get(job) or _ended(out / point.name / FOLDER, job) if job else ("", "")
        done = [load(out / point.name / level.folder) for level in levels[point.name]]
        complete = sum(result is not None and len(result.complete) >= repeat for result in done)
        found.append(PointState(point.name, job, state, reason, len(levels[point.name]), complete))
    return found


def queue(ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """State and reason of those of these jobs that Slurm still has.

    Raises:
        SlurmFailed: squeue does not answer.
    """
    if not ids:
        return {}
    jobs = ",".join(sorted({each.partition("_")[0] for each in ids}))
    try:
        output = _run(["squeue", "--array", "--noheader", "--format=%i|%T|%r", f"--jobs={jobs}"])
    except SlurmFailed as error:
        if "Invalid job id" not in str(error):  # it has forgotten them all
            raise
        return {}
    rows = (line.strip().split("|", 2) for line in output.splitlines() if line.count("|") >= 2)
    return {job: (state, "" if reason == "None" else reason) for job, state, reason in rows}


def _ended(own: Path, job: str) -> tuple[str, str]:
    """State and reason of a job that Slurm has no more: by its accounting, else by what the job left behind."""
    try:
        output = _run(["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={job}"])
    except SlurmFailed:
        output = ""  # no accounting here
    for line in output.splitlines():
        found, _, state = line.partition("|")
        if found == job and state:
            return state.split()[0], _why(own, job)
    try:
        status = int((own / f"exit-{job}").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "LOST", f"the job left no status; see {own}"
    return ("COMPLETED", "") if status == 0 else ("FAILED", _why(own, job) or f"status {status}")


def _why(own: Path, job: str) -> str:
    """The line of the job's output that says why it stopped."""
    for path in (own / f"job-{job}.out", own.parent.parent / FOLDER / f"job-{job}.out"):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        reasons = [line[9:] for line in lines if _REASON.match(line)]  # ours; srun and the engines write there, too
        return reasons[-1] if reasons else ""
    return ""


def _run(argv: Sequence[str]) -> str:
    try:
        run = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise SlurmFailed(f"{argv[0]} is not on the PATH: run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmFailed(f"{argv[0]} did not answer within {TIMEOUT_S:.0f} s") from None
    if run.returncode:
        output = run.stderr.strip().splitlines()[-_LAST_LINES:]
        raise SlurmFailed(f"{argv[0]}: {' '.join(output) or f'status {run.returncode}'}")
    return run.stdout


_STYLES = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "dim", "FAILED": "red", "LOST": "red", "TIMEOUT": "red"}
_REFUSED = (BadSweep, BadAllocation, BadResults, SlurmFailed, OSError, UnicodeDecodeError)


def run(argv: Sequence[str]) -> int:
    """Run a sub-command. Returns 1 if something is refused or a point has failed."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except _REFUSED as error:
        print(f"penstock slurm {args.command}: {_described(error)}", file=sys.stderr)
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


def _described(error: Exception) -> str:
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
