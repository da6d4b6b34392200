"""Which requests are traced, by their headers and the setting; and that the others are no larger for it."""

import json

import pytest

from gateway.openai.prepare import Target, prepare_text
from gateway.tracing import OWN, of_http, of_nats, traced
from schemas.requests import decode
from schemas.trace import Trace
from schemas.wire import encode

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
        ("all", "", OWN),
        ("all", "nonsense", OWN),
        ("off", PARENT, None),
    ],
)
def test_the_header_and_the_setting_decide(tracing: str, parent: str, trace: Trace | None) -> None:
    http = [(b"host", b"here"), (b"traceparent", parent.encode()), (b"accept", b"*/*")]
    assert of_http(http if parent else http[:1], tracing) == trace
    assert of_nats({"Traceparent": parent} if parent else {}, tracing) == trace


def test_tracestate_goes_with_its_parent_and_several_are_one_list() -> None:
    http = [(b"tracestate", b"a=1"), (b"traceparent", PARENT.encode()), (b"tracestate", b"b=2")]
    assert of_http(http, "asked") == Trace(PARENT, "a=1,b=2")
    assert of_http(http[:1], "asked") is None
    assert of_nats({"traceparent": PARENT, "TraceState": "a=1"}, "asked") == Trace(PARENT, "a=1")


def test_only_a_traced_request_is_larger(target: Target) -> None:
    plain = prepare_text(json.dumps({"model": "tiny", "prompt": "hi"}).encode(), target, now_ns=10**18)
    assert traced(plain, None) is plain
    assert b"trace" not in encode(plain.request)
    asked = traced(plain, Trace(PARENT))
    assert decode(encode(asked.request)).trace == Trace(PARENT)
    assert asked._replace(request=plain.request) == plain
