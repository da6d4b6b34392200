"""``penstock replay``: what it says before it sends, and when it is interrupted."""

from typing import NoReturn

import msgspec
import pytest

from penstock.log_tools.export.recording import RecordedRun, Recording
from penstock.log_tools.replay import replay
from penstock.schemas.done import Done
from tests.schemas.samples import REQUEST


async def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupted_replay_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "_replay", interrupted)
    assert replay.run(["--all"]) == 130
    assert "requests that were sent still run" in capsys.readouterr().err


def test_a_replay_leaves_out_what_replays_made_unless_it_is_asked_for() -> None:
    recording = Recording()
    asked = msgspec.structs.replace(REQUEST, diffusion=None)
    for name, gateway in (("first", "gateway-0"), ("again", "replay-0a1b2c3d")):
        request = msgspec.structs.replace(asked, id=name, gateway=gateway)
        recording.runs[name] = RecordedRun(name, request, Done(name, "tiny", 1))
    plan = replay._plan(recording, 0, over_http=False)
    assert [run.id for run in plan.runs] == ["first"]
    assert list(plan.skipped.values()) == [1]
    assert len(replay._plan(recording, 0, over_http=False, replays=True).runs) == 2
