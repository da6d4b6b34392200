"""Request bodies of Ollama's API: their fields and limits. Knows no model and no tokenizer.

As in ``penstock.gateway.apis.chat.bodies``, unknown fields are ignored, and a known field whose value cannot be
honoured is an error that names it.
"""

from collections.abc import Container
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.apis.chat.bodies import MAX_MESSAGES, MAX_STOPS, Penalty, StopText
from penstock.gateway.base.request_bodies import CommonOptions, decode_body, unsupported

MAX_IMAGES = 128  # in one message; the gateway's --max-images limits those of a request
TAG = ":latest"  # what Ollama's clients put after a name without a tag


def untagged(name: str, served: Container[str]) -> str:
    """The name of a model without the tag that clients add; as it is, if a model has just this name."""
    return name if name in served else name.removesuffix(TAG)


class OllamaOptions(Struct, frozen=True, kw_only=True):
    """null means: not given. ``num_predict``: output tokens at most; 0, -1 or -2: as many as fit."""

    num_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31, description="0 or -1: off")] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaFunction(Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(Struct, frozen=True, omit_defaults=True):
    function: OllamaFunction
    id: str | None = None


Images = Annotated[list[str], Meta(max_length=MAX_IMAGES, description="each in base64")]


class OllamaMessage(Struct, frozen=True):
    """``tool_name``: of a message with role "tool", whose result it is."""

    role: Annotated[str, Meta(max_length=64)]
    content: str | None = None
    images: Images | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(CommonOptions, frozen=True, kw_only=True):
    """What both endpoints share. ``stream``: true if it is not given, as in Ollama."""

    options: OllamaOptions | None = None
    format: Annotated[
        str | dict[str, Any] | None, Meta(description='"json", or a JSON schema that the answer matches')
    ] = None
    think: Annotated[bool | str | None, Meta(description="true, false, or an effort: low, medium, high")] = None
    keep_alive: Annotated[Any, Meta(description="ignored: workers keep their model")] = None


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """POST /api/chat. Without messages it asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """POST /api/generate. Without a prompt it asks whether the model is there."""

    prompt: str | None = None
    system: str | None = None
    images: Images | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


_decode_chat = msgspec.json.Decoder(OllamaChatRequest).decode
_decode_generate = msgspec.json.Decoder(OllamaGenerateRequest).decode


def parse_ollama_chat(data: bytes) -> OllamaChatRequest:
    """
    Raises:
        ServingError: invalid_request, with the field.
    """
    body: OllamaChatRequest = decode_body(_decode_chat, data)
    return body


def parse_ollama_generate(data: bytes) -> OllamaGenerateRequest:
    """
    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: OllamaGenerateRequest = decode_body(_decode_generate, data)
    if body.raw:
        raise unsupported("raw", "raw is not supported; send the prompt to POST /v1/completions")
    for name in ("suffix", "template"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported; leave it out")
    if body.context:
        raise unsupported("context", "context is not supported; send the conversation to POST /api/chat")
    return body
