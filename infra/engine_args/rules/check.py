"""Rules for combinations of engine arguments: which fail, and which are only slow. Pure.

An *error* is what TensorRT-LLM 1.2.1 refuses, or what would deadlock, corrupt or starve later; a *warning* is advice.
Each finding has its rule's number (stable, never reused) and a fix. A rule is skipped if what it needs is unknown (no
model or GPU given).

Each module answers one question and lists its ``RULES``; ``RULES`` here has all of them by number.
"""

from collections.abc import Iterable

from penstock.infra.engine_args.rules import (
    batching,
    disaggregation,
    features,
    kv_cache,
    memory,
    moe,
    parallelism,
    speculation,
    steps,
)
from penstock.infra.engine_args.rules.base import Context, Finding, Level, Role, Rule, up
from penstock.infra.engine_args.schema import EngineArgs

__all__ = ["RULES", "Context", "Finding", "Level", "Role", "Rule", "check", "up"]

_MODULES = (
    parallelism,
    moe,
    memory,
    kv_cache,
    disaggregation,
    batching,
    steps,
    speculation,
    features,
)
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for each in _MODULES for rule in each.RULES), key=lambda rule: rule.number)
)


def check(args: EngineArgs, context: Context, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """All findings, errors first, then in the order of the rules."""
    findings = [finding for rule in rules for finding in rule.find(args, context)]
    return sorted(findings, key=lambda finding: finding.level != "error")
