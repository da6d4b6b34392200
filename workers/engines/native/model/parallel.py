"""Tensor parallelism: the part of a model that each rank computes, and how the ranks put their parts together.

Projections into attention and MLP are split by rows, so that each rank has some of the heads and of the inner values.
Those out of them are split by columns: the ranks' results are added up. Which modules can be split that way is
transformers' own plan for the architecture; every other module is computed whole by each rank. All ranks end a layer
with the same hidden states, and have the logits of the whole vocabulary.

A rank's KV cache has the heads that it computes. Where there are fewer KV heads than ranks, several have the same one.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

EXCHANGE_S = 120.0  # for which a rank waits for the others within a step, or while they load kernels
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class CannotSplit(Exception):
    """A model cannot be split, or not over so many ranks."""


class RankGroup:
    """The ranks of one engine, as one of them sees it. ``connect`` before anything is exchanged.

    Args:
        meet: waits until all ranks are there; returns the store through which they find each other.
    Attributes:
        rank, size: which of how many this is.
        broken: an exchange has failed, as it does when another rank has ended.
        kv_heads: the first that this rank has, and how many the whole model has; 0: attention is not split.
    """

    def __init__(self, rank: int, size: int, meet: Callable[[], Any]) -> None:
        self.rank, self.size = rank, size
        self.broken = False
        self.kv_heads = (0, 0)
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
        library: Any = distributed  # its groups are not typed
        if device.type == "cuda":
            options = library.ProcessGroupNCCL.Options()
            options._timeout = bound
            self._exchange = library.ProcessGroupNCCL(store, self.rank, self.size, options)
            self._aborts = True  # a GPU would wait for a rank that has ended; gloo's connections end by themselves
            return
        options = library.ProcessGroupGloo._Options()
        options._timeout = bound
        options._devices = [library.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._exchange = library.ProcessGroupGloo(store, self.rank, self.size, options)

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place."""
        self._wait(lambda exchange: exchange.allreduce([part]))
        return part

    def join(self, part: Tensor) -> Tensor:
        """All ranks' parts, (…, n) each, as (…, ranks * n)."""
        parts = part.new_empty((self.size, *part.shape))
        self._wait(lambda exchange: exchange.allgather([list(parts.unbind())], [part.contiguous()]))
        return parts.movedim(0, -2).flatten(-2)

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of all ranks' numbers."""
        library: Any = distributed
        options = library.AllreduceOptions()
        options.reduceOp = library.ReduceOp.MIN
        shared = torch.tensor([number], device=device)
        self._wait(lambda exchange: exchange.allreduce([shared], options))
        return int(shared.item())

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        try:
            begin(self._exchange).wait()
        except (RuntimeError, AttributeError):  # the latter: closed meanwhile
            self.broken = True
            raise

    def close(self) -> None:
        """End exchanges that wait for another rank, too."""
        exchange, self._exchange = self._exchange, None
        if self._aborts and exchange is not None:
            exchange.abort()


class RowParallel(nn.Module):
    """A linear layer of which each rank has some columns."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.add_up(self.linear(x))


class SplitExperts(nn.Module):
    """Experts of which each rank has some inner values."""

    def __init__(self, experts: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.experts = experts
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._group.add_up(self.experts(*args, **kwargs))


class SplitVocabulary(nn.Module):
    """Output embeddings of which each rank has some tokens, as many on every rank; there is padding behind the last."""

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
        CannotSplit: it cannot be split, or not over so many ranks.
    """
    name = type(model).__name__
    plan = dict(getattr(model, "tp_plan", None) or {})
    styles = {path: _style(plan, path) for path, _ in (*model.named_modules(), *model.named_parameters())}
    count = 0
    for path, style in styles.items():
        if style == "colwise":
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
    if (styles.get(f"{path}.gate_up_proj"), styles.get(f"{path}.down_proj")) != ("packed_colwise", "rowwise"):
        return False
    inner = experts.down_proj.shape[-1]
    count = _share(inner, "inner values", path, group)
    mine = slice(group.rank * count, (group.rank + 1) * count)
    halves = experts.gate_up_proj.data.unflatten(1, (2, inner))
    experts.gate_up_proj = _parameter(halves[:, :, mine].flatten(1, 2).clone())
    experts.down_proj = _parameter(experts.down_proj.data[..., mine].clone())
    setattr(model.get_submodule(above), name, SplitExperts(experts, group))
    return True


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
