"""The text of an answer after each token: incremental detokenisation, then stop strings.

Workers (to end a generation) and gateways (to trim its text) run this code over the same tokens. The text after k
tokens depends on those k tokens only, never on batching, so another process can take over at any k.
"""

import re
from codecs import utf_8_decode
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from string import ascii_lowercase
from types import MappingProxyType
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_HELD_TOKENS = 16  # a character is at most 4 byte tokens; beyond this a trailing U+FFFD is taken to be real
NO_MARKS: Mapping[int, str] = MappingProxyType({})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """The text of one answer. ``stop``: the stop string that ended it; no text comes after it."""

    stop: str | None

    def push(self, token: int) -> str:
        """The text that this token makes final; "" while it may still change. Unknown ids have no text."""

    def push_all(self, tokens: Sequence[int]) -> list[str]:
        """What ``push`` returns for each of these tokens."""

    def show(self, marks: Mapping[int, str]) -> None:
        """Of the next tokens, these have this text: added tokens by id, none of them white space."""

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""


class StopSearch(Protocol):
    """Looks for stop strings in an answer. ``stop``: the one that ended it."""

    @property
    def stop(self) -> str | None: ...

    def push(self, token: int) -> object: ...


class Detokenizer:
    """Tables of one vocabulary, from which streams are made. Special tokens have no text.

    Attributes:
        added: id by text of the tokens beside the vocabulary's own, special or not.
        longest_bytes: of a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added = {entry.content: token for token, entry in added.items()}
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._byte_level = is_byte_level(tokenizer)
        raw = _byte_level_bytes if self._byte_level else _word_bytes
        self._raw = [raw(tokenizer.id_to_token(token) or "") for token in range(size)]
        # str where a token is whole characters and can be no mark, so that most tokens cost one list access.
        marks = {token for token, entry in added.items() if not entry.content.isspace()}
        self._pieces = (
            [
                b"" if token in self._special else piece if token in marks else _whole(piece)
                for token, piece in enumerate(self._raw)
            ]
            if self._byte_level
            else []
        )
        self.longest_bytes = max(map(len, self._raw), default=1)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of whole answers and prompts, a fourth as long as the tokenizer takes for it."""
        if not self._byte_level:
            return str(self._tokenizer.decode(list(tokens)))
        spoken = self.spoken
        try:
            data = b"".join([spoken[token] for token in tokens])
        except IndexError:  # padding of the model's output layer
            data = b"".join([spoken[token] for token in tokens if token < len(spoken)])
        return data.decode("utf-8", "replace")

    @cached_property
    def spoken(self) -> list[bytes]:
        """What each token adds to a text. Empty: the vocabulary is not byte-level, so that it depends on neighbours."""
        if not self._byte_level:
            return []
        return [b"" if token in self._special else raw for token, raw in enumerate(self._raw)]

    @cached_property
    def special(self) -> dict[int, str]:
        """The texts of special tokens, for streams that show them."""
        return {token: text for text, token in self.added.items() if token in self._special and not text.isspace()}

    def raw(self, token: int) -> bytes:
        """A token's own bytes, special tokens included; possibly a part of a character. b"" for unknown ids."""
        return self._raw[token] if 0 <= token < len(self._raw) else b""

    def stream(
        self,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        stops_shown: bool = False,
        marks: Mapping[int, str] = NO_MARKS,
        continues: bool = False,
    ) -> TextStream:
        """The text of one answer, cut at the first stop string.

        Args:
            continues: it comes behind other text, so that the blank in front of its first word is kept.
            marks: tokens that have a text; see ``TextStream.show``.
            min_tokens: a stop string ends with this token (counted from 1) or a later one.
            stops_shown: the answer ends after the stop string, not before it.
        """
        plain = self.marked_stream(marks, continues=continues)
        return StoppingStream(plain, StopMatcher(stops), min_tokens, stops_shown) if stops else plain

    def marked_stream(self, marks: Mapping[int, str], *, continues: bool = False) -> TextStream:
        """The text of one answer for parsers, cut nowhere, with a text for marks; see ``TextStream.show``."""
        before = self._letter if continues else ()
        stream = ByteStream(self._pieces) if self._byte_level else WindowStream(self._tokenizer, self._special, before)
        stream.show(marks)
        return stream

    @cached_property
    def _letter(self) -> tuple[int, ...]:
        """A token that is a letter, behind which others have the text that they have within a text."""
        ids = (self._tokenizer.token_to_id(letter) for letter in ascii_lowercase)
        found = (token for token in ids if token is not None and token not in self._special)
        return next(((token,) for token in found if len(self._tokenizer.decode([token])) == 1), ())


class ByteStream:
    """Byte-level vocabularies: tokens are bytes of UTF-8 text; invalid bytes become U+FFFD."""

    __slots__ = ("_marks", "_pending", "_pieces", "stop")

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        """
        Args:
            pieces: of each token. Those that may be marked are bytes.
        """
        self._pieces = pieces
        self._marks: Mapping[int, str] = {}
        self._pending = b""
        self.stop: str | None = None

    def show(self, marks: Mapping[int, str]) -> None:
        self._marks = marks

    def push(self, token: int) -> str:
        try:
            piece = self._pieces[token]
        except IndexError:  # padding of the model's output layer
            return ""
        if piece.__class__ is str and not self._pending:
            return piece
        if token in self._marks:
            return self._marks[token]
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def push_all(self, tokens: Sequence[int]) -> list[str]:
        pieces = self._pieces
        if not self._pending:
            try:
                texts: list[str] = [pieces[token] for token in tokens]  # type: ignore[misc]
                "".join(texts)
            except (IndexError, TypeError):  # a token without text, or with a part of a character
                pass
            else:
                return texts
        return [self.push(token) for token in tokens]

    def finish(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowStream:
    """For other vocabularies: decode a sliding window, and return the text that it gained.

    The window starts one piece back, because decoders treat the first token of a text differently.
    """

    __slots__ = ("_decode", "_ids", "_marks", "_new", "_shown", "_skipped", "stop")

    def __init__(self, tokenizer: Tokenizer, skipped: Container[int], before: Sequence[int] = ()) -> None:
        """
        Args:
            before: tokens of other text, which this one continues.
        """
        self._decode = tokenizer.decode
        self._skipped = skipped
        self._marks: Mapping[int, str] = {}
        self._ids = [*before]
        self._new = len(before)  # tokens from this index of _ids on are not shown yet
        self._shown = self._decode(self._ids, skip_special_tokens=False)  # text of _ids[: _new]
        self.stop: str | None = None

    def show(self, marks: Mapping[int, str]) -> None:
        self._marks = marks

    def push_all(self, tokens: Sequence[int]) -> list[str]:
        return [self.push(token) for token in tokens]

    def push(self, token: int) -> str:
        if token in self._marks:
            return self._marks[token]
        if token in self._skipped:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids, skip_special_tokens=False)
        held = len(self._ids) - self._new
        if len(text) <= len(self._shown) or (text.endswith(REPLACEMENT) and held < _HELD_TOKENS):
            if held >= 4 * _HELD_TOKENS:  # a long run without text must not grow the window
                self._restart()
            return ""
        new = text[len(self._shown) :]
        self._restart()
        return new

    def _restart(self) -> None:
        self._ids = self._ids[self._new :]
        self._new = len(self._ids)
        self._shown = self._decode(self._ids, skip_special_tokens=False)

    def finish(self) -> str:
        text = self._decode(self._ids, skip_special_tokens=False)[len(self._shown) :]
        self._ids, self._new, self._shown = [], 0, ""
        return text


class StoppingStream:
    """A stream cut at the first stop string."""

    __slots__ = ("_matcher", "_stops_shown", "_stream", "_unsearched", "stop")

    def __init__(self, stream: TextStream, matcher: "StopMatcher", min_tokens: int, stops_shown: bool) -> None:
        self._stream = stream
        self._matcher = matcher
        self._unsearched = max(min_tokens - 1, 0)
        self._stops_shown = stops_shown
        self.stop: str | None = None

    def push(self, token: int) -> str:
        if self.stop is not None:
            return ""
        text = self._stream.push(token)
        if self._unsearched:
            self._unsearched -= 1
            return self._matcher.skip(text)
        return self._search(text) if text else ""

    def push_all(self, tokens: Sequence[int]) -> list[str]:
        return [self.push(token) for token in tokens]

    def show(self, marks: Mapping[int, str]) -> None:
        self._stream.show(marks)

    def finish(self) -> str:
        if self.stop is not None:
            return ""
        remaining = self._search(self._stream.finish())
        return remaining if self.stop is not None else remaining + self._matcher.flush()

    def _search(self, text: str) -> str:
        safe, self.stop = self._matcher.push(text)
        return safe + self.stop if self.stop is not None and self._stops_shown else safe


class StopMatcher:
    """Finds the stop string that is complete first; of several that end at one position, the longest.

    The result does not depend on how the text is cut into pieces. Text is released as soon as it cannot be the start
    of a stop string, and never if it is part of the one found.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """
        Raises:
            ValueError: a stop string is empty.
        """
        if not all(strings):
            raise ValueError("a stop string is empty")
        self._strings = tuple(strings)
        self._longest = max(map(len, strings), default=0)
        first = "".join(sorted({string[0] for string in strings}))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None
        self._held = ""
        self._matched: str | None = None

    @property
    def holds(self) -> bool:
        """Text is held back."""
        return bool(self._held)

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is safe to show, and the stop string found or None. After a match there is no text."""
        if self._matched is not None:
            return "", self._matched
        if not self._first or (not self._held and not self._first.search(text)):
            return text, None
        held, text = len(self._held), self._held + text
        matches = [
            (at + len(stop), at, stop)
            for stop in self._strings
            if (at := text.find(stop, max(held - len(stop) + 1, 0))) >= 0  # what is held may have ended too early
        ]
        if matches:
            _, at, self._matched = min(matches)
            self._held = ""
            return text[:at], self._matched
        keep = self._begins_stop(text)
        self._held = text[keep:]
        return text[:keep], None

    def skip(self, text: str) -> str:
        """Returns the text that is safe to show. Stop strings may begin in this text; those that end in it are none."""
        text = self._held + text
        keep = self._begins_stop(text) if self._first is not None else len(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text held back, at the end: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _begins_stop(self, text: str) -> int:
        """Where the longest suffix of ``text`` begins that may become a stop string; its length if there is none."""
        assert self._first is not None
        for start in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[start.start() :]
            if any(stop.startswith(tail) for stop in self._strings):
                return start.start()
        return len(text)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether a token is a run of bytes of the text, independent of its neighbours (GPT-2, Llama 3, Qwen, ...)."""
    if tokenizer.decoder is None:
        return False
    state = msgspec.json.decode(tokenizer.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return bool(parts) and all(part["type"] == "ByteLevel" for part in parts)


def _byte_level_table() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes, as a ``str.translate`` table from stand-in to the byte as Latin-1.

    Source: ``bytes_to_unicode`` of the GPT-2 encoder. Other characters map outside Latin-1, so encoding fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = dict.fromkeys(range(0x100), REPLACEMENT)
    table.update({byte: chr(byte) for byte in printable})
    hidden = (byte for byte in range(0x100) if byte not in set(printable))
    table.update({0x100 + offset: chr(byte) for offset, byte in enumerate(hidden)})
    return table


_BYTE_OF = _byte_level_table()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:  # an added token, stored as plain text
        return token.encode()


def _word_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _whole(piece: bytes) -> str | bytes:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece
