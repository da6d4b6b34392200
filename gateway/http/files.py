"""Generated images and videos: read from the object store, and served at ``GET /v1/files/{name}``."""

import re

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.access.caller import caller_of
from penstock.gateway.service.service import Gateway
from penstock.infra.bus import object_store
from penstock.infra.bus.memory import get_file
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
_NAME = re.compile(r"[0-9a-f-]{36}-[0-9]{1,9}-[0-9]{1,9}\.(png|jpg|webp|gif|mp4)")


async def read_file(gateway: Gateway, name: str, request: GenerateRequest | None = None) -> bytes:
    """
    Args:
        request: that it was made for; None: not known.
    Raises:
        ServingError: the file does not exist or has expired, is too large, or the broker does not answer.
    """
    if request is not None and request.no_store:
        data = await get_file(gateway.bus, request.gateway, request.id, name)
        if data is None:
            raise _not_found(name)
        return data
    return await object_store.get(gateway.bus, BUCKET, name, limit=MAX_FILE_BYTES, timeout=READ_TIMEOUT_S)


class GeneratedFiles:
    """``GET /v1/files/{name}``, for as long as the object store keeps the file."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def get(self, request: Request) -> Response:
        name = request.path_params["name"]
        match = _NAME.fullmatch(name)
        if match is None:
            raise _not_found(name)
        sees = caller_of(request.scope).sees
        try:
            made_for, _ = await self._gateway.look_up(name[:ID_CHARACTERS], sees)
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
