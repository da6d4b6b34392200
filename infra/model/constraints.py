"""Which texts a constraint allows, as a grammar of llguidance. Needs llguidance only where a grammar is compiled.

llguidance understands JSON schema, regular expressions and context-free grammars in a dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import importlib.util
import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from infra.model.schema_rewriting import rewritten
from schemas.requests import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

JSON_SCHEMA, REGEX, CHOICE, GRAMMAR, LARK = "json_schema", "regex", "choice", "grammar", "lark"
EXTRA = "structured"
MISSING = f"structured output needs llguidance: pip install 'penstock[{EXTRA}]'"

# Between the parts of JSON. Bounded, because models (above all small ones) may otherwise write white space for ever.
WHITESPACE = r"(\x20|\n[\x20\t]{0,40})?"

MAX_MESSAGE = 500  # characters of an error, which may quote the client's text

_PLACE = re.compile(r"^at \d+\(\d+\): ")  # in a grammar

_decode: Any = msgspec.json.Decoder(Annotated[list[str], msgspec.Meta(min_length=1)]).decode


class ConstraintError(ValueError):
    """A constraint cannot be compiled; the text says why and names the keyword."""


def available() -> bool:
    """Whether constraints can be compiled in this environment."""
    return importlib.util.find_spec("llguidance") is not None


def grammar(constraint: Constraint) -> str:
    """The grammar of a constraint in llguidance's own form.

    Raises:
        ConstraintError: the kind is unknown, or the text is not what its kind says.
        ModuleNotFoundError: llguidance is not installed.
    """
    from llguidance import LLMatcher, grammar_from

    kind, text = constraint.kind, constraint.text
    try:
        if kind == JSON_SCHEMA:
            options = {"whitespace_pattern": WHITESPACE, "lenient": False}
            return LLMatcher.grammar_from_json_schema(_schema(text), overrides=options)  # type: ignore[arg-type]
        if kind == REGEX:
            return LLMatcher.grammar_from_regex(text)
        if kind == CHOICE:
            # A terminal: as alternatives of a rule, more than 2,000 are too many for a step of the parser.
            return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(quoted, _decode(text))))
        if kind == GRAMMAR:
            return grammar_from("grammar", text)
        if kind == LARK:
            return _with_clients_grammar(text) if text.startswith("{") else LLMatcher.grammar_from_lark(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(str(error)) from None
    raise ConstraintError(f"constraints of kind {kind!r} are unknown to this build")


def quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    return msgspec.json.encode(text).decode()


def check(constraint: Constraint) -> None:
    """Check that a constraint can be compiled, for any tokenizer.

    Raises:
        ConstraintError: it cannot.
        ModuleNotFoundError: llguidance is not installed.
    """
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar(constraint), None, limits=_limits())
    if failed:
        raise ConstraintError(_plain(messages[0], constraint))


def compiled(constraint: Constraint, tokenizer: "LLTokenizer") -> "LLMatcher":
    """A matcher at the beginning of a constraint's grammar.

    Raises:
        ConstraintError: it cannot be compiled.
        ModuleNotFoundError: llguidance is not installed.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar(constraint), log_level=0, limits=_limits())
    if matcher.is_error():
        raise ConstraintError(_plain(matcher.get_error(), constraint))
    return matcher


def _limits() -> "LLParserLimits":
    """Bounds on the work of compiling and of each step; the defaults allow tens of milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def _plain(message: str, constraint: Constraint) -> str:
    """An error message without the parser's state, and without a grammar that the client did not write."""
    message = message.partition("\n<state>")[0]
    if constraint.kind == LARK and not constraint.text.startswith("{"):
        message = _PLACE.sub("", message.partition("\n   1 | ")[0])
    return message.strip()[:MAX_MESSAGE]


def around(text: str, clients: str) -> str:
    """The text of a constraint of kind "lark" whose rules refer to a client's grammar as ``@answer``."""
    grammars = [{"name": "main", "lark_grammar": text}, {"name": "answer", "lark_grammar": clients}]
    return msgspec.json.encode({"grammars": grammars}).decode()


def _with_clients_grammar(text: str) -> str:
    """Inverse of ``around``, with the client's grammar in Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    grammars = msgspec.json.decode(text)
    grammars["grammars"][1]["lark_grammar"] = any_to_lark(grammars["grammars"][1]["lark_grammar"])
    return msgspec.json.encode(grammars).decode()


def _schema(text: str) -> str:
    """A JSON schema; true and false are schemas, too, and llguidance takes objects only."""
    schema = rewritten(msgspec.json.decode(text))
    if not isinstance(schema, dict):
        schema = {"enum": []} if schema is False else {}
    return msgspec.json.encode(schema).decode()
