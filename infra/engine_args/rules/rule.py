"""Rules, their context and their findings."""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from msgspec import Struct

from penstock.infra.engine_args.memory_estimate import Shape
from penstock.infra.engine_args.schema import EngineArgs

EngineRole = Literal["aggregated", "prefill", "decode", "encode"]
Level = Literal["error", "warning"]
Detail = tuple[Level, str, str, str]  # a finding without its rule
Details = Iterator[Detail]


class Context(Struct, frozen=True, kw_only=True):
    """The circumstances of an engine. None: unknown.

    Attributes:
        model_len: longest prompt + output to serve, in tokens.
        longest_prompt: in tokens; by default ``model_len``.
        gpus: of this engine, on all nodes.
        router_block_size: the router's tokens per block.
        missing: paths in the arguments that do not exist.
        accepted: (proposed, accepted) draft tokens, as counted by a running worker.
        version: of tensorrt_llm.
        container: release of NVIDIA's runtime container.
        logits_processors: requests may use them.
    """

    role: EngineRole = "aggregated"
    model_len: int | None = None
    longest_prompt: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    gpu_bytes: int | None = None
    blackwell: bool | None = None
    router_block_size: int | None = None
    shape: Shape | None = None
    draft: Shape | None = None
    draft_bytes: int = 0
    missing: frozenset[str] = frozenset()
    accepted: tuple[int, int] | None = None
    version: str | None = None
    container: str | None = None
    logits_processors: bool = False

    @property
    def hands_off(self) -> bool:
        """KV cache moves to or from this worker."""
        return self.role in ("prefill", "decode")


class Finding(NamedTuple):
    rule: str
    level: Level
    where: str  # dotted name of the argument
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level} {self.rule} {self.where}: {self.message}; {self.fix}"


class Rule(NamedTuple):
    number: str
    rows: tuple[str, ...]  # of docs/requirements.md
    about: str
    find: Callable[[EngineArgs, Context], Iterator[Finding]]


def rule(number: str, *rows: str) -> Callable[[Callable[[EngineArgs, Context], Details]], Rule]:
    """Make a rule of a function, whose docstring says what must hold."""

    def make(body: Callable[[EngineArgs, Context], Details]) -> Rule:
        def find(args: EngineArgs, context: Context) -> Iterator[Finding]:
            for level, where, message, fix in body(args, context):
                yield Finding(number, level, where, message, fix)

        return Rule(number, rows, (body.__doc__ or "").strip(), find)

    return make


def error(where: str, message: str, fix: str) -> Detail:
    return "error", where, message, fix


def warning(where: str, message: str, fix: str) -> Detail:
    return "warning", where, message, fix


def up(tokens: int, block: int) -> int:
    """Round up to a multiple of a block."""
    return math.ceil(tokens / block) * block


def longest_prompt(args: EngineArgs, context: Context) -> int | None:
    """Tokens of the longest prompt to expect; None: unknown."""
    return context.longest_prompt or context.model_len or args.max_seq_len
