"""Streams read from the files of a broker that does not run: what they hold is what the broker would serve."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, Readable, get, get_last, get_last_of, get_next, read, read_backwards
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.sources.data_folder import STREAMS_DIR, CopyFailed, StoredLog
from penstock.log_tools.sources.open_log import LogSource, open_log
from penstock.log_tools.sources.store_files import (
    HEADER,
    StoredStream,
    UnreadableFiles,
    message,
    parse_headers,
    records,
    subject_pattern,
)
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened

Stored = tuple[int, int, str, dict[str, str], bytes]
SUBJECTS = ("ps.work.a.one", "ps.work.a.two", "ps.work.b.one")


def written(folder: Path, blocks: list[list[tuple[int, int, str, bytes]]]) -> Path:
    """A stream's folder with these messages: sequence (with its flags), time, subject, body."""
    msgs = folder / "ps_TEST" / "msgs"
    msgs.mkdir(parents=True)
    (msgs.parent / "meta.inf").write_text('{"created":"2026-11-22T00:00:00Z"}')
    for number, block in enumerate(blocks, 1):
        out = b""
        for seq, time_ns, subject, body in block:
            name = subject.encode()
            out += (
                HEADER.pack(HEADER.size + len(name) + len(body) + 8, seq, time_ns, len(name)) + name + body + bytes(8)
            )
        (msgs / f"{number}.blk").write_bytes(out)
    return msgs.parent


stored_messages = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(SUBJECTS), st.integers(0, 3), st.binary(max_size=40), st.booleans()),
    max_size=30,
)


@given(stored_messages, st.integers(1, 7), st.sampled_from((">", "ps.>", "ps.work.a.*", "ps.work.*.one")), st.data())
def test_both_directions_give_what_is_stored_from_any_place(
    tmp_path_factory: pytest.TempPathFactory,
    given_messages: list[tuple[int, str, int, bytes, bool]],
    per_block: int,
    subject: str,
    data: st.DataObject,
) -> None:
    seq = time_ns = 0
    rows, model = [], []
    for gap, name, pause, body, erased in given_messages:
        seq, time_ns = seq + 1 + gap, time_ns + pause
        rows.append((seq | erased << 63, time_ns, name, body))
        if not erased:
            model.append((seq, time_ns, name, body))
    gone = data.draw(st.sets(st.sampled_from([each[0] for each in model]))) if model else set()
    rows += [(each | 1 << 62, time_ns, "", b"") for each in sorted(gone)]
    blocks = [rows[start : start + per_block] for start in range(0, len(rows), per_block)]
    stream = StoredStream(written(tmp_path_factory.mktemp("store"), blocks))

    pattern = subject_pattern(subject)
    left = [each for each in model if each[0] not in gone]
    wanted = [each for each in left if pattern is None or pattern.fullmatch(each[2].encode())]
    after, since = data.draw(st.integers(0, seq + 1)), data.draw(st.integers(0, time_ns + 1))
    assert [each.seq for each in stream.forward(pattern)] == [each[0] for each in wanted]
    assert [each.seq for each in stream.forward(pattern, after=after)] == [s for s, *_ in wanted if s > after]
    assert [each.seq for each in stream.forward(pattern, since_ns=since)] == [s for s, t, *_ in wanted if t >= since]
    assert [each.seq for each in stream.backward(pattern)] == [each[0] for each in reversed(wanted)]
    before = after + 1
    assert [each.seq for each in stream.backward(pattern, before=before)] == [
        s for s, *_ in reversed(wanted) if s < before
    ]
    assert [message(each.block, each.at).data for each in stream.forward()] == [each[3] for each in left]


def write_index(folder: Path, messages: int, first_seq: int, last_seq: int) -> None:
    """As the server does when it stops: the last block's checksum is that of its last record."""
    last = max((folder / "msgs").glob("*.blk"), key=lambda path: int(path.stem))
    numbers = [bytes([value & 127 | 128, value >> 7]) for value in (messages, 0, first_seq, 0, last_seq)]
    head = b"\x0b\x01" + b"".join(numbers) + bytes(32)
    (folder / "msgs" / "index.db").write_bytes(head + last.read_bytes()[-8:] + bytes(8))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12).filter(any), st.data())
def test_blocks_that_are_opened_when_they_are_needed_give_the_same_messages(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    blocks, seq = [], 0
    for size in sizes:  # 0: of tombstones alone, about messages before the first one
        rows = [(seq + number, seq + number, "ps.a", b"x") for number in range(1, size + 1)]
        blocks.append(rows or [(1 << 62, seq, "", b"")])
        seq += size
    folder = written(tmp_path_factory.mktemp("store"), blocks)
    write_index(folder, seq, 1, seq)
    stream = StoredStream(folder)
    at = data.draw(st.integers(0, seq + 1))
    assert [each.seq for each in stream.forward(after=at)] == list(range(at + 1, seq + 1))
    assert [each.seq for each in stream.forward(since_ns=at)] == list(range(max(1, at), seq + 1))
    assert [each.seq for each in stream.backward(before=at + 1)] == list(range(min(at, seq), 0, -1))
    assert (stream.empty, stream.last_seq, stream.deleted()) == (False, seq, [])


def test_one_message_of_a_large_stream_is_read_from_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, [[(seq, seq, "ps.a", b"x")] for seq in range(1, 201)])
    write_index(folder, 200, 1, 200)
    opened_blocks = set()
    begin = StoredStream._begin

    def noted(stream: StoredStream, number: int, deleted: list[int]) -> object:
        opened_blocks.add(number)
        return begin(stream, number, deleted)

    monkeypatch.setattr(StoredStream, "_begin", noted)
    stream = StoredStream(folder)
    assert next(stream.forward(since_ns=77)).seq == 77
    assert next(stream.backward(before=78)).seq == 77
    assert len(opened_blocks) < 12


def test_what_the_server_was_writing_when_it_was_killed_is_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path, [[(1, 1, "ps.a", b"one"), (2, 2, "ps.a", b"two")]])
    block = folder / "msgs" / "1.blk"
    whole = block.read_bytes()
    for size in range(len(whole)):
        block.write_bytes(whole[:size])
        kept = [each.seq for each in StoredStream(folder).forward()]
        assert kept == ([1] if size >= len(whole) // 2 else [])


@pytest.mark.parametrize("place", [0, 5, 9])
@pytest.mark.parametrize("bit", [3, 40, 61])
def test_a_flipped_bit_in_a_sequence_costs_one_message_and_is_said(tmp_path: Path, place: int, bit: int) -> None:
    rows = [(seq, seq, "ps.a", b"x") for seq in range(16, 26)]
    rows[place] = (rows[place][0] ^ 1 << bit, *rows[place][1:])
    with capture_logs() as logs:
        stream = StoredStream(written(tmp_path, [rows]))
        assert [each.seq for each in stream.forward()] == [seq for seq in range(16, 26) if seq != 16 + place]
        assert len(stream.deleted()) == (place == 5)
    assert [each["event"] for each in logs] == ["block_damaged"]


def test_a_damaged_length_is_said_of_the_last_block_too(tmp_path: Path) -> None:
    folder = written(tmp_path, [[(number, number, "ps.a", b"one") for number in range(1, 10)]])
    block = folder / "msgs" / "1.blk"
    data = bytearray(block.read_bytes())
    data[len(data) // 9 * 4 + 2] ^= 1
    block.write_bytes(data)
    with capture_logs() as logs:
        assert [each.seq for each in StoredStream(folder).forward()] == [1, 2, 3, 4]
    assert [(each["event"], each["bytes_left_out"]) for each in logs] == [("block_damaged", len(data) // 9 * 5)]


def test_lengths_that_cannot_be_end_a_block() -> None:
    for length in (0, 29, 1 << 30):
        assert records(struct.pack("<IQqH", length, 1, 1, 0) + bytes(64)).places == []


def test_encrypted_and_compressed_streams_are_left_to_a_broker(tmp_path: Path) -> None:
    folder = written(tmp_path, [])
    (folder / "meta.inf").write_text('{"compression":"s2"}')
    with pytest.raises(UnreadableFiles):
        StoredStream(folder)
    (folder / "meta.inf").write_text("{}")
    (folder / "meta.key").touch()
    with pytest.raises(UnreadableFiles):
        StoredStream(folder)


async def everything(log: Readable, stream: str, subject: str = ">") -> list[Stored]:
    return [plain(each) async for each in read(log, stream, subject)]


def plain(entry: Entry) -> Stored:
    headers = {name: value for name, value in entry.headers.items() if name == "Nats-Msg-Id" or name[:5] != "Nats-"}
    return entry.seq, entry.time_ns, entry.subject, headers, entry.data


async def fill(bus: Bus) -> None:
    """Two streams with every kind of hole: erased, deleted, and purged messages."""
    for number in range(60):
        subject = f"ps.work.{'ab'[number % 2]}.{number % 7}"
        await bus.js.publish(subject, b"x" * number, headers={"Nats-Msg-Id": f"id-{number}", "Other": "a: b"})
    for number in range(5):
        await bus.js.publish(f"ps.tokens.{number}", bytes([number]))
    await bus.js.delete_msg("ps_WORK", 7)  # overwritten
    body = b'{"seq": 12, "no_erase": true}'
    assert b'"success":true' in (await bus.nc.request("$JS.API.STREAM.MSG.DELETE.ps_WORK", body)).data
    await bus.js.purge_stream("ps_WORK", subject="ps.work.b.3")
    await bus.js.purge_stream("ps_WORK", seq=4)


@pytest.mark.parametrize("killed", [False, True])
async def test_the_files_hold_what_the_broker_serves(make_broker: Callable[..., EmbeddedNats], killed: bool) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, Subjects("ps")) as bus:
        await fill(bus)
        names = ("ps_WORK", "ps_TOKENS")
        served = {name: await everything(bus, name) for name in names}
        some = await everything(bus, "ps_WORK", "ps.work.a.*")
        last = await get_last(bus, "ps_WORK", "ps.work.a.2")
        wanted = ["ps.work.a.2", "ps.work.b.5", "ps.work.none"]
        several = [plain(each) for each in await get_last_of(bus, "ps_WORK", wanted)]
        info = json.loads((await bus.nc.request("$JS.API.STREAM.INFO.ps_WORK", b"")).data)
        since = [plain(each) async for each in read(bus, "ps_WORK", ">", since_ns=served["ps_WORK"][20][1])]
    if killed:
        server.kill()
        server._lock.release()
    else:
        await server.stop()
    log = StoredLog(server.data_dir / STREAMS_DIR, Subjects("ps"), (*names, "ps_NONE"))
    assert len(served["ps_WORK"]) > 40
    for name in names:
        assert await everything(log, name) == served[name]
        assert [plain(each) async for each in read_backwards(log, name, ">")] == served[name][::-1]
    assert await everything(log, "ps_WORK", "ps.work.a.*") == some
    assert [plain(each) async for each in read(log, "ps_WORK", ">", since_ns=served["ps_WORK"][20][1])] == since
    assert last is not None
    assert plain(last) == plain(await get_last(log, "ps_WORK", "ps.work.a.2") or last._replace(seq=0))
    assert [plain(each) for each in await get_last_of(log, "ps_WORK", wanted)] == several
    assert await get(log, "ps_WORK", 7) is None
    assert await get(log, "ps_WORK", 12) is None
    following = await get_next(log, "ps_WORK", "ps.work.a.>", 20)
    assert following is not None
    assert following.seq == 21
    state = log.state("ps_WORK")
    assert (state.first_seq, state.last_seq, state.messages) == (5, 60, len(served["ps_WORK"]))
    assert state.created == info["created"]
    assert (state.max_age_s, state.max_bytes) == (info["config"]["max_age"] / 1e9, info["config"]["max_bytes"])
    assert state.deleted == [7, 12, 18, 32, 46, 60]
    assert await everything(log, "ps_NONE") == []


async def test_a_damaged_index_hides_no_message(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, Subjects("ps")) as bus:
        await fill(bus)
        served = await everything(bus, "ps_WORK")
    await server.stop()
    folder = server.data_dir / STREAMS_DIR / "ps_WORK"
    index = folder / "msgs" / "index.db"
    whole = index.read_bytes()
    for at in range(2, 24):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        seqs = [each.seq for each in StoredStream(folder).forward()]
        assert set(seqs) >= {each[0] for each in served}


async def test_reading_ends_when_the_deployment_is_started(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, Subjects("ps")) as bus:
        await fill(bus)
    await server.stop()
    async with open_log(LogSource(server.data_dir), name="test", streams=("WORK", "TOKENS"), files=True) as log:
        assert log.files is not None
        await server.start()
        with pytest.raises(CopyFailed, match="was started while its log was read"):
            await everything(log.reader, "ps_TOKENS")


def test_headers_are_read_as_they_were_sent() -> None:
    assert parse_headers(b"NATS/1.0\r\nNats-Msg-Id: a:1\r\nOther:  b: c \r\n\r\n") == {
        "Nats-Msg-Id": "a:1",
        "Other": "b: c",
    }
