from typing import Any

import msgspec
import pytest

from penstock.gateway.apis.responses.bodies import (
    ToolNames,
    chat_tools,
    check_count,
    custom_input,
    input_rules,
    left_out,
    parse_response,
)
from penstock.gateway.apis.responses.chat import chat_of
from penstock.schemas.errors import Code, ServingError


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}


def space(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": list(tools)}


def test_a_function_of_a_namespace_keeps_its_name_unless_another_has_it() -> None:
    tools = [function("run"), space("a", function("find"), function("run")), space("b", function("find"))]
    names = ToolNames(tools)
    made, places = chat_tools(tools, names)
    assert [tool["function"]["name"] for tool in made] == ["run", "a__find", "a__run", "b__find"]
    assert places["tools[2].function"] == "tools[1].tools[1]"
    assert list(made[1]["function"]) == ["name", "parameters"]  # a template prints them in this order
    for namespace, name in (("", "run"), ("a", "find"), ("a", "run"), ("b", "find")):
        assert names.own(names.shown(namespace, name)) == (namespace, name)
    assert ToolNames([space("a", function("find"))]).shown("a", "find") == "find"


def test_a_model_may_write_the_namespace_in_front_of_a_name() -> None:
    custom = {"type": "custom", "name": "patch"}
    names = ToolNames([function("a__run"), space("a", function("find"), function("run"), custom)])
    for written in ("find", "a.find", "a__find"):
        assert names.own(written) == ("a", "find")
    assert names.own("a__run") == ("", "a__run"), "a function of this name goes before"
    assert names.own("a.run") == ("a", "run")
    assert names.kind("a.patch") == "custom"
    assert names.own("b.find") == ("", "b.find")


def test_no_two_functions_have_one_name_whatever_namespaces_are_called() -> None:
    tools = [
        function("a__find"), space("a", function("find"), function("b__x")), space("b", function("find")),
        space("a__b", function("x")), space("c", function("x"), function("b__x")),
    ]  # fmt: skip
    names = ToolNames(tools)
    made, _ = chat_tools(tools, names)
    shown = [tool["function"]["name"] for tool in made]
    assert len(set(shown)) == len(shown) == 7
    for namespace, name in (("", "a__find"), ("a", "find"), ("a", "b__x"), ("a__b", "x"), ("c", "x")):
        assert names.own(names.shown(namespace, name)) == (namespace, name)


def test_functions_of_namespaces_count_like_others() -> None:
    tools = [space("a", *[function(f"f{number}") for number in range(513)])]
    with pytest.raises(ServingError, match="513 functions, namespaces included; at most 512") as refused:
        check_count(tools)
    assert refused.value.param == "tools"


def test_a_function_that_several_searches_find_is_shown_and_counted_once() -> None:
    tools = [space("a", *[function(f"f{at}") for at in range(first, first + 256)]) for first in (0, 128, 256)]
    tools.append(space("a", function("f0", defer_loading=True), function("f1", description="other")))
    with pytest.raises(ServingError, match="513 functions"):
        check_count(tools)
    made, places = chat_tools(tools, ToolNames(tools))
    assert [each["function"]["name"] for each in made] == [*(f"f{at}" for at in range(512)), "f1"]
    assert places["tools[511].function"] == "tools[2].tools[255]"
    assert places["tools[512].function"] == "tools[3].tools[1]"
    check_count(tools[:3])


@pytest.mark.timeout(20)
def test_names_of_too_many_functions_are_not_compared() -> None:
    """Of ``a``, ``a__a``, …, each way to split a name is a namespace and a function: all want the same name."""
    names = ["__".join("a" * (number + 1)) for number in range(2000)]
    tools = [[space(first, function(last))] for first, last in zip(names, reversed(names), strict=True)]
    given = [{"type": "additional_tools", "tools": [*each, function(each[0]["tools"][0]["name"])]} for each in tools]
    body = msgspec.json.encode({"model": "m", "input": [*given, {"role": "user", "content": "a"}]})
    with pytest.raises(ServingError, match="4000 functions, namespaces included; at most 512"):
        chat_of(parse_response(body))


def test_a_call_in_the_history_of_a_tool_that_is_gone_keeps_its_name() -> None:
    names = ToolNames([function("run")])
    assert names.shown("a", "find") == "find"
    assert names.own("find") == ("", "find")


def test_a_search_of_the_web_is_left_out_beside_functions_and_refused_alone() -> None:
    search = {"type": "web_search", "external_web_access": False}
    tools = [search, function("run")]
    assert left_out(tools) == ["tools[0]"]
    made, places = chat_tools(tools, ToolNames(tools))
    assert [tool["function"]["name"] for tool in made] == ["run"]
    assert places["tools[0].function"] == "tools[1]"
    with pytest.raises(ServingError, match="'web_search'"):
        chat_tools([search], ToolNames([search]))


SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}


def test_tools_that_items_bring_are_offered_once_and_their_errors_name_the_item() -> None:
    found = space("mail", function("send"))
    given = [
        {"type": "additional_tools", "role": "developer", "tools": [SEARCH, {"type": "custom", "name": "exec"}]},
        {"role": "user", "content": "hi"},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "mail"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [found]},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [found]},
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": []},
    ]
    body = parse_response(msgspec.json.encode({"model": "m", "input": given, "tools": [function("run")]}))
    chat = chat_of(body)
    assert [tool["function"]["name"] for tool in chat.body.tools or ()] == ["run", "tool_search", "exec", "send"]
    assert [(each.role, each.content) for each in chat.body.messages] == [
        ("user", "hi"),
        ("assistant", None),
        ("tool", "send"),
        ("tool", "send"),
    ]
    assert chat.places["tools[3].function"] == "input[3].tools[0].tools[0]"
    given = [{"type": "additional_tools", "tools": [{"type": "shell"}]}, {"role": "user", "content": "hi"}]
    bad = msgspec.json.encode({"model": "m", "input": given})
    with pytest.raises(ServingError, match=r"input\[0\].tools\[0\]: tools of type 'shell'") as refused:
        chat_of(parse_response(bad))
    assert refused.value.param == "input[0].tools[0].type"


@pytest.mark.timeout(20)
def test_tools_of_many_items_are_told_apart_in_linear_time() -> None:
    tools = [[function(f"f{item}_{number}") for number in range(512)] for item in range(40)]
    given = [{"type": "additional_tools", "role": "developer", "tools": each} for each in tools]
    with pytest.raises(ServingError, match="20480 functions, namespaces included; at most 512"):
        chat_of(
            parse_response(msgspec.json.encode({"model": "m", "input": [*given, {"role": "user", "content": "a"}]}))
        )


def test_a_search_by_the_server_is_left_out_beside_tools_and_one_by_the_client_is_a_function() -> None:
    server = {"type": "tool_search"}
    assert left_out([server, function("run")]) == ["tools[0]"]
    assert left_out([SEARCH]) == []
    made, _ = chat_tools([SEARCH], ToolNames([SEARCH]))
    assert [tool["function"]["name"] for tool in made] == ["tool_search"]
    with pytest.raises(ServingError, match="'tool_search'"):
        chat_tools([server], ToolNames([server]))


def test_a_grammar_of_a_custom_tool_in_a_namespace_is_enforced_under_its_name_for_the_model() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    inner = {"type": "custom", "name": "exec", "format": form}
    tools = [space("a", inner), space("b", inner)]
    assert list(input_rules(tools)) == ["a__exec", "b__exec"]


def test_what_another_server_ran_is_left_out_of_the_history() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    body = parse_response(msgspec.json.encode({"model": "m", "input": [search, {"role": "user", "content": "hi"}]}))
    assert [each.role for each in chat_of(body).body.messages] == ["user"]


def test_the_text_of_a_custom_tool_is_found_whatever_the_model_calls_it() -> None:
    for arguments in ('{"input": "*** Begin"}', '{"patch": "*** Begin"}', '"*** Begin"', "*** Begin"):
        assert custom_input(arguments) == "*** Begin"
    assert custom_input('{"input": "a", "note": "b"}') == "a"
    for unclear in ('{"a": "b", "c": "d"}', '{"a": 1}', "{}", '{"a": "b'):
        assert custom_input(unclear) == unclear


def test_a_custom_tool_is_a_function_of_one_text_and_its_grammar_is_told() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": form}
    plain = {"type": "custom", "name": "exec", "format": {"type": "text"}}
    tools = [{"type": "image_generation"}, patch, plain, function("run")]
    names = ToolNames(tools)
    made, places = chat_tools(tools, names)
    first, second, _ = (tool["function"] for tool in made)
    assert first["name"] == "apply_patch"
    assert first["description"].startswith("Edits files.\n\n")
    assert first["description"].endswith('start: "a"')
    assert first["parameters"]["required"] == ["input"]
    assert list(second) == ["name", "parameters"]
    assert places["tools[0].function"] == "tools[1]"
    kinds = [names.kind(name) for name in ("apply_patch", "exec", "run", "other")]
    assert kinds == ["custom", "custom", "function", "function"]
    assert left_out(tools) == ["tools[0]"]
    assert list(input_rules(tools)) == ["apply_patch"]
    rule = input_rules(tools)["apply_patch"]
    assert rule.schema["properties"]["input"] == {"type": "string", "pattern": "^(?:(?:a))$"}
    assert "pattern" not in first["parameters"]["properties"]["input"], "the model is told in words"
    assert rule.given.text == 'start: "a"'


def test_a_grammar_without_an_expression_is_told_and_named_as_ignored() -> None:
    nested = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
    other = {"type": "grammar", "syntax": "lark", "definition": "start: A\nA: /a+/ & ~/aa/"}
    tools = [{"type": "custom", "name": name, "format": form} for name, form in (("run", nested), ("apply", other))]
    assert list(input_rules(tools)) == ["run"]
    assert left_out(tools) == ["tools[1].format"]


def test_nested_rules_of_all_tools_have_one_limit_of_time() -> None:
    slow = "start: a\n" + "".join(f'{name}: a b c d e f g h | "x"\n' for name in "abcdefgh")
    forms = [{"type": "grammar", "syntax": "lark", "definition": text} for text in (slow, 'start: "(" start ")" | "x"')]
    tools = [{"type": "custom", "name": str(number), "format": form} for number, form in enumerate(forms)]
    assert list(input_rules(tools[::-1])) == ["1"]
    assert list(input_rules(tools)) == []


def test_the_grammars_of_all_tools_have_one_limit() -> None:
    doubled = "start: a0\n" + "".join(f"a{at}: a{at + 1} a{at + 1}\n" for at in range(12)) + 'a12: "abc"'
    short = {"type": "grammar", "syntax": "lark", "definition": doubled}
    form = {"type": "grammar", "syntax": "regex", "definition": "x" * 60_000}
    tools = [{"type": "custom", "name": name, "format": form} for name in ("one", "two", "three")]
    assert list(input_rules(tools)) == ["one"]
    copies = [{"type": "custom", "name": str(number), "format": short} for number in range(9)]
    assert 1 <= len(input_rules(copies)) < 5
    assert left_out(tools) == ["tools[1].format", "tools[2].format"]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"syntax": "lark", "definition": "start: x"}, "of tool 'apply': line 1: x is not defined"),
        ({"syntax": "gbnf", "definition": "x"}, "needs syntax, 'lark' or 'regex'"),
        ({"syntax": "regex"}, "and definition, a text"),
    ],
)
def test_a_format_that_is_no_grammar_is_refused_by_name(form: dict[str, Any], words: str) -> None:
    tools = [function("run"), {"type": "custom", "name": "apply", "format": {"type": "grammar", **form}}]
    with pytest.raises(ServingError, match=words) as refused:
        input_rules(tools)
    assert (refused.value.code, refused.value.param) == (Code.invalid_request, "tools[1].format.definition")
    assert left_out(tools) == []


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ({"type": "code_interpreter"}, "tools[1].type"),
        ({"type": "namespace", "tools": []}, "tools[1].name"),
        (space("a") | {"tools": 3}, "tools[1].tools"),
        (space("a", space("b")), "tools[1].tools[0].type"),
        (space("a") | {"tools": [3]}, "tools[1].tools[0].type"),
    ],
)
def test_what_is_not_supported_is_named(tool: dict[str, Any], place: str) -> None:
    tools = [function("run"), tool]
    with pytest.raises(ServingError) as refused:
        chat_tools(tools, ToolNames(tools))
    assert refused.value.param == place
