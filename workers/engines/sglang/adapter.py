"""The SGLang-specific part of an external engine; see ``penstock.workers.engines.external.engine``.

Besides the engine thread and the loop thread, one thread per rank reads KV events into the same queue.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import Tree
from penstock.infra.model.adapter import AdapterFolder
from penstock.schemas.errors import Code
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external.engine import LORA_S, Adapter, EngineLoras, WeightCommands, unreadable
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.engines.external.event_streams import EMPTIED, KV_EVENTS_S, EventStreams
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.sglang.api import SglangApi
from penstock.workers.engines.sglang.engine_inputs import SglangInputs, SglangOptions, check, meeting, offer, prepare
from penstock.workers.engines.sglang.follower import RankLoads, SglangCall, SglangFollower

log = structlog.get_logger("engine")

HEALTH_S = 0.5
NO_SAVER = (
    "SGLang frees memory only if it was started for that (--sleep-after-s, --share-device, or enable_memory_saver and "
    "enable_weights_cpu_backup in its arguments)"
)


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


def weight_commands(runtime: EngineRuntime[SglangApi], path: Path, tree: Tree) -> WeightCommands:
    """
    Args:
        path: of the model's folder.
        tree: the engine's arguments.
    """
    manager, commands = runtime.llm.tokenizer_manager, runtime.api.commands
    fixed = ""
    drafts = "a draft model stays on the device" if tree.get("speculative_algorithm") not in (None, "NGRAM") else ""
    if drafts:
        fixed = "SGLang loads a folder into the model and its draft model; restart workers"
    elif tree.get("enable_lora"):  # its wrapped layers name some of their tensors otherwise
        fixed = "SGLang's weights are not replaced below LoRA adapters; restart workers"
    saver = "" if tree.get("enable_memory_saver") else NO_SAVER

    async def idle() -> bool:
        return bool((await manager.flush_cache()).success)

    async def load(folder: Path) -> None:
        asked = commands.UpdateWeightFromDiskReqInput(model_path=str(folder))
        done, message, *_ = await manager.update_weights_from_disk(asked)
        if done:
            return
        # Before it touches them, it says so. What it calls a way back reads the new folder again (0.5.23).
        if message.startswith(("Failed to update weights", "Weights were updated")):
            raise EngineError(f"SGLang has loaded a part of {folder}: {message}")
        raise RequestError(Code.unsupported, f"SGLang does not load {folder}: {message}")

    async def sleep() -> None:
        await manager.release_memory_occupation(commands.ReleaseMemoryOccupationReqInput())

    async def wake() -> None:
        await manager.resume_memory_occupation(commands.ResumeMemoryOccupationReqInput())

    return WeightCommands(path, idle, load, sleep, wake, EMPTIED, fixed, drafts or saver)


def adapter_of(
    info: EngineInfo,
    runtime: EngineRuntime[SglangApi],
    options: SglangOptions,
    loads: RankLoads,
    pids: Collection[int],
    metrics: NativeSeries,
) -> Adapter[SglangCall]:
    """
    Args:
        pids: of the engine's processes.
        metrics: SGLang's own.
    """
    consumed = ConsumedStates()

    def accept(request: SequenceRequest, lora: Any) -> ActiveSequence[SglangCall]:
        check(request, info, options)
        room, missing, offered = None, "", b""
        if options.layout:
            try:
                room = meeting(request, info, options, consumed)
            except ValueError as error:
                missing = str(error)
            if options.role == "prefill":
                offered = offer(request, info, options)

        def next_call(generated: Seq[int]) -> SglangInputs:
            return prepare(request, info, options, generated, room, lora)

        if request.constraint is not None:
            next_call(())  # refuses one that cannot be compiled
        call = SglangCall(next_call, request.sampling.logprobs, request.handoff, offered, missing)
        return ActiveSequence(request, call)

    def load() -> tuple[int, int]:
        return loads.used_blocks(info.block_size), loads.preemptions

    follower = SglangFollower(runtime, loads, pids, info.slots, options)
    follower.watch(follower.check, HEALTH_S)
    return Adapter(
        "SGLang",
        accept,
        follower,
        EventStreams(info, options.root, load),
        collectors=[metrics],
        linger_s=KV_EVENTS_S,
    )
