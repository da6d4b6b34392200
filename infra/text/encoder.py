"""From text to token ids: the tokenizer's own result, which a cache of words gives for a quarter of the time.

Byte-level BPE splits a text into words and encodes each by itself, and most words come again. The split of ASCII text
is repeated here; any other text, and any other tokenizer, is left to the tokenizer.
"""

import json
import random
import re
from collections.abc import Iterator
from itertools import chain

from tokenizers import Tokenizer

from penstock.infra.text.longest_match import longest_of

CACHED_TEXT = 8_192  # characters; longer texts would keep the interpreter for long, and the tokenizer releases it
CACHED_BYTES = 16 << 20  # of words and their ids; 40,000 words of English text
_WORD = 32  # characters of a word that is kept
_WORD_BYTES, _TOKEN_BYTES = 200, 40  # of a word, its tuple and their place; of each id
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel itself
_SAME_FOR_ASCII = ("NFC", "NFD", "NFKC", "NFKD")
_ASCII = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}
_PART = re.compile(r"\\p\{(\w+)\}|\\.|[\[\]]|[^\\\[\]]+", re.DOTALL)
_BYTE_LEVEL = {byte: 256 + number for number, byte in enumerate([*range(33), 127])}  # how BPE sees bytes


class TextEncoder:
    """Encodes with one tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._adds_tokens = tokenizer.num_special_tokens_to_add(False) > 0
        self._cache = _Words(tokenizer)
        self._split = _Split.of(tokenizer)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text.

        Args:
            special: add the tokens that the tokenizer puts around a text, such as BOS.
        """
        if len(text) <= CACHED_TEXT and self._split is not None and text.isascii():
            words = None if special and self._adds_tokens else self._split.words(text)
            if words is not None:
                return list(chain.from_iterable(map(self._cache.__getitem__, words)))
        return self._tokenize(text, special)

    def _tokenize(self, text: str, special: bool) -> list[int]:
        # The batch form computes no offsets and releases the interpreter.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids


class _Words(dict[str, tuple[int, ...]]):
    """Token ids by word; encodes what it does not have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._model = tokenizer.model
        # Added tokens are words, too. They stay when the others are dropped.
        self._added = {token.content: (token_id,) for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self.update(self._added)
        self.size_bytes = 0  # of the others

    def __missing__(self, word: str) -> tuple[int, ...]:
        if word in self._added:  # another thread is just dropping the others
            return self._added[word]
        ids = tuple(token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL)))
        if len(word) <= _WORD:
            if self.size_bytes >= CACHED_BYTES:
                self.clear()
                self.update(self._added)
                self.size_bytes = 0
            self[word] = ids
            self.size_bytes += _WORD_BYTES + _TOKEN_BYTES * len(ids)
        return ids


class _Split:
    """How one tokenizer splits ASCII text into added tokens and words."""

    def __init__(self, added: "re.Pattern[str]", word: "re.Pattern[str]") -> None:
        self._added = added  # has one group, so that its ``split`` returns the added tokens, too
        self._word = word

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
        pattern = _pattern_of(tokenizer)
        try:
            word = re.compile(ascii_pattern(pattern), re.ASCII) if pattern else None
        except (re.error, KeyError):
            return None
        if word is None or word.groups:
            return None
        sample = _sample()
        expected = [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(sample)]
        if [part.translate(_BYTE_LEVEL) for part in word.findall(sample)] != expected:
            return None  # Python reads the pattern in another way
        return cls(re.compile(f"({longest_of({token.content for token in added})})"), word)

    def words(self, text: str) -> list[str] | None:
        """None: the pattern leaves something of this text out."""
        found: list[str] = []
        for number, part in enumerate(self._added.split(text)):
            if number % 2:
                found.append(part)
            else:
                found += self._word.findall(part)
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


def _pattern_of(tokenizer: Tokenizer) -> str:
    """The pattern for words of a byte-level BPE; "": it is none, or has further steps."""
    model, normalizer, pre_tokenizer = tokenizer.model, tokenizer.normalizer, tokenizer.pre_tokenizer
    if model.__class__.__name__ != "BPE" or model.dropout or pre_tokenizer is None:
        return ""
    if normalizer is not None and normalizer.__class__.__name__ not in _SAME_FOR_ASCII:
        return ""
    match _steps(json.loads(pre_tokenizer.__getstate__())):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
    return ""


def _steps(described: dict[str, object]) -> object:
    return described["pretokenizers"] if described["type"] == "Sequence" else [described]
