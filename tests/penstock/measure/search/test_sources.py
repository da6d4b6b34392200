"""Configurations by source, and why others are left out."""

from pathlib import Path

import msgspec
import pytest

from penstock.launch.recipes.catalogue import known_shape
from penstock.measure.profile.data import BadProfile, Decode, Prefill, save
from penstock.measure.search.candidates import Sla, measured, mock, roofline
from tests.penstock.planner.engines import engine

SLA = Sla(ttft_ms=500.0, itl_ms=25.0, isl=2000, osl=200)


def test_nothing_beyond_the_measured_points_is_guessed(tmp_path: Path) -> None:
    profile = engine().profile
    save(tmp_path / "a", profile)
    save(tmp_path / "b", msgspec.structs.replace(profile, prefill=Prefill()))
    save(tmp_path / "c", msgspec.structs.replace(profile, decode=Decode()))
    folders = [str(tmp_path / name) for name in "abc"]
    found = measured(folders, SLA)
    assert [each.name for each in found.configurations] == ["a"]
    assert found.left_out == {"b": "prefill was not measured", "c": "decode was not measured"}
    assert found.configurations[0].timing.most(2200) == 48  # the highest level, although 181 fit into the KV cache
    far = measured(folders[:1], Sla(ttft_ms=500, itl_ms=25, isl=9000, osl=200))
    assert "from 100 to 8000 tokens were measured, not 9000" in far.left_out["a"]
    tight = engine(kv_tokens=2100).profile
    save(tmp_path / "d", tight)
    assert "do not fit into the KV cache of 2100" in measured([str(tmp_path / "d")], SLA).left_out["d"]


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    save(tmp_path / "a", engine().profile)
    with pytest.raises(BadProfile, match="`penstock profile endpoint --out nowhere` makes one"):
        measured(["nowhere"], SLA)
    with pytest.raises(BadProfile, match="two folders are named a"):
        measured([str(tmp_path / "a")] * 2, SLA)


def test_mock_workers_have_their_flags() -> None:
    found = mock((1.0, 4.0), SLA)
    assert found.up == {"mock x1": "--engine mock", "mock x4": "--engine mock --mock-speedup 4"}
    slow, fast = (each.timing.prefill_ms(2000) for each in found.configurations)
    assert slow == pytest.approx(4 * fast, rel=1e-3)


def test_mappings_without_room_or_speed_are_left_out_with_a_reason() -> None:
    shape = known_shape("deepseek-ai/DeepSeek-R1")
    assert shape is not None
    found = roofline(shape, "H200", Sla(ttft_ms=1500, itl_ms=50, isl=4000, osl=500), most_gpus=8, stages=1)
    assert {each.name for each in found.configurations} == {"tep8", "dep8"}
    assert "do not fit" in found.left_out["tp1"]
    assert all(each.handoff_ms > 0 for each in found.configurations)
    long = roofline(shape, "H200", Sla(ttft_ms=1, itl_ms=1, isl=200_000, osl=1), most_gpus=8, stages=1)
    assert "the model takes" in long.left_out["all"]
