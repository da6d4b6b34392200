"""vLLM behind our engine protocol; see ``workers.engines.external.engine``.

A third kind of thread reads KV events, one per rank, into the same queue.
"""

import contextlib
import queue
import time
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import structlog
from prometheus_client.registry import Collector

from schemas.kv import KvEvent
from workers.engines.base import EngineInfo, EngineStats, SequenceRequest
from workers.engines.events import wire
from workers.engines.external.engine import ExternalEngine
from workers.engines.external.handoff_state import ConsumedStates
from workers.engines.external.metrics import NativeSeries
from workers.engines.loop import LoopThread
from workers.engines.vllm.api import Api
from workers.engines.vllm.follower import ActiveSequence, EngineEvent, Follower, KvPayloads
from workers.engines.vllm.kv_events import Translator
from workers.engines.vllm.metrics import PREFIX, Scheduler
from workers.engines.vllm.prepare import Options, check, prepare

log = structlog.get_logger("engine")

LINGER_S = 0.1  # KV events of an answer come after it, by another way


class VllmEngine(ExternalEngine[ActiveSequence]):
    """Implements ``workers.engines.base.Engine``.

    Args:
        resources: what ends with it: the subscribers, then ``llm``, then ``loop``.

    KV moves by vLLM's own NIXL connector: there is no ``memory`` of ours, hand-overs are ``opaque``.
    """

    _follower: Follower

    def __init__(
        self,
        info: EngineInfo,
        llm: Any,
        api: Api,
        loop: LoopThread,
        options: Options,
        scheduler: Scheduler,
        inbox: "queue.SimpleQueue[EngineEvent]",
        resources: contextlib.ExitStack,
    ) -> None:
        super().__init__("vLLM", info, loop, resources, inbox)
        self._options = options
        self._scheduler = scheduler
        self._follower = Follower(llm, api, loop, options.layout, self._enqueue)
        self._translators = [Translator(info.block_size, options.root) for _ in range(info.dp_size)]
        self._consumed = ConsumedStates()
        loop.post(lambda: loop.task(self._follower.watch(), "health"))

    def _accept(self, request: SequenceRequest) -> ActiveSequence:
        check(request, self.info, self._options)

        def again() -> Any:
            return prepare(msgspec.structs.replace(request, opaque=b""), self.info, self._options, self._consumed)

        return ActiveSequence(request, prepare(request, self.info, self._options, self._consumed), again)

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
        if self._active:  # what the scheduler last said is old once nothing runs
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
