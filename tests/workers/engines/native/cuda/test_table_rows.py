"""Block tables on the device follow the sequences' lists."""

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.sequence import Sequence
from penstock.workers.engines.native.cuda.packing import TableRows

WIDTH = 8


def sequence(blocks: list[int], rows: list[int] | None = None, **sampling: object) -> Sequence:
    made = Sequence(object(), [1], 1, Sampling(**sampling), Stop(max_tokens=1), 0, [], b"")  # type: ignore[arg-type]
    made.blocks, made.rows = blocks, rows or []
    return made


def changes(table_rows: TableRows) -> dict[int, int]:
    return dict(zip(*table_rows.take_changes(), strict=True))


def test_only_new_blocks_are_sent() -> None:
    table_rows, one = TableRows(3, WIDTH), sequence([5, 6])
    start = table_rows.of(one).index * WIDTH
    assert changes(table_rows) == {start: 5, start + 1: 6}
    one.blocks.append(7)
    table_rows.of(one)
    assert changes(table_rows) == {start + 2: 7}
    table_rows.of(one)
    assert changes(table_rows) == {}


def test_after_a_preemption_all_blocks_are_sent_again() -> None:
    table_rows, one = TableRows(3, WIDTH), sequence([5, 6])
    start = table_rows.of(one).index * WIDTH
    table_rows.take_changes()
    one.blocks = [9]
    table_rows.of(one)
    assert changes(table_rows) == {start: 9}


def test_table_rows_of_ended_sequences_are_given_to_others() -> None:
    table_rows = TableRows(2, WIDTH)
    ended = [sequence([1]), sequence([2])]
    taken = {table_rows.of(each).index for each in ended}
    for each in ended:
        each.blocks = []
    assert {table_rows.of(sequence([3])).index, table_rows.of(sequence([4])).index} == taken


def test_rows_of_sliding_windows_are_in_a_second_table() -> None:
    table_rows, one = TableRows(3, WIDTH, sliding=True), sequence([5, 6, 7], [-1, 2])
    first = table_rows.of(one).index * WIDTH
    second = 3 * WIDTH + first
    assert changes(table_rows) == {first: 5, first + 1: 6, first + 2: 7, second: 0, second + 1: 2}
    one.rows.append(4)
    table_rows.of(one)
    assert changes(table_rows) == {second + 2: 4}
    one.rows = [-1, -1, 3]
    table_rows.of(one)
    assert changes(table_rows) == {second: 0, second + 1: 0, second + 2: 3}


def test_shifts_of_positions_are_behind_the_tables_and_sent_with_a_new_row() -> None:
    shifts = {5: -3, 7: 0}
    table_rows = TableRows(2, WIDTH, sliding=True, shift=lambda sequence: shifts[sequence.blocks[0]])
    one, other = sequence([5], [1]), sequence([7], [2])
    for each, shift in ((one, -3), (other, 0)):
        index = table_rows.of(each).index
        assert changes(table_rows)[2 * 2 * WIDTH + index] == shift
    one.blocks = []
    shifts[9] = -1  # in the row of the first, whose shift must not stay
    index = table_rows.of(sequence([9], [1])).index
    assert changes(table_rows)[2 * 2 * WIDTH + index] == -1


def test_how_tokens_are_drawn_is_known_once() -> None:
    table_rows = TableRows(15, WIDTH)
    assert table_rows.of(sequence([1], temperature=0.0)).plain
    assert not table_rows.of(sequence([1], temperature=0.0)).random
    drawn = table_rows.of(sequence([1], temperature=0.7))
    assert (drawn.plain, drawn.random) == (True, True)
    assert not drawn.cut
    for limit in ({"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
        cut = table_rows.of(sequence([1], temperature=0.7, **limit))
        assert (cut.plain, cut.cut, cut.adjusted) == (False, True, False)
    both = table_rows.of(sequence([1], temperature=0.7, top_k=4, presence_penalty=1.0))
    assert (both.plain, both.cut, both.adjusted) == (False, True, True)
    assert table_rows.of(sequence([1], temperature=0.0, top_k=4)).plain, "greedy tokens need no filter"
    assert not table_rows.of(sequence([1], temperature=0.0, presence_penalty=1.0)).plain
    assert not table_rows.of(sequence([1], temperature=0.0, logprobs=1)).plain
