"""The engine's arguments: our defaults, overridden by ``--extra-engine-args`` and then by ``--override-engine-args``.

Pure. The result is keyword arguments of ``vllm.AsyncEngineArgs``, with nested configurations as plain data. Arguments
that would deadlock, corrupt data or silently disable a feature are refused, each with its fix.
"""

import itertools
import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments, Tree, merge
from penstock.workers.engines.core.scheduler import DECODE_ROLE_CHUNK_TOKENS
from penstock.workers.engines.external.arguments import event_publisher, refused, sleeps, uneven

GRAMMARS = "guidance"  # vLLM's name for llguidance
CPU_BLOCK = 32  # tokens; vLLM's CPU attention kernel takes multiples of it

# Connectors in the form of ``KVTransferConfig``; NixlConnector's role is the worker's, see ``kv_role``.
CONNECTORS: Mapping[str, Tree] = {
    "nixl": {"kv_connector": "NixlConnector"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "kvbm": {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
    },
}
# Connectors that fetch KV from another engine; the others only look up their own cache.
_P2P_CONNECTORS = frozenset(["NixlConnector", "NixlPullConnector"])

# The worker sets these itself: they would change the tokens, their order or their end.
RESERVED: Mapping[str, str] = {
    "model": "use --model",
    "tokenizer": "the gateway tokenizes; use --model",
    "served_model_name": "use --served-model-name",
    "skip_tokenizer_init": "the engine sees token ids only",
    "stream_interval": "the worker batches tokens itself",
    "max_logprobs": "the gateway's limit applies",
    "disable_log_stats": "use --no-publish-events-and-metrics",
    "reasoning_parser": "the gateway parses answers; use --reasoning-parser",
    "runner": "the worker only generates text",
    "convert": "the worker only generates text",
    "nnodes": "use --nodes",
    "node_rank": "use --node-rank",
    "master_addr": "use --leader-address",
    "master_port": "use --leader-port",
    "data_parallel_external_lb": "start one worker per rank; the router balances",
    "data_parallel_hybrid_lb": "start one worker per node; the router balances",
    "scheduling_policy": "the router orders requests",
    "enable_lora": "use --lora or --lora-folder",
    "max_loras": "use --max-loras",
    "max_lora_rank": "use --max-lora-rank",
    "max_cpu_loras": "use --max-cpu-loras",
    "logits_processors": "use --logits-processor",
    "ec_transfer_config": "encode workers of --engine native hand over embeddings; remove it",
}
PROCESSORS = "penstock.workers.engines.vllm.logits_processors:Processors"  # which vLLM loads in its processes
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes for max_lora_rank
# Either sets the size of the KV cache on a CPU.
_CPU_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization")
# At most one of these may be set.
MULTIMODAL = ("language_model_only", "mm_encoder_only", "enable_mm_embeds", "enable_prompt_embeds")


class VllmSettings(NamedTuple):
    """The worker's settings, and what follows from them for the engine.

    Attributes:
        max_model_len: tokens of the longest sequence.
        events: endpoint of KV events; empty: none are published.
        replay: endpoint of their replays.
        cpu_bytes: size of the KV cache if vLLM computes on CPUs; 0: on an accelerator.
        constraints: the engine applies constraints (structured output); it then reads the model's tokenizer.
        images: it takes images of prompts, for which it reads the model's tokenizer, too.
        leader_port: where the ranks of several machines meet at the first one.
        transfer_id: name of the engine for others that fetch its KV, equal on all nodes; empty: vLLM's choice.
        recurrent: the model has layers with a state in place of a KV cache.
    """

    worker: WorkerSettings
    max_model_len: int
    events: str = ""
    replay: str = ""
    cpu_bytes: int = 0
    constraints: bool = False
    images: bool = False
    leader_port: int = 0
    transfer_id: str = ""
    recurrent: bool = False


LEAST_STATE_BLOCK = 64  # tokens; a state takes as much memory as more of them
_OF_STATES = ("mamba", "ssm_", "linear_", "conv_L_", "attn_type_list")  # what their configurations' keys begin with


def is_recurrent(config: Tree) -> bool:
    """Whether the model of a config.json has layers with a state (Mamba, linear attention, convolutions)."""
    inner = config.get("text_config")
    keys = [*config, *(inner if isinstance(inner, dict) else ())]
    return any(key.startswith(_OF_STATES) for key in keys)


class ResolvedVllmArgs(NamedTuple):
    """
    Attributes:
        tree: keyword arguments, without the model.
        moves: the engine can move KV to and from others.
        ranks: data-parallel ranks.
    """

    tree: Tree
    kv_events: bool
    moves: bool
    ranks: int


def transfer(connectors: Seq[str], role: str, lease_s: float = 30.0) -> Tree | None:
    """``kv_transfer_config`` for a list of connectors; None: no connector.

    Raises:
        BadArguments: null beside others, a connector given twice, or none that the role needs.
    """
    needed = role in ("prefill", "decode")
    names = list(connectors) or (["nixl"] if needed else ["null"])
    problems = []
    if len(set(names)) != len(names):
        problems.append(f"--connector {','.join(names)}: name each once")
    if "null" in names and len(names) > 1:
        problems.append(f"--connector {','.join(names)}: null means no connector; remove it or the others")
    if needed and "nixl" not in names:
        problems.append(f"--role {role} moves KV between engines; add nixl to --connector")
    if problems:
        raise BadArguments(problems)
    if names == ["null"]:
        return None
    trees = [_connector(name, role, lease_s) for name in names]
    if len(trees) == 1:
        return trees[0] | {"kv_load_failure_policy": "recompute"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": trees},
        "kv_load_failure_policy": "recompute",
    }


def _connector(name: str, role: str, lease_s: float) -> Tree:
    tree = dict(CONNECTORS[name])
    if name == "nixl":
        tree["kv_role"] = kv_role(role)
        tree["kv_connector_extra_config"] = {"kv_lease_duration": max(1, round(lease_s))}
    return tree


def kv_role(role: str) -> str:
    """NixlConnector's role in a worker of this role."""
    return "kv_producer" if role == "prefill" else "kv_consumer"


def defaults(wanted: VllmSettings) -> Tree:
    """Our default arguments."""
    worker = wanted.worker
    tree: Tree = {
        "skip_tokenizer_init": not (wanted.constraints or wanted.images),  # it sees token ids only; these need texts
        "block_size": worker.block_size,
        "max_num_seqs": worker.max_running,
        "max_num_batched_tokens": worker.max_batched_tokens,
        "max_model_len": wanted.max_model_len,
        "enable_prefix_caching": worker.prefix_cache,
        "enable_chunked_prefill": True,  # otherwise a prompt longer than one step is refused
        "disable_log_stats": not worker.publish_events_and_metrics,
    }
    # Models with recurrent layers compute whole blocks, which vLLM makes as large as a state, of hundreds of tokens:
    # some releases refuse a limit below that. Until --block-size says how large they are, there is none.
    chosen = wanted.recurrent and worker.block_size < LEAST_STATE_BLOCK
    if worker.role == "decode" and not chosen:  # of each prompt in a step, so that answers beside it wait less
        tree["long_prefill_token_threshold"] = max(DECODE_ROLE_CHUNK_TOKENS, worker.block_size)
    if worker.kv_blocks:
        tree["num_gpu_blocks_override"] = worker.kv_blocks + 1  # one is vLLM's null block
    if worker.dtype != "auto":
        tree["dtype"] = worker.dtype
    if worker.tensor_parallel_size:
        tree["tensor_parallel_size"] = worker.tensor_parallel_size
    if wanted.images:
        tree["enable_mm_embeds"] = True  # of encode workers
    if sleeps(worker):
        tree["enable_sleep_mode"] = True
    if wanted.constraints:
        tree["structured_outputs_config"] = {"backend": GRAMMARS}
    if worker.lora_slots:
        tree |= {
            "enable_lora": True,
            "max_loras": worker.max_loras,
            "max_lora_rank": next((each for each in RANKS if each >= worker.max_lora_rank), RANKS[-1]),
            # And those that were unloaded while sequences still have them: what it drops for room, it would read again.
            "max_cpu_loras": max(worker.max_loras, worker.max_cpu_loras) + worker.max_running,
        }
    if worker.logits_processor or worker.default_logits_processors:
        tree["logits_processors"] = [PROCESSORS]
    if worker.otlp_endpoint:
        tree["otlp_traces_endpoint"] = worker.otlp_endpoint
    moved = transfer(worker.connector, worker.role, worker.handoff_lease_s)
    if moved is not None:
        tree["kv_transfer_config"] = moved | ({"engine_id": wanted.transfer_id} if wanted.transfer_id else {})
    if worker.nodes > 1:
        tree |= {
            "nnodes": worker.nodes,
            "node_rank": 0,
            "master_addr": worker.leader_address,
            "master_port": wanted.leader_port,
            "distributed_executor_backend": "mp",
        }
    events = event_publisher(worker, wanted.events, wanted.replay)
    if events is not None:
        tree["kv_events_config"] = {"enable_kv_cache_events": True} | events
    return tree


def resolve(wanted: VllmSettings, given: Mapping[str, Any], known: Collection[str]) -> ResolvedVllmArgs:
    """Merge and check.

    Args:
        given: the user's arguments: the YAML with the JSON merged over it.
        known: fields of the installed AsyncEngineArgs.

    Raises:
        BadArguments: one line per problem, each with its fix.
    """
    if wanted.worker.role == "encode":
        raise BadArguments(
            ["--role encode: vLLM's workers take the embeddings of encode workers with --engine native; use that"]
        )
    problems = refused(given, RESERVED, known)
    on = [key for key in MULTIMODAL if given.get(key)]
    problems += [
        f"{first} and {second}: they exclude each other; remove one" for first, second in itertools.combinations(on, 2)
    ]
    if "mm_encoder_only" in on:
        problems.append("mm_encoder_only: use --role encode of --engine native, whose embeddings vLLM's workers take")
    if problems:
        raise BadArguments(problems)
    tree = merge(defaults(wanted), given)
    if wanted.cpu_bytes and not any(given.get(key) for key in _CPU_SIZES):
        tree["kv_cache_memory_bytes"] = wanted.cpu_bytes  # vLLM's default is nearly all memory of the machine
    problems = list(_contradictions(tree, wanted))
    if problems:
        raise BadArguments(problems)
    moves = _moves(tree.get("kv_transfer_config"))
    alone = all((tree.get(key) or 1) == 1 for key in ("tensor_parallel_size", "pipeline_parallel_size"))
    if moves and alone and not tree.get("distributed_executor_backend"):
        # In one process, NIXL's threads and the model's share the GIL, so that transfers and steps stall each other.
        tree["distributed_executor_backend"] = "mp"
    config = tree.get("kv_events_config") or {}
    return ResolvedVllmArgs(
        tree,
        kv_events=bool(config.get("enable_kv_cache_events")) and config.get("publisher", "zmq") == "zmq",
        moves=moves,
        ranks=tree.get("data_parallel_size") or 1,
    )


def _contradictions(tree: Tree, wanted: VllmSettings) -> list[str]:
    worker = wanted.worker
    problems = []
    config = tree.get("kv_transfer_config")
    if worker.role in ("prefill", "decode") and not _moves(config):
        problems.append(f"kv_transfer_config: --role {worker.role} needs NixlConnector in it")
    if isinstance(config, Mapping) and config.get("kv_connector"):
        must = kv_role(worker.role) if config["kv_connector"] in _P2P_CONNECTORS else "kv_both"
        if config.get("kv_role") not in (must, None):
            problems.append(f"kv_transfer_config.kv_role: must be {must}; --role sets what the worker does")
    grammars = tree.get("structured_outputs_config") or {}
    if wanted.constraints and grammars.get("backend") != GRAMMARS:
        problems.append(f"structured_outputs_config.backend: must be {GRAMMARS}, which takes the worker's grammars")
    if grammars.get("reasoning_parser"):
        problems.append("structured_outputs_config.reasoning_parser: the gateway parses answers; --reasoning-parser")
    if tree["block_size"] != worker.block_size:
        problems.append(f"block_size: {tree['block_size']}, the worker has {worker.block_size}; use --block-size")
    if wanted.cpu_bytes and tree["block_size"] % CPU_BLOCK:
        problems.append(f"block_size: {tree['block_size']}: vLLM takes multiples of {CPU_BLOCK} on CPUs; --block-size")
    if tree["max_model_len"] != wanted.max_model_len:
        problems.append(f"max_model_len: {tree['max_model_len']}; use --max-model-len, which the worker registers")
    if not tree.get("enable_chunked_prefill") and tree["max_num_batched_tokens"] < tree["max_model_len"]:
        problems.append(
            f"max_num_batched_tokens: {tree['max_num_batched_tokens']} without enable_chunked_prefill refuses prompts "
            f"up to max_model_len ({tree['max_model_len']}); raise it or leave chunked prefill on"
        )
    if worker.kv_blocks and worker.kv_blocks * worker.block_size < wanted.max_model_len:
        problems.append(
            f"kv_blocks: {worker.kv_blocks} of {worker.block_size} tokens, but one sequence may have "
            f"{wanted.max_model_len}; raise --kv-blocks or lower --max-model-len"
        )
    if worker.nodes > 1:
        problems += _across(tree, worker.nodes)
    events_config = tree.get("kv_events_config") or {}
    if events_config.get("enable_kv_cache_events") and not tree.get("enable_prefix_caching"):
        problems.append("kv_events_config: events need prefix caching; enable it, or remove kv_events_config")
    return problems


def _across(tree: Tree, nodes: int) -> list[str]:
    """What an engine over several machines cannot do."""
    ranks = math.prod(
        tree.get(key) or 1
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    )
    problems = uneven(ranks, nodes)
    if (tree.get("data_parallel_size") or 1) > 1:
        problems.append(f"data_parallel_size: not with --nodes {nodes}; start a worker for each rank")
    if tree["distributed_executor_backend"] != "mp":
        problems.append(f"distributed_executor_backend: must be mp with --nodes {nodes}")
    return problems


def follower_tree(tree: Tree, node: int) -> Tree:
    """The arguments on another machine than the first, whose scheduler alone publishes KV events."""
    return {key: value for key, value in tree.items() if key != "kv_events_config"} | {"node_rank": node}


def _moves(config: Any) -> bool:
    """Whether it has a connector that fetches KV from another engine, alone or among several."""
    if not isinstance(config, Mapping):
        return False
    below = (config.get("kv_connector_extra_config") or {}).get("connectors") or []
    names = [config.get("kv_connector"), *(each.get("kv_connector") for each in below if isinstance(each, Mapping))]
    return any(name in _P2P_CONNECTORS for name in names)


def layout(version: str, tree: Tree) -> str:
    """Fingerprint that two engines must share to hand off KV; the connector checks the rest itself."""
    release = ".".join(version.split(".")[:2])
    return f"vllm-{release}/nixl/{tree.get('kv_cache_dtype', 'auto')}/{tree['block_size']}"
