"""A slice of chaos: twelve seconds of kills and stops under load break no promise. ``make chaos`` is the rest."""

from pathlib import Path

import pytest

from tests.chaos.run import Options, run


@pytest.mark.timeout(240)
async def test_twelve_seconds_of_kills_and_stops_break_no_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(seconds=12.0, seed=20, topology="pd", clients=6, every_s=2.0, each=1)
    report = await run(tmp_path, options, print)
    assert report.clean, capsys.readouterr().out + report.text
    assert sum(row["asked"] for row in report.judgement.rows.values()) > 40
