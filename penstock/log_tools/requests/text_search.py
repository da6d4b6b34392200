"""Finds a text in the prompts and answers of requests, of whose records nothing else is decoded."""

import re
from collections.abc import Sequence

import msgspec

from penstock.log_tools.requests.describe import Texts
from penstock.schemas import requests
from penstock.schemas.wire import decoder, narrowed_count, unpack_tokens, widened


class _Spoken(msgspec.Struct, gc=False):
    """Of an ``Outcome``."""

    tokens: bytes = b""
    packed: bytes = b""


class _Said(msgspec.Struct, tag="done", gc=False):
    """Of a ``Done``."""

    model: str
    choices: tuple[_Spoken, ...] = ()
    submitted: bytes = b""


class _Asked(msgspec.Struct, gc=False):
    """Of a ``GenerateRequest``."""

    prompt: bytes = b""
    prompt_length: int = 0
    diffusion: msgspec.Raw | None = None
    embedding: msgspec.Raw | None = None


class _PackedAsked(msgspec.Struct, array_like=True, gc=False):
    """Of a ``PackedRequest``."""

    request: _Asked
    prompt: bytes


_decode_said, _decode_asked, _decode_packed = decoder(_Said), decoder(_Asked), decoder(_PackedAsked)
_NOTHING_ASKED = _Asked()


class RecordSearch:
    """Finds a pattern in the prompts and answers of encoded records.

    Attributes:
        without_prompt: the records so far whose prompt was not searched, since REQUESTS no longer has it.
    """

    def __init__(self, pattern: re.Pattern[str], texts: Texts) -> None:
        self._search = pattern.search
        self._texts = texts
        self.without_prompt = 0

    def matching(self, records: Sequence[bytes], accepted: Sequence[bytes]) -> list[bool]:
        """Which records have it. True also for one that has other texts than tokens, or cannot be read.

        Args:
            accepted: of each record the message of REQUESTS, which has its prompt; empty: it is gone.
        Raises:
            ValueError: a model's tokenizer is not to be found.
        """
        return [self._matches(*each) for each in zip(records, accepted, strict=True)]

    def _matches(self, record: bytes, accepted: bytes) -> bool:
        try:
            said = _decode_said(record)
            asked = _decode_asked(said.submitted) if said.submitted else _NOTHING_ASKED
            prompt = _tokens(asked.prompt) or _prompt_in(accepted)
            if asked.diffusion is not None or asked.embedding is not None:
                return True
            self.without_prompt += bool(asked.prompt_length and not prompt)
            text_of, search = self._texts.detokenizer(said.model).text, self._search
            if search(text_of(prompt)) is not None:
                return True
            answers = (_tokens(one.tokens, one.packed) for one in said.choices)
            return any(search(text_of(answer)) is not None for answer in answers)
        except (msgspec.MsgspecError, _Damaged):  # whoever decodes the record says so
            return True


class _Damaged(Exception):
    """Packed tokens that are none."""


def _tokens(tokens: bytes, packed: bytes = b"") -> Sequence[int]:
    try:
        return unpack_tokens(widened(packed, narrowed_count(packed)) if packed else tokens)
    except ValueError as error:
        raise _Damaged from error


def _prompt_in(message: bytes) -> Sequence[int]:
    """The tokens of a message of REQUESTS; none if it is gone."""
    if not message:
        return ()
    if requests.is_packed(message):
        return _tokens(b"", _decode_packed(message).prompt)
    return _tokens(_decode_asked(message).prompt)
