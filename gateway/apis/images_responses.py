"""Token items of an image or video request become what a client reads: progress events, or one JSON answer. Pure.

A "token" is a denoising step. As with text, everything shown is a function of the items, and the id of an event is the
number of steps done, so any gateway can continue from ``Last-Event-ID``.
"""

import base64
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from penstock.gateway.base.chat_objects import PromptTokensDetails, UsageBody, serving_error
from penstock.gateway.base.event_stream import DONE, error_event, parse_position
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import Diffusion, GenerateRequest
from penstock.schemas.tokens import FAILURES, File, TokenItem

_json = msgspec.json.encode


class ImageData(Struct, frozen=True, omit_defaults=True):
    """One image or video, by its URL or as base64. ``frames`` and ``frame_rate``: of videos."""

    media_type: str
    width: int
    height: int
    bytes: int
    url: str | None = None
    b64_json: str | None = None
    frames: int | None = None
    frame_rate: float | None = None


class ImagesResponse(Struct, frozen=True):
    """Response of POST /v1/images/generations and /v1/videos/generations. Times in seconds."""

    id: str
    object: Literal["image", "video"]
    created: int
    model: str
    data: list[ImageData]
    inference_time_s: float
    size: str
    output_format: str
    seed: int
    steps: int
    status: Literal["completed"] = "completed"


class ImageProgressEvent(Struct, frozen=True):
    """One server-sent event during generation; the last before [DONE] has the type "...completed"."""

    type: Literal["image_generation.progress", "video_generation.progress"]
    id: str
    step: int
    steps: int


class ImageAggregator:
    """State of one request.

    Attributes:
        step: denoising steps done, of ``steps``.
        files: None until they are stored.
    """

    def __init__(self, request: GenerateRequest) -> None:
        assert request.diffusion is not None
        self.request = request
        self.diffusion: Diffusion = request.diffusion
        self.steps = self.diffusion.steps * self.diffusion.images
        self.step = 0
        self.files: tuple[File, ...] | None = None
        self.error: ServingError | None = None

    @property
    def done(self) -> bool:
        return self.files is not None or self.error is not None

    @property
    def usage(self) -> UsageBody:
        return UsageBody(0, self.step, self.step, PromptTokensDetails())

    def push(self, items: Iterable[TokenItem]) -> bool:
        """Take in items; True once the files are stored or the request has failed."""
        for item in items:
            if self.done:
                break
            self.step += len(item.tokens) // 4
            if (finish := item.finish) is not None:
                if finish.reason in FAILURES:
                    self.error = serving_error(finish.code or finish.reason, finish.message)
                else:
                    self.files = finish.files
        return self.done

    def response(self, base_url: str, contents: Sequence[bytes] | None = None) -> ImagesResponse:
        """
        Args:
            base_url: goes in front of "/v1/files/...".
            contents: of the files, if the client wants them in the response; None: it gets URLs.
        Raises:
            ServingError: the request failed.
        """
        if self.error is not None:
            raise self.error
        assert self.files is not None
        video = self.diffusion.kind == "video"
        data = [
            ImageData(
                media_type=file.type,
                width=file.width,
                height=file.height,
                bytes=file.bytes,
                url=f"{base_url}/v1/files/{file.name}" if contents is None else None,
                b64_json=base64.b64encode(contents[i]).decode() if contents is not None else None,
                frames=file.frames if video else None,
                frame_rate=file.frame_rate if video else None,
            )
            for i, file in enumerate(self.files)
        ]
        return ImagesResponse(
            id=self.request.id,
            object="video" if video else "image",
            created=self.request.created_ns // 1_000_000_000,
            model=self.request.model,
            data=data,
            inference_time_s=max((file.seconds for file in self.files), default=0.0),
            size=f"{self.diffusion.width}x{self.diffusion.height}",
            output_format=self.diffusion.format,
            seed=self.diffusion.seed,
            steps=self.diffusion.steps,
        )


class ImageStreamRenderer:
    """Progress as server-sent events. Each has all steps so far, so only the last of several that arrived is sent."""

    def __init__(self, request: GenerateRequest) -> None:
        self.aggregator = ImageAggregator(request)
        self._kind = f"{self.aggregator.diffusion.kind}_generation"
        self._sent = 0

    def resume(self, last_event_id: str) -> None:
        """Skip what the client has seen; then push all items from the first on.

        Raises:
            ServingError: not the id of an event of this answer.
        """
        self._sent = parse_position(last_event_id.strip(), last_event_id)

    def push(self, items: Iterable[TokenItem]) -> bytes:
        """An event if these items bring progress; the last event comes from ``end`` or ``fail``."""
        aggregator = self.aggregator
        aggregator.push(items)
        if aggregator.step <= self._sent:
            return b""
        self._sent = aggregator.step
        event = ImageProgressEvent(f"{self._kind}.progress", aggregator.request.id, self._sent, aggregator.steps)  # type: ignore[arg-type]
        return b"id: %d\ndata: %b\n\n" % (self._sent, _json(event))

    def end(self, response: ImagesResponse) -> bytes:
        """The last event, with the images, and the end of the stream."""
        return b"data: %b\n\n" % _json({"type": f"{self._kind}.completed"} | msgspec.to_builtins(response)) + DONE

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        """The end of the stream, with an error. ``finished``: the request has ended too."""
        return error_event(error, finished=finished)
