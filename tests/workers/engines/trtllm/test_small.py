"""Back-off, statistics, log lines, errors and launches: tables."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.schemas.errors import Code
from penstock.workers.engines.trtllm import trtllm_metrics as stats
from penstock.workers.engines.trtllm.adapter import code_of, is_request_error
from penstock.workers.engines.trtllm.build import Launch, launch_of, problem
from penstock.workers.engines.trtllm.engine_health import Detector
from penstock.workers.engines.trtllm.trtllm_metrics import NativeMetrics

# --- statistics


STAT: dict[str, Any] = {
    "numActiveRequests": 3,
    "kvCacheStats": {
        "maxNumBlocks": 100,
        "usedNumBlocks": 30,
        "freeNumBlocks": 70,
        "reusedBlocks": 25,
        "missedBlocks": 20,
    },
    "specDecodingStats": None,
}


def test_the_pool_is_read_where_the_statistics_show_it() -> None:
    assert stats.pool_counts(STAT) == stats.PoolCounts(100, 30, 70)
    assert stats.pool_counts({"kvCacheStats": {"maxNumBlocks": 100, "freeNumBlocks": 60}}) == stats.PoolCounts(
        100, 40, 60
    )
    assert stats.pool_counts({"kvCacheStats": None}) is None
    assert stats.pool_counts({}) is None


def test_only_values_that_are_there_become_gauges() -> None:
    found = stats.gauges(STAT)
    assert found["trtllm_num_active_requests"] == 3
    assert found["trtllm_kv_cache_used_blocks"] == 30
    assert "trtllm_draft_tokens" not in found


def test_the_warm_up_does_not_count_towards_the_hit_rate() -> None:
    assert stats.hit_rate(STAT, (0.0, 0.0)) == 25 / 45
    assert stats.hit_rate(STAT, (0.0, 15.0)) == 25 / 30
    assert stats.hit_rate(STAT, (25.0, 20.0)) is None
    assert stats.hit_rate({}, (0.0, 0.0)) is None


def test_proposed_and_accepted_tokens_are_added_up() -> None:
    metrics = NativeMetrics(None, {}, CollectorRegistry())
    for proposed, accepted in ((6, 4), (None, None), (3, 0)):
        found = None if proposed is None else {"numDraftTokens": proposed, "numAcceptedTokens": accepted}
        metrics.observe(STAT | {"specDecodingStats": found})
    results = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    assert results["trtllm_spec_draft_tokens_total"] == 9
    assert results["trtllm_spec_accepted_tokens_total"] == 4
    assert results["trtllm_draft_tokens"] == 3  # of the last iteration


values = st.none() | st.booleans() | st.floats() | st.text()
sections = st.sampled_from(
    [
        "kvCacheStats",
        "specDecodingStats",
        "numDraftTokens",
        "maxNumBlocks",
        "usedNumBlocks",
        "freeNumBlocks",
        "numActiveRequests",
    ]
)


@given(st.dictionaries(sections, values | st.dictionaries(sections, values)))
def test_no_statistic_can_break_the_worker(stat: dict[str, Any]) -> None:
    stats.pool_counts(stat)
    stats.hit_rate(stat, (0.0, 0.0))
    stats.gauges(stat)
    list(stats.sums(stat))


# --- log lines


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (
            "num_fitting_reqs=0 and fitting_disagg_gen_init_requests is empty, may not have enough kvCache",
            "disagg_deadlock",
        ),
        ("iter 5: num_fitting_reqs=0, fitting_disagg_gen_init_requests=[]", "disagg_deadlock"),
        ("num_fitting_reqs=0", "no_request_fits"),
        ("[TensorRT-LLM] may use dynamic buffer, will fail with NIXL backend", "transfer_buffer_small"),
        ("Terminating context request 7 due to KV cache transfer timeout", "transfer_timeout"),
        ("Can not find sequence 12", "sequence_lost"),
        ("The event queue has reached the max size of 1024", "kv_events_lost"),
        ("Assertion failed: maxNumTokens % tokensPerBlock == 0", "not_block_aligned"),
    ],
)
def test_lines_that_announce_trouble_are_known(line: str, code: str) -> None:
    found = Detector().line(line, 0.0)
    assert found is not None
    assert found.code == code
    assert found.advice


@pytest.mark.parametrize(
    "line", ["num_fitting_reqs=10", "num_fitting_reqs=3, fitting_disagg_gen_init_requests=[4]", ""]
)
def test_ordinary_lines_are_not(line: str) -> None:
    assert Detector().line(line, 0.0) is None


def test_the_same_trouble_is_logged_once_a_minute() -> None:
    detector = Detector(60.0)
    results = [detector.line("num_fitting_reqs=0", now) is not None for now in (0.0, 1.0, 59.0, 60.0, 61.0)]
    assert results == [True, False, False, True, False]
    assert detector.line("Can not find sequence 1", 61.0) is not None


# --- errors


class Asked(RuntimeError):
    """Stands for RequestError, which is one, too."""


@pytest.mark.parametrize(
    ("error", "at_call", "own"),
    [
        (Asked("no"), True, True),
        (Asked("no"), False, True),
        (RuntimeError("CUDA error"), True, False),
        (RuntimeError("CUDA error"), False, False),
        (ValueError("bad"), True, True),
        (ValueError("bad"), False, False),
        (TypeError("bad"), True, True),
        (NotImplementedError("bad"), True, True),
        (AssertionError(), True, False),
        (KeyError("x"), False, False),
    ],
)
def test_only_what_is_known_to_be_of_one_request_spares_the_engine(error: Exception, at_call: bool, own: bool) -> None:
    assert is_request_error(error, Asked, at_call=at_call) is own


@pytest.mark.parametrize(
    ("text", "adopted", "code"),
    [
        (
            "The sum of prompt length (9) and query length (0) should not exceed max_num_tokens (8)",
            False,
            "context_length",
        ),
        ("Failed in the kv cache transfer", True, "transfer_failed"),
        ("Failed in the kv cache transfer", False, "engine_error"),
        ("something", True, "engine_error"),
    ],
)
def test_codes_of_errors_while_it_runs(text: str, adopted: bool, code: str) -> None:
    assert code_of(Asked(text), at_call=False, adopted=adopted).startswith(code)


def test_codes_of_errors_at_the_call() -> None:
    assert code_of(ValueError("x"), at_call=True, adopted=False) is Code.invalid_request
    assert code_of(NotImplementedError("x"), at_call=True, adopted=False) is Code.unsupported


# --- launches

TRTLLM = {"TLLM_SPAWN_PROXY_PROCESS": "1", "tllm_mpi_size": "16"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, Launch(False, 1, True)),
        ({"SLURM_NTASKS": "8"}, Launch(False, 1, True)),  # of a batch script, not of a step
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, Launch(False, 4, False)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, Launch(False, 4, True)),
        (TRTLLM, Launch(True, 16, True)),
    ],
)
def test_a_process_knows_its_place_among_the_ranks(environ: dict[str, str], launch: Launch) -> None:
    assert launch_of(environ) == launch


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_without_the_launcher_do_not_register_workers(rank: int) -> None:
    environ = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": str(rank)}
    assert "trtllm-llmapi-launch" in problem(environ, 4)


def test_the_launcher_must_have_started_as_many_ranks_as_the_engine_has() -> None:
    assert problem(TRTLLM, 16) == ""
    assert "need 8" in problem(TRTLLM, 8)
    for world in itertools.chain([1, 8]):
        assert problem({}, world) == ""
