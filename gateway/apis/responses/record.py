"""What is stored of a response's body with its request, and reading it again. Pure.

The input is the client's own: with the recorded tokens it is all that a later response needs to continue this one.
"""

from collections.abc import Sequence

import msgspec

from penstock.gateway.apis.chat.segments import SegmentedAnswer
from penstock.gateway.apis.responses.bodies import (
    CUSTOM,
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

_ITEM_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc", CUSTOM: "ctc"}


class StoredBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        ancestors: ids of the requests whose responses it continues, the oldest first.
        history_bytes: about what those take.
    """

    body: ResponsesRequest
    ancestors: tuple[str, ...] = ()
    history_bytes: int = 0


_decode = msgspec.json.Decoder(StoredBody).decode
_encode = msgspec.json.Encoder().encode


def encode_stored(body: ResponsesRequest, ancestors: tuple[str, ...] = (), history_bytes: int = 0) -> bytes:
    """
    Raises:
        ServingError: too large.
    """
    if not body.kept:  # it cannot be continued, so only what the answer shows is needed
        return _encode(StoredBody(msgspec.structs.replace(body, input=None)))
    data = _encode(StoredBody(body, ancestors, history_bytes))
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
        output_items(request.id, answer, ToolNames(stored.body.tools or ())),
    )


def output_items(request_id: str, answer: SegmentedAnswer, names: ToolNames) -> list[InputItem]:
    """The output as input. The arguments of a call that was cut off may be no JSON.

    Args:
        names: of the tools that the request offered.
    """
    items = []
    for segment in answer.segments:
        name = item_id(request_id, segment.kind, segment.index)
        status = "completed" if segment.closed else "incomplete"
        match segment.kind:
            case "text":
                part = InputPart("output_text", text=segment.content)
                items.append(InputItem("message", name, "assistant", [part], status=status))
            case "reasoning":
                part = InputPart("reasoning_text", text=segment.content)
                items.append(InputItem("reasoning", name, content=[part], summary=[], status=status))
            case "call" if names.takes_text(segment.name):
                items.append(
                    InputItem(
                        "custom_tool_call",
                        item_id(request_id, CUSTOM, segment.index),
                        call_id=segment.call_id,
                        name=names.own(segment.name)[1],
                        input=custom_input(segment.content),
                        status=status,
                    )
                )
            case "call":
                namespace, called = names.own(segment.name)
                items.append(
                    InputItem(
                        "function_call",
                        name,
                        call_id=segment.call_id,
                        name=called,
                        arguments=segment.content or ("{}" if segment.closed else ""),
                        status=status,
                        namespace=namespace or None,
                    )
                )
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


_INPUT_PREFIX = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
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


def check_turns(count: int) -> None:
    """
    Raises:
        ServingError: a conversation of this many responses cannot be continued.
    """
    if count > MAX_TURNS:
        raise invalid(
            "previous_response_id",
            f"the conversation has {count} responses; the limit is {MAX_TURNS}. Begin a new one with the items of this "
            "one as input",
        )
