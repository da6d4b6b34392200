"""What the grammars of calls allow is what the parsers read: random answers under each grammar are parsed again."""

import json
import random
import re
from collections.abc import Collection, Sequence
from typing import Any

import jsonschema
import pytest
from msgspec import UNSET
from tokenizers import Tokenizer

from penstock.gateway.base.chat_objects import AnswerMessage, message_of
from penstock.gateway.grammars.answers import CallRules, Reasoning, write_answer
from penstock.gateway.grammars.calls import NO_PARAMETERS, Tool, call_grammar
from penstock.gateway.grammars.writer import CannotExpress, GrammarWriter
from penstock.infra.constraints.constraint_grammar import LARK
from penstock.infra.constraints.lark_expression import expression
from penstock.infra.model import modeldir
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.families import HARMONY_MARKS, TABLE, Thoughts
from penstock.infra.text.parsers.registry import (
    ParserNames,
    answer_marks,
    answer_parsing,
    format_tokens,
    parser_for,
    text_stream,
)
from penstock.schemas.requests import Constraint, GenerateRequest, Parsing, Stop
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, ModelTokens
from tests.infra.text.parsers.test_families import tokens_of
from tests.tiny_model import byte_level_json

MODEL = modeldir.load(modeldir.DEMO)
COMPILER = ConstraintCompiler(lambda: ModelTokens(MODEL.tokenizer, MODEL.vocab_size, MODEL.eos_token_ids))
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TEXTS = {"get_weather": {"city": False, "unit": False}}
TOOLS_GIVEN = (Tool("get_weather", WEATHER, True), Tool("stop", NO_PARAMETERS, False))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS_GIVEN}
HARMONY = ("gpt_oss", "harmony")
TOOLS = TABLE.names("calls")
THINK = Thoughts()
GRANITE = Thoughts(("Here is my thought process:",), ("Here's my response:",))
PREFERRED = ("</think>", "</tool_call>", '"', "}", "]", ")", ">", "</", "<", "|", "\n")  # they end what is open
CLOSING = [
    *MODEL.eos_token_ids,
    *(ids[0] for text in PREFERRED if len(ids := MODEL.tokenizer.encode(text, add_special_tokens=False).ids) == 1),
]


def answer(grammar: str, seed: int, *, free: int = 60, most: int = 1_000) -> str:
    """The text of a random answer under a grammar."""
    text: str = MODEL.tokenizer.decode(drawn(grammar, seed, free=free, most=most), skip_special_tokens=False)
    return text


def drawn(
    grammar: str,
    seed: int,
    *,
    free: int = 60,
    most: int = 1_000,
    compiler: ConstraintCompiler = COMPILER,
    begun: Sequence[int] = (),
    closing: Sequence[int] = CLOSING,
    ends: Collection[int] = MODEL.eos_token_ids,
) -> list[int]:
    """Any allowed tokens for a while, then those that end the answer, without the end token."""
    matcher = compiler.matcher(Constraint(LARK, grammar), 0, Stop(max_tokens=most))
    rng, tokens = random.Random(seed), list(begun)
    while len(tokens) < most:
        matcher.follow(tokens)
        mask = matcher.mask()
        assert not matcher.error
        allowed = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]
        token = rng.choice(allowed)
        if len(tokens) > free:
            token = next((each for each in closing if each in allowed), token)
        if token in ends:
            break
        tokens.append(token)
    return tokens


def parsed(text: str, tools: str, tags: str = "", *, begun: bool = False, texts: Any = TEXTS) -> AnswerMessage:
    parsing = Parsing(reasoning=tags, tools=tools, texts=texts, thinking=begun)
    request = GenerateRequest("id", "m", "g", b"", Stop(1), 0, 0, parsing=parsing)
    return message_of(parser_for(request, 0).parse(text))


def called(message: AnswerMessage) -> list[tuple[str, Any]]:
    """The calls, whose arguments must be valid."""
    calls = [] if message.tool_calls is UNSET else message.tool_calls
    found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    for name, arguments in found:
        jsonschema.validate(arguments, SCHEMAS[name])
    return found


def written(name: str, *, must: bool = True, one: bool = False, tokens: bool = True, tools: Any = TOOLS_GIVEN) -> str:
    """The grammar of an answer with calls; ``tokens``: marks are tokens where the demo model has them."""

    def token_id(mark: str) -> int | None:
        return MODEL.added_tokens.get(mark) if tokens else None

    writer = GrammarWriter(token_id, format_tokens(Parsing(tools=name), MODEL.added_tokens))
    calls = CallRules(call_grammar(name, token_id), tools, must, one)
    return write_answer(writer, None, calls, None)


@pytest.mark.parametrize("name", sorted(set(TOOLS)))
def test_forced_calls_are_read_and_have_valid_arguments(name: str) -> None:
    grammar = written(name)
    for seed in range(3):
        message = parsed(answer(grammar, seed, most=1400), name)
        assert called(message)
        assert not message.content


@pytest.mark.parametrize("name", sorted(set(TOOLS)))
def test_a_text_matches_its_grammar_in_each_format(name: str) -> None:
    """Quotes, backslashes and line breaks are quoted as the format does it."""
    pattern = expression('start: line ~ 1..3 "."\nline: /[a-z"\\\\ ]{1,3}/ "=\\n"')
    schema = {"type": "object", "properties": {"input": {"type": "string", "pattern": f"^(?:{pattern})$"}},
              "required": ["input"], "additionalProperties": False}  # fmt: skip
    grammar = written(name, tools=(Tool("apply", schema, True),), one=True)
    for seed in range(3):
        (call,) = parsed(answer(grammar, seed, free=20, most=1400), name, texts={"apply": {"input": False}}).tool_calls
        assert re.fullmatch(pattern, json.loads(call.function.arguments)["input"])


def test_a_slash_in_a_clients_pattern_ends_no_expression() -> None:
    text = {"type": "string", "pattern": '^(?:x/ "y" /z)$'}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"], "additionalProperties": False}
    grammar = written("qwen3_coder", tools=(Tool("f", schema, True),), one=True)
    (call,) = parsed(answer(grammar, 1, most=1400), "qwen3_coder").tool_calls
    assert json.loads(call.function.arguments) == {"a": 'x/ "y" /z'}


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize(
    "name",
    ["deepseek_v32", "deepseek_v3", "gemma4", "kimi_k3", "kimi_k2", "minimax_m3", "plamo3", "glm47", "command_a"],
)
def test_where_the_marks_are_tokens_calls_have_them(name: str, must: bool) -> None:
    row = TABLE.find(name)
    assert row is not None
    assert row.calls is not None
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_special_tokens(list(tokens_of(row).tokens))
    added = {entry.content: token for token, entry in tokenizer.get_added_tokens_decoder().items()}
    end = added["<|im_end|>"]
    compiler = ConstraintCompiler(lambda: ModelTokens(tokenizer, tokenizer.get_vocab_size(), (end,)))
    writer = GrammarWriter(added.get, format_tokens(Parsing(tools=name), added))
    grammar = write_answer(writer, None, CallRules(call_grammar(name, added.get), TOOLS_GIVEN, must, False), None)
    detokenizer = Detokenizer(tokenizer)
    closing = [end, *added.values(), *tokenizer.encode('"}])></|\n', add_special_tokens=False).ids]
    request = GenerateRequest("id", "m", "g", b"", Stop(1), 0, 0, parsing=Parsing(tools=name, texts=TEXTS))
    opener = tokenizer.encode(row.calls.openers[0], add_special_tokens=False).ids
    text = [] if must else tokenizer.encode("I look.\n", add_special_tokens=False).ids
    ends = 0
    for seed in range(6):
        tokens = drawn(
            grammar, seed, free=seed * 8, compiler=compiler, begun=[*text, *opener], closing=closing, ends=(end,)
        )
        if len(tokens) >= 1_000:  # it drew something long
            continue
        ends += 1
        stream = text_stream(request, detokenizer)
        marks = answer_marks(Parsing(tools=name), detokenizer).marks
        message = message_of(parser_for(request, 0, marks).parse(*map(stream.push, tokens), stream.finish()))
        assert called(message)
        assert (message.content or "") == ("" if must else "I look.")
    assert ends
    matcher = compiler.matcher(Constraint(LARK, grammar), 0, Stop(max_tokens=9))
    matcher.follow([end])
    assert bool(matcher.error) == must  # without calls, if they are not asked for


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "qwen3_coder"])
def test_one_call_is_one(name: str) -> None:
    grammar = written(name, one=True)
    assert all(len(called(parsed(answer(grammar, seed), name))) == 1 for seed in range(5))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "llama3_json"])
def test_with_strict_tools_an_answer_is_text_or_valid_calls(name: str) -> None:
    grammar = written(name, must=False)
    seen = set()
    for seed in range(12):
        message = parsed(answer(grammar, seed, free=seed % 4 * 4), name)
        seen.add(bool(called(message)))
    assert False in seen  # text is still allowed


def test_a_spelled_opener_is_no_text() -> None:
    """Else a call that is spelled token by token would escape the grammar."""
    matcher = COMPILER.matcher(Constraint(LARK, written("hermes", must=False)), 0, Stop(max_tokens=9))
    spelled = [token for part in ("<", "tool_call") for token in MODEL.tokenizer.encode(part).ids]
    matcher.follow(spelled)
    assert not matcher.error
    end = MODEL.tokenizer.encode(">", add_special_tokens=False).ids[0]
    assert not matcher.mask()[end >> 3] >> (end & 7) & 1


def test_newer_mistral_vocabularies_have_the_newer_format() -> None:
    grammar = call_grammar("mistral", {"[ARGS]": 5}.get)
    writer = GrammarWriter({"[ARGS]": 5, "[TOOL_CALLS]": 6}.get, ("[ARGS]", "[TOOL_CALLS]"))
    assert '<[6]> "stop" <[5]>' in write_answer(writer, None, CallRules(grammar, TOOLS_GIVEN, True, False), None)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_ends_within_its_budget(begun: bool, budget: int) -> None:
    writer = GrammarWriter(MODEL.added_tokens.get, ("<think>", "</think>"))
    grammar = write_answer(writer, None, None, Reasoning(THINK, begun, budget))
    for seed in range(10):
        tokens = drawn(grammar, seed, free=30)
        opened = tokens[:1] == [MODEL.added_tokens["<think>"]]
        if begun or opened:
            assert tokens.index(MODEL.added_tokens["</think>"]) - opened <= budget


def test_reasoning_that_ends_in_words_precedes_the_content_and_has_no_budget() -> None:
    writer = GrammarWriter(lambda mark: None)
    content = writer.json({"type": "object", "additionalProperties": False})
    grammar = write_answer(writer, content, None, Reasoning(GRANITE, True))
    text = "Well, well. Here's my response:\n{}"
    matcher = COMPILER.matcher(Constraint(LARK, grammar), 0, Stop(max_tokens=99))
    matcher.follow(MODEL.tokenizer.encode(text, add_special_tokens=False).ids)
    assert matcher.matcher.is_accepting()
    with pytest.raises(CannotExpress):
        write_answer(writer, content, None, Reasoning(GRANITE, True, 8))


@pytest.mark.parametrize("name", HARMONY)
def test_harmony_calls_follow_an_analysis(name: str) -> None:
    writer = GrammarWriter(lambda mark: None, HARMONY_MARKS)
    calls = CallRules(call_grammar(name, lambda mark: None), TOOLS_GIVEN, True, False)
    grammar = write_answer(writer, None, calls, Reasoning(None))
    matcher = COMPILER.matcher(Constraint(LARK, grammar), 0, Stop(max_tokens=99))
    analysis = "<|channel|>analysis<|message|>They stop.<|end|><|start|>assistant"
    text = analysis + "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    matcher.follow(MODEL.tokenizer.encode(text, add_special_tokens=False).ids)
    assert matcher.matcher.is_accepting()
    assert called(parsed(text, name, "gpt_oss")) == [("stop", {})]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"type": "object", "oneOf": []}, "oneOf"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "'b' is required"),
        ({"type": "object", "properties": {"a<b": {}}}, "such a name"),
    ],
)
def test_a_strict_schema_that_a_format_cannot_keep_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(CannotExpress, match=says):
        written("qwen3_coder", tools=(Tool("f", schema, True),))


TEXTUAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "plain": {"enum": ["1", "2"]},
        "behind": {"$ref": "#/$defs/again"},
        "fixed": {"const": "5"},
        "both": {"allOf": [{"$ref": "#/$defs/code"}, {"enum": ["2", "3"]}]},
        "either": {"anyOf": [{"const": "7"}, {"$ref": "#/$defs/code"}]},
        "maybe": {"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]},
        "none": {"type": ["string", "null"], "enum": [None, "true"]},
        "short": {"type": ["string", "null"], "minLength": 1, "maxLength": 3},
        "mixed": {"enum": ["1", 2]},
        "number": {"$ref": "#/$defs/count"},
    },
    "additionalProperties": False,
    "$defs": {
        "code": {"type": "string", "enum": ["1", "2"]},
        "again": {"$ref": "#/$defs/code"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
}
TEXTUAL["required"] = list(TEXTUAL["properties"])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_text_that_looks_like_a_number_stays_text(name: str) -> None:
    """Whether ``1`` is a text is said by the schema only, however it says so."""
    described = {"type": "function", "function": {"name": "f", "parameters": TEXTUAL, "strict": True}}
    parsing = answer_parsing(ParserNames("", name), [described], lambda count: "", one_call=False)
    assert parsing is not None
    grammar = written(name, one=True, tools=(Tool("f", TEXTUAL, True),))
    for seed in range(8):
        request = GenerateRequest("id", "m", "g", b"", Stop(1), 0, 0, parsing=parsing)
        message = message_of(parser_for(request, 0).parse(answer(grammar, seed, free=400, most=600)))
        assert message.tool_calls is not UNSET
        (call,) = message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), TEXTUAL)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("required", [None, 5, {"a": 1}, ["a", 3]])
def test_what_no_schema_may_say_is_ignored_in_tools_that_are_not_strict(name: str, required: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": required}
    written(name, tools=(Tool("f", parameters, False),))
    written("hermes", tools=(Tool("f", parameters, False),))


def test_a_refusal_names_the_tool() -> None:
    tools = (Tool("fine", NO_PARAMETERS, True), Tool("other", {"type": "object", "oneOf": []}, True))
    with pytest.raises(CannotExpress, match=r"tool 'other'.*oneOf"):
        written("glm45", tools=tools)
