"""``penstock doctor --engine trtllm``, tried on the stand-in: a clean page, and what it says of what differs."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.configs.logs import setup
from penstock.operate.doctor import trtllm as doctor
from penstock.operate.doctor.doctor_command import run
from penstock.operate.doctor.finding import CheckResult, CheckStatus
from tests import standins


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))
    with standins.installed():
        yield


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's logging as it was: loggers that are first used here must not keep the command's level."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def set_up(**options: Any) -> None:
        setup(**options)
        structlog.configure(cache_logger_on_first_use=False)

    monkeypatch.setattr("penstock.configs.logs.setup", set_up)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def quirks() -> Iterator[Any]:
    from tensorrt_llm._standin import variant

    before = dict(vars(variant.QUIRKS))
    yield variant.QUIRKS
    vars(variant.QUIRKS).update(before)


def by_name(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in findings}


def test_the_page_of_a_release_that_is_as_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--engine", "trtllm"]) == 0
    page, progress = capsys.readouterr()
    assert "checking: prefill and decode …" in progress
    assert {line.partition(":")[0] for line in progress.splitlines()} == {"checking"}  # no log beside the page
    assert "! sampling: this sampler does not apply top_logprobs" in page
    for name in (
        "release",
        "model",
        "start",
        "aggregated",
        "kv events",
        "constraints",
        "cancel",
        "one token",
    ):
        assert f"✓ {name}:" in page
    assert "✓ prefill and decode:" in page
    assert "– encode: this model takes no images" in page
    assert "0 problems" in page


def test_each_way_that_fails_is_reported_and_the_others_run_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorrt_llm._standin import engine

    def unable(self: Any, job: Any) -> None:
        if job.kind != "context_and_generation" or job.params.guided_decoding is not None:
            raise engine.Refused("the transceiver is not built in")

    monkeypatch.setattr(engine.Engine, "_check_disaggregation", unable)
    assert run(["--engine", "trtllm"]) == 1
    page = capsys.readouterr().out
    assert "✗ prefill and decode: the request 'p' failed" in page
    assert "✗ constraints: the request 'json' failed" in page
    assert "✓ cancel:" in page
    assert "2 problems" in page


def test_options_without_effect_are_warned_of(quirks: Any) -> None:
    found = by_name(list(doctor.examine("", {"override_engine_args": '{"sampler_type": "TorchSampler"}'})))
    assert found["sampling"].status is CheckStatus.warning
    assert found["sampling"].what == (
        "this sampler does not apply penalties, min_p, seed; min_tokens counts the prompt as well"
    )


def test_constraints_that_are_off_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    class Renamed:
        def __new__(cls, text: str) -> Any:
            raise AssertionError

    monkeypatch.setattr(llguidance, "LLTokenizer", Renamed)
    found = by_name(list(doctor.examine("", {})))
    assert found["constraints"].status is CheckStatus.warning
    assert "has another interface" in found["constraints"].what


def test_a_folder_without_a_model_is_no_fault_of_the_release() -> None:
    (finding,) = doctor.examine("/nonexistent", {})
    assert (finding.check, finding.status) == ("model", CheckStatus.problem)
    assert "--model" in finding.fix


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_llm

    monkeypatch.delattr(tensorrt_llm, "LLM")
    (finding,) = doctor.examine("", {})
    assert finding.status is CheckStatus.problem
    assert "pypi.nvidia.com" in finding.what
