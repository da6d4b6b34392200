"""Messages as lines of JSON, and back."""

import base64
import contextlib
import errno
import json
import math
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log_tools.export.redaction import Redactor
from penstock.log_tools.sources.export_file import ReadRequests, WrittenRequests, open_export
from penstock.log_tools.sources.log_line import (
    FORMAT,
    STREAMS,
    VERSION,
    BadLine,
    FileHeader,
    LogLine,
    append_line,
    decode_line,
    encode_line,
    header_line,
    read_header,
)
from penstock.schemas import requests
from penstock.schemas.done import Done, Outcome, packed, recorded
from penstock.schemas.jobs import Revoke, Stage
from penstock.schemas.tokens import Finish, Logprob, TokenBatch, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.traces import samples
from tests.properties import examples

GOLDEN = Path(__file__).parents[3] / "schemas" / "golden"
STREAM_OF = {
    "request": "REQUESTS", "job": "WORK", "encoded": "WORK", "prefilled": "WORK", "revoke": "WORK",
    "tokens": "TOKENS", "done": "DONE", "returned": "DONE", "kv": "KV", "handoff": "HANDOFF",
}  # fmt: skip


def record(stream: str, data: bytes, seq: int = 1) -> LogLine:
    return LogLine(stream, seq, "2026-11-22T09:30:00.000000001Z", f"ps.{stream.lower()}.x", {"Nats-Msg-Id": "a"}, data)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.bin")), ids=lambda path: path.stem)
def test_every_message_of_the_wire_format_comes_back_as_the_same_bytes(path: Path) -> None:
    stream = STREAM_OF.get(path.stem.split("_")[0], "REQUESTS")
    given = record(stream, path.read_bytes())
    assert decode_line(encode_line(given)) == given


MADE_UP = {"done", "encoded", "prefilled", "prefilled_with_windows"}  # the request or job inside is no real one
DATA = Path(__file__).parents[3] / "data"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.bin")), ids=lambda path: path.stem)
def test_messages_of_earlier_builds_are_readable(path: Path) -> None:
    """If this fails, a new field is written although it has its default."""
    stream = STREAM_OF.get(path.stem.split("_")[0])
    if stream is not None and path.stem not in MADE_UP | {"kv_dump"}:
        assert "body" in msgspec.json.decode(encode_line(record(stream, path.read_bytes())))


@pytest.mark.parametrize("path", sorted(DATA.glob("log-*.jsonl")), ids=lambda path: path.stem)
def test_each_message_of_an_earlier_log_is_readable_redacted_or_not(path: Path) -> None:
    redactor, seen = Redactor(), set()
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    for stream in STREAMS:
        for number, line in enumerate(each for each in lines if each["stream"] == stream):
            given = record(stream, base64.b64decode(line["data"]), number)
            redacted = redactor.record(given)
            assert redacted is not None
            for each in (given, redacted):
                written = encode_line(each)
                assert decode_line(written) == each
                assert "body" in msgspec.json.decode(written), each
            seen.add(stream)
    assert {"REQUESTS", "WORK", "TOKENS", "DONE", "KV"} <= seen


def test_a_redacted_message_of_another_build_loses_the_fields_that_this_one_does_not_know() -> None:
    job = samples.job(1, Stage("decode", "w-1"))
    link = ["decode", 1, 0, False, "of another build"]
    fields = msgspec.msgpack.decode(
        encode(msgspec.structs.replace(job, request=msgspec.Raw(encode(samples.request()))))
    )
    message = encode(fields | {"inputs": {"links": [link]}, "later": "a secret"})
    assert "data" in msgspec.json.decode(encode_line(record("WORK", message)))
    redacted = Redactor().record(record("WORK", message))
    assert redacted is not None
    line = msgspec.json.decode(encode_line(redacted))
    assert line["body"]["inputs"]["links"] == [link[:4]]
    assert b"secret" not in redacted.data


@given(st.binary(max_size=200), st.sampled_from(["REQUESTS", "WORK", "TOKENS", "DONE", "KV", "HANDOFF", "LATER"]))
@examples(200)
def test_bytes_that_are_no_message_come_back_as_they_were(data: bytes, stream: str) -> None:
    assert decode_line(encode_line(record(stream, data))).data == data


def test_a_body_is_readable_and_its_request_too() -> None:
    asked = samples.request(user="ann")
    line = msgspec.json.decode(encode_line(record("DONE", encode(Done(asked.id, "tiny", 1, submitted=encode(asked))))))
    assert (line["body"]["request"], line["request"]["user"]) == (asked.id, "ann")
    job = msgspec.structs.replace(samples.job(1, Stage("decode", "w-1")), request=msgspec.Raw(encode(asked)))
    line = msgspec.json.decode(encode_line(record("WORK", encode(job))))
    assert line["body"]["request"]["id"] == asked.id
    assert line["body"]["decision"]["chosen"] == "w-1"


def test_a_packed_prompt_is_written_as_others_are_and_comes_back_packed() -> None:
    asked = samples.request(prompt=pack_tokens([1, 2, 70_000]))
    stored = encode(requests.packed(asked))
    line = msgspec.json.decode(encode_line(record("REQUESTS", stored)))
    assert base64.b64decode(line["body"]["prompt"]) == asked.prompt
    assert decode_line(encode_line(record("REQUESTS", stored))).data == stored
    job = encode(msgspec.structs.replace(samples.job(1, Stage("decode", "w-1")), request=msgspec.Raw(stored)))
    assert decode_line(encode_line(record("WORK", job))).data == job
    answer = pack_tokens(range(100))
    end = encode(packed(Done(asked.id, "tiny", 1, choices=(Outcome(answer, "stop"),), submitted=recorded(asked))))
    line = msgspec.json.decode(encode_line(record("DONE", end)))
    assert base64.b64decode(line["body"]["choices"][0]["tokens"]) == answer
    assert decode_line(encode_line(record("DONE", end))).data == end


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan, -0.1, 5e-324])
def test_log_probabilities_that_json_cannot_write_are_kept(value: float) -> None:
    logprobs = (Logprob(value, ((1, value),), 1),)
    item = TokenItem(samples.ID, 1, 0, 0, b"\1\0\0\0", Finish("stop"), logprobs)
    for stream, message in (
        ("TOKENS", TokenBatch("w", 1, 2, (item,))),
        ("DONE", Done(samples.ID, "tiny", 1, choices=(Outcome(b"\1\0\0\0", "stop", logprobs=logprobs),))),
    ):
        data = encode(message)
        assert decode_line(encode_line(record(stream, data))).data == data


def test_a_request_in_a_record_that_json_cannot_write_is_kept() -> None:
    asked = samples.request()
    asked = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, temperature=math.inf))
    given = record("DONE", encode(Done(asked.id, "tiny", 1, submitted=encode(asked))))
    assert decode_line(encode_line(given)) == given


def test_a_full_disk_is_no_damaged_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "e.jsonl"
    asked = encode_line(record("REQUESTS", encode(samples.request())))
    file.write_bytes(header_line(FileHeader(FORMAT, VERSION, "", "", "ps")) + asked)
    with open_export(str(file), skip_bad=True) as exported:
        kept = exported._requests._file
        monkeypatch.setattr(kept, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ValueError, match="No space left on device; set TMPDIR"):
            list(exported.records())
        assert not exported.bad


def test_a_field_of_a_later_build_is_not_lost() -> None:
    data = encode(msgspec.msgpack.decode(encode(Revoke("r", 1))) | {"later": "field"})
    assert decode_line(encode_line(record("WORK", data))).data == data


NO_BODY = b'{"stream":"KV","seq":1,"time":"","subject":""}'


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b'{"stream":"REQUESTS"}', NO_BODY, NO_BODY[:-1] + b',"body":{"worker":3}}',
        *(b'{"stream":"REQUESTS","seq":%d,"time":"2026-11-22T09:30:00Z","subject":"","data":""}' % seq
          for seq in (-1, 1 << 62, 1 << 70)),
    ],
)  # fmt: skip
def test_a_damaged_line_is_refused(line: bytes) -> None:
    with pytest.raises(BadLine):
        decode_line(line)


def test_a_file_of_a_later_format_names_its_build() -> None:
    header = FileHeader(FORMAT, 1, "0.1.0", "", "ps")
    assert read_header(header_line(header)) == header
    with pytest.raises(BadLine, match=rf"format {VERSION + 1} of build 0\.9"):
        read_header(header_line(FileHeader(FORMAT, VERSION + 1, "0.9", "", "ps")))
    with pytest.raises(BadLine, match="not the first line"):
        read_header(b'{"a":1}')


def test_a_line_is_added_behind_others() -> None:
    given = record("REQUESTS", encode(samples.request()))
    lines = bytearray(b"before\n")
    append_line(given, lines, lambda request, data: 0)
    assert lines == b"before\n" + encode_line(given)


@pytest.mark.parametrize("value", [-1.5, math.inf])
def test_a_request_that_the_file_has_is_not_repeated(value: float) -> None:
    """Unless the message is kept as bytes, because JSON has no infinities."""
    written = WrittenRequests()
    asked = samples.request()
    data, scores = encode(asked), (Logprob(value, (), 1),)
    written.add(asked.id, 9, data)
    job = msgspec.structs.replace(samples.job(1, Stage("decode", "w-1")), request=msgspec.Raw(data), scores=scores)
    prefilled = msgspec.structs.replace(samples.prefilled("w-2", 1, 2), job=msgspec.Raw(encode(job)))
    for stream, message in (
        ("WORK", job), ("WORK", prefilled), ("DONE", Done(asked.id, "tiny", 1, submitted=data, scores=scores))
    ):  # fmt: skip
        given = record(stream, encode(message))._replace(headers={"Nats-Msg-Id": f"{asked.id}:1"})
        line = bytearray()
        append_line(given, line, written.sequence_of)
        with contextlib.closing(ReadRequests()) as read:
            for sequence in (7, 9):
                read.add(sequence, data)
            assert decode_line(bytes(line), read.at) == given
        if math.isfinite(value):
            assert line.count(b'"request":9') == 1
            assert b'"prompt"' not in line
            with pytest.raises(BadLine, match="message 9 of REQUESTS"):
                decode_line(bytes(line))
