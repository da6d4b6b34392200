"""The stand-in for vLLM: like the real one where that can be imported, and strict."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import standins
from tests.standins import vllm_signatures
from tests.standins.vllm_signatures import Description, differences

ROOT = Path(__file__).parent.parent.parent


def described(environment: dict[str, str] | None = None) -> Description:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.standins.vllm_signatures"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    return vllm_signatures.load(run.stdout.splitlines()[-1])


def test_it_has_what_the_real_one_has() -> None:
    if not standins.real("vllm"):
        pytest.skip("vLLM is not installed here: pip install 'penstock[vllm]'")
    assert differences(described(standins.environment()), described()) == []


def test_it_is_described_by_what_adapters_use() -> None:
    with standins.installed():
        found = vllm_signatures.describe()
    assert {"prompt", "sampling_params", "request_id"} <= set(found["AsyncLLM.generate"])
    assert found["SamplingParams"]["max_tokens"] == 16
    assert found["KVTransferConfig"]["kv_load_failure_policy"] == "fail"
    assert "VLLMServerError" in found["GenerationError"]
    time, (stored, *_), rank = found["BlockStored"]["<wire>"]
    assert (time, stored["type"], rank) == (1.0, "BlockStored", 3)
    other = {name: dict(fields) for name, fields in found.items()}
    assert differences(found, other) == []
    del other["AsyncLLM.generate"]["request_id"]
    other["SamplingParams"]["max_tokens"] = 17
    assert differences(found, other) == [
        "AsyncLLM.generate: the real one has no request_id",
        "SamplingParams.max_tokens: 17, not 16",
    ]


def test_it_refuses_what_the_real_one_refuses() -> None:
    with standins.installed():
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        with pytest.raises(TypeError):
            AsyncEngineArgs(model="x", nonsense=1)
        with pytest.raises(TypeError):
            SamplingParams(nonsense=1)
        for wrong in ({"max_tokens": 0}, {"top_p": 0.0}, {"min_tokens": 9, "max_tokens": 3}, {"temperature": 3.0}):
            with pytest.raises(VLLMValidationError):
                SamplingParams(**wrong)
        with pytest.raises(VLLMValidationError, match="detokenize"):
            SamplingParams(stop="x", detokenize=False)
        with pytest.raises(ValueError, match="kv_role"):
            KVTransferConfig(kv_connector="NixlConnector")
