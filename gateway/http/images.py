"""HTTP endpoints of image and video generation, and ``GET /v1/media/{name}`` for the generated files, which are read
from the object store.
"""

import re
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.access.authentication import caller_of
from penstock.gateway.apis.images import ImageAggregator, ImagesResponse, ImageStreamRenderer
from penstock.gateway.base.event_stream import COMMENT
from penstock.gateway.http.answers import HEAD_S, JSON, HttpExchange, IdleTimer, Responder
from penstock.gateway.http.asgi import REQUEST_ID, Receive, Scope, Send
from penstock.gateway.request_log.inflight import CONTINUES, InflightRequest
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus import object_store
from penstock.infra.bus.memory_storage import get_file
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest

BUCKET = "results"
MAX_FILE_BYTES = 512 << 20  # held in memory while it is sent
READ_TIMEOUT_S = 60.0
MEDIA_TYPES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
    "mp4": "video/mp4",
}
ID_CHARACTERS = 36  # a name begins with the id of its request
FILE_NAME = re.compile(r"[0-9a-f-]{36}-[0-9]{1,9}-[0-9]{1,9}\.(png|jpg|webp|gif|mp4)")


async def read_file(gateway: Gateway, name: str, request: GenerateRequest | None = None) -> bytes:
    """
    Args:
        request: that it was made for; None: not known.
    Raises:
        ServingError: the file does not exist or has expired, is too large, or the broker does not answer.
    """
    bus = gateway.cell_of(name[:ID_CHARACTERS]).bus
    if request is not None and request.no_store:
        data = await get_file(bus, request.gateway, request.id, name)
        if data is None:
            raise _not_found(name)
        return data
    return await object_store.get(bus, BUCKET, name, limit=MAX_FILE_BYTES, timeout=READ_TIMEOUT_S)


class GeneratedFiles:
    """``GET /v1/media/{name}``, for as long as the object store keeps the file."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def get(self, request: Request) -> Response:
        name = request.path_params["name"]
        match = FILE_NAME.fullmatch(name)
        if match is None:
            raise _not_found(name)
        sight = self._gateway.fleet.sight(caller_of(request.scope))
        try:
            made_for, _ = await self._gateway.look_up(name[:ID_CHARACTERS], sight)
            data = await read_file(self._gateway, name, made_for)
        except ServingError as error:
            raise _not_found(name) if error.code is Code.request_not_found else error from None
        headers = {
            "cache-control": "private, max-age=3600, immutable",  # a name is never reused
            "content-disposition": f'inline; filename="{name}"',
            "x-content-type-options": "nosniff",
        }
        return Response(data, media_type=MEDIA_TYPES[match[1]], headers=headers)


def _not_found(name: str) -> ServingError:
    return ServingError(Code.request_not_found, f"no file {name[:80]!r}; files expire after 6 hours", param="name")


_json = msgspec.json.encode


class ImageResponder:
    """
    Args:
        responder: of the client's connection.
        base_url: of links to the files.
    """

    def __init__(
        self, gateway: Gateway, inflight: InflightRequest, send: Send, responder: Responder, base_url: str
    ) -> None:
        self._gateway = gateway
        self._inflight = inflight
        self._send = send
        self._responder = responder
        self._base_url = base_url

    async def stream(self, renderer: ImageStreamRenderer) -> str:
        """Server-sent events; returns the code for the metrics.

        Raises:
            ServingError: the request failed, or the client disconnected, before the header was sent.
        """
        inflight, aggregator = self._inflight, renderer.aggregator
        started, code = False, "ok"
        idle = IdleTimer(self._gateway.settings.stream_ping_s, inflight.nudge)
        self._responder.open()
        try:
            while not aggregator.done or not started:
                try:
                    items = await (inflight.take(nudged=True) if started else inflight.take_within(HEAD_S))
                    data = renderer.push(items) or (COMMENT if started and not items else b"")
                    if aggregator.done:
                        data += renderer.end(await self._response(aggregator))
                except ServingError as error:
                    if not started:
                        raise
                    aggregator.error, code = error, error.code.value
                    data = renderer.fail(error, finished=error.code not in CONTINUES)
                if not started:
                    started = True
                    await self._responder.begin_stream()
                if data:
                    idle.sent()
                    await self._send({"type": "http.response.body", "body": data, "more_body": not aggregator.done})
            return code
        finally:
            idle.close()
            self._responder.close()

    async def whole(self) -> str:
        """One JSON body; returns the code for the metrics.

        Raises:
            ServingError: the request failed, or the client disconnected.
        """
        inflight = self._inflight
        aggregator = ImageAggregator(inflight.request)
        self._responder.open()
        try:
            while not aggregator.push(await inflight.take()):
                pass
            body = _json(await self._response(aggregator))
            headers = [JSON, (b"content-length", b"%d" % len(body)), (REQUEST_ID, inflight.request.id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
            return "ok"
        finally:
            self._responder.close()

    async def _response(self, aggregator: ImageAggregator) -> ImagesResponse:
        contents = None
        if aggregator.diffusion.inline and aggregator.files is not None:
            contents = [await read_file(self._gateway, file.name, self._inflight.request) for file in aggregator.files]
        return aggregator.response(self._base_url, contents)


_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")


async def answer_images(gateway: Gateway, accepted: HttpExchange) -> str:
    """Send the answer of an image or video generation; returns the code for the metrics.

    Raises:
        ServingError: the request failed, or the client disconnected, before anything was sent.
    """
    prepared, inflight, scope, send, began, owner = accepted
    connection = Responder(gateway, inflight, scope, send, began, owner)
    responder = ImageResponder(gateway, inflight, send, connection, base_url(scope, gateway))
    if prepared.stream:
        return await responder.stream(ImageStreamRenderer(inflight.request))
    return await responder.whole()


class ImageReattach:
    """Progress and result of an accepted request, for ``GET /v1/requests/{id}/stream``."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(
        self, request: GenerateRequest, last_event_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """
        Raises:
            ServingError: the request failed, or ``last_event_id`` is not the id of one of its events.
        """
        gateway = self._gateway
        renderer = ImageStreamRenderer(request)
        if last_event_id:
            renderer.resume(last_event_id)
        inflight = await gateway.attach(request)
        base = Responder(gateway, inflight, scope, send, time.monotonic(), owner=False)
        await ImageResponder(gateway, inflight, send, base, base_url(scope, gateway)).stream(renderer)


def base_url(scope: Scope, gateway: Gateway) -> str:
    """Start of links to this gateway, without a final slash; "" if the client sent no valid Host header."""
    if gateway.settings.public_url:
        return gateway.settings.public_url.rstrip("/")
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    return f"{scope.get('scheme', 'http')}://{host}" if _HOST.fullmatch(host) else ""
