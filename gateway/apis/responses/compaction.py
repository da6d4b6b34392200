"""Compaction: the model summarises a conversation, and the summary stands for all but the user's messages. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from penstock.gateway.apis.chat.bodies import ChatMessage, ContentPart
from penstock.gateway.apis.chat.segments import SegmentedAnswer
from penstock.gateway.apis.responses.answer import usage_of
from penstock.gateway.apis.responses.bodies import InputItem, ResponsesRequest
from penstock.gateway.apis.responses.chat import Turn
from penstock.gateway.apis.responses.items import encode_summary
from penstock.gateway.apis.responses.objects import CompactedResponse, CompactionItem
from penstock.gateway.apis.responses.record import MAX_BYTES, PREFIX, input_items, too_large
from penstock.gateway.base.errors import decode_body
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest

INSTRUCTION = (
    "Summarise this conversation so that another assistant can continue it without having read it. Keep the user's "
    "goals and standing instructions, what was decided and done, the results of tools, names, numbers and code that "
    "still matter, and what remains to be done. Do not answer the user and call no tools: write the summary alone."
)

_json = msgspec.json.encode
_decode_kept = msgspec.json.Decoder(list[InputItem]).decode


def with_instruction(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """A conversation, and that it is to be summarised.

    Behind a message of the user it is a part of that one, as some templates refuse two in a row.
    """
    last = messages[-1]
    if last.role != "user" or last.content is None:
        return [*messages, ChatMessage("user", INSTRUCTION)]
    content: str | list[ContentPart]
    if isinstance(last.content, str):
        content = f"{last.content}\n\n{INSTRUCTION}"
    else:
        content = [*last.content, ContentPart("text", INSTRUCTION)]
    return [*messages[:-1], msgspec.structs.replace(last, content=content)]


def encode_kept(body: ResponsesRequest, history: Iterable[Turn], request_id: str) -> bytes:
    """The messages of the user, which the answer repeats, as they are stored with the request.

    Raises:
        ServingError: too large.
    """
    items = [item for turn in history for item in input_items(turn.id, turn.input)]
    items += input_items(PREFIX + request_id, body.input or ())
    data = _json([item for item in items if item.type == "message" and item.role == "user"])
    if len(data) > MAX_BYTES:
        raise too_large(len(data), "the compaction")
    return data


def compacted(request: GenerateRequest, answer: SegmentedAnswer) -> CompactedResponse:
    """The answer of a compaction that did not fail.

    Raises:
        ServingError: the model wrote no summary.
    """
    kept: list[InputItem] = decode_body(_decode_kept, request.client_body) if request.client_body else []
    item = CompactionItem(f"cmp_{request.id}", encode_summary(_summary(answer)))
    usage = usage_of(answer.usage, answer.reasoning_tokens)
    return CompactedResponse(PREFIX + request.id, request.created_ns // 1_000_000_000, [*kept, item], usage)


def _summary(answer: SegmentedAnswer) -> str:
    if text := "".join(each.content for each in answer.segments if each.kind == "text").strip():
        return text
    if answer.finish is not None and answer.finish.reason == "length":
        raise ServingError(
            Code.context_length_exceeded,
            "the output ended at its limit of tokens before the summary began; raise max_output_tokens if it is set, "
            "or shorten the conversation",
        )
    raise ServingError(Code.engine_error, "the model wrote no summary; repeat the request")
