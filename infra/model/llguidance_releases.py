"""How the releases of llguidance differ that Penstock runs with: 0.7.29, which TensorRT-LLM 1.2 pins, up to 1.9.

Everything else of the library is used as it is in all of them.
"""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer


_REPEATED = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|~ *(\d+) *\.\. *(\d+)')  # outside literals, expressions

_SETS = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|<\[(\*|\^[\d,]+)\]>')


class LibraryError(Exception):
    """The installed llguidance has another interface than the releases that are known here."""


class Vocabulary(NamedTuple):
    """A tokenizer of llguidance's.

    Attributes:
        other_ends: end tokens that it does not know as such, and the one that it knows. A matcher takes and allows the
            latter only.
    """

    tokenizer: "LLTokenizer"
    other_ends: Mapping[int, int]


def vocabulary(source: Any, ends: Seq[int], size: int | None = None, **options: Any) -> Vocabulary:
    """
    Args:
        source: a tokenizer as text, or a wrapper of one.
        ends: tokens that end an output, at least one.
        size: width of the logits.

    Raises:
        LibraryError: see there.
        ValueError: this tokenizer is not supported.
    """
    from llguidance import LLTokenizer

    with interface():
        if hasattr(LLTokenizer, "eos_tokens"):  # it came with the list
            return Vocabulary(LLTokenizer(source, n_vocab=size, eos_token=list(ends), **options), {})
        first, *others = ends
        found = LLTokenizer(source, n_vocab=size, eos_token=first, **options)
        return Vocabulary(found, dict.fromkeys(others, first))


def limits() -> "LLParserLimits":
    """Bounds on the work of compiling and of each step; the defaults allow tens of milliseconds.

    Raises:
        LibraryError: see there.
    """
    from llguidance import LLParserLimits

    with interface():
        if hasattr(LLParserLimits, "verbose_errors"):
            return LLParserLimits(verbose_errors=False)
        return LLParserLimits()  # errors have the parser's state, which ``constraints`` cuts off


def repeated(lark: str) -> str:
    """A grammar with ``x~2..5`` as ``x{2,5}``, which all releases read; 0.7.29 does not know the former."""
    return _REPEATED.sub(lambda found: found[1] or f"{{{found[2]},{found[3]}}}", lark)


def for_release(grammar: str, size: int) -> str:
    """A grammar with any token (``<[*]>``) and all tokens but some (``<[^3,5]>``) as ranges, where they must be.

    0.7.29 knows sets of tokens by their ids only.

    Args:
        grammar: in Lark, or in llguidance's own form.
        size: tokens of the vocabulary.
    """
    from llguidance import LLTokenizer

    if hasattr(LLTokenizer, "eos_tokens") or "<[" not in grammar:
        return grammar
    if not grammar.startswith("{"):
        return _SETS.sub(lambda found: found[1] or f"<[{_others(found[2], size)}]>", grammar)
    parts: dict[str, Any] = msgspec.json.decode(grammar)
    for each in parts.get("grammars", ()):
        if isinstance(each.get("lark_grammar"), str):
            each["lark_grammar"] = for_release(each["lark_grammar"], size)
    return msgspec.json.encode(parts).decode()


def _others(barred: str, size: int) -> str:
    """The ids below ``size`` that are not barred ("*": none is), as ranges."""
    ids = set() if barred == "*" else {int(each) for each in barred[1:].split(",")}
    ranges, start = [], 0
    for end in [*sorted(each for each in ids if each < size), size]:
        if end > start:
            ranges.append(f"{start}-{end - 1}")
        start = end + 1
    return ",".join(ranges)


@contextmanager
def interface() -> Iterator[None]:
    """Report that the library's interface is another one.

    Raises:
        LibraryError: an argument or a name is missing.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        raise LibraryError(
            f"llguidance {installed()} has another interface than 0.7.29 to 1.9, with which penstock runs ({error}); "
            "install one of these"
        ) from error


def installed() -> str:
    """The release that is installed; "": none."""
    try:
        return metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        return ""
