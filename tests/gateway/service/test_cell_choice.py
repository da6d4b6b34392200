"""The choice of a cell: what its router answers, else the loads of its workers; and the nearest cell."""

import msgspec

from penstock.gateway.service.cell_choice import CONSIDERED, NEAREST, UNSEEN_S, CellChoice, beginnings_of
from penstock.schemas.cells import CellCost, CellLoads, ModelLoad, TargetLoad
from tests.workers.support import BLOCK, request

MODEL = "m"
SHORT, LONG = 200, 4096  # tokens
ALL = (0, 1, 2)


def loads(*uncomputed: int, held: int = 0, work_ns: int = 0) -> CellLoads:
    return CellLoads("router", (ModelLoad(MODEL, held, tuple(map(TargetLoad, uncomputed)), work_ns),))


def choice_of(cells: int, nearest: int) -> CellChoice:
    """All workers are idle."""
    choice = CellChoice(cells, nearest)
    for cell in range(cells):
        choice.observe(cell, loads(0, 0))
    return choice


def test_without_load_requests_stay_near() -> None:
    assert CellChoice(3, 1).choose(MODEL, SHORT, ALL) == 1
    choice = choice_of(3, 1)
    assert [choice.choose(MODEL, SHORT, ALL) for _ in range(4)] == [1, 1, 1, 1]


def test_a_loaded_cell_is_left_when_another_is_better_by_more_than_the_preference() -> None:
    choice = choice_of(3, 1)
    for _ in range(2):
        choice.observe(1, loads(int(NEAREST / 2), int(NEAREST)))
        assert choice.choose(MODEL, SHORT, ALL) == 1, "one of its workers has little to do"
        choice.observe(1, loads(int(2 * NEAREST), int(2 * NEAREST)))
        assert choice.choose(MODEL, SHORT, ALL) != 1


def test_a_cell_is_not_left_for_what_a_fast_engine_computes_before_its_load_is_known() -> None:
    """Otherwise all gateways go at once where nothing waited a moment ago."""
    choice, meanwhile = choice_of(2, 0), 20_000
    work_ns = round(UNSEEN_S * 1e9 / meanwhile)
    choice.observe(0, loads(int(0.9 * meanwhile), meanwhile, work_ns=work_ns))
    assert choice.choose(MODEL, SHORT, (0, 1)) == 0
    choice.observe(0, loads(int(1.1 * meanwhile), 2 * meanwhile, work_ns=work_ns))
    assert choice.choose(MODEL, SHORT, (0, 1)) == 1
    choice.observe(0, loads(int(2 * NEAREST), meanwhile, work_ns=50_000))
    assert choice.choose(MODEL, SHORT, (0, 1)) == 1, "a slow one would take long"
    choice.observe(1, loads(0, 0))
    choice.observe(0, loads(0, 0, held=int(4 * NEAREST), work_ns=work_ns))
    assert choice.choose(MODEL, SHORT, (0, 1)) == 1, "it has no room"
    answers = {0: CellCost(2 * NEAREST), 1: CellCost(0.0)}
    choice.observe(0, loads(0, 0, work_ns=work_ns))
    assert choice.choose(MODEL, LONG, (0, 1), answers) == 1, "what its router answers is new"


def test_what_was_sent_counts_until_the_router_has_counted_it() -> None:
    choice = choice_of(2, 0)
    assert {choice.choose(MODEL, LONG, (0, 1)) for _ in range(4)} == {0, 1}
    for cell in (0, 1):
        choice.observe(cell, loads(0, 0))
    assert choice.choose(MODEL, SHORT, (0, 1)) == 0


def test_what_is_held_counts_for_each_worker() -> None:
    choice = choice_of(2, 0)
    choice.observe(0, loads(0, 0, held=int(4 * NEAREST)))
    assert choice.choose(MODEL, SHORT, (0, 1)) == 1


def test_what_routers_answer_goes_before_what_is_known() -> None:
    choice = choice_of(3, 0)
    choice.observe(2, loads(10_000, 10_000))
    answers = {0: CellCost(2 * LONG), 1: CellCost(2 * LONG), 2: CellCost(512.0)}
    assert choice.choose(MODEL, LONG, ALL, answers) == 2, "it has the prompt's beginning"
    del answers[2]
    assert choice.choose(MODEL, LONG, ALL, answers) == 0


def test_a_cell_without_room_is_taken_when_all_have_none_and_then_the_one_that_holds_least() -> None:
    choice = choice_of(3, 0)
    full = {0: CellCost(full=True, held=90_000.0), 1: CellCost(full=True, held=3_000.0), 2: CellCost(80_000.0)}
    assert choice.choose(MODEL, LONG, ALL, full) == 2
    assert choice.choose(MODEL, LONG, (0, 1), full) == 1


def test_only_usable_cells_are_chosen_and_without_one_the_request_waits_near() -> None:
    choice = choice_of(3, 0)
    assert choice.choose(MODEL, SHORT, (2,)) == 2
    assert choice.choose(MODEL, SHORT, ()) == 0


def test_a_cell_with_room_takes_one_held_request_for_each_worker_without_a_prompt() -> None:
    choice = choice_of(3, 0)
    assert sorted(choice.room(MODEL, [LONG] * 9, (1, 2), stranded=False)) == [1, 1, 2, 2]
    assert choice.room(MODEL, [LONG], (1, 2), stranded=False) == [], "what was sent counts until it is known"


def test_a_cell_that_holds_requests_itself_takes_none_but_those_without_any_worker() -> None:
    choice = choice_of(2, 0)
    choice.observe(1, loads(0, 0, held=1))
    assert choice.room(MODEL, [LONG], (1,), stranded=False) == []
    assert choice.room(MODEL, [LONG], (1,), stranded=True) == [1]
    assert choice.room(MODEL, [LONG], (), stranded=True) == []


def test_of_many_cells_the_nearest_those_of_the_prompts_beginning_and_others_in_turn_are_compared() -> None:
    many = range(64)
    first, second = CellChoice(64, 3), CellChoice(64, 40)
    alike = [7, 64 + 8, 9]
    seen = [frozenset(choice.considered(alike, many)) for choice in (first, second) for _ in range(30)]
    assert {len(each) for each in seen} == {CONSIDERED}
    assert all({7, 8, 9} <= each for each in seen), "each gateway looks where such prompts went before"
    assert all(3 in each for each in seen[:30])
    assert all(40 in each for each in seen[30:])
    assert set().union(*seen) == set(many), "none is left idle beside a full one"
    assert 3 not in first.considered(alike, range(10, 64)), "the nearest is away"
    assert first.considered(alike, range(CONSIDERED)) == range(CONSIDERED)


def test_requests_of_a_session_and_prompts_that_begin_alike_are_compared_in_the_same_cells() -> None:
    one, longer, other = (request([*range(8 * BLOCK), *rest]) for rest in ((1,), range(99), range(99, 0, -1)))
    assert len(beginnings_of(one)) == 2
    assert beginnings_of(one) == beginnings_of(longer)[:2] == beginnings_of(other)[:2]
    assert beginnings_of(request(range(8, 8 + BLOCK))) != beginnings_of(one)[:1]
    turns = [msgspec.structs.replace(each, session="s") for each in (one, request(range(90, 99)))]
    assert beginnings_of(turns[0]) == beginnings_of(turns[1])
    assert beginnings_of(request((1,))) == []
