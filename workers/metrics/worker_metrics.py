"""The metrics of a worker. One scope per process; names end in their unit.

Memory and use of the engine's GPUs are read through NVIDIA's management library (package ``nvidia-ml-py``). It needs no
CUDA context, so it also serves engines in processes of their own. Without it, or without a GPU, there are no such
series.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import structlog
from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.infra.metrics.scope import FIRST_TOKEN_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, MetricScope
from penstock.schemas.done import Done
from penstock.schemas.fleet import GpuUse
from penstock.schemas.transfer import Handoff
from penstock.workers.engines.engine_protocol import EngineInfo, EngineStats, GrammarStats
from penstock.workers.kv_transfer.transport_protocol import CAUSES

log = structlog.get_logger("worker")

VISIBLE = "CUDA_VISIBLE_DEVICES"
READ_GPUS_S = 5.0  # a reading takes about a millisecond a GPU, and is in the next renewal of the lease
OLD_S = 30.0  # a driver that answers no more leaves its caller hanging
UUID_SHOWN = 12  # characters


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
        """What they are, as in "2x NVIDIA H100 80GB HBM3"; "": none, or unknown."""
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

    def use(self) -> tuple[GpuUse, ...]:
        """What each GPU has in use. Blocks for as long as the driver takes."""
        return tuple(map(self._use, self._handles))

    def _use(self, handle: Any) -> GpuUse:
        library = self._library
        try:
            uuid = library.nvmlDeviceGetUUID(handle)
            uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
            memory = library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError as error:
            return GpuUse(error=str(error))
        busy = -1
        with contextlib.suppress(library.NVMLError):  # not supported by a part of a GPU (MIG)
            busy = library.nvmlDeviceGetUtilizationRates(handle).gpu
        return GpuUse(uuid[:UUID_SHOWN], memory.total, memory.used, busy)

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


class GpuReader:
    """Reads GPUs in a thread of its own, which does not keep the process from ending: a broken driver may not answer.

    Args:
        read: as in ``GpuMetrics.use``.
    """

    def __init__(
        self,
        read: Callable[[], tuple[GpuUse, ...]],
        every_s: float = READ_GPUS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._every_s, self._clock = read, every_s, clock
        self._last: tuple[float, tuple[GpuUse, ...]] = clock(), ()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
        self._thread.start()

    @property
    def use(self) -> tuple[GpuUse, ...]:
        """The last reading; with an error instead of values if it is older than ``OLD_S``."""
        at, gpus = self._last
        age_s = self._clock() - at
        if age_s <= OLD_S:
            return gpus
        silent = GpuUse(error=f"NVIDIA's driver has not answered for {age_s:.0f} s")
        return tuple(silent for _ in gpus or (silent,))

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        said = ""
        while not self._stopped.is_set():
            try:
                self._last = self._clock(), self._read()
                said = ""
            except Exception as error:  # of the library's own: the next reading may succeed, and its age is shown
                if said != (said := repr(error)):
                    log.warning("gpus_unread", error=said)
            self._stopped.wait(self._every_s)


class Total:
    """A counter that is set to a total of an engine instead of being increased.

    Prometheus takes a counter that falls for a restart, so a smaller total (the engine restarted) counts from zero.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0.0

    def set(self, total: float) -> None:
        """The total since the engine's start, as it is now."""
        grown = total - self._last if total >= self._last else total
        self._last = total
        if grown:
            self._counter.inc(grown)


class KvMetrics:
    """
    Args:
        scope: with the prefix of these metrics.
    """

    def __init__(self, scope: MetricScope) -> None:
        self.scope = scope
        self.capacity = scope.gauge("capacity_blocks", "KV blocks in all")
        self.block_size = scope.gauge("block_size_tokens", "tokens in a KV block")
        self.used = scope.gauge("used_blocks", "KV blocks held by sequences")
        self.cached = scope.gauge("cached_blocks", "KV blocks kept for reuse")
        self.free = scope.gauge("free_blocks", "KV blocks without content")
        self.usage = scope.gauge("usage_ratio", "share of the KV blocks that sequences hold")
        self.host = scope.gauge("host_blocks", "KV blocks kept in host memory")
        self.loaded = Total(scope.counter("loaded_blocks", "KV blocks copied back from host memory"))
        self.disk = scope.gauge("disk_blocks", "KV blocks kept in files")
        self.disk_read = Total(scope.counter("disk_read_blocks", "KV blocks read from files"))
        self.disk_written = Total(scope.counter("disk_written_blocks", "KV blocks written to files"))
        self.disk_lost = Total(scope.counter("disk_lost_blocks", "KV blocks that left host memory unwritten"))

    def observe(self, stats: EngineStats) -> None:
        """The engine's statistics, as they are now."""
        self.used.set(stats.used_blocks)
        self.cached.set(stats.cached_blocks)
        self.free.set(stats.free_blocks)
        blocks = stats.used_blocks + stats.cached_blocks + stats.free_blocks
        self.usage.set(stats.used_blocks / blocks if blocks else 0.0)
        self.host.set(stats.host_blocks)
        self.loaded.set(stats.loaded_blocks)
        self.disk.set(stats.disk_blocks)
        self.disk_read.set(stats.disk_read_blocks)
        self.disk_written.set(stats.disk_written_blocks)
        self.disk_lost.set(stats.disk_lost_blocks)


READ_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5)
BATCH_INPUTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LABELS = ("namespace", "component", "process", "model", "role")


class WorkerMetrics:
    """Requests and tokens are counted in the thread of the event loop only.

    Args:
        process: the scope of the process.
    Attributes:
        device: what the engine computes on, as in ``fleet.Registration``.
    """

    def __init__(self, process: MetricScope) -> None:
        self.device = ""
        self._gpu_reader: GpuReader | None = None
        self.process = process
        self.registry = process.registry
        scope = self.scope = process.child("worker")
        self.kv = KvMetrics(scope.child("kv"))
        self.handoff = HandoffMetrics(process.child("handoff"))
        self.moves = MoveMetrics(process.child("moves"))
        self.embed = EmbedMetrics(process.child("embed"))
        self.tokens = scope.thread_counter("tokens", "output tokens")
        self.pictures = scope.counter("pictures", "images and videos made", ["kind"])
        self.requests = scope.thread_counter("requests", "requests that ended here or were handed off", ["code"])
        self.latency = scope.thread_histogram(
            "request_seconds", "from the start on this worker to the end", buckets=REQUEST_SECONDS
        )
        self.queue = scope.thread_histogram(
            "queue_seconds", "from the router's decision to the start on this worker", buckets=FIRST_TOKEN_SECONDS
        )
        self.prefill = scope.thread_histogram(
            "prefill_seconds", "from the start on this worker to the first token", buckets=FIRST_TOKEN_SECONDS
        )
        self.decode = scope.thread_histogram(
            "time_per_output_token_seconds",
            "mean time between the tokens of an ended request, from its first token on",
            buckets=TOKEN_SECONDS,
        )
        self.load_time = scope.gauge("model_load_seconds", "time to build the engine")
        self.max_sequences = scope.gauge("max_sequences", "sequences that can be in the batch")
        self.max_batched_tokens = scope.gauge("max_batched_tokens", "tokens computed per step; 0: unknown")
        self.max_model_len = scope.gauge("max_model_len", "tokens of prompt and answer")
        self.gpus = scope.gauge("gpus", "GPUs that the engine sees; 0: none, or nvidia-ml-py is not installed")
        self.running = scope.gauge("running", "sequences in the batch")
        self.waiting = scope.gauge("waiting", "sequences queued in the engine")
        self.quiet = scope.gauge("quiet_seconds", "since the engine did something, while it has something to do")
        self.slowest_step = scope.gauge("slowest_step_seconds", "the longest step of the last 30 to 60 seconds")
        self.token_latency = scope.gauge(
            "token_latency_seconds",
            "from one token of a sequence to the next, of prefill workers the time of a prompt: mean of the last 30 to "
            "60 seconds with enough of them; 0: unknown",
        )
        self.token_engine = scope.gauge(
            "token_engine_seconds", "that the engine spent on each such token, or prompt; 0: unknown"
        )
        self.token_work = scope.gauge(
            "token_work_seconds", "that it spent on a token, those of prompts included; 0: unknown"
        )
        self.decode_step = scope.gauge(
            "decode_step_seconds", "of its engine's steps that computed no prompt: their mean; 0: unknown"
        )
        self.preempted = Total(scope.counter("preemptions", "sequences recomputed"))
        self.hit = Total(scope.counter("prefix_hit_tokens", "prompt tokens taken from the cache"))
        self.prompt = Total(scope.counter("prompt_tokens", "prompt tokens admitted"))
        self.drafts = Total(scope.counter("spec_decode_num_drafts", "sequences in steps with proposed tokens"))
        self.draft_tokens = Total(scope.counter("spec_decode_num_draft_tokens", "tokens proposed by speculation"))
        self.accepted_tokens = Total(
            scope.counter("spec_decode_num_accepted_tokens", "proposed tokens that were accepted")
        )
        self.logits_errors = Total(scope.counter("logits_errors", "calls of logits processors that failed"))
        grammars = scope.counter("grammars", "constraints of sequences, compiled or cached", ["source"])
        self.grammars_compiled = Total(grammars.labels("compiled"))
        self.grammars_cached = Total(grammars.labels("cached"))
        self.grammar_seconds = Total(scope.counter("grammar_compile_seconds", "time spent compiling constraints"))
        self.unsent = scope.gauge("unsent_bytes", "output not yet sent to the broker")
        self.tasks = scope.gauge("tasks", "asyncio tasks, counted when asked")

    def engine_built(self, model: str, info: EngineInfo) -> None:
        """Set the gauges that stay constant while the engine runs."""
        self.process.set_label("model", model)
        self.max_sequences.set(info.slots)
        self.max_batched_tokens.set(info.max_batched_tokens)
        self.max_model_len.set(info.max_model_len)
        self.kv.capacity.set(info.total_blocks)
        self.kv.block_size.set(info.block_size)

    def watch_gpus(self) -> None:
        """Show the GPUs that this process sees, and read them from now on."""
        if (library := find_library()) is not None:
            gpus = GpuMetrics(library, self.scope.prefix)
            self.scope.register(gpus)
            self.gpus.set(gpus.count)
            self.device = gpus.device
            if gpus.count:
                self._gpu_reader = GpuReader(gpus.use)

    @property
    def gpu_use(self) -> tuple[GpuUse, ...]:
        """As of ``fleet.Load.gpus``."""
        return () if self._gpu_reader is None else self._gpu_reader.use

    def close(self) -> None:
        if self._gpu_reader is not None:
            self._gpu_reader.stop()

    def observe(self, stats: EngineStats, unsent_bytes: int, grammars: GrammarStats | None = None) -> None:
        """The engine's statistics, as they are now. ``grammars``: of an engine that applies constraints."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        if stats.slots:
            self.max_sequences.set(stats.slots)
        self.preempted.set(stats.preemptions)
        self.hit.set(stats.hit_tokens)
        self.prompt.set(stats.prompt_tokens)
        self.drafts.set(stats.drafts)
        self.draft_tokens.set(stats.draft_tokens)
        self.accepted_tokens.set(stats.accepted_tokens)
        self.logits_errors.set(stats.logits_errors)
        self.unsent.set(unsent_bytes)
        self.kv.observe(stats)
        if grammars is not None:
            self.grammars_compiled.set(grammars.compiled)
            self.grammars_cached.set(grammars.cached)
            self.grammar_seconds.set(grammars.seconds)

    def paced(self, latency_us: int, engine_us: int, work_ns: int, decode_us: int) -> None:
        """Values as in ``fleet.Load``."""
        self.token_latency.set(latency_us / 1e6)
        self.token_engine.set(engine_us / 1e6)
        self.token_work.set(work_ns / 1e9)
        self.decode_step.set(decode_us / 1e6)

    def ended(self, event: Done, *, prefilled: bool = False) -> None:
        """A request's terminal event.

        Args:
            prefilled: another worker computed the prompt, and has counted that.
        """
        times, tokens = event.timings, event.usage.completion
        self.requests.labels(event.code or "ok").inc()
        if times.started_ns:
            self.latency.observe(max(0, times.ended_ns - times.started_ns) / 1e9)
            if not prefilled:
                self._prefilled(times.routed_ns, times.started_ns, times.first_token_ns)
        if times.first_token_ns and tokens > 1:
            self.decode.observe(max(0, times.ended_ns - times.first_token_ns) / 1e9 / (tokens - 1))

    def handed_off(self, routed_ns: int, started_ns: int, first_token_ns: int) -> None:
        """The next stage's worker has the request. Times are of this stage, Unix time in ns; 0: did not happen."""
        self.requests.labels("ok").inc()
        if started_ns:
            self._prefilled(routed_ns, started_ns, first_token_ns)

    def _prefilled(self, routed_ns: int, started_ns: int, first_token_ns: int) -> None:
        if routed_ns:
            self.queue.observe(max(0, started_ns - routed_ns) / 1e9)
        if first_token_ns:
            self.prefill.observe(max(0, first_token_ns - started_ns) / 1e9)


class EmbedMetrics:
    """Metrics of a worker that makes embeddings."""

    def __init__(self, scope: MetricScope) -> None:
        self.vectors = scope.counter("vectors", "vectors made")
        self.tokens = scope.counter("tokens", "tokens of inputs computed")
        self.padding = scope.counter("padding_tokens", "computed beside them, to make inputs of a batch equally long")
        self.batch_inputs = scope.histogram("batch_inputs", "inputs computed together", buckets=BATCH_INPUTS)


class MoveMetrics:
    """Metrics of the prefixes that this worker reads from the caches of others instead of computing them."""

    def __init__(self, scope: MetricScope) -> None:
        self.scope = scope
        self.done = scope.counter("prefixes", "prefixes read from other workers")
        self.blocks = scope.counter("blocks", "blocks of these prefixes")
        self.bytes = scope.counter("bytes", "bytes of these blocks")
        self.seconds = scope.histogram("seconds", "time from the job to the blocks in the cache", buckets=READ_SECONDS)
        self.failed = scope.counter("failures", "prefixes that were computed after all", ["cause"])
        for cause in (*CAUSES, "silent"):
            self.failed.labels(cause)

    def moved(self, blocks: int, size: int, seconds: float) -> None:
        """
        Args:
            size: bytes.
        """
        self.done.inc()
        self.blocks.inc(blocks)
        self.bytes.inc(size)
        self.seconds.observe(seconds)


class HandoffMetrics:
    """Metrics of the KV blocks that move between workers."""

    def __init__(self, scope: MetricScope) -> None:
        self.scope = scope
        self.leases = scope.gauge("open_leases", "leases on blocks for other workers")
        self.pinned = scope.gauge("pinned_blocks", "blocks pinned under those leases")
        self.transfers = scope.gauge("transfers", "reads and writes of blocks under way that this worker drives")
        self.registered = scope.gauge("registered_bytes", "memory registered for other workers to read and write")
        self.states = scope.counter("events", "lines of the ledger", ["state"])
        self.read_bytes = scope.counter("read_bytes", "bytes read from other workers")
        self.read_seconds = scope.histogram(
            "read_seconds", "time to read the blocks of one request", buckets=READ_SECONDS
        )
        self.failed = scope.counter("failures", "handoffs that failed", ["cause"])
        for cause in CAUSES:  # an alert sees the first one only if the series exists before it
            self.failed.labels(cause)
        self.quarantined = scope.gauge("quarantined_blocks", "unusable for now")

    def recorded(self, line: Handoff) -> None:
        """One line of the ledger."""
        self.states.labels(line.state).inc()
        if line.state == "read":
            self.read_bytes.inc(line.bytes)
            self.read_seconds.observe(line.seconds)
        elif line.state == "failed":
            self.failed.labels(line.cause).inc()
        elif line.state == "quarantined":
            self.quarantined.inc(line.blocks)
        elif line.state == "settled":
            self.quarantined.dec(line.blocks)
