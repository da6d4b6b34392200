"""What a client sees of an image or video request, from its token items alone."""

import base64
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.images import ImageAggregator, ImageStreamRenderer
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Diffusion, GenerateRequest, Stop
from penstock.schemas.tokens import File, Finish, TokenItem
from penstock.schemas.wire import pack_tokens

FILES = (
    File("r-1-0.png", "image/png", 3, 32, 16, seconds=1.25),
    File("r-1-1.png", "image/png", 4, 32, 16, seconds=1.25),
)
IMAGE = Diffusion("image", "a boat", 32, 16, 5, "png", images=2, seed=3)
VIDEO = Diffusion("video", "a boat", 32, 16, 5, "webp", frames=9, frame_rate=8.0)
FILM = (File("r-1-0.webp", "image/webp", 3, 32, 16, 9, 8.0, 2.0),)


def request(diffusion: Diffusion = IMAGE) -> GenerateRequest:
    return GenerateRequest("r", "m", "g", b"", Stop(10), 5_000_000_000, 9_000_000_000, diffusion=diffusion)


def item(first: int, count: int, finish: Finish | None = None) -> TokenItem:
    return TokenItem("r", 1, 0, first, pack_tokens([1] * count), finish)


def events(data: bytes) -> list[Any]:
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    found = [block.rpartition("data: ")[2] for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in found]


def collected(diffusion: Diffusion = IMAGE, files: tuple[File, ...] = FILES) -> ImageAggregator:
    collector = ImageAggregator(request(diffusion))
    assert collector.push([item(0, 10, Finish("stop", files=files))])
    return collector


def test_an_answer_names_its_files_under_the_clients_host() -> None:
    answer = collected().response("https://here:8000")
    assert [each.url for each in answer.data] == [f"https://here:8000/v1/media/{file.name}" for file in FILES]
    assert (answer.object, answer.size, answer.inference_time_s, answer.steps, answer.seed) == (
        "image",
        "32x16",
        1.25,
        5,
        3,
    )
    assert (answer.data[0].frames, answer.data[0].b64_json, answer.created) == (None, None, 5)


def test_an_answer_holds_the_files_if_asked_for() -> None:
    data = collected().response("x", [b"one", b"two!"]).data
    assert [base64.b64decode(each.b64_json or "") for each in data] == [b"one", b"two!"]
    assert [each.url for each in data] == [None, None]


def test_a_video_response_has_its_frames() -> None:
    answer = collected(VIDEO, FILM).response("")
    assert (answer.object, answer.data[0].frames, answer.data[0].frame_rate) == ("video", 9, 8.0)
    assert answer.data[0].url == "/v1/media/r-1-0.webp"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_a_failure_is_raised_whatever_came_before(reason: str) -> None:
    collector = ImageAggregator(request())
    assert not collector.push([item(0, 4)])
    assert collector.push([item(4, 0, Finish(reason, code="deadline_exceeded", message="late"))])
    with pytest.raises(ServingError, match="late") as caught:
        collector.response("")
    assert caught.value.code is Code.deadline_exceeded
    assert collector.usage.completion_tokens == 4


@given(cuts=st.sets(st.integers(1, 9)), seen=st.integers(0, 10))
def test_progress_is_sent_once_however_it_comes_and_from_where_the_client_was(cuts: set[int], seen: int) -> None:
    renderer = ImageStreamRenderer(request())
    if seen:
        renderer.resume(str(seen))
    bounds = [0, *sorted(cuts), 10]
    data = b"".join(renderer.push([item(a, b - a)]) for a, b in pairwise(bounds))
    sent = events(data)
    assert [event["step"] for event in sent] == [bound for bound in bounds[1:] if bound > seen]
    assert all(event["type"] == "image_generation.progress" and event["steps"] == 10 for event in sent)


def test_steps_that_came_together_are_one_event() -> None:
    renderer = ImageStreamRenderer(request(VIDEO))
    (event,) = events(renderer.push([item(0, 1), item(1, 2)]))
    assert (event["type"], event["step"], event["steps"]) == ("video_generation.progress", 3, 5)
    assert renderer.push([]) == b""


def test_a_stream_ends_with_the_images_or_the_error() -> None:
    renderer = ImageStreamRenderer(request())
    renderer.push([item(0, 10, Finish("stop", files=FILES))])
    last, done = events(renderer.end(renderer.aggregator.response("")))
    assert (last["type"], len(last["data"]), done) == ("image_generation.completed", 2, "[DONE]")
    failed, done = events(renderer.fail(ServingError(Code.cancelled, "gone")))
    assert (failed["error"]["code"], done) == ("cancelled", "[DONE]")


@pytest.mark.parametrize("text", ["", "x", "1.0", "²", "-1", "9" * 20])
def test_an_event_id_is_a_number_of_steps(text: str) -> None:
    with pytest.raises(ServingError, match="not an event id"):
        ImageStreamRenderer(request()).resume(text)
