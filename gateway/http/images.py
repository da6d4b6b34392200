"""HTTP endpoints of image and video generation."""

import re
import time

from penstock.gateway.apis.images_responses import ImageStreamRenderer
from penstock.gateway.http.answers import AcceptedRequest, Receive, Responder, Scope, Send
from penstock.gateway.http.responder import ImageResponder
from penstock.gateway.service.service import Gateway
from penstock.schemas.requests import GenerateRequest

_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")


async def answer_images(gateway: Gateway, accepted: AcceptedRequest) -> str:
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
