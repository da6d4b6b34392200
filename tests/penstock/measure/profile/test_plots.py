"""Plots of a profile: one for each part that was measured."""

from pathlib import Path

import msgspec
import pytest

from penstock.measure.profile.data import Decode, Profile
from tests.penstock.measure.profile.test_data import SETUP
from tests.penstock.planner.engines import engine

pytest.importorskip("matplotlib")


def test_each_part_that_was_measured_has_its_plot(tmp_path: Path) -> None:
    from penstock.measure.profile.profile_endpoint_command import draw

    both = engine().profile
    assert [path.name for path in draw(both, tmp_path)] == ["prefill.png", "decode.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("prefill.png", "decode.png"))
    alone = msgspec.structs.replace(both, decode=Decode())
    assert [path.name for path in draw(alone, tmp_path)] == ["prefill.png"]
    assert draw(Profile(setup=SETUP, url=""), tmp_path) == []
