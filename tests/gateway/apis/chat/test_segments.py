import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.apis.chat.aggregator import AnswerAggregator
from penstock.gateway.apis.chat.segments import Segment, SegmentChange, SegmentedAnswer
from penstock.gateway.apis.responses.bodies import custom_input
from penstock.schemas.requests import GenerateRequest, Sampling
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from tests.gateway.answers import CALL, DETOKENIZER, LENGTH, STOP, TEXTS, items, request
from tests.properties import examples


def read(asked: GenerateRequest, given: list[TokenItem]) -> tuple[SegmentedAnswer, list[SegmentChange]]:
    answer = SegmentedAnswer(asked, DETOKENIZER)
    changes = [change for item in given for change in answer.push([item])]
    assert answer.done
    return answer, changes


def of_kind(segments: list[Segment], kind: str) -> str:
    return "".join(segment.content for segment in segments if segment.kind == kind)


def chat_message(given: list[TokenItem]) -> dict[str, object]:
    aggregator = AnswerAggregator(request("chat"), DETOKENIZER)
    assert aggregator.push(given)
    found: dict[str, object] = msgspec.json.decode(aggregator.response())["choices"][0]["message"]
    return found


@examples(200)
@given(TEXTS, st.sampled_from([STOP, LENGTH]), st.integers(1, 5))
@example(f"<think>Hm.</think>Look:{CALL}{CALL}", STOP, 1)
@example(f"Look: {CALL}\nDone.", STOP, 3)
def test_segments_have_what_a_chat_completion_has(text: str, finish: Finish, size: int) -> None:
    given = items(text, finish, size=size)
    message = chat_message(given)
    segments = read(request("response"), given)[0].segments
    assert of_kind(segments, "text") == (message["content"] or "")
    assert of_kind(segments, "reasoning") == (message["reasoning_content"] or "")
    calls = [(s.call_id, s.name, s.content) for s in segments if s.kind == "call"]
    assert calls == [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])  # type: ignore[attr-defined]
    ]


@given(TEXTS, st.integers(1, 5), st.integers(1, 5))
def test_changes_do_not_depend_on_how_tokens_were_cut_into_items(text: str, size: int, other: int) -> None:
    def seen(size: int) -> list[tuple[object, ...]]:
        _, changes = read(request("response"), items(text, size=size))
        return [(c.what, c.segment.index, c.segment.kind, c.text) for c in changes]

    assert seen(size) == seen(other)


@given(TEXTS, st.sampled_from([STOP, LENGTH]))
def test_changes_tell_the_whole_story_in_order(text: str, finish: Finish) -> None:
    """One segment is open at a time; what it grew by is what it has; only a limit leaves the last one open."""
    answer, changes = read(request("response"), items(text, finish))
    grown = {segment.index: "" for segment in answer.segments}
    opened = -1
    for what, segment, more, _ in changes:
        if what == "opened":
            assert segment.index == opened + 1
            opened += 1
        else:
            assert segment.index == opened
            grown[opened] += more
    assert [grown[segment.index] for segment in answer.segments] == [segment.content for segment in answer.segments]
    closed = [change.segment.index for change in changes if change.what == "closed"]
    assert closed == list(range(len(answer.segments) - (finish is LENGTH and bool(answer.segments))))


def test_tokens_of_thoughts_and_their_marks_are_counted() -> None:
    thoughts, rest = "<think>\nOne two.\n</think>", "\n\nThree."
    answer, _ = read(request("response"), items(thoughts + rest))
    assert answer.reasoning_tokens >= len(items("One two.", None))
    assert answer.reasoning_tokens <= len(items(thoughts + "\n\n", None))
    assert read(request("response"), items("Three."))[0].reasoning_tokens == 0


def test_scores_go_with_the_text_that_their_tokens_became() -> None:
    asked = request("response", sampling=Sampling(temperature=0.0, logprobs=1), parsing=None)
    given = items("One snowman: ☃.", logprobs=True)
    answer, changes = read(asked, given)
    assert len(answer.segments[0].scored) == len(given)
    assert [part for change in changes for part in change.scored] == answer.segments[0].scored


def test_an_error_of_the_whole_request_ends_the_answer() -> None:
    failed = TokenItem("r", 1, WHOLE_REQUEST, 0, b"", Finish("error", code="worker_lost", message="gone"))
    answer, _ = read(request("response"), [*items("The broker", STOP)[:1], failed])
    assert answer.error is not None
    assert answer.error.code == "worker_lost"


def test_arguments_with_half_of_a_utf_16_pair_are_an_object_all_the_same() -> None:
    segment = Segment(0, "call", "c", "f")
    segment.parts = [r'{"input": "\ud83d\ude00 ', r'\ud83d"}']
    assert segment.arguments == {"input": "😀 \ufffd"}
    assert custom_input(segment.content) == "😀 \ufffd"
    segment.parts = [r'{"input": "\ud83d']
    assert segment.arguments == {"arguments": segment.content}
    assert custom_input(segment.content) == segment.content
