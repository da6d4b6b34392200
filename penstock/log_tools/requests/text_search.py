"""Finds a text in the prompts and answers of requests, without decoding most of them.

Every match of a pattern contains its longest literal. Stored token ids are looked up, still packed, in tables that say
where this literal may begin. Only prompts and answers that may contain it are detokenized and searched.

The files of a stopped deployment are sifted in whole blocks: numpy finds the packed tokens by the names of their
fields. Messages in an unexpected form count as possible matches, and are decoded.
"""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec

from penstock.log_tools.requests.describe import Texts
from penstock.log_tools.sources.store_files import Place, body_spans, message_id
from penstock.schemas import requests
from penstock.schemas.wire import TOKEN_BYTES, WIDTHS, decoder, narrowed_count, unpack_tokens, widened

ID_BYTES = 36  # length of a request's id


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


class Sifted(NamedTuple):
    """The messages in a block of REQUESTS or DONE.

    Attributes:
        names: the id of each message's request, in order; empty: the message is not the end of a request.
        possible: numbers of the messages that may contain the text.
    """

    names: list[bytes]
    possible: list[int]


class RecordSearch:
    """Finds a pattern in the prompts and answers of encoded records, without decoding anything else.

    Attributes:
        without_prompt: the records so far whose prompt was not searched, since REQUESTS no longer has it.
        sifts: whether ``sift`` can be called: the pattern has a literal, and numpy is installed.
    """

    def __init__(self, pattern: re.Pattern[str], texts: Texts) -> None:
        self._search = pattern.search
        self._matches_nothing = pattern.search("") is not None
        self._texts = texts
        self._literal = _longest_literal(pattern)
        self._any_case = bool(pattern.flags & re.IGNORECASE)
        self._tables: dict[frozenset[str], _Beginnings | None] = {}
        self.without_prompt = 0
        self.sifts = bool(self._literal) and find_spec("numpy") is not None

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
                said = _decode_said(data)
                asked = _decode_asked(said.submitted) if said.submitted else _NOTHING_ASKED
                texts = [_planes(asked.prompt) or _prompt_in(stored)]
                texts += [one.packed or _planes(one.tokens) for one in said.choices]
            except msgspec.MsgspecError:
                found[at] = True
                continue
            if asked.diffusion is not None or asked.embedding is not None:
                found[at] = True
                continue
            self.without_prompt += bool(asked.prompt_length and not texts[0])
            of, parts = by_model.setdefault(said.model, ([], []))
            for packed in texts:
                if packed:
                    of.append(at)
                    parts.append(packed)
                elif self._matches_nothing:
                    found[at] = True
        for model, (of, parts) in by_model.items():
            table = self._table_of(frozenset((model,))) if parts and self.sifts else None
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

    def sift(self, block: bytes, places: Sequence[Place]) -> Sifted:
        """Find the messages of a block of REQUESTS or DONE that may match.

        A record is searched for its answers, and for its prompt only if it contains that itself.

        Raises:
            ValueError: a model's tokenizer is not to be found.
        """
        found = _Messages(block, places)
        parts, of = found.parts()
        possible = found.unclear
        table = self._table_of(found.models(of)) if parts else None
        if table is not None:
            possible[of[table.candidates(parts)]] = True
        else:
            possible[of] = True
        return Sifted(found.names, possible.nonzero()[0].tolist())

    def _table_of(self, models: frozenset[str]) -> "_Beginnings | None":
        if models not in self._tables:
            vocabularies = [self._texts.detokenizer(model).spoken for model in models]
            usable = vocabularies and all(vocabularies)
            self._tables[models] = _Beginnings(vocabularies, self._literal, any_case=self._any_case) if usable else None
        return self._tables[models]


def _prompt_in(message: bytes) -> bytes:
    """The packed tokens of a message of REQUESTS.

    Raises:
        msgspec.MsgspecError: it is no such message.
    """
    if not message:
        return b""
    return _decode_packed(message).prompt if requests.is_packed(message) else _planes(_decode_asked(message).prompt)


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


_NO_CHARACTERS = re.compile("[\ufffd\ud800-\udfff]")  # the first also represents bytes that are no text
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
        vocabularies: what each token adds to a text, of all models whose tokens are looked up.
    """

    def __init__(self, vocabularies: Sequence[Sequence[bytes]], literal: bytes, *, any_case: bool) -> None:
        import numpy as np

        literal = literal[:_MASK_BITS]
        heads = [(literal[:k], 1 << k) for k in range(1, len(literal))]
        rests = [(literal[k:], 1 << k) for k in range(1, len(literal))]
        # Two bytes suffice to exclude most tokens, which neither begin nor continue the literal.
        last, first = {head[-2:] for head, _ in heads}, {rest[:n] for rest, _ in rests for n in (1, 2)}
        # The last entry is for ids beyond all vocabularies. They have no text, so anything may follow them.
        size = max(1 << _NARROW, *map(len, vocabularies)) + 1
        begins, continues = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        for spoken in vocabularies:
            continues[len(spoken) :] = _EVERY
            for token, text in enumerate(map(bytes.lower, spoken) if any_case else spoken):
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


# --- messages ---

_ID_FIELD, _DONE_FIELD, _RETURNED_FIELD = b"\xa2id\xd9\x24", b"\xa4type\xa4do", b"\xa4type\xa8re"
_REQUEST_FIELD, _MODEL_FIELD = b"\xa7request", b"\xa5model"
_TOKEN_FIELDS = (b"\xa6packed", b"\xa6tokens", b"\xa6prompt")
_OTHER_FIELDS = (b"\xa9diffusi", b"\xa9embeddi")  # of texts that are no tokens
_LENGTH_FIELD = b"\xadprompt_", b"length"
_HEAD_BYTES = 80  # of a message, up to the name of its model
_FIXED_MAP, _MAP, _FIXED_TEXT, _TEXT = 0x80, 0xDE, 0xA0, 0xD9
_BINARY = 0xC4  # the length follows in one byte; then in two, then in four


class _Messages:
    """Messages of REQUESTS and DONE in a block, with the packed tokens that numpy finds in them.

    Names of fields are also found within texts, which only adds parts and never hides one. The prompt of a
    ``PackedRequest`` has no name; a second ``prompt_length`` makes such a message unclear.

    Attributes:
        names: see ``Sifted``.
        unclear: whether each message has to be decoded, because its form is unexpected or it has other texts.
    """

    def __init__(self, block: bytes, places: Sequence[Place]) -> None:
        import numpy as np

        self._block = block
        self._data = np.frombuffer(block, np.uint8)
        self._words = np.ndarray((max(0, len(block) - 7),), "<u8", block, strides=(1,))
        offsets = np.array([at for _, _, at in places])
        self._begins, self._ends = body_spans(block, offsets)
        long = self._ends - self._begins >= _HEAD_BYTES
        begins = np.where(long, self._begins, 0)
        self._packed = long & (self._data[begins] & 0xF0 == 0x90)
        fields = begins + self._packed
        head = self._data[fields]
        known = long & ((head & 0xF0 == _FIXED_MAP) | (head == _MAP))
        fields = fields + np.where(head == _MAP, 3, 1)
        asks = known & self._has(fields, _ID_FIELD)
        ends = known & self._has(fields, _DONE_FIELD) & self._has(fields + 10, _REQUEST_FIELD)
        ends &= self._has(fields + 18, _ID_FIELD[-2:])
        returned = known & self._has(fields, _RETURNED_FIELD)
        ids = fields + np.where(asks, len(_ID_FIELD), 20)
        self._models = ids + ID_BYTES
        clear = (asks | ends) & self._has(self._models, _MODEL_FIELD)
        head = self._data[np.minimum(self._models + len(_MODEL_FIELD), len(block) - 1)]
        clear &= (head & 0xE0 == _FIXED_TEXT) | (head == _TEXT)
        self.unclear = ~(clear | returned)
        self.names = [block[at : at + ID_BYTES] for at in np.where(clear, ids, len(block)).tolist()]
        for number in np.flatnonzero(self.unclear).tolist():
            self.names[number] = message_id(block, places[number][2])[:ID_BYTES]
        self.unclear[self._owners(self._find(*_OTHER_FIELDS))] = True

    def parts(self) -> tuple[list[bytes], Any]:
        """All parts of packed tokens, each with the number of its message."""
        import numpy as np

        at = self._find(*_TOKEN_FIELDS)
        begins, sizes = self._binary(at + len(_TOKEN_FIELDS[0]))
        plain = self._words[at] & _mask(_TOKEN_FIELDS[0]) != _number(_TOKEN_FIELDS[0])
        of = np.searchsorted(self._begins, at, side="right") - 1
        fits = (of >= 0) & (sizes > 0) & (begins + sizes <= self._ends[of])
        slices = zip(begins[fits].tolist(), (begins + sizes)[fits].tolist(), plain[fits].tolist(), strict=True)
        block = self._block
        parts = [_planes(block[begin:end]) if is_plain else block[begin:end] for begin, end, is_plain in slices]
        prompts, of_prompts = self._prompts() if self._packed.any() else ([], at[:0])
        return parts + prompts, np.concatenate([of[fits], of_prompts])

    def models(self, of: Any) -> frozenset[str]:
        """The models of these messages, without those that are unclear."""
        import numpy as np

        begins = self._models[of[~self.unclear[of]]] + len(_MODEL_FIELD)
        head, length = self._data[begins].astype(np.int64), self._data[begins + 1]
        ends = begins + np.where(head == _TEXT, 2 + length, 1 + (head & 31))
        block = self._block
        found = {block[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)}
        return frozenset(map(msgspec.msgpack.Decoder(str).decode, found))

    def _prompts(self) -> tuple[list[bytes], Any]:
        """The prompts of packed requests, each the last part of its message, with a size given by ``prompt_length``."""
        import numpy as np

        at = self._find(_LENGTH_FIELD[0])
        at = at[self._has(at + 8, _LENGTH_FIELD[1])]
        at = at[np.isin(np.searchsorted(self._begins, at, side="right") - 1, np.flatnonzero(self._packed))]
        of = self._owners(at)
        once = self._packed & (np.bincount(of, minlength=len(self._ends)) == 1)
        self.unclear |= self._packed & ~once
        at, of = at[once[of]], of[once[of]]
        counts, ends = self._whole_number(at + 14), self._ends[of]
        begins, matches = np.zeros(len(of), np.int64), np.zeros(len(of), np.int64)
        for bits in WIDTHS:
            sizes = 1 + (bits >> 3) * counts + -(-counts * (bits & 7) // 8)
            begin = np.maximum(ends - sizes, at)
            head = np.where(sizes < 1 << 8, 2, np.where(sizes < 1 << 16, 3, 5))
            start, size = self._binary(begin - head)
            fits = (self._data[begin] == bits) & (start == begin) & (size == sizes)
            begins = np.where(fits, begin, begins)
            matches += fits
        self.unclear[of[matches != 1]] = True
        begins, ends, of = begins[matches == 1], ends[matches == 1], of[matches == 1]
        return [self._block[b:e] for b, e in zip(begins.tolist(), ends.tolist(), strict=True)], of

    def _find(self, *texts: bytes) -> Any:
        """Positions of these texts, which all begin with the same byte."""
        import numpy as np

        at = np.flatnonzero(self._data[:-16] == texts[0][0])
        words = self._words[at]
        found = np.zeros(len(at), bool)
        for text in texts:
            found |= words & _mask(text) == _number(text)
        return at[found]

    def _has(self, at: Any, text: bytes) -> Any:
        """Whether a text of at most 8 bytes is at each position."""
        import numpy as np

        return self._words[np.minimum(at, len(self._words) - 1)] & _mask(text) == _number(text)

    def _owners(self, at: Any) -> Any:
        """The numbers of the messages whose bodies contain these positions."""
        import numpy as np

        of = np.searchsorted(self._begins, at, side="right") - 1
        return of[(of >= 0) & (at < self._ends[of])]

    def _big_endian(self, at: Any) -> Any:
        """The number in the four bytes at each position."""
        import numpy as np

        return self._words[np.minimum(at, len(self._words) - 1)].astype(np.uint32).byteswap().astype(np.int64)

    def _binary(self, at: Any) -> tuple[Any, Any]:
        """Start and length of the MessagePack bytes at each position; length 0: something else is there."""
        import numpy as np

        kind = self._data[at].astype(np.int64) - _BINARY
        number = self._big_endian(at + 1)
        sizes = np.choose(np.clip(kind, 0, 2), [number >> 24, number >> 16, number])
        return at + 1 + (1 << np.clip(kind, 0, 2)), np.where((kind >= 0) & (kind <= 2), sizes, 0)

    def _whole_number(self, at: Any) -> Any:
        """The MessagePack integer at each position; 0: something else is there."""
        import numpy as np

        first, number = self._data[at].astype(np.int64), self._big_endian(at + 1)
        sizes = [first < 0x80, first == 0xCC, first == 0xCD, first == 0xCE]
        return np.select(sizes, [first, number >> 24, number >> 16, number], 0)


def _mask(text: bytes) -> int:
    return (1 << 8 * len(text)) - 1


def _number(text: bytes) -> int:
    return int.from_bytes(text, "little")
