from types import SimpleNamespace
from typing import Any

from penstock.schemas.tokens import Logprob
from penstock.workers.engines.external.sequences import MISSING, scores

PROMPT = [5, 6, 7, 8]


def entry(**values: tuple[float, int | None]) -> dict[int, Any]:
    return {int(token[1:]): SimpleNamespace(logprob=value, rank=rank) for token, (value, rank) in values.items()}


ENTRIES = [
    entry(t6=(-0.5, 1), t9=(-1.5, 2)),
    entry(t7=(-3.0, 40), t9=(-0.1, 1), t1=(-2.0, 2)),
    entry(t3=(-0.25, 1)),
    entry(t4=(-0.25, 1)),  # of the first token of the answer
]


def test_each_prompt_token_has_its_own_value_and_the_best() -> None:
    assert scores(ENTRIES, PROMPT, 1, 2) == [
        Logprob(-0.5, ((6, -0.5), (9, -1.5)), 1),
        Logprob(-3.0, ((9, -0.1), (1, -2.0)), 40),
        Logprob(MISSING, ((3, -0.25),), 0),
    ]
    assert scores(ENTRIES, PROMPT, 2, 0) == [Logprob(-3.0, (), 40), Logprob(MISSING, (), 0)]


def test_a_rank_that_the_engine_does_not_report_is_not_invented() -> None:
    assert scores([entry(t6=(-0.5, None))], PROMPT[:2], 1, 1) == [Logprob(-0.5, ((6, -0.5),), 0)]


def test_a_list_with_gaps_yields_nothing() -> None:
    """As of an engine that took a part of the prompt from its cache: the values cannot be assigned to tokens."""
    assert scores(ENTRIES[:2], PROMPT, 1, 1) == []
    assert scores(ENTRIES[:3], PROMPT, 1, 1) != []
