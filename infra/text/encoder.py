"""From text to token ids: the tokenizer's own result, in a fraction of the time, by caches of words and pieces.

Byte-level BPE splits a text into words and encodes each by itself, and most words come again. The split of ASCII text
is repeated here; other pieces of a text, and any other tokenizer, are left to the tokenizer. What comes again as a
whole, such as a system prompt and the conversation before a new message, is kept in pieces, which are not even split.

``PlainText`` keeps the text of control tokens in clients' messages plain text, so that clients cannot forge roles or
messages. A tokenizer turns the text of an added token into that token wherever it stands. Where a client's text
contains one, a mark is inserted into it before the template is rendered, and the mark's own tokens are left out of the
prompt. So the text is encoded as plain text, wherever the template puts it. Everything else is encoded as usual.
"""

import json
import random
import re
import secrets
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from string import ascii_letters, ascii_lowercase, digits, punctuation
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.infra.bounded import ByteCache


def longest_of(texts: Collection[str]) -> str:
    """A pattern that matches the longest of these texts, and nothing if there are none.

    It is a tree of their beginnings: a plain alternation tries all of a thousand texts at each "<" of 8 KB, for 60 ms.
    """
    return _tree([*texts]) if texts else "(?!)"


def _tree(texts: list[str]) -> str:
    start = commonprefix(texts)  # noqa: RUF071 - of characters
    branches: dict[str, list[str]] = {}
    for text in texts:
        if rest := text[len(start) :]:
            branches.setdefault(rest[0], []).append(rest)
    if not branches:
        return re.escape(start)
    optional = "?" if start in texts else ""
    return f"{re.escape(start)}(?:{'|'.join(map(_tree, branches.values()))}){optional}"


NEW_TEXT = 65_536  # characters, of which words keep the interpreter for 2 ms; the tokenizer releases it for the others
# Of words and their ids; 60,000 words of English text. With all words known, 200 of them take 29 instead of 147 µs, a
# tenth of what a request costs, and 7,000 take 1.2 instead of 6.3 ms; 7,000 that came before, at the beginning of a
# text, 0.1 instead of 6.1 ms (``python -m tests.perf.tuning words``).
CACHED_BYTES = 16 << 20
CACHED_PIECES_BYTES = 8 << 20  # of pieces and their ids: 6,000 of them, 600,000 tokens
PIECE = 512  # characters of a piece, or a few more; to look one up takes a tenth of what its words take
_SHORT = 32  # characters, which the tokenizer encodes as fast as another text takes to be passed to it
_NOTED = 1 << 18  # pieces, as one byte each
_WORD = 32  # characters of a word that is kept
_WORD_BYTES = 200  # of a word, its ids' head and their place
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel itself
_SAME_FOR_ASCII = ("NFC", "NFD", "NFKC", "NFKD")
_ASCII = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}
_BORDER = re.compile(r"(?<=[a-z]) (?=[a-z])")  # most texts have one every few characters
_NEAR = ascii_letters + digits + 8 * " \n'" + punctuation + "é中’…😀\u0301\u00a0\u3000"
_PART = re.compile(r"\\p\{(\w+)\}|\\.|[\[\]]|[^\\\[\]]+", re.DOTALL)
_BYTE_LEVEL = {byte: 256 + number for number, byte in enumerate([*range(33), 127])}  # how BPE sees bytes


_ID = "I"  # type code of arrays of token ids


class TextEncoder:
    """Encodes with one tokenizer. May be used from several threads.

    Attributes:
        known_words: token ids of words that were encoded before, as bytes of an array.
        known_pieces: the same of pieces of texts.
        splitter: splits text into added tokens, pieces and words; None: this tokenizer works in another way.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around = _around(tokenizer)
        self.known_words = _Words(tokenizer)
        self.known_pieces = _Pieces()
        self.splitter = _Split.of(tokenizer)

    def encode(self, text: str, *, special: bool) -> "array[int]":
        """Token ids of a text, as unsigned integers of four bytes.

        Args:
            special: add the tokens that the tokenizer puts around a text, such as BOS.
        """
        around = self._around if special else (b"", b"")
        if self.splitter is None or around is None:
            return self._tokenize([text], special)[0]
        ids = array(_ID)
        ids.frombytes(self._known(self.splitter, text).join(around))
        return ids

    def _known(self, splitter: "_Split", text: str) -> bytes:
        """The ids by words and pieces."""
        found, words, left = [], self.known_words, NEW_TEXT
        late: list[tuple[int, list[str], bool]] = []  # for the tokenizer: place, texts in a row, whether it is kept
        row: list[str] | None = None  # the last of them, to which what follows may be added
        for number, part in enumerate(splitter.parts(text)):
            if number % 2:
                if row is None:
                    found.append(words[part])
                else:
                    row.append(part)
                continue
            for piece in splitter.pieces(part):
                again = len(piece) >= PIECE and self.known_pieces.comes_again(piece)
                if again and (ids := self.known_pieces.get(piece)) is not None:
                    found.append(ids)
                    row = None
                    continue
                left -= len(piece)
                split = splitter.words(piece) if left >= 0 and (row is None or len(piece) > _SHORT) else None
                if split is not None:
                    ids = b"".join(map(words.__getitem__, split))
                    found.append(ids)
                    row = None
                    if again:
                        self.known_pieces.put(piece, ids)
                elif row is not None and not again:
                    row.append(piece)
                else:
                    late.append((len(found), [piece], again))
                    found.append(b"")
                    row = None if again else late[-1][1]
        if late:
            encoded = self._tokenize(["".join(texts) for _, texts, _ in late], special=False)
            for (place, texts, again), each in zip(late, encoded, strict=True):
                found[place] = ids = each.tobytes()
                if again:
                    self.known_pieces.put(texts[0], ids)
        return b"".join(found)

    def _tokenize(self, texts: list[str], special: bool) -> "list[array[int]]":
        # The batch form computes no offsets and releases the interpreter.
        return [array(_ID, each.ids) for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)]


class _Pieces:
    """Token ids of pieces of texts, kept from the second time on that a piece comes. May be used from several threads.

    What comes once, as most of what users write does, would only drive out what comes again.
    """

    def __init__(self) -> None:
        self._ids: ByteCache[str, bytes] = ByteCache(CACHED_PIECES_BYTES, _piece_bytes)
        self._lock = Lock()
        self._noted = bytearray(_NOTED)  # by some bits of a piece's hash, 7 others of the piece that came last

    @property
    def size_bytes(self) -> int:
        return self._ids.size_bytes

    def comes_again(self, piece: str) -> bool:
        """Whether this piece was asked about before. Notes that it was; hardly ever wrong."""
        number = hash(piece)
        at, mark = number % _NOTED, (number // _NOTED) & 0x7F | 0x80
        if self._noted[at] == mark:
            return True
        self._noted[at] = mark
        return False

    def get(self, piece: str) -> bytes | None:
        with self._lock:
            return self._ids.get(piece)

    def put(self, piece: str, ids: bytes) -> None:
        with self._lock:
            self._ids.put(piece, ids)


def _piece_bytes(piece: str, ids: bytes) -> int:
    return len(piece) + len(ids) + 2 * 64  # with the heads of both


class _Words(dict[str, bytes]):
    """Token ids by word; encodes what it does not have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._model = tokenizer.model
        # Added tokens are words, too. They stay when the others are dropped.
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: array(_ID, [token_id]).tobytes() for token_id, token in added.items()}
        self.update(self._added)
        self.size_bytes = 0  # of the others

    def __missing__(self, word: str) -> bytes:
        if word in self._added:  # another thread is just dropping the others
            return self._added[word]
        ids = array(_ID, [token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))]).tobytes()
        if len(word) <= _WORD:
            if self.size_bytes >= CACHED_BYTES:
                self.clear()
                self.update(self._added)
                self.size_bytes = 0
            self[word] = ids
            self.size_bytes += _WORD_BYTES + len(ids)
        return ids


def _around(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """The ids that the tokenizer puts before and after a text; None: it is not known which."""
    inner, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    places = [at for at in range(len(whole)) if whole[at : at + len(inner)] == inner]
    if not inner or len(places) != 1:
        return None
    before, after = whole[: places[0]], whole[places[0] + len(inner) :]
    return array(_ID, before).tobytes(), array(_ID, after).tobytes()


class _Split:
    """How one tokenizer splits text into added tokens, pieces and, if it is ASCII, words."""

    def __init__(self, added: "re.Pattern[str]", word: "re.Pattern[str] | None", *, cuts: bool) -> None:
        """
        Args:
            word: None: words are not known.
            cuts: a word begins where ``_BORDER`` matches, whatever stands around.
        """
        self._added = added  # has one group, so that its ``split`` returns the added tokens, too
        self._word = word
        self._cuts = cuts

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Split | None":
        """None: this tokenizer works in another way."""
        added = list(tokenizer.get_added_tokens_decoder().values())
        if len({token.normalized for token in added}) > 1:  # they are searched for in two passes
            return None
        if added and added[0].normalized and tokenizer.normalizer is not None:  # an added "＜" may become "<"
            return None
        if any(token.single_word or token.lstrip or token.rstrip for token in added):
            return None
        steps = _steps(tokenizer)
        if not steps:
            return None
        split = tokenizer.pre_tokenizer.pre_tokenize_str
        cuts = all(
            [part for part, _ in split(f"{left} {right}")] == [part for part, _ in [*split(left), *split(f" {right}")]]
            for left, right in _borders()
        )
        pattern = re.compile(f"({longest_of({token.content for token in added})})")
        return cls(pattern, _word_of(tokenizer, steps), cuts=cuts)

    def parts(self, text: str) -> list[str]:
        """The text between added tokens, and every second time an added token."""
        return self._added.split(text)

    def pieces(self, text: str) -> Iterable[str]:
        """The text in pieces of ``PIECE`` characters or a few more, and the rest.

        They are the same for all texts that begin in the same way, up to where these differ.
        """
        if len(text) < PIECE or not self._cuts:
            return (text,)
        pieces, start = [], 0
        while (border := _BORDER.search(text, start + PIECE)) is not None:
            end = border.start()
            pieces.append(text[start:end])
            start = end
        pieces.append(text[start:])
        return pieces

    def words(self, text: str) -> list[str] | None:
        """The words of a text without added tokens. None: they are not known."""
        if self._word is None or not text.isascii():
            return None
        found = self._word.findall(text)
        return found if len("".join(found)) == len(text) else None


def ascii_pattern(pattern: str) -> str:
    """A tokenizer's pattern for words, with Unicode's classes reduced to ASCII.

    Raises:
        KeyError: it has a class that is not known here, or nested ones.
    """
    return "".join(_ascii_parts(pattern))


def _ascii_parts(pattern: str) -> Iterator[str]:
    in_set = False
    for part in _PART.finditer(pattern):
        if part[1] is not None:
            members = _ASCII[part[1]]
            yield members if in_set else f"[{members}]"
            continue
        if part[0] in "[]":
            if in_set == (part[0] == "["):
                raise KeyError(part[0])
            in_set = not in_set
        yield part[0]


def _sample() -> str:
    """Runs of equal characters, so that patterns that differ in how they repeat or end give different words."""
    draw = random.Random(0)
    return "".join(chr(draw.randrange(128)) * draw.randint(1, 5) for _ in range(1_000)) + "a\n"


def _borders() -> Iterator[tuple[str, str]]:
    """What may stand before and after a space that begins a word, at which texts are cut."""
    draw = random.Random(1)
    for _ in range(500):
        left, right = ("".join(draw.choices(_NEAR, k=draw.randint(0, 8))) for _ in range(2))
        yield left + draw.choice(ascii_lowercase), draw.choice(ascii_lowercase) + right


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """How a byte-level BPE splits text into words; empty: it is none."""
    model, normalizer, pre_tokenizer = tokenizer.model, tokenizer.normalizer, tokenizer.pre_tokenizer
    if model.__class__.__name__ != "BPE" or model.dropout or pre_tokenizer is None:
        return []
    if normalizer is not None and normalizer.__class__.__name__ not in _SAME_FOR_ASCII:
        return []
    described = json.loads(pre_tokenizer.__getstate__())
    steps: list[dict[str, Any]] = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    return steps if steps[-1]["type"] == "ByteLevel" and not steps[-1]["add_prefix_space"] else []


def _word_of(tokenizer: Tokenizer, steps: list[dict[str, Any]]) -> "re.Pattern[str] | None":
    """The pattern of words in ASCII text; None: Python cannot split as the tokenizer does."""
    match steps:
        case [{"use_regex": True}]:
            pattern = _GPT2
        case [{"pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}, {"use_regex": False}]:
            pass
        case _:
            return None
    try:
        word = re.compile(ascii_pattern(pattern), re.ASCII)
    except (re.error, KeyError):
        return None
    sample = _sample()
    expected = [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(sample)]
    if word.groups or [part.translate(_BYTE_LEVEL) for part in word.findall(sample)] != expected:
        return None
    return word


Message = Mapping[str, Any]

_MARKS = range(0xE000, 0xF900)  # private use: rare in texts, and tokenizers split them off as bytes or unknown
_TRIES = 8
_FEW = 16
_OPENING = "<[{＜"


class PlainText:
    """Finds and marks the text of one tokenizer's control tokens.

    Args:
        media: tokens that stand for media, which no text may become in any case.
    """

    def __init__(self, tokenizer: Tokenizer, media: Iterable[str] = ()) -> None:
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if len(token.content) > 1]
        self._tokenizer = tokenizer
        self._all = _Texts(token.content for token in added if _controls(token))
        self._special = _Texts(token.content for token in added if token.special)
        self._media = _Texts(media)
        # Some tokens are matched after normalisation: then the raw text does not show what becomes a token.
        late = [token for token in added if token.normalized and _controls(token)]
        self._normalizer = tokenizer.normalizer if late else None

    def found(self, messages: Sequence[Message], tools: Any, variables: Any, *, only_media: bool = False) -> bool:
        """Whether any text here would become a control token."""
        texts, own = self._looked_for(only_media)
        if texts.begins:
            for message in messages:
                content = message.get("content")
                if content.__class__ is str and len(message) == 2:
                    if self._becomes(content, own if message["role"] == "assistant" else texts):
                        return True
                elif any(self._within(v, own if _is_own(message, k) else texts) for k, v in message.items()):
                    return True
            if tools is not None and self._within(tools, texts):
                return True
        return bool(self._media.begins and variables) and self._within(variables, self._media)

    def _looked_for(self, only_media: bool) -> tuple["_Texts", "_Texts"]:
        """What to search in clients' texts, and in an assistant's content, whose structure (thoughts, calls) stays."""
        return (self._media, self._media) if only_media else (self._all, self._special)

    def _becomes(self, text: str, texts: "_Texts") -> bool:
        if texts.within(text):
            return True
        if self._normalizer is None or text.isascii():
            return False
        return texts.within(self._normalizer.normalize_str(text))

    def _within(self, value: Any, texts: "_Texts") -> bool:
        if value.__class__ is str:
            return self._becomes(value, texts)
        if isinstance(value, Mapping):
            return any(self._becomes(key, texts) or self._within(inner, texts) for key, inner in value.items())
        return isinstance(value, list | tuple) and any(self._within(inner, texts) for inner in value)

    def marks(self, *values: Any) -> Iterable[str]:
        """Characters that none of these values contains; several, since a tokenizer may not keep one apart."""
        for _ in range(_TRIES):
            mark = chr(_MARKS[secrets.randbelow(len(_MARKS))])
            if not self._within(values, _Texts([mark])):
                yield mark

    def marked(self, messages: Sequence[Message], mark: str, *, only_media: bool = False) -> list[dict[str, Any]]:
        """Copies of the messages with a mark in every text that would become a control token."""
        texts, own = self._looked_for(only_media)
        return [
            {
                key: _marked(value, own if _is_own(message, key) else texts, mark) if key != "role" else value
                for key, value in message.items()
            }
            for message in messages
        ]

    def marked_value(self, value: Any, mark: str, *, only_media: bool = False) -> Any:
        """As ``marked``, for tools, or (with ``only_media``) for the template's variables."""
        return _marked(value, self._media if only_media else self._all, mark)

    def encode(self, text: str, mark: str) -> list[int] | None:
        """The tokens of a rendered text without its marks; None: the tokenizer merged a mark with its neighbours."""
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # a template that writes JSON in ASCII
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        tokens, seen = [], set()
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            piece = text[start:end]
            if mark not in piece:
                tokens.append(token)
            elif piece == mark:
                seen.add(start)
            else:
                return None
        return tokens if len(seen) == text.count(mark) else None


class _Texts:
    """Texts to search for. ``begins``: their first characters, a cheap first test that most texts fail."""

    def __init__(self, texts: Iterable[str]) -> None:
        looked_for = set(texts)
        begins = {text[:2] for text in looked_for}
        self._first = "".join(sorted({text[0] for text in looked_for}))  # most texts do not even have one of these
        self.begins = tuple(sorted(begins if len(begins) <= _FEW else {text[0] for text in looked_for}))
        self._pattern = re.compile(longest_of(looked_for))

    def within(self, text: str) -> bool:
        for first in self._first:
            if first in text:
                break
        else:
            return False
        for begin in self.begins:
            if begin in text:
                return self._pattern.search(text) is not None
        return False

    def split(self, text: str, mark: str) -> str:
        while self.within(text):  # splitting one may leave another
            text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text


def _controls(token: AddedToken) -> bool:
    """Special tokens and tokens for structure (``<tool_call>``); not words, and not runs of spaces."""
    text = token.content.strip()
    return token.special or (len(text) > 1 and text[0] in _OPENING)


def _is_own(message: Message, key: str) -> bool:
    return message.get("role") == "assistant" and key in ("content", "reasoning_content")


def _marked(value: Any, texts: _Texts, mark: str) -> Any:
    if value.__class__ is str:
        return texts.split(value, mark)
    if isinstance(value, Mapping):
        return {_marked(key, texts, mark): _marked(inner, texts, mark) for key, inner in value.items()}
    return [_marked(inner, texts, mark) for inner in value] if isinstance(value, list | tuple) else value
