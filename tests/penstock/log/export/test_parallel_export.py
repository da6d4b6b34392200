"""An export by several processes has the same lines as one by a single process."""

import gzip
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.infra.broker.server import EmbeddedNats
from penstock.log.export import export, parallel_export
from penstock.schemas.subjects import Subjects
from tests.conftest import outside
from tests.infra.bus.support import opened
from tests.penstock.log.export.test_export import recorded


@pytest.fixture
def folder(make_broker: Callable[..., EmbeddedNats]) -> Path:
    server = make_broker()

    async def fill() -> None:
        await server.start()
        async with opened(server, Subjects("ps")) as bus:
            await recorded(bus, 20)
        await server.stop()

    outside(fill())
    return server.data_dir


def lines(path: Path) -> list[bytes]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.splitlines()[1:]


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_several_processes_write_the_lines_of_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--all", "--data-dir", str(folder)]
    assert export.run([*flags, "-o", str(tmp_path / "one.jsonl")]) == 0
    monkeypatch.setattr(export, "processes_for", lambda log, streams: 2)
    assert export.run([*flags, "-o", str(tmp_path / name)]) == 0
    one, several = capsys.readouterr().err.splitlines()
    assert one.partition(" in ")[0] == several.partition(" in ")[0] == "20 requests, 80 messages"
    assert lines(tmp_path / name) == lines(tmp_path / "one.jsonl")
    assert not list(tmp_path.glob(".*.part"))


def test_the_export_fails_if_one_of_its_processes_is_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "processes_for", lambda log, streams: 2)
    wait = parallel_export.wait

    def kill_one(connections: list[object]) -> list[object]:
        for process in parallel_export.multiprocessing.active_children()[:1]:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        return wait(connections)  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(parallel_export, "wait", kill_one)
    assert export.run(["--all", "--data-dir", str(folder), "-o", str(tmp_path / "all.jsonl")]) == 1
    assert "a process of the export ended" in capsys.readouterr().err
    assert not [path.name for path in tmp_path.iterdir() if "jsonl" in path.name]
