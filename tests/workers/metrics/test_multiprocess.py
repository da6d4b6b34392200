"""Metrics of several processes: merged while they run, read over HTTP, and no dead worker's among them."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from penstock.workers.metrics.multiprocess import LAUNCHED, VARIABLE, RankMetricsSettings, own_directory, served
from tests.pipeline.support import MODEL, Process, free_port, samples

WRITES = """
import sys
from prometheus_client import Counter, Gauge, Histogram
amount = int(sys.argv[1])
Counter("engine_steps", "steps").inc(amount)
Counter("trtllm_own", "shown by its adapter").inc(amount)
Gauge("engine_depth", "queue", multiprocess_mode="livesum").set(amount)
Histogram("engine_seconds", "time", buckets=(1, 10)).observe(amount)
print("there", flush=True)
sys.stdin.read()
"""


class Writer:
    """A process of an engine."""

    def __init__(self, directory: Path, amount: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITES, str(amount)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {VARIABLE: str(directory)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"there\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def scrape(port: int) -> dict[str, float]:
    answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=10)
    assert answer.status_code == 200
    return samples(answer.text)


def own(base: Path) -> Path:
    [found] = base.glob("worker-*")
    return found


def test_a_worker_shows_the_sums_of_its_processes_and_none_of_a_dead_workers(
    broker: EmbeddedNats, pipeline: Subjects, tmp_path: Path
) -> None:
    port, base = free_port(), tmp_path / "metrics"
    dead = base / "worker-4194304-left"  # above the highest process id
    dead.mkdir(parents=True)
    old = Writer(dead, 1000)
    old.kill()
    writers: list[Writer] = []
    process = Process(
        tmp_path / "worker.log",
        *("worker", "--engine", "mock", "--model", str(MODEL), "--metrics-port", str(port), "--mock-speedup", "0"),
        *("--namespace", pipeline.namespace, "--log-format", "json"),
        nats_url=broker.url("operator"),
        **{VARIABLE: str(base)},
    )
    try:
        process.wait_for("worker_registered")
        assert not dead.exists()
        directory = own(base)
        writers = [Writer(directory, amount) for amount in (2, 5)]
        found = scrape(port)
        assert found["engine_steps_total"] == 7
        assert found["engine_depth"] == 7
        assert (found["engine_seconds_count"], found["engine_seconds_sum"]) == (2, 7)
        assert found['engine_seconds_bucket{le="10.0"}'] == 2
        assert "trtllm_own_total" not in found
        assert found["penstock_worker_model_load_seconds"] > 0
        ours = [name for name in found if name.startswith("penstock_worker_running")]
        assert ours == ["penstock_worker_running"]
        writers[0].kill()
        found = scrape(port)
        assert (found["engine_steps_total"], found["engine_depth"]) == (7, 5)
    finally:
        for writer in writers:
            writer.kill()
        assert process.stop() == 0
    assert not directory.exists()


def test_the_ranks_of_another_machine_have_a_page_of_their_own(tmp_path: Path) -> None:
    """Of two processes of an engine on two machines, one directory each, only the first one is a worker's."""
    directory = tmp_path / "ranks"
    directory.mkdir()
    (directory / "gauge_livesum_4194304.db").touch()  # above the highest process id: of an engine that has ended
    settings = RankMetricsSettings(metrics_port=free_port())
    with served(settings, {VARIABLE: str(directory)}):
        assert list(directory.iterdir()) == []
        writers = [Writer(directory, amount) for amount in (3, 4)]
        try:
            found = scrape(settings.metrics_port)
            assert (found["engine_steps_total"], found["engine_depth"]) == (7, 7)
            assert "trtllm_own_total" not in found
        finally:
            for writer in writers:
                writer.kill()
    assert not directory.exists()
    with pytest.raises(httpx.ConnectError):
        scrape(settings.metrics_port)


def test_without_the_variable_nothing_is_made() -> None:
    environ: dict[str, str] = {}
    with own_directory(environ) as found:
        assert found is None
    assert environ == {}


def test_every_worker_has_a_directory_of_its_own(tmp_path: Path) -> None:
    environ = {VARIABLE: str(tmp_path)}
    run_worker, other = tmp_path / f"worker-{os.getpid()}-x", tmp_path / "notes"
    run_worker.mkdir()
    other.mkdir()
    with own_directory(environ) as found:
        assert found is not None
        assert environ[VARIABLE] == str(found)
        assert found.parent == tmp_path
        with own_directory({VARIABLE: str(tmp_path)}) as second:
            assert second not in (found, None)
    assert environ == {VARIABLE: str(tmp_path)}
    assert sorted(tmp_path.iterdir()) == [other, run_worker]


def test_under_tensorrt_llms_launcher_the_directory_is_the_ranks_and_only_the_dead_leave_it(tmp_path: Path) -> None:
    environ = {VARIABLE: str(tmp_path / "new"), LAUNCHED: "1"}
    for name in ("counter_7.db", "gauge_livesum_8.db", "histogram_8.db", "notes.txt"):
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new" / name).touch()
    with own_directory(environ, alive=lambda pid: pid == 7) as found:
        assert found == tmp_path / "new"
        assert sorted(path.name for path in found.iterdir()) == ["counter_7.db", "notes.txt"]
    assert found.exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=VARIABLE), own_directory({VARIABLE: str(tmp_path / "file" / "x")}):
        pass
