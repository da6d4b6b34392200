"""The engine's arguments: our defaults, overridden by ``--extra-engine-args`` and then by ``--override-engine-args``.

Pure. ``penstock.infra.engine_args`` checks names, values and combinations. The engine gets the plain tree, so arguments
that were not set have the defaults of the installed release.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import structlog
from blake3 import blake3

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.rules import check
from penstock.infra.engine_args.rules.rule import Context, Finding
from penstock.infra.engine_args.schema import EngineArgs
from penstock.infra.engine_args.tree import AUTODEPLOY, BadArguments, Tree, decode, merge, section_keys, speculation_of

log = structlog.get_logger("engine")

EVENT_BUFFER = 100_000  # events; 8,192 overflowed under load
FREE_MEMORY = 0.9  # share of the memory that the weights leave
TRANSFER = "NIXL"  # explicit, since DEFAULT differs between releases

# AutoDeploy refuses these unless they have one of these values; it takes the product of the parallel sizes.
_AUTODEPLOY_REFUSES: Mapping[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (None, 1),
    "pipeline_parallel_size": (None, 1),
    "context_parallel_size": (None, 1),
    "moe_cluster_parallel_size": (None, -1),
    "moe_tensor_parallel_size": (None, -1),
    "moe_expert_parallel_size": (None, -1),
    "enable_attention_dp": (None, False),
    "cp_config": (None, {}),
    "max_beam_width": (None, 1),
    "gpus_per_node": (None,),
    "build_config": (None,),
    "device": (None,),
    "cache_transceiver_config": (None,),
}
SAMPLER = "TRTLLMSampler"  # of 1.2; it returns no log-probabilities of other tokens than the drawn ones
# TensorRT-LLM's names of the linear layers that a LoRA adapter may change, and theirs in adapters' files.
LORA_MODULES: Mapping[str, str] = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
}
GRAMMARS = "llguidance"  # the backend that takes the worker's grammars
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")

# The worker sets these itself: they would change the tokens or their end.
_RESERVED: Mapping[str, str] = {
    "model": "use --model",
    "tokenizer": "the gateway tokenizes; use --model",
    "num_postprocess_workers": "the gateway detokenizes",
    "postprocess_tokenizer_dir": "the gateway detokenizes",
    "reasoning_parser": "the gateway parses answers; use --reasoning-parser",
    "mm_encoder_only": "use --role encode",
}

_ENCODER_KEYS = frozenset([  # a MultimodalEncoder has neither KV cache nor scheduler
    "trust_remote_code", "tensor_parallel_size", "dtype", "max_batch_size", "max_num_tokens", "gpus_per_node",
    "env_overrides",
])  # fmt: skip


class TrtllmSettings(NamedTuple):
    """The worker's settings, and what follows from them for the engine.

    Attributes:
        max_model_len: tokens of the longest sequence.
        images: the model takes images.
        constraints: the engine applies constraints (structured output), unless its other arguments exclude that.
        processors: requests run logits processors, which see a token one step late with the overlap scheduler.
        choose_sampler: the default sampler of this release drops penalties, min_p and seeds in silence.
    """

    worker: WorkerSettings
    max_model_len: int
    images: bool = False
    constraints: bool = False
    processors: bool = False
    choose_sampler: bool = False


class ResolvedTrtllmArgs(NamedTuple):
    """
    Attributes:
        tree: keyword arguments of the constructor, without the model.
        args: the same, checked.
        layout: fingerprint of the KV cache.
    """

    tree: Tree
    args: EngineArgs
    kv_events: bool
    layout: str


class Installed(NamedTuple):
    """Keys of the installed release's arguments; empty: they cannot be read.

    Attributes:
        sections: of each argument that is a mapping.
    """

    arguments: frozenset[str] = frozenset()
    sections: Mapping[str, frozenset[str]] = {}


AS_1_2 = Installed()


def defaults(wanted: TrtllmSettings) -> Tree:
    """Our default arguments."""
    worker = wanted.worker
    block = worker.block_size
    longest = _up(wanted.max_model_len, block)
    kv: Tree = {
        "enable_block_reuse": worker.prefix_cache,
        "free_gpu_memory_fraction": FREE_MEMORY,
        "tokens_per_block": block,
        "event_buffer_max_size": EVENT_BUFFER if worker.publish_events_and_metrics and worker.prefix_cache else 0,
    }
    if worker.kv_blocks:
        kv["max_tokens"] = worker.kv_blocks * block
    tree: Tree = {
        "max_batch_size": worker.max_running,
        "max_num_tokens": _up(worker.max_batched_tokens, block),
        "max_seq_len": wanted.max_model_len,
        "enable_chunked_prefill": True,  # otherwise a prompt longer than one step is refused
        "skip_tokenizer_init": not wanted.images,  # it sees token ids only, except with images
        "kv_cache_config": kv,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "enable_iter_perf_stats": worker.publish_events_and_metrics,
    }
    if worker.dtype != "auto":
        tree["dtype"] = worker.dtype
    if worker.tensor_parallel_size:
        tree["tensor_parallel_size"] = worker.tensor_parallel_size
    if worker.otlp_endpoint:  # its spans are made from the performance metrics
        tree |= {"otlp_traces_endpoint": worker.otlp_endpoint, "return_perf_metrics": True}
    if worker.role in ("prefill", "decode"):
        tree["cache_transceiver_config"] = {
            "backend": TRANSFER,
            "max_tokens_in_buffer": longest,
            "kv_transfer_timeout_ms": max(1, int(worker.handoff_lease_s * 1000)),
        }
    if worker.lora_slots:
        tree |= {
            "enable_lora": True,
            "lora_config": {
                "max_lora_rank": worker.max_lora_rank,
                "max_loras": worker.max_loras,
                "max_cpu_loras": max(worker.max_loras, worker.max_cpu_loras),
                "lora_target_modules": list(LORA_MODULES),
            },
            "cuda_graph_config": None,  # 1.2 has no graphs with LoRA
        }
    if worker.role == "prefill" or (worker.role == "aggregated" and wanted.processors):
        tree["disable_overlap_scheduler"] = True
    return tree


def resolve(
    wanted: TrtllmSettings,
    given: Mapping[str, Any],
    *,
    installed: Installed = AS_1_2,
    known: Collection[str] | None = None,
    context: Context | None = None,
) -> ResolvedTrtllmArgs:
    """Merge, prune and check.

    Args:
        given: the user's arguments: the YAML with the JSON merged over it.
        installed: a release other than 1.2. What it has beyond 1.2.1 is passed on unchecked; what it has no more is
            left out of our defaults.
        known: keys of the installed AutoDeploy arguments, if they can be read.
        context: circumstances for the rules.

    Raises:
        BadArguments: one line per problem, each with its fix.
    """
    worker = wanted.worker
    length = given.get("max_seq_len")
    if isinstance(length, int) and length > 0:  # our defaults follow the user's length
        wanted = wanted._replace(max_model_len=length)
    tree = merge(_without_removed(defaults(wanted), installed), given)
    if worker.lora_slots and worker.trtllm_backend == "autodeploy":
        raise BadArguments(["--lora, --lora-folder: AutoDeploy serves no LoRA adapters; use --trtllm-backend pytorch"])
    if wanted.constraints and _takes_grammars(tree, wanted):
        tree = {"guided_decoding_backend": GRAMMARS} | tree
    if wanted.choose_sampler and worker.trtllm_backend == "pytorch" and not tree.get("speculative_config"):
        tree = {"sampler_type": SAMPLER} | tree
    tree = _drop_reserved(tree, wanted)
    if worker.trtllm_backend == "autodeploy":
        tree = prune(tree, known)
    elif tree.get("backend") == "pytorch":
        del tree["backend"]
    transceiver = tree.get("cache_transceiver_config")
    if isinstance(transceiver, Mapping) and transceiver.get("backend") == "DEFAULT":
        tree = tree | {"cache_transceiver_config": {**transceiver, "backend": TRANSFER}}
    args = decode(_known_here(tree, installed))
    _report(check(args, context or Context(role="aggregated", router_block_size=worker.block_size)))
    kv = args.kv_cache_config
    return ResolvedTrtllmArgs(tree, args, bool(kv.enable_block_reuse and kv.event_buffer_max_size), layout(args))


def _without_removed(tree: Tree, installed: Installed) -> Tree:
    if not installed.arguments:
        return tree
    kept: Tree = {}
    for key, value in tree.items():
        if key not in installed.arguments:
            log.warning("engine_argument_dropped", key=key, reason="the installed release does not take it")
            continue
        section = installed.sections.get(key)
        if isinstance(value, Mapping) and section:
            value = {name: below for name, below in value.items() if name in section}
        kept[key] = value
    return kept


def _known_here(tree: Tree, installed: Installed) -> Tree:
    """The part of the arguments that our schema of 1.2.1 can check."""
    checked: Tree = {}
    for key, value in tree.items():
        if key not in EngineArgs.__struct_fields__ and key in installed.arguments:
            continue
        section = installed.sections.get(key)
        if isinstance(value, Mapping) and section:
            ours = section_keys(key)
            value = {name: below for name, below in value.items() if name in ours or name not in section}
        if key == "speculative_config" and isinstance(value, Mapping) and installed.arguments:
            value = _speculation_of_1_2(value)
        checked[key] = value
    return checked


def _speculation_of_1_2(config: Mapping[str, Any]) -> Tree:
    """A kind of speculation as 1.2 names it; one that 1.2 does not have is known to be one, and no more."""
    kind = speculation_of(str(config.get("decoding_type", "")))
    if kind is None:
        return {"decoding_type": "AUTO"}
    known = {name: value for name, value in config.items() if name in kind.__struct_fields__}
    return {**known, "decoding_type": kind.__struct_config__.tag}


def encoder_arguments(tree: Mapping[str, Any]) -> Tree:
    """The arguments that a ``MultimodalEncoder`` takes."""
    return {key: value for key, value in tree.items() if key in _ENCODER_KEYS}


def prune(tree: Tree, known: Collection[str] | None = None) -> Tree:
    """Remove what AutoDeploy does not take; log a warning for each key with a value of its own."""
    kept: Tree = {"backend": AUTODEPLOY}
    world = 1
    for key, value in tree.items():
        if key == "backend":
            continue
        refused = key in _AUTODEPLOY_REFUSES
        if not refused and (known is None or key in known):
            kept[key] = value
            continue
        if key in _SIZES and isinstance(value, int):
            world *= value
        if not refused or value not in _AUTODEPLOY_REFUSES[key]:
            log.warning("engine_argument_dropped", key=key, reason="AutoDeploy does not take it")
    if world > 1:
        kept.setdefault("world_size", world)
    return kept


def layout(args: EngineArgs) -> str:
    """A fingerprint of the content of a KV block and the tokens that each layer keeps.

    KV moves only between engines with the same fingerprint. The weights' revision is compared elsewhere.
    """
    kv = args.kv_cache_config
    windows = tuple(kv.max_attention_window or ())
    while len(windows) > 1 and len(set(windows)) == 1:
        windows = windows[:1]
    content = repr((kv.tokens_per_block, kv.dtype, windows, kv.sink_token_length or 0, args.dtype))
    return f"trtllm:{kv.tokens_per_block}:{kv.dtype}:{blake3(content.encode()).hexdigest(length=6)}"


def _takes_grammars(tree: Tree, wanted: TrtllmSettings) -> bool:
    """Whether guided decoding is known to work beside the other arguments."""
    policy = (tree.get("scheduler_config") or {}).get("capacity_scheduler_policy")
    if policy == "MAX_UTILIZATION":
        log.warning("structured_output_off", reason="MAX_UTILIZATION restarts the grammar of an evicted request")
        return False
    return (
        wanted.worker.trtllm_backend == "pytorch" and not tree.get("enable_lora") and not tree.get("speculative_config")
    )


def _drop_reserved(tree: Tree, wanted: TrtllmSettings) -> Tree:
    worker = wanted.worker
    kept = dict(tree)
    for key, instead in _RESERVED.items():
        if kept.pop(key, None):
            log.warning("engine_argument_dropped", key=key, reason=instead)
    kv = kept.get("kv_cache_config")
    if isinstance(kv, Mapping) and kv.get("event_buffer_max_size") and not kv.get("enable_block_reuse", True):
        log.warning("kv_events_off", reason="they need kv_cache_config.enable_block_reuse")
        kept["kv_cache_config"] = {**kv, "event_buffer_max_size": 0}
    if kept.get("guided_decoding_backend"):
        kept["skip_tokenizer_init"] = False
    if kept.get("backend") not in (None, "pytorch", AUTODEPLOY):
        return kept  # the schema refuses it
    backend = "autodeploy" if kept.get("backend") == AUTODEPLOY else "pytorch"
    if kept.get("backend") is not None and backend != worker.trtllm_backend:
        raise BadArguments(
            [f"backend: the file has {kept['backend']}, the worker {worker.trtllm_backend}; use --trtllm-backend"]
        )
    return kept


def _report(findings: list[Finding]) -> None:
    errors = [finding for finding in findings if finding.level == "error"]
    for finding in findings:
        if finding.level != "error":
            log.warning(
                "engine_argument", rule=finding.rule, key=finding.where, message=finding.message, fix=finding.fix
            )
    if errors:
        raise BadArguments(f"{each.where}: {each.message}; {each.fix} ({each.rule})" for each in errors)


def _up(tokens: int, block: int) -> int:
    return -(-tokens // block) * block
