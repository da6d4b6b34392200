"""GPU metrics, on a stand-in of NVIDIA's management library."""

import threading
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from penstock.schemas.fleet import GpuUse
from penstock.workers.metrics.worker_metrics import OLD_S, VISIBLE, GpuMetrics, GpuReader

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

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        uuid = f"GPU-{handle:08x}-1111-2222-3333-444444444444"
        return uuid.encode() if handle == 1 else uuid  # bytes: of older releases

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


def test_use_is_read_for_each_gpu_with_the_error_of_a_lost_one() -> None:
    assert GpuMetrics(Library(), "penstock_worker", {VISIBLE: "1,2"}).use() == (
        GpuUse("GPU-00000001", 80 * GIB, 2 * GIB, 51),
        GpuUse(error="GPU is lost"),
    )


class MigLibrary(Library):
    """Parts of a GPU have memory of their own, and no utilization."""

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        raise NVMLError("Not Supported")


def test_of_a_part_of_a_gpu_the_memory_is_known_and_its_use_is_not() -> None:
    metrics = GpuMetrics(MigLibrary(), "penstock_worker", {VISIBLE: "0"})
    assert metrics.use() == (GpuUse("GPU-00000000", 80 * GIB, GIB, -1),)
    registry = CollectorRegistry()
    registry.register(metrics)
    assert registry.get_sample_value("penstock_worker_gpu_memory_used_bytes", {"gpu": "0"}) == GIB


class UnloadedLibrary(Library):
    """The driver was unloaded after the start, as for its update."""

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        raise NVMLError("Driver Not Loaded")


def test_without_its_driver_no_gpu_can_be_read() -> None:
    assert {gpu.error for gpu in GpuMetrics(UnloadedLibrary(), "penstock_worker", {}).use()} == {"Driver Not Loaded"}


def test_a_driver_that_hangs_hangs_its_reader_alone_and_is_shown_once_the_reading_is_old() -> None:
    now, gpu, reads, hangs = [0.0], GpuUse("GPU-0", GIB, 1, 2), threading.Semaphore(0), threading.Event()

    def read() -> tuple[GpuUse, ...]:
        if not reads.acquire(blocking=False):
            waiting.set()
            hangs.wait(60)
        return (gpu, gpu)

    waiting = threading.Event()
    reads.release()
    reader = GpuReader(read, 0.0, lambda: now[0])
    try:
        assert waiting.wait(10)
        assert reader.use == (gpu, gpu)
        now[0] = OLD_S + 1
        assert [each.error for each in reader.use] == ["NVIDIA's driver has not answered for 31 s"] * 2
    finally:
        reader.stop()
        hangs.set()


def test_a_reading_that_fails_is_followed_by_the_next() -> None:
    failures, done = iter([OSError("libnvidia-ml.so"), RuntimeError("odd")]), threading.Event()

    def read() -> tuple[GpuUse, ...]:
        if (error := next(failures, None)) is not None:
            raise error
        done.set()
        return (GpuUse("GPU-0"),)

    reader = GpuReader(read, 0.0)
    try:
        assert done.wait(10)
    finally:
        reader.stop()
