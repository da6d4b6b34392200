"""Token items of a request for pictures become what a client reads: progress events, or one JSON answer.

A "token" is a denoising step. As with text, everything shown is a function of the items, and the id of an event is
the number of steps done, so any replica can go on from ``Last-Event-ID``.
"""

import base64
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from gateway.openai.responses import PromptTokensDetails, UsageBody, error_body, serving_error
from schemas.errors import ServingError
from schemas.requests import Diffusion, GenerateRequest
from schemas.tokens import File, TokenItem

DONE = b"data: [DONE]\n\n"
_FAILED = ("error", "cancelled")

_json = msgspec.json.encode


class ImageData(Struct, frozen=True, omit_defaults=True):
    """One image or video: where it is, or, if asked for, the file itself. ``frames`` and ``frame_rate`` of videos."""

    media_type: str
    width: int
    height: int
    bytes: int
    url: str | None = None
    b64_json: str | None = None
    frames: int | None = None
    frame_rate: float | None = None


class ImagesResponse(Struct, frozen=True):
    """Answer of POST /v1/images/generations and /v1/videos/generations. Times in seconds."""

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
    """One server-sent event while pictures are made; the last before [DONE] is of type "...completed"."""

    type: Literal["image_generation.progress", "video_generation.progress"]
    id: str
    step: int
    steps: int


class ImageAggregator:
    """What a request has come to."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.diffusion is not None
        self.request = request
        self.ask: Diffusion = request.diffusion
        self.steps = self.ask.steps * self.ask.images
        self.step = 0
        self.files: tuple[File, ...] | None = None  # once they are made
        self.error: ServingError | None = None

    @property
    def done(self) -> bool:
        return self.files is not None or self.error is not None

    @property
    def usage(self) -> UsageBody:
        return UsageBody(0, self.step, self.step, PromptTokensDetails())

    def push(self, items: Iterable[TokenItem]) -> bool:
        """Take in items; True once the pictures are made, or the request has failed."""
        for item in items:
            if self.done:
                break
            self.step += len(item.tokens) // 4
            if (finish := item.finish) is not None:
                if finish.reason in _FAILED:
                    self.error = serving_error(finish.code or finish.reason, finish.message)
                else:
                    self.files = finish.files
        return self.done

    def answer(self, base_url: str, contents: Sequence[bytes] | None = None) -> ImagesResponse:
        """The body.

        Args:
            base_url: in front of "/v1/files/...".
            contents: of the files, if they go into the body.
        Raises:
            ServingError: the request failed.
        """
        if self.error is not None:
            raise self.error
        assert self.files is not None
        video = self.ask.kind == "video"
        data = [
            ImageData(
                file.type,
                file.width,
                file.height,
                file.bytes,
                f"{base_url}/v1/files/{file.name}" if contents is None else None,
                base64.b64encode(contents[i]).decode() if contents is not None else None,
                file.frames if video else None,
                file.frame_rate if video else None,
            )
            for i, file in enumerate(self.files)
        ]
        return ImagesResponse(
            self.request.id,
            "video" if video else "image",
            self.request.created_ns // 1_000_000_000,
            self.request.model,
            data,
            max((file.seconds for file in self.files), default=0.0),
            f"{self.ask.width}x{self.ask.height}",
            self.ask.format,
            self.ask.seed,
            self.ask.steps,
        )


class ImageStreamRenderer:
    """Progress as events. Each tells all steps so far, so of those that came together only the last is shown."""

    def __init__(self, request: GenerateRequest) -> None:
        self.collected = ImageAggregator(request)
        self._kind = f"{self.collected.ask.kind}_generation"
        self._shown = 0

    def resume(self, last_event_id: str) -> None:
        """Suppress what the client has seen; then push all items from the first on.

        Raises:
            ValueError: not an id of this answer's events.
        """
        text = last_event_id.strip()
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise ValueError(f"{last_event_id!r} is not an event id")
        self._shown = int(text)

    def push(self, items: Iterable[TokenItem]) -> bytes:
        """An event, if these items bring progress; of the end, ``end`` tells."""
        collected = self.collected
        collected.push(items)
        if collected.step <= self._shown:
            return b""
        self._shown = collected.step
        event = ImageProgressEvent(f"{self._kind}.progress", collected.request.id, self._shown, collected.steps)  # type: ignore[arg-type]
        return b"id: %d\ndata: %b\n\n" % (self._shown, _json(event))

    def end(self, answer: ImagesResponse) -> bytes:
        """The last event, with the pictures, and the end of the stream."""
        return b"data: %b\n\n" % _json({"type": f"{self._kind}.completed"} | msgspec.to_builtins(answer)) + DONE

    def fail(self, error: ServingError, *, over: bool = True) -> bytes:
        """The end of the stream, with an error event. ``over``: the request has ended, too."""
        return b"data: " + _json(error_body(error)) + b"\n\n" + (DONE if over else b"")
