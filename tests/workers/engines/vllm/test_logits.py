"""Logits processors behind vLLM's own interface: the same classes, the same answers as from the native engine."""

from typing import Any

import pytest

from penstock.infra.model import modeldir
from penstock.schemas.requests import LogitsProcessor, Sampling
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.logits.registry import ProcessorError, registry_from_settings
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from tests import standins
from tests.workers.engines.contract import ALL, BLOCK, MODEL, REAL, Driver, ask
from tests.workers.engines.logits.support import OWN, chosen
from tests.workers.engines.native.models import run as run_native

TEXT = "Forced: 42 harbours!"
(SUBJECT,) = (subject for subject in ALL if subject.name == "vllm")


def sampling(*processors: LogitsProcessor) -> Sampling:
    return Sampling(temperature=0.0, logits_processors=processors)


@pytest.mark.skipif(standins.real("vllm") and REAL != "vllm", reason="make test-vllm")
def test_the_same_processors_give_what_they_give_in_the_native_engine() -> None:
    settings = SUBJECT.settings(logits_processor=(f"{OWN}:RaisesHalfway", f"{OWN}:TopK"))
    model = modeldir.load(MODEL)
    prompt = model.tokenizer.encode("What is 347 + 586?").ids
    digits = [token for token in range(10, 60) if model.tokenizer.decode([token]).isdigit()]
    choices: dict[str, list[LogitsProcessor]] = {
        "text": [chosen("forced_text", text=TEXT)],
        "mask": [chosen("allowed_tokens", tokens=digits)],
        "chain": [chosen("temperature", temperature=0.5), chosen("TopK", k=3)],
        "broken": [chosen("RaisesHalfway")],
        "plain": [],
    }
    asked: dict[str, Any] = {
        key: ask(key, prompt, 24, sampling(*processors), stop={"ignore_eos": False})
        for key, processors in choices.items()
    }
    native = build(
        str(MODEL),
        NativeOptions(device="cpu", kv_blocks=64, block_size=BLOCK),
        processors=registry_from_settings(settings, MODEL),
    )
    expected = {key: [each.token for each in several] for key, several in run_native(native, [*asked.values()]).items()}
    native.close()
    with SUBJECT.present():
        driver = Driver(SUBJECT.make(settings, MODEL))
        try:
            names = ("RaisesHalfway", "TopK", "allowed_tokens", "forced_text", "temperature")
            assert driver.engine.info.logits_processors == names
            seen = driver.run(*asked.values())
            assert {key: seen.tokens(key) for key in asked} == expected
            assert model.tokenizer.decode(expected["text"], skip_special_tokens=True) == TEXT
            assert expected["broken"] == expected["plain"] != expected["text"]
            # An answer that another worker began goes on behind its tokens.
            begun = ask("later", prompt, 24, sampling(*choices["text"]), generated=expected["text"][:3])
            assert driver.run(begun).tokens("later")[: len(expected["text"]) - 3] == expected["text"][3:]
            with pytest.raises(RequestError, match="registered: RaisesHalfway, TopK, allowed_tokens"):
                driver.engine.submit(ask("a", prompt, 4, sampling(chosen("nobody"))))
        finally:
            driver.engine.close()


def test_a_processor_that_cannot_be_imported_is_found_before_the_engine_starts() -> None:
    with SUBJECT.present(), pytest.raises(ProcessorError, match="cannot be imported"):
        SUBJECT.make(SUBJECT.settings(logits_processor=("nowhere:Nothing",)), MODEL)
