"""Images of recorded requests on a real nats-server: with exports, imports, and on their way to another deployment."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.export import export, import_log
from penstock.log_tools.export.recording import BUCKET, RecordedRun, move_media
from penstock.log_tools.sources.data_folder import MEDIA
from penstock.log_tools.sources.log_line import STREAMS
from penstock.log_tools.sources.open_log import LogSource, open_log
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, Media
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, end

Command = Callable[..., Coroutine[Any, Any, int]]
PICTURES = [random.Random(size).randbytes(size) for size in (100, object_store.CHUNK + 7)]


@pytest.fixture
async def other(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    async with opened(broker, Subjects(subjects.namespace + "x")) as bus:
        yield bus


@pytest.fixture
def run(broker: EmbeddedNats, subjects: Subjects) -> Command:
    async def run(command: Callable[[Sequence[str]], int], *argv: str) -> int:
        flags = ["--nats-url", broker.url(), "--namespace", subjects.namespace]
        return await asyncio.to_thread(command, [*argv, *flags])

    return run


def medium(data: bytes) -> Media:
    return Media(blake3(data).digest(), "image/png", len(data), 0, 1)


async def asked(bus: Bus, *pictures: bytes, stored: bool = True) -> GenerateRequest:
    for data in pictures if stored else ():
        await object_store.put(bus, BUCKET, medium(data).digest.hex(), data)
    request = await accept(bus, media=tuple(map(medium, pictures)))
    await end(bus, request, 5)
    return request


async def there(bus: Bus, data: bytes) -> bool:
    try:
        return await object_store.get(bus, BUCKET, medium(data).digest.hex(), limit=1 << 30) == data
    except ServingError:
        return False


async def test_images_are_in_the_file_and_are_read_from_it_and_from_what_was_imported(
    bus: Bus, run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await asked(bus, *PICTURES)
    await asked(bus, PICTURES[0])
    file = tmp_path / "all.jsonl"
    assert await run(export.run, "--all", "-o", str(file)) == 0
    assert "2 images (512 KiB)" in capsys.readouterr().err
    folder = tmp_path / "imported"
    assert await asyncio.to_thread(import_log.run, [str(file), "--data-dir", str(folder), "--namespace", "in"]) == 0
    for source in (LogSource(tmp_path, namespace="copy", file=str(file)), LogSource(folder)):
        async with open_log(source, name="test", streams=(*STREAMS, MEDIA)) as log:
            assert [await there(log.bus, data) for data in PICTURES] == [True, True]


@pytest.mark.parametrize(
    ("flags", "said", "left"),
    [
        (("--redact",), "2 images left out, since a redacted file has none", 0),
        (("--media-bytes", "0"), "2 images left out: larger together than --media-bytes 0", 0),
        (("--media-bytes", "1KiB"), "1 image (100 B); 1 image left out: larger together", 1),
    ],
)
async def test_images_that_are_left_out_are_counted(
    bus: Bus,
    run: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    said: str,
    left: int,
) -> None:
    await asked(bus, *PICTURES)
    file = tmp_path / "all.jsonl"
    assert await run(export.run, "--all", "-o", str(file), *flags) == 0
    assert said in capsys.readouterr().err
    async with open_log(LogSource(tmp_path, file=str(file)), name="test", streams=(*STREAMS, MEDIA)) as log:
        assert [await there(log.bus, data) for data in PICTURES] == [bool(left), False]


async def test_images_that_a_deployment_no_longer_has_are_counted(
    bus: Bus, run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await asked(bus, PICTURES[0], stored=False)
    assert await run(export.run, "--all", "-o", str(tmp_path / "f")) == 0
    assert "1 image left out: the deployment keeps images for 2 h" in capsys.readouterr().err


async def test_images_go_where_requests_are_run_again_and_what_is_gone_is_named(bus: Bus, other: Bus) -> None:
    kept, gone = await asked(bus, *PICTURES), await asked(bus, b"another", stored=False)
    runs = [RecordedRun(each.id, each) for each in (kept, gone)]
    assert await move_media(bus, other, runs, 60.0) == {gone.id}
    assert [await there(other, data) for data in PICTURES] == [True, True]
    await object_store.put(other, BUCKET, medium(b"another").digest.hex(), b"another")  # the target may have it
    assert await move_media(bus, other, runs, 60.0) == set()
    await object_store.put(other, BUCKET, medium(b"damaged").digest.hex(), b"else")
    damaged = await asked(bus, b"damaged", stored=False)
    assert await move_media(bus, other, [RecordedRun(damaged.id, damaged)], 60.0) == {damaged.id}
