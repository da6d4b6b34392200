"""GPU metrics, on a stand-in of NVIDIA's management library."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from penstock.workers.metrics.worker_metrics import VISIBLE, GpuMetrics

GIB = 1 << 30


class NVMLError(Exception):
    pass


class Library:
    """Three GPUs; the last one has fallen off the bus."""

    NVMLError = NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 2:
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-b":
            raise NVMLError("Not Found")
        return 1

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle == 2:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(used=(handle + 1) * GIB, total=80 * GIB)

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return b"NVIDIA L4" if handle == 2 else "NVIDIA H100 80GB HBM3"  # bytes: of older releases

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50 + handle)


def gpus(visible: str | None) -> tuple[int, CollectorRegistry]:
    metrics = GpuMetrics(Library(), "penstock_worker", {} if visible is None else {VISIBLE: visible})
    registry = CollectorRegistry()
    registry.register(metrics)
    return metrics.count, registry


@pytest.mark.parametrize(
    ("visible", "used"), [(None, [1, 2]), ("1,0", [2, 1]), ("GPU-b", [2]), ("1,9,0", [2]), ("", [])]
)
def test_the_gpus_that_a_worker_sees_are_shown_by_their_index_there(visible: str | None, used: list[int]) -> None:
    _, registry = gpus(visible)
    for index, gib in enumerate(used):
        labels = {"gpu": str(index)}
        assert registry.get_sample_value("penstock_worker_gpu_memory_used_bytes", labels) == gib * GIB
        assert registry.get_sample_value("penstock_worker_gpu_memory_bytes", labels) == 80 * GIB
        assert registry.get_sample_value("penstock_worker_gpu_utilization_ratio", labels) == (49 + gib) / 100
    assert registry.get_sample_value("penstock_worker_gpu_memory_used_bytes", {"gpu": str(len(used))}) is None


def test_a_lost_gpu_counts_and_has_no_series() -> None:
    count, registry = gpus("2,0")
    assert count == 2
    assert registry.get_sample_value("penstock_worker_gpu_memory_used_bytes", {"gpu": "0"}) is None
    assert registry.get_sample_value("penstock_worker_gpu_memory_used_bytes", {"gpu": "1"}) == GIB


@pytest.mark.parametrize(
    ("visible", "device"),
    [("1,0", "2x NVIDIA H100 80GB HBM3"), ("2,0", "1x NVIDIA H100 80GB HBM3, 1x NVIDIA L4"), ("", "")],
)
def test_a_worker_tells_what_its_gpus_are(visible: str, device: str) -> None:
    assert GpuMetrics(Library(), "penstock_worker", {VISIBLE: visible}).device == device
