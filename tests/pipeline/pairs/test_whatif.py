"""What routers decided for pairs of prefill and decode workers is decided again."""

import datetime

import httpx
import pytest

from penstock.log_tools.whatif import whatif_command
from tests.pipeline.support import Deployment, ok, token_prompt
from tests.pipeline.test_whatif import REQUESTS, output


async def test_pairs_are_decided_again_with_other_workers_and_policies(
    pairs: Deployment, http: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--local-prefill-tokens", "64", "--since", datetime.datetime.now().isoformat())
    for number in range(REQUESTS):
        prompt = token_prompt(400, number % 5) + token_prompt(300 * (number % 3), 100 + number)
        await ok(http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 4}))
    same = await output(whatif_command.run, pairs, capsys, *options)
    assert same["decisions"] == same["usable"] == same["reproduced"] == REQUESTS
    assert same["recorded"] == same["then"]
    assert (split := sum(same["recorded"]["decoded_by"].values())) > REQUESTS // 3
    without = await output(
        whatif_command.run, pairs, capsys, *options, "--without", "prefill-0", "--without", "decode-1"
    )
    assert not any(name.startswith(("prefill-0-", "decode-1-")) for name in without["then"]["by_worker"])
    assert all(name.startswith("decode-0-") for name in without["then"]["decoded_by"])
    killed = await output(
        whatif_command.run, pairs, capsys, *options, "--kill", "decode-0", "--kill", "decode-1", "--at", "1h"
    )
    assert (killed["waiting"], killed["then"]["decoded_by"]) == (0, {})  # prefill workers run everything
    local = await output(whatif_command.run, pairs, capsys, *options, "--local-prefill-tokens", "100000")
    assert local["then"]["decoded_by"] == {}
    assert local["moved"] == split
