"""Answering requests for pictures over ASGI, and handing out the files that were made."""

import re
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answers import HEAD_S, JSON, REQUEST_ID, Completions, Receive, Responder, Scope, Send
from gateway.images.responses import ImageAggregator, ImagesResponse, ImageStreamRenderer
from gateway.log.inflight import InflightRequest
from gateway.openai.prepare import PreparedRequest
from gateway.service import Gateway
from infra.bus import object_store
from schemas.errors import Code, ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import File

BUCKET = "results"
MAX_FILE_BYTES = 512 << 20  # held in memory while it is sent
FILE_S = 60.0
TYPES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
    "mp4": "video/mp4",
}
_NAME = re.compile(r"[0-9a-f-]{36}-[0-9]{1,9}-[0-9]{1,9}\.(png|jpg|webp|gif|mp4)")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")

_json = msgspec.json.encode


class ImageGenerations(Completions):
    """``POST /v1/images/generations`` and ``/v1/videos/generations``."""

    async def _answer(
        self,
        scope: Scope,
        prepared: PreparedRequest,
        inflight: InflightRequest,
        send: Send,
        began: float,
        *,
        owner: bool,
    ) -> str:
        base_url = base_url_of(scope, self._gateway)
        answer = ImageResponder(self._gateway, inflight, scope, send, began, owner, base_url=base_url)
        return await (answer.show(ImageStreamRenderer(inflight.request)) if prepared.stream else answer.once())


class ImageReattach:
    """The progress and the pictures of an accepted request, for ``Reattach``."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(
        self, request: GenerateRequest, last_event_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """
        Raises:
            ServingError: the request failed, or ``last_event_id`` is none of its events'.
        """
        gateway = self._gateway
        renderer = ImageStreamRenderer(request)
        if last_event_id:
            try:
                renderer.resume(last_event_id)
            except ValueError as error:
                raise ServingError(Code.invalid_request, str(error), param="Last-Event-ID") from None
        inflight = await gateway.attach(request)
        base_url, began = base_url_of(scope, gateway), time.monotonic()
        await ImageResponder(gateway, inflight, scope, send, began, owner=False, base_url=base_url).show(renderer)


class ImageResponder(Responder):
    """Sends the progress of one request and what it comes to."""

    def __init__(
        self,
        gateway: Gateway,
        inflight: InflightRequest,
        scope: Scope,
        send: Send,
        began: float,
        owner: bool = True,
        *,
        base_url: str,
    ) -> None:
        super().__init__(gateway, inflight, scope, send, began, owner)
        self._base_url = base_url

    async def show(self, renderer: ImageStreamRenderer) -> str:
        """Server-sent events; returns the code for the metrics.

        Raises:
            ServingError: the request failed before the header was sent, or the client went away before it.
        """
        send, inflight = self._send, self._inflight
        collected = renderer.collected
        started, code = False, "ok"
        self.open()
        try:
            while not collected.done or not started:
                try:
                    data = renderer.push(await (inflight.take() if started else inflight.take_within(HEAD_S)))
                    if collected.done:
                        data += renderer.end(await self._made(collected))
                except ServingError as error:
                    if not started:
                        raise
                    collected.error, code = error, error.code.value
                    data = renderer.fail(error, over=error.code is not Code.shutting_down)
                if not started:
                    started = True
                    await self.begin_stream()
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": not collected.done})
            return code
        finally:
            self.close()

    async def once(self) -> str:
        """One JSON body; returns the code for the metrics.

        Raises:
            ServingError: the request failed, or the client went away.
        """
        inflight = self._inflight
        collected = ImageAggregator(inflight.request)
        self.open()
        try:
            while not collected.push(await inflight.take()):
                pass
            body = _json(await self._made(collected))
            headers = [JSON, (b"content-length", b"%d" % len(body)), (REQUEST_ID, inflight.request.id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
            return "ok"
        finally:
            self.close()

    async def _made(self, collected: ImageAggregator) -> ImagesResponse:
        contents = None
        if collected.ask.inline and collected.files is not None:
            contents = [await read_file(self._gateway, file) for file in collected.files]
        return collected.answer(self._base_url, contents)


async def read_file(gateway: Gateway, file: File) -> bytes:
    """
    Raises:
        ServingError: it is not there (any more), too large, or the broker does not answer.
    """
    return await object_store.get(gateway.bus, BUCKET, file.name, limit=MAX_FILE_BYTES, timeout=FILE_S)


class Files:
    """``GET /v1/files/{name}``: one picture, for as long as the object store keeps it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def get(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = _NAME.fullmatch(name)
        try:
            if found is None:
                raise ServingError(Code.request_not_found, "")
            data = await object_store.get(self._gateway.bus, BUCKET, name, limit=MAX_FILE_BYTES, timeout=FILE_S)
        except ServingError as error:
            if error.code is not Code.request_not_found:
                raise
            what = f"no file {name[:80]!r}: it was never made here, or is too old"
            raise ServingError(Code.request_not_found, what, param="name") from None
        assert found is not None
        headers = {
            "cache-control": "private, max-age=3600, immutable",  # the name is never given to anything else
            "content-disposition": f'inline; filename="{name}"',
            "x-content-type-options": "nosniff",
        }
        return Response(data, media_type=TYPES[found[1]], headers=headers)


def base_url_of(scope: Scope, gateway: Gateway) -> str:
    """Where links to this gateway begin, without a slash at the end; "" when the client named no host."""
    if gateway.settings.public_url:
        return gateway.settings.public_url.rstrip("/")
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    return f"{scope.get('scheme', 'http')}://{host}" if _HOST.fullmatch(host) else ""
