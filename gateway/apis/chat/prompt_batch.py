"""A completion of several prompts: a body each, and one answer made of theirs. Pure."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec
from msgspec import Raw, Struct

from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.base.chat_objects import PromptTokensDetails, UsageBody
from penstock.gateway.base.event_stream import DONE
from penstock.gateway.base.request_bodies import invalid
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import TokenItem

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
        ServingError: too many.
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
    return [_json(fields | {"prompt": each}) for each in prompts]


def merge_answers(bodies: Sequence[bytes]) -> bytes:
    """One body of those of the prompts, in their order: choices are numbered on, usage is added up."""
    answers = [_answer(body) for body in bodies]
    first = answers[0]
    choices = [_numbered(at, raw) for at, raw in enumerate(chain.from_iterable(each.choices for each in answers))]
    return _json(msgspec.structs.replace(first, choices=choices, usage=_sum([each.usage for each in answers])))


def _sum(usages: Sequence[UsageBody]) -> UsageBody:
    return UsageBody(
        sum(each.prompt_tokens for each in usages),
        sum(each.completion_tokens for each in usages),
        sum(each.total_tokens for each in usages),
        PromptTokensDetails(sum(each.prompt_tokens_details.cached_tokens for each in usages)),
    )


def _numbered(index: int, choice: Raw) -> Raw:
    """A choice with another index, which is its first field."""
    encoded = bytes(choice)
    return Raw(b'{"index":%d' % index + encoded[encoded.index(b",") :])


_EVENT_ID = re.compile(rb"(?m)^id: [^\n]*\n")


class BatchRenderer:
    """One stream of the answers of several prompts: their events as they come, with choices numbered on.

    Events have no ids: no single request has the whole stream, so it cannot be continued elsewhere.

    Args:
        requests: of the prompts, in their order; each has as many choices as the others.
    """

    def __init__(
        self, requests: Sequence[GenerateRequest], detokenizer: Detokenizer, *, include_usage: bool = False
    ) -> None:
        first = requests[0]
        self._parts = [
            StreamRenderer(request, detokenizer, include_usage=include_usage, part_of=first, offset=place * request.n)
            for place, request in enumerate(requests)
        ]
        self._include_usage = include_usage
        created = first.created_ns // 1_000_000_000
        names = {"id": "cmpl-" + first.id, "object": "text_completion", "created": created, "model": first.model}
        self._head = b"data: " + _json(names)[:-1]

    @property
    def usage(self) -> UsageBody:
        return _sum(self.usages)

    @property
    def usages(self) -> list[UsageBody]:
        """Of each prompt."""
        return [part.usage for part in self._parts]

    def push(self, place: int, items: Iterable[TokenItem]) -> bytes:
        """Events for these items of the prompt at ``place``.

        Raises:
            ServingError: its request failed.
        """
        part = self._parts[place]
        data = part.push(items)
        if part.error is not None:
            raise part.error
        return _EVENT_ID.sub(b"", data)

    def ended(self, place: int) -> bool:
        return self._parts[place].done

    def end(self) -> bytes:
        """The end of the stream, once every answer has ended."""
        usage = b""
        if self._include_usage:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (self._head, _json(self.usage))
        return usage + DONE
