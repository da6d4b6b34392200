"""The tree of engine arguments: keys, types, merging, and what the engine makes of it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.engine_args.schema import AutoDeployArgs, CudaGraphConfig, Eagle, EngineArgs, Mtp
from penstock.infra.engine_args.tree import BadArguments, decode, merge, parse_json, parse_yaml

keys = st.sampled_from("abc")
trees = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2), lambda t: st.dictionaries(keys, t, max_size=3)
)
mappings = st.dictionaries(keys, trees, max_size=3)


def refused(tree: dict[str, Any]) -> str:
    with pytest.raises(BadArguments) as caught:
        decode(tree)
    return str(caught.value)


def test_the_defaults_are_those_of_the_reference() -> None:
    args = decode({})
    kv = args.kv_cache_config
    assert (args.max_num_tokens, args.batch_size, args.beam_width) == (8192, 2048, 1)
    assert (kv.free_gpu_memory_fraction, kv.tokens_per_block, kv.event_buffer_max_size) == (0.9, 32, 0)
    assert args.scheduler_config.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    assert (args.gpus, args.moe_config.backend, args.cache_transceiver_config) == (1, "AUTO", None)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"max_batch_sise": 4}, "max_batch_sise: no such key; did you mean max_batch_size?"),
        ({"kv_cache_config": {"free_gpu_mem_fraction": 0.8}}, "did you mean free_gpu_memory_fraction?"),
        ({"free_gpu_memory_fraction": 0.8}, "it belongs to kv_cache_config"),
        ({"kv_cache_config": {"max_num_tokens": 8}}, "did you mean max_tokens?"),
        ({"kv_cache_config": {"enable_chunked_prefill": True}}, "it belongs to the top level"),
        ({"dynamic_batch_moving_average_window": 8}, "it belongs to scheduler_config.dynamic_batch_config"),
        ({"pytorch_backend_config": {}}, "at the top level now"),
        ({"kv_cache_config": {"zzz": 1}}, "known are"),
        ({"speculative_config": {"decoding_type": "Eagle", "num_nextn_predict_layers": 1}}, "no such key"),
        ({"model_kwargs": {}}, "only with backend: _autodeploy"),
        ({"priority": 1}, "priority: no such key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tree: dict[str, Any], says: str) -> None:
    assert says in refused(tree)


def test_all_unknown_keys_are_reported_at_once() -> None:
    assert refused({"a_key": 1, "kv_cache_config": {"b_key": 2}}).count("no such key") == 2


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"max_batch_size": "8"}, "max_batch_size"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "kv_cache_config.free_gpu_memory_fraction"),
        ({"kv_cache_config": {"max_attention_window": []}}, "kv_cache_config.max_attention_window"),
        ({"kv_cache_config": {"max_attention_window": [512, 0]}}, "max_attention_window"),
        ({"cache_transceiver_config": {"backend": "ucx"}}, "cache_transceiver_config.backend"),
        ({"cache_transceiver_config": {"kv_transfer_timeout_ms": 0}}, "kv_transfer_timeout_ms"),
        ({"scheduler_config": {"dynamic_batch_config": {"enable_batch_size_tuning": True}}}, "dynamic_batch_config"),
        ({"moe_config": {"backend": "WideEP"}}, "moe_config.backend"),
        ({"speculative_config": {"decoding_type": "Eagle4"}}, "speculative_config"),
        ({"speculative_config": {"max_draft_len": 3}}, "speculative_config"),
        ({"backend": "tensorrt"}, "backend"),
        ({"stream_interval": 0}, "stream_interval"),
    ],
)
def test_a_wrong_value_is_refused_and_named(tree: dict[str, Any], where: str) -> None:
    assert where in refused(tree).partition(": ")[0]


def test_autodeploy_has_keys_of_its_own() -> None:
    args = decode({"backend": "_autodeploy", "world_size": 4, "model_kwargs": {"x": 1}})
    assert isinstance(args, AutoDeployArgs)
    assert args.gpus == 4


def test_a_speculation_is_known_by_its_decoding_type() -> None:
    eagle = decode({"speculative_config": {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "d"}})
    assert isinstance(eagle.speculative_config, Eagle)
    assert (eagle.draft_tokens, eagle.speculative_config.draft_model) == (3, "d")
    mtp = decode({"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 2}})
    assert isinstance(mtp.speculative_config, Mtp)
    assert mtp.draft_tokens == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("a: 1\na: 2", "given twice"),
        ("a:\n  b: 1\n  b: 2", "given twice"),
        ("- 1", "must be a mapping"),
        ("1: 2", "must be a mapping"),
        ("? [1]\n: 2", "neither a string nor a number"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_bad_yaml_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadArguments, match=says):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["{", "[]", "1", '"a"', ""])
def test_bad_json_is_refused(text: str) -> None:
    with pytest.raises(BadArguments):
        parse_json(text)


def test_an_empty_document_has_no_arguments() -> None:
    assert parse_yaml("") == parse_yaml("# only a comment") == {}


def test_numbers_as_keys_are_kept_below_the_top() -> None:
    tree = parse_yaml("moe_config: {load_balancer: {num_slots: 4, initial_global_assignments: {0: [0, 1, 2, 3]}}}")
    balancer = decode(tree).moe_config.load_balancer
    assert balancer is not None
    assert not isinstance(balancer, str)
    assert balancer.initial_global_assignments == {0: (0, 1, 2, 3)}


def test_an_override_keeps_what_it_does_not_name() -> None:
    base = {"kv_cache_config": {"dtype": "fp8", "tokens_per_block": 32}, "cuda_graph_config": {"batch_sizes": [1, 2]}}
    over = parse_json('{"kv_cache_config": {"dtype": "auto"}, "cuda_graph_config": {"batch_sizes": [4]}}')
    assert merge(base, over) == {
        "kv_cache_config": {"dtype": "auto", "tokens_per_block": 32},
        "cuda_graph_config": {"batch_sizes": [4]},
    }


@given(mappings, mappings)
def test_a_merge_has_every_key_and_changes_neither_side(base: dict[str, Any], over: dict[str, Any]) -> None:
    before = json.dumps([base, over])
    merged = merge(base, over)
    assert json.dumps([base, over]) == before
    assert set(merged) == set(base) | set(over)
    for key, value in over.items():
        if not isinstance(value, dict):
            assert merged[key] == value
        elif isinstance(base.get(key), dict):
            assert merged[key] == merge(base[key], value)


@given(mappings, mappings)
def test_merging_nothing_or_the_same_again_changes_nothing(base: dict[str, Any], over: dict[str, Any]) -> None:
    assert merge(base, {}) == merge({}, base) == base
    assert merge(merge(base, over), over) == merge(base, over)


@given(st.integers(1, 2000), st.booleans())
def test_graph_sizes_end_at_the_largest_and_ascend(largest: int, padding: bool) -> None:
    args = EngineArgs(cuda_graph_config=CudaGraphConfig(max_batch_size=largest, enable_padding=padding))
    sizes = args.graph_sizes
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))


def test_the_schema_round_trips_through_plain_data() -> None:
    args = decode({"tensor_parallel_size": 2, "speculative_config": {"decoding_type": "MTP"}})
    assert decode(msgspec.to_builtins(args)) == args
