"""From the body of a response, and what it continues, to a request. Pure but for random numbers.

Compaction is a request, too: the model summarises a conversation, and the summary stands for all but the user's
messages.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, ChatMessage, ContentPart
from penstock.gateway.apis.chat.prepare_chat import (
    PendingMediaRequest,
    PreparedRequest,
    count_translated,
    prepare_chat,
    prepare_translated,
)
from penstock.gateway.apis.chat.segments import SegmentedAnswer
from penstock.gateway.apis.responses.bodies import InputItem, ResponsesRequest, input_rules
from penstock.gateway.apis.responses.chat import Turn, brought_tools, chat_of, encode_summary
from penstock.gateway.apis.responses.objects import CompactedResponse, CompactionItem
from penstock.gateway.apis.responses.record import MAX_BYTES, PREFIX, input_items, too_large
from penstock.gateway.apis.responses.render import usage_of
from penstock.gateway.base.request_bodies import PrepareContext, decode_body
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

    After a message of the user it is a part of that one, as some templates refuse two in a row.
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


T = TypeVar("T")


def prepare_response(
    body: ResponsesRequest,
    history: Sequence[Turn],
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    compacts: bool = False,
) -> PreparedRequest | PendingMediaRequest:
    """
    Args:
        compacts: the conversation is summarised, not continued.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    chat, truncation = chat_of(body, history), body.truncation
    brought = brought_tools(body, history)
    try:
        rules = input_rules([*(body.tools or ()), *brought.tools])
    except ServingError as error:
        raise brought.located(error) from None
    if rules and not compacts:
        context = context._replace(inputs=rules)
    if compacts:
        chat = chat._replace(body=msgspec.structs.replace(chat.body, messages=with_instruction(chat.body.messages)))
    return prepare_translated(
        chat,
        lambda body: _fitting(
            lambda each: prepare_chat(each, context, now_ns=now_ns, request_id=request_id), body, truncation
        ),
    )


def count_prompt_of(body: ResponsesRequest, history: Sequence[Turn], context: PrepareContext) -> int:
    """Tokens of the prompt.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    return count_translated(chat_of(body, history), context)


def _fitting(prepare: Callable[[ChatCompletionRequest], T], chat: ChatCompletionRequest, truncation: str | None) -> T:
    """What ``prepare`` makes of the chat; with truncation "auto", of as many of its last turns as the context takes.

    Raises:
        ServingError: not even the last turn fits, or something else is wrong.
    """
    try:
        return prepare(chat)
    except ServingError as error:
        if truncation != "auto" or error.code is not Code.context_length_exceeded:
            raise
        too_long = error
    # Turns begin with what the user says, so that no result of a call stays without its call.
    first = next((at for at, message in enumerate(chat.messages) if message.role not in ("system", "developer")), 0)
    starts = [at for at, message in enumerate(chat.messages) if message.role == "user" and at > first]
    found: T | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        messages = [*chat.messages[:first], *chat.messages[starts[middle] :]]
        try:
            found = prepare(msgspec.structs.replace(chat, messages=messages))
            high = middle
        except ServingError as error:
            if error.code is not Code.context_length_exceeded:
                raise
            low = middle + 1
    if found is None:
        raise too_long
    return found


def with_body(prepared: PreparedRequest, endpoint: str, client_body: bytes) -> PreparedRequest:
    """The request as one of another API; ``client_body``: what its answer needs of the client's body."""
    request = msgspec.structs.replace(prepared.request, endpoint=endpoint, client_body=client_body)
    return prepared._replace(request=request)
