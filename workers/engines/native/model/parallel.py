"""Tensor parallelism: the part of a model that each rank computes, and how the ranks put their parts together.

Projections into attention and MLP are split by rows, so that each rank has some of the heads and of the inner values.
Those out of them are split by columns: the ranks' results are added up. Which modules can be split that way is
transformers' own plan for the architecture; every other module is computed whole by each rank. All ranks end a layer
with the same hidden states, and have the logits of the whole vocabulary.

A rank's KV cache has the heads that it computes. Where there are fewer KV heads than ranks, several have the same one.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _distributed_c10d

from penstock.workers.engines.native.model.quantize import GROUP, STEP, Mxfp4Experts

EXCHANGE_S = 120.0  # for which a rank waits for the others within a step, or while they load kernels
_library: Any = _distributed_c10d  # its groups and their options are not typed
# Of architectures for which transformers has no plan, or one that computes the same on all ranks.
_LAYER = "model.layers.*"
_PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        **{f"{_LAYER}.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")},
        f"{_LAYER}.self_attn.o_proj": "rowwise",
        f"{_LAYER}.mlp.experts": "moe_tp_experts",
    },
    "phi3": {
        f"{_LAYER}.self_attn.qkv_proj": "colwise",
        f"{_LAYER}.self_attn.o_proj": "rowwise",
        f"{_LAYER}.mlp.gate_up_proj": "packed_colwise",
        f"{_LAYER}.mlp.down_proj": "rowwise",
    },
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class CannotSplit(Exception):
    """A model cannot be split, or not over this many ranks."""


class Peers(Protocol):
    """A faster way to add up little, between GPUs of one host.

    Attributes:
        rows: that a sum can have.
        stopped: ``stop`` was called, or another rank was waited for in vain: results are void.
    """

    rows: int

    @property
    def stopped(self) -> bool: ...

    def add_up(self, part: Tensor, residual: Tensor | None, norm: Any) -> Tensor:
        """The sum of all ranks' parts, added to ``residual`` in place.

        Args:
            norm: a ``cuda.modules.RmsNorm`` that gets the sum next: its result is computed, too.
        """

    def spread(self, values: Tensor) -> None:
        """As ``RankGroup.spread``."""

    def stop(self) -> None:
        """Wait for no rank any more; from any thread."""


class RankGroup:
    """The ranks of one engine, as one of them sees it. ``connect`` before anything is exchanged.

    Args:
        meet: waits until all ranks are there; returns the store through which they find each other.
    Attributes:
        rank, size: which of how many this is.
        broken: an exchange has failed, as it does when another rank has ended.
        kv_heads: the first that this rank has, and how many the whole model has; 0: attention is not split.
        apart: each rank has its own part for the sum, as long as ``alone``.
        peers: what the CUDA kernels add up with where they can; None: ``add_up`` alone.
    """

    def __init__(self, rank: int, size: int, meet: Callable[[], Any]) -> None:
        self.rank, self.size = rank, size
        self.broken = False
        self.kv_heads = (0, 0)
        self.apart = False
        self.peers: Peers | None = None
        self._meet = meet
        self._exchange: Any = None
        self._aborts = False

    def connect(self, device: torch.device) -> None:
        """Connect to the other ranks; repeating it changes nothing.

        Raises:
            EngineError: of ``meet``.
            RuntimeError: they cannot be reached.
        """
        if self._exchange is not None:
            return
        store, bound = self._meet(), timedelta(seconds=EXCHANGE_S)
        if device.type == "cuda":
            os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # a worker sees its ranks end; no store stays
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # while one captures, another rank's GPU waits for it
            options = _library.ProcessGroupNCCL.Options()
            options._timeout = bound
            self._exchange = _library.ProcessGroupNCCL(store, self.rank, self.size, options)
            self._aborts = True  # a GPU would wait for a rank that has ended; gloo's connections end by themselves
            return
        options = _library.ProcessGroupGloo._Options()
        options._timeout = bound
        options._devices = [_library.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._exchange = _library.ProcessGroupGloo(store, self.rank, self.size, options)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute without the other ranks: nothing is added up."""
        self.apart = True
        try:
            yield
        finally:
            self.apart = False

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place."""
        if not self.apart:
            options = _library.AllreduceOptions()
            options.asyncOp = not self._aborts  # NCCL's on the current stream
            self._wait(lambda exchange: exchange.allreduce([part], options))
        return part

    def join(self, part: Tensor) -> Tensor:
        """All ranks' parts, (…, n) each, as (…, ranks * n)."""
        parts = part.new_empty((self.size, *part.shape))
        if self._aborts:
            options = _library.AllgatherOptions()
            options.asyncOp = False
            self._wait(lambda exchange: exchange._allgather_base(parts, part.contiguous(), options))
        else:
            self._wait(lambda exchange: exchange.allgather([list(parts.unbind())], [part.contiguous()]))
        return torch.cat(parts.unbind(), -1)

    def spread(self, values: Tensor) -> None:
        """Replace (n,) int32 by those of rank 0."""
        if self.peers is not None:
            self.peers.spread(values)
            return
        options = _library.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = not self._aborts
        self._wait(lambda exchange: exchange.broadcast([values], options))

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of all ranks' numbers."""
        options = _library.AllreduceOptions()
        options.reduceOp = _library.ReduceOp.MIN
        shared = torch.tensor([number], device=device)
        self._wait(lambda exchange: exchange.allreduce([shared], options))
        return int(shared.item())

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        try:
            work = begin(self._exchange)
            if work is not None:
                work.wait()
        except (RuntimeError, AttributeError):  # the latter: closed meanwhile
            self.broken = True
            raise

    def close(self) -> None:
        """End exchanges that wait for another rank, too."""
        if self.peers is not None:
            self.peers.stop()
        exchange, self._exchange = self._exchange, None
        if self._aborts and exchange is not None:  # it may wait for ranks that have not ended
            threading.Thread(target=exchange.abort, name="nccl-abort", daemon=True).start()


class RowParallel(nn.Module):
    """A linear layer of which each rank has some columns."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.add_up(self.linear(x))


class SplitExperts(nn.Module):
    """Experts of which each rank has some inner values."""

    def __init__(self, experts: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.experts = experts
        self.group = group

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.group.add_up(self.experts(*args, **kwargs))


class SplitVocabulary(nn.Module):
    """Output embeddings of which each rank has some tokens, as many on every rank; there is padding after the last."""

    def __init__(self, lm_head: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.lm_head = lm_head
        self._vocab = lm_head.out_features
        self._group = group
        each = -(-self._vocab // group.size)
        weight, bias = lm_head.weight.data, lm_head.bias
        # A view, which takes no memory beside the input embeddings that it may be tied to.
        lm_head.weight = _parameter(_padded(weight[group.rank * each : (group.rank + 1) * each], each))
        if bias is not None:
            lm_head.bias = _parameter(_padded(bias.data[group.rank * each : (group.rank + 1) * each], each))
        lm_head.out_features = each

    def forward(self, x: Tensor) -> Tensor:
        return self._group.join(self.lm_head(x))[..., : self._vocab]


def split(model: Any, group: RankGroup) -> None:
    """Keep of a loaded model what one rank computes.

    Raises:
        CannotSplit: it cannot be split, or not over this many ranks.
    """
    name = type(model).__name__
    plan = _PLANS.get(model.config.model_type) or dict(getattr(model, "tp_plan", None) or {})
    styles = {path: _style(plan, path) for path, _ in (*model.named_modules(), *model.named_parameters())}
    count = 0
    for path, style in styles.items():
        if style == "colwise" and path.endswith(".qkv_proj"):
            count += _split_joint_heads(model, path, group)
        elif style == "colwise" and path.endswith(".sinks"):
            parent, sinks = model.get_submodule(path.rpartition(".")[0]), _at(model, path)
            parent.sinks = _parameter(_of_rank(sinks.data, 0, _share(len(sinks), "sinks", path, group), group).clone())
        elif style == "packed_colwise" and isinstance(module := _at(model, path), nn.Linear):
            _split_halves(module, path, group)
            count += 1
        elif style == "colwise":
            count += _split_rows(model, path, group)
        elif style == "rowwise" and isinstance(module := _at(model, path), nn.Linear):
            _split_columns(model, path, module, group)
            count += 1
        elif style == "moe_tp_experts" and _split_experts(model, path, styles, group):
            count += 1
    if not count:
        raise CannotSplit(
            f"{name} cannot be split over GPUs: transformers has no plan for it; leave out --tensor-parallel-size, or "
            "choose another engine"
        )
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model.set_output_embeddings(SplitVocabulary(head, group))


def _style(plan: dict[str, str], path: str) -> str:
    """What the plan says of a module or parameter, whose numbers it writes as ``*``."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), "")


def _at(model: Any, path: str) -> Any:
    above, _, name = path.rpartition(".")
    return getattr(model.get_submodule(above), name, None)


def _split_rows(model: Any, path: str, group: RankGroup) -> int:
    """Split a linear layer by rows; returns 0 for what is none."""
    above, _, name = path.rpartition(".")
    parent, linear = model.get_submodule(above), _at(model, path)
    if not isinstance(linear, nn.Linear):
        return 0
    unit = _head_rows(parent, name) or (linear.out_features if name in _PROJECTIONS else 1)
    heads = linear.out_features // unit
    if name in ("k_proj", "v_proj") and heads < group.size and not group.size % heads:
        first, count = group.rank * heads // group.size, 1  # the one that this rank's query heads share
    else:
        count = _share(heads, "heads" if unit > 1 else "rows", path, group)
        first = group.rank * count
    if name == "k_proj":
        group.kv_heads = (first, heads)
    rows = slice(first * unit, (first + count) * unit)
    linear.weight = _parameter(linear.weight.data[rows].clone())
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias.data[rows].clone())
    linear.out_features = count * unit
    if name == "k_proj" and hasattr(parent, "num_key_value_groups"):
        queries = parent.q_proj.out_features // unit  # of this rank: a plan has the queries first
        parent.num_key_value_groups = queries // count
    return 1


def _head_rows(parent: Any, name: str) -> int:
    """Rows of a projection that belong to one head; 0: unknown, or it is no projection to heads."""
    latent = bool(getattr(parent, "kv_lora_rank", 0))  # of multi-head latent attention, which each rank has whole
    if name == "kv_b_proj" and latent:
        return int(parent.qk_nope_head_dim + parent.v_head_dim)
    if name in ("q_proj", "q_b_proj") and latent:
        return int(parent.qk_head_dim)
    return int(getattr(parent, "head_dim", 0)) if name in _PROJECTIONS else 0


def _of_rank(data: Tensor, dim: int, count: int, group: RankGroup) -> Tensor:
    """This rank's part, if each has this many along a dimension."""
    return data.narrow(dim, group.rank * count, count)


def _split_joint_heads(model: Any, path: str, group: RankGroup) -> int:
    """Split one layer that computes queries, keys and values (Phi-3); returns 0 for what is none."""
    parent, linear = model.get_submodule(path.rpartition(".")[0]), _at(model, path)
    if not isinstance(linear, nn.Linear):
        return 0
    heads, kv_heads = parent.config.num_attention_heads, parent.num_key_value_heads
    queries = _share(heads, "heads", path, group)
    if kv_heads < group.size and not group.size % kv_heads:
        first, keys = group.rank * kv_heads // group.size, 1
    else:
        keys = _share(kv_heads, "KV heads", path, group)
        first = group.rank * keys
    group.kv_heads = (first, kv_heads)
    unit, starts = parent.head_dim, (group.rank * queries, heads + first, heads + kv_heads + first)
    rows = [slice(at * unit, (at + count) * unit) for at, count in zip(starts, (queries, keys, keys), strict=True)]
    linear.weight = _parameter(torch.cat([linear.weight.data[part] for part in rows]))
    if linear.bias is not None:
        linear.bias = _parameter(torch.cat([linear.bias.data[part] for part in rows]))
    linear.out_features = len(linear.weight)
    parent.num_key_value_heads, parent.num_key_value_groups = keys, queries // keys
    parent.config = _RankConfig(parent.config, queries)  # its forward pass reads where the keys begin
    return 1


class _RankConfig:
    """A model's configuration, but for its number of heads."""

    def __init__(self, config: Any, heads: int) -> None:
        self._config, self.num_attention_heads = config, heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _split_halves(linear: nn.Linear, path: str, group: RankGroup) -> None:
    """Split a linear layer whose rows are those of gate, then those of up."""
    inner = linear.out_features // 2
    count = _share(inner, "rows", path, group)
    halves = linear.weight.data.view(2, inner, -1)
    linear.weight = _parameter(_of_rank(halves, 1, count, group).flatten(0, 1))
    if linear.bias is not None:
        linear.bias = _parameter(_of_rank(linear.bias.data.view(2, inner), 1, count, group).flatten())
    linear.out_features = 2 * count


def _split_columns(model: Any, path: str, linear: nn.Linear, group: RankGroup) -> None:
    above, _, name = path.rpartition(".")
    count = _share(linear.in_features, "columns", path, group)
    linear.weight = _parameter(linear.weight.data[:, group.rank * count : (group.rank + 1) * count].clone())
    linear.in_features = count
    if group.rank:
        linear.register_parameter("bias", None)  # it is added once
    setattr(model.get_submodule(above), name, RowParallel(linear, group))


def _split_experts(model: Any, path: str, styles: dict[str, str], group: RankGroup) -> bool:
    """Split the inner values of experts; False: they are not stored as is known here, and stay whole."""
    above, _, name = path.rpartition(".")
    experts = _at(model, path)
    if isinstance(experts, Mxfp4Experts):
        _split_packed_experts(experts, group)
    elif getattr(experts, "is_transposed", False) and not getattr(experts, "is_concatenated", True):
        _split_transposed_experts(experts, path, group)
    elif (styles.get(f"{path}.gate_up_proj"), styles.get(f"{path}.down_proj")) == ("packed_colwise", "rowwise"):
        inner = experts.down_proj.shape[-1]
        count = _share(inner, "inner values", path, group)
        halves = experts.gate_up_proj.data.unflatten(1, (2, inner))
        experts.gate_up_proj = _parameter(_of_rank(halves, 2, count, group).flatten(1, 2).clone())
        experts.down_proj = _parameter(_of_rank(experts.down_proj.data, 2, count, group).clone())
    else:
        return False
    setattr(model.get_submodule(above), name, SplitExperts(experts, group))
    return True


def _split_transposed_experts(experts: Any, path: str, group: RankGroup) -> None:
    """Split experts of (experts, in, out), gate and up in turns, with biases (GPT-OSS)."""
    count = _share(experts.down_proj.shape[1], "inner values", path, group)
    experts.gate_up_proj = _parameter(_of_rank(experts.gate_up_proj.data, 2, 2 * count, group).clone())
    experts.gate_up_proj_bias = _parameter(_of_rank(experts.gate_up_proj_bias.data, 1, 2 * count, group).clone())
    experts.down_proj = _parameter(_of_rank(experts.down_proj.data, 1, count, group).clone())
    if group.rank:
        experts.down_proj_bias.data.zero_()  # it is added once


def _split_packed_experts(experts: Any, group: RankGroup) -> None:
    """Split experts of 4 bits by steps of their values, some ranks may have one more; those that lack it have zeros.

    A step of zeros adds nothing: the activation of a gate of 0 is 0.
    """
    inner = experts.down_proj_blocks.shape[2] * GROUP
    steps = -(-inner // STEP)
    count = -(-steps // group.size) * STEP
    start = min(group.rank * count, inner)
    rows, groups = slice(2 * start, 2 * (start + count)), slice(start // GROUP, (start + count) // GROUP)
    for name, (dim, part, length) in {
        "gate_up_proj_blocks": (1, rows, 2 * count),
        "gate_up_proj_scales": (1, rows, 2 * count),
        "gate_up_proj_bias": (1, rows, 2 * count),
        "down_proj_blocks": (2, groups, count // GROUP),
        "down_proj_scales": (2, groups, count // GROUP),
    }.items():
        data = getattr(experts, name).data
        mine = data[:, part] if dim == 1 else data[:, :, part]
        whole = data.new_zeros((*data.shape[:dim], length, *data.shape[dim + 1 :]))
        whole.narrow(dim, 0, mine.shape[dim]).copy_(mine)
        setattr(experts, name, _parameter(whole))
    if group.rank:
        experts.down_proj_bias.data.zero_()  # it is added once


def _share(number: int, what: str, path: str, group: RankGroup) -> int:
    if number % group.size:
        raise CannotSplit(
            f"{path} has {number} {what}, which {group.size} GPUs cannot share equally; choose a "
            f"--tensor-parallel-size that divides {number}"
        )
    return number // group.size


def _padded(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, count - len(rows)))


def _parameter(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)
