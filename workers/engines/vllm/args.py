"""The engine's arguments: ours < the YAML file of ``--extra-engine-args`` < the JSON of ``--override-engine-args``.

Pure. The result is keyword arguments of ``vllm.AsyncEngineArgs``, nested configurations as plain data. What would
dead-lock, corrupt or silently serve less is refused here, each with its fix.
"""

import difflib
import itertools
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from infra.engine_args.tree import BadArguments, Tree, merge

EVENT_STEPS = 10_000  # messages of KV events that can be replayed
CPU_BLOCK = 32  # tokens: its attention kernel on CPUs takes blocks of these, or of multiples

# How a connector is written in ``KVTransferConfig``.
CONNECTORS: Mapping[str, Tree] = {
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "kvbm": {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
    },
}
# Fetches KV that it was told of; the others only look up what they keep.
_MOVES = frozenset(["NixlConnector", "NixlPullConnector"])

# These would take tokens, their order, or the answer's end out of our hands; they are ours to set.
_OURS: Mapping[str, str] = {
    "model": "use --model",
    "tokenizer": "the gateway tokenises; use --model",
    "served_model_name": "use --served-model-name",
    "skip_tokenizer_init": "the engine sees token ids only",
    "stream_interval": "tokens are gathered by the worker, as the broker takes them",
    "max_logprobs": "the gateway's limit holds",
    "disable_log_stats": "use --no-publish-events-and-metrics",
    "reasoning_parser": "answers are parsed in the gateway",
    "runner": "it generates",
    "convert": "it generates",
    "data_parallel_external_lb": "start one worker per rank; the router balances",
    "data_parallel_hybrid_lb": "start one worker per node; the router balances",
    "scheduling_policy": "the router decides the order",
    "enable_lora": "adapters have no name in the pipeline yet",
    "logits_processors": "they are loaded into the native engine and TensorRT-LLM only",
}
# How large the KV cache of a CPU is.
_CPU_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization")
# Of these, at most one.
MULTIMODAL = ("language_model_only", "mm_encoder_only", "enable_mm_embeds", "enable_prompt_embeds")


class Wanted(NamedTuple):
    """What the worker asks of its engine. Sizes in tokens; 0: not said.

    Attributes:
        connectors: as in the setting; empty: by role.
        kv_blocks: blocks of the pool; 0: from free memory.
        events: where it publishes KV events; empty: nowhere.
        replay: where they can be asked for again.
        lease_s: after this, KV that nobody fetched may go.
        cpu_bytes: of the KV cache, where vLLM computes on CPUs; 0: on an accelerator.
    """

    role: str
    block_size: int
    max_running: int
    max_batched_tokens: int
    max_model_len: int
    connectors: Seq[str] = ()
    kv_blocks: int = 0
    prefix_cache: bool = True
    publish: bool = True
    events: str = ""
    replay: str = ""
    lease_s: float = 30.0
    tensor_parallel_size: int = 0
    dtype: str = "auto"
    otlp: str = ""  # where it sends spans of its own; empty: nowhere
    cpu_bytes: int = 0


class Resolved(NamedTuple):
    """``tree``: the keyword arguments, without the model. ``moves``: it hands KV over. ``ranks``: data-parallel."""

    tree: Tree
    kv_events: bool
    moves: bool
    ranks: int


def transfer(connectors: Seq[str], role: str, lease_s: float = 30.0) -> Tree | None:
    """``kv_transfer_config`` for a list of connectors; None: there is none.

    Raises:
        BadArguments: null among others, one given twice, or none that can do what the role needs.
    """
    needed = role in ("prefill", "decode")
    names = list(connectors) or (["nixl"] if needed else ["null"])
    problems = []
    if len(set(names)) != len(names):
        problems.append(f"--connector {','.join(names)}: name each once")
    if "null" in names and len(names) > 1:
        problems.append(f"--connector {','.join(names)}: null means no connector; leave it or the others out")
    if needed and "nixl" not in names:
        problems.append(f"--role {role} moves KV between engines; add nixl to --connector")
    if problems:
        raise BadArguments(problems)
    if names == ["null"]:
        return None
    trees = [_connector(name, lease_s) for name in names]
    if len(trees) == 1:
        return trees[0] | {"kv_load_failure_policy": "recompute"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": trees},
        "kv_load_failure_policy": "recompute",
    }


def _connector(name: str, lease_s: float) -> Tree:
    tree = dict(CONNECTORS[name])
    if name == "nixl":
        tree["kv_connector_extra_config"] = {"kv_lease_duration": max(1, round(lease_s))}
    return tree


def events(wanted: Wanted) -> Tree | None:
    """``kv_events_config``: on, over ZMQ, unless there is nobody to read it."""
    if not (wanted.prefix_cache and wanted.publish and wanted.events):
        return None
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": wanted.events,
        "replay_endpoint": wanted.replay,
        "buffer_steps": EVENT_STEPS,
        "topic": "",
    }


def defaults(wanted: Wanted) -> Tree:
    """Our arguments, before the user's."""
    tree: Tree = {
        "skip_tokenizer_init": True,  # it sees token ids only
        "block_size": wanted.block_size,
        "max_num_seqs": wanted.max_running,
        "max_num_batched_tokens": wanted.max_batched_tokens,
        "max_model_len": wanted.max_model_len,
        "enable_prefix_caching": wanted.prefix_cache,
        "enable_chunked_prefill": True,  # without, a prompt longer than one step is refused
        "disable_log_stats": not wanted.publish,
    }
    if wanted.kv_blocks:
        tree["num_gpu_blocks_override"] = wanted.kv_blocks + 1  # one is a placeholder that holds nothing
    if wanted.dtype != "auto":
        tree["dtype"] = wanted.dtype
    if wanted.tensor_parallel_size:
        tree["tensor_parallel_size"] = wanted.tensor_parallel_size
    if wanted.otlp:
        tree["otlp_traces_endpoint"] = wanted.otlp
    moved = transfer(wanted.connectors, wanted.role, wanted.lease_s)
    if moved is not None:
        tree["kv_transfer_config"] = moved
    told = events(wanted)
    if told is not None:
        tree["kv_events_config"] = told
    return tree


def resolve(wanted: Wanted, given: Mapping[str, Any], known: Collection[str]) -> Resolved:
    """Merge and check.

    Args:
        given: of the user: the YAML with the JSON laid over it.
        known: fields of the installed AsyncEngineArgs.

    Raises:
        BadArguments: with one line per problem, each with its fix.
    """
    if wanted.role == "encode":
        raise BadArguments(["--role encode: the vLLM adapter takes text only; use --engine native or trtllm"])
    problems = [f"{key}: {_OURS[key]}" for key in given if key in _OURS]
    problems += [f"{key}: no such key{_hint(key, known)}" for key in given if key not in known and key not in _OURS]
    on = [key for key in MULTIMODAL if given.get(key)]
    problems += [
        f"{first} and {second}: each excludes the other; leave one out"
        for first, second in itertools.combinations(on, 2)
    ]
    if "mm_encoder_only" in on:
        problems.append("mm_encoder_only: the vLLM adapter takes text only; use --role encode of another engine")
    if problems:
        raise BadArguments(problems)
    tree = merge(defaults(wanted), given)
    if wanted.cpu_bytes and not any(given.get(key) for key in _CPU_SIZES):
        tree["kv_cache_memory_bytes"] = wanted.cpu_bytes  # its own default: nearly all memory of the machine
    problems = list(_contradictions(tree, wanted))
    if problems:
        raise BadArguments(problems)
    moves = _moves(tree.get("kv_transfer_config"))
    alone = all((tree.get(key) or 1) == 1 for key in ("tensor_parallel_size", "pipeline_parallel_size"))
    if moves and alone and not tree.get("distributed_executor_backend"):
        # In one process, NIXL's threads and the model's share a lock (the GIL): transfers stall steps, and the reverse.
        tree["distributed_executor_backend"] = "mp"
    told = tree.get("kv_events_config") or {}
    return Resolved(
        tree,
        kv_events=bool(told.get("enable_kv_cache_events")) and told.get("publisher", "zmq") == "zmq",
        moves=moves,
        ranks=tree.get("data_parallel_size") or 1,
    )


def _contradictions(tree: Tree, wanted: Wanted) -> list[str]:
    problems = []
    config = tree.get("kv_transfer_config")
    if wanted.role in ("prefill", "decode") and not _moves(config):
        problems.append(f"kv_transfer_config: --role {wanted.role} needs NixlConnector in it")
    if isinstance(config, Mapping) and config.get("kv_connector") and config.get("kv_role") not in ("kv_both", None):
        problems.append("kv_transfer_config.kv_role: leave it kv_both; --role says what the worker does")
    if tree["block_size"] != wanted.block_size:
        problems.append(f"block_size: {tree['block_size']}, but names are made with {wanted.block_size}; --block-size")
    if wanted.cpu_bytes and tree["block_size"] % CPU_BLOCK:
        problems.append(f"block_size: {tree['block_size']}; on a CPU vLLM takes multiples of {CPU_BLOCK}; --block-size")
    if tree["max_model_len"] != wanted.max_model_len:
        problems.append(f"max_model_len: {tree['max_model_len']}; use --max-model-len, which routers are told")
    if not tree.get("enable_chunked_prefill") and tree["max_num_batched_tokens"] < tree["max_model_len"]:
        problems.append(
            f"max_num_batched_tokens: {tree['max_num_batched_tokens']} without enable_chunked_prefill refuses prompts "
            f"up to max_model_len ({tree['max_model_len']}); raise it or leave chunked prefill on"
        )
    if wanted.kv_blocks and wanted.kv_blocks * wanted.block_size < wanted.max_model_len:
        problems.append(
            f"kv_blocks: {wanted.kv_blocks} of {wanted.block_size} tokens, but one sequence may have "
            f"{wanted.max_model_len}; raise --kv-blocks or lower --max-model-len"
        )
    told = tree.get("kv_events_config") or {}
    if told.get("enable_kv_cache_events") and not tree.get("enable_prefix_caching"):
        problems.append("kv_events_config: without prefix caching there are no events; leave one of the two out")
    return problems


def _moves(config: Any) -> bool:
    """Whether a connector that fetches what it is told of is in it, directly or among several."""
    if not isinstance(config, Mapping):
        return False
    below = (config.get("kv_connector_extra_config") or {}).get("connectors") or []
    names = [config.get("kv_connector"), *(each.get("kv_connector") for each in below if isinstance(each, Mapping))]
    return any(name in _MOVES for name in names)


def layout(version: str, tree: Tree) -> str:
    """Fingerprint of what two engines must have in common to hand KV over; the connector checks the rest itself."""
    release = ".".join(version.split(".")[:2])
    return f"vllm-{release}/nixl/{tree.get('kv_cache_dtype', 'auto')}/{tree['block_size']}"


def _hint(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
