"""``penstock export`` and ``import`` on a real nats-server, and commands that read a file."""

import asyncio
import errno
import gzip
import json
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, format_time, read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.export import export, import_log
from penstock.log_tools.requests import inspect, list_requests, tail
from penstock.log_tools.sources import store_files
from penstock.log_tools.sources.data_folder import STREAMS_DIR, CopyFailed
from penstock.log_tools.sources.export_file import open_export
from penstock.log_tools.sources.log_line import Selection
from penstock.log_tools.sources.open_log import LogSource, open_log
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas.kv import KvBatch, Stored
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import encode
from tests.penstock.log_tools.requests.support import accept, assign, end, stream
from tests.pipeline.support import ROOT

Run = Callable[..., Coroutine[Any, Any, int]]
STREAMS = ("REQUESTS", "WORK", "TOKENS", "DONE", "KV")


@pytest.fixture
def run(broker: EmbeddedNats, subjects: Subjects) -> Run:
    async def run(command: Callable[[Sequence[str]], int], *argv: str) -> int:
        flags = ["--nats-url", broker.url(), "--namespace", subjects.namespace]
        return await asyncio.to_thread(command, [*argv, *flags])

    return run


async def recorded(bus: Bus, count: int = 3) -> list[str]:
    """Requests with their whole way, and a gap in WORK."""
    ids = []
    for _ in range(count):
        request = await accept(bus)
        await assign(bus, request)
        await stream(bus, request, 5, 6, 7)
        await end(bus, request, 5, 6, 7)
        ids.append(request.id)
    await bus.js.publish(bus.subjects.kv("tiny", "w-1"), encode(KvBatch("w-1", 1, 0, (Stored(bytes(16)),))))
    await bus.js.delete_msg(bus.subjects.stream("WORK"), 2)
    return ids


async def messages(bus: Bus, name: str) -> list[tuple[str, int, str, dict[str, str], bytes]]:
    def plain(entry: Entry) -> tuple[str, int, str, dict[str, str], bytes]:
        own = {key: value for key, value in entry.headers.items() if key == "Nats-Msg-Id" or key[:5] != "Nats-"}
        subject = entry.subject.partition(".")[2]
        return subject, entry.seq, entry.headers["Nats-Time-Stamp"], own, entry.data

    return [plain(entry) async for entry in read(bus, bus.subjects.stream(name), f"{bus.subjects.namespace}.>")]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
async def test_a_file_is_served_with_every_message_at_its_sequence_and_time(
    bus: Bus, run: Run, tmp_path: Path, suffix: str
) -> None:
    ids = await recorded(bus)
    file = tmp_path / f"all.{suffix}"
    assert await run(export.run, "--all", "-o", str(file)) == 0
    assert (suffix == "jsonl") == file.read_bytes().startswith(b'{"format":"penstock-export","version":2')
    if suffix == "jsonl":
        assert len(re.findall('"prompt":"[^"]', file.read_text())) == len(ids)  # not again in jobs and records
    source = LogSource(tmp_path, namespace="copy", file=str(file))
    async with open_log(source, name="test", streams=STREAMS) as log:
        assert log.stopped
        for name in STREAMS:
            assert await messages(log.bus, name) == await messages(bus, name), name
        timeline = await read_timeline(log.bus, ids[0])
    assert (len(timeline.stages), timeline.done is not None) == (1, True)


async def test_a_batch_smaller_than_the_stream_is_followed_by_the_next(
    bus: Bus, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await recorded(bus, 7)
    monkeypatch.setattr(export, "BATCH", 2)
    assert await run(export.run, "--all", "-o", str(tmp_path / "f")) == 0
    with open_export(str(tmp_path / "f")) as file:
        found = list(file.records())
    assert [record.seq for record in found if record.stream == "REQUESTS"] == list(range(1, 8))
    assert [record.seq for record in found if record.stream == "WORK"] == [1, 3, 4, 5, 6, 7]


async def test_of_a_few_requests_the_log_is_read_from_the_acceptance_to_the_end_of_each(bus: Bus) -> None:
    second = 10**9
    now = time.time_ns()
    old = await accept(bus, id=new_request_id(now - 100 * second))  # by a clock that is late
    await end(bus, old)
    ended = await accept(bus)
    await end(bus, ended)
    failed = await accept(bus)
    await end(bus, failed, code="worker_lost")
    running = await accept(bus)

    async def spans(*of: GenerateRequest) -> list[tuple[int, int]]:
        places = await export.places_of(bus, Selection(frozenset(each.id for each in of)))
        assert {each.id for each in places.requests or ()} == {each.id for each in of}
        return places.spans

    ((since, until),) = await spans(ended)
    assert now - second < since < now + second
    assert now < until < now + 10 * second
    ((_, late),) = await spans(failed)
    assert now + 59 * second < late < now + 70 * second
    ((_, open_end),) = await spans(running)
    assert open_end > now + 3600 * second
    ((first, _),) = await spans(old, ended)
    assert first < now - 101 * second
    assert await spans(failed, running, ended) == [(since, open_end)]


async def test_one_request_is_exported_without_the_others(
    bus: Bus, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = await recorded(bus)
    file = tmp_path / "one.jsonl"
    assert await run(export.run, f"resp_{ids[2]}", "-o", str(file)) == 0
    assert "1 request, 4 messages" in capsys.readouterr().err
    text = file.read_text()
    assert ids[2] in text
    assert ids[0] not in text
    assert await run(export.run, "--from-seq", "2", "-o", str(file)) == 0
    said = capsys.readouterr().err
    assert said.startswith("2 requests, 8 messages"), said  # two, with one deleted job, and the KV event


async def test_of_a_stopped_deployment_an_export_reads_what_an_inspection_reads_and_the_request(
    bus: Bus, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [time.time_ns() - (10 - number) * 60 * 10**9 for number in range(8)]
    requests = [await accept(bus, id=new_request_id(at), created_ns=at) for at in times]
    for request in requests:
        await assign(bus, request)
        await stream(bus, request, 5, 6, 7)
        await end(bus, request, 5, 6, 7)
    file = tmp_path / "all.jsonl"
    assert await run(export.run, "--all", "-o", str(file)) == 0
    header, *lines = map(json.loads, file.read_text().splitlines())
    for line in lines:  # as if they had been stored when the requests were made, each in a block of its own
        line["time"] = format_time(times[line["seq"] - 1])
    file.write_text("".join(json.dumps(each) + "\n" for each in (header, *lines)))
    monkeypatch.setattr(store_files, "BLOCK_BYTES", 1)
    folder = tmp_path / "folder"
    assert await asyncio.to_thread(import_log.run, [str(file), "--data-dir", str(folder)]) == 0
    server = EmbeddedNats(str(folder), bus.subjects.namespace)  # it notes what the streams hold when it stops
    await server.start()
    await server.stop()
    read_bytes, blocks = Path.read_bytes, set[str]()

    def noted(path: Path) -> bytes:
        if path.suffix == ".blk":
            blocks.add(f"{path.parts[-3].rpartition('_')[2]} {path.stem}")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    at = ["--data-dir", str(folder), requests[3].id]
    assert await asyncio.to_thread(inspect.run, at) == 0
    inspected = frozenset(blocks)
    assert {"DONE 4", "WORK 4", "TOKENS 4"} <= inspected
    assert len(inspected) < 10
    blocks.clear()
    assert await asyncio.to_thread(export.run, [*at, "-o", str(tmp_path / "one.jsonl")]) == 0
    assert blocks - inspected <= {"REQUESTS 3", "REQUESTS 4", "REQUESTS 5"}
    assert (tmp_path / "one.jsonl").read_text().count("\n") == 5


async def test_commands_that_read_the_log_read_a_file(
    bus: Bus, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = await recorded(bus)
    file = str(tmp_path / "all.jsonl")
    assert await run(export.run, "--all", "--redact", "-o", file) == 0
    capsys.readouterr()
    for command, argv in ((inspect.run, [ids[0], "--tokens"]), (list_requests.run, []), (tail.run, ["done"])):
        assert await asyncio.to_thread(command, [*argv, "--file", file]) == 0
        assert ids[0] in capsys.readouterr().out


async def test_an_import_waits_for_what_the_broker_has_read_and_not_stored_yet(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine it said that the broker had been restarted, or had no room."""
    described, looks = bus.js.stream_info, 0

    async def described_early(name: str) -> object:
        nonlocal looks
        info = await described(name)
        looks += 1
        if looks < 3:
            await accept(bus)
        return info

    monkeypatch.setattr(bus.js, "stream_info", described_early)
    await import_log._stored(bus, {"REQUESTS": 2})
    assert looks == 3
    monkeypatch.setattr(import_log, "GROWS_S", 0.0)
    with pytest.raises(ValueError, match="holds 2 of 3 messages"):
        await import_log._stored(bus, {"REQUESTS": 3})


async def test_an_import_keeps_times_in_a_folder_and_in_a_running_broker(
    bus: Bus, run: Run, broker: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = await recorded(bus)
    file, own = str(tmp_path / "all.jsonl"), bus.subjects.namespace
    assert await run(export.run, "--all", "-o", file) == 0
    folder, broker_flags = (
        ["--data-dir", str(tmp_path / "new")],
        ["--nats-url", broker.url(), "--namespace", f"{own}-2"],
    )
    for flags in (folder, broker_flags):
        assert await asyncio.to_thread(import_log.run, [file, *flags]) == 0
        assert "REQUESTS 3, WORK 2" in capsys.readouterr().out
        source = LogSource(tmp_path / "new") if flags is folder else LogSource(tmp_path, broker.url(), f"{own}-2")
        async with open_log(source, name="test", role="operator") as log:
            timeline = await read_timeline(log.bus, ids[2])
            times = [
                entry.time_ns
                async for entry in read(log.bus, log.bus.subjects.stream("DONE"), f"{log.bus.subjects.namespace}.>")
            ]
        assert (len(timeline.stages), timeline.done is not None) == (1, True)
        assert times == [entry.time_ns async for entry in read(bus, bus.subjects.stream("DONE"), f"{own}.>")]
        assert await asyncio.to_thread(import_log.run, [file, *flags]) == 1
        assert "--namespace" in capsys.readouterr().err


async def test_a_message_that_was_stored_twice_is_imported_twice(
    bus: Bus, run: Run, broker: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its publisher got no acknowledgement for longer than the broker remembers message ids."""
    await recorded(bus, 2)
    whole, twice = tmp_path / "all.jsonl", tmp_path / "twice.jsonl"
    assert await run(export.run, "--all", "-o", str(whole)) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    at = max(number for number, line in enumerate(lines) if b'"stream":"DONE"' in line)
    again = json.loads(lines[at])
    again["seq"] += 1
    lines.insert(at + 1, json.dumps(again, separators=(",", ":")).encode() + b"\n")
    twice.write_bytes(b"".join(lines))
    own = f"{bus.subjects.namespace}-3"
    for flags in (["--data-dir", str(tmp_path / "new")], ["--nats-url", broker.url(), "--namespace", own]):
        capsys.readouterr()
        assert await asyncio.to_thread(import_log.run, [str(twice), *flags]) == 0
        assert "DONE 3" in capsys.readouterr().out


async def test_no_files_are_written_for_a_nats_server_that_was_not_tested(
    bus: Bus, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await recorded(bus)
    file = str(tmp_path / "all.jsonl")
    assert await run(export.run, "--all", "-o", file) == 0
    monkeypatch.setattr(store_files, "TESTED", (2, 14, 9))
    assert await asyncio.to_thread(import_log.run, [file, "--data-dir", str(tmp_path / "new")]) == 1
    assert "import into a running broker with --nats-url" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


async def test_a_damaged_line_is_named_and_can_be_left_out(
    bus: Bus, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await recorded(bus)
    file, folder = tmp_path / "bad.jsonl", tmp_path / "new"
    assert await run(export.run, "--all", "-o", str(file)) == 0
    lines = file.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:50] + b"\n"
    lines[5] = lines[5].replace(b'"time":"2', b'"time":"x', 1)
    lines.insert(5, lines[1])  # a sequence that is over
    file.write_bytes(b"".join(lines))
    capsys.readouterr()
    assert await asyncio.to_thread(import_log.run, [str(file), "--data-dir", str(folder / "1")]) == 1
    assert "line 4: " in capsys.readouterr().err
    assert await asyncio.to_thread(import_log.run, [str(file), "--data-dir", str(folder / "1"), "--skip-bad"]) == 0
    said = capsys.readouterr()
    assert "left out 3 damaged lines: the first is line 4" in said.err
    assert "REQUESTS 2" in said.out
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(b"".join(lines))[:-40])
    assert await asyncio.to_thread(inspect.run, [samples_id(), "--file", str(packed)]) == 1
    assert "line " in capsys.readouterr().err
    for name, why in (("none.jsonl", "cannot be read"), ("x.zst", "zstd")):
        assert await asyncio.to_thread(inspect.run, [samples_id(), "--file", str(tmp_path / name)]) == 1
        assert why in capsys.readouterr().err


def samples_id() -> str:
    return "019ecb10-0000-7000-8000-000000000000"


async def test_a_disk_without_room_for_a_file_is_named(
    bus: Bus, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await recorded(bus)
    assert await run(export.run, "--all", "-o", str(tmp_path / "f")) == 0

    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_files, "checksums", full)
    with pytest.raises(CopyFailed, match=r"No space left on device.*TMPDIR"):
        async with open_log(LogSource(tmp_path, file=str(tmp_path / "f")), name="test"):
            pass


async def test_what_to_export_has_to_be_said(bus: Bus, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(export.run) == 1
    assert "--all" in capsys.readouterr().err
    assert await run(export.run, "--from-seq", "900") == 1
    assert "900" in capsys.readouterr().err
    assert await run(export.run, "--since", "2100-01-01") == 1
    assert "no request was accepted in this time" in capsys.readouterr().err


async def test_ids_that_the_log_does_not_have_leave_no_file(
    bus: Bus, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = await recorded(bus)
    file = tmp_path / "none.jsonl"
    assert await run(export.run, samples_id(), "-o", str(file)) == 1
    assert "none of these requests" in capsys.readouterr().err
    assert not file.exists()
    assert await run(export.run, samples_id(), ids[0], "-o", str(file)) == 0
    assert "1 of 2 requests are not in the log" in capsys.readouterr().err


@pytest.mark.parametrize("moved", [False, True])
async def test_an_import_that_was_killed_is_finished_by_the_next(
    bus: Bus, run: Run, tmp_path: Path, moved: bool
) -> None:
    await recorded(bus)
    file, folder = tmp_path / "all.jsonl", tmp_path / "imported"
    assert await run(export.run, "--all", "-o", str(file)) == 0
    whole = file.read_bytes()
    command = [sys.executable, "-m", "penstock", "import", "-", "--data-dir", str(folder), "--namespace", "in"]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, cwd=ROOT)
    assert process.stdin is not None
    process.stdin.write(whole[: len(whole) // 2])
    async with asyncio.timeout(30):
        while not list(folder.glob(f".import-*/{STREAMS_DIR}/in_REQUESTS")):  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
    process.kill()
    await process.wait()
    (left,) = folder.glob(".import-*")
    if moved:  # as if it had been killed between two renames
        (left / import_log.WHOLE).touch()
        streams = left / STREAMS_DIR
        (folder / STREAMS_DIR).mkdir(parents=True)
        (streams / "in_REQUESTS").rename(folder / STREAMS_DIR / "in_REQUESTS")
    flags = [str(file), "--data-dir", str(folder), "--namespace", "in"]
    assert await asyncio.to_thread(import_log.run, flags) == 0
    assert not list(folder.glob(".import-*"))
    async with open_log(LogSource(folder), name="test", streams=STREAMS) as log:
        for name in STREAMS:
            assert await messages(log.bus, name) == await messages(bus, name), name
