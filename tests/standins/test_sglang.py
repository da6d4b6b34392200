"""The stand-in for SGLang: as the real one, whose signatures were read from its source, and strict."""

import inspect
from pathlib import Path

import pytest

from tests import standins
from tests.standins.sglang_signatures import FUNCTIONS, RECORDS, describe, differences, recorded

STANDIN = Path(__file__).parent / "sglang"


def test_it_has_nothing_that_the_real_one_has_not() -> None:
    found = describe(STANDIN)
    assert len(found) >= sum(len(names) for names in RECORDS.values()) + sum(len(names) for names in FUNCTIONS.values())
    assert differences(found, recorded()) == []


def test_the_record_is_of_the_package_that_is_installed() -> None:
    if not standins.real("sglang"):
        pytest.skip("SGLang is not installed here: pip install 'penstock[sglang]'")
    import sglang  # type: ignore[import-not-found, unused-ignore]

    real = describe(Path(inspect.getfile(sglang)).parent)
    assert differences(recorded() | {"ServerArgs": {}}, real | {"ServerArgs": {}}) == []


def test_what_differs_is_named() -> None:
    found, other = describe(STANDIN), {name: dict(fields) for name, fields in recorded().items()}
    del other["Engine.async_generate"]["rid"]
    other["SamplingParams"]["max_new_tokens"] = "16"
    assert differences(found, other) == [
        "Engine.async_generate: the real one has no rid",
        "SamplingParams.max_new_tokens: 16, not 128",
    ]


def test_it_refuses_what_the_real_one_refuses() -> None:
    with standins.installed():
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.server_args import ServerArgs

        with pytest.raises(TypeError, match="nonsense"):
            ServerArgs(model_path="x", nonsense=1)
        assert ServerArgs(model_path="x").chunked_prefill_size is None
        with pytest.raises(TypeError):
            SamplingParams(nonsense=1)
        for wrong in ({"top_k": 0}, {"top_p": 0.0}, {"repetition_penalty": 2.5}, {"logit_bias": {"1280": 1.0}}):
            with pytest.raises(ValueError, match="must"):
                SamplingParams(**wrong).verify(1280)
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            SamplingParams(min_new_tokens=1).normalize(None)
