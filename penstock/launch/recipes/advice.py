"""Advice on a file of engine arguments, or on a set: findings and a memory estimate, as values and as text.

In a set, arguments must agree between engines that hand off KV to each other or serve one model together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.infra.engine_args import memory_estimate
from penstock.infra.engine_args.memory_estimate import GIB, GpuMemory
from penstock.infra.engine_args.rules import check
from penstock.infra.engine_args.rules.rule import Context, EngineRole, Finding, Level, up
from penstock.infra.engine_args.schema import EngineArgs
from penstock.launch.recipes.catalogue import Recipe


class EngineConfig(NamedTuple):
    """The arguments of one engine of a set."""

    name: str
    role: EngineRole
    model: str
    args: EngineArgs


# Rule, argument, its value, and the consequence of a difference. All engines of a set with a KV cache must agree.
_EQUAL: tuple[tuple[str, str, Callable[[EngineArgs], object], str], ...] = (
    ("C01", "kv_cache_config.max_attention_window", lambda a: a.kv_cache_config.max_attention_window,
     "layers would keep different tokens of the same context"),
    ("C02", "kv_cache_config.tokens_per_block", lambda a: a.kv_cache_config.tokens_per_block,
     "blocks would not be the same blocks"),
    ("C03", "kv_cache_config.dtype", lambda a: a.kv_cache_config.dtype, "cached values would be misread"),
)  # fmt: skip


def compare(engines: Sequence[EngineConfig]) -> list[Finding]:
    """Findings about the engines of one set; errors first."""
    findings = [*_equal(engines)]
    prefills = [engine for engine in engines if engine.role == "prefill"]
    decodes = [engine for engine in engines if engine.role == "decode"]
    for prefill in prefills:
        for decode in decodes:
            findings += [Finding(*each) for each in _handoff(prefill, decode)]
    if len({(engine.role, repr(engine.args)) for engine in engines}) < len(engines):
        findings.append(Finding("C09", "warning", "files", "the same engine is given twice", "give each once"))
    if bool(prefills) != bool(decodes):
        have, lack = ("prefill", "decode") if prefills else ("decode", "prefill")
        findings.append(Finding("C08", "warning", "role", f"{have} without {lack}", f"add the {lack} recipe"))
    return sorted(findings, key=lambda finding: finding.level != "error")


def _equal(engines: Sequence[EngineConfig]) -> Iterator[Finding]:
    cached = [engine for engine in engines if engine.role != "encode"]
    if len({engine.model for engine in cached}) > 1:
        names = ", ".join(f"{engine.name}: {engine.model}" for engine in cached)
        yield Finding("C07", "error", "model", f"different models ({names})", "serve one model per set")
        return
    for rule, where, read, breaks in _EQUAL:
        if len({repr(read(engine.args)) for engine in cached}) > 1:
            values = ", ".join(f"{engine.name}: {_short(read(engine.args))}" for engine in cached)
            yield Finding(rule, "error", where, f"differs ({values}): {breaks}", "use the same value for all")


def _short(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _handoff(prefill: EngineConfig, decode: EngineConfig) -> Iterator[tuple[str, Level, str, str, str]]:
    one, two = prefill.args, decode.args
    first, second = one.cache_transceiver_config, two.cache_transceiver_config
    if (first and first.backend) != (second and second.backend):
        yield (
            "C04", "error", "cache_transceiver_config.backend",
            f"{prefill.name} uses {first and first.backend}, {decode.name} {second and second.backend}",
            "set the same on both sides",
        )  # fmt: skip
    if one.pipeline_parallel_size > 1 and two.tensor_parallel_size > 1:
        yield (
            "C05", "error", "pipeline_parallel_size",
            "prefill with PP handing off to decode with TP may hang (known issue of 1.2)", "use TP or EP for prefill",
        )  # fmt: skip
    if one.max_seq_len and two.max_seq_len and two.max_seq_len < one.max_seq_len:
        yield (
            "C06", "error", "max_seq_len",
            f"{prefill.name} accepts {one.max_seq_len} tokens, {decode.name} only {two.max_seq_len}",
            f"raise decode's to {one.max_seq_len}",
        )  # fmt: skip
    if first and second and first.max_tokens_in_buffer != second.max_tokens_in_buffer:
        larger = max(first.max_tokens_in_buffer or 0, second.max_tokens_in_buffer or 0)
        yield (
            "C10", "warning", "cache_transceiver_config.max_tokens_in_buffer",
            f"{first.max_tokens_in_buffer} and {second.max_tokens_in_buffer} tokens: the smaller one decides",
            f"use {up(larger, one.kv_cache_config.tokens_per_block)} on both sides",
        )  # fmt: skip
    if _drafts(one) != _drafts(two):
        yield (
            "C11", "warning", "speculative_config",
            f"{prefill.name} has {_drafts(one)}, {decode.name} {_drafts(two)}: their caches may have different layers",
            "use the same speculation on both sides",
        )  # fmt: skip


def _drafts(args: EngineArgs) -> str:
    """The draft whose layers are in the cache besides the target's."""
    speculation = args.speculative_config
    return (
        "no draft" if speculation is None else f"{speculation.__struct_config__.tag} ({speculation.draft_model or '-'})"
    )


class Advice(NamedTuple):
    name: str
    findings: list[Finding]
    memory: GpuMemory | None


def advise(recipe: Recipe, context: Context) -> Advice:
    """Findings about one file in the given context."""
    memory = None
    if context.shape and context.gpu_bytes and context.role != "encode":
        length = context.model_len or recipe.args.max_seq_len or context.shape.max_len
        memory = memory_estimate.estimate(
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


def memory_line(memory: GpuMemory) -> str:
    used = (
        f"weights {memory.weights / GIB:.1f} + reserve {memory.reserve / GIB:.1f} of {memory.gpu / GIB:.1f} GiB per GPU"
    )
    return (
        f"{used}; "
        f"KV pool {memory.pool / GIB:.1f} GiB = {memory.sequences} contexts of {memory.length} tokens "
        f"({memory.blocks} blocks of {memory.block_size})"
    )
