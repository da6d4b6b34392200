"""A completion of several prompts: a body each, and one answer made of theirs. Pure."""

from collections.abc import Sequence
from itertools import chain

import msgspec
from msgspec import Raw, Struct

from gateway.openai.errors import invalid, unsupported
from gateway.openai.responses import PromptTokensDetails, UsageBody

MAX_PROMPTS = 256

_json = msgspec.json.encode


class _Peek(Struct):
    prompt: Raw = Raw()


class _Answer(Struct):
    id: str
    created: int
    model: str
    choices: list[Raw]
    usage: UsageBody
    object: str = "text_completion"


_peek = msgspec.json.Decoder(_Peek).decode
_prompts = msgspec.json.Decoder(list[Raw]).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_answer = msgspec.json.Decoder(_Answer).decode


def split_prompts(data: bytes) -> Sequence[bytes]:
    """A body for each prompt; empty: there are not several, or the body is to be refused as a whole.

    Raises:
        ServingError: several prompts with stream: true, or too many.
    """
    try:
        prompt = bytes(_peek(data).prompt).lstrip()
        if not prompt.startswith(b"["):
            return ()
        prompts = _prompts(prompt)
        if len(prompts) < 2 or not all(bytes(each).lstrip()[:1] in (b'"', b"[") for each in prompts):
            return ()  # token ids of one prompt, or a mixture
        fields = _fields(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(prompts)} prompts; the limit is {MAX_PROMPTS}")
    if bytes(fields.get("stream", b"")) == b"true":
        raise unsupported("prompt", "several prompts are not supported with stream: true; send a request for each")
    return [_json(fields | {"prompt": each}) for each in prompts]


def merge_answers(bodies: Sequence[bytes]) -> bytes:
    """One body of those of the prompts, in their order: choices are numbered on, usage is added up."""
    answers = [_answer(body) for body in bodies]
    first = answers[0]
    choices = [_numbered(at, raw) for at, raw in enumerate(chain.from_iterable(each.choices for each in answers))]
    usages = [each.usage for each in answers]
    usage = UsageBody(
        sum(each.prompt_tokens for each in usages),
        sum(each.completion_tokens for each in usages),
        sum(each.total_tokens for each in usages),
        PromptTokensDetails(sum(each.prompt_tokens_details.cached_tokens for each in usages)),
    )
    return _json(msgspec.structs.replace(first, choices=choices, usage=usage))


def _numbered(index: int, choice: Raw) -> Raw:
    """A choice with another index, which is its first field."""
    encoded = bytes(choice)
    return Raw(b'{"index":%d' % index + encoded[encoded.index(b",") :])
