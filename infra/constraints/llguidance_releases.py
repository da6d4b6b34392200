"""How the releases of llguidance differ that Penstock runs with: 0.7.29, which TensorRT-LLM 1.2 pins, up to 1.9.

Everything else of the library is used as it is in all of them.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer


# Between the parts of JSON. Bounded, because models (above all small ones) may otherwise write white space for ever.
WHITESPACE = r"(\x20|\n[\x20\t]{0,40})?"
# Of an object's text, where keys are read as Python reads literals: "\\/" means another text there.
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"u'}

_PATTERN = '"whitespace_pattern":' + msgspec.json.encode(WHITESPACE).decode()
_SEPARATORS = '"whitespace_flexible":false,"item_separator":", ","key_separator":": "'
_ESCAPES = "," + msgspec.json.encode(ESCAPES).decode()[1:-1]

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
        return LLParserLimits()  # errors have the parser's state, which ``constraint_grammar`` cuts off


def repeated(lark: str) -> str:
    """A grammar with ``x~2..5`` as ``x{2,5}``, which all releases read; 0.7.29 does not know the former."""
    return _REPEATED.sub(lambda found: found[1] or f"{{{found[2]},{found[3]}}}", lark)


def for_release(grammar: str, size: int) -> str:
    """A grammar in the words of the installed release.

    Sets of tokens, any (``<[*]>``) and all but some (``<[^3,5]>``), are ranges where the release knows no others, as
    0.7.29 does; for JSON see ``json_for_release``.

    Args:
        grammar: in Lark, or in llguidance's own form.
        size: tokens of the vocabulary.
    """
    from llguidance import LLTokenizer

    grammar = json_for_release(grammar)
    if hasattr(LLTokenizer, "eos_tokens") or "<[" not in grammar:
        return grammar
    return _in_each(grammar, lambda lark: _SETS.sub(lambda found: found[1] or f"<[{_others(found[2], size)}]>", lark))


def json_for_release(grammar: str) -> str:
    """A grammar whose JSON has bounded white space with the installed release, too.

    Before 1.8, llguidance takes any number of matches of ``whitespace_pattern`` in a row. There the parts of JSON are
    separated as ``json.dumps`` does it, and by nothing else. A release that does not know ``json_allowed_escapes``
    refuses it, so it is left out.

    Args:
        grammar: in Lark, or in llguidance's own form.
    """
    if "whitespace_pattern" in grammar and not bounds_white_space():
        grammar = _replaced(grammar, _PATTERN, _SEPARATORS)
    if "json_allowed_escapes" in grammar and not knows_escapes():
        grammar = _replaced(grammar, _ESCAPES, "")
    return grammar


def _replaced(grammar: str, option: str, by: str) -> str:
    """A grammar with another option of its JSON. In a client's texts it has other quotes, so it is not found there."""
    grammar = grammar.replace(option, by)
    quoted = msgspec.json.encode(option)[1:-1].decode()
    if grammar.startswith("{") and quoted in grammar:
        return _in_each(grammar, lambda lark: lark.replace(option, by))
    return grammar


def _in_each(grammar: str, change: Callable[[str], str]) -> str:
    """A grammar whose parts in Lark are changed."""
    if not grammar.startswith("{"):
        return change(grammar)
    parts: dict[str, Any] = msgspec.json.decode(grammar)
    for each in parts.get("grammars", ()):
        if isinstance(each.get("lark_grammar"), str):
            each["lark_grammar"] = change(each["lark_grammar"])
    return msgspec.json.encode(parts).decode()


@functools.cache
def bounds_white_space() -> bool:
    """Whether a pattern of white space is matched once where it may stand, rather than any number of times."""
    from llguidance import LLMatcher, LLTokenizer

    with interface():
        grammar = LLMatcher.grammar_from_json_schema('{"const":[0]}', overrides={"whitespace_pattern": r"\x20?"})
        return LLMatcher(LLTokenizer("byte"), grammar, log_level=0).try_consume_tokens(list(b"[  ")) == len("[ ")


@functools.cache
def knows_escapes() -> bool:
    """Whether the escapes of JSON's texts can be chosen."""
    from llguidance import LLMatcher

    with interface():
        grammar = LLMatcher.grammar_from_json_schema('{"type":"string"}', overrides=ESCAPES)  # type: ignore[arg-type]
        failed, _ = LLMatcher.validate_grammar_with_warnings(grammar, None)
    return not failed


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
