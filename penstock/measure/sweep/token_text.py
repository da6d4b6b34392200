"""Text that is exactly so many tokens long for one tokenizer.

Words that follow a space are split off before merging by nearly all tokenizers, so the tokens of " one two" are those
of " one" and those of " two". Whether that holds is tried once; where it does not, each text is counted and corrected.
"""

from collections.abc import Sequence
from random import Random

from tokenizers import Tokenizer

from penstock.measure.generator.words import WORDS

_TRIES = 8
_TRIED_WORDS = 200
# Beside words, letters and digits: what is one token for small vocabularies, too.
_SHORT = [*"abcdefghijklmnopqrstuvwxyz0123456789"]


class NoShortWord(ValueError):
    """No word is a single token, so that lengths cannot be met."""


class TokenText:
    """
    Raises:
        NoShortWord: the tokenizer splits every word and letter.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        alone = self.count(f" {WORDS[0]}")
        lengths = {word: self.count(f" {WORDS[0]} {word}") - alone for word in (*WORDS, *_SHORT)}
        self._fillers = [f" {word}" for word in (*WORDS, *_SHORT) if lengths[word] == 1]
        if not self._fillers:
            raise NoShortWord("no word or letter is one token of this tokenizer; prompts cannot be made to length")
        self._words = [(f" {word}", lengths[word]) for word in WORDS]
        self._adds_up = self._tried()

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, rng: Random, tokens: int) -> str:
        """Random words of so many tokens, each after a space."""
        text = "".join(self._drawn(rng, tokens))
        return text if self._adds_up else self.corrected("", text, tokens, rng)

    def after(self, prefix: str, rng: Random, prefix_tokens: int, tokens: int) -> str:
        """A text that begins with ``prefix``, of so many tokens in all."""
        text = "".join(self._drawn(rng, tokens - prefix_tokens))
        return prefix + text if self._adds_up else self.corrected(prefix, text, tokens, rng)

    def corrected(self, prefix: str, text: str, tokens: int, rng: Random) -> str:
        """``prefix + text`` with words added or taken off at its end until it has so many tokens, or nearly."""
        for _ in range(_TRIES):
            missing = tokens - self.count(prefix + text)
            if missing == 0:
                break
            if missing > 0:
                text += "".join(rng.choices(self._fillers, k=missing))
            else:
                text = text.rsplit(" ", max(1, -missing // 2))[0]
        return prefix + text

    def _drawn(self, rng: Random, tokens: int) -> Sequence[str]:
        parts, left = [], tokens
        while left > 0:
            word, length = rng.choice(self._words)
            if length > left:
                word, length = rng.choice(self._fillers), 1
            parts.append(word)
            left -= length
        return parts

    def _tried(self) -> bool:
        rng = Random(0)
        return all(self.count("".join(self._drawn(rng, _TRIED_WORDS))) == _TRIED_WORDS for _ in range(_TRIES))
