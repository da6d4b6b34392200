"""Compiles constraints for one model's tokenizer, and keeps the latest grammars."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
from tokenizers import Tokenizer

from infra.model import constraints, modeldir
from infra.model.byte_cache import ByteCache
from infra.model.llguidance_releases import LibraryError, vocabulary
from schemas.errors import Code
from schemas.requests import CONSTRAINT, CONSTRAINT_LARK, Constraint, Stop
from workers.engines.base import GrammarStats, RequestError
from workers.engines.constraints.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = structlog.get_logger("engine")

ALL_CONSTRAINTS = (CONSTRAINT, CONSTRAINT_LARK)  # this compiler knows every kind
TRIAL = Constraint(constraints.REGEX, "a")
CACHED_BYTES = 64 << 20  # of grammars that no sequence uses
BYTES_A_CHARACTER = 160  # of a compiled grammar, where nobody has measured it
NO_END = "this model names no end token, so no output can end where a constraint ends"


class ModelTokens(NamedTuple):
    """``size``: width of the logits."""

    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]


def compiler(path: Path) -> "ConstraintCompiler | None":
    """For the model in ``path``, once a constraint has been compiled for it.

    Returns: None if none can be: llguidance is not installed, or it does not take this tokenizer (see the log). A
        worker without a compiler announces no constraints.
    """

    def vocabulary() -> ModelTokens:
        try:
            model = modeldir.load(path)
        except modeldir.ModelError as error:
            raise RequestError(Code.unsupported, f"structured output needs the model's tokenizer: {error}") from None
        return ModelTokens(model.tokenizer, model.vocab_size, model.eos_token_ids)

    return working(ConstraintCompiler(vocabulary)) if constraints.available() else None


def working(grammars: "ConstraintCompiler") -> "ConstraintCompiler | None":
    """The compiler if it compiles; else None, and the log says why."""
    try:
        grammars.try_out()
    except RequestError as error:
        log.warning("structured_output_off", reason=error.message)
        return None
    return grammars


class Grammar:
    """A compiled constraint, at its beginning."""

    __slots__ = ("__weakref__", "matcher", "size_bytes")

    def __init__(self, matcher: "LLMatcher", size_bytes: int) -> None:
        self.matcher = matcher
        self.size_bytes = size_bytes


class ConstraintCompiler:
    """May be used from any thread.

    Args:
        vocabulary: of the model. It may raise RequestError.
    """

    def __init__(self, vocabulary: Callable[[], ModelTokens]) -> None:
        self._hits = self._misses = 0
        self._seconds = 0.0
        self._vocabulary = vocabulary
        self._eos: tuple[int, ...] = ()
        self._tokenizer: LLTokenizer | None = None
        self._other_ends: Mapping[int, int] = {}
        self._latest: ByteCache[Constraint, Grammar] = ByteCache(
            CACHED_BYTES, lambda constraint, grammar: grammar.size_bytes + len(constraint.text)
        )
        self._living: weakref.WeakValueDictionary[Constraint, Grammar] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # of both
        self._making_tokenizer = threading.Lock()

    def stats(self) -> GrammarStats:
        return GrammarStats(self._hits, self._misses, self._seconds)

    def try_out(self) -> None:
        """Compile a constraint that every tokenizer takes, without keeping it.

        Raises:
            RequestError: as ``compile``.
        """
        self._new(TRIAL)

    def known(self, constraint: Constraint) -> Grammar | None:
        """The grammar, if it is one of the latest or in use; None: it is to be compiled."""
        with self._lock:
            found = self._latest.get(constraint)
            if found is None and (found := self._living.get(constraint)) is not None:
                self._latest.put(constraint, found)
            self._hits += found is not None
            return found

    def compile(self, constraint: Constraint, size_bytes: int = 0) -> Grammar:
        """Compile a constraint, unless it is known. While the grammar lives, ``matcher`` compiles nothing.

        Args:
            size_bytes: of the grammar; 0: it is estimated.
        Raises:
            RequestError: it cannot be compiled, or llguidance is not installed.
        """
        found = self.known(constraint)
        if found is not None:
            return found
        began = time.perf_counter()
        try:
            matcher = self._new(constraint)
        finally:
            with self._lock:
                self._misses += 1
                self._seconds += time.perf_counter() - began
        found = Grammar(matcher, size_bytes or BYTES_A_CHARACTER * (len(constraint.text) + 1_024))
        with self._lock:
            self._latest.put(constraint, found)
            self._living[constraint] = found
        return found

    def matcher(self, constraint: Constraint, prompt_len: int, stop: Stop) -> Matcher:
        """The state of a new sequence.

        Raises:
            RequestError: as ``compile``.
        """
        compiled = self.compile(constraint).matcher.deep_copy()
        ends = (*self._eos, *stop.token_ids)
        return Matcher(compiled, prompt_len, stop.min_tokens, ends, self._other_ends)

    @property
    def size_bytes(self) -> int:
        """Of the grammars that are kept."""
        return self._latest.size_bytes

    def _new(self, constraint: Constraint) -> "LLMatcher":
        try:
            return constraints.compiled(constraint, self._llguidance_tokenizer())
        except constraints.ConstraintError as error:
            raise RequestError(Code.invalid_request, f"the constraint cannot be compiled: {error}") from None
        except ModuleNotFoundError:
            raise RequestError(Code.unsupported, constraints.MISSING) from None
        except LibraryError as error:
            raise RequestError(Code.unsupported, f"structured output does not work here: {error}") from None

    def _llguidance_tokenizer(self) -> "LLTokenizer":
        with self._making_tokenizer:
            if self._tokenizer is None:
                source, size, self._eos = self._vocabulary()
                if not self._eos:
                    raise RequestError(Code.unsupported, NO_END)
                try:
                    self._tokenizer, self._other_ends = vocabulary(source.to_str(), self._eos, size)
                except ValueError as error:
                    raise RequestError(
                        Code.unsupported, f"structured output is not supported with this tokenizer: {error}"
                    ) from None
            return self._tokenizer
