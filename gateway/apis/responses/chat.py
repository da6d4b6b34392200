"""A response's body as the chat that answers it. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, ResponseFormat, SchemaFormat
from penstock.gateway.apis.responses.bodies import InputItem, ResponsesRequest
from penstock.gateway.apis.responses.items import Conversation
from penstock.gateway.apis.responses.tools import ToolNames, chat_tools
from penstock.gateway.base.errors import invalid

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Turn(NamedTuple):
    """An earlier response: what went in, without its instructions, and what came out."""

    id: str
    input: str | Sequence[InputItem]
    output: Sequence[InputItem]


class Chat(NamedTuple):
    """``places``: names of the chat's fields -> the client's, for errors."""

    body: ChatCompletionRequest
    places: dict[str, str]


def chat_of(body: ResponsesRequest, history: Iterable[Turn] = ()) -> Chat:
    """
    Args:
        history: the responses that this one continues, the oldest first.
    Raises:
        ServingError: something in the body is not supported; names the field.
    """
    names = ToolNames(body.tools or ())
    talk = Conversation(names)
    if body.instructions is not None:
        talk.instruct(body.instructions)
    for turn in history:
        _add(talk, turn.input, f"the input of {turn.id}")
        talk.add(turn.output, f"the output of {turn.id}")
    _add(talk, body.input or (), "input")
    if not talk.messages:
        raise invalid("input", "input is empty; it must have at least 1 item")
    tools, tool_places = chat_tools(body.tools or (), names)
    places = {**NAMES, **talk.places, **tool_places}
    if body.store is False and not body.no_store:
        places["no_store"] = "store"
    logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    chat = ChatCompletionRequest(
        model=body.model,
        messages=talk.messages,
        tools=tools or None,
        tool_choice=_tool_choice(body.tool_choice, names),
        parallel_tool_calls=body.parallel_tool_calls,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        response_format=_format(body),
        chat_template_kwargs=_variables(body),
        seed=body.seed,
        stream=body.stream,
        user=body.user or body.safety_identifier,
        priority=body.priority,
        service_tier=body.service_tier,
        timeout_s=body.timeout_s,
        deadline_s=body.deadline_s,
        no_store=not body.kept,
        worker=body.worker,
        cache_salt=body.cache_salt,
        prompt_cache_key=body.prompt_cache_key,
    )
    return Chat(chat, places)


def _add(talk: Conversation, given: str | Sequence[InputItem], place: str) -> None:
    if isinstance(given, str):
        talk.say(given, place)
    else:
        talk.add(given, place)


def _tool_choice(given: str | dict[str, Any] | None, names: ToolNames) -> str | dict[str, Any] | None:
    """As chat completions have it, whose own limits apply to it."""
    if isinstance(given, dict) and given.get("type") == "function":
        name, namespace = given.get("name"), given.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str):
            name = names.shown(namespace, name)
        return {"type": "function", "function": {"name": name}}
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": {key: given.get(key) for key in ("mode", "tools")}}
    return given


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    """What the output must match, as chat completions have it, whose own limits apply to it."""
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(given.type)
    return ResponseFormat(given.type, SchemaFormat(given.name, given.schema, given.strict, given.description))


def _variables(body: ResponsesRequest) -> dict[str, Any] | None:
    """Variables of the chat template."""
    verbosity = body.text.verbosity if body.text is not None else None
    if verbosity is None:
        return body.chat_template_kwargs
    return {"verbosity": verbosity, **(body.chat_template_kwargs or {})}
