"""A chain edits one row: in order, in place, each processor wholly or not at all."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from penstock.workers.engines.logits.apply import NO_TOKEN_LEFT, ReadOnly, account, run
from tests.workers.engines.logits.support import VOCAB, chain, chosen, own


def noise() -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def test_processors_run_in_order_on_prompt_and_output() -> None:
    made = chain(own("Plus", "TopK"), chosen("Plus", token=4, by=100.0), chosen("TopK", k=1), chosen("Plus", token=5))
    logits, before = noise(), noise()
    account(run(made, ReadOnly([1, 2, 3]), logits))
    assert logits.argmax() == 4
    assert logits[4] == before[4] + 100
    assert torch.isinf(logits).sum() == VOCAB - 1
    assert made.processors[0].seen == [[1, 2, 3]]  # type: ignore[attr-defined]
    assert made.errors.count == 0


def test_what_is_returned_is_ignored() -> None:
    logits = noise()
    run(chain(own("Returns"), chosen("Returns")), [1], logits)
    assert torch.equal(logits, noise())


def test_an_error_leaves_what_was_before_it_and_the_others_continue(logged: list[Any]) -> None:
    made = chain(
        own("Plus", "RaisesHalfway"),
        chosen("Plus", token=1, by=2.0),
        chosen("RaisesHalfway"),
        chosen("Plus", token=2, by=3.0),
    )
    logits, expected = noise(), noise()
    expected[1] += 2
    expected[2] += 3
    account(run(made, [1], logits))
    assert torch.equal(logits, expected)
    assert made.errors.count == 1
    assert [(line["event"], line["processor"]) for line in logged] == [("logits_processor_failed", "RaisesHalfway")]
    assert "KeyError" in logged[0]["error"]


def test_errors_are_all_counted_and_each_kind_is_logged_once(logged: list[Any]) -> None:
    registry = own("RaisesHalfway", "Meddles")
    for length in range(1, 20):  # another text each time
        account(run(chain(registry, chosen("RaisesHalfway")), [0] * length, noise()))
    account(run(chain(registry, chosen("Meddles")), ReadOnly([1]), noise()))
    assert registry.errors.count == 20
    assert [line["processor"] for line in logged] == ["RaisesHalfway", "Meddles"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_cannot_be_drawn_from_is_undone(value: str, logged: list[Any]) -> None:
    made = chain(own("Spoils", "Plus"), chosen("Spoils", value=value), chosen("Plus", token=1, by=1.0))
    logits, expected = noise(), noise()
    expected[1] += 1
    account(run(made, [1], logits))
    assert torch.equal(logits, expected)
    assert made.errors.count == 1
    assert logged[0]["error"] == NO_TOKEN_LEFT


def test_the_tokens_cannot_be_changed() -> None:
    tokens = [5, 6, 7]
    made = chain(own("Meddles"), chosen("Meddles"))
    logits = noise()
    run(made, ReadOnly(tokens), logits)
    assert (tokens, made.errors.count) == ([5, 6, 7], 1)
    assert torch.equal(logits, noise())
    view = ReadOnly(tokens)
    assert (len(view), view[-1], list(view[1:]), list(view), 6 in view) == (3, 7, [6, 7], tokens, True)
    assert torch.tensor(view).tolist() == tokens


def test_one_row_of_a_batch_is_edited_and_no_other() -> None:
    batch = torch.stack([noise(), noise(), noise()])
    run(chain(own("Plus", "RaisesHalfway"), chosen("Plus", token=3), chosen("RaisesHalfway")), [1], batch[1])
    assert torch.equal(batch[0], noise())
    assert torch.equal(batch[2], noise())
    assert batch[1, 3] == noise()[3] + 1
