"""Runs with whichever llguidance is installed; ``make test-llguidance`` runs it with 0.7.29 and with 1.9."""

import json
import re
from typing import Any

import llguidance
import pytest

from penstock.gateway.grammars.writer import GrammarWriter
from penstock.infra.constraints import constraint_grammar, llguidance_releases
from penstock.infra.model import modeldir
from penstock.schemas.requests import Constraint, Stop
from penstock.workers.engines.constraints import compiler as compilers
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, ModelTokens, working
from penstock.workers.engines.engine_protocol import GrammarStats, RequestError

MODEL = modeldir.load(modeldir.DEMO)


def grammars() -> ConstraintCompiler:
    return ConstraintCompiler(lambda: ModelTokens(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids))


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface of 0.7.29, whichever is installed."""
    tokenizer, limits = llguidance.LLTokenizer, llguidance.LLParserLimits
    if not hasattr(tokenizer, "eos_tokens"):
        return

    class OneEnd:
        def __new__(cls, tokenizer_text: str, *, n_vocab: int, eos_token: Any) -> Any:
            if not isinstance(eos_token, int):
                raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")
            return tokenizer(tokenizer_text, n_vocab=n_vocab, eos_token=eos_token)

    class LoudLimits:
        def __new__(cls) -> Any:
            return limits()

    monkeypatch.setattr(llguidance, "LLTokenizer", OneEnd)
    monkeypatch.setattr(llguidance, "LLParserLimits", LoudLimits)


@pytest.mark.usefixtures("older")
def test_every_end_token_ends_an_output_where_the_library_knows_one() -> None:
    assert len(MODEL.eos_token_ids) > 1
    a = MODEL.tokenizer.encode("a", add_special_tokens=False).ids
    for end in MODEL.eos_token_ids:
        matcher = grammars().matcher(Constraint(constraint_grammar.REGEX, "a"), 0, Stop(max_tokens=9))
        matcher.follow(a)
        mask = matcher.mask()
        allowed = {token for token in range(MODEL.vocab_size) if mask[token >> 3] >> (token & 7) & 1}
        assert allowed == set(MODEL.eos_token_ids)
        assert matcher.take(end)
    waiting = grammars().matcher(Constraint(constraint_grammar.REGEX, "a{1,3}"), 0, Stop(max_tokens=9, min_tokens=2))
    waiting.follow(a)
    mask = waiting.mask()
    assert not any(mask[end >> 3] >> (end & 7) & 1 for end in MODEL.eos_token_ids)


@pytest.mark.usefixtures("older")
def test_errors_have_no_state_of_the_parser() -> None:
    with pytest.raises(constraint_grammar.ConstraintError) as caught:
        constraint_grammar.check(Constraint(constraint_grammar.REGEX, "("))
    assert "<state>" not in str(caught.value)


@pytest.mark.parametrize("text", ['start: "a"~2..4', 'start: ("," w)~0..3\nw: /x~1..2/ "~3..4"'])
def test_repetitions_are_read_by_all_releases(text: str) -> None:
    constraint_grammar.check(Constraint(constraint_grammar.GRAMMAR, text))
    assert "/x~1..2/" in constraint_grammar.grammar(Constraint(constraint_grammar.GRAMMAR, text)) or "x~" not in text
    assert '"~3..4"' in llguidance_releases.repeated(text) or "~3" not in text
    assert "{" in llguidance_releases.repeated(text)


@pytest.mark.parametrize(
    "lark", ['start: <[*]> "a"', 'start: <[^3,5]> "a"', "start: <[^0]>", 'start: <[^5,3,1279]>* "x"']
)
@pytest.mark.usefixtures("older")
def test_sets_of_tokens_allow_the_same_where_ranges_are_all_that_is_known(lark: str) -> None:
    """The gateway's grammars for reasoning and tool calls have them."""
    ranges = llguidance_releases.for_release(lark, MODEL.vocab_size)
    assert "*]" not in ranges
    assert "^" not in ranges
    spelled = json.loads(llguidance_releases.for_release(json.dumps({"grammars": [{"lark_grammar": lark}]}), 1280))
    assert spelled["grammars"] == [{"lark_grammar": ranges}]
    barred = [int(each) for each in re.findall(r"\d+", lark.partition("]")[0])]
    matcher = grammars().matcher(Constraint(constraint_grammar.LARK, lark), 0, Stop(max_tokens=9))
    mask = matcher.mask()
    allowed = {token for token in range(MODEL.vocab_size) if mask[token >> 3] >> (token & 7) & 1}
    assert allowed >= set(range(MODEL.vocab_size)) - set(barred) - {MODEL.tokenizer.token_to_id("x")}
    assert not allowed & set(barred)
    constraint_grammar.check(Constraint(constraint_grammar.LARK, lark))


@pytest.mark.usefixtures("older")
def test_what_only_looks_like_a_set_stays() -> None:
    text = 'start: "<[*]>" /<\\[\\*\\]>/ <[7]>'
    assert llguidance_releases.for_release(text, 100) == text


def _json_grammars() -> dict[str, Constraint]:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": ["b"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    written = GrammarWriter(lambda mark: None)
    lark = written.text(written.json(schema, **llguidance_releases.ESCAPES))
    own = Constraint(constraint_grammar.JSON_SCHEMA, json.dumps(schema))
    return {
        "schema": own,
        "gateway": Constraint(constraint_grammar.LARK, lark),
        "around": Constraint(constraint_grammar.LARK, constraint_grammar.around(lark, 'start: "x"')),
        "engine": Constraint(constraint_grammar.LARK, constraint_grammar.as_lark(own)),
    }


@pytest.fixture(params=["installed", "0.7.29"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "0.7.29":
        monkeypatch.setattr(llguidance_releases, "bounds_white_space", lambda: False)
        monkeypatch.setattr(llguidance_releases, "knows_escapes", lambda: False)


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("form", ["schema", "gateway", "around", "engine"])
def test_white_space_between_the_parts_of_json_ends(form: str) -> None:
    """Before 1.8 a pattern is matched again and again: an answer of white space, up to its max_tokens."""
    text = '{"a": ["b"]}'
    for at in range(len(text)):
        matcher = grammars().matcher(_json_grammars()[form], 0, Stop(max_tokens=99))
        assert matcher.matcher.try_consume_tokens(_bytes(text[:at])) == at
        assert matcher.matcher.try_consume_tokens(_bytes("  ")) < len("  ")
        assert matcher.matcher.try_consume_tokens(_bytes("\n" * 3)) < 3
    whole = grammars().matcher(_json_grammars()[form], 0, Stop(max_tokens=99))
    assert whole.matcher.try_consume_tokens(_bytes(text)) == len(text)


def _bytes(text: str) -> list[int]:
    """Tokens of one character each."""
    return [MODEL.tokenizer.encode(each, add_special_tokens=False).ids[-1] for each in text]


@pytest.mark.parametrize("known", [True, False])
def test_options_that_a_release_does_not_know_are_left_out_of_ours_alone(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_releases, "bounds_white_space", lambda: known)
    monkeypatch.setattr(llguidance_releases, "knows_escapes", lambda: known)
    text = llguidance_releases.json_for_release(_json_grammars()["gateway"].text)
    assert ("whitespace_pattern" in text) is ("json_allowed_escapes" in text) is known
    clients = constraint_grammar.around(
        'start: "whitespace_pattern" "json_allowed_escapes"', 'start: %json {"x-guidance": {}}'
    )
    assert llguidance_releases.json_for_release(clients) == clients


def test_another_interface_is_unsupported_and_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed:
        def __new__(cls, text: str) -> Any:
            raise AssertionError

    monkeypatch.setattr(llguidance, "LLTokenizer", Renamed)
    with pytest.raises(RequestError) as caught:
        grammars().compile(Constraint(constraint_grammar.REGEX, "a"))
    assert caught.value.code == "unsupported"
    assert "llguidance" in caught.value.message
    assert working(grammars()) is None
    assert compilers.compiler(modeldir.DEMO) is None


def test_a_compiler_is_offered_once_it_has_compiled() -> None:
    found = compilers.compiler(modeldir.DEMO)
    assert found is not None
    assert found.stats() == GrammarStats(0, 0, 0.0)  # the trial is no client's
