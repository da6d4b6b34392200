"""Plans become rows of a batch for the kernels of CUDA."""

from collections.abc import Sequence as Seq

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.engine_protocol import MediaSpan
from penstock.workers.engines.native.cuda.packing import (
    UNKNOWN,
    Packed,
    Packing,
    PromptChunk,
    TableRows,
    packed_step,
    unpacked_step,
)
from tests.properties import examples

TABLE_ROWS, SPARE = 9, 9


def sequence(key: int, known: int, prompt: int, draft: Seq[int] = (), *, random: bool = False) -> Sequence:
    sampling = Sampling(temperature=0.5 if random else 0.0)
    made = Sequence(key, [100 * key + n for n in range(known)], prompt, sampling, Stop(max_tokens=50), 0, [], b"")
    made.blocks = [key * 10 + n for n in range(8)]
    made.draft = draft
    return made


def packing(*, by_position: bool = False, singles: int = 1, media_tokens: int = 0) -> Packing:
    return Packing(
        TableRows(TABLE_ROWS, 16),
        tile_rows=4,
        singles=singles,
        spare=SPARE,
        media_tokens=media_tokens,
        by_position=by_position,
    )


def tiled(packed: Packed) -> list[tuple[int, int, int]]:
    """Row, position and table row of each row of the tiles, by row."""
    return sorted(
        (row + n, position + n, table_row) for row, position, count, table_row in packed.tiles for n in range(count)
    )


def test_single_tokens_come_before_chunks_of_prompts() -> None:
    prompt, running = sequence(1, 6, 6), sequence(2, 4, 3)
    packed = packing().pack([ScheduledSequence(prompt, 0, 6, True), ScheduledSequence(running, 3, 1, True)])
    assert packed.tokens == [203, 100, 101, 102, 103, 104, 105]
    assert packed.positions == [3, 0, 1, 2, 3, 4, 5]
    assert packed.decodes == 1
    assert not packed.single
    assert sorted(packed.tiles) == [(1, 0, 4, packed.table_rows[1]), (5, 4, 2, packed.table_rows[1])]
    assert packed.tiles[0][1] == 4, "the longest first"
    assert packed.drawn == [0, 6]
    assert [packed.draws[n].sequence for n in packed.order] == [prompt, running], "tokens return in the plan's order"


def test_a_token_that_the_step_before_draws_is_left_to_the_device() -> None:
    running = sequence(1, 4, 3)
    packed = packing().pack([ScheduledSequence(running, 4, 1, True)])
    assert packed.tokens == [UNKNOWN]
    assert packed.single
    assert packed.draws[0].length == 5


def test_a_token_is_drawn_behind_each_proposed_one_and_none_is_kept_for_the_next_step() -> None:
    running, plain = sequence(1, 4, 3, draft=[7, 8]), sequence(2, 5, 3)
    packed = packing().pack([ScheduledSequence(running, 3, 3, True), ScheduledSequence(plain, 4, 1, True)])
    assert packed.single
    assert packed.tokens == [103, 7, 8, 204]
    assert packed.positions == [3, 4, 5, 4]
    assert [draw.length for draw in packed.draws] == [4, 5, 6, 5]
    assert [draw.target for draw in packed.draws] == [SPARE, SPARE, SPARE, packed.table_rows[3]]
    assert packed.order == [0, 1, 2, 3]


def test_a_draft_model_catches_up_without_a_tile() -> None:
    running = sequence(1, 5, 3)
    packed = packing(singles=2).pack([ScheduledSequence(running, 3, 2, True)])
    assert packed.single
    assert packed.drawn == [1]


def test_images_and_scores_find_their_rows() -> None:
    seen, scored = sequence(1, 6, 6), sequence(2, 5, 5)
    seen.media = (MediaSpan(2, 3, b"", (5,)),)
    scored.score = 2
    plan = [ScheduledSequence(seen, 0, 6, True), ScheduledSequence(scored, 0, 5, True)]
    packed = packing(media_tokens=4).pack(plan, scoring=[plan[1]])
    assert packed.media == [(2, 20), (3, 21), (4, 22)]
    assert [packed.positions[row] for row in packed.scored] == [1, 2, 3], "a row scores the token behind it"
    assert all(packed.tokens[row] >= 200 for row in packed.scored)
    assert not packed.single


def test_rows_before_the_end_of_the_last_medium_have_positions_of_their_own() -> None:
    seen, text = sequence(1, 12, 12), sequence(2, 5, 5)
    seen.media = (MediaSpan(2, 3, b"", (5,)), MediaSpan(7, 2, b"", (6,)))
    rows = TableRows(TABLE_ROWS, 16, shift=lambda _: -2)
    shifted = Packing(rows, tile_rows=4, singles=1, spare=SPARE, media_tokens=4)
    packed = shifted.pack([ScheduledSequence(text, 0, 5, True), ScheduledSequence(seen, 5, 7, True)])
    assert packed.placed == [(5, seen, 5, 9)]
    alone = shifted.pack([ScheduledSequence(seen, 5, 1, False)])  # text between two media
    assert (alone.placed, alone.media, alone.single) == ([(0, seen, 5, 6)], [], False)
    behind = shifted.pack([ScheduledSequence(seen, 9, 1, False)])
    assert (behind.placed, behind.single) == ([], True)
    assert packing(media_tokens=4).pack([ScheduledSequence(seen, 5, 1, False)]).single, "plain positions"


def test_by_position_the_last_token_of_a_prompt_goes_to_a_tile_and_recomputed_answers_do_not() -> None:
    last, preempted = sequence(1, 6, 6), sequence(2, 7, 4)
    packed = packing(by_position=True).pack(
        [ScheduledSequence(last, 5, 1, True), ScheduledSequence(preempted, 0, 7, True)]
    )
    assert packed.positions[: packed.decodes] == [4, 5, 6]
    assert [position for _, position, _ in tiled(packed)] == [5, 0, 1, 2, 3]
    assert [packed.positions[packed.drawn[n]] for n in packed.order] == [5, 6]


@st.composite
def plans(draw: st.DrawFn) -> list[ScheduledSequence]:
    plan = []
    for key in range(1, draw(st.integers(1, 5)) + 1):
        prompt = draw(st.integers(1, 12))
        known = prompt + draw(st.integers(0, 6))
        start = draw(st.integers(0, known - 1))
        count = draw(st.integers(1, known - start))
        samples = start + count == known
        draft: list[int] = []
        if samples and count == 1:
            draft = draw(st.lists(st.integers(900, 999), max_size=3))
        made = sequence(key, known, prompt, draft)
        plan.append(ScheduledSequence(made, start, count + len(draft), samples))
    return plan


@examples(120)
@given(plans(), st.booleans())
def test_each_token_has_one_row_and_each_draw_follows_its_token(
    plan: list[ScheduledSequence], by_position: bool
) -> None:
    made = packing(by_position=by_position)
    packed = made.pack(plan)
    table_rows = {scheduled.sequence: made._table_rows.of(scheduled.sequence).index for scheduled in plan}
    rows = sorted(zip(packed.table_rows, packed.positions, packed.tokens, strict=True))
    wanted = []
    for sequence_, start, count, _ in map(astuple, plan):
        tokens = [*sequence_.tokens, *sequence_.draft][start : start + count]
        wanted += [(table_rows[sequence_], start + n, token) for n, token in enumerate(tokens)]
    assert rows == sorted(wanted)
    covered = [(row, packed.positions[row], packed.table_rows[row]) for row in range(packed.decodes, len(rows))]
    assert tiled(packed) == covered, "tiles cover what is not decoded, and nothing else"
    drawn = [(packed.draws[n].sequence, packed.draws[n].length) for n in packed.order]
    asked = [
        (scheduled.sequence, scheduled.start + scheduled.count - back)
        for scheduled in plan
        if scheduled.samples
        for back in range(len(scheduled.sequence.draft), -1, -1)
    ]
    assert drawn == asked
    for row, draw in zip(packed.drawn, packed.draws, strict=True):
        assert (packed.table_rows[row], packed.positions[row]) == (table_rows[draw.sequence], draw.length - 1)
    if by_position:
        for row in range(len(rows)):
            (owner,) = (each for each, table_row in table_rows.items() if table_row == packed.table_rows[row])
            assert (row < packed.decodes) == (packed.positions[row] >= owner.prompt_len)


numbers = st.lists(st.integers(-1, 2**31 - 1), max_size=9)
chunks = st.builds(PromptChunk, *([st.integers(0, 2**31 - 1)] * 4))


@given(st.builds(
    Packed,
    tokens=numbers, table_rows=numbers, positions=numbers, decodes=st.integers(0, 9), drawn=numbers, scored=numbers,
    tiles=st.lists(st.tuples(*([st.integers(0, 2**31 - 1)] * 4)), max_size=4),
    long=st.lists(st.lists(chunks, min_size=1, max_size=3).map(tuple), max_size=3),
), st.tuples(numbers, numbers), st.booleans())  # fmt: skip
@examples(50)
def test_another_rank_gets_the_same_step(packed: Packed, changes: tuple[list[int], list[int]], eager: bool) -> None:
    found, changed, eagerly = unpacked_step(packed_step(packed, changes, eager=eager))
    packed.slots = [-1] * len(packed.tokens)
    assert (found, changed, eagerly) == (packed, changes, eager)
