"""The arguments of SGLang: defaults, what is laid over them, and what is refused with its fix."""

import json
from typing import Any

import msgspec
import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.workers.engines.sglang.args import (
    CONTEXT_MARGIN,
    ResolvedSglangArgs,
    SglangSettings,
    follower_tree,
    layout,
    ranks_of,
    resolve,
)
from tests.standins.sglang_signatures import recorded

KNOWN = frozenset(recorded()["ServerArgs"])
WORKER = WorkerSettings(engine="sglang", block_size=32, max_running=8, max_batched_tokens=64)


def wanting(**changes: Any) -> SglangSettings:
    """``changes``: of the worker's settings, or of what follows from them."""
    derived = {name: changes.pop(name) for name in [*changes] if name in SglangSettings._fields}
    return SglangSettings(msgspec.structs.replace(WORKER, **changes), 512, "ipc:///tmp/e", "ipc:///tmp/r")._replace(
        **derived
    )


WANTED = wanting()


def resolved(wanted: SglangSettings = WANTED, **given: Any) -> ResolvedSglangArgs:
    return resolve(wanted, given, KNOWN)


def test_defaults_are_the_worker_s_settings_under_sglang_s_names() -> None:
    tree = resolved(wanting(kv_blocks=10, dtype="bfloat16", device="cuda", tensor_parallel_size=2)).tree
    assert set(tree) <= KNOWN
    assert (tree["page_size"], tree["max_running_requests"], tree["chunked_prefill_size"]) == (32, 8, 64)
    assert (tree["max_total_tokens"], tree["context_length"]) == (320, 512 + CONTEXT_MARGIN)
    assert (tree["dtype"], tree["device"], tree["tp_size"]) == ("bfloat16", "cuda", 2)
    assert tree["incremental_streaming_output"]
    assert tree["disaggregation_mode"] == "null"
    spans = resolved(wanting(otlp_endpoint="http://c:4317")).tree
    assert (spans["enable_trace"], spans["otlp_traces_endpoint"]) == (True, "http://c:4317")


def test_what_the_user_gives_goes_over_the_defaults() -> None:
    tree = resolved(mem_fraction_static=0.7, log_level="info", max_running_requests=4).tree
    assert (tree["mem_fraction_static"], tree["log_level"], tree["max_running_requests"]) == (0.7, "info", 4)
    assert resolved(enable_deterministic_inference=True).deterministic
    assert not resolved().deterministic


@pytest.mark.parametrize(
    ("wanted", "given", "there"),
    [
        ({}, {}, True),
        ({"publish_events_and_metrics": False}, {}, False),
        ({"prefix_cache": False}, {}, False),
        ({"events": ""}, {}, False),
        ({"role": "prefill"}, {}, True),
        ({"role": "decode"}, {}, False),
        ({"role": "decode"}, {"disaggregation_decode_enable_radix_cache": True}, True),
    ],
)
def test_kv_events_are_published_wherever_there_is_a_prefix_cache(
    wanted: dict[str, Any], given: dict[str, Any], there: bool
) -> None:
    found = resolved(wanting(**wanted), **given)
    assert (found.events is not None) == there == ("kv_events_config" in found.tree)
    if there:
        config = json.loads(found.tree["kv_events_config"])
        assert config == found.events
        assert (config["publisher"], config["endpoint"], config["replay_endpoint"]) == (
            "zmq",
            "ipc:///tmp/e",
            "ipc:///tmp/r",
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mem_fraction_statik": 1}, "did you mean mem_fraction_static"),
        ({"tensor_parallel_size": 2}, "it is tp_size here"),
        ({"model_path": "x"}, "use --model"),
        ({"schedule_policy": "lpm"}, "the router orders requests"),
        ({"enable_lora": True}, "use --lora or --lora-folder"),
        ({"max_loaded_loras": 4}, "it reads again, changed or not"),
        ({"nnodes": 2}, "use --nodes"),
        ({"dist_init_addr": "a:1"}, "use --leader-address"),
        ({"page_size": 1}, "use --block-size"),
        ({"context_length": 4096}, "use --max-model-len"),
        ({"disable_radix_cache": True}, "use --no-prefix-cache"),
        ({"kv_events_config": "{}"}, "--no-use-kv-events"),
    ],
)
def test_what_contradicts_the_worker_is_refused_with_its_fix(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArguments, match=words):
        resolved(**given)


def test_a_worker_that_sleeps_keeps_its_weights_in_host_memory() -> None:
    saver = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    for flags in ({"sleep_after_s": 60.0}, {"share_device": "gpu0"}):
        assert saver.items() <= resolved(wanting(**flags)).tree.items()
    assert not saver.keys() & resolved().tree.keys()
    with pytest.raises(BadArguments, match="add enable_weights_cpu_backup"):
        resolved(enable_memory_saver=True)


def test_the_context_has_room_for_a_draft_beside_each_request() -> None:
    """SGLang counts it like tokens that the client asks for, and refuses requests that then exceed the context."""

    def drafted(**given: Any) -> int:
        context: int = resolved(**{f"speculative_{name}": value for name, value in given.items()}).tree[
            "context_length"
        ]
        return context - 512 - CONTEXT_MARGIN

    assert drafted(algorithm="NGRAM", num_draft_tokens=64) == 0
    assert drafted(algorithm="eagle3") == 20
    assert drafted(algorithm="NEXTN", num_steps=3, eagle_topk=1, num_draft_tokens=4) == 20
    assert drafted(algorithm="EAGLE", num_steps=6, eagle_topk=8, num_draft_tokens=32) == 48
    with pytest.raises(BadArguments, match="use --max-model-len"):
        resolved(speculative_algorithm="EAGLE", context_length=512 + CONTEXT_MARGIN)


def test_ranks_of_decode_context_parallelism_share_a_block() -> None:
    assert resolved(dcp_size=2).tree["page_size"] == 16
    with pytest.raises(BadArguments, match="page_size: 10, the worker has 32"):
        resolved(dcp_size=3)


def test_a_batch_is_whole_blocks() -> None:
    sizes = [resolved(wanting(max_batched_tokens=each)).tree["chunked_prefill_size"] for each in (100, 96, 5)]
    assert sizes == [96, 96, 32]
    with pytest.raises(BadArguments, match="chunked_prefill_size: 100 is not a multiple of --block-size 32"):
        resolved(chunked_prefill_size=100)
    assert resolved(wanting(role="decode"), chunked_prefill_size=100).tree["chunked_prefill_size"] == 100
    assert resolved(chunked_prefill_size=-1).tree["chunked_prefill_size"] == -1


def test_sizes_of_the_pool_that_differ_and_encode_workers_are_refused() -> None:
    with pytest.raises(BadArguments, match="use --kv-blocks"):
        resolved(wanting(kv_blocks=10), max_total_tokens=64)
    with pytest.raises(BadArguments, match="takes text only"):
        resolved(wanting(role="encode"))


def test_a_batch_has_room_for_requests_without_an_adapter_and_nothing_is_unloaded_for_room() -> None:
    found = resolved(wanting(lora=("a=/a",), max_loras=3, max_lora_rank=16)).tree
    assert (found["enable_lora"], found["max_loras_per_batch"], found["max_lora_rank"]) == (True, 4, 16)
    assert set(found) <= KNOWN
    assert "max_loaded_loras" not in found
    assert resolved(wanting(lora=("a=/a",)), lora_target_modules=["q_proj"]).tree["lora_target_modules"] == ["q_proj"]
    assert "enable_lora" not in resolved().tree
    for given in ({"dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True}, {"attn_dp_size": 2}):
        with pytest.raises(BadArguments, match="dp_size: SGLang loads no LoRA adapters into several replicas"):
            resolved(wanting(lora=("a=/a",)), **given)


def test_nodes_share_the_ranks_and_get_the_same_arguments() -> None:
    spread = wanting(nodes=2, meeting="10.0.0.1:29501", events="ipc:///e", replay="ipc:///r")
    found = resolved(spread, tp_size=16)
    assert {"nnodes": 2, "node_rank": 0, "dist_init_addr": "10.0.0.1:29501"}.items() <= found.tree.items()
    assert found.events is not None
    assert follower_tree(found.tree, 1) == found.tree | {"node_rank": 1}
    # Ranks of their own publish their events where they run, which may be another machine.
    assert resolved(spread, tp_size=16, dp_size=16, enable_dp_attention=True).events is None
    with pytest.raises(BadArguments, match="the engine's 3 ranks"):
        resolved(spread, tp_size=3)
    with pytest.raises(BadArguments, match="enable_dp_attention"):
        resolved(spread, tp_size=4, dp_size=2)


def test_every_name_that_is_reserved_exists() -> None:
    from penstock.workers.engines.sglang.args import ALIASES, RESERVED

    assert set(RESERVED) <= KNOWN
    assert set(ALIASES.values()) <= KNOWN
    assert not set(ALIASES) & KNOWN


def test_ranks_are_replicas_or_attention_groups() -> None:
    assert [ranks_of(tree) for tree in ({}, {"dp_size": 4}, {"attn_dp_size": 2, "tp_size": 4})] == [1, 4, 2]


def test_only_engines_with_the_same_kv_can_hand_it_over() -> None:
    tree = resolved(wanting(role="decode")).tree
    base = layout("0.5.23", tree, "a" * 40)
    assert base == layout("0.5.23", dict(tree), "a" * 40)
    others = [
        layout("0.5.24", tree, "a" * 40),
        layout("0.5.23", tree | {"kv_cache_dtype": "fp8_e4m3"}, "a" * 40),
        layout("0.5.23", tree | {"page_size": 64}, "a" * 40),
        layout("0.5.23", tree | {"disaggregation_transfer_backend": "mooncake"}, "a" * 40),
        layout("0.5.23", tree, "b" * 40),
    ]
    assert base not in others
