import pytest

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.mock import MockOptions, build
from penstock.workers.engines.mock.executor import decode_seconds, prefill_seconds, step_seconds

CAPACITY = 16_384 * 64


def scheduled(prompt: int, start: int, count: int, known: int | None = None) -> ScheduledSequence:
    known = prompt if known is None else known
    sequence = Sequence("k", [1] * known, prompt, Sampling(), Stop(99), 0, [], b"")
    return ScheduledSequence(sequence, start, count, start + count == known)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(8192, 169.14), (64, 17.5)])
def test_prefill_costs_what_the_reference_says(tokens: int, milliseconds: float) -> None:
    assert prefill_seconds(1, 0, tokens) * 1e3 == pytest.approx(milliseconds, abs=0.03)
    assert prefill_seconds(1, 100_000, tokens) == prefill_seconds(1, 0, tokens)


def test_means_are_cut_to_whole_tokens_before_they_are_summed() -> None:
    # Two sequences, 3 + 4 tokens cached, 5 + 6 new: 2 * (floor(18 / 2) - floor(7 / 2)) = 12.
    assert prefill_seconds(2, 7, 11) == prefill_seconds(1, 0, 12)


@pytest.mark.parametrize(("share", "milliseconds"), [(1e-6, 5.74), (0.5, 26.31), (1.0, 34.01), (2.0, 34.01)])
def test_decode_depends_on_how_full_the_pool_is(share: float, milliseconds: float) -> None:
    assert decode_seconds(max(1, int(share * CAPACITY)), CAPACITY) * 1e3 == pytest.approx(milliseconds, abs=0.01)


def test_nothing_to_do_takes_no_time() -> None:
    assert prefill_seconds(0, 0, 0) == decode_seconds(0, CAPACITY) == step_seconds([], CAPACITY) == 0


def test_a_step_is_its_prefill_and_its_decode() -> None:
    chunk, last, decode = scheduled(500, 0, 300), scheduled(500, 300, 200), scheduled(50, 60, 1, known=61)
    assert step_seconds([chunk], CAPACITY) == prefill_seconds(1, 0, 300)
    assert step_seconds([last], CAPACITY) == prefill_seconds(1, 300, 200), "the first token comes out of the prefill"
    assert step_seconds([decode], CAPACITY) == decode_seconds(61, CAPACITY)
    assert step_seconds([chunk, decode], CAPACITY) == step_seconds([chunk], CAPACITY) + step_seconds([decode], CAPACITY)


def test_generated_tokens_computed_again_cost_no_prefill() -> None:
    resumed = scheduled(50, 32, 29, known=61)  # 18 prompt tokens, 11 generated ones
    assert step_seconds([resumed], CAPACITY) == prefill_seconds(1, 32, 18) + decode_seconds(61, CAPACITY)


def test_the_engine_waits_so_long_divided_by_the_speedup() -> None:
    waited: list[float] = []
    engine = build(MockOptions(vocab_size=99, total_blocks=100, block_size=10, speedup=4), sleep=waited.append)
    engine.submit(SequenceRequest("k", [1] * 64, Sampling(), Stop(2)))
    while engine.has_work():
        engine.step()
    assert waited == [prefill_seconds(1, 0, 64) / 4, decode_seconds(65, 1000) / 4]


def test_speedup_zero_never_waits() -> None:
    engine = build(MockOptions(vocab_size=99, speedup=0), sleep=lambda seconds: pytest.fail("waited"))
    engine.submit(SequenceRequest("k", [1] * 64, Sampling(), Stop(2)))
    while engine.has_work():
        engine.step()
    assert engine.stats().prompt_tokens == 64
