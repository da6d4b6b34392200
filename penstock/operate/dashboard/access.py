"""Access to the dashboard by the operator's token, in a link, a cookie or a header."""

import hmac
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from penstock.launch.state import TOKEN_FILE

COOKIE_S = 30 * 86400


class Access:
    """Checks requests.

    Args:
        token: what they must bring.
        port: of the dashboard; browsers do not separate cookies by port, so it is part of the cookie's name.
    """

    def __init__(self, token: str, port: int) -> None:
        self.token = token
        self._cookie = f"penstock-{port}"

    def refusal(self, request: Request) -> Response | None:
        """None: the request may pass. A link with the token is answered with a cookie and the link without it."""
        token = request.query_params.get("token")
        if token is not None and self._is_token(token):
            query = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
            answer = RedirectResponse(request.url.path + (f"?{query}" if query else ""), 303)
            answer.set_cookie(self._cookie, token, max_age=COOKIE_S, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self._cookie, "")) or self._is_token(bearer):
            return None
        return PlainTextResponse(
            "This dashboard needs the operator's token: open the link that `penstock up` or `penstock dashboard` has "
            f"printed. The token is in {TOKEN_FILE} in the data folder.\n",
            401,
            {"WWW-Authenticate": "Bearer"},
        )

    def _is_token(self, given: str) -> bool:
        return bool(given) and hmac.compare_digest(given.encode(), self.token.encode())
