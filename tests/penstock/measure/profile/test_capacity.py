"""The limits of servers, from their metrics pages and flags."""

from typing import Any

import pytest

from penstock.configs.flags import BadSettings
from penstock.measure.profile.profile_endpoint_command import (
    Capacity,
    EndpointProfileSettings,
    context_of,
    grid_of,
    read_capacity,
    setup_of,
)


def worker(role: str, blocks: int, context: int = 8192) -> str:
    labels = f'{{process="w",role="{role}"}}'
    return (
        "# TYPE penstock_worker_kv_capacity_blocks gauge\n"
        f"penstock_worker_kv_capacity_blocks{labels} {blocks}\n"
        f"penstock_worker_kv_block_size_tokens{labels} 32\n"
        f"penstock_worker_max_sequences{labels} 64\n"
        f"penstock_worker_max_model_len{labels} {context}\n"
        "penstock_worker_running 3\n"
    )


def test_workers_that_decode_add_up() -> None:
    pages = ["other 1\n", worker("aggregated", 100), worker("decode", 50, 4096), worker("prefill", 1000, 1024)]
    assert read_capacity(pages) == Capacity(max_kv_tokens=4800, max_batch=128, max_context=4096)


def test_pages_of_other_servers_are_read() -> None:
    vllm = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    assert read_capacity([vllm, "sglang:max_total_num_tokens 500\n"]) == Capacity(2100)
    assert read_capacity(['vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n']) == Capacity()
    models = b'{"data": [{"id": "a"}, {"id": "b", "max_model_len": 4096}]}'
    assert [context_of(models, name) for name in ("a", "b", "c")] == [0, 4096, 0]


def settings(**more: Any) -> EndpointProfileSettings:
    return EndpointProfileSettings(**more)


def test_flags_win_over_what_the_server_says_and_a_batch_tells_the_cache() -> None:
    said = Capacity(max_kv_tokens=50_000, max_batch=8, max_context=4096)
    assert setup_of(settings(), "m", said).max_context == 4096
    assert setup_of(settings(max_kv_tokens=7000), "m", said).max_kv_tokens == 7000
    assert setup_of(settings(max_batch=8, max_context=4096), "m", Capacity()).max_kv_tokens == 8 * 4096
    assert setup_of(settings(mode="prefill"), "m", Capacity()).max_kv_tokens == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "give --max-kv-tokens, --max-batch"),
        ({"max_context": 8192, "max_batch": 4}, "the server takes 4096 tokens"),
        ({"max_context": 600, "max_batch": 4}, "prefill needs at least 612 tokens"),
        ({"max_kv_tokens": 500}, "no prompt of 100 tokens"),
        ({"max_kv_tokens": 90_000, "attention_dp": 64, "max_concurrency": 32}, "--attention-dp 64"),
    ],
)
def test_a_grid_without_points_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        grid_of(settings(**flags), setup_of(settings(**flags), "m", Capacity(max_context=4096)))
