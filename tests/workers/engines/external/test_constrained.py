"""Constraints on what an external engine draws."""

import json
from array import array
from pathlib import Path

import pytest

from penstock.infra.constraints.constraint_grammar import GRAMMAR, JSON_SCHEMA, REGEX
from penstock.infra.model import modeldir
from penstock.schemas.errors import Code
from penstock.schemas.requests import Constraint, Sampling, Stop
from penstock.workers.engines.constraints.compiler import compiler
from penstock.workers.engines.engine_protocol import RequestError, SequenceRequest
from penstock.workers.engines.external import constrained
from penstock.workers.engines.external.constrained import ConstrainedOutputs, ends, grammar_text, standard_tokenizer
from penstock.workers.engines.external.sequences import SequenceFailure, Token

DIGITS = Constraint(REGEX, "[0-9]{2,4}")
TOKENIZER = modeldir.load(modeldir.DEMO).tokenizer


def tokens_of(text: str) -> list[Token]:
    return [Token(token) for token in TOKENIZER.encode(text, add_special_tokens=False).ids]


def following(constraint: Constraint | None, generated: str = "") -> ConstrainedOutputs:
    outputs = ConstrainedOutputs(compiler(modeldir.DEMO))
    before = array("I", [token.token for token in tokens_of(generated)])
    request = SequenceRequest("k", array("I", [1, 2]), Sampling(), Stop(9), 0, before, constraint=constraint)
    outputs.add(request)
    return outputs


def test_allowed_tokens_pass_and_the_first_other_one_is_a_failure() -> None:
    outputs = following(DIGITS)
    good = tokens_of("12")
    assert outputs.follow("k", good) == (good, None)
    kept, failure = outputs.follow("k", [*tokens_of("3"), *tokens_of(" no")])
    assert kept == tokens_of("3")
    assert failure is not None
    assert failure.code == Code.engine_error
    assert "does not allow" in failure.message


def test_an_end_before_the_constraint_allows_it_is_a_failure() -> None:
    outputs = following(DIGITS, "1")
    (end, *_) = modeldir.load(modeldir.DEMO).eos_token_ids
    assert outputs.follow("k", [Token(end, "stop")])[1] is not None


def test_a_constraint_that_no_text_matches_is_the_clients_error_whatever_the_engine_draws() -> None:
    kept, failure = following(Constraint(JSON_SCHEMA, '{"$ref": "#"}')).follow("k", tokens_of("12"))
    assert not kept
    assert failure is not None
    assert failure.code == Code.invalid_request
    assert "no text matches the constraint" in failure.message


def test_an_engine_that_gives_up_a_constraint_beyond_its_limits_leaves_the_client_an_error_of_its_own() -> None:
    outputs = following(Constraint(GRAMMAR, 'start: a\na: "x" a'))
    _, failure = outputs.follow("k", tokens_of("x"), SequenceFailure(Code.engine_error, "see its log"))
    assert failure is not None
    assert failure.code == Code.invalid_request
    assert "too complex" in failure.message


def test_a_failure_that_is_not_the_constraints_stays_as_it_is() -> None:
    failed = SequenceFailure(Code.engine_error, "out of memory")
    assert following(DIGITS).follow("k", tokens_of("12"), failed) == (tokens_of("12"), failed)
    assert following(None).follow("k", [], failed) == ([], failed)


def test_free_and_removed_sequences_are_not_followed() -> None:
    words = tokens_of("anything")
    assert following(None).follow("k", words) == (words, None)
    outputs = following(DIGITS)
    outputs.remove("k")
    assert outputs.follow("k", words) == (words, None)


def test_where_a_constrained_output_ends_is_up_to_its_grammar() -> None:
    stop = Stop(9, 3, (5,), ("x",), ignore_eos=True)
    assert ends(stop, DIGITS) == Stop(9, 0, (5,), ("x",))
    assert ends(stop, None) is stop


def test_a_grammar_that_cannot_be_compiled_is_the_requests_fault() -> None:
    with pytest.raises(RequestError) as caught:
        grammar_text(Constraint(GRAMMAR, "neither Lark nor GBNF"))

    assert caught.value.code == Code.invalid_request


def test_texts_of_grammars_are_kept_up_to_bytes() -> None:
    for number in range(60):
        grammar_text(Constraint(REGEX, f"{number}" + "x" * 190_000))
    assert 0 < constrained._texts.size_bytes <= constrained.REMEMBERED_BYTES
    assert len(constrained._texts) < 60


@pytest.mark.parametrize(
    ("config", "readable"), [({}, True), ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, False), ([], False)]
)
def test_tokenizers_with_code_of_their_own_are_not_read(tmp_path: Path, config: object, readable: bool) -> None:
    assert standard_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert standard_tokenizer(tmp_path) is readable
