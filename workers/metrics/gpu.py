"""Memory and use of the GPUs that a worker's engine sees, read through NVIDIA's management library.

The library (package ``nvidia-ml-py``) needs no CUDA context, so that it also serves engines in processes of their own.
Without it, or without a GPU, there are no such series.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger("worker")

VISIBLE = "CUDA_VISIBLE_DEVICES"


def find_library() -> ModuleType | None:
    """NVIDIA's management library, ready for use; None: it is not installed, or there is no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("gpu_metrics_off", error=str(error))
        return None
    return pynvml  # type: ignore[no-any-return]


class GpuMetrics(Collector):
    """Register it with a worker's scope. ``gpu`` is the index among those that the worker sees.

    Args:
        library: from ``find_library``.
        prefix: of the series.
    """

    def __init__(self, library: Any, prefix: str, environ: Mapping[str, str] = os.environ) -> None:
        self._library = library
        self._prefix = prefix
        self._handles = list(self._visible(environ.get(VISIBLE)))

    @property
    def count(self) -> int:
        """GPUs that the worker sees."""
        return len(self._handles)

    @property
    def device(self) -> str:
        """What they are, as in "2x NVIDIA H100 80GB HBM3"; "": none, or not told."""
        names: dict[str, int] = {}
        with contextlib.suppress(self._library.NVMLError):
            for handle in self._handles:
                name = self._library.nvmlDeviceGetName(handle)
                name = name.decode() if isinstance(name, bytes) else name  # of older releases
                names[name] = names.get(name, 0) + 1
        return ", ".join(f"{count}x {name}" for name, count in sorted(names.items()))

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(f"{self._prefix}_gpu_memory_used_bytes", "memory in use on a GPU", labels=["gpu"])
        total = GaugeMetricFamily(f"{self._prefix}_gpu_memory_bytes", "memory of a GPU", labels=["gpu"])
        busy = GaugeMetricFamily(
            f"{self._prefix}_gpu_utilization_ratio", "share of the last second in which kernels ran", labels=["gpu"]
        )
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(self._library.NVMLError):  # a GPU that has fallen off the bus
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
                used.add_metric([str(index)], memory.used)
                total.add_metric([str(index)], memory.total)
                busy.add_metric([str(index)], self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        yield from (used, total, busy)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the scope names them when they are read."""
        return iter(())

    def _visible(self, chosen: str | None) -> Iterator[Any]:
        """Handles of the GPUs in CUDA_VISIBLE_DEVICES (indices or UUIDs, up to the first unknown one, as CUDA does)."""
        library = self._library
        if chosen is None:
            yield from map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
            return
        for name in filter(None, (each.strip() for each in chosen.split(","))):
            try:
                if name.isdigit():
                    yield library.nvmlDeviceGetHandleByIndex(int(name))
                else:
                    yield library.nvmlDeviceGetHandleByUUID(name)
            except library.NVMLError:
                return
