import json
import re
from typing import Any

import msgspec
import pytest

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, ChatMessage, ContentPart
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.chat.prompt import template_messages
from penstock.gateway.apis.endpoints import ignored_options
from penstock.gateway.apis.messages.bodies import MAX_TOOLS, parse_count, parse_message
from penstock.gateway.apis.messages.objects import message_error
from penstock.gateway.apis.messages.prepare_message import _edited, chat_of, count_message, prepare_message
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.wire import unpack_tokens
from tests.gateway.answers import CONTEXT, NOW

TOOL = {"name": "get_weather", "description": "d", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}}
HI = {"role": "user", "content": "hi"}


def encoded(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "max_tokens": 9, "messages": [HI], **fields}).encode()


def chat(**fields: Any) -> ChatCompletionRequest:
    return chat_of(parse_message(encoded(**fields))).body


def prepared(**fields: Any) -> GenerateRequest:
    found = prepare_message(encoded(**fields), CONTEXT, now_ns=NOW, request_id="r").prepared
    assert isinstance(found, PreparedRequest)
    return found.request


def test_blocks_become_messages_and_results_of_tools_their_own() -> None:
    given = [
        HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            CALL,
            {**CALL, "id": "c2"},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "sun"}]},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    found = chat(messages=given, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]).messages
    assert [message.role for message in found] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert found[0].content == "Be\nbrief."
    turn = found[2]
    assert (turn.content, turn.reasoning_content) == ("I look.", "Hm.")
    assert [(call.id, call.function.arguments) for call in turn.tool_calls or ()] == [
        ("c1", '{"city":"Oslo"}'),
        ("c2", '{"city":"Oslo"}'),
    ]
    assert (found[3].tool_call_id, found[3].content) == ("c1", "rain")
    assert found[5] == ChatMessage("user", [ContentPart("text", "And now?")])
    template_messages(found)  # which a chat template takes


def test_images_become_urls() -> None:
    sources = [
        {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        {"type": "url", "url": "https://a/b"},
    ]
    [message] = chat(
        messages=[{"role": "user", "content": [{"type": "image", "source": source} for source in sources]}]
    ).messages
    assert [part.image_url for part in message.content] == ["data:image/png;base64,AAAA", "https://a/b"]  # type: ignore[union-attr]


def test_options_reach_the_request() -> None:
    request = prepared(
        temperature=0.5, top_p=0.5, top_k=5, stop_sequences=["x"], tools=[TOOL], metadata={"user_id": "u"}
    )
    assert request.stop.max_tokens == 9
    assert request.stop.strings == ("x",)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.5, 5)
    assert request.user == "u"
    assert request.parsing is not None
    assert request.parsing.tools == "hermes"


def test_the_output_is_as_long_as_the_context_has_room_for() -> None:
    request = prepared(max_tokens=1_000_000)
    assert request.stop.max_tokens == CONTEXT.max_model_len - len(request.prompt) // 4


def test_thinking_is_a_variable_of_the_template() -> None:
    assert chat(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    budget = {"type": "enabled", "budget_tokens": 5}
    assert chat(thinking=budget).chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert chat(thinking=budget).max_thinking_tokens == 5
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs is None
    assert chat(output_config={"effort": "low"}).reasoning_effort == "low"


@pytest.mark.parametrize("rest", ["", "\nBe brief.\nx-anthropic-billing-header: quoted"])
def test_the_line_with_which_claude_code_marks_each_request_is_not_in_the_prompt(rest: str) -> None:
    mark = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=71fea;"
    for system in (mark + rest, [{"type": "text", "text": text} for text in filter(None, (mark, rest[1:]))]):
        messages = chat(system=system).messages
        assert [each.content for each in messages if each.role == "system"] == ([rest[1:]] if rest else [])
    quoted = f"See {mark}"
    assert chat(system=quoted).messages[0].content == quoted


def test_a_document_is_its_title_and_text() -> None:
    sources: list[dict[str, Any]] = [
        {"type": "text", "media_type": "text/plain", "data": "a\nb"},
        {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"type": "content", "content": "a\nb"},
    ]
    for source in sources:
        block = {"type": "document", "title": "T", "source": source, "citations": {"enabled": True}}
        for given in (block, {"type": "tool_result", "tool_use_id": "t", "content": [block]}):
            [message] = chat(messages=[{"role": "user", "content": [given]}]).messages
            assert [part.text for part in message.content or ()] == ["T\na\nb"]  # type: ignore[union-attr]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    with pytest.raises(ServingError, match="send their text") as refused:
        chat(messages=[{"role": "user", "content": [pdf]}])
    assert refused.value.param == "messages[0].content[0].source.type"


def test_a_search_result_is_its_title_source_and_text() -> None:
    block = {"type": "search_result", "source": "https://a/b", "title": "T", "content": [{"type": "text", "text": "x"}]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block]}
    asked = [HI, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result, block]}]
    assert [message.content for message in chat(messages=asked).messages[-2:]] == [
        [ContentPart("text", "T\nhttps://a/b\nx")]
    ] * 2


def test_what_another_server_ran_is_left_out_of_the_history() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]}
    failed = {**found, "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}}
    said = [{"type": "compaction", "content": "Before."}, search, found, failed, {"type": "text", "text": "Yes."}]
    turn = chat(messages=[HI, {"role": "assistant", "content": said}, HI]).messages[1]
    assert (turn.content, turn.tool_calls) == ("Before.Yes.", None)


def test_tools_that_anthropics_servers_run_are_left_out_beside_others() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    finder = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    later = {**TOOL, "name": "later", "defer_loading": True}
    asked: dict[str, Any] = {"tools": [search, later, TOOL]}
    assert [tool["function"]["name"] for tool in chat(**asked).tools or ()] == ["get_weather"]
    assert ignored_options("message", encoded(**asked)) == ["tools[0].max_uses", "tools[0]"]
    asked = {"tools": [finder, later, TOOL]}  # nobody searches, so that all are offered
    assert [tool["function"]["name"] for tool in chat(**asked).tools or ()] == ["later", "get_weather"]


def test_a_tool_of_anthropics_is_like_others_if_its_schema_is_given() -> None:
    bash: dict[str, Any] = {"type": "bash_20250124", "name": "bash"}
    with pytest.raises(ServingError, match="use 'custom', or send its input_schema"):
        chat(tools=[bash])
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    asked = [{"type": "web_search_20250305", "name": "web_search"}, {**bash, "input_schema": schema}]
    (tool,) = chat(tools=asked).tools or ()
    assert tool["function"] == {"name": "bash", "parameters": schema}
    search: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "input_schema": schema}
    for tools in ([search], [search, TOOL]):
        assert [each["function"]["name"] for each in chat(tools=tools).tools or ()] == [each["name"] for each in tools]
        assert ignored_options("message", encoded(tools=tools)) == []


def test_a_format_becomes_a_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    constraint = prepared(output_config={"format": {"type": "json_schema", "schema": schema}}).constraint
    assert constraint is not None
    assert '"properties":{"a":{"type":"integer"}}' in constraint.text  # among the model's reasoning marks


def test_a_budget_for_thoughts_is_kept_by_a_model_that_has_none() -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    data = encoded(thinking=thinking)
    plain = prepare_message(data, CONTEXT._replace(parsers=None), now_ns=NOW, request_id="r").prepared
    assert isinstance(plain, PreparedRequest)
    assert plain.request.constraint is None
    assert prepared(thinking=thinking).constraint is not None


def test_a_budget_for_thoughts_that_no_worker_can_enforce_does_not_refuse_the_message() -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    for context in (CONTEXT._replace(logits_processors=frozenset()), CONTEXT._replace(carries_chat=True)):
        made = prepare_message(encoded(thinking=thinking), context, now_ns=NOW, request_id="r").prepared
        assert isinstance(made, PreparedRequest)
        assert made.request.constraint is None


def test_one_call_at_a_time() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert chat(tools=[TOOL], tool_choice=choice).parallel_tool_calls is False


def test_the_count_is_the_prompts() -> None:
    body = {"model": "demo", "messages": [HI], "system": "Be brief.", "tools": [TOOL]}
    assert count_message(json.dumps(body).encode(), CONTEXT).input_tokens == len(prepared(**body).prompt) // 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"system": "s", "messages": [HI, {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "https://a/b"}}]}]},
         "messages[1].content[1].source"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
         "messages[0].content[0].source.type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a"}]}]},
         "messages[0].content[0].id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": "a"}]}]},
         "messages[0].content[0].source"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_under_the_clients_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ServingError) as caught:
        prepared(**fields)
    assert caught.value.param == param
    assert caught.value.code.status in (400, 404)


@pytest.mark.parametrize("begun", ['{"name":', [{"type": "text", "text": '{"name":'}]])
def test_an_answer_continues_the_assistants_last_text(begun: Any) -> None:
    messages = [HI, {"role": "assistant", "content": begun}]
    assert chat(messages=messages).continue_final_message
    ids = unpack_tokens(prepared(messages=messages).prompt)
    assert CONTEXT.model.tokenizer.decode(list(ids), skip_special_tokens=False).endswith('{"name":')
    assert count_message(encoded(messages=messages), CONTEXT).input_tokens == len(ids)


@pytest.mark.parametrize(
    "messages",
    [[HI], [HI, {"role": "assistant", "content": [CALL]}], [HI, {"role": "assistant", "content": "x"}, HI]],
)
def test_other_conversations_are_answered_by_a_message_of_their_own(messages: Any) -> None:
    assert not chat(messages=messages).continue_final_message


def test_a_prefilled_answer_cannot_match_a_schema_as_a_whole() -> None:
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    with pytest.raises(ServingError) as caught:
        chat(messages=[HI, {"role": "assistant", "content": "{"}], output_config=schema)
    assert caught.value.param == "output_config.format"


def test_a_deferred_tool_is_offered_once_a_result_names_it() -> None:
    later = {**TOOL, "name": "later", "defer_loading": True}
    found = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    asked = [HI, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [found]}]
    offered = [
        [tool["function"]["name"] for tool in chat(messages=messages, tools=[later, TOOL]).tools or ()]
        for messages in ([HI], asked)
    ]
    assert offered == [["get_weather"], ["later", "get_weather"]]


def change(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "tool": {"type": "tool_reference", "name": name}}


def define(name: str, **fields: Any) -> dict[str, Any]:
    made = {"type": "tool_definition", "definition": {"name": name, "input_schema": {"type": "object"}, **fields}}
    return {"type": "tool_addition", "tool": made}


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ([change("tool_addition", "later")], ["get_weather", "later"]),
        ([change("tool_removal", "get_weather")], []),
        ([change("tool_removal", "get_weather"), change("tool_addition", "get_weather")], ["get_weather"]),
        ([define("query")], ["get_weather", "query"]),
        (
            [define("get_weather", description="other"), define("query"), change("tool_removal", "query")],
            ["get_weather"],
        ),
        ([define("query", defer_loading=True), change("tool_removal", "get_weather")], ["query"]),
    ],
)
def test_system_messages_change_which_tools_are_offered(changes: Any, offered: list[str]) -> None:
    tools = [TOOL, {**TOOL, "name": "later", "defer_loading": True}]
    told = [{"type": "text", "text": "Tools have changed."}, *changes]
    for message in ({"role": "system", "content": told}, [{"type": "mid_conv_system", "content": told}]):
        given = message if isinstance(message, dict) else {"role": "user", "content": message}
        found = chat(messages=[HI, given], tools=tools)
        assert [tool["function"]["name"] for tool in found.tools or ()] == offered
        assert found.messages[1] == ChatMessage("system", "Tools have changed.")
    assert len(chat(messages=[HI, {"role": "system", "content": changes}], tools=tools).messages) == 1


@pytest.mark.parametrize(
    ("block", "param"),
    [
        (change("tool_addition", "nosuch"), "messages[1].content[0].tool.name"),
        ({**define("a"), "type": "tool_removal"}, "messages[1].content[0].tool"),
        ({"type": "tool_addition", "tool": {"type": "mcp_toolset_reference"}}, "messages[1].content[0].tool"),
        ({"type": "tool_addition"}, "messages[1].content[0].tool"),
        (define("no name"), "messages[1].content[0].tool.definition.name"),
    ],
)
def test_a_change_of_tools_that_cannot_be_made_is_refused(block: dict[str, Any], param: str) -> None:
    with pytest.raises(ServingError) as refused:
        prepared(messages=[HI, {"role": "system", "content": [block]}], tools=[TOOL])
    assert refused.value.param == param


def test_messages_offer_no_more_tools_than_a_body_may() -> None:
    blocks = [define(f"made_{number}") for number in range(MAX_TOOLS)]
    with pytest.raises(ServingError, match=f"{MAX_TOOLS + 1} tools; at most {MAX_TOOLS}"):
        chat(messages=[HI, {"role": "system", "content": blocks}], tools=[TOOL])
    blocks.append(change("tool_removal", "made_0"))
    assert len(chat(messages=[HI, {"role": "system", "content": blocks}], tools=[TOOL]).tools or ()) == MAX_TOOLS


def test_a_system_message_within_a_users_may_be_a_text_and_is_never_nothing() -> None:
    def asked(**content: Any) -> list[ChatMessage]:
        block = {"type": "mid_conv_system", **content}
        return chat(messages=[HI, {"role": "user", "content": [block, {"type": "text", "text": "Go on."}]}]).messages

    assert asked(content="Be brief.")[1] == ChatMessage("system", "Be brief.")
    with pytest.raises(ServingError) as refused:
        asked()
    assert refused.value.param == "messages[1].content[0].content"


def test_a_system_message_may_last_until_the_user_says_more() -> None:
    note: dict[str, Any] = {"role": "system", "clear_at": "next_user_message"}
    for content in ("note", [{"type": "text", "text": "note"}]):
        short = {**note, "content": content}
        assert [each.role for each in chat(messages=[HI, short]).messages] == ["user", "system"]
        assert [each.role for each in chat(messages=[HI, short, HI]).messages] == ["user", "user"]
        assert len(chat(messages=[HI, {**short, "clear_at": "never"}, HI]).messages) == 3


def test_an_error_in_a_tool_behind_a_deferred_one_names_the_clients_place() -> None:
    tools = [{**TOOL, "name": "later", "defer_loading": True}, {**TOOL, "name": "no name"}]
    with pytest.raises(ServingError) as refused:
        prepare_message(encoded(tools=tools), CONTEXT, now_ns=NOW, request_id="r")
    assert refused.value.param is not None
    assert refused.value.param.startswith("tools[1]")


KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
TOOL_USES: dict[str, Any] = {"type": "clear_tool_uses_20250919"}


def worked(turns: int, words: int = 20) -> list[dict[str, Any]]:
    """A conversation of turns with a thought, a call, its result, and another thought."""
    found: list[dict[str, Any]] = []
    for turn in range(turns):
        thought = {"type": "thinking", "thinking": f"thought {turn}"}
        result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": f"result {turn} " + "word " * words}
        found += [
            HI,
            {"role": "assistant", "content": [thought, {**CALL, "id": f"c{turn}"}]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": f"answer {turn}"}]},
        ]
    return [*found, HI]


def edited(turns: int, *edits: dict[str, Any], words: int = 20) -> tuple[str, list[dict[str, Any]] | None, int]:
    """The prompt's text, the edits that are answered, and the tokens that were counted before them."""
    given = {"messages": worked(turns, words), "context_management": {"edits": list(edits)}}
    made = prepare_message(encoded(**given), CONTEXT, now_ns=NOW, request_id="r")
    assert isinstance(made.prepared, PreparedRequest)
    text = CONTEXT.model.tokenizer.decode(list(unpack_tokens(made.prepared.request.prompt)), skip_special_tokens=False)
    counted = count_message(encoded(**given), CONTEXT)
    assert counted.input_tokens == len(made.prepared.request.prompt) // 4
    assert counted.context_management is not msgspec.UNSET
    return text, json.loads(made.client_body)["edits"], counted.context_management.original_input_tokens


def test_results_of_earlier_calls_are_cleared_once_the_prompt_is_long_enough() -> None:
    trigger = {"type": "input_tokens", "value": 100}
    whole, applied, before = edited(5, TOOL_USES)
    assert applied == []  # it has less than 100,000 tokens
    text, applied, first = edited(5, TOOL_USES | {"trigger": trigger})
    assert applied is not None
    [edit] = applied
    assert first == before
    assert (edit["type"], edit["cleared_tool_uses"]) == (TOOL_USES["type"], 2)
    assert edit["cleared_input_tokens"] == before - len(CONTEXT.model.encoder.encode(text, special=True)) > 0
    assert [f"result {turn}" in text for turn in range(5)] == [False, False, True, True, True]
    assert text.count("The result of this call was removed") == 2
    assert text.count("Oslo") == whole.count("Oslo") == 5


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": {"type": "tool_uses", "value": 0}}, ""),
        ({"keep": {"type": "tool_uses", "value": 1}, "trigger": {"type": "tool_uses", "value": 3}}, "3"),
        ({"trigger": {"type": "tool_uses", "value": 4}}, "0123"),
        ({"exclude_tools": ["get_weather"]}, "0123"),
        ({"clear_at_least": {"type": "input_tokens", "value": 5000}}, "0123"),
    ],
)
def test_which_results_are_kept(options: dict[str, Any], kept: str) -> None:
    text, _, _ = edited(4, {**TOOL_USES, "trigger": {"type": "input_tokens", "value": 1}, **options})
    assert "".join(str(turn) for turn in range(4) if f"result {turn}" in text) == kept


def test_calls_of_several_turns_with_one_id_are_told_apart_by_their_places() -> None:
    messages = json.loads(json.dumps(worked(4)).replace('"c1"', '"c0"').replace('"c2"', '"c0"').replace('"c3"', '"c0"'))
    edit = {**TOOL_USES, "keep": {"type": "tool_uses", "value": 2}, "trigger": {"type": "tool_uses", "value": 1}}
    body, applied, _ = _edited(parse_message(encoded(messages=messages, context_management={"edits": [edit]})), CONTEXT)
    text = str(chat_of(body).body.messages)
    assert [f"result {turn}" in text for turn in range(4)] == [False, False, True, True]
    assert [each.cleared_tool_uses for each in applied or ()] == [2]


def test_arguments_of_cleared_calls_are_removed_if_that_is_asked() -> None:
    options = {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 1}}
    for inputs, left in ((True, 1), (["get_weather"], 1), (["other"], 4), (False, 4)):
        assert edited(4, {**TOOL_USES, **options, "clear_tool_inputs": inputs})[0].count("Oslo") == left


@pytest.mark.parametrize(
    ("keep", "kept"), [(None, 1), ({"type": "thinking_turns", "value": 2}, 2), ("all", 3), ({"type": "all"}, 3)]
)
def test_thoughts_of_earlier_turns_are_cleared(keep: Any, kept: int) -> None:
    given = parse_message(encoded(messages=worked(3), context_management={"edits": [{**KEEP_ALL, "keep": keep}]}))
    body, applied, _ = _edited(given, CONTEXT)
    thoughts = [each.reasoning_content for each in chat_of(body).body.messages if each.reasoning_content]
    assert thoughts == [f"thought {turn}" for turn in range(3 - kept, 3) for _ in range(2)]
    assert [each.cleared_thinking_turns for each in applied or ()] == ([3 - kept] if kept < 3 else [])


@pytest.mark.parametrize(
    ("edit", "at"),
    [
        ({"type": "compact_20260112"}, ""),
        ({**KEEP_ALL, "keep": {"type": "tool_uses", "value": 1}}, ".keep"),
        ({**KEEP_ALL, "keep": {"type": "thinking_turns"}}, ".keep.value"),
        ({**KEEP_ALL, "trigger": {"type": "tool_uses", "value": 1}}, ".trigger"),
        ({**TOOL_USES, "keep": "all"}, ".keep"),
        ({**TOOL_USES, "clear_at_least": {"type": "tool_uses", "value": 1}}, ".clear_at_least"),
    ],
)
def test_an_edit_that_is_not_known_is_refused(edit: dict[str, Any], at: str) -> None:
    for parse in (parse_message, parse_count):
        with pytest.raises(ServingError) as refused:
            parse(encoded(context_management={"edits": [edit]}))
        assert refused.value.param == f"context_management.edits[0]{at}"
    with pytest.raises(ServingError, match="is there twice"):
        parse_message(encoded(context_management={"edits": [KEEP_ALL, KEEP_ALL]}))


@pytest.mark.parametrize("words", [1_000, 20_000])  # a length that is counted, and one that is not
def test_a_prompt_beyond_the_context_is_served_if_its_edits_make_room(words: int) -> None:
    with pytest.raises(ServingError) as refused:
        edited(10, KEEP_ALL, words=words)
    # Words and numbers that Claude Code reads before it compacts a conversation.
    assert re.match(r"the prompt is too long: (at least )?\d+ tokens > 8191\. ", refused.value.message)
    _, applied, before = edited(
        10,
        TOOL_USES
        | {
            "keep": {"type": "tool_uses", "value": 0},
            "trigger": {"type": "input_tokens", "value": 8_000},
            "clear_at_least": {"type": "input_tokens", "value": 9_000},
        },
        words=words,
    )
    assert applied is not None
    assert applied[0]["cleared_tool_uses"] == 10
    assert before >= CONTEXT.max_model_len


def test_what_claude_code_sends_is_served_and_nothing_of_it_ignored() -> None:
    """The fields of its version 2.1.197, to a worker that enforces no budgets."""
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "demo", "max_tokens": 32_000, "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [KEEP_ALL]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "system": [{"type": "text", "text": "Be brief.", **cached}],
        "tools": [TOOL, {**TOOL, "name": "mcp__timer__set"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"}]},
            {"role": "system", "content": "Agents: b"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "unsigned"}, CALL]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "hi", "is_error": False, **cached}]},
        ],
    }  # fmt: skip
    data = json.dumps(body).encode()
    context = CONTEXT._replace(logits_processors=frozenset())
    made = prepare_message(data, context, now_ns=NOW, request_id="r").prepared
    assert isinstance(made, PreparedRequest)
    assert ignored_options("message", data) == []


def test_a_failed_call_is_an_error_to_the_model_too() -> None:
    def result(content: Any) -> Any:
        block = {"type": "tool_result", "tool_use_id": "c1", "content": content, "is_error": True}
        [message] = chat(messages=[{"role": "user", "content": [block]}]).messages
        content = message.content
        return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())

    for content in ("no such file", [{"type": "text", "text": "no such file"}]):
        assert result(content) == "Error: no such file"
    for content in ("Error: no", "<tool_use_error>no</tool_use_error>"):
        assert result(content) == content
    assert result(None) == "Error: "


def test_a_thread_is_refused_with_what_clients_act_on() -> None:
    with pytest.raises(ServingError) as refused:
        parse_message(encoded(thread={"type": "create"}))
    body = json.loads(msgspec.json.encode(message_error(refused.value, "")))
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert b"details" not in msgspec.json.encode(message_error(ServingError(Code.invalid_request, "m"), ""))
