"""What flags may name, and what requests may choose of it."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.errors import Code
from penstock.schemas.requests import LogitsProcessor
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.logits import BaseLogitsProcessor, ModelInfo, ProcessorError, Registry
from penstock.workers.engines.logits.registry import registry_from_settings
from tests.workers.engines.logits.own import Curious
from tests.workers.engines.logits.support import OWN, asking, chain, chosen, own

EXAMPLES = ("allowed_tokens", "forced_text", "temperature")


def complaint(*specs: str, **more: Any) -> str:
    with pytest.raises(ProcessorError) as caught:
        Registry(specs, **more)
    return str(caught.value)


def refusal(registry: Registry, *processors: LogitsProcessor) -> str:
    with pytest.raises(RequestError) as caught:
        registry.chain(asking(*processors))
    assert caught.value.code == Code.invalid_request
    return caught.value.message


def test_any_class_that_can_be_called_with_ids_and_logits_is_a_processor() -> None:
    processor = chain(own("Plus"), chosen("Plus", token=1)).processors[0]
    assert isinstance(processor, BaseLogitsProcessor)
    assert not isinstance(object(), BaseLogitsProcessor)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("Plus", "name=module:Class"),
        ("x=nothing", "name=module:Class"),
        (":Plus", "name=module:Class"),
        ("two words=a:b", "with letters"),
        ("x=no_such_module:Class", "PYTHONPATH"),
        (f"{OWN}:NoSuchClass", "NoSuchClass"),
        (f"{OWN}:CannotBeCalled", "input_ids, logits"),
        (f"{OWN}:TakesOne", "input_ids, logits"),
        (f"{OWN}:function", "not a class"),
        (f"{OWN}:Curious", "tokenizer"),  # and there is none
    ],
)
def test_a_flag_that_cannot_be_used_ends_the_start_and_says_why(spec: str, words: str) -> None:
    said = complaint(spec)
    assert words in said
    assert spec in said


def test_two_of_one_name_are_refused() -> None:
    assert "is used twice" in complaint(f"a={OWN}:Plus", f"a={OWN}:TopK")
    assert Registry([f"a={OWN}:Plus", f"b={OWN}:Plus"]).names == ("a", "b")


def test_a_constructor_gets_its_arguments_and_what_it_names_of_the_model() -> None:
    tokenizer = object()
    registry = own("Curious", model=ModelInfo(99, (7, 8), tokenizer))
    chain(registry, chosen("Curious", mine="m"))
    assert Curious.last.given == ("m", tokenizer, 3, 99, (7, 8))


def test_no_request_can_set_what_comes_from_the_model() -> None:
    registry = own("Curious", model=ModelInfo(99, (), object()))
    assert "cannot set prompt_len, tokenizer" in refusal(
        registry, chosen("Curious", mine="m", tokenizer=1, prompt_len=0)
    )


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    assert "registered: Plus, TopK" in refusal(own("TopK", "Plus"), chosen("Plus", token=1), chosen("os.system"))
    assert "registered: none" in refusal(Registry(), chosen("Plus"))


def test_a_module_path_in_a_request_is_a_name_like_any_other() -> None:
    assert "not registered" in refusal(own("Plus"), chosen(f"{OWN}:TopK", k=1))
    assert "not registered" in refusal(own("Plus"), chosen(f"Plus={OWN}:TopK", k=1))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (b"", "token"),
        (b'{"token": 1, "bye": 2}', "bye"),
        (b"[1]", "not a JSON object"),
        (b"{", "not a JSON object"),
        (b"\xff", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: bytes, words: str) -> None:
    assert words in refusal(own("Plus"), LogitsProcessor("Plus", args))


def test_each_sequence_has_instances_of_its_own_and_none_where_none_are_asked_for() -> None:
    registry = own("Plus")
    assert registry.chain(asking()) is None
    one, two = chain(registry, chosen("Plus", token=1)), chain(registry, chosen("Plus", token=1))
    assert one.processors[0] is not two.processors[0]


def test_the_workers_own_come_first_and_are_part_of_every_sequence() -> None:
    registry = Registry([f"{OWN}:Plus", f"{OWN}:TopK"], ModelInfo(9, ()), [chosen("TopK", k=2)])
    assert chain(registry).names == ("TopK",)
    assert chain(registry, chosen("Plus", token=0), chosen("TopK", k=1)).names == ("TopK", "Plus", "TopK")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"name": "nobody"}]', "not registered"),
        ('[{"name": "temperature", "args": {"temperature": 0}}]', "above 0"),
        ('[{"name": "temperature", "arguments": {}}]', "arguments"),
        ("temperature", "write"),
        ("[" * 100_000, "write"),
    ],
)
def test_what_the_worker_applies_to_all_is_checked_at_the_start(text: str, words: str) -> None:
    with pytest.raises(ProcessorError, match=words) as caught:
        registry_from_settings(WorkerSettings(default_logits_processors=text), modeldir.DEMO)
    assert "--default-logits-processors" in str(caught.value)


def test_a_worker_registers_the_examples_and_what_its_flags_name() -> None:
    assert registry_from_settings(WorkerSettings(), modeldir.DEMO).names == EXAMPLES
    more = registry_from_settings(
        WorkerSettings(logits_processor=(f"plus={OWN}:Plus", f"{OWN}:Curious")), modeldir.DEMO
    )
    assert more.names == ("Curious", *EXAMPLES[:2], "plus", EXAMPLES[2])


def test_the_examples_can_be_pickled_as_tensorrt_llm_does() -> None:
    made = chain(
        registry_from_settings(WorkerSettings(), modeldir.DEMO),
        chosen("temperature", temperature=2.0),
        chosen("forced_text", text="Hello"),
        chosen("allowed_tokens", tokens=[1, 2]),
    )
    size = len(pickle.dumps(made))
    assert size < 5_000  # no tokenizer goes with them
    assert pickle.loads(pickle.dumps(made)).names == made.names


def test_a_registry_without_processors_costs_no_torch() -> None:
    code = (
        "import json, sys; from penstock.workers.engines.logits import Registry; Registry(); "
        "print(json.dumps('torch' in sys.modules))"
    )
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
