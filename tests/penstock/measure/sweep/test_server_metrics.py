"""What is read of metrics pages: ours, vLLM's and a GPU exporter's."""

import pytest

from penstock.measure.sweep.endpoints import GaugeLevel, read_page, summarise

OURS = """# HELP penstock_worker_running sequences in the batch
# TYPE penstock_worker_running gauge
penstock_worker_running {running}
penstock_worker_waiting 2
penstock_worker_kv_used_blocks 30
penstock_worker_kv_cached_blocks 30
penstock_worker_kv_free_blocks 40
penstock_worker_prefix_hit_tokens {hits}
penstock_worker_prompt_tokens {queries}
"""
VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 6.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_queries_created{{engine="0",model_name="m"}} 1.7e+09
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
"""
DCGM = 'DCGM_FI_DEV_FB_USED{gpu="0"} 1024\nDCGM_FI_DEV_FB_USED{gpu="1"} 2048\nDCGM_FI_DEV_GPU_UTIL{gpu="0"} 50\n'


def test_figures_of_two_workers() -> None:
    rounds = [
        {at: read_page(OURS.format(running=at * turn, hits=100 * turn, queries=500 * turn)) for at in (1, 2)}
        for turn in (1, 2, 3)
    ]
    found = summarise(rounds)
    assert (found.pages, found.samples) == (2, 6)
    assert found.running == GaugeLevel(6.0, 9.0)
    assert found.batch == GaugeLevel(3.0, 6.0)
    assert found.waiting == GaugeLevel(4.0, 4.0)
    assert found.kv_usage == GaugeLevel(pytest.approx(0.3), pytest.approx(0.3))
    assert found.kv_hit_rate == pytest.approx(0.2)


def test_figures_of_vllm_and_a_gpu_exporter() -> None:
    rounds = [{0: read_page(VLLM.format(hits=hits, queries=1000)), 1: read_page(DCGM)} for hits in (10, 10)]
    rounds.append({0: read_page(VLLM.format(hits=40, queries=1100))})
    found = summarise(rounds)
    assert (found.running, found.waiting, found.kv_usage) == (
        GaugeLevel(6, 6),
        GaugeLevel(1, 1),
        GaugeLevel(0.25, 0.25),
    )
    assert found.kv_hit_rate == pytest.approx(0.3)
    assert found.gpu_memory_bytes == GaugeLevel(3 << 30, 3 << 30)
    assert found.gpu_utilisation == GaugeLevel(0.5, 0.5)


def test_what_no_page_shows_is_absent_and_not_zero() -> None:
    found = summarise([{0: read_page("up 1\n")}, {}])
    assert (found.running, found.waiting, found.kv_usage, found.kv_hit_rate, found.gpu_memory_bytes) == (None,) * 5
    assert summarise([]).pages == 0


def test_a_counter_of_a_worker_that_was_restarted_counts_on() -> None:
    pages = [(100, 500), (10, 50), (20, 100)]
    found = summarise([{0: read_page(OURS.format(running=1, hits=hits, queries=all_))} for hits, all_ in pages])
    assert found.kv_hit_rate == pytest.approx(20 / 100)
