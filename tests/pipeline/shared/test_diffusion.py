"""Images and videos from tiny pipelines that really run, through gateway, router, worker and object store."""

import asyncio
import base64
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import openai
import pytest
from PIL import Image
from rich.console import Console

from penstock.infra.bus.connection import Bus
from penstock.log_tools.requests.inspect import show
from penstock.log_tools.requests.inspection import inspect
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas import fleet
from penstock.schemas.subjects import HEADER_REPLY_TO
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Process, accepted, ending, metrics, ok, parse_sse, until

IMAGES = "/v1/images/generations"
VIDEOS = "/v1/videos/generations"
COMMON = ("--role", "diffusion", "--threads", "1", "--drain-s", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One of images and one of videos."""
    from tests.workers.engines.diffusion import pipelines  # late: it imports diffusers

    folder: Path = tmp_path_factory.mktemp("pipelines")
    return pipelines.image(folder / "painter"), pipelines.video(folder / "filmer")


@pytest.fixture(scope="module")
def workers(fast: Deployment, models: tuple[Path, Path]) -> Iterator[list[Process]]:
    """One that makes images and one that makes videos, beside the workers of a language model."""
    painter, filmer = models
    started = [
        fast.also("worker", *COMMON, "--model", str(painter), "--served-model-name", "painter,artist"),
        fast.also("worker", *COMMON, "--model", str(filmer), "--max-frames", "81"),
    ]
    for process in started:
        process.wait_for("worker_registered")
    yield started
    for process in started:
        process.ask_to_stop()
    assert [process.stop() for process in started].count(0) >= 1, "one was killed by a test"


@pytest.fixture
async def studio(workers: list[Process], http: httpx.AsyncClient) -> httpx.AsyncClient:
    """The gateway, once it knows of the workers."""

    async def known() -> bool:
        names = {card["id"] for card in (await http.get("/v1/models")).json()["data"]}
        return {"painter", "filmer"} <= names

    await until(known, "the gateway lists the models")
    return http


async def fetched(http: httpx.AsyncClient, picture: dict[str, Any]) -> Image.Image:
    answer = await ok(http.get(picture["url"]))
    assert answer.headers["content-type"] == picture["media_type"]
    assert len(answer.content) == picture["bytes"]
    return Image.open(io.BytesIO(answer.content))


async def test_an_image_is_made_stored_and_fetched(studio: httpx.AsyncClient, bus: Bus) -> None:
    body = {"model": "painter", "prompt": "a red cube", "size": "40x24", "num_inference_steps": 3, "seed": 7}
    answer = await ok(studio.post(IMAGES, json=body))
    result = answer.json()
    (picture,) = result["data"]
    assert (result["object"], result["model"], result["size"]) == ("image", "painter", "40x24")
    assert (result["seed"], result["steps"]) == (7, 3)
    assert 0 < result["inference_time_s"] < 30
    assert picture["url"].startswith(str(studio.base_url).rstrip("/") + "/v1/media/")
    image = await fetched(studio, picture)
    assert (image.format, image.size) == ("PNG", (40, 24)) == ("PNG", (picture["width"], picture["height"]))
    again = (await studio.post(IMAGES, json=body)).json()
    other = (await studio.post(IMAGES, json=body | {"seed": 8})).json()
    same, different = await fetched(studio, again["data"][0]), await fetched(studio, other["data"][0])
    assert same.tobytes() == image.tobytes() != different.tobytes()
    timeline, end = await ending(bus, result["id"])
    assert end.choices[0].files[0].name == picture["url"].rpartition("/")[2]
    assert end.usage.completion == 3
    assert timeline.stages[0].role == "diffusion"


async def test_an_image_of_a_request_with_no_store_is_fetched_from_memory_and_on_no_disk(
    studio: httpx.AsyncClient, fast: Deployment
) -> None:
    said = "a boat that nobody may see"
    body = {"model": "painter", "prompt": said, "size": "40x24", "num_inference_steps": 2, "no_store": True}
    answer = await ok(studio.post(IMAGES, json=body))
    (picture,) = answer.json()["data"]
    made = (await studio.get(picture["url"])).content
    assert len(made) == picture["bytes"]
    inline = await studio.post(IMAGES, json=body | {"response_format": "b64_json"})
    wanted = [said.encode(), made[-60:-20], base64.b64decode(inline.json()["data"][0]["b64_json"])[-60:-20]]
    for path in fast.data_dir.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [each for each in wanted if each in data], path


async def test_the_stock_client_gets_images_in_the_answer(studio: httpx.AsyncClient, fast: Deployment) -> None:
    transport = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    async with openai.AsyncOpenAI(
        base_url=fast.urls[1] + "/v1", api_key="none", max_retries=0, http_client=transport
    ) as client:
        made = await client.images.generate(
            model="artist",
            prompt="a blue boat",
            n=2,
            size="32x32",  # type: ignore[arg-type]
            response_format="b64_json",
            output_format="webp",
            extra_body={"num_inference_steps": 2},
        )
    assert made.data is not None
    images = [Image.open(io.BytesIO(base64.b64decode(each.b64_json or ""))) for each in made.data]
    assert [(image.format, image.size) for image in images] == [("WEBP", (32, 32))] * 2
    assert images[0].tobytes() != images[1].tobytes()


async def test_a_video_has_the_frames_that_were_asked_for(studio: httpx.AsyncClient) -> None:
    body = {"model": "filmer", "prompt": "a wave", "size": "32x16", "seconds": 0.5, "fps": 8, "num_inference_steps": 2}
    body["output_format"] = "webp"  # else MP4 where PyAV is installed
    result = (await studio.post(VIDEOS, json=body)).json()
    (picture,) = result["data"]
    assert (result["object"], result["status"]) == ("video", "completed")
    assert result["inference_time_s"] > 0
    assert (picture["frames"], picture["frame_rate"]) == (5, 8.0), "0.5 s at 8 fps, as 1 + 4k"
    film = await fetched(studio, picture)
    assert (film.format, film.size, getattr(film, "n_frames", 1)) == ("WEBP", (32, 16), 5)
    exact = body | {"num_frames": 9, "output_format": "gif"}
    (picture,) = (await studio.post(VIDEOS, json=exact)).json()["data"]
    assert (await fetched(studio, picture)).format == "GIF"
    assert picture["frames"] == 9


async def test_progress_is_streamed_and_can_be_read_again(studio: httpx.AsyncClient) -> None:
    body = {"model": "painter", "prompt": "a boat", "num_inference_steps": 40, "size": "96x96", "stream": True}
    answer = await studio.post(IMAGES, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *progress, last, done = parse_sse(answer.content)
    assert done.data == "[DONE]"
    steps = [event.body["step"] for event in progress]
    assert steps == sorted(set(steps))
    assert steps[-1] == 40 == progress[-1].body["steps"]
    assert len(steps) > 1, "not only when all is over"
    assert last.body["type"] == "image_generation.completed"
    assert (await fetched(studio, last.body["data"][0])).size == (96, 96)
    request_id = answer.headers["x-request-id"]
    again = await studio.get(f"/v1/requests/{request_id}/stream", headers={"Last-Event-ID": "39"})
    assert [event.body.get("step") for event in parse_sse(again.content)[:-1]] == [40, None]
    status = (await studio.get(f"/v1/requests/{request_id}")).json()
    assert (status["state"], status["output_tokens"]) == ("done", 40)
    assert status["result"]["data"][0]["url"] == last.body["data"][0]["url"]


@pytest.mark.parametrize(
    ("path", "wrong", "field", "says"),
    [
        (IMAGES, {"size": "33x32"}, "size", "multiples of 8"),
        (IMAGES, {"size": "4096x4096"}, "size", "the limit is 2097152"),
        (IMAGES, {"num_inference_steps": 101}, "num_inference_steps", "the limit is 100"),
        (IMAGES, {"n": 5}, "n", "the limit is 4"),
        (IMAGES, {"output_format": "mp4"}, "output_format", "png, jpeg, webp"),
        (IMAGES, {"model": "filmer"}, "model", "generates videos; use POST /v1/videos/generations"),
        (IMAGES, {"image": "data:"}, "image", "a text only"),
        (IMAGES, {"prompt": ""}, "prompt", "length >= 1"),
        (VIDEOS, {"num_frames": 6}, "num_frames", "nearest are 5 and 9"),
        (VIDEOS, {"seconds": 60}, "seconds", "the limit is 81"),
    ],
)
async def test_what_cannot_be_made_is_refused_before_it_is_queued(
    studio: httpx.AsyncClient, path: str, wrong: dict[str, Any], field: str, says: str
) -> None:
    model = "painter" if path == IMAGES else "filmer"
    answer = await studio.post(path, json={"model": model, "prompt": "a boat"} | wrong)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == field
    assert says in error["message"]


async def test_each_kind_of_model_is_asked_at_its_own_endpoint(studio: httpx.AsyncClient) -> None:
    chat = {"model": "painter", "messages": [{"role": "user", "content": "hello"}]}
    assert (await studio.post("/v1/chat/completions", json=chat)).json()["error"]["code"] == "model_not_found"
    unknown = await studio.post(IMAGES, json={"model": "tiny", "prompt": "a boat"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "'painter'" in unknown.json()["error"]["message"]
    card = (await studio.get("/v1/models/filmer")).json()
    assert card["output_modalities"] == ["video"]
    text = await studio.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 3})
    assert text.json()["usage"]["completion_tokens"] == 3
    missing = await studio.get("/v1/media/01932c07-a4b8-7000-8000-0123456789ab-1-0.png")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


async def test_nats_refuses_image_generation(studio: httpx.AsyncClient, fast: Deployment) -> None:
    nc = await nats.connect(fast.state.client_nats_url)
    try:
        inbox = nc.new_inbox()
        answers = await nc.subscribe(inbox)
        body = json.dumps({"model": "painter", "prompt": "a boat"}).encode()
        await nc.jetstream().publish("ps.submit.painter", body, headers={HEADER_REPLY_TO: inbox})
        error = json.loads((await answers.next_msg(timeout=10)).data)["error"]
        assert error["code"] == "model_not_found"
    finally:
        await nc.close()


async def test_what_happened_to_a_picture_can_be_explained(studio: httpx.AsyncClient, bus: Bus) -> None:
    result = (await studio.post(IMAGES, json={"model": "painter", "prompt": "a", "num_inference_steps": 2})).json()
    shown, _ = await ending(bus, result["id"])
    console = Console(file=io.StringIO(), width=200)
    show(inspect(shown, with_tokens=False), console, now_ns=0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 denoising steps" in text
    assert result["data"][0]["url"].rpartition("/")[2] in text


LONG = {"model": "painter", "prompt": "a sea", "size": "128x128", "num_inference_steps": 100, "n": 4}


async def begun(bus: Bus, http: httpx.AsyncClient, user: str) -> tuple[str, str]:
    """Id and worker of a request, once it has done some steps."""
    found: dict[str, str] = {}

    async def running() -> bool:
        for request in await accepted(bus, user):
            status = (await http.get(f"/v1/requests/{request.id}")).json()
            if status.get("output_tokens", 0) > 2:
                timeline = await read_timeline(bus, request.id)
                found["id"], found["worker"] = request.id, timeline.stages[-1].worker
        return bool(found)

    await until(running, "the request has begun")
    return found["id"], found["worker"]


async def test_a_cancelled_request_ends_between_two_steps(studio: httpx.AsyncClient, bus: Bus) -> None:
    asking = asyncio.create_task(studio.post(IMAGES, json=LONG | {"user": "leaver"}))
    request_id, _ = await begun(bus, studio, "leaver")
    await studio.delete(f"/v1/requests/{request_id}")
    answer = await asking
    assert answer.json()["error"]["code"] == "cancelled"
    _, end = await ending(bus, request_id)
    assert 2 < end.usage.completion < 400


async def test_a_deadline_ends_a_request_between_two_steps(studio: httpx.AsyncClient, bus: Bus) -> None:
    answer = await studio.post(IMAGES, json=LONG | {"timeout_s": 0.7, "user": "hurried"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    _, end = await ending(bus, answer.headers["x-request-id"])
    assert end.code == "deadline_exceeded"
    assert end.usage.completion < 400


@pytest.mark.slow  # test_embeddings has it; here another process loads diffusers
async def test_a_killed_workers_request_is_made_by_another_one(
    studio: httpx.AsyncClient, bus: Bus, fast: Deployment, models: tuple[Path, Path], workers: list[Process]
) -> None:
    workers.append(fast.also("worker", *COMMON, "--model", str(models[0]), "--served-model-name", "painter,artist"))
    await asyncio.to_thread(workers[-1].wait_for, "worker_registered")  # ``bus`` has to answer pings meanwhile
    short = LONG | {"n": 1, "num_inference_steps": 32, "seed": 5, "user": "survivor"}
    asking = asyncio.create_task(studio.post(IMAGES, json=short, timeout=60))
    request_id, worker = await begun(bus, studio, "survivor")
    stored = await bus.js.get_last_msg(f"KV_{bus.subjects.bucket('workers')}", bus.subjects.lease(worker), direct=True)
    os.kill(fleet.decode(stored.data or b"").pid, signal.SIGKILL)
    answer = await asking
    assert answer.status_code == 200, answer.text
    timeline, end = await ending(bus, request_id, within_s=30)
    assert (end.attempt, end.usage.completion) == (2, 32)
    assert end.worker != worker
    assert [stage.worker for stage in timeline.stages] == [worker, end.worker]
    image = await fetched(studio, answer.json()["data"][0])
    direct = await studio.post(IMAGES, json=short | {"user": ""})
    assert (await fetched(studio, direct.json()["data"][0])).tobytes() == image.tobytes()


@pytest.mark.slow  # gateway/service/test_role_models has what a gateway then knows
async def test_pictures_alone_make_a_ready_deployment(new_deployment: NewDeployment, models: tuple[Path, Path]) -> None:
    deployment = new_deployment(
        *("--engine", "auto", "--diffusion", "1", "--diffusion-model", str(models[0]), "--threads", "1"),
    )
    state = deployment.state
    assert (state.model, state.makes) == ("painter", "image")
    assert "images/generations" in (deployment.home / "up.log").read_text()
    body = {"model": "painter", "prompt": "a red cube", "size": "32x32", "num_inference_steps": 2}
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60) as http:
        await ok(http.post("/v1/images/generations", json=body))
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["output_modalities"]) for card in listed] == [("painter", ["image"])]
        refused = await http.post("/v1/chat/completions", json={"model": "painter", "messages": []})
        assert refused.status_code in (400, 404)
        chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        nobody = await http.post("/v1/chat/completions", json=chat)  # it would wait for a worker that nobody starts
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "model_not_found")
    [worker] = [process for process in state.processes if process.name == "diffusion-0"]
    counted = await metrics(worker.metrics_url.removesuffix("/metrics"))
    assert counted['penstock_worker_pictures_total{kind="image"}'] == 1
