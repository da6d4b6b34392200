"""The parallel mappings of a model that are worth trying: which divide its heads and experts, up to some GPUs."""

from collections.abc import Iterator

from penstock.infra.engine_args.model_shape import Shape
from penstock.measure.profile.roofline import Mapping


def mappings(shape: Shape, most_gpus: int, *, stages: int = 2) -> Iterator[Mapping]:
    """With powers of two of GPUs, as engines support them; the fewest first.

    Dense models: tensor ranks times pipeline stages. Mixtures of experts: the same tensor ranks with whole experts on
    each (TEP), and ranks that attend to sequences of their own (DEP).

    Args:
        stages: of a pipeline, at most.
    """
    tp = 1
    while tp <= most_gpus:
        if _divides(shape, tp):
            if shape.experts is None or tp == 1:
                yield Mapping(tp=tp)
            elif shape.experts.count % tp == 0:
                yield Mapping(tp=tp, ep=tp)
        if tp > 1 and shape.experts is not None and shape.experts.count % tp == 0:
            yield Mapping(tp=tp, ep=tp, attention_dp=True)
        pp = 2
        while shape.experts is None and pp <= stages and tp * pp <= most_gpus:
            if _divides(shape, tp) and shape.layers % pp == 0:
                yield Mapping(tp=tp, pp=pp)
            pp *= 2
        tp *= 2


def _divides(shape: Shape, ranks: int) -> bool:
    """Whether heads, and KV heads or their copies, are the same number on each rank; KV copies waste memory."""
    if shape.heads % ranks:
        return False
    return not shape.kv_heads or shape.kv_heads % ranks == 0
