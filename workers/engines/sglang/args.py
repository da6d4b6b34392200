"""The engine's arguments: our defaults, overridden by ``--extra-engine-args`` and then by ``--override-engine-args``.

Pure. The result is keyword arguments of ``sglang.Engine``, which are the fields of ``ServerArgs``. Arguments that would
deadlock, corrupt data or silently disable a feature are refused, each with its fix.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments, Tree, merge
from penstock.workers.engines.external.arguments import event_publisher, refused, sleeps, uneven

PAIR = ("prefill", "decode")  # roles whose engines work together on a request
GRAMMARS = "llguidance"
# SGLang keeps one token free of a sequence's context, and takes prompts only up to 6 tokens below it.
CONTEXT_MARGIN = 6
DRAFTING = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")  # algorithms that draft into a sequence's context
DRAFT = (5, 4, 8)  # steps, branches and tokens of the widest draft that SGLang chooses itself

# The worker sets these itself: they would change the tokens, their order or their end.
RESERVED: Mapping[str, str] = {
    "model_path": "use --model",
    "tokenizer_path": "the gateway tokenizes; use --model",
    "served_model_name": "use --served-model-name",
    "incremental_streaming_output": "the worker reads new tokens only",
    "stream_interval": "the worker batches tokens itself",
    "preferred_sampling_params": "requests and the model's generation_config.json say how to sample",
    "allow_auto_truncate": "the gateway refuses prompts that are too long",
    "disaggregation_mode": "use --role",
    "disaggregation_bootstrap_port": "the worker chooses a free port",
    "tokenizer_worker_num": "the gateways tokenize; start more of them",
    "enable_metrics": "use --no-publish-events-and-metrics",
    "is_embedding": "the worker only generates text",
    "enable_lora": "use --lora or --lora-folder",
    "lora_paths": "use --lora or --lora-folder",
    "max_loras_per_batch": "use --max-loras",
    "max_lora_rank": "use --max-lora-rank",
    "max_loaded_loras": "use --max-cpu-loras; what SGLang unloads by itself, it reads again, changed or not",
    "schedule_policy": "the router orders requests; SGLang's fcfs keeps that order",
    "enable_priority_scheduling": "the router orders requests",
    "reasoning_parser": "the gateway parses answers; use --reasoning-parser",
    "tool_call_parser": "the gateway parses answers; use --tool-call-parser",
    "chat_template": "the gateway applies the model's",
    "nnodes": "use --nodes",
    "node_rank": "use --node-rank",
    "dist_init_addr": "use --leader-address and --leader-port",
    "host": "the worker serves no HTTP",
    "port": "the worker serves no HTTP",
    "custom_sigquit_handler": "the worker handles it",
    "enable_custom_logit_processor": "only the native engine and TensorRT-LLM run logits processors",
    "kv_events_config": "use --no-use-kv-events to switch KV events off",
}
# Without the second, SGLang wakes up with other weights than it had.
MEMORY_SAVER: Mapping[str, bool] = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
# Linear layers that a LoRA adapter may change, unless the engine's arguments name others.
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Names on SGLang's command line that its constructor does not know.
ALIASES: Mapping[str, str] = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "attention_data_parallel_size": "attn_dp_size",
    "enable_hicache": "enable_hierarchical_cache",
    "max_model_len": "context_length",
    "block_size": "page_size",
}


class SglangSettings(NamedTuple):
    """The worker's settings, and what follows from them for the engine.

    Attributes:
        max_model_len: tokens of the longest sequence.
        events: endpoint of KV events; empty: none are published.
        replay: endpoint of their replays.
        host: where a prefill engine's bootstrap server listens.
        bootstrap_port: the port.
        constraints: the engine applies constraints (structured output); it then reads the model's tokenizer.
        meeting: address and port where the ranks of several machines meet.
    """

    worker: WorkerSettings
    max_model_len: int
    events: str = ""
    replay: str = ""
    host: str = "127.0.0.1"
    bootstrap_port: int = 0
    constraints: bool = False
    meeting: str = ""


class ResolvedSglangArgs(NamedTuple):
    """
    Attributes:
        tree: keyword arguments, without the model.
        events: of the publisher of KV events; None: there are none.
        ranks: data-parallel ranks.
        deterministic: equal seeds draw equal tokens.
    """

    tree: Tree
    events: Tree | None
    ranks: int
    deterministic: bool

    @property
    def pair(self) -> bool:
        """Whether it is one engine of a pair, which cannot run a request alone."""
        return bool(self.tree["disaggregation_mode"] != "null")

    @property
    def constraints(self) -> bool:
        """Whether it applies constraints."""
        return self.tree.get("grammar_backend") == GRAMMARS and not self.tree["skip_tokenizer_init"]


def context_length(max_model_len: int, given: Mapping[str, Any]) -> int:
    """The engine's context, in which each sequence of ``max_model_len`` tokens fits.

    Args:
        given: arguments of the engine; with a drafting algorithm SGLang counts the draft of each request, too.
    """
    drafted = 0
    if str(given.get("speculative_algorithm")).upper() in DRAFTING:
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        steps, branches, tokens = (
            max(int(given.get(name) or 0), most) for name, most in zip(names, DRAFT, strict=True)
        )
        drafted = max(steps * branches, tokens)
    return max_model_len + CONTEXT_MARGIN + drafted


def defaults(wanted: SglangSettings, given: Mapping[str, Any]) -> Tree:
    """Our default arguments, beside those that the user gives."""
    worker = wanted.worker
    tree: Tree = {
        "skip_tokenizer_init": not wanted.constraints,  # it sees token ids only; grammars need their texts
        "incremental_streaming_output": True,
        "page_size": worker.block_size // int(given.get("dcp_size") or 1),  # each rank has a part of a block
        "max_running_requests": worker.max_running,
        "chunked_prefill_size": max(1, worker.max_batched_tokens // worker.block_size) * worker.block_size,
        "context_length": context_length(wanted.max_model_len, given),
        "disable_radix_cache": not worker.prefix_cache,
        "enable_metrics": worker.publish_events_and_metrics,
        "log_level": worker.log_level,
        "disaggregation_mode": worker.role if worker.role in PAIR else "null",
    }
    if worker.role in PAIR:
        tree["disaggregation_transfer_backend"] = "nixl"
    if worker.role == "prefill":
        tree |= {"host": wanted.host, "disaggregation_bootstrap_port": wanted.bootstrap_port}
    if worker.nodes > 1:
        tree |= {"nnodes": worker.nodes, "node_rank": 0, "dist_init_addr": wanted.meeting}
    if wanted.constraints:
        tree["grammar_backend"] = GRAMMARS
    if worker.kv_blocks:
        tree["max_total_tokens"] = worker.kv_blocks * worker.block_size
    if worker.dtype != "auto":
        tree["dtype"] = worker.dtype
    if worker.device != "auto":
        tree["device"] = worker.device
    if worker.tensor_parallel_size:
        tree["tp_size"] = worker.tensor_parallel_size
    if worker.lora_slots:
        tree |= {
            "enable_lora": True,
            "max_loras_per_batch": worker.max_loras + 1,  # requests without an adapter take one
            "max_lora_rank": worker.max_lora_rank,
            "lora_target_modules": list(LORA_MODULES),
        }
    if sleeps(worker):
        tree |= MEMORY_SAVER
    if worker.otlp_endpoint:
        tree |= {"enable_trace": True, "otlp_traces_endpoint": worker.otlp_endpoint}
    return tree


def resolve(wanted: SglangSettings, given: Mapping[str, Any], known: Collection[str]) -> ResolvedSglangArgs:
    """Merge and check.

    Args:
        given: the user's arguments: the YAML with the JSON merged over it.
        known: fields of the installed ServerArgs.

    Raises:
        BadArguments: one line per problem, each with its fix.
    """
    worker = wanted.worker
    if worker.role == "encode":
        raise BadArguments(["--role encode: the SGLang adapter takes text only; use --engine native or trtllm"])
    problems = refused(given, RESERVED, known, ALIASES)
    if problems:
        raise BadArguments(problems)
    tree = merge(defaults(wanted, given), given)
    problems = _contradictions(tree, wanted)
    if problems:
        raise BadArguments(problems)
    events = event_publisher(worker, wanted.events, wanted.replay)
    if tree["disable_radix_cache"] or (
        worker.role == "decode" and not tree.get("disaggregation_decode_enable_radix_cache")
    ):
        events = None  # without a prefix cache there are none
    elif worker.nodes > 1 and ranks_of(tree) > 1:
        events = None  # ranks on other machines publish there; the router then reckons what they cache
    if events is not None:
        tree["kv_events_config"] = json.dumps(events)
    return ResolvedSglangArgs(tree, events, ranks_of(tree), bool(tree.get("enable_deterministic_inference")))


def ranks_of(tree: Mapping[str, Any]) -> int:
    """Independent KV caches: replicas of the model, or groups of its attention."""
    return max(int(tree.get("dp_size") or 1), int(tree.get("attn_dp_size") or 1))


def _contradictions(tree: Tree, wanted: SglangSettings) -> list[str]:
    worker = wanted.worker
    problems = []
    context = context_length(wanted.max_model_len, tree)
    if tree["page_size"] * int(tree.get("dcp_size") or 1) != worker.block_size:
        problems.append(f"page_size: {tree['page_size']}, the worker has {worker.block_size}; use --block-size")
    if tree["context_length"] != context:
        problems.append(f"context_length: {tree['context_length']}; use --max-model-len, which the worker registers")
    if worker.role in PAIR and tree["disaggregation_transfer_backend"] == "fake":
        problems.append("disaggregation_transfer_backend: fake moves no KV; use nixl")
    if worker.nodes > 1:
        problems += _across(tree, worker.nodes)
    batch = int(tree["chunked_prefill_size"] or 0)
    if worker.role != "decode" and batch > 0 and batch % worker.block_size:
        problems.append(f"chunked_prefill_size: {batch} is not a multiple of --block-size {worker.block_size}")
    if worker.lora_slots and ranks_of(tree) > 1:  # with attention DP it takes pinned adapters only
        problems.append("dp_size: SGLang loads no LoRA adapters into several replicas; start a worker for each")
    if worker.kv_blocks and tree["max_total_tokens"] != worker.kv_blocks * worker.block_size:
        problems.append(f"max_total_tokens: {tree['max_total_tokens']}; use --kv-blocks, or remove one of them")
    if tree.get("enable_memory_saver") and not tree.get("enable_weights_cpu_backup"):
        problems.append("enable_memory_saver: add enable_weights_cpu_backup, or the weights are lost when it sleeps")
    if tree["disable_radix_cache"] == worker.prefix_cache:
        problems.append("disable_radix_cache: use --no-prefix-cache, which the worker registers")
    return problems


def _across(tree: Tree, nodes: int) -> list[str]:
    """What an engine over several machines cannot do."""
    problems = uneven(int(tree.get("tp_size") or 1) * int(tree.get("pp_size") or 1), nodes)
    if int(tree.get("dp_size") or 1) > 1 and not tree.get("enable_dp_attention"):
        problems.append(
            f"dp_size: not with --nodes {nodes} unless enable_dp_attention is on; start a worker for each rank"
        )
    return problems


def follower_tree(tree: Tree, node: int) -> Tree:
    """The arguments on another machine than the first."""
    return tree | {"node_rank": node}


def layout(version: str, tree: Tree, revision: str) -> str:
    """Fingerprint that two engines must share to hand off KV; SGLang checks their parallel sizes itself."""
    backend, dtype = tree["disaggregation_transfer_backend"], tree.get("kv_cache_dtype", "auto")
    return f"sglang-{version}/{backend}/{dtype}/{tree['page_size']}/{revision[:12]}"
