"""``penstock profile sla``: what it prints and writes."""

from pathlib import Path

import pytest
import yaml

from infra.bench.profile.data import save
from infra.bench.profile.sla_command import Settings, run
from tests.infra.bench.profile.test_choice import engine


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, ...]:
    save(tmp_path / "tp1", engine(1, 100.0, 30.0, 0.2))
    save(tmp_path / "tp2", engine(2, 60.0, 12.0, 0.05, up="--tensor-parallel-size 2"))
    return str(tmp_path / "tp1"), str(tmp_path / "tp2")


def test_the_suggestion_is_printed_and_written(
    data: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Settings(data=data, rate=10.0, out=str(tmp_path / "s.yaml"))) == 0
    said = capsys.readouterr().out
    assert "penstock up --prefill 3 --decode 3 --tensor-parallel-size 2" in said
    assert "left out: tp1 (TTFT 400.0 ms)" in said
    written = yaml.safe_load((tmp_path / "s.yaml").read_text())
    assert written["prefill"]["configuration"] == written["decode"]["configuration"] == "tp2"
    assert (written["prefill"]["workers"], written["prefill"]["gpus"]) == (3, 6)
    assert written["commands"] == ["penstock up --prefill 3 --decode 3 --tensor-parallel-size 2"]


def test_an_sla_that_nothing_meets_says_which_part(data: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Settings(data=data, ttft=10.0)) == 1
    assert "no configuration meets the SLA for prefill\n" in capsys.readouterr().err


def test_folders_that_cannot_be_used_are_named(data: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Settings(data=("nowhere",))) == 1
    assert run(Settings(data=(data[0], data[0]))) == 1
    said = capsys.readouterr().err
    assert "`penstock profile endpoint --out nowhere` makes one" in said
    assert "two folders are named tp1" in said
