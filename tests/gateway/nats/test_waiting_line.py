"""The order in which submissions get the places of a full queue."""

import asyncio

from penstock.gateway.nats.submissions import OF_TENANT, WaitingLine
from penstock.schemas.requests import Priority

INTERACTIVE, STANDARD, _ = Priority


async def test_tenants_take_turns_and_of_a_tenant_the_first_is_first() -> None:
    line = WaitingLine()
    turns = {name: line.enter(STANDARD, name[0]) for name in ("a1", "a2", "a3", "b1")}

    def admitted() -> set[str]:
        return {name for name, turn in turns.items() if turn is not None and turn.done()}

    line.admit(STANDARD, 2)
    assert admitted() == {"a1", "b1"}
    line.admit(STANDARD, 1)
    assert admitted() == {"a1", "b1", "a2"}
    line.admit(STANDARD, 5)
    assert (len(line), len(admitted())) == (0, 4)


async def test_places_of_one_class_are_not_anothers() -> None:
    line = WaitingLine()
    turn = line.enter(STANDARD, "a")
    line.admit(INTERACTIVE, 10)
    assert turn is not None
    assert not turn.done()


async def test_a_tenant_with_many_keeps_no_other_out_and_who_waited_before_is_first() -> None:
    line = WaitingLine()
    turns = [line.enter(STANDARD, "a") for _ in range(OF_TENANT)]
    assert line.enter(STANDARD, "a") is None
    assert line.enter(STANDARD, "b") is not None
    first = line.enter(STANDARD, "a", again=True)
    line.admit(STANDARD, 1)
    assert first is not None
    assert first.done()
    assert not any(turn is not None and turn.done() for turn in turns)


async def test_a_submission_that_was_given_up_takes_no_place() -> None:
    line = WaitingLine()
    gone, next_one = line.enter(STANDARD, "a"), line.enter(STANDARD, "a")
    assert isinstance(gone, asyncio.Future)
    assert next_one is not None
    gone.cancel()
    line.admit(STANDARD, 1)
    assert next_one.done()
