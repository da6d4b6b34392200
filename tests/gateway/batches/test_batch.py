"""Batches by themselves: inputs, logs and files, for arbitrary lines and histories."""

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.batches.batch import (
    MAX_LINES,
    MESSAGES_PATH,
    BatchProgress,
    Line,
    answered,
    body_of,
    entered,
    files_of,
    message_batch,
    message_input,
    message_results,
    next_to_drive,
    read_form,
    read_input,
    refused,
    window_s,
)
from penstock.schemas.batches import Batch, BatchMessage, BatchOpened, BatchResults, BatchStatus, BatchTaken, LineError
from penstock.schemas.errors import Code, ServingError

CHAT = "/v1/chat/completions"


def line(custom_id: str, **more: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "tiny"}}
    return json.dumps(fields | more).encode()


def lines_of(data: bytes) -> list[Line]:
    found = read_input(data, CHAT)
    lines = [each for each in found if isinstance(each, Line)]
    assert len(lines) == len(found), found
    return lines


def test_half_of_a_utf_16_pair_in_a_line_is_a_replacement_character() -> None:
    url = "/v1/chat/completions"
    data = b'{"custom_id": "1", "method": "POST", "url": "%b", "body": {"a": "x\\ud83d"}}\n' % url.encode()
    [line] = read_input(data, url)
    assert isinstance(line, Line)
    assert json.loads(body_of(data, line)) == {"a": "x�"}


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"])
def test_each_line_has_its_body_whatever_ends_it_and_a_mark_of_utf_8_may_stand_before_all(before: bytes) -> None:
    bodies = [{"model": "tiny", "n": number, "text": "ä\n"} for number in range(4)]
    data = before + b"\r\n".join(line(f"line {number}", body=body) for number, body in enumerate(bodies)) + b"\n\n  \n"
    lines = lines_of(data)
    assert [each.custom_id for each in lines] == ["line 0", "line 1", "line 2", "line 3"]
    assert [json.loads(body_of(data, each)) for each in lines] == bodies


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b'{"custom_id": "a"}', "invalid_json_line"),
        (line(""), "invalid_custom_id"),
        (line("first"), "duplicate_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", url="/v1/embeddings"), "mismatched_endpoint"),
        (line("b", body=[1]), "invalid_body"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(wrong: bytes, code: str) -> None:
    (error,) = read_input(line("first") + b"\n\n" + wrong + b"\n" + line("last"), CHAT)
    assert isinstance(error, LineError)
    assert (error.code, error.line) == (code, 3)


def test_an_input_has_at_least_one_line_and_at_most_fifty_thousand() -> None:
    (error,) = read_input(b"\n \n", CHAT)
    assert isinstance(error, LineError)
    assert error.code == "empty_file"
    many = b"\n".join(line(str(number)) for number in range(MAX_LINES))
    assert len(lines_of(many)) == MAX_LINES
    (error,) = read_input(many + b"\n" + line("one more"), CHAT)
    assert isinstance(error, LineError)
    assert error.code == "too_many_lines"


@pytest.mark.parametrize("body", [{"stream": True}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}])
def test_a_line_that_asks_for_what_a_batch_cannot_do_is_refused(body: dict[str, Any]) -> None:
    data = line("a", body=body)
    with pytest.raises(ServingError) as caught:
        body_of(data, lines_of(data)[0])
    assert caught.value.code is Code.invalid_request
    assert caught.value.param in body


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": ["a"]}, {"prompt": [1, 2, 3]}, {"stream": False}])
def test_a_line_with_one_prompt_is_passed_on_as_it_is(body: dict[str, Any]) -> None:
    data = line("a", body=body)
    assert json.loads(body_of(data, lines_of(data)[0])) == body


COUNT = 6
LINES = lines_of(b"\n".join(line(f"line-{number}") for number in range(COUNT)))
numbers = st.integers(0, COUNT - 1)
results = st.builds(
    lambda number, ok, attempt: (
        answered(number, LINES[number], f"r{attempt}", b'{"answer": %d}' % attempt)
        if ok
        else refused(number, LINES[number], f"r{attempt}", ServingError(Code.engine_error, f"failed {attempt}"))
    ),
    numbers,
    st.booleans(),
    st.integers(0, 99),
)
messages = st.one_of(
    st.builds(BatchOpened, st.sampled_from(["gw-1", "gw-2"])),
    st.builds(
        lambda taken: BatchTaken(tuple(taken)), st.lists(st.tuples(numbers, st.sampled_from(["r1", "r2"])), max_size=4)
    ),
    st.builds(lambda ended: BatchResults(tuple(ended)), st.lists(results, max_size=4)),
)


@given(st.lists(messages, max_size=12), st.sampled_from([BatchStatus.cancelled, BatchStatus.expired]))
def test_every_line_has_one_line_of_output_or_error_the_first_result_that_was_logged(
    history: list[BatchMessage], status: BatchStatus
) -> None:
    files = files_of(history, LINES, "batch_1", status)
    output = [json.loads(text) for text in files.output.splitlines()]
    errors = [json.loads(text) for text in files.errors.splitlines()]
    assert sorted(each["custom_id"] for each in output + errors) == sorted(each.custom_id for each in LINES)
    assert (files.completed, files.failed) == (len(output), len(errors))
    assert files.unanswered == sum(each["response"] is None for each in errors)
    shown_to_others = [json.loads(text) for text in message_results(files.output, files.errors).splitlines()]
    kinds = Counter(each["result"]["type"] for each in shown_to_others)
    assert kinds.total() == COUNT
    assert (kinds["succeeded"], kinds["errored"]) == (files.completed, files.failed - files.unanswered)
    assert kinds["canceled" if status is BatchStatus.cancelled else "expired"] == files.unanswered
    by_id = {each["custom_id"]: each for each in output + errors}
    first: dict[int, Any] = {}
    for message in history:
        for result in message.results if isinstance(message, BatchResults) else ():
            first.setdefault(result.line, json.loads(result.text))
    for number, each in enumerate(LINES):
        shown = by_id[each.custom_id]
        if number in first:
            assert shown == first[number]
        else:
            assert (shown["response"], shown["error"]["code"]) == (None, f"batch_{status.value}")


@given(st.lists(messages, max_size=12))
def test_a_line_is_open_from_when_it_is_taken_to_its_first_result(history: list[BatchMessage]) -> None:
    progress, open_, ended = BatchProgress(), dict[int, str](), dict[int, bool]()
    for message in history:
        progress.push(message)
        if isinstance(message, BatchTaken):
            open_ |= {number: request for number, request in message.lines if number not in ended}
        elif isinstance(message, BatchResults):
            for result in message.results:
                ended.setdefault(result.line, result.ok)
                open_.pop(result.line, None)
    assert (progress.taken, progress.ended) == (open_, set(ended))
    assert (progress.completed, progress.failed) == (sum(ended.values()), len(ended) - sum(ended.values()))


def test_a_batch_of_messages_shows_what_it_ended_with_only_then() -> None:
    batch = Batch("batch_1", "acme", MESSAGES_PATH, "file-1", "24h", 10**9, 86_401 * 10**9, total=9, completed=3)
    shown = message_batch(batch, "http://h")
    assert (shown.id, shown.processing_status, shown.results_url) == ("msgbatch_1", "in_progress", None)
    assert (shown.request_counts.processing, shown.request_counts.succeeded) == (9, 0)
    assert message_batch(entered(batch, BatchStatus.cancelling, 2), "").processing_status == "canceling"
    over = msgspec.structs.replace(entered(batch, BatchStatus.cancelled, 3 * 10**9), failed=6, unanswered=4)
    shown = message_batch(over, "http://h")
    assert shown.results_url == "http://h/v1/messages/batches/msgbatch_1/results"
    assert json.loads(msgspec.json.encode(shown))["ended_at"] == "1970-01-01T00:00:03Z"
    counts = {"processing": 0, "succeeded": 3, "errored": 2, "canceled": 4, "expired": 0}
    assert msgspec.structs.asdict(shown.request_counts) == counts
    expired = msgspec.structs.replace(entered(batch, BatchStatus.expired, 3), failed=6, unanswered=6)
    assert message_batch(expired, "").request_counts.expired == 6


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"requests": []}, "requests"),
        ({}, None),
        ({"requests": [{"custom_id": "a b", "params": {}}]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}, "requests.1.custom_id"),
        ({"requests": [{"custom_id": "a", "params": []}]}, "requests.0.params"),
    ],
)
def test_a_wrong_batch_of_messages_is_refused_by_its_field(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ServingError) as caught:
        message_input(json.dumps(body).encode())
    assert caught.value.code is Code.invalid_request
    if param:
        assert caught.value.param == param


def test_a_batch_of_messages_has_a_line_for_each_however_it_is_written() -> None:
    body = {"requests": [{"custom_id": str(n), "params": {"model": "m", "text": "a\nb"}} for n in range(3)]}
    found = read_input(message_input(json.dumps(body, indent=2).encode()), MESSAGES_PATH)
    assert [each.custom_id for each in found if isinstance(each, Line)] == ["0", "1", "2"]


def test_a_result_says_what_the_endpoint_would_have_answered() -> None:
    good = json.loads(answered(0, LINES[0], "r1", b'{"id": "x"}').text)
    assert good["response"] == {"status_code": 200, "request_id": "r1", "body": {"id": "x"}}
    assert good["error"] is None
    bad = json.loads(refused(1, LINES[1], "r2", ServingError(Code.unsupported, "no", param="n")).text)
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "n"


@pytest.mark.parametrize("text", ["", "24", "0h", "31d", "h", "1000h", "24H"])
def test_a_window_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ServingError, match="completion_window"):
        window_s(text)


def test_a_window_is_in_hours_or_days() -> None:
    assert (window_s("24h"), window_s("30d")) == (86_400, 30 * 86_400)


def form(content: bytes, boundary: bytes = b"xyz") -> bytes:
    return (
        b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%b\r\n--%b--\r\n"
    ) % (boundary, boundary, content, boundary)


@given(st.binary(max_size=200))
def test_a_form_gives_back_its_file_byte_by_byte(content: bytes) -> None:
    boundary = b"b0undary"
    if b"\r\n--" + boundary in b"\r\n" + content:
        return
    upload = read_form('multipart/form-data; boundary="b0undary"', form(content, boundary))
    assert (upload.content, upload.name, upload.fields) == (content, 'a "b".jsonl', {"purpose": "batch"})


@given(st.integers(0, 160))
def test_a_form_that_was_cut_off_is_refused(length: int) -> None:
    whole = form(b"some lines")
    with pytest.raises(ServingError):
        read_form("multipart/form-data; boundary=xyz", whole[: min(length, len(whole) - 12)])


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data"])
def test_what_is_no_form_is_refused(kind: str) -> None:
    with pytest.raises(ServingError, match="multipart/form-data"):
        read_form(kind, form(b"x"))


def test_a_tenant_with_many_batches_leaves_room_to_the_others() -> None:
    free = [Batch(f"batch_{at}", "hog", CHAT, "file-1", "1h", at, 9) for at in range(5)]
    late = Batch("batch_9", "acme", CHAT, "file-1", "1h", 8, 9)
    assert next_to_drive(free, {}, 2) is free[0], "the oldest"
    assert next_to_drive([*free, late], {"hog": 1}, 2) is late
    assert next_to_drive(free, {"hog": 1}, 2) is free[0]
    assert next_to_drive(free, {"hog": 2}, 2) is None
