import json
import re
from pathlib import Path
from typing import Any

import msgspec

from penstock import gateway
from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, CompletionRequest
from penstock.gateway.apis.images import ImageGenerationRequest, VideoGenerationRequest
from penstock.gateway.http.openapi import OPERATIONS, Operation, document
from penstock.schemas.errors import Code


def plain(operations: tuple[Operation, ...] = OPERATIONS) -> Any:
    return json.loads(msgspec.json.encode(document("1.2.3", operations)))


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_reference_leads_to_a_schema() -> None:
    spec = plain()
    assert spec["openapi"].startswith("3.1")
    known = {f"#/components/schemas/{name}" for name in spec["components"]["schemas"]}
    assert references(spec["paths"]) <= known
    assert references(spec["components"]) <= known


def test_the_pages_name_what_is_gone_and_what_is_packed_in_another_way() -> None:
    paths = plain()["paths"]
    assert {"404", "410"} <= paths["/v1/requests/{id}"]["get"]["responses"].keys()
    assert "410" in paths["/v1/requests/{id}/stream"]["get"]["responses"]
    assert {"410", "415"} <= paths["/v1/chat/completions"]["post"]["responses"].keys()


def test_the_documented_fields_are_the_parsed_ones_with_their_limits() -> None:
    schemas = plain()["components"]["schemas"]
    for body in (ChatCompletionRequest, CompletionRequest, ImageGenerationRequest, VideoGenerationRequest):
        assert set(schemas[body.__name__]["properties"]) == set(body.__struct_fields__)
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in schemas["ChatCompletionRequest"]["properties"][
        "temperature"
    ]["anyOf"]


def test_errors_are_grouped_by_status() -> None:
    answers = plain()["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert "context_length_exceeded" in answers["400"]["description"]
    assert answers["429"]["description"] == "rate_limit_exceeded, insufficient_quota, queue_full"
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}


def test_each_operation_is_below_one_heading_and_each_heading_has_some() -> None:
    found = {tag for methods in plain()["paths"].values() for one in methods.values() for tag in one["tags"]}
    assert all(len(one["tags"]) == 1 for methods in plain()["paths"].values() for one in methods.values())
    assert {"Chat and text", "Ollama", "Files and batches", "Models and tokens", "Images and videos"} <= found


def test_operations_can_be_added() -> None:
    more = Operation(
        "get",
        "/v1/requests/{id}/events",
        "Go on reading",
        response="text/event-stream",
        errors=(Code.request_not_found,),
        parameters=(("id", "path", "request id"), ("Last-Event-ID", "header", "last event seen")),
    )
    spec = plain((*OPERATIONS, more))["paths"]["/v1/requests/{id}/events"]["get"]
    assert [(one["name"], one["required"]) for one in spec["parameters"]] == [("id", True), ("Last-Event-ID", False)]
    assert "404" in spec["responses"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = (Path(gateway.__file__).parent / "http" / "docs.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    assert "innerHTML" not in page
    assert "openapi.json" in page
