"""Messages of the NATS client protocol, compared with what nats-py makes of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.js.api import Header
from nats.protocol.command import hpub_cmd, pub_cmd
from nats.protocol.parser import Parser

from penstock.infra.bus.client import Frame, FrameReader, Headers, publish_command, read_headers, read_republished

SUBJECT = st.text("abc.-_$", min_size=1, max_size=12).filter(lambda name: name.strip("."))
HEADERS = st.dictionaries(st.text("abcXYZ-", min_size=1, max_size=8), st.text("xyz 09:;{}", max_size=12), max_size=4)


class Sent:
    """What a client sends, read as a server's messages: PUB and MSG have the same form."""

    def __init__(self, sid: int, subject: str, reply: str, headers: dict[str, str], data: bytes) -> None:
        self.frame = Frame(sid, subject.encode(), reply.encode(), _block(headers), data)
        sizes = [len(self.frame.headers)] if headers else []
        kind = b"HMSG" if headers else b"MSG"
        sizes.append(len(self.frame.headers) + len(data))
        line = [kind, subject.encode(), str(sid).encode(), *([reply.encode()] if reply else [])]
        line += [str(size).encode() for size in sizes]
        self.bytes = b" ".join(line) + b"\r\n" + self.frame.headers + data + b"\r\n"


def _block(headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode() if headers else b""


MESSAGES = st.builds(Sent, st.integers(1, 99), SUBJECT, SUBJECT | st.just(""), HEADERS, st.binary(max_size=40))
LINES = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Stale Connection'\r\n", b"INFO {}\r\n"])


@given(st.lists(MESSAGES | LINES, max_size=8), st.lists(st.integers(1, 60), max_size=20))
def test_frames_are_the_same_however_the_bytes_are_cut(sent: list[Sent | bytes], cuts: list[int]) -> None:
    data = b"".join(each if isinstance(each, bytes) else each.bytes for each in sent)
    reader, found, at = FrameReader(), [], 0
    for cut in [*cuts, len(data)]:
        found += list(reader.read(data[at : at + cut]))
        at += cut
    assert found == [each if isinstance(each, bytes) else each.frame for each in sent]


@given(MESSAGES)
async def test_a_message_is_read_as_nats_py_reads_it(sent: Sent) -> None:
    class Receiver:
        async def _process_msg(self, *fields: object) -> None:
            self.fields = fields

    receiver = Receiver()
    await Parser(receiver).parse(sent.bytes)
    frame = sent.frame
    assert receiver.fields == (frame.sid, frame.subject, frame.reply, frame.data, frame.headers or None)


@pytest.mark.parametrize("line", [b"MSG a b\r\n", b"MSG a 1 x\r\n", b"HMSG a 1 12\r\n", b"MSG \r\n"])
def test_a_malformed_line_is_an_error_of_the_protocol(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameReader().read(line))


@given(HEADERS.filter(bool))
def test_headers_are_read_as_nats_py_reads_them(headers: dict[str, str]) -> None:
    raw = _block(headers)
    assert read_headers(raw) == dict(Headers(raw)) == Client._parse_header_lines(raw[len(b"NATS/1.0\r\n") :])
    assert all(name in Headers(raw) and Headers(raw).get(name) == value for name, value in dict(Headers(raw)).items())
    assert "absent" not in Headers(raw)


@given(HEADERS, st.randoms(use_true_random=False))
def test_a_republished_message_is_read_in_whatever_order_the_server_writes(
    headers: dict[str, str], rng: random.Random
) -> None:
    added = {
        "Stream": "s",
        "Subject": "a.b",
        "Sequence": "7",
        "Time-Stamp": "2026-01-01T00:00:00Z",
        "Last-Sequence": "5",
    }
    as_servers_do = headers | {f"Nats-{name}": value for name, value in added.items()}
    shuffled = dict(rng.sample(list(as_servers_do.items()), len(as_servers_do)))
    assert read_republished(_block(as_servers_do)) == read_republished(_block(shuffled)) == ("a.b", 7, 5)
    assert read_republished(_block(headers)) is None


def test_a_republished_message_is_read_although_its_subject_is_no_text() -> None:
    """Without it, what follows would look like a gap, which is read again from the stream."""
    server = {"Stream": "s", "Subject": "a.?", "Sequence": "7", "Time-Stamp": "", "Last-Sequence": "5"}
    raw = _block({f"Nats-{name}": value for name, value in server.items()}).replace(b"?", b"\xff")
    assert read_republished(raw) == ("a.\ufffd", 7, 5)


@pytest.mark.parametrize(
    "raw",
    [
        b"NATS/1.0 404 No Messages\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\n\r\n",
        b"NATS/1.0\r\nname: \xc3\xa4\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0\r\nna me: value\r\n\r\n",
    ],
)
def test_unusual_headers_are_left_to_nats_py(raw: bytes) -> None:
    assert read_headers(raw) is None


@given(SUBJECT, st.binary(max_size=40), SUBJECT | st.just(""), HEADERS)
def test_a_message_is_published_as_nats_py_does(
    subject: str, payload: bytes, reply: str, headers: dict[str, str]
) -> None:
    ours = publish_command(subject, payload, reply, headers)
    theirs = hpub_cmd(subject, reply, _block(headers), payload) if headers else pub_cmd(subject, reply, payload)
    assert ours is not None
    assert ours.split() == theirs.split()  # nats-py writes two spaces where there is no reply
    assert ours.partition(b"\r\n")[2] == theirs.partition(b"\r\n")[2]


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0", "a\tb", "ä"])
def test_an_odd_subject_is_left_to_nats_py(subject: str) -> None:
    assert publish_command(subject, b"", "", None) is None
    assert publish_command("a", b"", subject or " ", None) is None


@pytest.mark.parametrize("headers", [{"a": "1\r\nb: 2"}, {"a": "1\n"}, {"a b": "1"}, {"": "1"}, {"a:": "1"}])
def test_a_header_cannot_begin_another_one(headers: dict[str, str]) -> None:
    assert publish_command("a", b"", "", headers) is None


def test_a_header_whose_name_is_a_member_of_nats_py_s_enum_has_its_value() -> None:
    """It went out as `Header.EXPECTED_LAST_SUBJECT_SEQUENCE`, and the server compared nothing."""
    command = publish_command("a", b"", "", {Header.EXPECTED_LAST_SUBJECT_SEQUENCE: "2"})
    assert command is not None
    assert b"\r\nNats-Expected-Last-Subject-Sequence: 2\r\n" in command
