"""Options of a body that the gateway does not know, by API. Pure."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.anthropic.requests import MessagesRequest
from gateway.embeddings.requests import EmbeddingRequest
from gateway.images.prepare import IMAGE, VIDEO
from gateway.images.requests import ImageGenerationRequest, VideoGenerationRequest
from gateway.openai.common import CHAT, COMPLETION, MESSAGE, RESPONSE
from gateway.openai.errors import invalid
from gateway.openai.requests import ChatCompletionRequest, CompletionRequest
from gateway.openai.responses_api.requests import ResponsesRequest
from gateway.openai.responses_api.tools import left_out
from schemas.requests import EMBEDDING

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
    MESSAGE: MessagesRequest,
    EMBEDDING: EmbeddingRequest,
    IMAGE: ImageGenerationRequest,
    VIDEO: VideoGenerationRequest,
}
_KNOWN = {
    kind: HARMLESS | {field.encode_name for field in msgspec.structs.fields(body)} for kind, body in _BODIES.items()
}
_read_tools = msgspec.json.Decoder(list[dict[str, Any]]).decode
_read_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def unknown_options(endpoint: str, data: bytes) -> Sequence[str]:
    """Names at the top level of a body that are no options of its API, and tools that no model is told of.

    Of what is no JSON object, none.
    """
    known = _KNOWN.get(endpoint)
    if known is None:
        return ()
    try:
        names = _read_names(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    unknown = [name for name in names if name not in known] if names.keys() - known else []
    return unknown + _tools_left_out(names) if endpoint == RESPONSE and b'"web_search' in data else unknown


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
