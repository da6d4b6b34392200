"""Arguments: who wins, what is dropped, what is refused and how to put it right."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.rules.rule import Context
from penstock.infra.engine_args.schema import EngineArgs, KvCacheConfig
from penstock.infra.engine_args.tree import BadArguments, merge, parse_json, parse_yaml
from penstock.workers.engines.trtllm import args
from penstock.workers.engines.trtllm.args import (
    SAMPLER,
    Installed,
    TrtllmSettings,
    defaults,
    encoder_arguments,
    layout,
    prune,
)

WORKER = WorkerSettings(engine="trtllm", block_size=32, max_running=64, max_batched_tokens=8000)


def wanted(**changes: Any) -> TrtllmSettings:
    """``changes``: of the worker's settings, or of what follows from them."""
    derived = {name: changes.pop(name) for name in [*changes] if name in TrtllmSettings._fields}
    return TrtllmSettings(msgspec.structs.replace(WORKER, **changes), 4096)._replace(**derived)


def resolve(want: TrtllmSettings, yaml: str = "", json: str = "", **more: Any) -> Any:
    return args.resolve(want, merge(parse_yaml(yaml), parse_json(json or "{}")), **more)


def resolved(yaml: str = "", json: str = "", context: Context | None = None, **changes: Any) -> Any:
    want = wanted(**changes)
    context = context or Context(role=want.worker.role, model_len=want.max_model_len, router_block_size=32)  # type: ignore[arg-type]
    return resolve(want, yaml, json, context=context)


def test_the_json_wins_over_the_yaml_and_that_over_ours_at_every_depth() -> None:
    found = resolved(
        "max_batch_size: 32\nkv_cache_config: {free_gpu_memory_fraction: 0.5, host_cache_size: 1000}\n",
        '{"kv_cache_config": {"host_cache_size": 2000}}',
    ).tree
    assert found["max_batch_size"] == 32
    assert found["max_num_tokens"] == 8000 // 32 * 32
    kv = found["kv_cache_config"]
    assert (kv["free_gpu_memory_fraction"], kv["host_cache_size"], kv["tokens_per_block"]) == (0.5, 2000, 32)


def test_what_nobody_mentions_is_left_to_the_engine() -> None:
    tree = resolved().tree
    assert "backend" not in tree
    assert "tensor_parallel_size" not in tree
    assert "cuda_graph_config" not in tree
    assert "cache_transceiver_config" not in tree


def test_with_an_export_endpoint_requests_are_measured_and_without_one_they_are_not() -> None:
    tree = resolved(otlp_endpoint="http://c:4317").tree
    assert (tree["otlp_traces_endpoint"], tree["return_perf_metrics"]) == ("http://c:4317", True)
    assert (
        resolved(json='{"return_perf_metrics": false}', otlp_endpoint="http://c:4317").tree["return_perf_metrics"]
        is False
    )
    assert resolved().tree.keys().isdisjoint({"otlp_traces_endpoint", "return_perf_metrics"})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_roles_that_hand_off_get_a_transceiver_with_room_for_the_longest_prompt(role: str) -> None:
    tree = resolved(role=role, max_model_len=4090, handoff_lease_s=12.5).tree
    assert tree["cache_transceiver_config"] == {
        "backend": "NIXL",
        "max_tokens_in_buffer": 4096,
        "kv_transfer_timeout_ms": 12500,
    }
    assert tree.get("disable_overlap_scheduler", False) is (role == "prefill")


def test_the_buffer_follows_a_longer_sequence_that_the_file_asks_for() -> None:
    found = resolve(wanted(role="decode"), "max_seq_len: 8000").tree
    assert found["cache_transceiver_config"]["max_tokens_in_buffer"] == 8000


@pytest.mark.parametrize(("asked", "given"), [("DEFAULT", "NIXL"), ("UCX", "UCX")])
def test_the_default_transport_is_named(asked: str, given: str) -> None:
    tree = resolved(f"cache_transceiver_config: {{backend: {asked}}}", role="decode").tree
    assert tree["cache_transceiver_config"]["backend"] == given
    assert tree["cache_transceiver_config"]["max_tokens_in_buffer"] == 4096


def test_kv_events_are_on_with_the_prefix_cache_and_can_be_switched_off() -> None:
    assert resolved().kv_events
    assert resolved().tree["kv_cache_config"]["event_buffer_max_size"] == 100_000
    assert not resolved(publish_events_and_metrics=False).kv_events
    assert not resolved(prefix_cache=False).kv_events
    assert not resolved("kv_cache_config: {event_buffer_max_size: 0}").kv_events
    with capture_logs() as lines:
        off = resolved("kv_cache_config: {enable_block_reuse: false}")
    assert not off.kv_events
    assert [line["event"] for line in lines if line["event"] == "kv_events_off"] == ["kv_events_off"]


@pytest.mark.parametrize(
    ("role", "yaml", "says"),
    [
        ("decode", "cache_transceiver_config: {max_tokens_in_buffer: 64}", "max_tokens_in_buffer"),
        ("prefill", "cache_transceiver_config: {max_tokens_in_buffer: null}", "max_tokens_in_buffer"),
        ("prefill", "disable_overlap_scheduler: false", "overlap scheduler"),
        ("prefill", "max_beam_width: 2", "one beam"),
        ("decode", "cache_transceiver_config: null", "cache_transceiver_config"),
        ("aggregated", "kv_cache_config: {tokens_per_block: 64}", "tokens_per_block"),
        ("aggregated", "max_batchsize: 3", "did you mean max_batch_size"),
        ("aggregated", "kv_cache_config: {fraction: 0.5}", "kv_cache_config.fraction"),
        ("aggregated", "scheduler_config: {dynamic_batch_config: {enable_batch_size_tuning: true}}", "dynamic_batch"),
        ("aggregated", "speculative_config: {decoding_type: Eagle, max_draft_len: 3}", "speculative_model"),
        ("aggregated", "speculative_config: {decoding_type: Medusa}", "TensorRT engines only"),
        ("aggregated", "pytorch_backend_config: {}", "top level"),
        ("aggregated", "backend: _autodeploy", "--trtllm-backend"),
        ("aggregated", "backend: tensorrt", "must be pytorch"),
        ("aggregated", "- 1", "mapping"),
        ("aggregated", "a: [", "YAML"),
        ("decode", "max_num_tokens: 100", "multiple"),
    ],
)
def test_what_would_dead_lock_or_fail_later_is_refused_with_its_fix(role: str, yaml: str, says: str) -> None:
    with pytest.raises(BadArguments) as error:
        resolved(yaml, role=role)
    assert says in str(error.value)


def test_a_draft_model_that_is_not_there_is_refused() -> None:
    speculation = "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model: ./gone}"
    with pytest.raises(BadArguments, match=r"no directory \./gone.*download"):
        resolved(speculation, context=Context(missing=frozenset({"./gone"})))


def test_what_is_ours_to_set_is_dropped_with_a_warning() -> None:
    with capture_logs() as lines:
        tree = resolved("num_postprocess_workers: 4\nreasoning_parser: deepseek-r1\nmodel: other\n").tree
    assert not tree.keys() & {"num_postprocess_workers", "reasoning_parser", "model"}
    dropped = [line["key"] for line in lines if line["event"] == "engine_argument_dropped"]
    assert sorted(dropped) == ["model", "num_postprocess_workers", "reasoning_parser"]


def test_keys_of_a_newer_release_are_handed_on() -> None:
    later = Installed(frozenset(EngineArgs.__struct_fields__) | {"sleep_config"})
    found = resolve(wanted(), "sleep_config: {level: 1}", installed=later)
    assert found.tree["sleep_config"] == {"level": 1}


def test_so_are_keys_of_its_sections_and_kinds_of_speculation_that_1_2_lacks() -> None:
    sections = {"kv_cache_config": frozenset(KvCacheConfig.__struct_fields__) | {"disk_cache_size"}}
    later = Installed(frozenset(EngineArgs.__struct_fields__), sections)
    yaml = "kv_cache_config: {disk_cache_size: 5}\nspeculative_config: {decoding_type: PARD, mask_token: 3}"
    found = resolve(wanted(constraints=True), yaml, installed=later)
    assert found.tree["kv_cache_config"]["disk_cache_size"] == 5
    assert found.tree["speculative_config"] == {"decoding_type": "PARD", "mask_token": 3}
    assert found.args.speculative_config is not None
    with pytest.raises(BadArguments, match="disk_cache_sizes"):
        resolve(wanted(), "kv_cache_config: {disk_cache_sizes: 5}", installed=later)


def test_a_default_that_a_release_no_longer_takes_is_left_out() -> None:
    fields = frozenset(EngineArgs.__struct_fields__) - {"enable_iter_perf_stats"}
    later = Installed(fields, {"kv_cache_config": frozenset(["tokens_per_block", "enable_block_reuse"])})
    tree = resolve(wanted(), installed=later).tree
    assert "enable_iter_perf_stats" not in tree
    assert set(tree["kv_cache_config"]) == {"tokens_per_block", "enable_block_reuse"}


def test_the_sampler_that_reads_all_options_is_chosen_where_nothing_forbids_it() -> None:
    speculation = "speculative_config: {decoding_type: NGram, max_draft_len: 2, max_matching_ngram_size: 2}"
    for yaml, sampler in (
        ("", SAMPLER),
        ("sampler_type: TorchSampler", "TorchSampler"),
        (speculation, None),
    ):
        assert resolve(wanted(choose_sampler=True), yaml).tree.get("sampler_type") == sampler
    assert "sampler_type" not in resolve(wanted()).tree  # from 1.3 on
    assert "sampler_type" not in resolve(wanted(choose_sampler=True, trtllm_backend="autodeploy")).tree


def test_with_logits_processors_the_overlap_scheduler_is_off() -> None:
    assert resolve(wanted(processors=True)).args.disable_overlap_scheduler
    assert not resolve(wanted()).args.disable_overlap_scheduler
    assert not resolve(wanted(processors=True), "disable_overlap_scheduler: false").args.disable_overlap_scheduler


def test_no_constraints_where_evicted_requests_are_computed_again() -> None:
    policy = "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}"
    assert resolve(wanted(constraints=True)).args.guided_decoding_backend == "llguidance"
    assert resolve(wanted(constraints=True), policy).args.guided_decoding_backend is None
    with pytest.raises(BadArguments, match="A62"):
        resolve(wanted(), policy + "\nguided_decoding_backend: xgrammar")


def test_guided_decoding_brings_the_tokenizer_back() -> None:
    assert resolved().tree["skip_tokenizer_init"]
    assert not resolved("guided_decoding_backend: xgrammar").tree["skip_tokenizer_init"]


# --- AutoDeploy


def test_autodeploy_loses_what_it_does_not_take_with_one_warning_each() -> None:
    yaml = (
        "tensor_parallel_size: 2\npipeline_parallel_size: 2\nenable_attention_dp: true\nmoe_expert_parallel_size: -1\n"
    )
    with capture_logs() as lines:
        tree = resolved(yaml, trtllm_backend="autodeploy").tree
    assert tree["backend"] == "_autodeploy"
    assert tree["world_size"] == 4
    assert not tree.keys() & {"tensor_parallel_size", "pipeline_parallel_size", "enable_attention_dp"}
    warned = [line["key"] for line in lines if line["event"] == "engine_argument_dropped"]
    assert sorted(warned) == ["enable_attention_dp", "pipeline_parallel_size", "tensor_parallel_size"]


def test_autodeploy_keeps_its_own_keys_and_a_world_size_that_was_named() -> None:
    tree = resolved("world_size: 8\ncompile_backend: torch-cudagraph\n", trtllm_backend="autodeploy").tree
    assert (tree["world_size"], tree["compile_backend"]) == (8, "torch-cudagraph")


@given(
    st.dictionaries(
        st.sampled_from(["a", "max_batch_size", "cp_config", "gpus_per_node", "world_size"]), st.integers(2, 9)
    )
)
def test_pruning_keeps_exactly_what_is_known(tree: dict[str, Any]) -> None:
    kept = prune(tree, known={"max_batch_size", "world_size"})
    assert kept == {key: value for key, value in tree.items() if key in ("max_batch_size", "world_size")} | {
        "backend": "_autodeploy"
    }
    assert prune(kept, known={"max_batch_size", "world_size"}) == kept


# --- others


def test_an_encoder_gets_only_what_it_needs() -> None:
    tree = defaults(wanted(role="encode", tensor_parallel_size=2)) | {"trust_remote_code": True}
    assert encoder_arguments(tree) == {
        "tensor_parallel_size": 2,
        "trust_remote_code": True,
        "max_batch_size": 64,
        "max_num_tokens": 8000,
    }


@pytest.mark.parametrize(
    "change",
    [
        "kv_cache_config: {dtype: fp8}",
        "kv_cache_config: {max_attention_window: [512, 512, 4096]}",
        "kv_cache_config: {sink_token_length: 4}",
        "dtype: float16",
    ],
)
def test_caches_of_another_shape_have_another_fingerprint(change: str) -> None:
    assert resolved(change).layout != resolved().layout


def test_what_does_not_change_a_block_does_not_change_the_fingerprint() -> None:
    one = resolved("kv_cache_config: {max_attention_window: [4096]}")
    assert one.layout == resolved("kv_cache_config: {max_attention_window: [4096, 4096]}").layout
    assert resolved("max_batch_size: 8", role="prefill").layout == resolved(role="decode").layout
    assert layout(one.args) == one.layout


def test_grammars_are_read_where_nothing_excludes_them() -> None:
    found = resolved(constraints=True)
    assert (found.tree["guided_decoding_backend"], found.tree["skip_tokenizer_init"]) == ("llguidance", False)
    assert resolved("guided_decoding_backend: xgrammar", constraints=True).args.guided_decoding_backend == "xgrammar"
    for excluding in (
        "enable_lora: true\ncuda_graph_config: null",
        "speculative_config: {decoding_type: NGram, max_draft_len: 2, max_matching_ngram_size: 2}",
    ):
        found = resolved(excluding, constraints=True)
        assert "guided_decoding_backend" not in found.tree
        assert found.tree["skip_tokenizer_init"]
