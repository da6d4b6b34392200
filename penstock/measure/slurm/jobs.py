"""The jobs of a sweep: submitted, watched and cancelled by Slurm's commands, and noted beside their results."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.measure.slurm.script import FOLDER
from penstock.measure.slurm.sweep_file import SweepPoint
from penstock.measure.sweep.results import load
from penstock.measure.sweep.workload import LoadLevel

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
    said = _run(argv_of_sbatch(script, after=after, test_only=test_only))
    return "" if test_only else said.strip().partition(";")[0]


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
        said = _run(["squeue", "--array", "--noheader", "--format=%i|%T|%r", f"--jobs={jobs}"])
    except SlurmFailed as error:
        if "Invalid job id" not in str(error):  # it has forgotten them all
            raise
        return {}
    rows = (line.strip().split("|", 2) for line in said.splitlines() if line.count("|") >= 2)
    return {job: (state, "" if reason == "None" else reason) for job, state, reason in rows}


def _ended(own: Path, job: str) -> tuple[str, str]:
    """State and reason of a job that Slurm has no more: by its accounting, else by what the job left behind."""
    try:
        said = _run(["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={job}"])
    except SlurmFailed:
        said = ""  # no accounting here
    for line in said.splitlines():
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
        said = run.stderr.strip().splitlines()[-_LAST_LINES:]
        raise SlurmFailed(f"{argv[0]}: {' '.join(said) or f'status {run.returncode}'}")
    return run.stdout
