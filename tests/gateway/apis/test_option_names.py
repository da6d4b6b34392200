"""Options that no API knows are named, not silently dropped."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.endpoints import MOST, check_options, ignored_options, listed, unapplied_options
from penstock.gateway.apis.responses.bodies import LEFT_OUT
from penstock.gateway.base.request_bodies import CHAT, MESSAGE, OLLAMA_CHAT, RESPONSE, PrepareContext
from penstock.infra.model import modeldir
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import CONSTRAINT_LARK
from tests.tiny_model import write

SEED = unapplied_options(None, ["seed"])


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSE, MESSAGE])
def test_only_what_no_api_knows_is_unknown(endpoint: str) -> None:
    body = {"model": "m", "stream": True, "metadata": {}, "nosuch": {"temperature": 1}, "temperature": 1}
    assert ignored_options(endpoint, json.dumps(body).encode()) == ["nosuch"]
    check_options(endpoint, b'{"model": "m"}')
    with pytest.raises(ServingError, match="unknown options: nosuch") as caught:
        check_options(endpoint, json.dumps(body).encode())
    assert caught.value.param == "nosuch"


@pytest.mark.parametrize(
    ("endpoint", "options", "unknown"),
    [
        (CHAT, {"stream_options": {"include_usage": True, "nosuch": 1}}, ["stream_options.nosuch"]),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": 1}, "b": 1}}},
         ["response_format.json_schema.b"]),
        (CHAT, {"messages": [{"role": "user", "content": "a", "refusal": None}], "tools": [{"x": {"y": 1}}]}, []),
        (CHAT, {"chat_template_kwargs": {"x": 1}, "logit_bias": {"5": 1}, "tool_choice": {"x": 1}}, []),
        (CHAT, {"stream_options": [{"nosuch": 1}], "response_format": "json"}, ["stream_options[0].nosuch"]),
        (RESPONSE, {"reasoning": {"effort": "low", "mode": "x"}, "text": {"format": {"type": "text", "y": 1}, "z": 1}},
         ["reasoning.mode", "text.format.y", "text.z"]),
        (RESPONSE, {"input": [{"role": "user", "content": [], "x": 1}]}, []),
        (MESSAGE, {"thinking": {"type": "enabled", "display": "omitted"}, "output_config": {"format": {"a": 1}}},
         ["thinking.display", "output_config.format.a"]),
        (MESSAGE, {"tools": [{"name": "a", "cache_control": {}, "input_examples": []}]}, ["tools[0].input_examples"]),
        (MESSAGE, {"tools": [{"name": "a", "eager_input_streaming": True}]}, []),
        (MESSAGE, {"context_management": {"edits": [{"type": "a"}, {"type": "a", "when": 1}]}},
         ["context_management.edits[1].when"]),
    ],
)  # fmt: skip
def test_options_within_options_are_named_too(endpoint: str, options: dict[str, object], unknown: list[str]) -> None:
    body = json.dumps({"model": "m", **options}).encode()
    assert list(ignored_options(endpoint, body)) == unknown
    if unknown:
        with pytest.raises(ServingError, match="unknown options") as caught:
            check_options(endpoint, body)
        assert caught.value.param == unknown[0]


def test_many_unknown_options_in_a_list_cost_no_more_than_can_be_shown() -> None:
    body = json.dumps({"tools": [{"name": "a", "x": 1}] * 10_000}).encode()
    assert len(ignored_options(MESSAGE, body)) == MOST + 1


REASONS = "{{ enable_thinking }}{{ reasoning_effort }}{{ verbosity }}{% for m in messages %}{{ m.content }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reasoning", "endpoint", "options", "ignored"),
    [
        (REASONS, "qwen3", CHAT, {"reasoning_effort": "low", "thinking": {"type": "disabled"}, "think": False}, []),
        (REASONS, "qwen3", RESPONSE, {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}, []),
        (REASONS, "qwen3", MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 5}}, []),
        (REASONS, "qwen3", CHAT, {"chat_template_kwargs": {"enable_thinking": False, "x": 1}},
         ["chat_template_kwargs.x"]),
        (PLAIN, "qwen3", CHAT, {"reasoning_effort": "low", "think": "low"}, ["reasoning_effort", "think"]),
        (PLAIN, "qwen3", CHAT, {"reasoning_effort": "none", "reasoning": {"effort": "high", "exclude": True}},
         ["reasoning.effort"]),
        (PLAIN, "qwen3", CHAT, {"reasoning": False, "think": None, "thinking": {"type": "disabled"}},
         ["reasoning", "thinking.type"]),
        (PLAIN, "qwen3", CHAT, {"reasoning": {"enabled": True}, "think": True, "thinking": {"type": "enabled"}}, []),
        (PLAIN, "", CHAT, {"reasoning": {"enabled": True}, "think": False, "reasoning_effort": "none"},
         ["reasoning.enabled"]),
        (PLAIN, "", RESPONSE, {"reasoning": {"effort": "low"}, "text": {"format": {}, "verbosity": "low"}},
         ["reasoning.effort", "text.verbosity"]),
        (PLAIN, "", MESSAGE, {"thinking": {"type": "adaptive", "budget_tokens": 5}, "output_config": {"effort": "low"}},
         ["output_config.effort", "thinking.budget_tokens"]),
        (PLAIN, "", OLLAMA_CHAT, {"think": "high"}, ["think"]),
        (PLAIN, "", RESPONSE, {"stream_options": {"include_obfuscation": False}}, []),
        (PLAIN, "", RESPONSE, {"stream_options": {"include_obfuscation": True}},
         ["stream_options.include_obfuscation"]),
    ],
)  # fmt: skip
def test_options_that_a_model_does_nothing_with_are_named(
    tmp_path: Path, template: str, reasoning: str, endpoint: str, options: dict[str, object], ignored: list[str]
) -> None:
    """But not refused: the next model may apply them."""
    model = modeldir.load(write(tmp_path / "m", template=template))
    able = frozenset({CONSTRAINT_LARK})
    context = PrepareContext(model, ("m",), "gw1", parsers=ParserNames(reasoning, ""), logits_processors=able)
    body = json.dumps({"model": "m", **options}).encode()
    assert list(ignored_options(endpoint, body, unapplied_options(context))) == ignored
    check_options(endpoint, body)


def test_a_budget_of_thoughts_that_no_worker_enforces_is_named(tmp_path: Path) -> None:
    model, body = modeldir.load(write(tmp_path / "m", template=REASONS)), b'{"thinking": {"budget_tokens": 5}}'
    context = PrepareContext(model, ("m",), "gw1", parsers=ParserNames("qwen3", ""), logits_processors=frozenset())
    for each in (context, context._replace(logits_processors=frozenset({CONSTRAINT_LARK}), carries_chat=True)):
        assert list(ignored_options(MESSAGE, body, unapplied_options(each))) == ["thinking.budget_tokens"]


GRAMMAR = "start: A\nA: /a+/ & ~/aa/"  # no expression


def test_tools_of_items_that_no_model_is_told_of_are_named() -> None:
    told = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}}
    tools = [{"type": "function", "name": "f"}, {"type": "web_search"}, told]
    items = [{"role": "user", "content": "a"}, {"type": "additional_tools", "tools": tools}, {"tools": tools}]
    body = json.dumps({"input": items, "tools": [{"type": "image_generation"}]}).encode()
    assert ignored_options(RESPONSE, body) == ["tools[0]", "input[1].tools[1]", "input[1].tools[2].format"]
    texts = {"input": "additional_tools", "tools": [{"type": "function"}, {"type": "web_search"}]}
    assert ignored_options(RESPONSE, json.dumps(texts).encode()) == ["tools[1]"]


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_tools_that_no_model_is_told_of_are_named(kind: str) -> None:
    body = json.dumps({"model": "m", "tools": [{"type": "function", "name": "f"}, {"type": kind}]}).encode()
    assert ignored_options(RESPONSE, body) == ["tools[1]"]
    with pytest.raises(ServingError, match=r"unknown options: tools\[1\]"):
        check_options(RESPONSE, body)
    assert ignored_options(RESPONSE, b'{"tools": ["web_search"], "input": "hi"}') == []


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSE])
def test_an_option_that_no_worker_applies_is_named_where_it_is_given(endpoint: str) -> None:
    known = {"seed"} if endpoint == CHAT else set()
    for body, named in (
        ({"model": "m", "seed": 3}, known),
        ({"model": "m", "seed": None}, set()),
        ({"model": "m", "messages": [{"content": "a seed"}]}, set()),
        ({"model": "m", "seed": 0, "nosuch": 1}, {"nosuch"} | known),
    ):
        names = set(ignored_options(endpoint, json.dumps(body).encode(), SEED)) - ({"seed"} - known)
        assert names == named
    assert ignored_options(CHAT, b'{"model": "m", "seed": 3}') == []
    assert ignored_options(CHAT, b'{"seed', SEED) == ()


@given(st.binary(max_size=30) | st.sampled_from([b"[1]", b"{", b"3", b'{"a": 1} x']))
def test_what_is_no_object_has_no_options(data: bytes) -> None:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        assert ignored_options(CHAT, data) == ()


def test_a_body_that_is_nested_too_deeply_is_left_to_the_parser() -> None:
    assert ignored_options(CHAT, b'{"a": ' + b"[" * 100_000) == ()


@given(st.lists(st.text(max_size=80), max_size=40, unique=True))
def test_names_fit_into_a_header_whatever_a_client_sends(names: list[str]) -> None:
    text = listed(names)
    text.encode("latin-1")
    assert text.isprintable()
    assert len(text) < (MOST + 1) * 80


def test_names_that_a_header_cannot_hold_are_counted() -> None:
    assert listed(["a", "b\r\nc"]) == "a, and 1 more"
    assert listed(["ключ", ""]) == "2 with names that cannot be shown"


@pytest.mark.parametrize("option", ["typical_p", "mirostat", "xtc_probability", "dry_multiplier", "top_a", "tfs_z"])
def test_sampling_options_that_no_engine_here_honours_are_named(option: str) -> None:
    body = json.dumps({"model": "m", option: 0.5}).encode()
    assert ignored_options(CHAT, body) == [option]
    with pytest.raises(ServingError, match=option):
        check_options(CHAT, body)
