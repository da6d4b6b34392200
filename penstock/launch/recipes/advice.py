"""Advice on a file of engine arguments, or on a set: findings and a memory estimate, as values and as text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.infra.engine_args import memory_estimate as memories
from penstock.infra.engine_args.memory_estimate import GIB, Memory
from penstock.infra.engine_args.rules.base import Context, Finding
from penstock.infra.engine_args.rules.check import check
from penstock.launch.recipes.catalogue import Recipe
from penstock.launch.recipes.compatibility import EngineConfig, compare


class Advice(NamedTuple):
    name: str
    findings: list[Finding]
    memory: Memory | None


def advise(recipe: Recipe, context: Context) -> Advice:
    """Findings about one file in the given context."""
    memory = None
    if context.shape and context.gpu_bytes and context.role != "encode":
        length = context.model_len or recipe.args.max_seq_len or context.shape.max_len
        memory = memories.estimate(
            recipe.args, context.shape, context.gpu_bytes, length=length, draft_bytes=context.draft_bytes
        )
    return Advice(recipe.name, check(recipe.args, context), memory)


def check_set(recipes: Sequence[tuple[Recipe, Context]]) -> list[Finding]:
    """Findings about disagreements between the files of one set."""
    return compare([EngineConfig(recipe.name, context.role, recipe.model, recipe.args) for recipe, context in recipes])


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def lines(advice: Advice) -> list[str]:
    """One line per finding with its fix below, and the memory estimate last."""
    text = [line for finding in advice.findings for line in finding_lines(finding)]
    if not text:
        text = ["  no findings"]
    if advice.memory is not None:
        text.append(f"  memory (estimate): {memory_line(advice.memory)}")
    return [f"{advice.name}", *text]


def finding_lines(finding: Finding) -> tuple[str, str]:
    return (
        f"  {finding.level:7} {finding.rule}  {finding.where}: {finding.message}",
        f"               fix: {finding.fix}",
    )


def memory_line(memory: Memory) -> str:
    used = (
        f"weights {memory.weights / GIB:.1f} + reserve {memory.reserve / GIB:.1f} of {memory.gpu / GIB:.1f} GiB per GPU"
    )
    return (
        f"{used}; "
        f"KV pool {memory.pool / GIB:.1f} GiB = {memory.sequences} contexts of {memory.length} tokens "
        f"({memory.blocks} blocks of {memory.block_size})"
    )
