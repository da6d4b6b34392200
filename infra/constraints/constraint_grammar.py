"""Which texts a constraint allows, as a grammar of llguidance. Needs llguidance only where a grammar is compiled.

llguidance understands JSON schema, regular expressions and context-free grammars in a dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from penstock.infra.constraints import llguidance_releases
from penstock.infra.constraints.llguidance_releases import WHITESPACE, interface
from penstock.infra.constraints.llguidance_releases import LibraryError as LibraryError
from penstock.infra.constraints.schema_rewriting import rewritten
from penstock.schemas.requests import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

JSON_SCHEMA, REGEX, CHOICE, GRAMMAR, LARK = "json_schema", "regex", "choice", "grammar", "lark"
EXTRA = "structured"
MISSING = f"structured output needs llguidance: pip install 'penstock[{EXTRA}]'"

JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "lenient": False}
HEADER = "%llguidance {}\n"  # without it, readers of either syntax may take a grammar for GBNF

_ANY_SIZE = 1 << 32  # of a vocabulary that is not known
MAX_MESSAGE = 500  # characters of an error, which may quote the client's text

_PLACE = re.compile(r"^at \d+\(\d+\): ")  # in a grammar
_ANSWER = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|@answer\b')  # outside literals and expressions

_NAMED = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|<[^<>\s\[\]]+>')

_decode: Any = msgspec.json.Decoder(Annotated[list[str], msgspec.Meta(min_length=1)]).decode


class ConstraintError(ValueError):
    """A constraint cannot be compiled; the text says why and names the keyword."""


def available() -> bool:
    """Whether constraints can be compiled in this environment."""
    return importlib.util.find_spec("llguidance") is not None


def grammar(constraint: Constraint, named: Mapping[str, int] | None = None) -> str:
    """The grammar of a constraint in llguidance's own form.

    Args:
        named: ids of special tokens that a client's grammar may name, as in ``start: <think>``; None: names stay.
    Raises:
        ConstraintError: the kind is unknown, or the text is not what its kind says.
        ModuleNotFoundError: llguidance is not installed.
    """
    from llguidance import LLMatcher

    kind, text = constraint.kind, constraint.text
    with _library_errors():
        if kind == JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(_schema(text), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        if kind == REGEX:
            return LLMatcher.grammar_from_regex(text)
        if kind == CHOICE:
            return LLMatcher.grammar_from_lark(_choices(text))
        if kind == GRAMMAR:
            return LLMatcher.grammar_from_lark(_with_ids(_clients_lark(text), named))
        if kind == LARK:
            return _with_clients_grammar(text, named) if text.startswith("{") else LLMatcher.grammar_from_lark(text)
    raise ConstraintError(f"constraints of kind {kind!r} are unknown to this build")


def as_lark(constraint: Constraint) -> str:
    """One grammar in llguidance's dialect of Lark that allows the same texts as ``grammar``.

    vLLM, SGLang and TensorRT-LLM take their grammars in this form. It is for the installed release.

    Raises:
        ConstraintError: the kind is unknown, or the text is not what its kind says.
        ModuleNotFoundError: llguidance is not installed.
    """
    from llguidance import regex_to_lark

    kind, text = constraint.kind, constraint.text
    with _library_errors():
        if kind == JSON_SCHEMA:
            schema = msgspec.json.decode(_schema(text)) | {"x-guidance": JSON_OPTIONS}
            text = f"{HEADER}start: %json {msgspec.json.encode(schema).decode()}"
            return llguidance_releases.json_for_release(text)
        if kind == REGEX:
            return f"{HEADER}start: /{regex_to_lark(text)}/"
        if kind == CHOICE:
            return HEADER + _choices(text)
        if kind == GRAMMAR:
            return _clients_lark(text)
        if kind == LARK:
            text = HEADER + (_nested(text) if text.startswith("{") else text)
            return llguidance_releases.json_for_release(text)
    raise ConstraintError(f"constraints of kind {kind!r} are unknown to this build")


def quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    return msgspec.json.encode(text).decode()


def check(constraint: Constraint) -> None:
    """Check that a constraint can be compiled, for any tokenizer.

    Raises:
        ConstraintError: it cannot.
        LibraryError: the installed llguidance has another interface.
        ModuleNotFoundError: llguidance is not installed.
    """
    from llguidance import LLMatcher

    text = llguidance_releases.for_release(grammar(constraint), _ANY_SIZE)
    with interface():
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=llguidance_releases.limits())
    if failed:
        raise ConstraintError(_plain(messages[0], constraint))


def compiled(constraint: Constraint, tokenizer: "LLTokenizer", named: Mapping[str, int] | None = None) -> "LLMatcher":
    """A matcher at the beginning of a constraint's grammar.

    Args:
        named: as in ``grammar``.
    Raises:
        ConstraintError: it cannot be compiled.
        LibraryError: the installed llguidance has another interface.
        ModuleNotFoundError: llguidance is not installed.
    """
    from llguidance import LLMatcher

    text = llguidance_releases.for_release(grammar(constraint, named), tokenizer.vocab_size)
    with interface():
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=llguidance_releases.limits())
    if matcher.is_error():
        raise ConstraintError(_plain(matcher.get_error(), constraint))
    return matcher


def byte_tokenizer(ids: int, special: Sequence[str]) -> "LLTokenizer":
    """A vocabulary of the 256 bytes, of ``special`` tokens by name, and of ``ids`` more that spell nothing."""

    class Vocabulary:
        is_tokenizer_wrapper = True
        eos_token_id, bos_token_id = 256, None
        tokens = [*(bytes([each]) for each in range(256)), b"\xff<end>", *(b"\xff" + each.encode() for each in special)]
        special_token_ids = list(range(256, len(tokens)))

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    Vocabulary.tokens += [b""] * ids
    return llguidance_releases.vocabulary(Vocabulary(), [256], slices=[]).tokenizer


def _plain(message: str, constraint: Constraint) -> str:
    """An error message without the parser's state, and without a grammar that the client did not write."""
    message = message.partition("\n<state>")[0].partition("; following special tokens")[0]
    if constraint.kind == LARK and not constraint.text.startswith("{"):
        message = _PLACE.sub("", message.partition("\n   1 | ")[0])
    return message.strip()[:MAX_MESSAGE]


def around(text: str, clients: str) -> str:
    """The text of a constraint of kind "lark" whose rules refer to a client's grammar as ``@answer``."""
    grammars = [{"name": "main", "lark_grammar": text}, {"name": "answer", "lark_grammar": clients}]
    return msgspec.json.encode({"grammars": grammars}).decode()


def _choices(text: str) -> str:
    # A terminal: as alternatives of a rule, more than 2,000 are too many for a step of the parser.
    return "start: TEXT\nTEXT: " + " | ".join(map(quoted, _decode(text)))


def _nested(text: str) -> str:
    """One grammar for the result of ``around``."""
    main, clients = (each["lark_grammar"] for each in msgspec.json.decode(_with_clients_grammar(text))["grammars"])
    text = _ANSWER.sub(lambda match: match[1] or "clients_answer", main)
    return f"{text}\nclients_answer: %lark {{\n{clients}\n}}\n"


def _with_clients_grammar(text: str, named: Mapping[str, int] | None = None) -> str:
    """Inverse of ``around``, with the client's grammar in Lark."""
    grammars = msgspec.json.decode(text)
    clients = _clients_lark(grammars["grammars"][1]["lark_grammar"])
    grammars["grammars"][1]["lark_grammar"] = _with_ids(clients, named)
    return msgspec.json.encode(grammars).decode()


def _with_ids(lark: str, named: Mapping[str, int] | None) -> str:
    """A grammar with ids in place of the names of special tokens."""
    if not named:
        return lark

    def replaced(found: re.Match[str]) -> str:
        return found[0] if found[1] or found[0] not in named else f"<[{named[found[0]]}]>"

    return _NAMED.sub(replaced, lark)


@contextmanager
def _library_errors() -> Iterator[None]:
    """Whatever the library raises about a client's text is the text's fault."""
    try:
        yield
    except (ConstraintError, LibraryError, ModuleNotFoundError):
        raise
    except ValueError as error:
        raise ConstraintError(str(error)) from None
    except RecursionError:
        raise ConstraintError("it is nested too deeply") from None
    except Exception as error:  # of kinds that it does not document
        raise ConstraintError(f"{type(error).__name__}: {error}"[:MAX_MESSAGE]) from None


def _clients_lark(text: str) -> str:
    """A grammar in Lark or GBNF, in Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return llguidance_releases.repeated(any_to_lark(text))
    except RecursionError:
        raise
    except Exception as error:  # its own, and plain ones: of a rule that is not there, or no root
        raise ConstraintError(f"the grammar is neither Lark nor GBNF: {error}"[:MAX_MESSAGE]) from None


def _schema(text: str) -> str:
    """A JSON schema; true and false are schemas, too, and llguidance takes objects only."""
    schema = rewritten(msgspec.json.decode(text))
    if not isinstance(schema, dict):
        schema = {"enum": []} if schema is False else {}
    return msgspec.json.encode(schema).decode()
