"""The SGLang-specific part of an external engine; see ``penstock.workers.engines.external.engine``.

Besides the engine thread and the loop thread, one thread per rank reads KV events into the same queue.
"""

from collections.abc import Sequence as Seq
from typing import Any

import structlog
from prometheus_client.registry import Collector

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.adapter import AdapterFolder
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import EngineInfo, SequenceRequest, VisionEngine
from penstock.workers.engines.external.engine import LORA_S, BlockCounts, EngineLoras, unreadable
from penstock.workers.engines.external.event_streams import EventStreams, KvPayloads
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.sglang.api import SglangApi
from penstock.workers.engines.sglang.engine_inputs import SglangInputs, SglangOptions, check, meeting, offer, prepare
from penstock.workers.engines.sglang.follower import SglangCall, SglangFollower
from penstock.workers.engines.sglang.processes import Processes
from penstock.workers.engines.sglang.sglang_metrics import RankLoads, SglangSeries

log = structlog.get_logger("engine")


def loras(runtime: EngineRuntime[SglangApi], settings: WorkerSettings) -> EngineLoras:
    """LoRA adapters, which SGLang knows by name: here by our id, which no other content has."""
    loop, llm = runtime.loop, runtime.llm

    def read(identity: str, folder: AdapterFolder) -> str:
        try:
            answer = loop.run(llm.async_load_lora_adapter(identity, str(folder.path)), LORA_S)
        except Exception as error:  # of SGLang's, of any kind
            raise unreadable("SGLang", folder, error) from error
        if not answer.success:
            raise unreadable("SGLang", folder, answer.error_message)
        return identity

    def drop(identity: str, name: str) -> None:
        async def unload() -> None:
            answer = await llm.async_unload_lora_adapter(name)
            if not answer.success:
                log.warning("adapter_kept", adapter=identity, error=answer.error_message)

        loop.task(unload(), "adapter")

    return EngineLoras(settings.max_loras, settings.max_lora_rank, runtime, read, drop)


class SglangAdapter:
    """Implements ``penstock.workers.engines.external.engine.Adapter``.

    Args:
        runtime: its resources are the subscribers, then the engine, then its loop.
        metrics: SGLang's own.
    """

    title = "SGLang"
    linger_s = 0.1  # KV events come over another channel than the outputs
    vision: VisionEngine | None = None

    def __init__(
        self,
        info: EngineInfo,
        runtime: EngineRuntime[SglangApi],
        options: SglangOptions,
        loads: RankLoads,
        processes: Processes,
        metrics: SglangSeries,
    ) -> None:
        self._info = info
        self.options = options
        self._loads = loads
        self._metrics = metrics
        self._follower = SglangFollower(runtime, loads, processes, info.slots, options)
        self._consumed = ConsumedStates()
        self._streams = EventStreams(info.dp_size, info.block_size, options.root)
        loop = runtime.loop
        loop.post(lambda: loop.task(self._follower.watch(), "health"))

    def accept(self, request: SequenceRequest, lora: Any = None) -> ActiveSequence[SglangCall]:
        info, options = self._info, self.options
        check(request, info, options)
        room, missing, offered = None, "", b""
        if options.layout:
            try:
                room = meeting(request, info, options, self._consumed)
            except ValueError as error:
                missing = str(error)
            if options.role == "prefill":
                offered = offer(request, info, options)

        def next_call(said: Seq[int]) -> SglangInputs:
            return prepare(request, info, options, said, room, lora)

        if request.constraint is not None:
            next_call(())  # refuses one that cannot be compiled
        call = SglangCall(next_call, request.sampling.logprobs, request.handoff, offered, missing)
        return ActiveSequence(request, call)

    def launch(self, sequence: ActiveSequence[SglangCall]) -> None:
        self._follower.launch(sequence)

    def abort(self, sequence: ActiveSequence[SglangCall]) -> None:
        self._follower.abort(sequence)

    def kv_events(self, event: KvPayloads) -> dict[int, list[KvEvent]]:
        return self._streams.feed(event)

    def block_counts(self, *, active: bool, pinned: int) -> BlockCounts:
        used = self._loads.used_blocks(self._info.block_size) if active else 0  # outdated once nothing runs
        return self._streams.block_counts(self._info.total_blocks, used, pinned, self._loads.preemptions)

    def dump(self, rank: int) -> list[KvEvent]:
        return self._streams.dump(rank)

    def memory(self) -> dict[str, Memory]:
        return {}

    def collectors(self) -> Seq[Collector]:
        return [self._metrics]
