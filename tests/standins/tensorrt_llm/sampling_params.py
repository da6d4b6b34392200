from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from tensorrt_llm._standin.variant import LATER


class LogitsProcessor(ABC):
    """Edits the logits of one request in place; pickled on its way to the engine."""

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None: ...


class BatchedLogitsProcessor(ABC):
    @abstractmethod
    def __call__(
        self,
        req_ids: list[int],
        logits: list[torch.Tensor],
        token_ids: list[list[list[int]]],
        stream_ptr: int,
        client_ids: list[int | None],
    ) -> None: ...


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        kinds = [self.json is not None, self.regex is not None, self.grammar is not None, self.json_object]
        if sum([*kinds, self.structural_tag is not None]) > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {self}")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Section 3 of the reference: fields, defaults and what is refused."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    _bad_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    embedding_bias: torch.Tensor | None = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[Any] | None = None
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _stream_interval: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        self._validate()

    def _validate(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        many = (self.best_of or 1) > 1 and not self.use_beam_search
        if many and self._greedy and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"):
            raise ValueError(
                f"Greedy decoding in the LLM API does not allow multiple returns. Please set to `best_of=1`, "
                f"got `best_of={self.best_of}`."
            )
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    @property
    def _greedy(self) -> bool:
        nothing = self.temperature is None and self.top_p is None and self.top_k is None
        return nothing or self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def _needs_tokenizer(self) -> bool:
        return self.end_id is None

    def _setup(self, tokenizer: Any, eos: list[int]) -> None:
        """``eos``: of the generation config; the first is the model's own end id."""
        self.end_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else eos[0]
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id

        def words(given: Any) -> list[list[int]]:
            strings = [given] if isinstance(given, str) else given
            return [tokenizer.encode(text, add_special_tokens=False) for text in strings]

        if self.bad is not None:
            self._bad_word_ids = words(self.bad)
        if self.stop is not None:
            self._stop_word_ids = words(self.stop)
        extra = [token for token in eos if token != self.end_id]
        if extra:
            known = self.stop_token_ids or []
            self.stop_token_ids = known + [token for token in extra if token not in known]

    def _words(self, strings: Any, ids: list[int] | None, tokenised: list[list[int]] | None) -> list[list[int]]:
        words = [[token] for token in ids or []]
        if strings is not None and tokenised is None:
            raise RuntimeError("stop and bad words need the tokenizer's set-up, which end_id left out")
        return words + list(tokenised or [])

    def _get_bad_words(self) -> list[list[int]]:
        return self._words(self.bad, self.bad_token_ids, self._bad_word_ids)

    def _get_stop_words(self) -> list[list[int]]:
        return self._words(self.stop, self.stop_token_ids, self._stop_word_ids)

    def _get_stop_reasons_and_words(self) -> list[tuple[int | str, list[int]]]:
        strings = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        reasons: list[int | str] = [*(self.stop_token_ids or []), *strings]
        return list(zip(reasons, self._get_stop_words(), strict=True))


def check_processors(given: Any) -> list[Any]:
    """One processor or a list; each takes 4 or 5 positional arguments."""
    found = list(given) if isinstance(given, list) else [given]
    for processor in found:
        parameters = len(inspect.signature(processor).parameters)
        if parameters not in (4, 5):
            raise ValueError(f"logits processors take 4 or 5 parameters, {processor!r} takes {parameters}")
    return found


if LATER:
    _Older = SamplingParams

    @dataclass(slots=True, kw_only=True)
    class SamplingParams(_Older):  # type: ignore[no-redef]
        logprobs_mode: str = "raw"
        thinking_token_budget: int | None = None


__all__ = ["BatchedLogitsProcessor", "GuidedDecodingParams", "LogitsProcessor", "SamplingParams"]
