"""As ``vllm.v1.structured_output``: the grammars of requests, each from its beginning. The backend is llguidance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import Tokenizer
from torch import Tensor
from vllm.config import VllmConfig


class GuidanceGrammar:
    """Between a request's last token and the next."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return self._matcher.is_stopped() or bool(self._matcher.consume_tokens(tokens))

    def barred(self) -> Tensor:
        """(vocab,) bool."""
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return (mask[:, None] >> torch.arange(8) & 1).flatten() == 0


class StructuredOutputManager:
    def __init__(self, vllm_config: VllmConfig, vocab_size: int, eos: list[int]) -> None:
        self.backend: LLTokenizer | None = None
        if not vllm_config.model_config.skip_tokenizer_init:
            tokenizer = Tokenizer.from_file(str(Path(vllm_config.model_config.model) / "tokenizer.json"))
            self.backend = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=eos)

        self.executor = ThreadPoolExecutor(1, "vllm-grammars")

    def grammar_init(self, request: Any) -> None:
        """The request waits until its grammar is compiled, and no other one does."""
        if request.sampling_params.structured_outputs is not None:
            request.compiling = self.executor.submit(self._create_grammar, request)

    def _create_grammar(self, request: Any) -> GuidanceGrammar:
        text = grammar_from("grammar", request.sampling_params.structured_outputs.grammar)
        matcher = LLMatcher(self.backend, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return GuidanceGrammar(matcher)
