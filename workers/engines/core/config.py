"""Sizes and policy of a scheduler, and the limits of one sequence that follow from them. Pure."""

import msgspec

from penstock.schemas.errors import Code
from penstock.workers.engines.base import RequestError, SequenceRequest
from penstock.workers.engines.core.scoring import MAX_SCORED_TOKENS
from penstock.workers.engines.validation import check_length


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        block_size: tokens per KV block.
        max_running: sequences that run at once.
        max_batched_tokens: tokens computed per step, prompt and decode.
        max_model_len: prompt + output of one sequence, tokens.
        eos_token_ids: end a sequence, unless it ignores them.
        max_scored_tokens: prompt tokens per step of sequences whose prompts are scored.
        no_evict: admit a sequence only if all blocks that it may need are available. Sequences with a reservation are
            exempt: it was made without knowing their output.

    Raises:
        ValueError: a size is below 1.
    """

    block_size: int
    max_running: int
    max_batched_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_scored_tokens: int = MAX_SCORED_TOKENS
    no_evict: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_running", "max_batched_tokens", "max_model_len", "max_scored_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


class SequenceLimits:
    """How long a sequence may become on one engine.

    Args:
        total_blocks: of the KV pool.
    """

    def __init__(self, config: SchedulerConfig, total_blocks: int) -> None:
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.eos = frozenset(config.eos_token_ids)
        self.pool_tokens = total_blocks * config.block_size
        self.pool_limit = (
            f"this worker's KV pool holds {self.pool_tokens} tokens ({total_blocks} blocks of {config.block_size})"
        )

    def check(self, request: SequenceRequest, prompt_len: int, known: int) -> None:
        """
        Args:
            known: tokens of the prompt and of earlier attempts.

        Raises:
            RequestError: it can never run here; the message names the limit.
        """
        generated, max_tokens = known - prompt_len, request.stop.max_tokens
        check_length(prompt_len, generated, max_tokens=max_tokens, max_model_len=self.max_model_len)
        if known >= self.pool_tokens:
            raise RequestError(
                Code.out_of_blocks, f"{known} tokens leave no room for a new one: {self.pool_limit}, output included"
            )
