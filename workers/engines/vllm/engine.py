"""vLLM behind our engine protocol; see ``workers.engines.external.engine``.

Besides the engine thread and the loop thread, one thread per rank reads KV events into the same queue.
"""

import time
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import structlog
from prometheus_client.registry import Collector

from schemas.kv import KvEvent
from workers.engines.base import EngineInfo, EngineStats, SequenceRequest
from workers.engines.events import wire
from workers.engines.external.engine import EngineRuntime, ExternalEngine
from workers.engines.external.handoff_state import ConsumedStates
from workers.engines.external.metrics import NativeSeries
from workers.engines.vllm.api import Api
from workers.engines.vllm.follower import ActiveSequence, Follower, KvPayloads
from workers.engines.vllm.kv_events import Translator
from workers.engines.vllm.metrics import PREFIX, SchedulerStats
from workers.engines.vllm.prepare import Options, check, prepare

log = structlog.get_logger("engine")

LINGER_S = 0.1  # KV events of a request arrive after its last output, over another channel


class VllmEngine(ExternalEngine[ActiveSequence]):
    """Implements ``workers.engines.base.Engine``.

    Args:
        runtime: closed with it, first the subscribers, then the engine, then its loop.

    KV moves through vLLM's own NIXL connector: ``memory`` is empty, handoffs are ``opaque``.
    """

    _follower: Follower

    def __init__(
        self,
        info: EngineInfo,
        runtime: EngineRuntime[Api],
        options: Options,
        scheduler: SchedulerStats,
    ) -> None:
        super().__init__("vLLM", info, runtime)
        self._options = options
        self._scheduler = scheduler
        self._follower = Follower(runtime, options.layout, self._enqueue)
        self._translators = [Translator(info.block_size, options.root) for _ in range(info.dp_size)]
        self._consumed = ConsumedStates()
        loop = runtime.loop
        loop.post(lambda: loop.task(self._follower.watch(), "health"))

    def _accept(self, request: SequenceRequest) -> ActiveSequence:
        check(request, self.info, self._options)

        def without_handoff() -> Any:
            return prepare(msgspec.structs.replace(request, opaque=b""), self.info, self._options, self._consumed)

        return ActiveSequence(request, prepare(request, self.info, self._options, self._consumed), without_handoff)

    def has_work(self) -> bool:
        return super().has_work() or (self.info.kv_events and time.monotonic() - self._ended_at < LINGER_S)

    def _on_event(self, event: KvPayloads, events: list[KvEvent], others: dict[int, list[KvEvent]]) -> None:
        if named := self._named(event):
            (others.setdefault(event.rank, []) if event.rank else events).extend(named)

    def _named(self, event: KvPayloads) -> list[KvEvent]:
        translator = self._translators[event.rank]
        events = translator.forget() if event.lost else []
        for payload in event.payloads:
            try:
                events += translator.feed(wire.decode_raw(payload))
            except ValueError as error:
                translator.counts.malformed += 1
                log.warning("kv_events_malformed", error=str(error), action="forgetting this rank's blocks")
                events += translator.forget()
        return events

    def stats(self) -> EngineStats:
        total = self.info.total_blocks
        pinned = min(total, sum(self._held.values()))
        used = pinned
        if self._active:  # the scheduler's last statistics are outdated once nothing runs
            used = min(total, max(used, round(self._scheduler.used * total)))
        cached = min(total - used, sum(translator.names for translator in self._translators))
        return EngineStats(
            running=self._running,
            waiting=len(self._active) - self._running,
            used_blocks=used,
            cached_blocks=cached,
            free_blocks=total - used - cached,
            pinned_blocks=pinned,
            preemptions=self._scheduler.preemptions,
            hit_tokens=self._hit,
            prompt_tokens=self._prompt,
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._translators[rank].dump()

    def collectors(self) -> Seq[Collector]:
        """The engine's own metrics, for the worker's registry."""
        return [NativeSeries(PREFIX)]
