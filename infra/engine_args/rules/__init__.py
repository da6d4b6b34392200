"""Rules for combinations of engine arguments: which fail, and which are only slow. Pure.

An *error* is what TensorRT-LLM 1.2.1 refuses, or what would deadlock, corrupt or starve later; a *warning* is advice.
Each finding has its rule's number (stable, never reused) and a fix. A rule is skipped if what it needs is unknown (no
model or GPU given).

Each module lists its rules by the question that they answer; ``RULES`` here has all of them by number.
"""

from collections.abc import Iterable

from penstock.infra.engine_args.rules import features, parallelism, steps
from penstock.infra.engine_args.rules.rule import Context, Finding, Rule
from penstock.infra.engine_args.schema import EngineArgs

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *parallelism.PARALLELISM_RULES,
            *parallelism.MOE_RULES,
            *features.MEMORY_RULES,
            *features.KV_CACHE_RULES,
            *features.DISAGGREGATION_RULES,
            *steps.BATCHING_RULES,
            *steps.SCHEDULING_RULES,
            *steps.SPECULATION_RULES,
            *features.FEATURE_RULES,
        ),
        key=lambda rule: rule.number,
    )
)


def check(args: EngineArgs, context: Context, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """All findings, errors first, then in the order of the rules."""
    findings = [finding for rule in rules for finding in rule.find(args, context)]
    return sorted(findings, key=lambda finding: finding.level != "error")
