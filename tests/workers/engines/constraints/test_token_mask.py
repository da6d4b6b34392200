import json
import random
import re
from typing import Any

import jsonschema
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.model import modeldir
from penstock.schemas.errors import Code
from penstock.schemas.requests import Constraint, Stop
from penstock.workers.engines.constraints import compiler as compiling
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, ModelTokens, RunningConstraints
from penstock.workers.engines.constraints.token_mask import BatchMasks, Matcher
from penstock.workers.engines.engine_protocol import RequestError, StepResult
from tests.properties import examples

MODEL = modeldir.load(modeldir.DEMO)
GRAMMARS = ConstraintCompiler(lambda: ModelTokens(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids))
PROMPT = [1, 2, 3]
STOP = Stop(max_tokens=400)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    Constraint("json_schema", json.dumps(SCHEMA)),
    Constraint("regex", r"[a-z]{3,9}-\d{2}"),
    Constraint("choice", '["yes", "no", "may\\"be"]'),
    Constraint("grammar", 'start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,4}/'),
)


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]


def drawn(matcher: Matcher, rng: random.Random) -> list[int]:
    """Random output under the constraint, to its end."""
    tokens = list(PROMPT)
    while len(tokens) < 400:
        matcher.follow(tokens)
        token = rng.choice(allowed(matcher.mask()))
        tokens.append(token)
        if token in MODEL.eos_token_ids:
            break
    return tokens


@examples(20)
@given(st.integers(0, 1 << 30), st.sampled_from(CONSTRAINTS[1:]))
def test_a_matcher_made_from_the_tokens_so_far_allows_what_the_first_one_did(seed: int, constraint: Constraint) -> None:
    rng = random.Random(seed)
    first = GRAMMARS.matcher(constraint, len(PROMPT), STOP)
    tokens = drawn(first, rng)
    assert not first.error
    for cut in {len(PROMPT), rng.randrange(len(PROMPT), len(tokens)), len(tokens) - 1}:
        one, other = (GRAMMARS.matcher(constraint, len(PROMPT), STOP) for _ in range(2))
        for length in range(len(PROMPT), cut + 1):
            one.follow(tokens[:length])  # step by step
        other.follow(tokens[:cut])  # at once, as another worker does
        assert one.mask() == other.mask()


@examples(20)
@given(st.integers(0, 1 << 30))
def test_what_ends_under_a_schema_is_valid(seed: int) -> None:
    tokens = drawn(GRAMMARS.matcher(CONSTRAINTS[0], len(PROMPT), STOP), random.Random(seed))
    assert tokens[-1] in MODEL.eos_token_ids
    jsonschema.validate(json.loads(MODEL.tokenizer.decode(tokens[len(PROMPT) :])), SCHEMA)


def test_it_ends_only_where_the_grammar_does() -> None:
    matcher = GRAMMARS.matcher(Constraint("choice", '["go", "gone"]'), len(PROMPT), STOP)
    tokens = list(PROMPT)
    for text, ends in (("g", False), ("o", True), ("n", False), ("e", True)):
        tokens += MODEL.tokenizer.encode(text, add_special_tokens=False).ids
        matcher.follow(tokens)
        assert (MODEL.eos_token_ids[0] in allowed(matcher.mask())) is ends
    assert set(allowed(matcher.mask())) == set(MODEL.eos_token_ids)  # nothing else can follow


def test_min_tokens_delays_the_end_unless_nothing_else_is_allowed() -> None:
    stop = Stop(max_tokens=20, min_tokens=4)
    matcher = GRAMMARS.matcher(Constraint("regex", "a{1,3}"), len(PROMPT), stop)
    a = MODEL.tokenizer.encode("a", add_special_tokens=False).ids
    matcher.follow(PROMPT + a)
    assert not set(allowed(matcher.mask())) & set(MODEL.eos_token_ids)
    matcher.follow(PROMPT + 3 * a)
    assert set(allowed(matcher.mask())) == set(MODEL.eos_token_ids)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_masks_of_a_batch_are_those_of_each(count: int) -> None:
    rng = random.Random(count)
    constraints = [rng.choice(CONSTRAINTS) for _ in range(count)]
    matchers = [GRAMMARS.matcher(each, len(PROMPT), STOP) for each in constraints]
    matchers[0].follow([*PROMPT, *MODEL.tokenizer.encode("~", add_special_tokens=False).ids])
    batch = BatchMasks(MODEL.vocab_size)
    rows = batch.compute(matchers)
    assert matchers[0].error
    assert rows[: batch.row_bytes] == b"\xff" * batch.row_bytes  # its sequence fails; until then it has to draw
    for number, matcher in enumerate(matchers[1:], 1):
        assert allowed(rows[number * batch.row_bytes :][: batch.row_bytes]) == allowed(matcher.mask())


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint("json_schema", '{"not": {"pattern": "a"}}'), "not"),
        (Constraint("json_schema", '{"properties": {"a": {"type": "strin"}}}'), "strin"),
        (Constraint("json_schema", "false"), "Unsatisfiable"),
        (Constraint("json_schema", '{"x-guidance": {"lenient": true}, "uniqueItems": true}'), "uniqueItems"),
        (Constraint("json_schema", "[1"), ""),
        (Constraint("regex", "(a"), "unclosed group"),
        (Constraint("grammar", "start: nope"), "nope"),
        (Constraint("choice", "{}"), ""),
        (Constraint("sonnet", "abab"), "sonnet"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(constraint: Constraint, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        GRAMMARS.compile(constraint)
    assert caught.value.code == Code.invalid_request
    assert says in caught.value.message
    assert "<state>" not in caught.value.message


def test_errors_show_no_grammar_that_the_client_did_not_write() -> None:
    with pytest.raises(RequestError) as caught:
        GRAMMARS.compile(Constraint("lark", 'start: "x"? r0\nr0: %json {"$ref": "#/$defs/gone"}'))
    assert caught.value.message.endswith("failed to compile JSON schema: Pointer '/$defs/gone' does not exist")


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", '{"$ref": "#"}'),
        Constraint("grammar", "start: start"),
        Constraint(
            "lark",
            'start: r0\nr0: %json {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
        ),
    ],
)
def test_a_constraint_that_no_text_matches_is_the_clients_error(constraint: Constraint) -> None:
    running = RunningConstraints()
    matcher = GRAMMARS.matcher(constraint, len(PROMPT), STOP)
    running.add("key", matcher)
    matcher.mask()
    (failure,) = running.ended(StepResult([], [], [], [], 0))
    assert (failure.key, failure.code) == ("key", Code.invalid_request)
    assert "no text matches the constraint" in failure.message
    assert not running.matchers


def test_a_grammar_that_never_ends_is_the_clients_error() -> None:
    running = RunningConstraints()
    matcher = GRAMMARS.matcher(Constraint("grammar", 'start: a\na: "x" a'), len(PROMPT), STOP)
    running.add("key", matcher)
    matcher.mask()
    matcher.follow([*PROMPT, *MODEL.tokenizer.encode("x", add_special_tokens=False).ids])
    (failure,) = running.ended(StepResult([], [], [], [], 0))
    assert failure.code == Code.invalid_request


def test_every_one_of_many_choices_can_be_written() -> None:
    texts = [f"value {number}" for number in range(4096)]
    constraint = Constraint("choice", json.dumps(texts))
    for text in (texts[0], texts[400], texts[-1]):  # the second begins others
        matcher = GRAMMARS.matcher(constraint, len(PROMPT), STOP)
        tokens = list(PROMPT)
        for token in MODEL.tokenizer.encode(text, add_special_tokens=False).ids:
            assert token in allowed(matcher.mask())
            tokens.append(token)
            matcher.follow(tokens)
        assert set(MODEL.eos_token_ids) & set(allowed(matcher.mask()))
        assert not matcher.error


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {f"k{number}": {"type": "null"} for number in range(3000)}}, '{"k'),
        ({"properties": {"a": {"pattern": "^(a|b|cd)*$", "minLength": 5000, "maxLength": 100000}}}, '{"a": "abababab'),
    ],
)
def test_a_constraint_beyond_a_steps_limits_is_the_clients_error(schema: dict[str, Any], text: str) -> None:
    running = RunningConstraints()
    whole = {"type": "object", "additionalProperties": False, **schema}
    matcher = GRAMMARS.matcher(Constraint("json_schema", json.dumps(whole)), len(PROMPT), STOP)
    running.add("key", matcher)
    tokens = list(PROMPT)
    for token in MODEL.tokenizer.encode(text, add_special_tokens=False).ids:
        tokens.append(token)
        matcher.follow(tokens)
        matcher.mask()
    (failure,) = running.ended(StepResult([], [], [], [], 0))
    assert failure.code == Code.invalid_request
    assert "too complex" in failure.message


def new_compiler() -> ConstraintCompiler:
    return ConstraintCompiler(lambda: ModelTokens(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids))


def test_grammars_are_compiled_once_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "CACHED_BYTES", 1 << 20)
    grammars = new_compiler()
    constraints = [Constraint("choice", f'["{number}"]') for number in range(9)]
    for each in constraints:
        grammars.compile(each, 1 << 17)
        grammars.compile(each, 1 << 17)
    assert (grammars.stats().compiled, grammars.stats().cached) == (9, 9)
    assert grammars.size_bytes <= 1 << 20
    grammars.compile(constraints[-1])
    grammars.compile(constraints[0])
    assert grammars.stats().compiled == 10


def test_a_grammar_in_use_is_found_though_the_cache_has_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine's thread would compile it again, and every sequence wait for that."""
    monkeypatch.setattr(compiling, "CACHED_BYTES", 1 << 10)
    grammars = new_compiler()
    held = grammars.compile(CONSTRAINTS[0], 1 << 20)
    grammars.matcher(CONSTRAINTS[0], 0, STOP)
    assert grammars.stats().compiled == 1
    assert grammars.size_bytes == 0
    del held
    assert grammars.known(CONSTRAINTS[0]) is None


def test_many_large_grammars_leave_a_worker_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 such schemas take 90 MB if they are kept, whatever their sizes."""
    monkeypatch.setattr(compiling, "CACHED_BYTES", compiling.CACHED_BYTES // 3)
    process, grammars = psutil.Process(), new_compiler()
    grammars.compile(CONSTRAINTS[0])  # with the tokenizer
    before = process.memory_info().rss
    for number in range(30):
        properties = {f"p{number}_{each}": {"type": "string"} for each in range(800)}
        grammars.compile(Constraint("json_schema", json.dumps({"type": "object", "properties": properties})))
    assert 1 < grammars.size_bytes <= compiling.CACHED_BYTES
    assert process.memory_info().rss - before < 3 * compiling.CACHED_BYTES


def test_a_model_without_end_tokens_takes_no_constraint() -> None:
    with pytest.raises(RequestError) as caught:
        ConstraintCompiler(lambda: ModelTokens(MODEL.tokenizer, MODEL.vocab_size, ())).compile(CONSTRAINTS[0])
    assert caught.value.code == Code.unsupported


def spelled(constraint: Constraint) -> list[int]:
    """Tokens of the one output that a constraint allows."""
    tokens: list[int] = []
    while len(tokens) < 80:
        matcher = GRAMMARS.matcher(constraint, 0, STOP)
        matcher.follow(tokens)
        mask = matcher.mask()
        allowed = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]
        ending = [token for token in allowed if token in MODEL.eos_token_ids]
        if ending:
            return tokens
        # The longest text first, as greedy models do.
        tokens.append(max(allowed, key=lambda token: len(MODEL.tokenizer.id_to_token(token) or "")))
    raise AssertionError("it does not end")


@pytest.mark.parametrize("text", ["<think>", "<|im_end|>", "a<|im_start|>b", "</tool_call>", "<|endoftext|>"])
@pytest.mark.parametrize(
    "constraint",
    [
        lambda text: Constraint("choice", json.dumps([text])),
        lambda text: Constraint("regex", "".join(f"[{each}]" if each == "|" else each for each in text)),
        lambda text: Constraint("json_schema", json.dumps({"enum": [text]})),
        lambda text: Constraint("json_schema", json.dumps({"const": {text: text}})),
        lambda text: Constraint("json_schema", json.dumps({"type": "string", "pattern": f"^{re.escape(text)}$"})),
        lambda text: Constraint("grammar", f"start: {json.dumps(text)}"),
        lambda text: Constraint("grammar", f"root ::= {json.dumps(text)}"),
        lambda text: Constraint("lark", f"start: {json.dumps(text)}"),
    ],
    ids=["choice", "regex", "enum", "property", "pattern", "Lark", "GBNF", "gateway"],
)
def test_the_text_of_a_special_token_is_written_with_ordinary_tokens(constraint: Any, text: str) -> None:
    """Else the output ends within it, or has a mark that no parser shows."""
    tokens = spelled(constraint(text))
    assert text in MODEL.tokenizer.decode(tokens, skip_special_tokens=True)
    assert not set(tokens) & set(MODEL.added_tokens.values())


@pytest.mark.parametrize("lark", ['start: <think> "x"', 'start: a\na: <think> "x"'])
def test_a_clients_grammar_may_name_special_tokens(lark: str) -> None:
    assert spelled(Constraint("grammar", lark))[0] == MODEL.added_tokens["<think>"]


def test_names_of_special_tokens_are_replaced_wherever_a_tokenizer_has_them() -> None:
    described = {
        "added_tokens": [{"id": 1, "content": "<s>", "special": False}, {"id": 2, "content": "  ", "special": False}],
        "model": {"vocab": {"a": 0, "<s>": 1}, "unk_token": "<s>"},
    }
    found = compiling.without_names(described, [1])
    name = found["added_tokens"][0]["content"]
    assert name not in ("<s>", "  ")
    assert found["model"] == {"vocab": {"a": 0, name: 1}, "unk_token": name}
    assert found["added_tokens"][1]["content"] == "  "
    scored = {"added_tokens": [{"id": 0, "content": "<s>"}], "model": {"vocab": [["<s>", 0.0], ["a", -1.0]]}}
    assert [text for text, _ in compiling.without_names(scored, [0])["model"]["vocab"]][1] == "a"
