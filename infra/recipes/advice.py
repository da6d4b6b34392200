"""What the advisor says of one file or of a set: findings and the memory estimate, as values and as text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from infra.engine_args import memory_estimate as memories
from infra.engine_args.compatibility import Member, compare
from infra.engine_args.memory_estimate import GIB, Memory
from infra.engine_args.rules import Context, Finding, check
from infra.recipes.catalogue import Recipe


class Advice(NamedTuple):
    name: str
    findings: list[Finding]
    memory: Memory | None


def advise(recipe: Recipe, context: Context) -> Advice:
    """Findings on one file in the given circumstances."""
    memory = None
    if context.shape and context.gpu_bytes and context.role != "encode":
        length = context.model_len or recipe.args.max_seq_len or context.shape.max_len
        memory = memories.estimate(
            recipe.args, context.shape, context.gpu_bytes, length=length, draft_bytes=context.draft_bytes
        )
    return Advice(recipe.name, check(recipe.args, context), memory)


def between(recipes: Sequence[tuple[Recipe, Context]]) -> list[Finding]:
    """Findings on what the files of one set disagree about."""
    return compare([Member(recipe.name, context.role, recipe.model, recipe.args) for recipe, context in recipes])


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def lines(advice: Advice) -> list[str]:
    """One line per finding, the fix under it, the memory last."""
    told = [line for finding in advice.findings for line in told_of(finding)]
    if not told:
        told = ["  nothing to say"]
    if advice.memory is not None:
        told.append(f"  memory (estimate): {told_memory(advice.memory)}")
    return [f"{advice.name}", *told]


def told_of(finding: Finding) -> tuple[str, str]:
    return (
        f"  {finding.level:7} {finding.rule}  {finding.where}: {finding.message}",
        f"               fix: {finding.fix}",
    )


def told_memory(memory: Memory) -> str:
    used = (
        f"weights {memory.weights / GIB:.1f} + reserve {memory.reserve / GIB:.1f} of {memory.gpu / GIB:.1f} GiB per GPU"
    )
    return (
        f"{used}; "
        f"KV pool {memory.pool / GIB:.1f} GiB = {memory.sequences} contexts of {memory.length} tokens "
        f"({memory.blocks} blocks of {memory.block_size})"
    )
