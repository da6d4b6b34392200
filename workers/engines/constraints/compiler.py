"""Compiles constraints for one model's tokenizer; keeps the latest grammars, and the constraints of open sequences."""

import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from tokenizers import Tokenizer

from penstock.infra.bounded import ByteCache
from penstock.infra.constraints import constraint_grammar
from penstock.infra.constraints.llguidance_releases import LibraryError, vocabulary
from penstock.infra.model import modeldir
from penstock.schemas.errors import Code
from penstock.schemas.requests import CONSTRAINT, CONSTRAINT_LARK, CONSTRAINT_SPELLED, Constraint, Stop
from penstock.workers.engines.constraints.token_mask import Matcher
from penstock.workers.engines.engine_protocol import Failure, GrammarStats, RequestError, SequenceRequest, StepResult

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = structlog.get_logger("engine")

ALL_CONSTRAINTS = (CONSTRAINT, CONSTRAINT_LARK, CONSTRAINT_SPELLED)  # this compiler knows every kind
# Of engines that compile for themselves: what a grammar forces they write as the tokenizer encodes it.
OTHERS_CONSTRAINTS = (CONSTRAINT, CONSTRAINT_LARK)
TRIAL = Constraint(constraint_grammar.REGEX, "a")
CACHED_BYTES = 64 << 20  # of grammars that no sequence uses
BYTES_A_CHARACTER = 160  # of a compiled grammar that was not measured
NO_END = "this model names no end token, so no output can end where a constraint ends"
NO_CONSTRAINTS = "this worker's engine applies no constraints (structured output)"
NO_TEXT_MATCHES = "no text matches the constraint: a part of it, such as a $ref to itself, never ends"
TOO_COMPLEX = "the constraint is too complex: use fewer optional properties or alternatives, or shorter lengths"


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

    return working(ConstraintCompiler(vocabulary)) if constraint_grammar.available() else None


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


def without_names(described: dict[str, Any], tokens: Collection[int]) -> dict[str, Any]:
    """A tokenizer's description whose special tokens no text spells.

    llguidance writes what a grammar forces as the tokenizer encodes it: an enum with "<|im_end|>" as the model's end.
    With other names of these tokens the text becomes ordinary tokens. They are drawn, so that no client's text has one.

    Args:
        described: as in ``tokenizer.json``; changed.
        tokens: ids of the special tokens.
    """
    drawn = secrets.token_hex(8)
    names: dict[str, str] = {}
    for added in described["added_tokens"]:
        if added["id"] in tokens:
            names[added["content"]] = added["content"] = f"\0{drawn}:{added['id']}"
            added["special"] = True
    model = described["model"]
    if isinstance(words := model.get("vocab"), dict):
        model["vocab"] = {names.get(text, text): token for text, token in words.items()}
    elif words:
        model["vocab"] = [[names.get(text, text), score] for text, score in words]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return described


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
        self._named: Mapping[str, int] = {}  # special tokens that clients' grammars may name
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
            tokenizer = self._llguidance_tokenizer()
            return constraint_grammar.compiled(constraint, tokenizer, self._named)
        except constraint_grammar.ConstraintError as error:
            raise RequestError(Code.invalid_request, f"the constraint cannot be compiled: {error}") from None
        except ModuleNotFoundError:
            raise RequestError(Code.unsupported, constraint_grammar.MISSING) from None
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
                    added = {each.content: token for token, each in source.get_added_tokens_decoder().items()}
                    self._named = {
                        text: token for text, token in added.items() if self._tokenizer.is_special_token(token)
                    }
                    if self._named:
                        hidden = without_names(json.loads(source.to_str()), self._named.values())
                        self._tokenizer, self._other_ends = vocabulary(json.dumps(hidden), self._eos, size)
                except ValueError as error:
                    raise RequestError(
                        Code.unsupported, f"structured output is not supported with this tokenizer: {error}"
                    ) from None
            return self._tokenizer


def matcher_of(request: SequenceRequest, grammars: ConstraintCompiler | None) -> Matcher:
    """The state of a sequence's constraint, after the tokens of earlier attempts.

    Raises:
        RequestError: the constraint cannot be compiled, or those tokens do not match it.
    """
    assert request.constraint is not None
    if grammars is None:
        raise RequestError(Code.unsupported, NO_CONSTRAINTS)
    found = grammars.matcher(request.constraint, len(request.prompt), request.stop)
    found.follow([*request.prompt, *request.generated])
    if found.error:
        raise RequestError(Code.engine_error, f"the tokens so far do not match the constraint: {found.error}")
    return found


class RunningConstraints:
    """
    Attributes:
        matchers: by the key of their sequence.
    """

    def __init__(self) -> None:
        self.matchers: dict[object, Matcher] = {}

    def add(self, key: object, matcher: Matcher) -> None:
        self.matchers[key] = matcher

    def remove(self, key: object) -> None:
        self.matchers.pop(key, None)

    def ended(self, result: StepResult) -> list[Failure]:
        """Forget the sequences that a step has ended; returns those that cannot match their constraint any more."""
        for output in result.outputs:
            if output.finish:
                self.remove(output.key)
        for failure in result.failures:
            self.remove(failure.key)
        unmatched = [(key, matcher) for key, matcher in self.matchers.items() if matcher.error]
        for key, _ in unmatched:
            self.remove(key)
        return [_failure(key, matcher) for key, matcher in unmatched]


def _failure(key: object, matcher: Matcher) -> Failure:
    reason = clients_error(matcher)
    if reason:
        return Failure(key, Code.invalid_request, reason)
    return Failure(key, Code.engine_error, f"the constraint cannot be applied: {matcher.error}")


def clients_error(matcher: Matcher) -> str:
    """Why a constraint cannot be followed, if that is the constraint's own fault; "": it is not."""
    if matcher.no_text:
        return NO_TEXT_MATCHES
    return f"{TOO_COMPLEX} ({matcher.error})" if matcher.too_complex else ""
