"""As ``vllm.sampling_params``: fields, defaults and what is refused."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        kinds = (self.json, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag)
        if sum(each is not None for each in kinds) != 1:
            raise ValueError(f"You must use one kind of structured outputs constraint: {self.__dict__}")


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _watermarking_skipped: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        self._verify_args()
        if self.temperature < 1e-5:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self._all_stop_token_ids.update(self.stop_token_ids)
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _verify_args(self) -> None:
        def need(good: bool, text: str) -> None:
            if not good:
                raise VLLMValidationError(text)

        need(type(self.n) is int and self.n >= 1, f"n must be at least 1, got {self.n}.")
        need(-2.0 <= self.presence_penalty <= 2.0, f"presence_penalty must be in [-2, 2], got {self.presence_penalty}.")
        need(-2 <= self.frequency_penalty <= 2, f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}.")
        need(math.isfinite(self.repetition_penalty), "repetition_penalty must be a finite number")
        need(self.repetition_penalty > 0, "repetition_penalty must be greater than zero")
        need(math.isfinite(self.temperature), "temperature must be a finite number")
        need(0 <= self.temperature <= 2, f"temperature must be in [0, 2], got {self.temperature}.")
        need(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}.")
        need(isinstance(self.top_k, int) and self.top_k >= -1, "top_k must be 0 (disable), or at least 1")
        need(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}.")
        need(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}.")
        need(self.min_tokens >= 0, f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        least = self.max_tokens is None or self.min_tokens <= self.max_tokens
        need(least, f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}.")
        need(self.logprobs is None or self.logprobs >= -1, f"logprobs must be non-negative or -1, got {self.logprobs}.")
        assert isinstance(self.stop_token_ids, list)
        need(all(isinstance(each, int) for each in self.stop_token_ids), "stop_token_ids must contain only integers")
        need(not self.stop or self.detokenize, "stop strings are only supported when detokenize is True.")
