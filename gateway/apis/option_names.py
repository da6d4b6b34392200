"""Options of a body that the gateway does not know, by API. Pure."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, CompletionRequest
from penstock.gateway.apis.embeddings import EmbeddingRequest
from penstock.gateway.apis.images import IMAGE, VIDEO, ImageGenerationRequest, VideoGenerationRequest
from penstock.gateway.apis.messages.bodies import MessagesRequest
from penstock.gateway.apis.responses.bodies import CompactionRequest, ResponsesRequest, left_out
from penstock.gateway.base.common import CHAT, COMPACTION, COMPLETION, MESSAGE, RESPONSE
from penstock.gateway.base.errors import invalid
from penstock.schemas.requests import EMBEDDING

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
_BODIES: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatCompletionRequest,
    COMPLETION: CompletionRequest,
    RESPONSE: ResponsesRequest,
    COMPACTION: CompactionRequest,
    MESSAGE: MessagesRequest,
    EMBEDDING: EmbeddingRequest,
    IMAGE: ImageGenerationRequest,
    VIDEO: VideoGenerationRequest,
}
# What these hold is no option, or is passed on whole.
_CONTENT = frozenset({"messages", "input", "system", "prompt"})
_HARMLESS_WITHIN = frozenset({"cache_control"})  # of Anthropic's tools
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
    kind: {**_known(body), **dict.fromkeys(HARMLESS), **dict.fromkeys(_CONTENT)} for kind, body in _BODIES.items()
}
_NESTED = {kind: {name: within for name, within in known.items() if within} for kind, known in _KNOWN.items()}
_LIST, _OBJECT = b"[{"  # what a value of these begins with
_read_tools = msgspec.json.Decoder(list[dict[str, Any]]).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def ignored_options(endpoint: str, data: bytes, unapplied: Collection[str] = ()) -> Sequence[str]:
    """Options of a body that have no effect: those of ``unknown_options``, and those that the workers do not apply.

    Args:
        unapplied: what workers of the model announce.
    """
    known = _KNOWN.get(endpoint)
    if known is None:
        return ()
    try:
        names = _read_names(data)
        unknown = [] if names.keys() <= known.keys() else [name for name in names if name not in known]
        nested = _NESTED[endpoint]
        for name in names:
            if name in nested:
                unknown += _unknown_within(name, names[name], nested[name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if endpoint == RESPONSE and b'"web_search' in data:
        unknown += _tools_left_out(names)
    if unapplied and (given := names.keys() & unapplied):
        unknown += [name for name in sorted(given) if name in known and bytes(names[name]) != b"null"]
    return unknown


def unknown_options(endpoint: str, data: bytes) -> Sequence[str]:
    """Names in a body that are no options of its API, and tools that no model is told of.

    Options within others have both names, as in "stream_options.include_usage". Of what is no JSON object, none.
    """
    return ignored_options(endpoint, data)


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


def _tools_left_out(body: dict[str, msgspec.Raw]) -> list[str]:
    try:
        return left_out(_read_tools(body.get("tools", b"[]")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def check_options(endpoint: str, data: bytes) -> None:
    """
    Raises:
        ServingError: invalid_request: an option is unknown.
    """
    unknown = unknown_options(endpoint, data)
    if unknown:
        raise invalid(unknown[0][:64], f"unknown options: {listed(unknown)} (this gateway has --strict-options)")


def listed(names: Sequence[str]) -> str:
    """Names for a header or a message; those that a header cannot hold are left out."""
    shown = [name for name in names if _NAME.fullmatch(name)]
    more = len(names) - min(len(shown), MOST)
    if not shown:
        return f"{more} with names that cannot be shown"
    return ", ".join(shown[:MOST]) + (f", and {more} more" if more else "")
