"""The engine protocol: what a worker asks of anything that turns token sequences into more tokens.

Everything here is synchronous and used from one thread, the engine's. No NATS, no torch.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import msgspec

from schemas.kv import KvEvent
from schemas.requests import Sampling, Stop
from schemas.tokens import Logprob


class RequestError(Exception):
    """This sequence cannot be served; its neighbours are not affected. ``code`` is a schemas.errors.Code value."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EngineError(Exception):
    """The engine is broken; the worker gives its requests back and exits."""


class EngineInfo(msgspec.Struct, frozen=True):
    """Fixed facts, known when the engine is built. Counts of tokens or blocks."""

    name: str
    block_size: int
    total_blocks: int
    slots: int  # sequences that run at once
    max_model_len: int  # prompt + output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_events: bool
    load_seconds: float = 0.0
    dp_size: int = 1


class SequenceRequest(msgspec.Struct):
    """One choice of one request. ``key`` identifies it to the caller; the engine only hands it back."""

    key: object
    prompt: Seq[int]
    sampling: Sampling
    stop: Stop
    choice: int = 0
    generated: Seq[int] = ()  # tokens of earlier attempts: context, and counted as output
    digests: Seq[bytes] = ()  # of the prompt's full blocks, if the caller has them
    root: bytes = b""  # parent of the first block


class Output(NamedTuple):
    """One new token of one sequence. ``finish``: "", "stop" or "length"; ``stop_token``: the id that ended it.

    The stopping EOS or stop token itself is included as a token.
    """

    key: object
    token: int
    finish: str = ""
    logprob: Logprob | None = None
    stop_token: int | None = None


class Failure(NamedTuple):
    """A sequence that ended without a token, by an error of its own."""

    key: object
    code: str
    message: str


class Started(NamedTuple):
    """A sequence that was admitted in this step, with the prompt tokens that came from the prefix cache."""

    key: object
    cached_tokens: int


class StepResult(NamedTuple):
    outputs: list[Output]
    events: list[KvEvent]  # in the order they happened
    started: list[Started]
    failures: list[Failure]
    computed_tokens: int  # scheduled in this step, prompt and decode


class EngineStats(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    used_blocks: int  # referenced by running sequences
    cached_blocks: int  # unreferenced, still reusable
    free_blocks: int  # neither
    preemptions: int = 0
    hit_tokens: int = 0  # prompt tokens taken from the cache, since start
    prompt_tokens: int = 0  # prompt tokens admitted, since start


class Engine(Protocol):
    """Called from the engine thread only, except ``info``, which is immutable."""

    info: EngineInfo

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here (too long, bad option).
        """

    def cancel(self, key: object) -> bool:
        """Drop a sequence at once and free its blocks; False: unknown (it may just have finished)."""

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""

    def step(self) -> StepResult:
        """One batch of prefill chunks and decode tokens.

        Raises:
            EngineError: nothing more can be expected of this engine.
        """

    def stats(self) -> EngineStats: ...

    def dump(self) -> list[KvEvent]:
        """All names in the prefix cache as ``Stored`` events, parents before children."""

    def close(self) -> None: ...
