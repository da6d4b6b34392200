"""How the mock draws under a constraint: any allowed token for a while, then those that bring the answer to its end."""

from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

FREE_TOKENS = 8  # drawn before the answer is brought to its end
CLOSING = ("</think>", "</tool_call>", '"', "]", "}", '"}', '"]', "}]", "}}", "]}", "0", ",", '",')


def closing_tokens(tokenizer: Tokenizer, ends: Seq[int]) -> list[int]:
    """The tokens that bring an answer in JSON to its end, best first."""
    found = [*ends]
    for text in CLOSING:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) == 1:
            found.append(tokens[0])
    return found


class ConstrainedDraws:
    """
    Args:
        closing: tokens that are preferred once an answer is long enough, best first.
    """

    def __init__(self, closing: Seq[int]) -> None:
        self._closing = closing

    def token(self, state: int, mask: bytearray, drawn: int, wanted: int) -> int:
        """The token that ``state`` stands for.

        Args:
            mask: allowed tokens, a bit each, lowest first.
            drawn: tokens of the answer so far.
            wanted: what the mock would draw without the constraint.
        """
        if drawn >= FREE_TOKENS:
            for token in self._closing:
                if _allows(mask, token):
                    return token
        if _allows(mask, wanted):
            return wanted
        start = (state >> 3) % len(mask)
        place = next((at for at in range(start, len(mask)) if mask[at]), -1)
        if place < 0:
            place = next((at for at in range(start) if mask[at]), -1)
        if place < 0:
            return wanted
        bits = mask[place]
        return 8 * place + (bits & -bits).bit_length() - 1


def _allows(mask: bytearray, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
