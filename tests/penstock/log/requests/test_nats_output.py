"""What the stock ``nats`` command prints, cut at any place into reads, is decoded; other lines stay as they are."""

import base64
import io
import json
from datetime import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.log.requests.decode import Message, NatsOutput, _time, decode
from penstock.schemas.done import Done, Outcome
from penstock.schemas.jobs import Stage
from penstock.schemas.tokens import TokenBatch, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log.traces import samples
from tests.properties import examples

REQUEST = "0199c1d2-0000-7000-8000-000000000001"


def done(tokens: bytes) -> bytes:
    return encode(Done(REQUEST, "tiny", 1, "w-1", (Outcome(tokens, "stop"),)))


def batch(*tokens: int) -> bytes:
    return encode(TokenBatch("w-1", 1, 7, (TokenItem(REQUEST, 1, 0, 0, pack_tokens(tokens)),)))


def sub(subject: str, body: bytes, *headers: str) -> bytes:
    """As ``nats sub`` prints it."""
    lines = "".join(f"{each}\n" for each in headers) + "\n" if headers else ""
    return f'[#1] Received on "{subject}"\n{lines}'.encode() + body + (b"\n\n" if not body.endswith(b"\n") else b"\n")


def view(subject: str, seq: int, body: bytes, *headers: str) -> bytes:
    """As ``nats stream view`` prints it."""
    lines = "\n" + "".join(f"  {each}\n" for each in headers) if headers else ""
    heading = f"[{seq}] Subject: {subject} Received: 2026-11-22T09:30:00Z\n{lines}\n"
    return heading.encode() + body + (b"" if body.endswith(b"\n") else b"\n") + b"\n"


def dumped(subject: str, body: bytes) -> bytes:
    """As ``nats sub --dump=-`` prints it."""
    return json.dumps({"Subject": subject, "Data": base64.b64encode(body).decode()}).encode() + b"\0"


def read(printed: bytes) -> list[Message | bytes]:
    output = NatsOutput()
    found = [each for line in io.BytesIO(printed) for each in output.feed(line)]
    return [*found, *output.end()]


def messages(printed: bytes) -> list[Message]:
    return [each for each in read(printed) if isinstance(each, Message)]


@examples(150)
@given(st.lists(st.binary(max_size=60).map(lambda data: data[: len(data) // 4 * 4]), min_size=1, max_size=4))
def test_every_message_is_found_whatever_bytes_its_body_has(tokens: list[bytes]) -> None:
    bodies = [done(each) for each in tokens]
    subject = f"ps.done.default.tiny.{REQUEST}"
    for printed in (
        b"".join(sub(subject, body, f"Nats-Msg-Id: {REQUEST}") for body in bodies),
        b"".join(sub(subject, body) for body in bodies),
        b"".join(view(subject, 4, body, "Nats-Msg-Id: x") for body in bodies),
        b"".join(body + b"\n" for body in bodies),
        b"".join(
            json.dumps({"Subject": subject, "Data": base64.b64encode(b).decode()}).encode() + b"\0" for b in bodies
        ),
    ):
        found = messages(printed)
        assert [each.about.content.choices[0].tokens for each in found] == tokens
        assert {each.about.kind for each in found} == {"done"}


def test_headings_give_subject_sequence_time_and_headers() -> None:
    (found,) = messages(view("ps.tokens.gateway-1", 41, batch(10, 0x0A0A0A0A), "Nats-Msg-Id: w-1:7", "Other: a b"))
    assert (found.subject, found.seq, found.headers["Other"]) == ("ps.tokens.gateway-1", 41, "a b")
    assert found.time_ns == 1_795_339_800_000_000_000
    assert found.about.requests == {REQUEST}


def test_live_subjects_are_read_as_what_they_repeat() -> None:
    job = msgspec.structs.replace(
        samples.job(0, Stage("aggregated", "w-1")), request=msgspec.Raw(encode(samples.request()))
    )
    for subject, body, kind in (
        ("ps.live.gateway-1", batch(1), "tokens"),
        ("ps.live.work.aggregated.w-1", encode(job), "job"),
    ):
        (found,) = messages(sub(subject, body))
        assert found.about.kind == kind


def test_a_message_of_which_only_headers_are_printed_is_named_by_them() -> None:
    printed = sub(f"ps.live.done.default.tiny.{REQUEST}", b"", f"Nats-Msg-Id: {REQUEST}")
    (found,) = messages(printed + b'[#2] Received on "other"\n')
    assert found.about.requests == {REQUEST}


def test_json_of_stream_get_is_read() -> None:
    hdrs = base64.b64encode(b"NATS/1.0\r\nNats-Msg-Id: w-1:7\r\n\r\n").decode()
    body = {"subject": "ps.tokens.g", "seq": 3, "hdrs": hdrs, "data": base64.b64encode(batch(5)).decode()}
    printed = json.dumps(body | {"time": "2026-11-22T09:30:00.5Z"}, indent=2).encode() + b"\n"
    (found,) = messages(printed)
    assert (found.seq, found.headers["Nats-Msg-Id"], found.time_ns % 10**9) == (3, "w-1:7", 500_000_000)


@pytest.mark.parametrize(
    "printed",
    [
        b"12:00:01 Subscribing on ps.>\n",
        b'[#1] Received on "orders.new"\nhello: world\n\n{"id": 1}\n\n',
        b"[2] Subject: orders.new Received: 2026-11-22T09:30:00Z\n\nnil body\n\n",
        b'{\n  "some": "json"\n}\n',
        b'{"Subject": "orders.new", "Data": "eA=="}\n',
        b"\xc1\xff\x00 not ours\n",
        b"\x93 cut",
        b"",
    ],
)
def test_what_is_none_of_ours_passes_through_unchanged(printed: bytes) -> None:
    assert b"".join(each for each in read(printed) if isinstance(each, bytes)) == printed


def test_lines_come_out_readable_and_as_json() -> None:
    printed = b"12:00:01 Subscribing\n" + sub("ps.tokens.g", batch(1, 2, 3))
    for as_json in (False, True):
        out = io.StringIO()
        decode(io.BytesIO(printed), Console(file=out, width=150), as_json=as_json)
        first, second, *_ = out.getvalue().splitlines()
        assert first == "12:00:01 Subscribing"
        if as_json:
            assert msgspec.json.decode(second)["message"]["items"][0]["tokens"] == [1, 2, 3]
        else:
            assert second.startswith("tokens")
            assert "[0] +3 at 0" in second


@pytest.mark.parametrize(
    ("printed", "seconds"),
    [
        ("2026-11-22T09:30:00Z", 1795339800),
        ("2026-11-22T10:30:00+01:00", 1795339800),
        ("2026-11-22 09:30:00.5 +0000", 1795339800.5),
        ("2026-11-22 09:30:00", datetime(2026, 11, 22, 9, 30).timestamp()),
        ("yesterday", 0),
    ],
)
def test_times_are_read_as_each_version_of_the_command_prints_them(printed: str, seconds: float) -> None:
    assert _time(printed) == seconds * 1e9
