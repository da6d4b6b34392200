"""What only the real vLLM can show; ``make test-vllm``."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.engines.vllm.adapter import PREFIX
from tests import standins
from tests.workers.engines.contract import ALL, BLOCK, MODEL, REAL, WORDS, Driver, ask, fold, names

pytestmark = pytest.mark.skipif(REAL != "vllm" or not standins.real("vllm"), reason="make test-vllm")
(SUBJECT,) = (subject for subject in ALL if subject.name == "vllm")
PROMPTS = [WORDS[number * 40 :][:100] for number in range(6)]


@contextlib.contextmanager
def made(**options: Any) -> Iterator[Driver]:
    driver = Driver(SUBJECT.make(SUBJECT.settings(**options), MODEL))
    try:
        yield driver
    finally:
        driver.engine.close()


def test_data_parallel_ranks_run_their_requests_and_report_their_own_blocks() -> None:
    with made(kv_blocks=32, override_engine_args='{"enforce_eager": true, "data_parallel_size": 2}') as driver:
        info = driver.engine.info
        assert (info.dp_size, info.total_blocks, info.slots) == (2, 64, 8)
        requests = [ask(number, prompt, 8) for number, prompt in enumerate(PROMPTS)]
        for request in requests:
            request.rank = request.key % 2  # type: ignore[operator]
        seen = driver.run(*requests)
        assert [len(seen.tokens(number)) for number in range(len(PROMPTS))] == [8] * len(PROMPTS)
        wanted = [{name for prompt in PROMPTS[rank::2] for name in names(prompt)} for rank in range(2)]
        driver.until(
            lambda: [set(fold(driver.engine.dump(rank))) for rank in range(2)] == wanted, "the blocks of each rank"
        )
        assert driver.engine.stats().cached_blocks == len(PROMPTS) * (100 // BLOCK)


def test_its_own_metrics_are_found_and_its_variables_are_gone() -> None:
    with made(threads=1) as driver:
        driver.answer(ask(0, PROMPTS[0], 5))
        found = {metric.name: metric for metric in NativeSeries(PREFIX).collect()}
        assert sum(sample.value for sample in found["vllm:generation_tokens"].samples if "total" in sample.name) >= 5
        assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
