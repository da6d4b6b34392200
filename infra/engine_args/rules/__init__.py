"""Which engine arguments go wrong together, and which only go slowly: pure rules over arguments and circumstances.

An *error* is what TensorRT-LLM 1.2.1 refuses, or what would dead-lock, corrupt or starve later; a *warning* is advice.
Each finding carries its rule's number (stable, never reused) and what to do. What is unknown (no model, no GPU given)
is not judged.

One module a question; each lists its own ``RULES``, and here they stand together by number.
"""

from collections.abc import Iterable

from infra.engine_args.rules import (
    batching,
    disaggregation,
    features,
    kv_cache,
    memory,
    moe,
    parallelism,
    scheduling,
    speculation,
)
from infra.engine_args.rules.base import Context, Finding, Level, Role, Rule, up
from infra.engine_args.schema import EngineArgs

__all__ = ["RULES", "Context", "Finding", "Level", "Role", "Rule", "check", "up"]

_QUESTIONS = (
    parallelism,
    moe,
    memory,
    kv_cache,
    disaggregation,
    batching,
    scheduling,
    speculation,
    features,
)
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for each in _QUESTIONS for rule in each.RULES), key=lambda rule: rule.number)
)


def check(args: EngineArgs, context: Context, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """What is wrong, errors first, then in the order of the rules."""
    found = [finding for rule in rules for finding in rule.find(args, context)]
    return sorted(found, key=lambda finding: finding.level != "error")
