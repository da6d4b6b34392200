"""What only the real vLLM can show; ``make test-vllm``."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests import standins
from tests.workers.engines.contract import ALL, BLOCK, MODEL, REAL, WORDS, Driver, ask, names
from workers.engines.foreign.metrics import NativeSeries
from workers.engines.vllm.metrics import PREFIX

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


def test_data_parallel_ranks_tell_of_their_blocks_and_each_name_is_told_once() -> None:
    with made(kv_blocks=32, override_engine_args='{"enforce_eager": true, "data_parallel_size": 2}') as driver:
        info = driver.engine.info
        assert (info.dp_size, info.total_blocks, info.slots) == (2, 64, 8)
        seen = driver.run(*(ask(number, prompt, 8) for number, prompt in enumerate(PROMPTS)))
        assert [len(seen.tokens(number)) for number in range(len(PROMPTS))] == [8] * len(PROMPTS)
        for prompt in PROMPTS:
            driver.remembers(prompt)
        engine: Any = driver.engine
        told = {rank: translator.counts.stored for rank, translator in engine._translators.items()}
        assert set(told) == {0, 1}
        assert min(told.values()) > 0
        assert len(driver.fold()) == len({name for prompt in PROMPTS for name in names(prompt)}) <= sum(told.values())
        assert driver.engine.stats().cached_blocks == len(PROMPTS) * (100 // BLOCK)
        assert set(engine._scheduler.usage) == {0, 1}


def test_its_own_metrics_are_found_and_its_variables_are_gone() -> None:
    with made(threads=1) as driver:
        driver.answer(ask(0, PROMPTS[0], 5))
        found = {metric.name: metric for metric in NativeSeries(PREFIX).collect()}
        assert sum(sample.value for sample in found["vllm:generation_tokens"].samples if "total" in sample.name) >= 5
        assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
