"""What becomes of the vectors of a batch."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.schemas.errors import Code
from penstock.schemas.fleet import Embedder
from penstock.schemas.requests import PAIRS, Embedding
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.runners.embedding_runner import EmbeddingRunner, Input, _Batch, _Vectors, inputs_of


class Terminal:
    """Notes how requests end."""

    def __init__(self) -> None:
        self.ended: list[tuple[Any, Code, str]] = []

    def spawn(self, work: Any) -> None:
        if work is not None:
            work.close()

    def end(self, running: Any, code: Code, message: str) -> None:
        self.ended.append((running.request.id, code, message))


def runner(terminal: Terminal) -> EmbeddingRunner:
    settings = SimpleNamespace(max_running=4, max_batched_tokens=64)
    context: Any = SimpleNamespace(settings=settings, requests=None, terminal=terminal)
    nothing: Any = None
    return EmbeddingRunner(context, nothing, nothing, nothing)


def vectors(request_id: str, count: int) -> _Vectors:
    running: Any = SimpleNamespace(request=SimpleNamespace(id=request_id))
    return _Vectors(running, Embedding(2, texts=("a",) * count), [[1]] * count)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_with_numbers_that_json_lacks_fails_its_request_once_and_no_other(bad: float) -> None:
    terminal = Terminal()
    made = runner(terminal)
    wrong, right = vectors("bad", 4), vectors("good", 1)
    made.open_requests = {"bad": wrong, "good": right}
    made.inputs.add(wrong, [[1]] * 4)
    good = array("f", [0.5, 1.0]).tobytes()
    inputs = [Input(wrong, 0, [1]), Input(wrong, 1, [1]), Input(wrong, 2, [1]), Input(right, 0, [1])]
    made.deliver(_Batch(inputs, [good, array("f", [1.0, bad]).tobytes(), array("f", [bad, -bad]).tobytes(), good]))
    ((request_id, code, message),) = terminal.ended
    assert (request_id, code) == ("bad", Code.engine_error)
    assert "input[1] is not finite" in message
    assert not made.open_requests
    assert not len(made.inputs), "what waits of it is not computed"


def test_a_pair_without_tokens_is_refused_before_it_reaches_the_engine() -> None:
    """Of a model whose pairs have no special tokens, and texts of which its tokenizer keeps nothing."""
    engine: Any = SimpleNamespace(
        embedder=Embedder(1, max_tokens=8, vocab_size=9, scores=True), tokenize_pairs=lambda query, texts, *_: [[1], []]
    )
    pairs = Embedding(1, texts=("a", ""), queries=(" ",), prompt=PAIRS)
    with pytest.raises(RequestError, match="text 1 and its query have no tokens"):
        inputs_of(engine, pairs, b"")


def test_vectors_of_a_revoked_attempt_are_none_of_the_next_one_at_the_same_worker() -> None:
    made, vector = runner(Terminal()), array("f", [0.5, 1.0]).tobytes()
    revoked, current = vectors("again", 2), vectors("again", 2)
    made.open_requests = {"again": revoked}
    made.drop(revoked.running)  # while its first input is computed
    made.open_requests = {"again": current}
    made.deliver(_Batch([Input(revoked, 0, [1])], [vector]))
    made.deliver(_Batch([Input(current, 0, [1])], [vector]))
    assert made.open_requests == {"again": current}, "its second vector is missing"
    made.deliver(_Batch([Input(current, 1, [1])], [vector]))
    assert not made.open_requests
    assert current.vectors == [vector, vector]
