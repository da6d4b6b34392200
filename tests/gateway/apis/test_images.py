"""Image and video bodies: which defaults they get, and what is refused with which limit."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.images import IMAGE, VIDEO, VideoGenerationRequest, frame_count, prepare_images
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import Diffusion, Priority

IMAGE_MODEL = Diffuser(
    "image", "FluxPipeline", 1024, 768, 28, ("png", "jpeg", "webp"), 1 << 20, 50, multiple=16, max_images=4
)
VIDEO_MODEL = Diffuser(
    "video",
    "WanPipeline",
    832,
    480,
    50,
    ("mp4", "webp"),
    1 << 20,
    100,
    multiple=16,
    frames=81,
    max_frames=161,
    frame_step=4,
    frame_rate=16.0,
)
PLAIN = msgspec.structs.replace(IMAGE_MODEL, negative=False, guidance=False)
KNOWN = {"painter": IMAGE_MODEL, "filmer": VIDEO_MODEL, "plain": PLAIN}
NOW_NS = 1_700_000_000_000_000_000


def prepared(kind: str, **body: Any) -> PreparedRequest:
    full = {"model": "painter" if kind == IMAGE else "filmer", "prompt": "a boat"} | body
    data = json.dumps(full).encode()
    return prepare_images(
        kind, data, KNOWN, gateway="g", default_deadline_s=60.0, now_ns=NOW_NS, request_id="r", seed=lambda: 11
    )


def diffusion(kind: str, **body: Any) -> Diffusion:
    found = prepared(kind, **body).request.diffusion
    assert found is not None
    return found


def test_what_the_client_leaves_open_takes_the_models_defaults() -> None:
    request = prepared(IMAGE).request
    assert request.diffusion == Diffusion("image", "a boat", 1024, 768, 28, "png", seed=11)
    assert (request.model, request.gateway, request.endpoint, request.n) == ("painter", "g", "image", 1)
    assert request.deadline_ns - request.created_ns == 60_000_000_000
    assert request.prompt == b""
    assert diffusion(VIDEO) == Diffusion("video", "a boat", 832, 480, 50, "mp4", frames=81, frame_rate=16.0, seed=11)


def test_what_the_client_asks_for_is_taken() -> None:
    asked = prepared(
        IMAGE,
        n=3,
        size="512x256",
        num_inference_steps=9,
        guidance_scale=0,
        negative_prompt="blur",
        seed=-1,
        response_format="b64_json",
        output_format="jpg",
        output_compression=0,
        stream=True,
        user="ann",
        timeout_s=5,
        deadline_s=9,
        service_tier="priority",
        worker="w-1",
        quality="auto",
        background="opaque",
    )
    assert asked.stream
    request = asked.request
    assert request.diffusion == Diffusion(
        "image", "a boat", 512, 256, 9, "jpeg", "blur", images=3, guidance=0.0, seed=2**63 - 1, quality=1, inline=True
    )
    assert (request.user, request.worker, request.priority) == ("ann", "w-1", Priority.interactive)
    assert request.deadline_ns - request.created_ns == 5_000_000_000


@pytest.mark.parametrize(
    ("body", "frames", "rate"),
    [
        ({}, 81, 16.0),
        ({"fps": 8}, 81, 8.0),
        ({"seconds": 2}, 33, 16.0),
        ({"seconds": "2"}, 33, 16.0),
        ({"seconds": 1.5, "fps": 24}, 37, 24.0),
        ({"seconds": 0.001}, 1, 16.0),
        ({"seconds": 10, "num_frames": 5}, 5, 16.0),
        ({"num_frames": 161}, 161, 16.0),
        ({"num_frames": 1}, 1, 16.0),
    ],
)
def test_frames_are_counted_from_the_request(body: dict[str, Any], frames: int, rate: float) -> None:
    asked = diffusion(VIDEO, **body)
    assert (asked.frames, asked.frame_rate) == (frames, rate)


@given(seconds=st.floats(0.01, 60), rate=st.floats(1, 60), step=st.integers(1, 8), limit=st.integers(1, 400))
def test_a_video_is_never_shorter_than_asked_and_never_a_step_longer(
    seconds: float, rate: float, step: int, limit: int
) -> None:
    made = msgspec.structs.replace(VIDEO_MODEL, frame_step=step, max_frames=limit)
    body = VideoGenerationRequest(model="filmer", prompt="a", seconds=seconds)
    wanted = max(1, round(seconds * rate))
    longest = 1 + (limit - 1) // step * step
    if wanted > longest:
        with pytest.raises(ServingError, match="the limit is"):
            frame_count(body, made, rate)
        return
    frames = frame_count(body, made, rate)
    assert (frames - 1) % step == 0
    assert wanted <= frames < wanted + step
    assert frames <= limit


@pytest.mark.parametrize(
    ("kind", "body", "field", "message"),
    [
        (IMAGE, {"size": "1000x512"}, "size", "multiples of 16, such as 992x512"),
        (IMAGE, {"size": "8x512"}, "size", "such as 16x512"),
        (IMAGE, {"size": "2048x1024"}, "size", "2097152 pixels; the limit is 1048576"),
        (IMAGE, {"size": "512"}, "size", "is not WIDTHxHEIGHT, such as 1024x768"),
        (IMAGE, {"size": "0x512"}, "size", "is not WIDTHxHEIGHT"),
        (IMAGE, {"size": "512x512\n"}, "size", "is not WIDTHxHEIGHT"),
        (IMAGE, {"num_inference_steps": 51}, "num_inference_steps", "the limit is 50"),
        (IMAGE, {"num_inference_steps": 0}, "num_inference_steps", ">= 1"),
        (IMAGE, {"n": 5}, "n", "the limit is 4"),
        (VIDEO, {"n": 2}, "n", "the limit is 1"),
        (IMAGE, {"prompt": "a" * 32_001}, "prompt", "length <= 32000"),
        (IMAGE, {"output_format": "gif"}, "output_format", "use one of png, jpeg, webp"),
        (IMAGE, {"model": "plain", "negative_prompt": "blur"}, "negative_prompt", "FluxPipeline"),
        (IMAGE, {"model": "plain", "guidance_scale": 2}, "guidance_scale", "FluxPipeline"),
        (IMAGE, {"model": "filmer"}, "model", "generates videos; use POST /v1/videos/generations"),
        (VIDEO, {"model": "painter"}, "model", "generates images; use POST /v1/images/generations"),
        (IMAGE, {"model": "other"}, "model", "models that do: 'painter', 'plain'"),
        (VIDEO, {"model": "other"}, "model", "models that do: 'filmer'"),
        (IMAGE, {"quality": "hd"}, "quality", "num_inference_steps"),
        (IMAGE, {"style": "vivid"}, "style", "prompt"),
        (IMAGE, {"background": "transparent"}, "background", "transparent"),
        (IMAGE, {"partial_images": 2, "stream": True}, "partial_images", "stream: true reports the progress"),
        (IMAGE, {"mask": "x"}, "mask", "a text only"),
        (VIDEO, {"input_reference": {"file_id": "x"}}, "input_reference", "a text only"),
        (VIDEO, {"num_frames": 82}, "num_frames", "nearest are 81 and 85"),
        (VIDEO, {"num_frames": 165}, "num_frames", "the limit is 161"),
        (VIDEO, {"seconds": 11}, "seconds", "177 frames; the limit is 161 (10.06 s)"),
        (VIDEO, {"seconds": "long"}, "seconds", "is not a number"),
        (VIDEO, {"seconds": "nan"}, "seconds", "is not a number"),
        (VIDEO, {"seconds": "-1"}, "seconds", "is not a number"),
        (VIDEO, {"fps": 0}, "fps", ">= 0.1"),
        (VIDEO, {"fps": 0.0001}, "fps", ">= 0.1"),
        (IMAGE, {"size": "16384x16", "output_format": "webp"}, "size", "a webp file has at most 16383 pixels"),
        (IMAGE, {"size": "65504x16", "output_format": "jpg"}, "size", "a jpeg file has at most 65500 pixels"),
        (IMAGE, {"worker": "a.b"}, "worker", "regex"),
    ],
)
def test_what_cannot_be_made_is_refused_with_field_and_limit(
    kind: str, body: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ServingError) as caught:
        prepared(kind, **body)
    assert caught.value.param == field
    assert message in caught.value.message
    assert caught.value.code in (Code.invalid_request, Code.unsupported, Code.model_not_found)


def test_a_side_that_one_format_cannot_hold_is_made_in_another() -> None:
    assert diffusion(IMAGE, size="16384x16", output_format="png").width == 16_384
    assert diffusion(VIDEO, size="16368x16", output_format="webp").width == 16_368


def test_what_is_not_json_is_refused() -> None:
    for data in (b"", b"[]", b"{", b'{"model": 1}', b"\xff"):
        with pytest.raises(ServingError) as caught:
            prepare_images(IMAGE, data, KNOWN, gateway="g", default_deadline_s=60.0, now_ns=NOW_NS, request_id="r")
        assert caught.value.code is Code.invalid_request
