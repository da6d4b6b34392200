"""Steps whose tokens are drawn after they are launched, and how far a step has come."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.workers.engines.native.cuda.copies import LateStep, Pending, WrittenLayers


def test_tokens_are_drawn_once_at_the_latest_for_the_result() -> None:
    drawn = []

    def draw() -> Pending:
        drawn.append(1)
        return Pending(lambda: [(7, None)])

    late = LateStep(draw)
    assert not drawn
    late.draw()
    assert [late.result(), late.result()] == [[(7, None)], [(7, None)]]
    assert drawn == [1]


def test_the_result_alone_draws_them_too() -> None:
    assert LateStep(lambda: Pending(lambda: [(3, None)])).result() == [(3, None)]


class Attending:
    """Implements ``Paged``: adds the number of each layer to a list."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: Any) -> Tensor:
        self._seen.append(layer)
        return query


@pytest.mark.parametrize(
    ("layers", "others", "expected"),
    [
        (8, False, [*range(7), "7", 7, "0"]),
        (8, True, [*range(7), "7", 7]),
        (32, False, [*range(28), "28", *range(28, 32), "0"]),
        (2, False, [0, "1", 1, "0"]),
        (1, False, [0, "0"]),
    ],
    ids=str,
)
def test_leading_layers_are_noted_once_the_last_of_them_has_written(
    layers: int, others: bool, expected: list[Any]
) -> None:
    seen: list[Any] = []
    paged = WrittenLayers(Attending(seen), layers, lambda count: seen.append(str(count)), others=others)
    query = torch.zeros(1)
    for layer in range(layers):
        assert paged.attend(layer, query, query, query, None) is query  # type: ignore[arg-type]
    assert seen == expected
