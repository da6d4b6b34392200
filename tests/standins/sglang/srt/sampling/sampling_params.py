"""As ``sglang.srt.sampling.sampling_params``: fields, defaults and what is refused."""

import math
from typing import Any

import msgspec

TOP_K_ALL = 1 << 30


class SamplingParams(msgspec.Struct, kw_only=True, array_like=True):
    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: set[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop_token_ids = {int(each) for each in self.stop_token_ids or ()} or None
        if 0 <= self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1
        if self.top_k == -1:
            self.top_k = TOP_K_ALL

    def verify(self, vocab_size: int) -> None:
        def need(good: bool, text: str) -> None:
            if not good:
                raise ValueError(text)

        need(math.isfinite(self.temperature) and self.temperature >= 0, "temperature must be a non-negative number")
        need(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}.")
        need(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}.")
        need(self.top_k >= 1, f"top_k must be -1 (disable) or at least 1, got {self.top_k}.")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty must be in [-2, 2]")
        need(0 < self.repetition_penalty <= 2, "repetition_penalty must be in (0, 2] (1.0 = no penalty)")
        need(self.max_new_tokens is None or self.max_new_tokens >= 0, "max_new_tokens must be at least 0")
        for token in self.logit_bias or {}:
            need(isinstance(token, str), "logit_bias: keys are strings")
            need(0 <= int(token) < vocab_size, f"logit_bias must has keys in [0, {vocab_size - 1}], got {token}.")
        seed = self.sampling_seed
        need(seed is None or (type(seed) is int and -(2**63) <= seed <= 2**63 - 1), f"sampling_seed: {seed}")

    def normalize(self, tokenizer: object) -> None:
        if tokenizer is None:
            for name in ("stop", "min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag"):
                if getattr(self, name):
                    raise ValueError(f"{name} is unavailable when skip_tokenizer_init=True")


__all__ = ["SamplingParams"]
