"""Engine arguments for a model's shape, a number of GPUs, a role and a load: what the rules would ask for, made.

Pure. The result is a tree for ``decode``; ``generate`` has it checked by the rules before it is given out. Where the
rules leave a choice, the numbers are those of the recipes, and the reasons theirs.
"""

import math
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from infra.engine_args.memory_estimate import GIB, Memory, estimate
from infra.engine_args.model_shape import NVFP4_BITS, Shape
from infra.engine_args.rules import Context, Role, check, up
from infra.engine_args.rules.batching import DECODE_BATCH, PREFILL_BATCH
from infra.engine_args.rules.moe import moe_backend
from infra.engine_args.schema import EngineArgs
from infra.engine_args.tree import BadArguments, Tree, decode

BLOCK = 32
STEP_TOKENS = 8192  # a step that fills a GPU with prompts
LONG_STEP_TOKENS = 16384  # beyond, prompts are cut
MOST_BATCH = 2048
ATTENTION_DP_LOAD = 32  # sequences per GPU, from which on storing KV once is worth a copy of the attention weights
SPARE_SLOTS = 8  # one copy of a busy expert for so many experts
TRANSFER_TIMEOUT_MS = 60_000
FRACTIONS: dict[str, float] = {"aggregated": 0.85, "prefill": 0.8, "decode": 0.85}
ATTENTION_DP_FRACTION = 0.7  # ranks are unevenly loaded
LONGEST_MTP = 5


class Wish(Struct, frozen=True, kw_only=True):
    """What an engine is for.

    Attributes:
        gpus: of this engine; ``gpus_per_node`` of them share a node.
        isl, osl: tokens of the longest prompt and answer.
        concurrency: requests in flight at once, over all its GPUs.
        mtp: tokens that the model's own prediction layer drafts per step; 0: none.
        windows: keep only what the model's sliding windows see.
    """

    role: Role
    gpus: int
    gpu_bytes: int
    blackwell: bool
    isl: int
    osl: int
    concurrency: int
    gpus_per_node: int = 8
    mtp: int = 0
    windows: bool = False
    transport: str = "NIXL"

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)


class Generated(Struct, frozen=True, kw_only=True):
    tree: Tree
    args: EngineArgs
    memory: Memory
    warnings: tuple[str, ...]


def generate(shape: Shape, wish: Wish) -> Generated:
    """
    Raises:
        BadArguments: the model cannot be served so; each problem says what to change.
    """
    problems = list(_impossible(shape, wish))
    if problems:
        raise BadArguments(problems)
    tree = tree_of(shape, wish)
    args = decode(tree)
    context = context_of(shape, wish)
    found = check(args, context)
    if errors := [f"{each.where}: {each.message}; {each.fix} ({each.rule})" for each in found if each.level == "error"]:
        more = _enough(shape, wish)
        raise BadArguments([*errors, *([f"gpus: {more} would do"] if more else [])])
    memory = estimate(args, shape, wish.gpu_bytes, length=args.max_seq_len or 0)
    warnings = tuple(str(each) for each in found)
    asked = math.ceil(wish.concurrency / (wish.gpus if args.enable_attention_dp else 1))
    if wish.role != "prefill" and memory.sequences < asked:
        warnings += (
            f"memory: {memory.sequences} whole contexts of {memory.length} tokens fit the {memory.pool / GIB:.0f} GiB "
            f"of KV on a rank, {asked} are to run there at once; add GPUs or workers, else requests may wait",
        )
    return Generated(tree=tree, args=args, memory=memory, warnings=warnings)


def context_of(shape: Shape, wish: Wish) -> Context:
    return Context(
        role=wish.role,
        model_len=wish.isl + wish.osl,
        longest_prompt=wish.isl,
        gpus=wish.gpus,
        nodes=wish.nodes,
        gpu_bytes=wish.gpu_bytes,
        blackwell=wish.blackwell,
        shape=shape,
    )


def tree_of(shape: Shape, wish: Wish) -> Tree:
    """The arguments, in the order in which the recipes have them."""
    attention_dp = _attention_dp(shape, wish)
    length = up(wish.isl + wish.osl, BLOCK)
    batch = _batch(wish, attention_dp)
    tokens = _step_tokens(wish, length, batch)
    tree: dict[str, Any] = {"tensor_parallel_size": wish.gpus}
    if shape.experts is not None and wish.gpus > 1:
        tree["moe_expert_parallel_size"] = wish.gpus
    if wish.nodes > 1:
        tree["gpus_per_node"] = wish.gpus_per_node
    if wish.gpus > 1:
        tree["enable_attention_dp"] = attention_dp
    if wish.role == "prefill":
        tree["disable_overlap_scheduler"] = True
    if shape.experts is not None:
        tree["moe_config"] = _moe(shape, wish, attention_dp, batch, tokens)
    tree |= {"max_batch_size": batch, "max_num_tokens": tokens, "max_seq_len": length}
    if tokens < length:
        tree["enable_chunked_prefill"] = True
    if wish.mtp:
        tree["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": wish.mtp}
    tree["kv_cache_config"] = _kv_cache(shape, wish, attention_dp, length)
    tree["scheduler_config"] = {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}
    tree["cuda_graph_config"] = (
        None if wish.role == "prefill" else {"enable_padding": True, "batch_sizes": sizes(batch)}
    )
    if wish.role in ("prefill", "decode"):
        tree["cache_transceiver_config"] = {
            "backend": wish.transport,
            "max_tokens_in_buffer": length,
            "kv_transfer_timeout_ms": TRANSFER_TIMEOUT_MS,
        }
    return tree


def sizes(batch: int) -> list[int]:
    """Batch sizes with a CUDA graph: powers of two, and the largest batch; padding does the rest."""
    return [*(1 << power for power in range(batch.bit_length()) if 1 << power < batch), batch]


def _impossible(shape: Shape, wish: Wish) -> list[str]:
    problems = []
    if wish.role not in FRACTIONS:
        problems.append(f"role: an engine of role {wish.role} caches no KV; see the recipe llava16-encode")
    if shape.max_len and wish.isl + wish.osl > shape.max_len:
        problems.append(f"isl + osl: {wish.isl + wish.osl} tokens, the model knows {shape.max_len} positions")
    if wish.mtp and not shape.mtp_layers:
        problems.append("mtp: the model has no prediction layer; leave it out, or name a draft model by hand")
    if wish.mtp > LONGEST_MTP:
        problems.append(f"mtp: {wish.mtp} tokens; use at most {LONGEST_MTP}")
    if wish.windows and not any(shape.windows):
        problems.append("windows: the model sees everything in every layer; leave it out")
    if wish.nodes > 1 and wish.gpus % wish.gpus_per_node:
        problems.append(f"gpus: {wish.gpus} do not fill nodes of {wish.gpus_per_node}; use a multiple")
    return problems


def _attention_dp(shape: Shape, wish: Wish) -> bool:
    """Whether each GPU attends to its own sequences: where else every GPU would store the same KV, or heads are odd.

    A latent (MLA) is stored on every rank, and so are copies of KV heads when there are more ranks than heads.
    """
    if wish.gpus == 1 or shape.experts is None:
        return False
    if shape.heads % wish.gpus:
        return True
    copied = bool(shape.latent) or shape.kv_heads < wish.gpus
    busy = wish.role == "prefill" or wish.concurrency >= ATTENTION_DP_LOAD * wish.gpus
    return copied and busy


def _batch(wish: Wish, attention_dp: bool) -> int:
    """Sequences per step and rank."""
    if wish.role == "prefill":
        return max(4, min(PREFILL_BATCH, STEP_TOKENS // wish.isl))
    here = math.ceil(wish.concurrency / (wish.gpus if attention_dp else 1))
    least = DECODE_BATCH if wish.role == "decode" else 8
    return min(MOST_BATCH, max(least, up(here, 8)))


def _step_tokens(wish: Wish, length: int, batch: int) -> int:
    decoding = up(batch * (1 + wish.mtp), BLOCK)
    if wish.role == "decode":
        return decoding
    return max(STEP_TOKENS, decoding, min(length, LONG_STEP_TOKENS))


def _moe(shape: Shape, wish: Wish, attention_dp: bool, batch: int, tokens: int) -> Tree:
    backend = moe_backend(ranks=wish.gpus, attention_dp=attention_dp, blackwell=wish.blackwell, bits=shape.expert_bits)
    moe: Tree = {"backend": backend}
    if backend == "WIDEEP" and shape.experts is not None:
        slots = up(shape.experts.count + shape.experts.count // SPARE_SLOTS, wish.gpus)
        moe["load_balancer"] = {"num_slots": slots, "layer_updates_per_iter": 1}
        if wish.role == "decode":
            moe["max_num_tokens"] = up(batch * (1 + wish.mtp), BLOCK) * wish.gpus
        else:
            moe["max_num_tokens"] = tokens
    return moe


def _kv_cache(shape: Shape, wish: Wish, attention_dp: bool, length: int) -> Tree:
    kv: Tree = {"free_gpu_memory_fraction": ATTENTION_DP_FRACTION if attention_dp else FRACTIONS[wish.role]}
    if shape.expert_bits == NVFP4_BITS:
        kv["dtype"] = "fp8"  # such checkpoints carry its scales
    if wish.windows:
        kv["max_attention_window"] = _pattern([window or length for window in shape.windows])
    kv["tokens_per_block"] = BLOCK
    return kv


def _pattern(windows: list[int]) -> list[int]:
    """The shortest list that, repeated, gives these."""
    for period in range(1, len(windows)):
        if all(window == windows[layer % period] for layer, window in enumerate(windows)):
            return windows[:period]
    return windows


def _enough(shape: Shape, wish: Wish) -> int:
    """The next power of two of GPUs with which it goes; 0: none does."""
    gpus = wish.gpus
    while gpus < 128:
        gpus *= 2
        tried = replace(wish, gpus=gpus)
        if _impossible(shape, tried):
            continue
        findings = check(decode(tree_of(shape, tried)), context_of(shape, tried))
        if not any(each.level == "error" for each in findings):
            return gpus
    return 0
