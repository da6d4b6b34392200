"""Which key a request presents: in ``Authorization: Bearer …`` or ``x-api-key``, and nowhere else.

Never in the URL, which proxies and logs keep. A request with two different credentials is refused: a proxy in front and
this gateway might each believe another one.
"""

from collections.abc import Iterable

from penstock.schemas.errors import Code, ServingError

AUTHORIZATION, API_KEY = b"authorization", b"x-api-key"
_SCHEME = b"bearer "
WANTED = "send it as 'Authorization: Bearer pst-…' or 'x-api-key: pst-…'"


def presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The credential in ASGI headers, whose names are lower case.

    Raises:
        ServingError: invalid_api_key: there is none, there are different ones, or it is not a bearer token.
    """
    found = b""
    for name, value in headers:
        if name == AUTHORIZATION:
            if value[:7].lower() != _SCHEME:
                raise refused(f"the Authorization header is not a bearer token; {WANTED}")
            key = value[7:].strip(b" ")
        elif name == API_KEY:
            key = value.strip(b" ")
        else:
            continue
        if not key:
            raise refused(f"the API key is empty; {WANTED}")
        if found and found != key:
            raise refused("the request presents different credentials; send one")
        found = key
    if not found:
        raise refused(f"this gateway needs an API key; {WANTED}")
    return found


def refused(message: str) -> ServingError:
    return ServingError(Code.invalid_api_key, message)
