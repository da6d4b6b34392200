"""Damaged messages of a stopped deployment are noticed, named and left out."""

import asyncio
import contextlib
import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.requests import inspect, list_requests
from penstock.log_tools.sources import store_files
from penstock.log_tools.sources.data_folder import STREAMS_DIR
from penstock.log_tools.sources.store_files import HAS_HEADERS, HEADER, StoredStream, damaged, key_of, records
from penstock.operate.doctor.doctor_command import check_logs
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import ROUTER_ACK_WAIT_S
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, assign, end, stream


@pytest.fixture
async def stopped(make_broker: Callable[..., EmbeddedNats]) -> tuple[Path, list[GenerateRequest]]:
    """The data folder of a deployment, and its requests."""
    server = make_broker()
    await server.start()
    async with opened(server, server.subjects) as bus:
        requests = [await accept(bus) for _ in range(3)]
        for request in requests:
            await assign(bus, request)
            await stream(bus, request, 7, 8, 9)
            await end(bus, request, 7, 8, 9)
    await server.stop()
    return server.data_dir, requests


def block_of(data_dir: Path, name: str) -> Path:
    return data_dir / STREAMS_DIR / f"ps_{name}" / "msgs" / "1.blk"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def run(command: Callable[[list[str]], int], *argv: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert command(list(argv)) == 0
    return out.getvalue()


@pytest.mark.parametrize("few_bytes", [0, 1 << 30], ids=["many", "few"])
async def test_every_damaged_byte_of_a_message_is_noticed(
    stopped: tuple[Path, list[GenerateRequest]], monkeypatch: pytest.MonkeyPatch, few_bytes: int
) -> None:
    monkeypatch.setattr(store_files, "_FEW_BYTES", few_bytes)
    path = block_of(stopped[0], "DONE")
    block = path.read_bytes()
    key = key_of("ps_DONE", 1)
    offsets = [at for _, _, at in records(block).places]
    assert len(offsets) == 3
    assert damaged(key, block, offsets) == []
    assert damaged(key_of("ps_WORK", 1), block, offsets) == offsets
    at, lengths = offsets[1], HEADER.unpack_from(block, offsets[1])
    length, subject = lengths[0] & ~HAS_HEADERS, lengths[3]
    of_headers = range(HEADER.size + subject, HEADER.size + subject + 4)
    for place in range(4, length, 5 if few_bytes else 37):
        if place not in of_headers and place not in (20, 21):  # a damaged length moves what follows
            changed = bytearray(block)
            changed[at + place] ^= 1
            assert damaged(key, bytes(changed), offsets) == [at], place


async def test_damaged_messages_are_left_out_of_lists_if_checksums_are_verified(
    stopped: tuple[Path, list[GenerateRequest]],
) -> None:
    data_dir, requests = stopped
    path = block_of(data_dir, "DONE")
    offsets = [at for _, _, at in records(path.read_bytes()).places]
    flip(path, offsets[2] - 20)  # in the body of the second
    argv = ("--data-dir", str(data_dir), "--state", "done", "--json")
    with capture_logs() as logs:
        lines = (await asyncio.to_thread(run, list_requests.run, *argv, "--verify")).splitlines()
    assert [json.loads(line)["id"] for line in lines] == [requests[2].id, requests[0].id]
    assert ("messages_damaged", 2) in [(each["event"], each.get("first")) for each in logs]
    assert [raw.seq for raw in StoredStream(path.parents[1], verify=True).forward()] == [1, 3]


async def test_overwritten_bytes_cost_only_the_messages_that_they_hit(
    stopped: tuple[Path, list[GenerateRequest]],
) -> None:
    path = block_of(stopped[0], "DONE")
    block = path.read_bytes()
    begins = [at for _, _, at in records(block).places]
    ends = [*begins[1:], len(block)]
    rng = random.Random(1)
    for filling in (bytes(64), b"\xff" * 64, rng.randbytes(64), struct.pack("<IQqH", 100, 2, 1, 9) + bytes(42)):
        for at in (*range(0, ends[1], 9), begins[1], begins[1] - 1, begins[1] - 40, ends[1] - 64):
            damaged = block[:at] + filling + block[at + 64 :]
            path.write_bytes(damaged)
            # The filling can be what was there: a checksum may end in the same byte.
            spans = [slice(*span) for span in zip(begins, ends, strict=True)]
            unharmed = {number for number, span in enumerate(spans) if damaged[span] == block[span]}
            with capture_logs():
                kept = {raw.seq - 1 for raw in StoredStream(path.parents[1], verify=True).forward()}
            assert kept == unharmed, (filling[:4], at)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("flags", [(), ("--verify",)])
async def test_a_request_whose_record_was_overwritten_is_in_an_unknown_state_and_others_are_not(
    stopped: tuple[Path, list[GenerateRequest]], killed: bool, flags: tuple[str, ...]
) -> None:
    data_dir, requests = stopped
    path = block_of(data_dir, "DONE")
    block = path.read_bytes()
    at = records(block).places[0][2]
    path.write_bytes(block[:at] + random.Random(1).randbytes(64) + block[at + 64 :])
    if killed:  # the server has noted nothing
        (path.parent / "index.db").unlink()
    folder = ("--data-dir", str(data_dir), "--json", *flags)
    with capture_logs() as logs:
        lines = (await asyncio.to_thread(run, list_requests.run, *folder)).splitlines()
        one = await asyncio.to_thread(run, list_requests.run, *folder, "--state", "unknown")
        shown = json.loads(await asyncio.to_thread(run, inspect.run, requests[0].id, *folder))
    found = {each["id"]: each["state"] for each in map(json.loads, lines)}
    assert found == {requests[0].id: "unknown", requests[1].id: "done", requests[2].id: "done"}
    assert len(lines) == 3
    assert json.loads(one)["id"] == requests[0].id
    assert shown["request"]["state"] == "unknown"
    assert any(each.startswith("its end") for each in shown["missing"])
    assert "block_damaged" in {each["event"] for each in logs}


@pytest.mark.parametrize(("begin", "lost"), [(60, [1]), (0, [1, 2, 3])], ids=["body", "length"])
async def test_a_running_broker_that_lost_records_has_their_requests_in_an_unknown_state_and_doctor_says_why(
    make_broker: Callable[..., EmbeddedNats], begin: int, lost: list[int]
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, server.subjects) as bus:
        asked = [await accept(bus) for _ in range(5)]
        for request in asked[:4]:
            await end(bus, request, *range(100))
        taken = await bus.js.pull_subscribe("", "router-standard", bus.subjects.stream("REQUESTS"))
        for message in await taken.fetch(4, timeout=ROUTER_ACK_WAIT_S):
            await message.ack_sync()
    await server.stop()
    path = block_of(server.data_dir, "DONE")
    block = path.read_bytes()
    at = records(block).places[1][2] + begin
    path.write_bytes(block[:at] + random.Random(1).randbytes(64) + block[at + 64 :])
    await server.start()
    (server.data_dir / "logs").mkdir()
    try:
        broker = ("--nats-url", server.url(), "--namespace", server.subjects.namespace, "--json")
        with capture_logs() as logs:
            lines = await asyncio.to_thread(run, list_requests.run, *broker)
        findings = {each.check: each.what for each in check_logs(server.data_dir / "logs")}
    finally:
        await server.stop()
    found = {each["id"]: each["state"] for each in map(json.loads, lines.splitlines())}
    states = ["unknown" if number in lost else "done" for number in range(4)]
    assert found == dict(zip([each.id for each in asked], states, strict=False)) | {asked[4].id: "queued"}
    assert "records_missing" in {each["event"] for each in logs}
    assert ("ps_DONE" in findings.get("damaged streams", "")) is (len(lost) > 1)  # the server is silent about one


async def test_which_requests_have_ended_is_read_from_what_the_server_noted(
    stopped: tuple[Path, list[GenerateRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredStream, "by_block", None)  # no record is read
    flags = ("--data-dir", str(stopped[0]), "--state", "running", "--state", "queued", "--json")
    assert await asyncio.to_thread(run, list_requests.run, *flags) == ""


async def test_a_request_that_runs_while_the_server_is_killed_in_a_write_still_runs(
    stopped: tuple[Path, list[GenerateRequest]],
) -> None:
    data_dir, requests = stopped
    path = block_of(data_dir, "DONE")
    block = path.read_bytes()
    path.write_bytes(block[: records(block).places[2][2] + 50])
    with capture_logs():
        lines = await asyncio.to_thread(run, list_requests.run, "--data-dir", str(data_dir), "--json")
    assert {each["id"]: each["state"] for each in map(json.loads, lines.splitlines())} == {
        requests[2].id: "running",
        requests[1].id: "done",
        requests[0].id: "done",
    }


@pytest.mark.parametrize("name", ["DONE", "WORK", "TOKENS"])
async def test_inspect_names_the_damaged_messages_of_its_request(
    stopped: tuple[Path, list[GenerateRequest]], name: str
) -> None:
    data_dir, requests = stopped

    async def missing(request: GenerateRequest) -> list[str]:
        shown = await asyncio.to_thread(run, inspect.run, request.id, "--data-dir", str(data_dir), "--json")
        found: list[str] = json.loads(shown).get("missing", [])
        return found

    assert await missing(requests[1]) == []
    path = block_of(data_dir, name)
    offsets = [at for _, _, at in records(path.read_bytes()).places]
    flip(path, offsets[2] - 20)
    assert f"messages about it that are damaged on the disk are left out: {name} 2" in await missing(requests[1])
    assert await missing(requests[0]) == []


async def test_verifying_is_refused_where_there_are_no_files_to_verify(
    broker: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv in (["--nats-url", broker.url()], ["--file", str(tmp_path / "none.jsonl")]):
        assert await asyncio.to_thread(list_requests.run, [*argv, "--verify"]) == 1
        assert "--verify is for the data folder of a stopped deployment" in capsys.readouterr().err
    monkeypatch.setattr("penstock.log_tools.sources.open_log.can_verify_much", lambda: False)
    assert await asyncio.to_thread(list_requests.run, ["--data-dir", str(tmp_path), "--verify"]) == 1
    assert "pip install 'penstock[router]'" in capsys.readouterr().err
