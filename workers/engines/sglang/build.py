"""From settings to a running SGLang engine: arguments, checks, construction and one warm-up request."""

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.infra.process.user_folder import OwnFolder
from penstock.schemas import block_hashes
from penstock.workers.engines.constraints.compiler import OTHERS_CONSTRAINTS, compiler
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo
from penstock.workers.engines.external import arguments, nodes
from penstock.workers.engines.external.constrained import standard_tokenizer
from penstock.workers.engines.external.engine import ExternalEngine
from penstock.workers.engines.external.engine_metrics import MULTIPROCESS, NativeSeries
from penstock.workers.engines.external.event_streams import channels
from penstock.workers.engines.external.nodes import address, free_ports
from penstock.workers.engines.external.runtime import EngineRuntime, LoopThread, first_request, runs
from penstock.workers.engines.external.start import EngineNode, Package, start
from penstock.workers.engines.sglang import plugin
from penstock.workers.engines.sglang.adapter import RankLoads, SglangCall, adapter_of, loras, weight_commands
from penstock.workers.engines.sglang.api import SglangApi, load_sglang
from penstock.workers.engines.sglang.args import (
    ResolvedSglangArgs,
    SglangSettings,
    follower_tree,
    layout,
    ranks_of,
    resolve,
)
from penstock.workers.engines.sglang.engine_inputs import FAKE_HOST, Address, Room, SglangOptions
from penstock.workers.engines.support import ServedOptions

log = structlog.get_logger("engine")

WARM_UP_TOKENS = 2  # fewer than a block
PREFIX = "sglang:"  # of SGLang's own metrics
POLL_S = 0.5  # between two looks at the processes of a further machine
NO_WAIT = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"  # "0": there, the constructor returns before the end
# The context is a few tokens longer than the model's, and no sequence gets there: see ``args.context_length``.
OWN_ADDRESS = "SGLANG_HOST_IP"  # where ranks of other machines, and the other engine of a pair, reach this one
OTHER_NAMES = ("HOST_IP", "SGLANG_LOCAL_IP_NIC")  # of SGLang's for the same
LIBRARIES = "LD_LIBRARY_PATH"
VARIABLES = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def from_settings(
    settings: WorkerSettings, path: Path, asked: Callable[[], None] = lambda: None
) -> ExternalEngine[SglangCall]:
    """Load the model in ``path`` and warm up its engine.

    Args:
        asked: called when another machine of the engine was asked to stop; from any thread.

    Raises:
        BadArguments: the engine's arguments are wrong; one line per problem, each with its fix.
        EngineError: SGLang is not installed, or the engine did not start.
        modeldir.ModelError: the directory cannot be used.
    """
    began = time.perf_counter()
    api = load_sglang()
    model = modeldir.load(path)
    with contextlib.ExitStack() as undo:
        sockets = OwnFolder("kv")  # of this user alone: writers could forge KV events
        undo.callback(sockets.close)
        user_args = arguments.given_arguments(settings)
        wanted = wanted_of(settings, model.length.limit(settings.max_model_len), sockets.path, ranks_of(user_args))
        grammars = compiler(path) if standard_tokenizer(path) else None
        wanted = wanted._replace(constraints=grammars is not None)
        resolved = resolve(wanted, user_args, api.arguments)
        kept = arguments.keeps_weights(settings, resolved.ranks)
        kept = kept or ("" if api.salts else f"SGLang {api.version} has no cache_salt; install 0.5.23")
        arguments.check_weights(settings, kept)
        if resolved.tree.get("enable_memory_saver") and not api.saves_memory():
            raise EngineError("SGLang's memory saver is a package of its own: pip install torch-memory-saver")
        if settings.lora_slots and not api.salts:
            raise EngineError(f"SGLang {api.version} has no cache_salt, which LoRA adapters need; install 0.5.23")
        if resolved.pair and not api.nixl():
            raise EngineError("SGLang's handoff of KV needs the package nixl: pip install nixl")
        if resolved.tree.get("enable_trace") and not api.traces():
            raise EngineError(
                "--otlp-endpoint: SGLang sends spans with packages of its own: pip install 'sglang[tracing]'"
            )
        variables = dict(VARIABLES)
        if resolved.pair and not any(map(os.environ.get, OTHER_NAMES)):  # else the one towards the internet
            variables[OWN_ADDRESS] = wanted.host
        grammars = grammars if resolved.constraints else None
        if grammars is not None:
            variables[plugin.ACTIVE] = "1"
        if resolved.tree.get("enable_memory_saver"):
            folders = [*api.cuda_folders(), os.environ.get(LIBRARIES, "")]
            variables[LIBRARIES] = ":".join(filter(None, folders))
        multiprocess = os.environ.get(MULTIPROCESS)
        llm, loop, inbox, gpus = start(
            package_of(api),
            settings,
            model.revision,
            partial(api.construct, str(path), resolved.tree),
            undo,
            tree=resolved.tree,
            variables=variables,
            events=resolved.events,
            ranks=resolved.ranks,
            readers=lambda llm: list(llm.tokenizer_manager.asyncio_tasks),
            asked=asked,
        )
        pids, loads, series = pids_of(llm), RankLoads(), series_of(multiprocess)
        if (size := api.block_size(llm)) != settings.block_size:
            raise EngineError(f"SGLang chose blocks of {size} tokens for this model; use --block-size {size}")
        warm_up(llm, loop, loads, pair=resolved.pair)
        info = info_of(llm, settings, resolved, model, loads, load_seconds=time.perf_counter() - began)
        info = msgspec.structs.replace(info, constraints=() if grammars is None else OTHERS_CONSTRAINTS)
        if resolved.pair:
            offered = layout(api.version, resolved.tree, model.revision)
            backend = f"sglang {resolved.tree['disaggregation_transfer_backend']}"
            info = msgspec.structs.replace(info, handoff_layout=offered, pair_only=True, connector=backend)
        runtime = EngineRuntime(llm, api, loop, undo.pop_all(), inbox)
        at = Address(wanted.host, wanted.bootstrap_port)
        wait_s = settings.handoff_lease_s if settings.role == "decode" else 0.0
        options = SglangOptions(
            block_hashes.root(model.revision), settings.role, info.handoff_layout, at, wait_s, api.salts
        )
        adapters = loras(runtime, settings) if settings.lora_slots else None
        adapter = adapter_of(info, runtime, options, loads, pids, series)
        weights = None if kept else weight_commands(runtime, path, resolved.tree)
    log.info("sglang_ready", blocks=info.total_blocks, slots=info.slots, seeds=resolved.deterministic)
    return ExternalEngine(info, runtime, adapter, grammars, adapters, gpus=gpus, weights=weights)


def info_of(
    llm: Any,
    settings: WorkerSettings,
    resolved: ResolvedSglangArgs,
    model: modeldir.ModelDir,
    loads: RankLoads,
    *,
    load_seconds: float,
) -> EngineInfo:
    """The engine's sizes and capabilities, from what its schedulers said at start.

    Raises:
        EngineError: its pool does not hold one block.
    """
    found = llm._scheduler_init_result.scheduler_infos[0]
    tokens = int(found["max_total_num_tokens"])
    if tokens < settings.block_size:
        raise EngineError(f"SGLang's KV pool has {tokens} tokens, less than a block; raise mem_fraction_static")
    ranks = resolved.ranks
    return EngineInfo(
        name="sglang",
        block_size=settings.block_size,
        total_blocks=tokens // settings.block_size * ranks,
        slots=sum(loads.slots.values()) or settings.max_running * ranks,
        max_model_len=min(  # what its pool holds, if that is less
            arguments.length_limit(settings, model.length.limit(settings.max_model_len)),
            int(found["max_req_input_len"]),
        ),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        kv_events=resolved.events is not None,
        load_seconds=load_seconds,
        dp_size=ranks,
        max_batched_tokens=settings.max_batched_tokens,
        ignored_options=ServedOptions(seed=resolved.deterministic).ignored,
        quantization=str(resolved.tree.get("quantization") or ""),
    )


def wanted_of(settings: WorkerSettings, model_len: int, folder: Path, ranks: int) -> SglangSettings:
    """The worker's settings, and what follows from them for the engine.

    Raises:
        BadArguments: ``max_model_len`` is more than the model supports.
        EngineError: the folder's path is too long for sockets.
    """
    events, replay = channels(folder, ranks) if settings.use_kv_events else ("", "")
    return SglangSettings(
        settings,
        max_model_len=arguments.length_limit(settings, model_len),
        events=events,
        replay=replay,
        # A prefill engine's ranks on other machines look for its bootstrap server at the address where they meet.
        host=settings.leader_address if settings.nodes > 1 else address(settings.nats_url),
        bootstrap_port=free_ports(1) if settings.role == "prefill" else 0,
        meeting=nodes.meeting(nodes.place_of(settings)),
    )


def package_of(api: SglangApi) -> Package:
    return Package("sglang", "SGLang", api.version, OWN_ADDRESS)


def pids_of(llm: Any) -> list[int]:
    """The engine's processes, which the worker looks after: SGLang's watchdog, which raises SIGQUIT in this process as
    soon as a scheduler fails, is stopped."""
    watchdog = getattr(llm.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
    return sorted(llm.get_all_child_pids())


def series_of(before: str | None) -> NativeSeries:
    """SGLang's own metrics, after its construction, which has named a folder of its schedulers' files in the variable.

    Args:
        before: the variable's value when this process started, to which it is restored. With one, this process writes
            files, too.
    """
    folder = os.environ.get(MULTIPROCESS, "")
    if not before:
        os.environ.pop(MULTIPROCESS, None)
    return NativeSeries(PREFIX, folder=folder)


def node_from_settings(settings: WorkerSettings, path: Path) -> EngineNode:
    """The part of an engine on another machine than its first: schedulers that compute with those there.

    Raises:
        EngineError: SGLang is not installed.
    """
    api = load_sglang()

    def ended(llm: Any) -> str:
        pids = sorted(llm.get_all_child_pids())
        while True:
            for pid in pids:
                if not runs(pid):
                    return f"a scheduler of SGLang (pid {pid}) has ended; its own log above says why"
            time.sleep(POLL_S)

    return EngineNode(
        package_of(api),
        settings,
        lambda: VARIABLES | {NO_WAIT: "0"},
        lambda tree: api.construct(str(path), follower_tree(tree, settings.node_rank)),
        ended,
    )


def warm_up(llm: Any, loop: LoopThread, loads: RankLoads, *, pair: bool) -> None:
    """Compute one short request, and read the ranks' sizes.

    Args:
        pair: the engine runs requests together with another one only.

    Raises:
        EngineError: the request failed.
    """

    alone = Room(Address(FAKE_HOST, 0), 0).arguments if pair else {}

    async def generate() -> None:
        stream = await llm.async_generate(
            input_ids=[1] * WARM_UP_TOKENS,
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            rid="penstock-warm-up",
            stream=True,
            **alone,
        )
        async for chunk in stream:
            reason = chunk["meta_info"].get("finish_reason")
            if reason is not None and reason["type"] == "abort":
                raise EngineError(str(reason.get("message")))
        loads.take(await llm.tokenizer_manager.get_loads())

    first_request("SGLang", loop, generate())
