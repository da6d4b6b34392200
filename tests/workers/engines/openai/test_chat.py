"""What a server of chats is sent, and its parsed answers as tokens that gateways parse again."""

import json
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.infra.model import modeldir
from penstock.infra.text.parsers.families import PARSED
from penstock.infra.text.parsers.reader import SPACE
from penstock.infra.text.parsers.registry import answer_marks, parser_for, text_stream
from penstock.schemas.done import Usage
from penstock.schemas.requests import GenerateRequest, Parsing, Sampling, Stop
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external.sequences import Token
from penstock.workers.engines.openai.chat import BY_FLAGS, AnswerText, ChatReader, chat_body_of, check_chat, continues
from penstock.workers.engines.openai.protocol import BadAnswer, ServerAbilities
from tests.properties import examples

INFO = EngineInfo("openai", 16, 64, 4, 4096, 4096, (2,), kv_events=False)
FLAGS = ServerAbilities("m", takes_ids=False, sends_ids=False, chat=True, continues=BY_FLAGS, schemas=True)
NEITHER = FLAGS._replace(continues=None, schemas=False)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "top_k": 4}


@cache
def tokenizer() -> Tokenizer:
    own = Tokenizer.from_str(modeldir.load(modeldir.TINY).tokenizer.to_str())
    own.encode_special_tokens = True
    return own


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def asked(chat: dict[str, Any] = CHAT, said: str = "", **more: Any) -> SequenceRequest:
    sampling, stop = Sampling(seed=5), Stop(chat.get("max_tokens", 4000))
    return SequenceRequest(
        "k", [20, 21], sampling, stop, generated=ids(said), chat=msgspec.json.encode(chat), **more
    )  # fmt: skip


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def counts(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details},
    }


def call(index: int, name: str = "", arguments: Any = None, call_id: str | None = None) -> dict[str, Any]:
    return {"index": index, "id": call_id, "function": {"name": name or None, "arguments": arguments}}


def read(*chunks: dict[str, Any], abilities: ServerAbilities = FLAGS) -> tuple[ChatReader, list[Token]]:
    reader = ChatReader(asked(), (), abilities, INFO, tokenizer())
    out = [token for each in chunks for token in reader.take(each)]
    return reader, out + reader.end()


def shown(tokens: list[Token]) -> dict[str, Any]:
    """What a gateway makes of the tokens, one after the other."""
    parsing = Parsing(PARSED, PARSED)
    request = GenerateRequest("r", "m", "g", b"", Stop(9), 0, 0, parsing=parsing)
    detokenizer = modeldir.load(modeldir.TINY).detokenizer
    parser = parser_for(request, 0, answer_marks(parsing, detokenizer).marks)
    stream = text_stream(request, detokenizer)
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    deltas = [parser.push(stream.push(each.token)) for each in tokens if each.stop_token is None]
    for delta in [*deltas, parser.finish(stream.finish())]:
        if delta is not None:
            found["content"] += delta.content or ""
            found["reasoning"] += delta.reasoning_content or ""
            for part in delta.tool_calls or ():
                if part.function is None:
                    continue
                if part.function.name:
                    found["calls"].append([part.function.name, ""])
                found["calls"][-1][1] += part.function.arguments or ""
    return found


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
values = st.dictionaries(words, st.one_of(words, st.integers(), st.booleans(), st.none()), max_size=3)


@given(
    st.lists(words, max_size=3),
    st.lists(words, max_size=4),
    st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), values, st.integers(1, 7)), max_size=3),
)
@examples(60)
def test_what_a_server_has_parsed_is_parsed_alike_behind_its_tokens(
    thoughts: list[str], pieces: list[str], calls: list[tuple[str, dict[str, Any], int]]
) -> None:
    chunks = [chunk(reasoning_content=each) for each in thoughts] + [chunk(content=each) for each in pieces]
    for index, (name, arguments, size) in enumerate(calls):
        text = json.dumps(arguments)
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        chunks += [chunk(tool_calls=[call(index, name, "", f"c{index}")])]
        chunks += [chunk(tool_calls=[call(index, "", part)]) for part in parts]
    reader, tokens = read(*chunks, chunk("tool_calls" if calls else "stop"), counts(3, 4, 1))
    found = shown(tokens)
    assert found["calls"] == [[name, json.dumps(arguments)] for name, arguments, _ in calls]
    assert found["reasoning"] == "".join(thoughts).replace("\x10", "").strip(SPACE)
    content = "".join(pieces).replace("\x10", "")  # white space next to thoughts and calls is layout
    content = content.lstrip(SPACE) if any(each.replace("\x10", "") for each in thoughts) else content
    assert found["content"] == (content.rstrip(SPACE) if calls else content)
    assert (tokens[-1].finish, reader.finished, reader.usage) == (
        "stop",
        True,
        Usage(3, 4, 1, -bool(found["reasoning"]), foreign=True),
    )


def test_calls_that_come_whole_or_without_an_index_are_told_apart_by_their_ids() -> None:
    each = [{"id": name, "function": {"name": "f", "arguments": {"a": name}}} for name in ("x", "y")]
    _, tokens = read(chunk(tool_calls=each), chunk("tool_calls"))
    assert shown(tokens)["calls"] == [["f", '{"a":"x"}'], ["f", '{"a":"y"}']]
    _, tokens = read(chunk(tool_calls=[call(0, "f")]), chunk("function_call"))
    assert shown(tokens)["calls"] == [["f", "{}"]], "a call without arguments has none"


def test_a_part_of_a_call_without_a_name_is_an_error() -> None:
    text = AnswerText()
    text.take({"tool_calls": [call(0, "f", "{", "x")]})
    text.take({"tool_calls": [call(1, "g", "{}", "y")]})
    with pytest.raises(BadAnswer, match="name"):
        text.take({"tool_calls": [call(0, "", "}")]})


def test_text_of_special_tokens_and_of_marks_stays_text() -> None:
    special = next(iter(modeldir.load(modeldir.TINY).added_tokens))
    _, tokens = read(chunk(content=f"a {special} <\x10call>f<\x10:>{{}}<\x10/call>"), chunk("stop"))
    assert shown(tokens) == {"content": f"a {special} <call>f<:>{{}}</call>", "reasoning": "", "calls": []}


@pytest.mark.parametrize("flag", ["--reasoning-parser", "--tool-call-parser"])
def test_a_server_that_parses_although_a_format_was_named_is_an_error(flag: str) -> None:
    with pytest.raises(BadAnswer, match=f"without {flag}"):
        read(chunk(reasoning="hm", tool_calls=[call(0, "f")]), abilities=FLAGS._replace(named=frozenset([flag])))


def test_an_end_waits_for_the_counts_unless_the_server_takes_no_stream_options() -> None:
    reader = ChatReader(asked(), (), FLAGS, INFO, tokenizer())
    assert [each.finish for each in reader.take(chunk("length", content="a"))] == [""]
    assert not reader.finished
    assert reader.take(counts(3, 1))[-1].finish == "length"
    reader = ChatReader(asked(), (), FLAGS._replace(refuses=frozenset(["stream_options"])), INFO, tokenizer())
    assert reader.take(chunk("length", content="a"))[-1].finish == "length"
    reader = ChatReader(asked(), ids("a"), FLAGS, INFO, tokenizer())
    reader.take(chunk("stop", content="b"))
    assert reader.take(counts(3, 1)) == []
    assert (reader.end()[-1].finish, reader.usage) == ("stop", None), "the counts are of a part of the answer"


def test_reasoning_is_counted_as_the_server_counts_it() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 7}}
    reader, _ = read(chunk(reasoning="hm"), chunk("stop"), {"choices": [], "usage": usage})
    assert reader.usage == Usage(3, 9, 0, 7, foreign=True)


def test_ends_of_other_kinds() -> None:
    assert read(chunk("abort", content="a"))[0].aborted == "abort"
    with pytest.raises(BadAnswer, match="content_filter"):
        read(chunk("content_filter"))
    assert read(chunk(content="a"))[0].finished is False


def test_what_a_continued_answer_thinks_is_the_content_that_it_continues() -> None:
    text = AnswerText(continued=True)
    assert text.take({"reasoning": " two"}) + text.take({"content": " three"}) + text.close() == " two three"


def test_a_body_is_the_clients_chat_without_what_the_server_refuses() -> None:
    body = chat_body_of(asked(), (), FLAGS._replace(refuses=frozenset(["top_k", "seed"])), tokenizer())
    options = {"stream_options": {"include_usage": True}, "model": "m", "stream": True}
    assert body == {"messages": CHAT["messages"], "max_tokens": 8, **options}
    newer = FLAGS._replace(limit="max_completion_tokens")
    body = chat_body_of(asked({"messages": CHAT["messages"]}), (), newer, tokenizer())
    assert not {"max_tokens", "max_completion_tokens"} & body.keys(), "the server decides"


def test_a_continuation_is_what_was_said_as_the_last_message() -> None:
    body = chat_body_of(asked(), ids("one two"), FLAGS, tokenizer())
    assert body["messages"] == [*CHAT["messages"], {"role": "assistant", "content": "one two"}]  # type: ignore[misc]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["max_tokens"] == max(1, 8 - len(ids("one two")))
    begun = [*CHAT["messages"], {"role": "assistant", "content": "one"}]  # type: ignore[misc]
    mine = asked({"messages": begun, "continue_final_message": True, "add_generation_prompt": False})
    assert chat_body_of(mine, ids(" two"), FLAGS, tokenizer())["messages"][-1]["content"] == "one two"


@pytest.mark.parametrize(
    ("answer", "continued", "again", "how"),
    [(20, 21, 26, BY_FLAGS), (20, 21, 0, BY_FLAGS), (20, 26, 26, None), (20, 0, 26, None), (20, 0, 21, {}),
     (20, 21, 21, {}), (-1, -1, -1, None), (20, 0, 0, None)],
)  # fmt: skip
def test_whether_a_server_continues_a_message_is_seen_by_its_count(
    answer: int, continued: int, again: int, how: Any
) -> None:
    assert continues(answer, continued, again) == how


@pytest.mark.parametrize(
    ("request_", "abilities", "error"),
    [
        (SequenceRequest("k", [20], Sampling(), Stop(4)), FLAGS, "takes chats only"),
        (asked(CHAT | {"response_format": {"type": "json_schema"}}), NEITHER, "applies no JSON schemas"),
        (asked(CHAT | {"continue_final_message": True}), NEITHER, "does not continue"),
        (asked(said="one"), NEITHER, "was lost when 1 tokens|was lost when 2 tokens|was lost when 3 tokens"),
        (asked(said="<\x10call>f"), FLAGS, "was lost when"),
    ],
)
def test_what_cannot_run_is_refused(request_: SequenceRequest, abilities: ServerAbilities, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        check_chat(request_, INFO, abilities, tokenizer())


def test_what_can_run_is_not_refused() -> None:
    check_chat(asked(CHAT | {"response_format": {"type": "json_schema"}}), INFO, FLAGS, tokenizer())
    check_chat(asked(CHAT | {"response_format": {"type": "json_object"}}), INFO, NEITHER, tokenizer())
    check_chat(asked(said="one"), INFO, FLAGS, tokenizer())


@pytest.mark.parametrize(("prompt", "completion"), [(-1, 4), (3, -1), (3, 1 << 40), (10**30, 4), (None, 4)])
def test_counts_that_are_none_are_not_used_nor_waited_for(prompt: Any, completion: Any) -> None:
    reader, tokens = read(chunk("stop", content=" wait"), counts(prompt, completion))
    assert (reader.usage, reader.finished, tokens[-1].finish) == (None, True, "stop")


def test_parts_of_a_server_s_counts_are_no_more_than_the_whole() -> None:
    said = counts(3, 4, 9)
    said["usage"]["completion_tokens_details"] = {"reasoning_tokens": 7}
    assert read(chunk("stop", content=" wait"), said)[0].usage == Usage(3, 4, 3, 4, foreign=True)


def test_an_answer_ends_where_the_server_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.engines.openai.chat.BESIDE", 10)
    reader, tokens = read(*[chunk(reasoning_content=" wait")] * 1000)
    assert (reader.finished, tokens[-1].finish) == (True, "length")
    assert len(tokens) < 200, "of 8 tokens that were asked for"
    assert shown(tokens)["reasoning"].startswith("wait wait")
