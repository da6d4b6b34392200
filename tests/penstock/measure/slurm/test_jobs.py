"""Jobs from submission to their end: the real scripts under a stand-in of Slurm, with small processes for ours."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.measure.slurm.slurm_command import run
from penstock.schemas.streams import GIB, limits_bytes, topology
from penstock.schemas.subjects import Subjects
from tests.penstock.measure.sweep.samples import result, write
from tests.standins.slurm import COMMANDS, install
from tests.standins.slurm.commands import OPTIONS, parse

ROOT = Path(__file__).resolve().parents[4]
# Stands for penstock: `layout` is real, servers run until they are told to stop, and the load's results are copied.
STUB = f"""#!/bin/bash
echo "$@" >> $STUB/calls
serve() {{ trap 'echo "$1 stopped" >> $STUB/calls; kill $!; exit '${{2:-0}} TERM; sleep 60 & wait $!; }}
case $1 in
  slurm) exec {sys.executable} -m penstock "$@" ;;
  nats)
    folder=${{2#--data-dir=}}; mkdir -p $folder; at=${{3#--namespace=}}; at=${{at#ps}}
    echo '{{"worker": "w'$at'", "router": "r'$at'", "gateway": "g'$at'", "operator": "o'$at'"}}' > $folder/secrets.json
    echo "nats-server on"; serve nats ;;
  worker) [[ -e $STUB/broken ]] && echo "out of memory" >&2 && exit 3
    serve "worker $PENSTOCK_NATS_URL $CUDA_VISIBLE_DEVICES $PENSTOCK_NAMESPACE" ;;
  health) exit 0 ;;
  bench) if [[ -e $STUB/slow ]]; then serve load 143; fi; for each in "$@"; do
      case $each in --endpoint=*) name=${{each#--endpoint=}}; name=${{name%%=*}} ;; --out=*) out=${{each#--out=}} ;; esac
    done; cp -r $STUB/results/$name/. $out/$name/ ;;
  *) serve "$1 $PENSTOCK_NATS_URL $PENSTOCK_NAMESPACE $PENSTOCK_CELLS $PENSTOCK_CELL_NATS_URLS" ;;
esac
"""  # noqa: E501
SWEEP = """
engine: mock
penstock: {stub}
out: results
load: {{isl: 100, osl: 8, concurrency: [2]}}
slurm: {{tasks-per-node: 2, gres: "gpu", local-folder: {local}, time: "00:01:00", order: {order}}}
points:
  - {{name: whole, workers: 3}}
  - {{name: split, prefill: 1, decode: 2}}
"""


class Cluster:
    """A stand-in of Slurm, and a sweep of two points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stub = folder / "stub"
        self.stub.mkdir()
        (self.stub / "penstock").write_text(STUB)
        (self.stub / "penstock").chmod(0o755)
        (folder / "local").mkdir()
        write(self.stub / "results", result("whole", 2, [100.0]), result("split", 2, [50.0]))

    def write(self, order: str = "jobs") -> None:
        text = SWEEP.format(stub=self.stub / "penstock", local=self.folder / "local", order=order)
        (self.folder / "sweep.yaml").write_text(text)

    def calls(self) -> list[str]:
        path = self.stub / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def left(self) -> list[Path]:
        """Folders that jobs did not delete."""
        return list((self.folder / "local").iterdir())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{install(tmp_path / 'slurm')}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STANDIN", str(tmp_path / "state"))
    monkeypatch.setenv("STUB", str(made.stub))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("POLL_S", "0.05")
    yield made
    jobs = [path.stem for path in (tmp_path / "state").glob("*.job")]
    subprocess.run(["scancel", *jobs], check=False, timeout=30)  # what a failed test has left


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(cluster: Cluster) -> bool:
    return all(path.read_text() not in ("", "PENDING", "RUNNING") for path in (cluster.folder / "state").glob("*.job"))


def test_a_failed_point_is_submitted_again_and_a_complete_one_is_not(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    plotted: list[list[str]] = []
    monkeypatch.setattr("penstock.measure.sweep.plot.run", lambda argv: plotted.append(argv) or 0)
    cluster.write("chain")
    (cluster.stub / "broken").touch()
    (cluster.folder / "local/penstock-1/store").mkdir(parents=True)  # of the same job, before its node failed
    assert run(["submit", "sweep.yaml", "--points", "whole"]) == 0
    until(lambda: ended(cluster))
    assert run(["status", "sweep.yaml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "whole 1 FAILED 0/1" in said
    assert "out of memory" in said
    assert not cluster.left()
    (cluster.stub / "broken").unlink()

    monkeypatch.setenv("OTLP_ENDPOINT", "http://127.0.0.1:4318/v1/traces")
    assert run(["submit", "sweep.yaml"]) == 0
    assert run(["submit", "sweep.yaml"]) == 0  # both are under way
    said = capsys.readouterr().out
    assert "whole: job 2\nsplit: job 3\n" in said
    assert "nothing to submit" in said
    until(lambda: ended(cluster))
    assert run(["collect", "sweep.yaml"]) == 0
    told = json.loads((cluster.folder / "results/plots/pareto.json").read_text())
    assert {(each["name"], each["kind"], each["total_gpus"]) for each in told["records"]} == {
        ("whole", "aggregated", 3),
        ("split", "disaggregated", 3),
    }
    assert plotted[0][:2] == [str(cluster.folder / "results" / name) for name in ("whole", "split")]
    capsys.readouterr()
    assert run(["submit", "sweep.yaml"]) == 0
    assert capsys.readouterr().out == "whole: complete\nsplit: complete\nnothing to submit\n"
    # Each worker has its own GPU of its node, and the user's password only; all were told to stop before their broker.
    calls = cluster.calls()
    stopped = [line.split()[1:3] for line in calls if line.startswith("worker nats://")]
    assert sorted(gpu for _, gpu in stopped[-3:]) == ["0", "0", "1"]
    assert {url.rpartition(":")[0] for url, _ in stopped} == {"nats://worker:w@127.0.0.1"}
    # Only the second submission had the variable that turns traces on.
    assert [line for line in calls if line.startswith("trace --")] == [
        "trace --otlp-endpoint=http://127.0.0.1:4318/v1/traces"
    ] * 2
    assert sum(line.startswith("gateway --") and "--tracing=all" in line for line in calls) == 2
    assert not cluster.left()


def test_a_second_submission_leaves_waiting_jobs_alone_and_a_chain_continues_behind_them(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.write("chain")
    (cluster.stub / "slow").touch()
    assert run(["submit", "sweep.yaml", "--points", "whole"]) == 0
    until(lambda: any("bench sweep" in line for line in cluster.calls()))
    script = cluster.folder / "results/whole/slurm/job.sh"
    assert script.parent.stat().st_mode & 0o777 == 0o700  # variables of the sweep may be secret
    before = script.stat().st_mtime_ns
    capsys.readouterr()
    assert run(["submit", "sweep.yaml", "--dry-run"]) == 0
    split = cluster.folder / "results/split/slurm/job.sh"
    said = f"whole: job 1 is running\nsbatch --parsable --dependency=afterany:1 {split}\n"
    assert capsys.readouterr().out == said
    assert script.stat().st_mtime_ns == before
    assert run(["submit", "sweep.yaml"]) == 0
    assert run(["submit", "sweep.yaml", "--again", "--points", "whole"]) == 0
    assert run(["status", "sweep.yaml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "whole 3 PENDING 0/1 Dependency" in said
    assert "split 2 PENDING 0/1 Dependency" in said
    assert run(["cancel", "sweep.yaml"]) == 0  # the first job of "whole", too
    said = capsys.readouterr().out
    assert sorted(said.splitlines()) == [
        "split: job 2 is cancelled", "whole: job 1 is cancelled", "whole: job 3 is cancelled",
    ]  # fmt: skip
    until(lambda: not cluster.left())


def test_a_cancelled_array_leaves_nothing_running_and_no_folder(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.write("array")
    (cluster.stub / "slow").touch()
    assert run(["submit", "sweep.yaml"]) == 0
    assert "whole: job 1_0\nsplit: job 1_1\n" in capsys.readouterr().out
    until(lambda: sum("bench sweep" in line for line in cluster.calls()) == 2)
    assert run(["cancel", "sweep.yaml", "--points", "split"]) == 0
    assert capsys.readouterr().out == "split: job 1_1 is cancelled\n"
    until(lambda: (cluster.folder / "results/split/slurm/exit-1_1").exists())
    assert (cluster.folder / "results/split/slurm/exit-1_1").read_text() == "143\n"
    assert run(["status", "sweep.yaml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "split 1_1 FAILED 0/1" in said
    assert "cancelled, or out of time" in said
    assert "whole 1_0 RUNNING 0/1" in said
    assert run(["cancel", "sweep.yaml"]) == 0
    until(lambda: not cluster.left())
    # The steps of the first were its own to stop, though the id of the array's last job is that of the whole array.
    assert "has ended" not in (cluster.folder / "results/slurm/job-1_0.out").read_text()


def test_a_job_with_too_few_nodes_says_so_before_it_starts_anything(cluster: Cluster) -> None:
    cluster.write()
    assert run(["submit", "sweep.yaml", "--dry-run", "--test", "--points", "whole"]) == 0
    script = cluster.folder / "results/whole/slurm/job.sh"
    script.write_text(script.read_text().replace("#SBATCH --nodes=2", "#SBATCH --nodes=1"))
    subprocess.run(["sbatch", "--parsable", script], check=True, capture_output=True)
    until(lambda: ended(cluster))
    said = (cluster.folder / "results/whole/slurm/job-1.out").read_text()
    assert "3 x aggregated of 1 need 3 tasks, and the allocation has 2 (node1 with 2)" in said
    assert not any(line.startswith("nats") for line in cluster.calls())
    assert not cluster.left()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_stand_in_takes_only_options_that_slurm_has(command: str) -> None:
    real = json.loads((ROOT / "tests/data/slurm-22.05-options.json").read_text())[command]
    assert OPTIONS[command].keys() <= set(real)
    with pytest.raises(SystemExit, match="unrecognized option '--gpu-bind=x'"):
        parse(command, ["--gpu-bind=x"])


def test_each_cell_has_a_broker_a_router_and_its_part_of_the_workers_and_the_gateway_knows_all(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTLP_ENDPOINT", "http://127.0.0.1:4318/v1/traces")
    cluster.write()
    path = cluster.folder / "sweep.yaml"
    path.write_text(path.read_text().replace("prefill: 1, decode: 2", "prefill: 2, decode: 2, cells: 2"))
    assert run(["submit", "sweep.yaml", "--points", "split"]) == 0
    until(lambda: ended(cluster))
    assert run(["status", "sweep.yaml", "--points", "split"]) == 0
    assert "split 1 COMPLETED 1/1" in " ".join(capsys.readouterr().out.split())
    calls = cluster.calls()
    first = 10_000 + 1 * 100  # of the ports of job 1
    brokers = sorted(line for line in calls if line.startswith("nats --"))
    local = f"{cluster.folder}/local/penstock-1"
    sizes = [float(line.rpartition("=")[2]) for line in brokers]
    assert [line.rpartition(" ")[0] for line in brokers] == [
        f"nats --data-dir={local}/store --namespace=ps --nats-host=0.0.0.0 --nats-port={first}",
        f"nats --data-dir={local}/store-1 --namespace=ps-1 --nats-host=0.0.0.0 --nats-port={first + 3}",
    ]
    assert sizes == [pytest.approx(limits_bytes(topology(Subjects())) / GIB / 2, abs=0.1)] * 2
    home, other = f"127.0.0.1:{first}", f"127.0.0.1:{first + 3}"
    stopped = [line.removesuffix(" stopped").split() for line in calls if line.endswith(" stopped")]
    told = {role: sorted(rest for kind, *rest in stopped if kind == role) for role in ("router", "gateway", "trace")}
    assert told == {
        "router": [[f"nats://router:r-1@{other}", "ps-1"], [f"nats://router:r@{home}", "ps"]],
        "gateway": [[f"nats://gateway:g@{home}", "ps", "2", f"nats://gateway:g-1@{other}"]],
        "trace": [[f"nats://operator:o@{home}", "ps", "2", f"nats://operator:o-1@{other}"]],
    }
    started = [line for line in calls if line.startswith("worker --")]
    of_cells = Counter((url, namespace) for kind, url, *_, namespace in (s for s in stopped if s[0] == "worker"))
    assert of_cells == {(f"nats://worker:w@{home}", "ps"): 2, (f"nats://worker:w-1@{other}", "ps-1"): 2}
    (bench,) = (line.split() for line in calls if line.startswith("bench "))
    ports = [int(word.rpartition(":")[2].partition("/")[0]) for word in bench if word.startswith("--metrics=")]
    assert ports[:2] == [first + 2, first + 4]  # of the routers
    used = [int(word.partition("=")[2]) for line in started for word in line.split() if "--metrics-port=" in word]
    assert sorted(ports[2:]) == sorted(used) == [first + 5 + worker for worker in range(4)]
    assert not cluster.left()


def test_each_node_of_an_engine_gets_its_rank_and_the_address_of_the_first(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("penstock.measure.sweep.plot.run", lambda argv: 0)
    text = SWEEP.format(stub=cluster.stub / "penstock", local=cluster.folder / "local", order="jobs")
    text = text.replace("engine: mock", "engine: vllm\nmodel: some/model").partition("points:")[0]
    (cluster.folder / "sweep.yaml").write_text(f"{text}points:\n  - {{name: whole, workers: 1, tp: 4}}\n")
    assert run(["submit", "sweep.yaml"]) == 0
    until(lambda: ended(cluster))
    started = sorted(line for line in cluster.calls() if line.startswith("worker --"))
    assert [line.rpartition(" ")[2] for line in started] == ["--node-rank=0", "--node-rank=1"]
    assert all(" --nodes=2 --leader-address=node1 --leader-port=" in line for line in started)
    assert len([line for line in cluster.calls() if line.startswith("worker nats://")]) == 2  # both were told to stop
    assert not cluster.left()
