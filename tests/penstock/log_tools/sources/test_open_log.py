"""How commands that read the log report what keeps them from it."""

import pytest

from penstock.log_tools.sources.open_log import run_command


def test_a_folder_that_may_not_be_read_is_one_line_with_the_folder_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        raise PermissionError(13, "Permission denied", "/srv/other/nats")

    assert run_command("requests", work) == 1
    assert capsys.readouterr().err == "penstock requests: /srv/other/nats: permission denied; run as its owner\n"
