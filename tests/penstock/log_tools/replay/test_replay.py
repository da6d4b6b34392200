"""``penstock replay``: what it says before it sends, and when it is interrupted."""

from typing import NoReturn

import pytest

from penstock.log_tools.replay import replay


async def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupted_replay_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "_replay", interrupted)
    assert replay.run(["--all"]) == 130
    assert "requests that were sent still run" in capsys.readouterr().err
