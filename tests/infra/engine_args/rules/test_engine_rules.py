"""The advisor: each rule is seen to find what it is for, and to be silent otherwise."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.engine_args.memory_estimate import shape_of
from penstock.infra.engine_args.rules import RULES, check
from penstock.infra.engine_args.rules.parallelism import moe_backend
from penstock.infra.engine_args.rules.rule import Context, Finding
from penstock.infra.engine_args.rules.steps import acceptance, best_length, speed_up
from penstock.infra.engine_args.tree import BadArguments, decode, merge
from penstock.launch.recipes.advice import EngineConfig, compare
from tests.properties import examples

GIB = 1 << 30
TINY = {
    "num_hidden_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 65536,
}  # fmt: skip
DENSE = shape_of(TINY)
MIXED = shape_of(TINY | {"num_local_experts": 64, "moe_intermediate_size": 512})
WINDOWED = shape_of(TINY | {"sliding_window": 512, "sliding_window_pattern": 6})
MOVES = {"backend": "UCX", "max_tokens_in_buffer": 8192, "kv_transfer_timeout_ms": 60000}

GOOD: dict[str, dict[str, Any]] = {
    "aggregated": {"max_batch_size": 128, "max_num_tokens": 8192, "max_seq_len": 8192},
    "prefill": {
        "max_batch_size": 8, "max_num_tokens": 8192, "max_seq_len": 8192, "disable_overlap_scheduler": True,
        "cache_transceiver_config": MOVES,
    },
    "decode": {
        "max_batch_size": 128, "max_num_tokens": 1024, "max_seq_len": 8192, "cache_transceiver_config": MOVES,
    },
    "encode": {"kv_cache_config": {"free_gpu_memory_fraction": 0.1}},
}  # fmt: skip
EAGLE = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "owner/draft"}


def findings(role: str, over: dict[str, Any], **context: Any) -> list[Finding]:
    return check(decode(merge(GOOD[role], over)), Context(role=role, **context))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", GOOD)
def test_sound_arguments_are_not_criticised(role: str) -> None:
    assert findings(role, {}, shape=DENSE, gpus=1, gpu_bytes=80 * GIB, model_len=8192, router_block_size=32) == []


TP8 = {"tensor_parallel_size": 8}
DEP8 = {**TP8, "moe_expert_parallel_size": 8, "enable_attention_dp": True}
WIDE = {"tensor_parallel_size": 16, "moe_expert_parallel_size": 16, "enable_attention_dp": True}


def slots(number: int) -> dict[str, Any]:
    return {**WIDE, "moe_config": {"backend": "WIDEEP", "load_balancer": {"num_slots": number}}}


def windows(*sizes: int) -> dict[str, Any]:
    return {"kv_cache_config": {"max_attention_window": list(sizes)}}


def spec(**fields: Any) -> dict[str, Any]:
    return {"speculative_config": fields}


# (rule, level, role, arguments, circumstances); each differs from sound arguments by one fault.
CASES: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("A01", "error", "aggregated", {"tensor_parallel_size": 4}, {"gpus": 8}),
    ("A01", "error", "aggregated", {"backend": "_autodeploy", "world_size": 2}, {"gpus": 8}),
    ("A02", "error", "aggregated", {**TP8, "moe_expert_parallel_size": 8, "moe_tensor_parallel_size": 2}, {}),
    ("A02", "error", "aggregated", {**TP8, "moe_expert_parallel_size": 3}, {}),
    ("A02", "error", "aggregated", {"tensor_parallel_size": 128, "moe_expert_parallel_size": 128}, {"shape": MIXED}),
    ("A03", "error", "aggregated", {"tensor_parallel_size": 16}, {"nodes": 2}),
    ("A03", "error", "aggregated", {"tensor_parallel_size": 16, "gpus_per_node": 4}, {"nodes": 2}),
    ("A04", "error", "aggregated", {"tensor_parallel_size": 3}, {"shape": DENSE}),
    ("A04", "warning", "aggregated", TP8, {"shape": DENSE}),
    ("A05", "error", "aggregated", {"enable_attention_dp": True}, {}),
    ("A05", "warning", "aggregated", {**TP8, "attention_dp_config": {}}, {}),
    ("A06", "error", "aggregated", {"backend": "_autodeploy", **TP8}, {}),
    ("A06", "error", "aggregated", {"backend": "_autodeploy", "max_beam_width": 4}, {}),
    ("A10", "error", "aggregated", {**WIDE, "enable_attention_dp": False, "moe_config": {"backend": "WIDEEP"}}, {}),
    ("A10", "error", "aggregated", {**WIDE, "moe_expert_parallel_size": 8, "moe_config": {"backend": "WIDEEP"}}, {}),
    ("A10", "warning", "aggregated", {**DEP8, "moe_config": {"backend": "WIDEEP"}}, {}),
    ("A11", "error", "aggregated", {"moe_config": {"backend": "TRTLLM"}}, {"shape": MIXED, "blackwell": False}),
    ("A11", "warning", "aggregated", {"moe_config": {"backend": "CUTLASS"}}, {"shape": DENSE}),
    ("A11", "warning", "aggregated", {**WIDE, "moe_config": {"backend": "CUTLASS"}},
     {"shape": MIXED, "blackwell": True}),
    ("A12", "error", "aggregated", slots(66), {"shape": MIXED}),
    ("A12", "error", "aggregated", slots(48), {"shape": MIXED}),
    ("A12", "warning", "aggregated", {"moe_config": {"backend": "CUTLASS", "load_balancer": {"num_slots": 64}}}, {}),
    ("A12", "error", "aggregated", {**WIDE, "moe_config": {"backend": "WIDEEP", "load_balancer": "x.yaml"}},
     {"missing": frozenset(["x.yaml"])}),
    ("A13", "warning", "aggregated", {"moe_config": {"use_low_precision_moe_combine": True}}, {"shape": MIXED}),
    ("A20", "warning", "aggregated", {"kv_cache_config": {"free_gpu_memory_fraction": 0.97}}, {}),
    ("A20", "warning", "aggregated", {**DEP8, "kv_cache_config": {"free_gpu_memory_fraction": 0.9}}, {}),
    ("A20", "warning", "encode", {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}}, {}),
    ("A21", "error", "aggregated",
     {"kv_cache_config": {"enable_block_reuse": False, "event_buffer_max_size": 100000}}, {}),
    ("A21", "warning", "aggregated", {"kv_cache_config": {"event_buffer_max_size": 1024}}, {}),
    ("A22", "error", "aggregated", {"kv_cache_config": {"tokens_per_block": 64}}, {"router_block_size": 32}),
    ("A22", "warning", "aggregated", {"kv_cache_config": {"tokens_per_block": 8}}, {}),
    ("A22", "warning", "aggregated", {"kv_cache_config": {"tokens_per_block": 256}}, {}),
    ("A22", "warning", "aggregated", {"max_num_tokens": 9600, "kv_cache_config": {"tokens_per_block": 48}}, {}),
    ("A23", "error", "decode", {"cache_transceiver_config": {"max_tokens_in_buffer": 4096}}, {}),
    ("A23", "error", "prefill", {"cache_transceiver_config": {"max_tokens_in_buffer": 8193}}, {}),
    ("A23", "error", "decode", {"cache_transceiver_config": {"max_tokens_in_buffer": None}}, {}),
    ("A24", "error", "decode", {"cache_transceiver_config": {"backend": None}}, {}),
    ("A24", "error", "prefill", {"cache_transceiver_config": None}, {}),
    ("A24", "warning", "decode", {"cache_transceiver_config": {"backend": "DEFAULT"}}, {}),
    ("A24", "warning", "decode", {"cache_transceiver_config": {"kv_transfer_timeout_ms": None}}, {}),
    ("A24", "warning", "aggregated", {"cache_transceiver_config": MOVES}, {}),
    ("A25", "error", "aggregated", windows(512, 4096), {}),
    ("A25", "error", "aggregated", windows(*[8192] * 13), {"shape": DENSE}),
    ("A25", "error", "aggregated", windows(512, 512, 8192), {"shape": WINDOWED}),
    ("A25", "error", "aggregated", windows(512, 8192), {"shape": DENSE}),
    ("A26", "error", "aggregated", {"kv_cache_config": {"dtype": "fp7"}}, {}),
    ("A27", "warning", "aggregated", {"enable_chunked_prefill": True, "kv_cache_config": {"host_cache_size": GIB}}, {}),
    ("A30", "error", "aggregated", {"enable_chunked_prefill": True}, {"model_len": 16384}),
    ("A30", "error", "aggregated", {"max_seq_len": 131072, "enable_chunked_prefill": True}, {"shape": DENSE}),
    ("A31", "error", "prefill", {"max_num_tokens": 4096}, {}),
    ("A31", "error", "prefill", {"max_num_tokens": 8200}, {}),
    ("A31", "warning", "aggregated", {"max_num_tokens": 8200}, {}),
    ("A32", "error", "decode", {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}, {}),
    ("A32", "warning", "aggregated", {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}, {}),
    ("A32", "warning", "aggregated", {"scheduler_config": {"capacity_scheduler_policy": "STATIC_BATCH"}}, {}),
    ("A33", "warning", "aggregated", {"enable_chunked_prefill": True, "pipeline_parallel_size": 2}, {}),
    ("A34", "error", "prefill", {"disable_overlap_scheduler": False}, {}),
    ("A34", "warning", "decode", {"disable_overlap_scheduler": True}, {}),
    ("A34", "warning", "decode", spec(**EAGLE, eagle3_one_model=False), {}),
    ("A35", "error", "decode", {"max_beam_width": 2}, {}),
    ("A35", "error", "aggregated", {"max_beam_width": 2, **spec(**EAGLE)}, {}),
    ("A36", "error", "decode", {"cuda_graph_config": {"batch_sizes": [1, 128], "max_batch_size": 64}}, {}),
    ("A36", "warning", "decode", {"cuda_graph_config": {"batch_sizes": [1, 128]}}, {}),
    ("A36", "warning", "decode", {"cuda_graph_config": {"batch_sizes": [1, 64], "enable_padding": True}}, {}),
    ("A36", "warning", "aggregated", {"cuda_graph_config": {"batch_sizes": [256], "enable_padding": True}}, {}),
    ("A36", "warning", "decode", {"cuda_graph_config": None}, {}),
    ("A36", "error", "decode", {"max_num_tokens": 128, "cuda_graph_config": {"max_batch_size": 128},
                                **spec(decoding_type="MTP")}, {}),
    ("A37", "warning", "aggregated", {"num_postprocess_workers": 2}, {}),
    ("A37", "warning", "aggregated", {"stream_interval": 10}, {}),
    ("A37", "error", "aggregated", {"enable_iter_req_stats": True}, {}),
    ("A40", "warning", "prefill", {"max_batch_size": 256}, {}),
    ("A40", "warning", "prefill", {"max_num_tokens": 1024, "enable_chunked_prefill": True}, {}),
    ("A41", "warning", "decode", {"max_batch_size": 8}, {}),
    ("A41", "warning", "decode", {"max_num_tokens": 64}, {}),
    ("A50", "error", "aggregated", spec(decoding_type="Eagle", speculative_model="x/y"), {}),
    ("A50", "error", "aggregated", spec(decoding_type="Eagle", max_draft_len=3), {}),
    ("A50", "error", "aggregated", spec(**EAGLE, speculative_model_dir="x"), {}),
    ("A50", "error", "aggregated", spec(decoding_type="NGram", max_draft_len=3), {}),
    ("A50", "error", "aggregated", spec(decoding_type="Medusa"), {}),
    ("A50", "error", "aggregated", spec(decoding_type="MTP", max_draft_len=3), {}),
    ("A50", "error", "aggregated", spec(decoding_type="MTP"), {"shape": DENSE}),
    ("A50", "error", "aggregated", spec(**EAGLE, draft_len_schedule={4: 1}), {}),
    ("A50", "error", "aggregated", spec(**EAGLE, use_dynamic_tree=True), {}),
    ("A51", "error", "aggregated", spec(**EAGLE), {"missing": frozenset(["owner/draft"])}),
    ("A51", "error", "aggregated", spec(**EAGLE),
     {"shape": DENSE, "draft": msgspec.structs.replace(DENSE, vocab=32001)}),
    ("A51", "warning", "aggregated", spec(**EAGLE),
     {"shape": DENSE, "draft": msgspec.structs.replace(DENSE, hidden=512)}),
    ("A52", "error", "aggregated", {"pipeline_parallel_size": 2, **spec(**EAGLE)}, {}),
    ("A52", "error", "aggregated", {"sampler_type": "TRTLLMSampler", **spec(decoding_type="MTP")}, {}),
    ("A52", "error", "decode", {}, {"logits_processors": True}),
    ("A52", "error", "aggregated", {"enable_lora": True}, {}),
    ("A53", "warning", "aggregated", spec(**EAGLE), {"accepted": (30000, 2000)}),
    ("A60", "error", "aggregated", {}, {"shape": DENSE, "gpu_bytes": GIB}),
    ("A60", "error", "aggregated", {"kv_cache_config": {"max_tokens": 64}}, {"shape": DENSE, "gpu_bytes": 80 * GIB}),
    ("A62", "error", "aggregated", {"guided_decoding_backend": "xgrammar",
     "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}, {}),
    ("A61", "error", "aggregated", {"enable_chunked_prefill": True}, {"version": "1.2.0"}),
    ("A61", "warning", "aggregated", windows(512, 8192), {"container": "0.5.1"}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "level", "role", "over", "context"), CASES)
def test_a_fault_is_found_by_its_rule_and_comes_with_a_fix(
    rule: str, level: str, role: str, over: dict[str, Any], context: dict[str, Any]
) -> None:
    found = findings(role, over, **context)
    mine = [finding for finding in found if finding.rule == rule and finding.level == level]
    assert mine, found
    assert all(finding.fix and finding.message and finding.where for finding in mine)
    assert [finding.level for finding in found] == sorted((finding.level for finding in found), key="error".__ne__)


def test_every_rule_has_a_case_a_number_and_a_line_of_its_own() -> None:
    numbers = [rule.number for rule in RULES]
    assert numbers == sorted(set(numbers))
    assert {case[0] for case in CASES} == set(numbers)
    assert all(rule.about.endswith((".", ")")) and rule.rows for rule in RULES)


def test_a_version_without_known_faults_is_not_criticised() -> None:
    assert findings("aggregated", {"enable_chunked_prefill": True}, version="1.2.1") == []
    assert findings("aggregated", windows(512, 8192), container="0.5.0") == []


def test_the_fix_of_a_small_buffer_is_accepted() -> None:
    (finding,) = findings("decode", {"cache_transceiver_config": {"max_tokens_in_buffer": 64}}, longest_prompt=8190)
    proposed = int(finding.fix.rpartition(" ")[2])
    assert (
        findings("decode", {"cache_transceiver_config": {"max_tokens_in_buffer": proposed}}, longest_prompt=8190) == []
    )
    assert proposed == 8192


def test_windows_in_the_model_s_own_pattern_are_accepted_also_if_it_does_not_divide_the_layers() -> None:
    shape = shape_of(TINY | {"num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6})
    assert findings("aggregated", windows(*[512] * 5, 8192), shape=shape) == []
    assert findings("aggregated", windows(*[512] * 5, 8192, *[512] * 5, 8192), shape=shape) == []
    assert findings("aggregated", windows(*[512] * 4, 8192), shape=shape)


@pytest.mark.parametrize(
    ("ranks", "attention_dp", "blackwell", "bits", "backend"),
    [
        (16, True, True, 4.5, "WIDEEP"), (32, True, False, 8, "WIDEEP"), (16, False, True, 4.5, "TRTLLM"),
        (8, True, True, 4.5, "CUTLASS"), (8, False, True, 4.5, "TRTLLM"), (8, False, False, 8, "CUTLASS"),
        (8, False, True, 16, "CUTLASS"),
    ],
)  # fmt: skip
def test_the_moe_back_end_follows_mapping_gpu_and_format(
    ranks: int, attention_dp: bool, blackwell: bool, bits: float, backend: str
) -> None:
    assert moe_backend(ranks=ranks, attention_dp=attention_dp, blackwell=blackwell, bits=bits) == backend


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 4))
def test_a_mapping_is_sound_only_if_its_product_is_the_gpus(tp: int, gpus: int, pp: int) -> None:
    found = findings("aggregated", {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}, gpus=gpus)
    assert ("A01" in {finding.rule for finding in found}) == (tp * pp != gpus)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(-1, 16), st.integers(-1, 16))
def test_expert_ranks_are_sound_only_if_they_fill_the_tensor_ranks(tp: int, moe_tp: int, ep: int) -> None:
    sizes = {"tensor_parallel_size": tp, "moe_tensor_parallel_size": moe_tp, "moe_expert_parallel_size": ep}
    found = findings("aggregated", sizes)
    given_tp, given_ep = moe_tp >= 1, ep >= 1
    sound = (
        moe_tp * ep == tp if given_tp and given_ep else tp % moe_tp == 0 if given_tp else not given_ep or tp % ep == 0
    )
    assert ("A02" not in {finding.rule for finding in found}) == sound


# Draft length -------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.integers(1, 8))
def test_the_acceptance_of_one_token_gives_the_recorded_share_again(rate: float, length: int) -> None:
    share = sum(rate**place for place in range(1, length + 1)) / length
    found = acceptance(share, length)
    assert sum(found**place for place in range(1, length + 1)) / length == pytest.approx(share, abs=1e-6)


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.floats(0.005, 0.5))
def test_better_acceptance_never_shortens_the_draft(one: float, two: float, cost: float) -> None:
    worse, better = sorted((one, two))
    assert best_length(worse, cost) <= best_length(better, cost)


@given(st.floats(0, 0.99), st.floats(0.005, 0.5))
def test_the_best_length_is_best(rate: float, cost: float) -> None:
    best = best_length(rate, cost)
    assert all(speed_up(rate, best, cost) >= speed_up(rate, other, cost) for other in range(17))
    assert speed_up(rate, best, cost) >= 1


@pytest.mark.parametrize(
    ("accepted", "fix"),
    [(25000, None), (5500, "lower it to 2"), (3000, "lower it to 1"), (500, "remove speculative_config")],
)
def test_poor_acceptance_shortens_the_draft_and_in_the_end_removes_it(accepted: int, fix: str | None) -> None:
    found = findings("aggregated", spec(**EAGLE), accepted=(30000, accepted))
    assert [finding.fix[: len(fix or "")] for finding in found] == ([fix] if fix else [])


def test_a_few_recorded_tokens_say_nothing() -> None:
    assert findings("aggregated", spec(**EAGLE), accepted=(30, 0)) == []


# Several engines ----------------------------------------------------------------------------------------------------


def engine(role: str, over: dict[str, Any], model: str = "m") -> EngineConfig:
    return EngineConfig(role, role, model, decode(merge(GOOD[role], over)))  # type: ignore[arg-type]


def test_a_prefill_and_a_decode_engine_that_agree_are_not_criticised() -> None:
    assert compare([engine("prefill", {}), engine("decode", {}), engine("encode", {})]) == []


@pytest.mark.parametrize(
    ("rule", "prefill", "decode_"),
    [
        ("C01", windows(512, 8192), windows(1024, 8192)),
        ("C01", windows(512, 8192), {}),
        ("C02", {"kv_cache_config": {"tokens_per_block": 64}}, {}),
        ("C03", {}, {"kv_cache_config": {"dtype": "fp8"}}),
        ("C04", {"cache_transceiver_config": {"backend": "NIXL"}}, {}),
        ("C05", {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ("C06", {"max_seq_len": 9000}, {}),
        ("C10", {"cache_transceiver_config": {"max_tokens_in_buffer": 16384}}, {}),
        ("C11", {}, spec(decoding_type="MTP")),
    ],
)
def test_what_two_engines_disagree_about_is_found(rule: str, prefill: dict[str, Any], decode_: dict[str, Any]) -> None:
    found = compare([engine("prefill", prefill), engine("decode", decode_)])
    assert [finding.rule for finding in found] == [rule]


def test_windows_of_an_aggregated_engine_must_agree_too() -> None:
    engines = [engine(role, windows(512, 8192)) for role in ("prefill", "decode")]
    assert [f.rule for f in compare([*engines, engine("aggregated", windows(256, 8192))])] == ["C01"]


def test_different_models_one_half_and_the_same_twice_are_found() -> None:
    assert [f.rule for f in compare([engine("prefill", {}), engine("decode", {}, model="n")])] == ["C07"]
    assert [f.rule for f in compare([engine("prefill", {})])] == ["C08"]
    assert [f.rule for f in compare([engine("aggregated", {}), engine("aggregated", {})])] == ["C09"]


@examples(30)
@given(st.permutations([engine("prefill", windows(512, 8192)), engine("decode", {}), engine("aggregated", {})]))
def test_the_order_of_files_does_not_matter(engines: list[EngineConfig]) -> None:
    assert [f.rule for f in compare(engines)] == ["C01"]


@examples(150)
@given(st.sampled_from(CASES), st.sampled_from(CASES))
def test_two_faults_together_are_judged_too(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    try:
        args = decode(merge(merge(GOOD[one[2]], one[3]), two[3]))
    except BadArguments:
        return  # AutoDeploy's keys, or two kinds of speculation mixed
    for finding in check(args, Context(role=one[2], **(two[4] | one[4]))):
        assert finding.fix
        assert finding.level in ("error", "warning")
