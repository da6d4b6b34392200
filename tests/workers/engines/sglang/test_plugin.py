"""Grammars that are moved behind the tokens of another worker."""

import inspect
from typing import Any

import pytest

from penstock.infra.constraints.constraint_grammar import REGEX
from penstock.schemas.requests import Constraint
from penstock.workers.engines.sglang.plugin import ACTIVE, behind, register, split
from tests.workers.engines.contract import WORDS, ask
from tests.workers.engines.sglang.conftest import Make

PROMPT = WORDS[5:105]


def test_the_tokens_travel_in_a_comment_of_the_grammar() -> None:
    assert split(behind("start: /a+/", [5, 17])) == ("start: /a+/", [5, 17])
    assert behind("start: /a+/", []) == "start: /a+/"
    assert split("start: /a+/\n// penstock: behind 3") == ("start: /a+/\n// penstock: behind 3", [])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, without the plugin."""
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend  # type: ignore[import-not-found, unused-ignore]

    monkeypatch.setattr(GuidanceBackend, "dispatch_ebnf", inspect.unwrap(GuidanceBackend.dispatch_ebnf))
    return GuidanceBackend


def test_without_the_plugin_an_answer_that_begins_again_fails(
    backend: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.entrypoints.engine.load_plugins", lambda: None)
    driver = make()
    constraint = Constraint(REGEX, "[0-9]{2}[a-z]{2}")
    whole = driver.answer(ask(0, PROMPT, 60, constraint=constraint))
    (failure,) = driver.run(ask(1, PROMPT, 60, constraint=constraint, generated=whole[:-2])).failures
    assert "does not allow" in failure.message


def test_other_processes_are_left_as_they_are(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = backend.dispatch_ebnf
    monkeypatch.delenv(ACTIVE, raising=False)
    register()
    assert backend.dispatch_ebnf is before
    monkeypatch.setenv(ACTIVE, "1")
    register()
    once = backend.dispatch_ebnf
    register()
    assert backend.dispatch_ebnf is once
    assert once is not before
