"""As ``sglang.srt.constrained.llguidance_backend``: grammars of requests, copied from one per text."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from
from vllm.v1.structured_output import GuidanceGrammar as _Grammar


class InvalidGrammarObject:
    def __init__(self, error_message: str = "Unknown grammar error") -> None:
        self.error_message = error_message


class GuidanceGrammar(_Grammar):
    def accept_token(self, token: int) -> None:
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise ValueError(self._matcher.get_error())

    def copy(self) -> GuidanceGrammar:
        return GuidanceGrammar(self._matcher.deep_copy())


class GuidanceBackend:
    def __init__(self, tokenizer: Any, n_vocab: int, eos: list[int]) -> None:
        self.llguidance_tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=n_vocab, eos_token=eos)

    def dispatch_ebnf(self, key_string: str) -> GuidanceGrammar | InvalidGrammarObject:
        matcher = LLMatcher(self.llguidance_tokenizer, grammar_from("ebnf", key_string), log_level=0)
        return InvalidGrammarObject(matcher.get_error()) if matcher.is_error() else GuidanceGrammar(matcher)
