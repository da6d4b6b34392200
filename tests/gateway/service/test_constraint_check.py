"""Verdicts about constraints: which are remembered, and for how many bytes."""

import pytest

from penstock.gateway.apis.chat.constraint import Wanted
from penstock.gateway.grammars.calls import Tool
from penstock.gateway.service.constraint_check import REMEMBERED_BYTES, ConstraintCheck
from penstock.infra.constraints.trials import TOO_LONG, Trial, TrialsBusy
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import CONSTRAINT, Constraint


class Trials:
    """Answers in order, and counts."""

    def __init__(self, *answers: Trial | TrialsBusy) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def of(self, constraint: Constraint, tenant: str) -> Trial:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, TrialsBusy):
            raise answer
        return answer


def checking(trials: Trials) -> ConstraintCheck:
    return ConstraintCheck(trials)  # type: ignore[arg-type]


SCHEMA = Constraint("json_schema", "{}")
FIELD = "response_format.json_schema.schema"


def wanted(constraint: Constraint) -> Wanted:
    return Wanted(constraint, FIELD, (CONSTRAINT,))


async def test_a_verdict_about_time_is_never_remembered() -> None:
    trials = Trials(Trial(TOO_LONG, lasting=False), Trial())
    check = checking(trials)
    with pytest.raises(ServingError) as refusal:
        await check.check(wanted(SCHEMA), "a", FIELD)
    assert (refusal.value.code, refusal.value.param) == (Code.invalid_request, FIELD)
    await check.check(wanted(SCHEMA), "a", FIELD)


async def test_a_grammar_of_a_tool_that_cannot_be_compiled_is_named() -> None:
    check = checking(Trials(Trial("invalid regex")))
    tool = Tool("apply", {"type": "object"}, True, Constraint("regex", "(?=a)"))
    with pytest.raises(ServingError, match=r"tool 'apply', format\.definition: invalid regex") as refusal:
        await check.check(wanted(SCHEMA)._replace(tools=(tool,)), "a", FIELD)
    assert (refusal.value.code, refusal.value.param) == (Code.invalid_request, "tools")


@pytest.mark.parametrize("reason", ["", "uniqueItems is not supported"])
async def test_a_verdict_about_the_constraint_is_remembered(reason: str) -> None:
    trials = Trials(Trial(reason))
    check = checking(trials)
    for _ in range(3):
        if reason:
            with pytest.raises(ServingError, match="uniqueItems"):
                await check.check(wanted(SCHEMA), "a", FIELD)
        else:
            await check.check(wanted(SCHEMA), "a", FIELD)
    assert trials.asked == 1


async def test_a_full_queue_is_503_with_a_time_to_come_again() -> None:
    trials = Trials(TrialsBusy("too many constraints wait", 2.0), Trial())
    check = checking(trials)
    with pytest.raises(ServingError) as refusal:
        await check.check(wanted(SCHEMA), "a", FIELD)
    assert (refusal.value.code.status, refusal.value.retry_after) == (503, 2.0)
    await check.check(wanted(SCHEMA), "a", FIELD)


async def test_verdicts_are_bounded_by_bytes() -> None:
    check = checking(Trials(Trial("x" * 500)))
    for number in range(2_000):
        with pytest.raises(ServingError):
            await check.check(wanted(Constraint("regex", str(number))), "a", FIELD)
    assert check._reasons.size_bytes <= REMEMBERED_BYTES
    assert len(check._reasons) < 1_000
