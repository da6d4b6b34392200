"""The roofline estimate: near what was measured, and right where arithmetic alone decides."""

import msgspec
import pytest

from penstock.infra.engine_args.memory_estimate import UnknownShape
from penstock.launch.recipes.catalogue import known_shape
from penstock.measure.profile.roofline import (
    GPUS,
    Efficiency,
    Mapping,
    RooflineEngine,
    fits,
    mappings,
    most,
    roofline_profile,
)
from penstock.planner.capacity import EngineTiming
from tests.penstock.measure.profile.accuracy import EXPERTS, LLAMA, MIXTURE, engine, rows

LLAMA_8B = known_shape("meta-llama/Llama-3.1-8B-Instruct")
DEEPSEEK = known_shape("deepseek-ai/DeepSeek-R1")
assert LLAMA_8B is not None
assert DEEPSEEK is not None


def test_an_8b_model_in_bf16_is_near_what_was_measured() -> None:
    errors = {row.what: row.error for row in rows() if row.what.startswith("8B,")}
    assert len(errors) > 15
    limits = {what: 0.25 if "512 × 128" in what else 0.13 for what in errors}  # short prompts share a step
    assert {what: error for what, error in errors.items() if abs(error) >= limits[what]} == {}


def test_other_models_are_off_by_no_more_than_the_docs_say() -> None:
    errors = {row.what: row.error for row in rows() if not row.what.startswith("8B,")}
    eight_bits = [error for what, error in errors.items() if what.startswith("8B fp8")]
    small = [error for what, error in errors.items() if what.startswith("0.3B")]  # of the time per token
    experts = [error for what, error in errors.items() if what.startswith("Qwen3-30B")]
    limits = {"fp8": (eight_bits, 0.09, 0.27), "0.3B": (small, -0.34, -0.1), "experts": (experts, -0.36, 0.47)}
    assert [name for name, (found, low, high) in limits.items() if min(found) < low or max(found) > high] == []


def test_a_decode_step_of_one_sequence_reads_all_weights_once() -> None:
    ideal = Efficiency(memory=1.0, blend=50.0, step_ms=0.0)
    own = msgspec.structs.replace(engine(LLAMA), efficiency=ideal)
    weights = 2 * (8.03e9 - 128256 * 4096)  # the input's embeddings are looked up
    assert own.step_ms(1, 1) == pytest.approx(weights / 4.8e9, rel=0.01)
    assert own.step_ms(1, 100_001) - own.step_ms(1, 1) == pytest.approx(100_000 * 131_072 / 4.8e9, rel=0.01)


def test_ranks_share_weights_and_pay_for_it_with_exchanges() -> None:
    one, two = (RooflineEngine(LLAMA_8B, GPUS["H200"], Mapping(tp=tp)) for tp in (1, 2))
    assert one.step_ms(8, 1000) / 2 < two.step_ms(8, 1000) < one.step_ms(8, 1000)
    slow = RooflineEngine(LLAMA_8B, GPUS["L40S"], Mapping(tp=2))
    alone = RooflineEngine(LLAMA_8B, GPUS["L40S"], Mapping())
    assert slow.prefill_ms(8000) > alone.prefill_ms(8000) * 0.6  # PCIe


def test_pipeline_stages_add_memory_and_no_speed() -> None:
    one, staged = (RooflineEngine(LLAMA_8B, GPUS["H200"], Mapping(pp=pp)) for pp in (1, 2))
    assert staged.sequences(4500) > 2 * one.sequences(4500)
    assert staged.prefill_ms(4000) >= one.prefill_ms(4000)
    assert staged.step_ms(2, 1000) == pytest.approx(one.step_ms(1, 1000), rel=0.05)


def test_what_does_not_fit_says_why() -> None:
    assert "weights of 627 GiB a GPU do not fit into 140 GiB" in fits(
        RooflineEngine(DEEPSEEK, GPUS["H200"], Mapping()), 4500
    )
    assert "no context of" in fits(RooflineEngine(LLAMA_8B, GPUS["L40S"], Mapping()), 1_000_000)
    eight = RooflineEngine(DEEPSEEK, GPUS["H200"], Mapping(tp=8, ep=8, attention_dp=True))
    assert fits(eight, 4500) == ""
    assert most(eight, 4500) >= 8


def test_a_mixture_without_its_experts_per_token_is_refused() -> None:
    with pytest.raises(UnknownShape, match="num_experts_per_tok"):
        engine(MIXTURE, **{**EXPERTS, "num_experts_per_tok": None}).step_ms(1, 100)


def test_dense_models_try_tensor_ranks_and_stages_and_mixtures_experts() -> None:
    assert [each.name for each in mappings(LLAMA_8B, 4)] == ["tp1", "tp1pp2", "tp2", "tp2pp2", "tp4"]
    assert [each.name for each in mappings(DEEPSEEK, 4)] == ["tp1", "tep2", "dep2", "tep4", "dep4"]


def test_an_estimated_profile_gives_the_estimates_back() -> None:
    own = RooflineEngine(LLAMA_8B, GPUS["H200"], Mapping(tp=2))
    timing = EngineTiming(roofline_profile(own, isl=4000, osl=500))
    assert timing.prefill_ms(4000) == pytest.approx(own.prefill_ms(4000), rel=1e-3)
    assert timing.itl_ms(4250, 32) == pytest.approx(own.step_ms(32, 4250), rel=0.02)
    assert timing.most(4500) == most(own, 4500)
