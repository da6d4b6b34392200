"""Bodies with images through a gateway: fetched, checked, stored, named; on a real nats-server."""

import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from PIL import Image, ImageFile

from penstock.configs.settings import GatewaySettings
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.base.request_bodies import CHAT
from penstock.gateway.media import loader as media_loader
from penstock.gateway.media.loader import MediaLoader
from penstock.gateway.media.sources import MediaPart
from penstock.gateway.service.gateway import CellLink, Gateway
from penstock.infra.bus import object_store
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.object_store import get
from penstock.infra.bus.publisher import Publisher
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.model import video
from penstock.infra.model.modeldir import MODELS, Vision, load
from penstock.infra.model.patch_grid import patch_grid
from penstock.infra.model.video import VideoFacts
from penstock.schemas.errors import Code, ServingError
from tests.demo_model import vision as pictures
from tests.demo_model.evaluate import messages_of
from tests.gateway.media.support import Site, chat_body, data_url, image
from tests.gateway.media.test_image_header import picture, png
from tests.workers.engines.native.qwen_vl import film

VISION = Vision("<image>", 1279, 64, 8)
PNG = picture(40, 30, "PNG")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site().opened() as site:
        yield site


def settings_for(**more: Any) -> GatewaySettings:
    return GatewaySettings(served_model_name="m", allow_private_media_addresses=True, media_timeout_s=5.0, **more)


def gateway_on(bus: Bus, **more: Any) -> Gateway:
    model = load(MODELS / "demo-vision")
    return Gateway([CellLink(bus, Publisher(bus))], [model], settings_for(**more), GatewayMetrics(MetricScope()))


async def kept_nowhere(owner: str, digest: bytes, data: bytes, keep_s: float) -> None:
    raise AssertionError("no request here is made with no_store")


def loader(bus: Bus, **more: Any) -> MediaLoader:
    return MediaLoader(bus, settings_for(**more), GatewayMetrics(MetricScope()), kept_nowhere)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that the store was asked to keep."""
    names: list[str] = []

    async def put(bus: Bus, bucket: str, name: str, data: bytes, **options: Any) -> float:
        names.append(name)
        return await object_store.put(bus, bucket, name, data, **options)

    monkeypatch.setattr(media_loader, "put", put)
    return names


async def refusal(work: Any) -> ServingError:
    with pytest.raises(ServingError) as caught:
        await work
    return caught.value


async def test_an_image_is_stored_as_it_came_before_its_request_is_made(bus: Bus, site: Site, tmp_path: Path) -> None:
    others = {"jpeg": picture(9, 9, "JPEG"), "webp": picture(8, 8, "WEBP"), "gif": picture(7, 7, "GIF")}
    (tmp_path / "a.gif").write_bytes(others["gif"])
    gateway = gateway_on(bus, allowed_local_media_path=str(tmp_path))
    body = chat_body(
        "one",
        image(data_url(PNG, "image/jpeg")),  # what the client calls it does not count
        image(site.serve("/x", others["jpeg"], "Content-Type: text/html")),
        image(f"file://{tmp_path}/a.gif"),
        image(data_url(others["webp"])),
    )
    prepared = await gateway.prepare(CHAT, body)
    media = prepared.request.media
    assert [m.kind for m in media] == ["image/png", "image/jpeg", "image/gif", "image/webp"]
    for medium, data in zip(media, (PNG, others["jpeg"], others["gif"], others["webp"]), strict=True):
        assert (medium.digest, medium.size, medium.tokens) == (blake3(data).digest(), len(data), 64)
        assert await get(bus, "media", medium.digest.hex(), limit=1 << 20) == data
    assert prepared.prompt_tokens == len(prepared.request.prompt) // 4 > 4 * 64


async def test_what_the_evaluation_sends_is_taken(bus: Bus) -> None:
    gateway = gateway_on(bus)
    for task in pictures.TASKS:
        (sample,) = pictures.cases(task, 1, 3)
        body = json.dumps({"model": "m", "messages": messages_of(sample), "max_tokens": 1024, "temperature": 0})
        prepared = await gateway.prepare(CHAT, body.encode())
        assert [m.kind for m in prepared.request.media] == ["image/png"]


async def test_a_name_is_the_hash_of_the_raw_bytes_and_nothing_is_decoded(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S76."""

    def decoder(*args: Any, **options: Any) -> None:
        raise AssertionError("decoded")

    for name in ("open", "frombytes", "frombuffer"):
        monkeypatch.setattr(Image, name, decoder)
    monkeypatch.setattr(Image.Image, "load", decoder)
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoder)
    damaged = bytearray(PNG)
    damaged[-40:-20] = bytes(20)  # no decoder would take it
    media = await loader(bus).load(
        [MediaPart("f", data_url(PNG)), MediaPart("f", data_url(bytes(damaged)))], VISION, 60
    )
    assert [m.digest for m in media] == [blake3(PNG).digest(), blake3(damaged).digest()]


async def test_an_embedding_file_is_stored_and_has_its_own_number_of_tokens(bus: Bus, tmp_path: Path) -> None:
    header = json.dumps({"e": {"dtype": "F32", "shape": [5, 256], "data_offsets": [0, 5120]}}).encode()
    data = struct.pack("<Q", len(header)) + header + os.urandom(5120)
    (tmp_path / "e.safetensors").write_bytes(data)
    gateway = gateway_on(bus, allowed_local_media_path=str(tmp_path))
    part = {"type": "image_embeds", "image_embeds": {"url": f"{tmp_path}/e.safetensors"}}
    prepared = await gateway.prepare(CHAT, chat_body(part, "?"))
    (medium,) = prepared.request.media
    assert (medium.kind, medium.tokens, medium.digest) == ("embedding", 5, blake3(data).digest())
    assert await get(bus, "media", medium.digest.hex(), limit=1 << 20) == data
    wrong = {"type": "image_embeds", "image_embeds": {"url": data_url(PNG)}}
    error = await refusal(gateway.prepare(CHAT, chat_body(wrong)))
    assert (error.code, error.param) == (Code.invalid_request, "messages[0].content[0].image_embeds")
    pickle = {"type": "image_embeds", "image_embeds": data_url(b"\x80\x04\x95" + bytes(100))}
    assert "not a safetensors file" in (await refusal(gateway.prepare(CHAT, chat_body(pickle)))).message
    swapped = image(f"{tmp_path}/e.safetensors")
    assert (await refusal(gateway.prepare(CHAT, chat_body(swapped)))).code is Code.unsupported


async def test_the_same_image_again_costs_no_upload(bus: Bus, uploads: list[str]) -> None:
    clock = [1000.0]
    own = MediaLoader(bus, settings_for(), GatewayMetrics(MetricScope()), kept_nowhere, clock=lambda: clock[0])
    part = MediaPart("f", data_url(PNG))
    first = await own.load([part, part], VISION, 600)
    assert first[0] == first[1]
    assert len(uploads) == 1
    await own.load([part], VISION, 600)
    assert len(uploads) == 1
    clock[0] += media_loader.TRUST_S + 1  # the store is asked again, and has it
    await own.load([part], VISION, 600)
    assert len(uploads) == 2
    full = bus.subjects.bucket("media")
    assert len([e async for e in read(bus, f"OBJ_{full}", f"$O.{full}.C.>")]) == 1


async def test_what_will_not_live_as_long_as_a_request_is_asked_for_again(bus: Bus, uploads: list[str]) -> None:
    clock = [1000.0]
    own = MediaLoader(bus, settings_for(), GatewayMetrics(MetricScope()), kept_nowhere, clock=lambda: clock[0])
    part = MediaPart("f", data_url(PNG))
    await own.load([part], VISION, 600)
    clock[0] += 200  # of two hours and five minutes
    await own.load([part], VISION, 7000)
    assert len(uploads) == 1
    await own.load([part], VISION, 7300)
    assert len(uploads) == 2


async def test_remembered_names_are_bounded(bus: Bus, monkeypatch: pytest.MonkeyPatch, uploads: list[str]) -> None:
    monkeypatch.setattr(media_loader, "MAX_KNOWN", 3)
    own = loader(bus)
    parts = [MediaPart("f", data_url(png(1, side))) for side in range(1, 6)]
    for part in parts:
        await own.load([part], VISION, 60)
    assert len(own._known) == 3
    await own.load([parts[-1]], VISION, 60)
    assert len(uploads) == 5
    await own.load([parts[0]], VISION, 60)
    assert len(uploads) == 6


BAD: list[tuple[str, Code, str]] = [
    (data_url(b"hello"), Code.unsupported, "not a PNG, JPEG, WebP or GIF"),
    (data_url(png(30_000, 30_000)), Code.invalid_request, "30000 x 30000 pixels; the limit is 40000000"),
    (data_url(PNG[:20]), Code.invalid_request, "cut off"),
    (data_url(PNG + bytes(50_000)), Code.body_too_large, "larger than 20000 bytes (--max-media-bytes)"),
    ("data:image/png;base64,%%%", Code.invalid_request, "malformed"),
    ("/etc/passwd", Code.invalid_request, "--allowed-local-media-path"),
    ("ftp://example.org/x", Code.invalid_request, "must begin with"),
]


@pytest.mark.parametrize(("url", "code", "reason"), BAD)
async def test_a_bad_image_is_a_4xx_with_its_field_and_nothing_is_stored(
    bus: Bus, uploads: list[str], url: str, code: Code, reason: str
) -> None:
    gateway = gateway_on(bus, max_media_bytes=20_000)
    error = await refusal(gateway.prepare(CHAT, chat_body("a", image(url))))
    assert (error.code, error.param) == (code, "messages[0].content[1].image_url")
    assert 400 <= error.code.status < 500
    assert reason in error.message
    assert error.message.startswith("messages[0].content[1].image_url ")
    assert len(error.message) < 700
    assert uploads == []


async def test_one_bad_image_ends_the_loading_of_the_others(bus: Bus, site: Site) -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    site.answers["/never"] = never
    began = time.monotonic()
    error = await refusal(
        gateway_on(bus).prepare(CHAT, chat_body(image(site.url("/never")), image(data_url(b"hello"))))
    )
    assert error.param == "messages[0].content[1].image_url"
    assert time.monotonic() - began < 8  # --media-timeout-s is 10
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "medium"]


async def test_nothing_is_fetched_for_a_body_that_is_refused(bus: Bus, site: Site) -> None:
    gateway = gateway_on(bus, max_images=2)
    url = site.serve("/x", PNG)
    for body in (
        chat_body(image(url), model="other"),
        chat_body(image(url), image(url), image(url)),
        chat_body(image(url), "word " * 20_000),
        chat_body(image(url), max_tokens=8190),
        chat_body(image(url), {"type": "video_url", "video_url": {"url": url}}),
    ):
        await refusal(gateway.prepare(CHAT, body))
    assert site.asked == []


QWEN = Vision("<|image_pad|>", 1282, 4, 64, None, patch_grid({}, {}, {"fps": 2}), "<|video_pad|>", 1283)


async def test_a_video_is_stored_and_named_as_an_image_is_and_measured_by_its_frames(bus: Bus, site: Site) -> None:
    raw = film(30, 10, 64, 48)
    parts = [MediaPart("a", site.serve("/film", raw), video=True), MediaPart("b", data_url(PNG))]
    one, other = await loader(bus).load(parts, QWEN, 60.0)
    assert (one.kind, one.size, one.digest) == ("video/mp4", len(raw), blake3(raw).digest())
    # 3 s at 2 frames a second, two of them a step; the least is 128 squares of 28 x 28 pixels.
    assert (one.grid, one.seconds, one.tokens) == ((3, 10, 14), 1.0, 3 * 10 * 14)
    assert (other.kind, other.grid, other.seconds) == ("image/png", (1, 2, 3), 0.0)
    assert await get(bus, "media", one.digest.hex(), limit=len(raw)) == raw


async def test_a_video_that_cannot_be_used_is_refused_by_its_field(bus: Bus, site: Site) -> None:
    raw = film(30, 10, 64, 48)
    for data, code, words in (
        (raw[: len(raw) // 3], Code.invalid_request, "cannot be decoded"),
        (PNG, Code.invalid_request, "is not an MP4, MOV, WebM or Matroska video"),
        (raw, Code.invalid_request, "has more than 29 frames (--max-video-frames)"),
        (raw + bytes(5000), Code.body_too_large, "is larger than 9000 bytes (--max-media-bytes)"),
    ):
        made = loader(bus, max_video_frames=29, max_media_bytes=9_000)
        error = await refusal(made.load([MediaPart("it", data_url(data, "video/mp4"), video=True)], QWEN, 60.0))
        assert (error.code, error.param) == (code, "it")
        assert words in error.message


async def test_images_do_not_wait_for_videos_that_take_long_to_read(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, raw = threading.Event(), film(30, 10, 64, 48)
    monkeypatch.setattr(video, "probe", lambda data, limit, decoder: goes_on.wait(30) and VideoFacts(30, 10.0, 48, 64))
    made, large = loader(bus), PNG + bytes(media_loader.LARGE)  # hashed in a thread
    films = [data_url(raw + bytes([number])) for number in range(media_loader.SLOTS + 1)]
    slow = asyncio.create_task(made.load([MediaPart("v", url, video=True) for url in films], QWEN, 60.0))
    try:
        async with asyncio.timeout(20):
            (found,) = await made.load([MediaPart("i", data_url(large))], QWEN, 60.0)
        assert (found.size, slow.done()) == (len(large), False)
    finally:
        goes_on.set()
    assert {each.kind for each in await slow} == {"video/mp4"}


async def test_videos_of_clients_that_have_gone_do_not_pile_up_before_the_threads(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, raw, loop = threading.Event(), film(30, 10, 64, 48), asyncio.get_running_loop()
    begun: asyncio.Queue[bytes] = asyncio.Queue()

    def probe(data: bytes, limit: int, decoder: video.Decoder) -> VideoFacts:
        loop.call_soon_threadsafe(begun.put_nowait, data)
        if not goes_on.wait(30):
            raise video.BadVideo("takes too long")
        return VideoFacts(30, 10.0, 48, 64)

    monkeypatch.setattr(video, "probe", probe)
    made = loader(bus)
    try:
        async with asyncio.timeout(20):
            for number in range(media_loader.VIDEOS):
                part = MediaPart("v", data_url(raw + bytes([number])), video=True)
                gone = asyncio.create_task(made.load([part], QWEN, 60.0))
                await begun.get()
                gone.cancel()
                await asyncio.wait([gone])
                assert gone.cancelled()
            assert made._video_slots.locked(), "their processes still run"
    finally:
        goes_on.set()
    async with asyncio.timeout(20):
        (found,) = await made.load([MediaPart("v", data_url(raw), video=True)], QWEN, 60.0)
    assert found.kind == "video/mp4"


async def test_the_process_of_a_video_whose_client_has_gone_is_ended(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, pids = asyncio.get_running_loop(), asyncio.Queue[int]()
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        process = popen([sys.executable, "-c", "import sys, time; sys.stdin.buffer.read(); time.sleep(60)"], **options)
        loop.call_soon_threadsafe(pids.put_nowait, process.pid)
        return process

    monkeypatch.setattr(video.subprocess, "Popen", start)
    made = loader(bus)
    async with asyncio.timeout(20):
        gone = asyncio.create_task(made.load([MediaPart("v", data_url(film(3, 10, 64, 48)), video=True)], QWEN, 60.0))
        pid = await pids.get()
        gone.cancel()
        await asyncio.wait([gone])
        for _ in range(media_loader.VIDEOS):  # every slot is free again
            await made._video_slots.acquire()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_images_that_come_too_late_end_the_request_at_its_deadline(bus: Bus, site: Site) -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    site.answers["/never"] = never
    began = time.monotonic()
    error = await refusal(gateway_on(bus).prepare(CHAT, chat_body(image(site.url("/never")), timeout_s=0.3)))
    assert error.code is Code.deadline_exceeded
    assert time.monotonic() - began < 8  # --media-timeout-s is 10


async def test_concurrent_downloads_are_bounded(bus: Bus, site: Site) -> None:
    now, most = 0, 0
    release = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == media_loader.SLOTS:  # time for one more to come
            asyncio.get_running_loop().call_later(0.1, release.set)
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PNG) + PNG)
        now -= 1

    own = loader(bus)
    parts = [MediaPart("f", site.url(f"/{number}")) for number in range(3 * media_loader.SLOTS)]
    site.answers |= {f"/{number}": slow for number in range(3 * media_loader.SLOTS)}
    media = await own.load(parts, VISION, 60)
    assert len(media) == len(parts)
    assert most == media_loader.SLOTS


async def test_a_full_store_is_an_unavailable_broker(bus: Bus) -> None:
    full = bus.subjects.bucket("media")
    config = (await bus.js.stream_info(f"OBJ_{full}")).config
    config.max_bytes = 10
    await bus.js.update_stream(config)
    error = await refusal(gateway_on(bus).prepare(CHAT, chat_body(image(data_url(PNG)))))
    assert error.code == Code.broker_unavailable


async def test_a_large_image_does_not_stop_the_event_loop(bus: Bus) -> None:
    data = PNG + os.urandom(8 << 20)
    body = chat_body(image(data_url(data)))
    gateway = gateway_on(bus)
    longest, last = 0.0, time.thread_time()  # of CPU, which does not grow on a busy machine

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()

    ticking = asyncio.create_task(tick())
    prepared = await gateway.prepare(CHAT, body)
    ticking.cancel()
    assert prepared.request.media[0].size == len(data)
    assert longest < 0.1


async def test_text_takes_no_detour(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text body is prepared without giving up the event loop once."""
    gateway = gateway_on(bus)
    work = gateway.prepare(CHAT, chat_body("hello"))
    with pytest.raises(StopIteration) as ended:
        work.send(None)
    assert ended.value.value.request.media == ()
