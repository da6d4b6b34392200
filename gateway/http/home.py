"""The page at ``/``: models, endpoints, and a box to try them. It loads nothing from elsewhere and stores nothing."""

import base64
import re
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_INLINE = re.compile(rb"<(style|script)>(.*?)</\1>", re.DOTALL)


def home_page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. Its policy allows this style and this script alone, and requests to this gateway."""
    page = (Path(__file__).parent / "home.html").read_bytes()
    allowed = {kind.decode(): base64.b64encode(sha256(text).digest()).decode() for kind, text in _INLINE.findall(page)}
    policy = (
        f"default-src 'none'; style-src 'sha256-{allowed['style']}'; script-src 'sha256-{allowed['script']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


class Home:
    def __init__(self) -> None:
        self._page, self._headers = home_page()

    async def get(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=self._headers)
