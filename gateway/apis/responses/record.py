"""What is stored of a response's body with its request, and reading it again. Pure.

The input is the client's own: with the recorded tokens it is all that a later response needs to continue this one.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.apis.chat.segments import SegmentedAnswer
from penstock.gateway.apis.responses.bodies import (
    CUSTOM,
    FUNCTION,
    TOOL_SEARCH,
    InputItem,
    InputPart,
    ResponsesRequest,
    ToolNames,
    custom_input,
)
from penstock.gateway.apis.responses.chat import Turn
from penstock.gateway.base.request_bodies import decode_body, invalid
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest

PREFIX = "resp_"
MAX_BYTES = 4 << 20  # half of what a message carries; the rest is for the tokens
MAX_TURNS = 256  # responses that one continues, directly or through others

_ITEM_PREFIX = {"reasoning": "rs", "text": "msg", FUNCTION: "fc", CUSTOM: "ctc", TOOL_SEARCH: "tsc"}


class StoredBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        ancestors: ids of the requests whose responses it continues, the oldest first.
        history_bytes: about what those take.
        tools: that items of the input brought, its ancestors' too.
    """

    body: ResponsesRequest
    ancestors: tuple[str, ...] = ()
    history_bytes: int = 0
    tools: Sequence[dict[str, Any]] = ()

    @property
    def offered(self) -> list[dict[str, Any]]:
        """All tools, in the order in which the model got them."""
        return [*(self.body.tools or ()), *self.tools]


_decode = msgspec.json.Decoder(StoredBody).decode
_encode = msgspec.json.Encoder().encode


def encode_stored(
    body: ResponsesRequest,
    ancestors: tuple[str, ...] = (),
    history_bytes: int = 0,
    tools: Sequence[dict[str, Any]] = (),
) -> bytes:
    """
    Raises:
        ServingError: too large.
    """
    if not body.kept:  # it cannot be continued, so only what the answer shows is needed
        return _encode(StoredBody(msgspec.structs.replace(body, input=None), tools=tools))
    data = _encode(StoredBody(body, ancestors, history_bytes, tools))
    if len(data) > MAX_BYTES:
        raise too_large(len(data), "the response", ", or set store: false")
    return data


def too_large(size: int, what: str, instead: str = "") -> ServingError:
    return ServingError(
        Code.body_too_large,
        f"{what} would be stored with {size} bytes of input; the limit is {MAX_BYTES}. Send images as "
        f"http(s) URLs{instead}",
        param="input",
    )


def read_stored(data: bytes) -> StoredBody:
    """
    Args:
        data: empty if it was removed, as from a redacted log.
    Raises:
        ServingError: of a release that this one cannot read.
    """
    stored: StoredBody = decode_body(_decode, data) if data else StoredBody(ResponsesRequest(model=""))
    return stored


def turn_of(request: GenerateRequest, record: done.Done, detokenizer: Detokenizer) -> Turn:
    """A response that is over, as a part of a later one's input.

    Raises:
        ServingError: its record is of a release that this one cannot read.
    """
    answer = SegmentedAnswer(request, detokenizer)
    answer.push(done.items(record))
    stored = read_stored(request.client_body)
    return Turn(
        PREFIX + request.id,
        stored.body.input or (),
        output_items(request.id, answer, ToolNames(stored.offered)),
    )


def output_items(request_id: str, answer: SegmentedAnswer, names: ToolNames) -> list[InputItem]:
    """The output as input. The arguments of a call that was cut off may be no JSON.

    Args:
        names: of the tools that the request offered.
    """
    items = []
    for segment in answer.segments:
        kind = names.kind(segment.name) if segment.kind == "call" else segment.kind
        name = item_id(request_id, kind, segment.index)
        status = "completed" if segment.closed else "incomplete"
        namespace, called = names.own(segment.name)
        item = InputItem(id=name, status=status, call_id=segment.call_id, name=called, namespace=namespace or None)
        match kind:
            case "text":
                part = InputPart("output_text", text=segment.content)
                item = InputItem("message", name, "assistant", [part], status=status)
            case "reasoning":
                part = InputPart("reasoning_text", text=segment.content)
                item = InputItem("reasoning", name, content=[part], summary=[], status=status)
            case _ if kind == CUSTOM:
                given = custom_input(segment.content)
                item = msgspec.structs.replace(item, type="custom_tool_call", input=given)
            case _ if kind == TOOL_SEARCH:
                fields: dict[str, Any] = {"name": None, "arguments": segment.arguments, "execution": "client"}
                item = msgspec.structs.replace(item, type="tool_search_call", **fields)
            case _:
                given = segment.content or ("{}" if segment.closed else "")
                item = msgspec.structs.replace(item, type="function_call", arguments=given)
        items.append(item)
    return items


def input_items(response_id: str, given: str | Sequence[InputItem]) -> list[InputItem]:
    """Input as the API lists it: every item has an id, a type and a status."""
    request_id = response_id.removeprefix(PREFIX)
    if isinstance(given, str):
        given = [InputItem("message", role="user", content=[InputPart("input_text", text=given)])]
    return [
        msgspec.structs.replace(
            item,
            id=item.id or f"{_INPUT_PREFIX.get(item.type or '', 'msg')}_{request_id}_in{number}",
            type=item.type or "message",
            content=_listed(item),
            status=item.status or "completed",
        )
        for number, item in enumerate(given)
    ]


def listed_item(item: InputItem) -> dict[str, Any]:
    """An item with the fields that OpenAI's schema requires in a list, whether or not its client sent them."""
    shown: dict[str, Any] = msgspec.to_builtins(item)
    if isinstance(parts := shown.get("content"), list):
        shown["content"] = [_REQUIRED.get(part["type"], {}) | part for part in parts]
    return shown


_REQUIRED: dict[str, dict[str, Any]] = {
    "output_text": {"annotations": [], "logprobs": []},
    "input_image": {"detail": "auto"},
}
_INPUT_PREFIX = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "reasoning": "rs",
    "compaction": "cmp",
}


def _listed(item: InputItem) -> str | list[InputPart] | None:
    if not isinstance(item.content, str):
        return item.content
    kind = "output_text" if item.role == "assistant" else "input_text"
    return [InputPart(kind, text=item.content)]


def item_id(request_id: str, kind: str, index: int) -> str:
    return f"{_ITEM_PREFIX[kind]}_{request_id}_{index}"


def check_turns(count: int, field: str = "previous_response_id") -> None:
    """
    Raises:
        ServingError: a conversation of this many responses cannot be continued.
    """
    if count > MAX_TURNS:
        raise invalid(
            field,
            f"the conversation has {count} responses; the limit is {MAX_TURNS}. Begin a new one with the items of this "
            "one as input",
        )
