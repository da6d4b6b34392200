"""Which requests are traced, by their headers and the setting; and that the others are no larger for it."""

import json

import pytest

from penstock.gateway.apis.chat.prepare_chat import prepare_completion, with_trace
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.gateway.http.asgi import NEW_TRACE, from_http_headers
from penstock.gateway.nats.acceptor import from_nats_headers
from penstock.schemas.requests import decode
from penstock.schemas.trace import Trace
from penstock.schemas.wire import encode

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


@pytest.mark.parametrize(
    ("tracing", "parent", "trace"),
    [
        ("asked", PARENT, Trace(PARENT)),
        ("asked", UNSAMPLED, Trace(UNSAMPLED)),  # carried, so that nobody traces it after all
        ("asked", "", None),
        ("asked", "nonsense", None),
        ("all", PARENT, Trace(PARENT)),
        ("all", UNSAMPLED, Trace(UNSAMPLED)),
        ("all", "", NEW_TRACE),
        ("all", "nonsense", NEW_TRACE),
        ("off", PARENT, None),
    ],
)
def test_the_header_and_the_setting_decide(tracing: str, parent: str, trace: Trace | None) -> None:
    http = [(b"host", b"here"), (b"traceparent", parent.encode()), (b"accept", b"*/*")]
    assert from_http_headers(http if parent else http[:1], tracing) == trace
    assert from_nats_headers({"Traceparent": parent} if parent else {}, tracing) == trace


def test_tracestate_goes_with_its_parent_and_several_are_one_list() -> None:
    http = [(b"tracestate", b"a=1"), (b"traceparent", PARENT.encode()), (b"tracestate", b"b=2")]
    assert from_http_headers(http, "asked") == Trace(PARENT, "a=1,b=2")
    assert from_http_headers(http[:1], "asked") is None
    assert from_nats_headers({"traceparent": PARENT, "TraceState": "a=1"}, "asked") == Trace(PARENT, "a=1")


def test_only_a_traced_request_is_larger(context: PrepareContext) -> None:
    plain = prepare_completion(
        json.dumps({"model": "tiny", "prompt": "hi"}).encode(), context, now_ns=10**18, request_id="r"
    )
    assert with_trace(plain, None) is plain
    assert b"trace" not in encode(plain.request)
    asked = with_trace(plain, Trace(PARENT))
    assert decode(encode(asked.request)).trace == Trace(PARENT)
    assert asked._replace(request=plain.request) == plain
