"""SGLang's own series: of its schedulers' files and of this process, each once."""

import json
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.mmap_dict import MmapedDict

from penstock.workers.engines.external.engine_metrics import MULTIPROCESS, NativeSeries
from penstock.workers.engines.sglang.adapter import RankLoads
from penstock.workers.engines.sglang.build import PREFIX, series_of


def written(folder: Path, pid: int, name: str, value: float) -> None:
    """What prometheus_client writes in another process."""
    values = MmapedDict(str(folder / f"counter_{pid}.db"))
    values.write_value(json.dumps([name, f"{name}_total", {}, "of SGLang"]), value, 0.0)
    values.close()


@pytest.fixture
def own() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("sglang:e2e", "of SGLang", registry=registry).inc(3)
    Counter("other", "of others", registry=registry).inc()
    return registry


def test_series_of_schedulers_and_of_this_process_are_merged(tmp_path: Path, own: CollectorRegistry) -> None:
    written(tmp_path, 11, "sglang:prompt_tokens", 2)
    written(tmp_path, 12, "sglang:prompt_tokens", 5)
    written(tmp_path, 13, "penstock_other", 1)
    ours = CollectorRegistry()
    ours.register(NativeSeries(PREFIX, own, str(tmp_path)))
    assert {metric.name for metric in ours.collect()} == {"sglang:prompt_tokens", "sglang:e2e"}
    assert ours.get_sample_value("sglang:prompt_tokens_total") == 7
    assert ours.get_sample_value("sglang:e2e_total") == 3


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path, own: CollectorRegistry) -> None:
    ours = CollectorRegistry()
    ours.register(NativeSeries(PREFIX, own, str(tmp_path / "gone")))
    assert ours.get_sample_value("sglang:e2e_total") == 3


def test_the_variable_that_sglang_sets_is_not_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    written(tmp_path, 11, "sglang:prompt_tokens", 2)
    for before, after in ((str(tmp_path), str(tmp_path)), (None, None)):  # with one, this process writes files, too
        made = series_of(before)
        assert os.environ.get(MULTIPROCESS) == after
        assert [metric.name for metric in made.collect()] == ["sglang:prompt_tokens"]


def test_loads_of_ranks_are_summed() -> None:
    loads = RankLoads()
    fields = {"num_running_reqs": 1, "max_running_requests": 4}
    for rank, tokens in ((0, 33), (1, 64), (0, 1)):
        loads.take([type("Load", (), fields | {"dp_rank": rank, "num_used_tokens": tokens})()])
    assert (loads.used_blocks(32), sum(loads.slots.values()), loads.running) == (3, 8, {0: 1, 1: 1})
