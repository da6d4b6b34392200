"""Finds a text in the prompts and answers of requests, without decoding most of them.

Every match of a pattern contains its longest literal. Stored token ids are looked up, still packed, in tables that say
where this literal may begin. Only prompts and answers that may contain it are detokenized and searched.
"""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from penstock.log_tools.requests.describe import Texts
from penstock.schemas import requests
from penstock.schemas.wire import TOKEN_BYTES, WIDTHS, decoder, narrowed_count, unpack_tokens, widened

ID_BYTES = 36  # length of a request's id


class _OutcomeTexts(msgspec.Struct, gc=False):
    """Of an ``Outcome``."""

    tokens: bytes = b""
    packed: bytes = b""


class _DoneTexts(msgspec.Struct, tag="done", gc=False):
    """Of a ``Done``."""

    model: str
    choices: tuple[_OutcomeTexts, ...] = ()
    submitted: bytes = b""


class _RequestTexts(msgspec.Struct, gc=False):
    """Of a ``GenerateRequest``."""

    prompt: bytes = b""
    prompt_length: int = 0
    diffusion: msgspec.Raw | None = None
    embedding: msgspec.Raw | None = None


class _PackedRequestTexts(msgspec.Struct, array_like=True, gc=False):
    """Of a ``PackedRequest``."""

    request: _RequestTexts
    prompt: bytes


_decode_done, _decode_request, _decode_packed = (
    decoder(_DoneTexts),
    decoder(_RequestTexts),
    decoder(_PackedRequestTexts),
)
_NO_REQUEST = _RequestTexts()


class RecordSearch:
    """Finds a pattern in the prompts and answers of encoded records, without decoding anything else.

    Attributes:
        without_prompt: the records so far whose prompt was not searched, since REQUESTS no longer has it.
    """

    def __init__(self, pattern: re.Pattern[str], texts: Texts) -> None:
        self._search = pattern.search
        self._matches_nothing = pattern.search("") is not None
        self._texts = texts
        self._literal = _longest_literal(pattern)
        self._any_case = bool(pattern.flags & re.IGNORECASE)
        self._tables: dict[str, _Beginnings | None] = {}
        self._uses_tables = bool(self._literal) and find_spec("numpy") is not None
        self.without_prompt = 0

    def matching(self, records: Sequence[bytes], accepted: Sequence[bytes]) -> list[bool]:
        """Whether each record matches. True also for records with texts other than tokens, or that cannot be read.

        Args:
            accepted: the message of REQUESTS with each record's prompt; empty: it was deleted.
        Raises:
            ValueError: a model's tokenizer is not to be found.
        """
        found = [False] * len(records)
        by_model: dict[str, tuple[list[int], list[bytes]]] = {}
        for at, (data, stored) in enumerate(zip(records, accepted, strict=True)):
            try:
                done = _decode_done(data)
                request = _decode_request(done.submitted) if done.submitted else _NO_REQUEST
                texts = [_planes(request.prompt) or _prompt_in(stored)]
                texts += [one.packed or _planes(one.tokens) for one in done.choices]
            except msgspec.MsgspecError:
                found[at] = True
                continue
            if request.diffusion is not None or request.embedding is not None:
                found[at] = True
                continue
            self.without_prompt += bool(request.prompt_length and not texts[0])
            of, parts = by_model.setdefault(done.model, ([], []))
            for packed in texts:
                if packed:
                    of.append(at)
                    parts.append(packed)
                elif self._matches_nothing:
                    found[at] = True
        for model, (of, parts) in by_model.items():
            table = self._table_of(model) if parts and self._uses_tables else None
            for number in table.candidates(parts) if table is not None else range(len(parts)):
                if not found[of[number]]:
                    found[of[number]] = self._is_in(parts[number], model)
        return found

    def _is_in(self, packed: bytes, model: str) -> bool:
        try:
            tokens = unpack_tokens(widened(packed, narrowed_count(packed)))
        except ValueError:  # damaged: decoding the record reports it
            return True
        return self._search(self._texts.detokenizer(model).text(tokens)) is not None

    def _table_of(self, model: str) -> "_Beginnings | None":
        if model not in self._tables:
            vocabulary = self._texts.detokenizer(model).spoken
            table = _Beginnings(vocabulary, self._literal, any_case=self._any_case) if vocabulary else None
            self._tables[model] = table
        return self._tables[model]


def _prompt_in(message: bytes) -> bytes:
    """The packed tokens of a message of REQUESTS."""
    if not message:
        return b""
    return _decode_packed(message).prompt if requests.is_packed(message) else _planes(_decode_request(message).prompt)


def _planes(tokens: bytes) -> bytes:
    """Token ids (u32) as ``narrowed`` packs the largest ones."""
    return b"\x20" + b"".join([tokens[at::TOKEN_BYTES] for at in range(TOKEN_BYTES)]) if tokens else b""


def _longest_literal(pattern: re.Pattern[str]) -> bytes:
    """The longest text that every match of a pattern contains, in UTF-8; empty: none is known.

    If case is ignored, it is in lower case, without the letters that also match others outside ASCII.
    """
    parse: Any = import_module("re._parser").parse
    cut = _NOT_ASCII_ALONE if pattern.flags & re.IGNORECASE else _NO_CHARACTERS
    runs = [part for run in _literals(parse(pattern.pattern, pattern.flags)) for part in cut.split(run)]
    longest = max((run.encode() for run in runs), key=len, default=b"")
    return longest.lower() if pattern.flags & re.IGNORECASE else longest


_NO_CHARACTERS = re.compile("[\ufffd\ud800-\udfff]")  # the first also represents bytes that are not text
_NOT_ASCII_ALONE = re.compile("[iksIKS]|[^\0-\x7f]")  # "K" also matches the sign of Kelvin, for example


def _literals(parsed: Any) -> Iterator[str]:
    run = ""
    for kind, value in parsed:
        if str(kind) == "LITERAL":
            run += chr(value)
        elif str(kind) != "AT":  # a position has no width
            yield run
            run = ""
            if str(kind) == "SUBPATTERN" and not value[1] and not value[2]:  # without flags of its own
                yield from _literals(value[3])
            elif str(kind) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and value[0]:
                yield from _literals(value[2])
    yield run


# --- tokens ---

_MASK_BITS = 32
_EVERY = (1 << _MASK_BITS) - 1
_NARROW = 12  # bits of an id: up to this many, its lowest byte selects enough; otherwise its lowest two do


class _Beginnings:
    """Finds where a literal may begin among tokens: in a token that contains it, or that ends with its beginning.

    Tokens may split the literal anywhere, even within a character. In the first token, bit k means that the token ends
    with the literal's first k bytes; in the next token, that it continues the literal from byte k on, as far as both
    go. Bit 0: the token contains the whole literal.

    Args:
        vocabulary: what each token adds to a text.
    """

    def __init__(self, vocabulary: Sequence[bytes], literal: bytes, *, any_case: bool) -> None:
        import numpy as np

        literal = literal[:_MASK_BITS]
        heads = [(literal[:k], 1 << k) for k in range(1, len(literal))]
        rests = [(literal[k:], 1 << k) for k in range(1, len(literal))]
        # Two bytes suffice to exclude most tokens, which neither begin nor continue the literal.
        last, first = {head[-2:] for head, _ in heads}, {rest[:n] for rest, _ in rests for n in (1, 2)}
        # The last entry is for ids beyond the vocabulary. They have no text, so anything may follow them.
        size = max(1 << _NARROW, len(vocabulary)) + 1
        begins, continues = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        continues[len(vocabulary) :] = _EVERY
        for token, text in enumerate(map(bytes.lower, vocabulary) if any_case else vocabulary):
            if not text:
                continues[token] = _EVERY
                continue
            if text[:2] in first or text[0] == literal[-1]:
                continues[token] |= sum(bit for rest, bit in rests if rest.startswith(text[: len(rest)]))
            if text[-2:] in last or text[-1] == literal[0] or literal in text:
                own = sum(bit for head, bit in heads if text.endswith(head))
                begins[token] |= own | (literal in text)
        continues |= 1
        self._begins, self._continues = begins, continues
        few = np.stack([begins, continues])[:, : 1 << _NARROW].reshape(2, -1, 256)
        self._low_begins, self._low_continues = np.bitwise_or.reduce(few, axis=1)
        self._is_low = (self._low_begins > 0).astype(np.uint8).tobytes()
        self._is_pair = np.zeros(1 << 16, bool)
        self._is_pair[np.flatnonzero(begins) & 0xFFFF] = True

    def candidates(self, parts: Sequence[bytes]) -> Any:
        """The numbers of the parts (token ids as ``narrowed`` packs them) that may contain it, ascending."""
        import numpy as np

        joined = b"".join(parts) + b"\0"
        data = np.frombuffer(joined, np.uint8)
        sizes = np.array(list(map(len, parts)))
        starts = np.cumsum(sizes) - sizes
        bits = data[starts].astype(np.int64)
        whole = np.isin(bits, WIDTHS)
        counts = np.where(whole, 8 * (sizes - 1) // np.maximum(bits, 1), 0)
        # Lowest bytes that may begin it, and are followed by one that may continue it, or are the last of their part.
        low = np.flatnonzero(np.frombuffer(joined.translate(self._is_low), bool)[:-1])
        ends = starts + counts
        ends = ends[self._low_begins[data[ends]] > 0]
        low = np.concatenate([low[(self._low_begins[data[low]] & self._low_continues[data[low + 1]]) > 0], ends])
        part = np.searchsorted(starts, low, side="right") - 1
        position = low - starts[part] - 1
        of = (position >= 0) & (position < counts[part]) & (bits[part] <= _NARROW)
        part, position = part[of], position[of]
        wide = np.flatnonzero(whole & (bits > _NARROW))
        if len(wide):
            wide_counts = counts[wide]
            ends = np.cumsum(wide_counts)
            pairs = bytearray(2 * int(ends[-1]))
            at = 0
            for number, count in zip(wide.tolist(), wide_counts.tolist(), strict=True):
                packed = parts[number]
                pairs[at : at + 2 * count : 2] = packed[1 : 1 + count]
                pairs[at + 1 : at + 2 * count : 2] = packed[1 + count : 1 + 2 * count]
                at += 2 * count
            high = np.flatnonzero(self._is_pair.take(np.frombuffer(pairs, "<u2")))
            of_wide = np.searchsorted(ends, high, side="right")
            part = np.concatenate([part, wide[of_wide]])
            position = np.concatenate([position, high - ends[of_wide] + wide_counts[of_wide]])
        last = len(self._begins) - 1

        def tokens(position: Any) -> Any:
            return np.minimum(_tokens(data, starts[part], bits[part], counts[part], position), last)

        has_next = position + 1 < counts[part]
        following = np.where(has_next, self._continues[tokens(np.where(has_next, position + 1, position))], _EVERY)
        damaged = np.flatnonzero(~whole)
        return np.unique(np.concatenate([damaged, part[(self._begins[tokens(position)] & following) > 0]]))


def _tokens(data: Any, starts: Any, bits: Any, counts: Any, positions: Any) -> Any:
    """The ids at positions of packed parts, each of which begins at an offset of the data; see ``wire.narrowed``."""
    import numpy as np

    whole, width = bits >> 3, bits & 7
    ids = np.zeros(len(positions), np.int64)
    for plane in range(TOKEN_BYTES):
        at = np.where(whole > plane, starts + 1 + plane * counts + positions, 0)
        ids += np.where(whole > plane, data[at].astype(np.int64), 0) << 8 * plane
    size = np.maximum(-(-counts * width // 8), 1)
    byte = data[np.where(width > 0, starts + 1 + whole * counts + positions % size, 0)].astype(np.int64)
    return ids + ((byte >> positions // size * width & (1 << width) - 1) << 8 * whole)
