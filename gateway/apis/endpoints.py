"""Differences between endpoints: the options of a body, and the shape of an answer."""

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args, get_origin

import msgspec

from penstock.gateway.apis.chat.aggregator import AnswerAggregator
from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, CompletionRequest
from penstock.gateway.apis.chat.segments import EndedNs, SegmentedAnswer, SegmentRenderer, WholeAnswer, unknown
from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.apis.embeddings import (
    EmbeddingAggregator,
    EmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from penstock.gateway.apis.images import IMAGE, VIDEO, ImageGenerationRequest, VideoGenerationRequest
from penstock.gateway.apis.messages import bodies as messages
from penstock.gateway.apis.messages.bodies import MessagesRequest
from penstock.gateway.apis.messages.prepare_message import limits_thoughts
from penstock.gateway.apis.messages.render import MessageEvents, message
from penstock.gateway.apis.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest
from penstock.gateway.apis.ollama.render import OllamaLines, WholeOllama
from penstock.gateway.apis.responses.bodies import CompactionRequest, ResponsesRequest, left_out
from penstock.gateway.apis.responses.chat import BRINGS_TOOLS
from penstock.gateway.apis.responses.prepare_response import compacted
from penstock.gateway.apis.responses.render import ResponseEvents, response
from penstock.gateway.base.chat_objects import UsageBody
from penstock.gateway.base.event_stream import COMMENT
from penstock.gateway.base.request_bodies import (
    CHAT,
    COMPACTION,
    COMPLETION,
    MESSAGE,
    OLLAMA,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSE,
    PrepareContext,
    decode_json,
    invalid,
    rename,
    unsupported,
)
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import (
    CONSTRAINT_LARK,
    EMBEDDING,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    RERANK,
    SCORE,
    GenerateRequest,
)
from penstock.schemas.tokens import TokenItem

# Clients send these to describe a request; they change no answer.
HARMLESS = frozenset(
    {
        "store",
        "metadata",
        "client_metadata",
        "safety_identifier",
        "extra_headers",
        "extra_body",
        "prompt_cache_retention",
    }
)
MOST = 16  # names in a message
_NAME = re.compile(r"[!-~]{1,64}")  # what a header may hold
_BODY_TYPES: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatCompletionRequest,
    COMPLETION: CompletionRequest,
    RESPONSE: ResponsesRequest,
    COMPACTION: CompactionRequest,
    MESSAGE: MessagesRequest,
    OLLAMA_CHAT: OllamaChatRequest,
    OLLAMA_GENERATE: OllamaGenerateRequest,
    EMBEDDING: EmbeddingRequest,
    OLLAMA_EMBED: OllamaEmbedRequest,
    OLLAMA_EMBEDDINGS: OllamaEmbeddingsRequest,
    RERANK: RerankRequest,
    SCORE: ScoreRequest,
    IMAGE: ImageGenerationRequest,
    VIDEO: VideoGenerationRequest,
}
# What these hold is not an option, or is passed on whole.
_CONTENT = frozenset({"messages", "input", "system", "prompt"})
_HARMLESS_WITHIN = frozenset({"cache_control", "eager_input_streaming"})  # of Anthropic's tools: both are always so
_DEEPEST = 4  # levels of options within options

Known = dict[str, "Known | None"]  # option -> the options within it; None: none are known, or it has none


def _known(body: type[msgspec.Struct], depth: int = 0) -> Known:
    return {field.encode_name: _within(field.type, depth) for field in msgspec.structs.fields(body)}


def _within(annotation: Any, depth: int) -> Known | None:
    """The options of the objects that a field takes, directly or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _known(annotation, depth + 1) if depth < _DEEPEST else None
    if get_origin(annotation) in (dict, Literal):
        return None
    found: Known = {}
    for part in get_args(annotation):
        found |= _within(part, depth) or {}
    return found or None


_KNOWN = {
    kind: {**_known(body), **dict.fromkeys(HARMLESS), **dict.fromkeys(_CONTENT)} for kind, body in _BODY_TYPES.items()
}
_NESTED = {kind: {name: within for name, within in known.items() if within} for kind, known in _KNOWN.items()}
_MAY_HIDE = (b'"web_search', b'"image_generation"', b'"tool_search"', b'"grammar"')
_LIST, _OBJECT = b"[{"  # what a value of these begins with
_read_tools = msgspec.json.Decoder(list[dict[str, Any]]).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_value = msgspec.json.Decoder().decode


# Option -> the name of one within it ("": itself; "*": of any, by its name) -> whether a value has an effect.
Unapplied = Mapping[str, Mapping[str, Callable[[Any], bool]]]


def _never(value: Any) -> bool:
    return False


# Whether a body may have options that models and not workers leave without effect.
MAY_BE_UNAPPLIED = re.compile(
    rb'"(?:reasoning|think|chat_template_kwargs|output_config|verbosity|include_obfuscation)'
).search


def unapplied_options(context: PrepareContext | None, of_workers: Collection[str] = ()) -> Unapplied:
    """Options that this model does not apply: what its chat template has no variable for, and budgets of thoughts that
    nothing enforces.

    Args:
        context: None: the model is not known yet.
        of_workers: options that its workers announce.
    """
    found: dict[str, Mapping[str, Callable[[Any], bool]]] = {name: {"": _never} for name in of_workers}
    if context is None:
        return found
    budget: dict[str, Callable[[Any], bool]] = {} if limits_thoughts(context) else {"budget_tokens": _never}
    if context.carries_chat or (template := context.model.template) is None:
        return found | ({"thinking": budget} if budget else {})
    sources = [template.source, *(each.source for each in template.named.values())]
    words = frozenset(word for source in sources for word in re.findall(r"[^\W\d]\w*", source))
    reasons = context.parsers is not None and bool(context.parsers.reasoning)
    switched = not words.isdisjoint(("enable_thinking", "thinking"))
    stops = switched or not reasons or (not budget and CONSTRAINT_LARK in (context.logits_processors or ()))

    def effort(value: Any) -> bool:
        return "reasoning_effort" in words or (value == "none" and stops)

    def switch(value: Any) -> bool:
        return switched or not isinstance(value, bool) or value is reasons

    def asked(value: Any) -> bool:
        return effort(value) if isinstance(value, str) else switch(value)

    def mode(value: Any) -> bool:
        return switch(value == "enabled") if value in ("enabled", "disabled") else True

    return {
        "reasoning_effort": {"": effort},
        "output_config": {"effort": effort},
        "text": {"verbosity": lambda _: "verbosity" in words},
        "reasoning": {"": switch, "effort": effort, "enabled": switch},
        "think": {"": asked},
        "thinking": {"type": mode, **budget},
        "chat_template_kwargs": {"*": words.__contains__},
        "stream_options": {"include_obfuscation": lambda value: value is False},
        **found,
    }


def ignored_options(endpoint: str, data: bytes, unapplied: Unapplied = MappingProxyType({})) -> Sequence[str]:
    """Options of a body that have no effect: names that its API lacks, tools hidden from models, ``unapplied`` ones.

    Options within others have both names, as in "stream_options.include_usage". A body that is not an object has none.

    Args:
        unapplied: those that the model does not apply.
    """
    known = _KNOWN.get(endpoint)
    if known is None:
        return ()
    try:
        names: dict[str, msgspec.Raw] = decode_json(_read_names, data)
        unknown = [] if names.keys() <= known.keys() else [name for name in names if name not in known]
        nested = _NESTED[endpoint]
        for name in names:
            if name in nested:
                unknown += _unknown_within(name, names[name], nested[name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if endpoint == RESPONSE and any(each in data for each in _MAY_HIDE):
        unknown += _tools_left_out(names, left_out)
        if any(each.encode() in data for each in BRINGS_TOOLS):
            unknown += _brought_left_out(names)
    if endpoint == MESSAGE and any(each.encode() in data for each in messages.LEFT_OUT):
        unknown += _tools_left_out(names, messages.left_out)
    for name in sorted(names.keys() & unapplied.keys() & known.keys()):
        unknown += _without_effect(name, names[name], unapplied[name], known[name] or {})
    return unknown


def _without_effect(
    name: str, raw: msgspec.Raw, effects: Mapping[str, Callable[[Any], bool]], known: Known
) -> Iterator[str]:
    """
    Args:
        known: the options within this one that its API has.
    """
    try:
        value = decode_json(_read_value, raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for inner, has_effect in effects.items() if value is not None else ():
        if not inner:
            if not has_effect(value):
                yield name
        elif isinstance(value, dict) and inner == "*":
            yield from (f"{name}.{each}" for each in value if not has_effect(each))
        elif isinstance(value, dict) and inner in known and not (value.get(inner) is None or has_effect(value[inner])):
            yield f"{name}.{inner}"


def _unknown_within(at: str, value: msgspec.Raw, known: Known) -> list[str]:
    start = memoryview(value)[0]
    if start == _LIST:
        found = []
        for number, each in enumerate(_read_list(value)):
            found += _unknown_within(f"{at}[{number}]", each, known)
            if len(found) > MOST:
                break
        return found
    if start != _OBJECT:
        return []
    names = _read_names(value)
    if names.keys() <= known.keys() and not any(known.values()):
        return []
    unknown = []
    for name, inner in names.items():
        if name not in known and name not in _HARMLESS_WITHIN:
            unknown.append(f"{at}.{name}")
        elif within := known.get(name):
            unknown += _unknown_within(f"{at}.{name}", inner, within)
    return unknown


def _tools_left_out(body: dict[str, msgspec.Raw], find: Callable[[list[dict[str, Any]]], list[str]]) -> list[str]:
    try:
        return find(_read_tools(body.get("tools", b"[]")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


class _Item(msgspec.Struct):
    type: Any = None
    tools: list[dict[str, Any]] | None = None


_read_items = msgspec.json.Decoder(list[_Item]).decode


def _brought_left_out(body: dict[str, msgspec.Raw]) -> list[str]:
    """As ``left_out``, of the tools that items of the input bring. They share its limits."""
    try:
        items = _read_items(body.get("input", b"[]"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    brought = {
        f"input[{number}].tools[{at}]": tool
        for number, item in enumerate(items)
        for at, tool in enumerate((item.tools or ()) if item.type in BRINGS_TOOLS else ())
    }
    places = {f"tools[{number}]": place for number, place in enumerate(brought)}
    return [rename(name, places) for name in left_out(brought.values())]


def check_options(endpoint: str, data: bytes) -> None:
    """
    Raises:
        ServingError: invalid_request: an option is unknown.
    """
    unknown = ignored_options(endpoint, data)
    if unknown:
        raise invalid(unknown[0][:64], f"unknown options: {listed(unknown)} (this gateway has --strict-options)")


def listed(names: Sequence[str]) -> str:
    """Names for a header or a message; those that a header cannot hold are left out."""
    shown = [name for name in names if _NAME.fullmatch(name)]
    more = len(names) - min(len(shown), MOST)
    if not shown:
        return f"{more} with names that cannot be shown"
    return ", ".join(shown[:MOST]) + (f", and {more} more" if more else "")


# Of APIs whose answers are segments.
_WHOLE: dict[str, Callable[[GenerateRequest, SegmentedAnswer], Any]] = {
    RESPONSE: response,
    COMPACTION: compacted,
    MESSAGE: message,
}


class _Answer(Protocol):
    @property
    def usage(self) -> UsageBody: ...

    @property
    def error(self) -> ServingError | None: ...


class Aggregator(_Answer, Protocol):
    """Collects items into one JSON body; see ``penstock.gateway.apis.chat.aggregator``."""

    @property
    def large(self) -> bool: ...

    def push(self, items: Iterable[TokenItem]) -> bool: ...

    def response(self) -> bytes: ...

    def parts(self) -> Sequence[bytes]: ...


class Renderer(_Answer, Protocol):
    """Renders items as server-sent events; see ``penstock.gateway.apis.chat.stream_renderer``."""

    @property
    def done(self) -> bool: ...

    @property
    def ping(self) -> bytes:
        """What says nothing, to be sent while nothing else is; b"": nothing more is sent."""

    def resume(self, last_event_id: str) -> None: ...

    def push(self, items: Iterable[TokenItem]) -> bytes: ...

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes: ...


def aggregator_for(
    request: GenerateRequest, detokenizer: Detokenizer | None, *, late: bool = False, ended_ns: EndedNs = unknown
) -> Aggregator:
    """
    Args:
        ended_ns: when the answer ended, once it has; Unix time.
        detokenizer: of its model; None: it makes vectors.
        late: log-probabilities of the prompt may have expired, and the time is not that of the answer.
    """
    if request.embedding is not None:
        return EmbeddingAggregator(request)
    assert detokenizer is not None
    body = _WHOLE.get(request.endpoint)
    if body is not None:
        return WholeAnswer(request, detokenizer, body, ended_ns)
    if request.endpoint in OLLAMA:
        return WholeOllama(request, detokenizer, None if late else time.time_ns)
    return AnswerAggregator(request, detokenizer, late=late)


def renderer_for(
    request: GenerateRequest,
    detokenizer: Detokenizer | None,
    *,
    include_usage: bool = False,
    ended_ns: EndedNs = unknown,
) -> Renderer:
    """
    Args:
        ended_ns: as in ``aggregator_for``.
        detokenizer: of its model; None: it makes vectors.
        include_usage: of chat and text completions; the others always have it.
    Raises:
        ServingError: unsupported: the answer has no events.
    """
    if request.embedding is not None:
        raise unsupported(
            "stream", "vectors and scores are not streamed: read the answer with GET /v1/requests/" + request.id
        )
    assert detokenizer is not None
    if request.endpoint == COMPACTION:
        raise unsupported("stream", "compactions are not streamed: read the answer with GET /v1/requests/" + request.id)
    if request.endpoint == RESPONSE:
        return SegmentRenderer(request, detokenizer, ResponseEvents(request, detokenizer), ended_ns)
    if request.endpoint == MESSAGE:
        return SegmentRenderer(request, detokenizer, MessageEvents(request))
    if request.endpoint in OLLAMA:
        return OllamaLines(request, detokenizer)
    return StreamRenderer(request, detokenizer, include_usage=include_usage)


class UndecidedRenderer:
    """Renders an answer that another model may give (``GenerateRequest.fallbacks``). Which one does is known with its
    first token; until then nothing of it is written.

    Args:
        request: as it was accepted.
        make: a renderer for the request, or for one of its fallbacks.
    """

    def __init__(self, request: GenerateRequest, make: Callable[[GenerateRequest], Renderer]) -> None:
        self._asked = request
        self._current: Callable[[], GenerateRequest] = lambda: request
        self._make = make
        self._made: Renderer | None = None
        self._last_event_id = ""

    def follow(self, current: Callable[[], GenerateRequest]) -> None:
        """
        Args:
            current: the request as it runs now.
        """
        self._current = current

    def _renderer(self, request: GenerateRequest | None = None) -> Renderer:
        if self._made is None:
            self._made = self._make(request or self._current())
            if self._last_event_id:
                self._made.resume(self._last_event_id)
        return self._made

    @property
    def done(self) -> bool:
        return self._made is not None and self._made.done

    @property
    def error(self) -> ServingError | None:
        return self._made.error if self._made is not None else None

    @property
    def usage(self) -> UsageBody:
        return self._renderer().usage

    @property
    def ping(self) -> bytes:
        if self._made is not None:
            return self._made.ping
        return b"" if self._asked.endpoint in OLLAMA else COMMENT

    def resume(self, last_event_id: str) -> None:
        self._make(self._asked).resume(last_event_id)  # refuses what is none
        self._last_event_id = last_event_id

    def push(self, items: Iterable[TokenItem]) -> bytes:
        return self._renderer().push(items) if items or self._made is not None else b""

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        try:
            renderer = self._renderer()
        except ServingError:  # the model that answers cannot be read here
            renderer = self._renderer(self._asked)
        return renderer.fail(error, finished=finished)


WRITE_BYTES = 262_144  # bytes of a large whole answer that are handed to the connection at a time


_WRITER = ThreadPoolExecutor(1, "answer-writer")  # several would only compete for the interpreter


async def encode_answer(collector: Aggregator) -> bytes:
    """The JSON body of an answer, in one piece.

    Raises:
        ServingError: the request failed.
    """
    return b"".join(await encode_portions(collector))


async def encode_portions(collector: Aggregator) -> list[bytes]:
    """The JSON body of an answer. Large ones are encoded in a thread, one after the other, beside others' streams.

    Returns: pieces of about ``WRITE_BYTES`` bytes; copying 10 MB in one piece would stop the event loop for 10 ms.
    Raises:
        ServingError: the request failed.
    """
    if not collector.large:
        return [collector.response()]
    return await asyncio.get_running_loop().run_in_executor(_WRITER, _portions, collector)


def _portions(collector: Aggregator) -> list[bytes]:
    portions: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for part in collector.parts():
        parts.append(part)
        size += len(part)
        if size >= WRITE_BYTES:
            portions.append(b"".join(parts))
            parts, size = [], 0
    return [*portions, b"".join(parts)] if parts else portions
