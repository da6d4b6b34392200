"""The benchmark of the transport measures what it says, and its bytes are right."""

from importlib.util import find_spec

import pytest

from infra.bench.handoff import Settings, measure, report

pytestmark = pytest.mark.skipif(
    not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed (pip install nixl-cu12)"
)


def test_both_orders_are_measured_and_the_ratios_are_of_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    figures = measure(block_bytes=16384, blocks=12, rounds=3)
    assert [(each.order, each.blocks, each.block_bytes) for each in figures] == [
        ("run", 12, 16384),
        ("scattered", 12, 16384),
    ]
    for each in figures:
        assert each.ratio == pytest.approx(each.bare_ms / each.ours_ms)
        assert each.checked_ratio == pytest.approx(each.bare_ms / each.checked_ms)
        assert each.bare_mb_per_s == pytest.approx(12 * 16384 / 1e3 / each.bare_ms)
    report(figures)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_default_is_a_prompt_of_4000_tokens() -> None:
    assert Settings().blocks * 32 == 4000
    assert Settings().block_bytes[0] == 8 * 2 * 32 * 2 * 64 * 4
