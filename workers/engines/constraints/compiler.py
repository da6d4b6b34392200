"""Compiles constraints for one model's tokenizer, and keeps the latest grammars."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer

from infra.model import constraints, modeldir
from schemas.errors import Code
from schemas.requests import CONSTRAINT, CONSTRAINT_LARK, Constraint, Stop
from workers.engines.base import GrammarStats, RequestError
from workers.engines.constraints.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ALL_CONSTRAINTS = (CONSTRAINT, CONSTRAINT_LARK)  # this compiler knows every kind
CACHED = 256  # grammars
NO_END = "this model names no end token, so no output can end where a constraint ends"


class ModelTokens(NamedTuple):
    """``size``: width of the logits."""

    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]


def compiler(path: Path) -> "ConstraintCompiler | None":
    """For the model in ``path``, which is read when the first constraint is compiled; None: no llguidance here."""

    def vocabulary() -> ModelTokens:
        try:
            model = modeldir.load(path)
        except modeldir.ModelError as error:
            raise RequestError(Code.unsupported, f"structured output needs the model's tokenizer: {error}") from None
        return ModelTokens(model.tokenizer, model.vocab_size, model.eos_token_ids)

    return ConstraintCompiler(vocabulary) if constraints.available() else None


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
        self._grammars: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # one compiles at a time: the others need the processor, too

    def stats(self) -> GrammarStats:
        return GrammarStats(self._hits, self._misses, self._seconds)

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
        return Matcher(compiled, prompt_len, stop.min_tokens, (*self._eos, *stop.token_ids))

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
                found = constraints.compiled(constraint, self._llguidance_tokenizer())
            except constraints.ConstraintError as error:
                raise RequestError(Code.invalid_request, f"the constraint cannot be compiled: {error}") from None
            except ModuleNotFoundError:
                raise RequestError(Code.unsupported, constraints.MISSING) from None
            finally:
                self._seconds += time.perf_counter() - began
            self._grammars[constraint] = found
            if len(self._grammars) > CACHED:
                self._grammars.popitem(last=False)
            return found

    def _llguidance_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            source, size, self._eos = self._vocabulary()
            if not self._eos:
                raise RequestError(Code.unsupported, NO_END)
            try:
                self._tokenizer = LLTokenizer(source.to_str(), n_vocab=size, eos_token=list(self._eos))
            except ValueError as error:
                raise RequestError(
                    Code.unsupported, f"structured output is not supported with this tokenizer: {error}"
                ) from None
        return self._tokenizer
