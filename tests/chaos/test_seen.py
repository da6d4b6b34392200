"""What a client saw: streams and whole answers come to the same, and events that come again are noticed."""

import json
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from penstock.gateway.admission.queues import unstored
from penstock.gateway.base.chat_objects import stopping, unconfirmed
from penstock.gateway.request_log.lookup import erased
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory_storage import lost
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import new_request_id
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import WHOLE_REQUEST, TokenItem
from tests.chaos import log
from tests.chaos.audit import End
from tests.chaos.clients import HttpClients, Settled, _Conversation
from tests.chaos.log import Fold
from tests.chaos.nats_clients import named_in
from tests.chaos.recipes import Recipe
from tests.chaos.seen import Seen, Shown, goes_on, last_event
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, end


def chat(text: str, index: int = 0, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    part = {"index": index, "delta": {"content": text}, "finish_reason": finish, "logprobs": logprobs}
    return {"choices": [part]}


def test_a_stream_and_a_whole_answer_come_to_the_same() -> None:
    streamed, whole = Seen("t", "r", "stream"), Seen("t", "r", "whole")
    content = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    streamed.take(chat("a", logprobs={"content": content[:1]}), "1", 0.0)
    streamed.take(chat("b", logprobs={"content": content[1:]}, finish="stop"), "2f", 0.1)
    message = {"message": {"content": "ab"}, "index": 0, "finish_reason": "stop", "logprobs": {"content": content}}
    whole.take_whole({"choices": [message]})
    assert streamed.choices == whole.choices == {0: Shown("ab", "stop", [("a", -1.0), ("b", -2.0)])}
    assert streamed.finished
    assert list(streamed.arrivals) == [0.0, 0.1]


def test_text_completions_are_read_as_chats_are() -> None:
    seen = Seen("t", "r", "stream", 2)
    logprobs = {"tokens": ["x"], "token_logprobs": [-0.5]}
    seen.take({"choices": [{"index": 1, "text": "x", "finish_reason": None, "logprobs": logprobs}]}, "0.1", 0.0)
    assert seen.choices[1] == Shown("x", "", [("x", -0.5)])
    assert not seen.finished


def test_responses_and_vectors_are_one_choice() -> None:
    seen = Seen("t", "r", "background")
    message = {
        "type": "message",
        "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}],
    }
    seen.take_whole({"status": "completed", "output": [{"type": "reasoning"}, message]})
    assert seen.choices == {0: Shown("ab", "completed")}
    seen.take_whole({"data": [{"embedding": "AAAA"}, {"embedding": [0.5, -1]}]})
    assert seen.choices == {0: Shown("AAAA [0.5, -1]", "stop")}


@pytest.mark.parametrize(
    ("last", "event_id", "goes"),
    [
        ("", "1", True),
        ("1", "2", True),
        ("2", "2f", True),
        ("2f", "2fu", True),
        ("9", "10", True),
        ("1.4", "2.4", True),
        ("2", "2", False),
        ("5", "4", False),
        ("2f", "2", False),
        ("3.4", "4.3", False),
    ],
)
def test_an_event_that_names_no_more_tokens_than_the_last_one_is_a_repeat(last: str, event_id: str, goes: bool) -> None:
    assert goes_on(last, event_id) is goes
    seen = Seen("t", "r", "stream")
    for each in filter(None, (last, event_id)):
        seen.take(chat("a"), each, 0.0)
    assert seen.repeats == (not goes)


def events(*bodies: dict[str, Any]) -> Seen:
    seen = Seen("t", "r", "responses")
    for number, body in enumerate(bodies):
        seen.take(body, str(number), 0.0)
    return seen


def test_a_streamed_response_comes_to_what_the_whole_one_is() -> None:
    content = [{"type": "output_text", "text": "ab"}]
    response = {"output": [{"type": "message", "content": content}], "status": "incomplete"}
    streamed = events(
        {"type": "response.created", "response": {"status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.output_text.done", "text": "ab"},
        end := {"type": "response.incomplete", "response": response},
    )
    whole = Seen("t", "r", "responses")
    whole.take_whole(response)
    assert streamed.choices == whole.choices == {0: Shown("ab", "incomplete", [])}
    assert streamed.finished
    assert last_event(end)


def test_a_streamed_message_comes_to_what_the_whole_one_is() -> None:
    streamed = events(
        {"type": "message_start", "message": {}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}},
        end := {"type": "message_stop"},
    )
    whole = Seen("t", "r", "messages")
    whole.take_whole({"type": "message", "content": [{"type": "text", "text": "ab"}], "stop_reason": "max_tokens"})
    assert streamed.choices == whole.choices == {0: Shown("ab", "max_tokens", [])}
    assert last_event(end)
    assert not last_event({"type": "message_delta"})


def test_calls_of_tools_are_compared_by_name_and_arguments() -> None:
    streamed, whole = Seen("t", "r", "tools"), Seen("t", "r", "tools")
    for number, function in enumerate(({"name": "note", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ":1}"})):
        part = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": function}]}, "finish_reason": None}
        streamed.take({"choices": [part]}, str(number + 1), 0.0)
    call = {"id": "call_1", "function": {"name": "note", "arguments": '{"a":1}'}}
    message = {"content": None, "tool_calls": [call]}
    whole.take_whole({"choices": [{"index": 0, "message": message, "finish_reason": None}]})
    assert streamed.choices[0].text == whole.choices[0].text == 'note{"a":1}'


@pytest.mark.parametrize("error", [lost, erased])
def test_a_client_that_saw_nothing_but_an_error_knows_its_request_by_that(error: Callable[[str], Any]) -> None:
    made = new_request_id()
    assert named_in(error(made).message) == made
    assert named_in("no submission with the message id 'x' is known") == ""


def item(first: int, count: int, attempt: int = 1) -> TokenItem:
    return TokenItem("r", attempt, 0, first, b"\0\0\0\0" * count)


@pytest.mark.parametrize(
    ("items", "count", "at"),
    [
        ([item(0, 3), item(3, 2)], 5, 2.0),
        ([item(3, 2), item(0, 3)], 5, 2.0),
        ([item(0, 3), item(4, 2)], 3, 1.0),
        ([item(0, 3), item(2, 2), item(0, 3)], 4, 2.0),
        ([item(0, 3), item(3, 2, attempt=2), item(3, 9)], 5, 2.0),
        ([item(0, 3), TokenItem("r", 2, WHOLE_REQUEST, 0), item(3, 1)], 3, 1.0),
        ([item(1, 3)], 0, 0.0),
    ],
)
def test_the_auditor_folds_the_token_stream_as_readers_do(items: list[TokenItem], count: int, at: float) -> None:
    fold = Fold()
    for number, each in enumerate(items, 1):
        fold.take(each, float(number))
    assert (fold.counts.get(0, 0), fold.at) == (count, at)


async def refused(error: ServingError, key: str = "key") -> _Conversation:
    """A client whose question got this answer; the gateway had made its id."""
    body = json.dumps({"error": {"code": error.code.value, "message": error.message}}).encode()
    answer = MagicMock(status=503, request="id-1", read=AsyncMock(return_value=body))
    recipe = Recipe("chat", "whole", "/v1/chat/completions", {})
    conversation = _Conversation(HttpClients(["http://gateway"], keys=True), recipe, "t", {}, key, 0)
    assert not await conversation._accepted(answer)
    return conversation


@pytest.mark.parametrize(
    ("error", "confirmed"),
    [
        (stopping("id-1"), True),
        (unstored("id-1"), True),
        (unconfirmed("id-1"), False),
        (ServingError(Code.shutting_down, "try again"), False),
    ],
)
async def test_only_a_gateway_that_names_the_request_says_that_it_continues(
    error: ServingError, confirmed: bool
) -> None:
    """Every refusal has an id in its head, also of a request that was never made."""
    assert (await refused(error))._not_there("request_not_found") is not confirmed


async def test_a_request_without_a_key_whose_acceptance_was_not_confirmed_may_be_cancelled_by_its_gateway() -> None:
    late = ServingError(Code.broker_unavailable, "the broker did not confirm ps.req.m.normal.id-1 in time")
    without_key = await refused(late, key="")
    with pytest.raises(Settled, match="unknown"):
        without_key._not_there("cancelled")
    assert without_key.seen.left
    assert not (await refused(late))._not_there("cancelled")  # its gateway leaves it to the next who has the key
    assert not (await refused(unstored("id-1"), key=""))._not_there("cancelled")


def test_what_was_used_is_known_from_chats_and_responses() -> None:
    seen = Seen("tag", "r", "stream")
    seen.take(chat("a"), "1", 0.0)
    assert seen.usage is None
    seen.take({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}, "2", 0.1)
    assert seen.usage == (7, 2)
    usage = {"input_tokens": 8, "output_tokens": 3}
    seen.take({"type": "response.completed", "response": {"status": "completed", "usage": usage}}, "3", 0.2)
    assert seen.usage == (8, 3)


async def test_the_log_is_read_once_a_request_has_ended_that_runs_after_its_client_gave_up(
    broker: EmbeddedNats, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a full disk, requests whose acceptance was not confirmed were still running: their ends were missed."""
    async with opened(broker, subjects) as bus:
        request = await accept(bus)
        _, [ends] = await log.until_ended([bus], 0, within_s=0.0)
        assert ends == []

        async def then_it_ends(bus: Bus, since_ns: int, read: Any = log.ends_since) -> Sequence[End]:
            found: list[End] = await read(bus, since_ns)
            if not found:
                await end(bus, request, 1)
            return found

        monkeypatch.setattr(log, "ends_since", then_it_ends)
        [stored], [ends] = await log.until_ended([bus], 0, within_s=30.0)
    assert [*stored] == [each.request for each in ends] == [request.id]
