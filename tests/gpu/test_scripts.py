"""Each script that is run by hand, on GPUs or to measure, is loaded and gives its help: as far as a CPU goes."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

from penstock.workers.engines.engine_protocol import Output, StepResult
from tests.gpu.split import first_result

TESTS = Path(__file__).parents[1]
SCRIPTS = sorted(
    f"tests.{path.parent.name}.{path.stem}"
    for folder in ("gpu", "perf")
    for path in (TESTS / folder).glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8") and not path.stem.startswith("test_")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_loaded_and_says_what_it_is_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("its kernels need triton")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


class RunningAhead:
    """As an engine on CUDA: a call launches a step, and the next one returns what came of it."""

    def __init__(self, *steps: StepResult) -> None:
        self._steps = [StepResult([], [], [], [], 0), *steps]

    def step(self) -> StepResult:
        return self._steps.pop(0)

    def has_work(self) -> bool:
        return bool(self._steps)


def test_the_first_decode_step_of_a_handoff_is_the_first_that_came_back() -> None:
    first = StepResult([Output("one", 7)], [], [], [], 1)
    assert first_result(RunningAhead(first, StepResult([Output("one", 8)], [], [], [], 1))) is first
    assert first_result(RunningAhead()).outputs == []
