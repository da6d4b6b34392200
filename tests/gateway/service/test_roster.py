"""Which workers of its model a gateway uses, and whether they can run a request."""

import pytest

from penstock.gateway.base.gateway_metrics import ModelMetrics
from penstock.gateway.service.text_model import Roster
from penstock.infra.metrics.scope import MetricScope
from penstock.schemas.fleet import Registration, WorkerState


def worker(role: str, *, pair_only: bool = False, state: WorkerState = WorkerState.ready) -> Registration:
    return Registration(
        f"{role}-{pair_only}", "m", role, "sglang", epoch=1, block_size=32, total_blocks=9, slots=1, max_model_len=99,
        revision="r", state=state, pair_only=pair_only,
    )  # fmt: skip


PREFILL, DECODE = worker("prefill", pair_only=True), worker("decode", pair_only=True)


@pytest.mark.parametrize(
    ("workers", "ready", "lacks"),
    [
        ([], False, ""),
        ([PREFILL], False, "decode"),
        ([DECODE], False, "prefill"),
        ([PREFILL, worker("decode", pair_only=True, state=WorkerState.draining)], False, "decode"),
        ([PREFILL, DECODE], True, ""),
        ([PREFILL, worker("aggregated")], True, ""),
        ([DECODE, worker("prefill")], True, ""),
        ([PREFILL, worker("encode")], False, "decode"),
        ([worker("prefill")], True, ""),
    ],
)
def test_workers_of_pairs_are_ready_once_there_are_both(workers: list[Registration], ready: bool, lacks: str) -> None:
    selected = Roster("m", ModelMetrics(MetricScope())).select(workers, "")
    assert (selected.ready, selected.lacks) == (ready, lacks)
