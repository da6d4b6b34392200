"""The page at ``/``."""

import base64
import re
from hashlib import sha256

from penstock.gateway.http.app import home_page


def test_the_policy_allows_what_is_on_the_page_and_nothing_else() -> None:
    page, headers = home_page()
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    text = page.decode()
    for kind in ("style", "script"):
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(sha256(inline.encode()).digest()).decode()}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    markup = re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\son\w+=|\sstyle=|<link|<img|https?:", markup), "the policy would forbid it"
    assert "innerHTML" not in text
    assert "localStorage" not in text
