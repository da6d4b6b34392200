"""Constraints on the output of an external engine's sequences.

The engine applies the grammar; this follows the tokens that it draws. A token that the grammar does not allow ends its
sequence with a failure, whatever went wrong in the engine: a constraint is never ignored.
"""

import threading
import weakref
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec

from penstock.infra.bounded import ByteCache
from penstock.infra.constraints import constraint_grammar
from penstock.schemas.errors import Code
from penstock.schemas.requests import Constraint, Stop
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, clients_error, matcher_of
from penstock.workers.engines.constraints.token_mask import Matcher
from penstock.workers.engines.engine_protocol import GrammarStats, RequestError, SequenceRequest
from penstock.workers.engines.external.sequences import SequenceFailure, Token

REMEMBERED_BYTES = 16 << 20  # of grammars as text


class ConstrainedOutputs:
    """
    Args:
        grammars: of the model; None: the engine takes no constraints.
    """

    def __init__(self, grammars: ConstraintCompiler | None) -> None:
        self._grammars = grammars
        self._matchers: dict[object, Matcher] = {}

    def add(self, request: SequenceRequest) -> None:
        """Follow a sequence, after the tokens of earlier attempts.

        Raises:
            RequestError: its constraint cannot be compiled, or those tokens do not match it.
        """
        if request.constraint is not None:
            self._matchers[request.key] = matcher_of(request, self._grammars)

    def remove(self, key: object) -> None:
        self._matchers.pop(key, None)

    def follow(
        self, key: object, tokens: Seq[Token], failure: SequenceFailure | None = None
    ) -> tuple[Seq[Token], SequenceFailure | None]:
        """Follow new tokens of a sequence.

        Args:
            failure: of the engine, after them.
        Returns: the tokens before the first that its constraint does not allow, and the failure if there is one. Where
            a constraint cannot be followed by anyone, it says so.
        """
        matcher = self._matchers.get(key) if self._matchers else None
        if matcher is None:
            return tokens, failure
        for at, token in enumerate(tokens):
            if not matcher.take(token.token):
                return tokens[:at], _clients(matcher) or SequenceFailure(
                    Code.engine_error, f"the engine drew a token that the constraint does not allow: {matcher.error}"
                )
        if failure is not None and failure.code == Code.engine_error:
            matcher.look_ahead()
            failure = _clients(matcher) or failure
        return tokens, failure


def _clients(matcher: Matcher) -> SequenceFailure | None:
    reason = clients_error(matcher)
    return SequenceFailure(Code.invalid_request, reason) if reason else None


class _Prepared:
    """A compiled constraint, and the text of it that an engine gets: it lives as long as a request needs it."""

    __slots__ = ("__weakref__", "grammar", "text")

    def __init__(self, grammar: object, text: str) -> None:
        self.grammar = grammar
        self.text = text


class PreparedGrammars:
    """Implements ``engine_protocol.Grammars`` of engines that compile for themselves: what they get is made where
    constraints are compiled. In the engine's thread all streams would wait for it, 0.05 s with 4,000 properties.
    """

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler

    def stats(self) -> GrammarStats:
        return self._compiler.stats()

    def known(self, constraint: Constraint) -> object | None:
        text = _known_text(constraint)
        found = None if text is None else self._compiler.known(constraint)
        return None if text is None or found is None else _kept(constraint, found, text)

    def compile(self, constraint: Constraint, size_bytes: int = 0) -> object:
        compiled = self._compiler.compile(constraint, size_bytes)
        return _kept(constraint, compiled, grammar_text(constraint))


_texts: ByteCache[Constraint, str] = ByteCache(REMEMBERED_BYTES, lambda each, text: len(each.text) + len(text))
_prepared: weakref.WeakValueDictionary[Constraint, _Prepared] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # of both


def _known_text(constraint: Constraint) -> str | None:
    with _lock:
        prepared = _prepared.get(constraint)
        return prepared.text if prepared is not None else _texts.get(constraint)


def _kept(constraint: Constraint, grammar: object, text: str) -> _Prepared:
    with _lock:
        found = _prepared[constraint] = _Prepared(grammar, text)
    return found


def grammar_text(constraint: Constraint) -> str:
    """The grammar for engines that compile it themselves: one text in llguidance's dialect of Lark.

    Raises:
        RequestError: it cannot be compiled.
    """
    found = _known_text(constraint)
    if found is None:
        try:
            found = constraint_grammar.as_lark(constraint)
        except constraint_grammar.ConstraintError as error:
            raise RequestError(Code.invalid_request, f"the constraint cannot be compiled: {error}") from None
        with _lock:
            _texts.put(constraint, found)
    return found


def ends(stop: Stop, constraint: Constraint | None) -> Stop:
    """Where an output may end: with a constraint, where its grammar says, whatever the client asks for."""
    if constraint is None:
        return stop
    return Stop(stop.max_tokens, token_ids=stop.token_ids, strings=stop.strings)


def standard_tokenizer(path: Path) -> bool:
    """Whether an engine can read the model's tokenizer without code of the model's own."""
    try:
        config = msgspec.json.decode((path / "tokenizer_config.json").read_bytes())
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "auto_map" not in config
