"""Sends the answer of one image or video request over HTTP: progress events, or one JSON body."""

import msgspec

from penstock.gateway.apis.images_responses import ImageAggregator, ImagesResponse, ImageStreamRenderer
from penstock.gateway.base.event_stream import COMMENT
from penstock.gateway.http.answers import HEAD_S, JSON, REQUEST_ID, IdleTimer, Responder, Send
from penstock.gateway.http.files import read_file
from penstock.gateway.log.inflight import GOES_ON, InflightRequest
from penstock.gateway.service.service import Gateway
from penstock.schemas.errors import ServingError

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
                    data = renderer.fail(error, finished=error.code not in GOES_ON)
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
