"""Compiles constraints for one model's tokenizer, and keeps the latest grammars."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
from tokenizers import Tokenizer

from infra.model import constraints, modeldir
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
CACHED = 256  # grammars
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
        self._grammars: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # one compiles at a time: the others need the processor, too

    def stats(self) -> GrammarStats:
        return GrammarStats(self._hits, self._misses, self._seconds)

    def try_out(self) -> None:
        """Compile a constraint that every tokenizer takes, without keeping it.

        Raises:
            RequestError: as ``compile``.
        """
        with self._lock:
            self._new(TRIAL)

    def compile(self, constraint: Constraint) -> None:
        """Enter a grammar into the cache.

        Raises:
            RequestError: it cannot be compiled, or llguidance is not installed.
        """
        self._compiled(constraint)

    def matcher(self, constraint: Constraint, prompt_len: int, stop: Stop) -> Matcher:
        """The state of a new sequence.

        Raises:
            RequestError: as ``compile``.
        """
        compiled = self._compiled(constraint).deep_copy()
        ends = (*self._eos, *stop.token_ids)
        return Matcher(compiled, prompt_len, stop.min_tokens, ends, self._other_ends)

    def _compiled(self, constraint: Constraint) -> "LLMatcher":
        with self._lock:
            found = self._grammars.get(constraint)
            if found is not None:
                self._grammars.move_to_end(constraint)
                self._hits += 1
                return found
            self._misses += 1
            began = time.perf_counter()
            try:
                found = self._new(constraint)
            finally:
                self._seconds += time.perf_counter() - began
            self._grammars[constraint] = found
            if len(self._grammars) > CACHED:
                self._grammars.popitem(last=False)
            return found

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
