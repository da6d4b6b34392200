"""What a sweep sends: levels, presets, and flags that override them."""

import json
from pathlib import Path

import pytest

from penstock.measure.sweep.workload import (
    LEVELS,
    PRESETS,
    BadDataset,
    LoadLevel,
    RecordedConversation,
    Workload,
    WorkloadFlags,
    described,
    levels_of,
    read_conversations,
    workload_of,
)


def test_levels_are_sorted_each_once_with_three_requests_per_connection_and_at_least_ten() -> None:
    levels = levels_of(WorkloadFlags(concurrency=(50, 1, 2, 50)))
    assert levels == [
        LoadLevel("concurrency", 1, 10),
        LoadLevel("concurrency", 2, 10),
        LoadLevel("concurrency", 50, 150),
    ]
    assert [each.folder for each in levels] == ["c1", "c2", "c50"]
    assert tuple(int(each.value) for each in levels_of(WorkloadFlags())) == LEVELS


def test_a_rate_lasts_a_minute_and_a_trace_as_long_as_it_is() -> None:
    assert levels_of(WorkloadFlags(rate=(2.5, 0.1))) == [LoadLevel("rate", 0.1, 10), LoadLevel("rate", 2.5, 150)]
    assert levels_of(WorkloadFlags(trace="t", speed=(4.0, 1.0)), 7) == [
        LoadLevel("speed", 1.0, 7),
        LoadLevel("speed", 4.0, 7),
    ]
    assert [each.folder for each in levels_of(WorkloadFlags(rate=(2.5,)))] == ["r2.5"]


@pytest.mark.parametrize(
    ("preset", "workload", "first"),
    [
        ("none", Workload(isl=2000, isl_stddev=10.0, osl=256), 1),
        ("shared-prefix", Workload(isl=4000, isl_stddev=200.0, osl=128, shared_prefix=0.8, prefixes=8), 10),
        ("long-context", Workload(isl=32_000, isl_stddev=2000.0, osl=256), 1),
        ("multimodal", Workload(isl=200, isl_stddev=20.0, osl=128, images=1), 1),
    ],
)
def test_presets(preset: str, workload: Workload, first: int) -> None:
    flags = WorkloadFlags(preset=preset)  # type: ignore[arg-type]
    assert workload_of(flags) == workload
    assert levels_of(flags)[0].value == first


def test_a_flag_wins_over_the_preset_also_when_it_is_zero() -> None:
    found = workload_of(WorkloadFlags(preset="shared-prefix", isl=100, isl_stddev=0.0, shared_prefix=0.0))
    assert (found.isl, found.isl_stddev, found.shared_prefix, found.osl) == (100, 0.0, 0.0, 128)
    assert len(PRESETS) == 4


def test_a_shorter_prompt_has_a_presets_deviation_in_proportion() -> None:
    short = workload_of(WorkloadFlags(preset="shared-prefix", isl=100))
    assert (short.isl, short.isl_stddev, short.shared_prefix) == (100, 5.0, 0.8)
    assert workload_of(WorkloadFlags(preset="shared-prefix", isl=100, isl_stddev=20.0)).isl_stddev == 20.0
    assert described(short) == (
        "prompts of 100 ± 5 tokens, 80% of them one of 8 common texts; answers of 128 ± 0 tokens"
    )
    assert "nothing of them common" in described(Workload())


def test_conversations_are_read_in_the_form_of_sharegpt(tmp_path: Path) -> None:
    said = [
        ("gpt", "left out: nobody asked"),
        ("system", "be brief"),
        ("human", "left out: no answer"),
        ("human", "hello"),
        ("gpt", "hi"),
        ("human", "and?"),
        ("gpt", "no"),
        ("human", "left out, too"),
    ]
    recorded = [
        {"id": "x", "conversations": [{"from": speaker, "value": value} for speaker, value in said]},
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    expected = [RecordedConversation((("hello", "hi"), ("and?", "no")), "be brief")]
    array, lines = tmp_path / "a.json", tmp_path / "b.jsonl"
    array.write_text(json.dumps(recorded))
    lines.write_text("\n".join(map(json.dumps, recorded)) + "\n")
    assert read_conversations(array) == read_conversations(lines) == expected
    for text, message in (("[]", "no conversation"), ("{", "a conversation is"), ("[[1]]", "a conversation is")):
        array.write_text(text)
        with pytest.raises(BadDataset, match=message):
            read_conversations(array)
    with pytest.raises(BadDataset, match="No such file"):
        read_conversations(tmp_path / "none")
