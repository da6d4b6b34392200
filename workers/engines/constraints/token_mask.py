"""From a constraint to token masks: its state beside one sequence follows the tokens, and says which may come next.

The masks of a batch of sequences are computed in parallel. No torch.
"""

import ctypes
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher
if TYPE_CHECKING:
    from llguidance import LLExecutor

# Beginnings of llguidance's errors about constraints that compile, but cannot be followed.
NO_TEXT = "NoExtensionBias"  # in a state that no token leaves
TOO_COMPLEX = (
    "Parser Error: Current row has ",
    "lexer error: too many ",
    "Parser Error: lexer error: too many ",
    "parser error: Too many items ",  # also of a rule that never ends
)


class Matcher:
    """A pure function of the sequence's output: another worker that continues it gets the same state from its tokens.

    Args:
        matcher: at the beginning of the grammar; owned.
        min_tokens: of the output, before which it ends only if the grammar allows nothing else.
        ends: tokens that end an output.
        other_ends: those of them that llguidance does not know, and the one that it knows.
    Attributes:
        error: why the output cannot continue; "": it can.
        no_text: whether the reason is the constraint itself, which no text matches.
        too_complex: whether the reason is the constraint itself, a step of which is beyond llguidance's limits.
    """

    __slots__ = (
        "_ends",
        "_min_tokens",
        "_other_ends",
        "_prompt_len",
        "_seen",
        "error",
        "matcher",
        "no_text",
        "too_complex",
    )

    def __init__(
        self,
        matcher: "LLMatcher",
        prompt_len: int,
        min_tokens: int,
        ends: tuple[int, ...],
        other_ends: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.error = ""
        self.no_text = self.too_complex = False
        self.matcher = matcher
        self._prompt_len = self._seen = prompt_len
        self._min_tokens = min_tokens
        self._ends = ends
        self._other_ends = other_ends

    def follow(self, tokens: Seq[int]) -> None:
        """Take in the sequence's new tokens. ``tokens``: prompt and output."""
        new = tokens[self._seen :]
        self._seen = len(tokens)
        if new and not self.error and not self.matcher.consume_tokens([self._known(token) for token in new]):
            self._fail()

    def take(self, token: int) -> bool:
        """Take in the next token, which another drew; returns whether the constraint allows it."""
        token = self._known(token)
        if not self.error and not self.matcher.validate_tokens([token]):
            self.mask()  # whether any token can follow is lost once one was refused
        if not self.error and not self.matcher.consume_token(token):
            self._fail()
        return not self.error

    def look_ahead(self) -> None:
        """Set ``error`` if no output can continue from here. No token is accepted afterwards."""
        mask = self.mask()
        byte = next((at for at, bits in enumerate(mask) if bits), 0)
        token = 8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1
        if not self.error and any(mask) and not self.matcher.consume_token(token):
            self._fail()

    def finish(self, mask: memoryview | bytearray) -> None:
        """Complete a mask that was computed for this matcher: see ``min_tokens`` and ``error``."""
        if not self.error and self.matcher.is_error():
            self._fail()
        if self.error:  # the sequence fails; until then, its row must have a token to draw
            mask[:] = b"\xff" * len(mask)
            return
        for other, known in self._other_ends.items():
            if mask[known >> 3] >> (known & 7) & 1 and other < 8 * len(mask):
                mask[other >> 3] |= 1 << (other & 7)
        if self._seen - self._prompt_len < self._min_tokens:
            self._bar_ends(mask)

    def mask(self) -> bytearray:
        """The tokens that may come next, a bit each, lowest first."""
        found = bytearray(self.matcher.compute_bitmask())
        self.finish(found)
        return found

    def _known(self, token: int) -> int:
        return self._other_ends.get(token, token) if self._other_ends else token

    def _fail(self) -> None:
        self.error = self.matcher.get_error().partition("\n")[0] or "the output does not match"
        self.no_text = self.error == NO_TEXT
        self.too_complex = self.error.startswith(TOO_COMPLEX)

    def _bar_ends(self, mask: memoryview | bytearray) -> None:
        barred = bytearray(mask)
        for token in self._ends:
            if token < 8 * len(barred):
                barred[token >> 3] &= 0xFF ^ (1 << (token & 7))
        if any(barred):
            mask[:] = barred


THREADS = 2  # at most: a mask takes 1 to 50 microseconds, and more threads took longer to begin than they saved
FEW = 4  # masks that one thread computes sooner than several could begin


class BatchMasks:
    """
    Args:
        vocab_size: width of the logits.
    Attributes:
        row_bytes: of a row; whole 32-bit words, lowest bit first.
    """

    def __init__(self, vocab_size: int) -> None:
        self.row_bytes = 4 * -(-vocab_size // 32)
        self._executor: LLExecutor | None = None

    def compute(self, matchers: Seq[Matcher]) -> bytearray:
        """The masks of matchers that have followed their sequences, a row each. One with an ``error`` allows all."""
        size = self.row_bytes
        rows = bytearray(len(matchers) * size)
        if len(matchers) > FEW:
            from llguidance import LLExecutor

            if self._executor is None:
                self._executor = LLExecutor(min(THREADS, os.cpu_count() or 1))
            place = ctypes.addressof(ctypes.c_char.from_buffer(rows))
            work = [(each.matcher, row) for row, each in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(work, place, size, len(matchers))
        else:
            for row, each in enumerate(matchers):
                place = ctypes.addressof(ctypes.c_char.from_buffer(rows, row * size))
                each.matcher.unsafe_compute_mask_ptr(place, size)
        for row, each in enumerate(matchers):
            each.finish(memoryview(rows)[row * size : (row + 1) * size])
        return rows
