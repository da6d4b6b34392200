from pathlib import Path

import pytest

from penstock.measure.simulation.trace import Multipliers, RequestTrace, TraceError, TraceRow, multiplied, read

TRACE = RequestTrace(
    "t",
    (
        TraceRow(1000, 1200, 5, (1, 2, 3)),
        TraceRow(3000, 1100, 7, (1, 2, 4)),
        TraceRow(4000, 600, 7, (9, 10)),
    ),
)


def shared(a: TraceRow, b: TraceRow) -> int:
    n = 0
    while n < min(len(a.hash_ids), len(b.hash_ids)) and a.hash_ids[n] == b.hash_ids[n]:
        n += 1
    return n


def test_units_are_cut_into_blocks_and_times_start_at_zero() -> None:
    first, second, third = TRACE.requests(64, speed=2.0)
    assert [each.arrival_ns for each in (first, second, third)] == [0, 1_000_000_000, 1_500_000_000]
    assert len(first.keys) == 1200 // 64
    assert first.keys[:16] == second.keys[:16]
    assert first.keys[16] != second.keys[16]
    assert len(set(first.keys)) == len(first.keys)


def test_a_block_size_that_does_not_divide_the_unit_is_refused() -> None:
    with pytest.raises(TraceError, match="512 tokens cannot be cut into blocks of 48"):
        TRACE.requests(48)


def test_a_longer_prefix_is_shared_by_the_same_requests() -> None:
    first, second, third = multiplied(TRACE, Multipliers(prefix_multiplier=2.0)).rows
    assert shared(first, second) == 4
    assert first.input_length == 2048 + 1200 - 1024
    assert shared(first, third) == 0


def test_more_roots_deal_requests_out_to_separate_trees() -> None:
    first, second, _third = multiplied(TRACE, Multipliers(root_multiplier=2)).rows
    assert shared(first, second) == 0
    assert first.input_length == 1200


def test_longer_prompts_grow_behind_the_shared_prefix() -> None:
    first, second, third = multiplied(TRACE, Multipliers(prompt_multiplier=3.0)).rows
    assert first.input_length == 1024 + 3 * 176
    assert shared(first, second) == 2
    assert third.input_length == 1800
    assert len(third.hash_ids) == 4


def test_prompts_above_the_limit_are_left_out() -> None:
    assert len(multiplied(TRACE, Multipliers(max_prompt_tokens=1100)).rows) == 2
    with pytest.raises(TraceError, match="no prompt has at most 10 tokens"):
        multiplied(TRACE, Multipliers(max_prompt_tokens=10))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no requests"),
        ('{"timestamp": 0}\n', ":1: Object missing required field"),
        ('\n{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', ":2: input_length"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=error):
        read(path)


def test_a_file_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    line = '{"timestamp": %d, "input_length": 700, "output_length": 3, "hash_ids": [4, 5]}\n'
    path.write_text(line % 50 + "\n" + line % 7)
    trace = read(path)
    assert (trace.name, [row.timestamp for row in trace.rows]) == ("some", [7, 50])
