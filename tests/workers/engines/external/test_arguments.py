"""The user's engine arguments, and what the installed release takes."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.external.arguments import check_interface, fields_of, given_arguments


def test_the_json_is_laid_over_the_yaml(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("gpu_memory_utilization: 0.5\nkv_events_config: {hwm: 5}\n")
    settings = WorkerSettings(extra_engine_args=str(file), override_engine_args='{"kv_events_config": {"topic": "t"}}')
    assert given_arguments(settings) == {"gpu_memory_utilization": 0.5, "kv_events_config": {"hwm": 5, "topic": "t"}}
    assert given_arguments(WorkerSettings()) == {}


@pytest.mark.parametrize("text", ["{", "[1]", "nonsense", '{"a" 1}'])
def test_what_cannot_be_read_is_named_by_its_flag(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadArguments, match="--override-engine-args: "):
        given_arguments(WorkerSettings(override_engine_args=text))
    (tmp_path / "args.yaml").write_text("[1]")
    for name in ("args.yaml", "gone.yaml"):
        with pytest.raises(BadArguments, match="--extra-engine-args: "):
            given_arguments(WorkerSettings(extra_engine_args=str(tmp_path / name)))


class Fields(msgspec.Struct):
    seed: int
    top_k: int = 0


def call(seed: int, **more: int) -> None: ...


def test_a_release_that_lacks_names_is_refused() -> None:
    model = SimpleNamespace(model_fields={"seed": None})
    assert [fields_of(kind) for kind in (Fields, call, model)] == [{"seed", "top_k"}, {"seed", "more"}, {"seed"}]
    check_interface("X 1", {Fields: ["seed"], call: ["seed"]}, "install 2")
    with pytest.raises(EngineError, match="X 1 lacks min_p, top_k; install 2"):
        check_interface("X 1", {Fields: ["top_k", "min_p"], call: ["top_k"]}, "install 2")
