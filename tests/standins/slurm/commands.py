"""The commands of the stand-in; started without packages, so it imports the standard library only."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("SLURM_STANDIN", "/nonexistent"))
NODES = os.environ.get("SLURM_STANDIN_NODES", "node[1-2]")
VALUE, FLAG = True, False
OPTIONS = {
    "sbatch": {
        **dict.fromkeys(("job-name", "partition", "account", "nodes", "ntasks-per-node", "gres", "time"), VALUE),
        **dict.fromkeys(("signal", "array", "output", "dependency"), VALUE),
        **dict.fromkeys(("exclusive", "parsable", "test-only"), FLAG),
    },
    "srun": {
        **dict.fromkeys(("input", "cpu-bind", "kill-on-bad-exit", "nodes", "ntasks", "nodelist", "output"), VALUE),
        **dict.fromkeys(("gres", "ntasks-per-node", "mpi"), VALUE),
        "overlap": FLAG,
    },
    "squeue": {**dict.fromkeys(("format", "jobs"), VALUE), **dict.fromkeys(("array", "noheader"), FLAG)},
    "sacct": {
        **dict.fromkeys(("format", "jobs"), VALUE),
        **dict.fromkeys(("noheader", "parsable2", "allocations"), FLAG),
    },
    "scancel": {"signal": VALUE},
}  # fmt: skip


def main(command: str, words: list[str]) -> int:
    if command == "_job":
        return job(*words)
    options, rest = parse(command, words)
    return {"sbatch": sbatch, "srun": srun, "squeue": squeue, "sacct": sacct, "scancel": scancel}[command](
        options, rest
    )


def parse(command: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options as --NAME=VALUE or --NAME, up to the first other word."""
    options: dict[str, str] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            return options, words[number:]
        name, equals, value = word[2:].partition("=")
        if name not in OPTIONS[command] or bool(equals) != OPTIONS[command][name]:
            sys.exit(f"{command}: unrecognized option '{word}'")
        options[name] = value
    return options, []


def sbatch(options: dict[str, str], rest: list[str]) -> int:
    script = Path(rest[0])
    lines = script.read_text().splitlines()
    if not lines[0].startswith("#!"):
        sys.exit("sbatch: error: This does not look like a batch script.")
    asked = [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line[8:])]
    options = parse("sbatch", asked)[0] | options
    if int(options.get("nodes", 1)) > len(hosts()):
        sys.exit("sbatch: error: Batch job submission failed: Node count specification invalid")
    if "test-only" in options:
        return 0
    STATE.mkdir(exist_ok=True)
    number = len(list(STATE.glob("*.job"))) + 1
    first, last = (options.get("array", "0-0").partition("%")[0]).split("-")
    for index in range(int(first), int(last) + 1):
        own = f"{number}_{index}" if "array" in options else str(number)
        (STATE / f"{own}.job").write_text("PENDING")
        output = options["output"].replace("%j", own).replace("%A_%a", own).replace("%%", "%")
        after = options.get("dependency", "").removeprefix("afterany:")
        words = [own, str(script), output, options.get("nodes", "1"), options.get("ntasks-per-node", "1"), after]
        words.append(str(number if index == int(last) else number * 100 + index))  # the last one has the array's
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, "_job", *words],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    print(number)
    return 0


def job(own: str, script: str, output: str, nodes: str, tasks: str, after: str, job_id: str) -> int:
    """Run a job to its end; its state is in a file."""
    state = STATE / f"{own}.job"
    while after and state_of(after) in ("PENDING", "RUNNING"):
        time.sleep(0.05)
    if state.read_text() == "CANCELLED":
        return 0
    chosen = hosts()[: int(nodes)]
    number, _, index = own.partition("_")
    environ = os.environ | {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": ",".join(chosen),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})" if int(nodes) > 1 else tasks,
        "SLURMD_NODENAME": chosen[0],
        "SLURM_STANDIN_JOB": own,
    }
    if index:
        environ |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
    with open(output, "w") as out:
        batch = subprocess.Popen(["bash", script], env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    (STATE / f"{own}.batch").write_text(str(batch.pid))
    state.write_text("RUNNING")
    status = batch.wait()
    if state.read_text() == "RUNNING":
        state.write_text("FAILED" if status else "COMPLETED")
    return 0


def srun(options: dict[str, str], rest: list[str]) -> int:
    """Run a command on every task; all nodes are this machine. SIGTERM ends tasks as Slurm does, without grace."""
    count = int(options["ntasks"])
    named = options["nodelist"].split(",")
    if set(named) - set(os.environ["SLURM_JOB_NODELIST"].split(",")):
        sys.exit("srun: error: Unable to create step: Requested nodes are not in the job")
    # Names of nodes are this machine's.
    words = [re.sub(r"(@|//)node\d+:", r"\g<1>127.0.0.1:", word) for word in rest]
    urls = {
        name: re.sub(r"@node\d+:", "@127.0.0.1:", os.environ[name])
        for name in ("PENSTOCK_NATS_URL", "PENSTOCK_CELL_NATS_URLS")
        if name in os.environ
    }
    out = open(options["output"], "w") if "output" in options else None  # noqa: SIM115 - it is the tasks'
    environ = os.environ | {"SLURM_NTASKS": str(count)} | urls
    tasks = [
        subprocess.Popen(
            words,
            env=environ | {"SLURM_PROCID": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        for rank in range(count)
    ]  # fmt: skip
    own = os.environ["SLURM_STANDIN_JOB"]
    steps = STATE / f"{own}.{os.getpid()}.step"
    steps.write_text(" ".join(str(task.pid) for task in tasks))

    def end(*_: object) -> None:
        for task in tasks:
            task.kill()

    signal.signal(signal.SIGTERM, end)
    statuses = [task.wait() for task in tasks]
    steps.unlink()
    return max((128 - status if status < 0 else status) for status in statuses)


def squeue(options: dict[str, str], rest: list[str]) -> int:
    asked = options["jobs"].split(",")
    for path in sorted(STATE.glob("*.job")):
        state = path.read_text()
        if path.stem.partition("_")[0] in asked and state in ("PENDING", "RUNNING"):
            print(f"{path.stem}|{state}|{'Dependency' if state == 'PENDING' else 'None'}")
    return 0


def sacct(options: dict[str, str], rest: list[str]) -> int:
    if "SLURM_STANDIN_ACCOUNTING" not in os.environ:
        sys.exit("Slurm accounting storage is disabled")
    print(f"{options['jobs']}|{state_of(options['jobs'])}")
    return 0


def scancel(options: dict[str, str], rest: list[str]) -> int:
    sign = signal.Signals[f"SIG{options.get('signal', 'TERM')}"]
    for asked in rest:
        for path in STATE.glob("*.job"):
            number, _, index = path.stem.partition("_")
            if asked not in (path.stem, number, str(int(number) * 100 + int(index)) if index else number):
                continue
            for step in STATE.glob(f"{path.stem}.*.step"):
                for pid in text_of(step).split():
                    kill(int(pid), sign)
            if "signal" not in options:
                path.write_text("CANCELLED")
                if (batch := STATE / f"{path.stem}.batch").exists():
                    kill(int(batch.read_text()), sign)
    return 0


def kill(pid: int, sign: signal.Signals) -> None:
    try:
        os.kill(pid, sign)
    except ProcessLookupError:
        pass


def hosts() -> list[str]:
    first, last = NODES.removeprefix("node[").removesuffix("]").split("-")
    return [f"node{number}" for number in range(int(first), int(last) + 1)]


def state_of(own: str) -> str:
    return text_of(STATE / f"{own}.job")


def text_of(file: Path) -> str:
    """Empty if the file is gone: steps end at any time."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
