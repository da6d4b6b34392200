"""From token items to the JSON of an embeddings answer."""

import base64
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.embeddings import EmbeddingAggregator
from penstock.schemas import done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import EMBEDDING, PAIRS, RERANK, SCORE, Embedding, GenerateRequest, Stop
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.properties import examples

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def request(dimensions: int, *, packed: bool = False) -> GenerateRequest:
    embedding = Embedding(dimensions, texts=("a",), base64=packed)
    return GenerateRequest("r", "m", "g", b"", Stop(1), 5_000_000_000, 9, endpoint=EMBEDDING, embedding=embedding)


@examples(30)
@given(st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 20), st.booleans())
def test_vectors_come_in_order_and_exactly_however_they_are_cut(
    vectors: list[list[float]], size: int, packed: bool
) -> None:
    output = pack_tokens([17]) + b"".join(array("f", vector).tobytes() for vector in vectors)
    aggregator = EmbeddingAggregator(request(3, packed=packed))
    for at in range(0, len(output), 4 * size):
        last = at + 4 * size >= len(output)
        item = TokenItem("r", 1, 0, at // 4, output[at : at + 4 * size], Finish("stop") if last else None)
        assert aggregator.push([item]) == last
    body = json.loads(aggregator.response())
    assert (body["object"], body["model"], body["usage"]) == ("list", "m", {"prompt_tokens": 17, "total_tokens": 17})
    assert [each["index"] for each in body["data"]] == list(range(len(vectors)))
    if packed:
        found = [array("f", base64.b64decode(each["embedding"])).tolist() for each in body["data"]]
    else:
        found = [each["embedding"] for each in body["data"]]
    assert found == vectors
    event = done.Done("r", "m", 1, choices=(done.Outcome(output, "stop"),), usage=done.usage_of(request(3), [output]))
    again = EmbeddingAggregator(request(3, packed=packed))
    assert again.push(done.items(event)), "the record has the whole answer"
    assert again.response() == aggregator.response()
    assert (event.usage.prompt, event.usage.completion) == (17, 0)


def test_the_workers_error_is_the_answers() -> None:
    aggregator = EmbeddingAggregator(request(3))
    finish = Finish("error", None, 0, "context_length_exceeded", "input[0] has 9 tokens")
    assert aggregator.push([TokenItem("r", 1, WHOLE_REQUEST, 0, b"", finish)])
    with pytest.raises(ServingError, match="9 tokens") as failed:
        aggregator.response()
    assert failed.value.code is Code.context_length_exceeded


def of_scores(endpoint: str, *values: float, **options: Any) -> Any:
    """The answer with these scores."""
    embedding = Embedding(1, tuple("abcd"[: len(values)]), prompt=PAIRS, queries=("q",), **options)
    asked = GenerateRequest("r", "m", "g", b"", Stop(1), 5_000_000_000, 9, endpoint=endpoint, embedding=embedding)
    aggregator = EmbeddingAggregator(asked)
    output = pack_tokens([12]) + array("f", values).tobytes()
    assert aggregator.push([TokenItem("r", 1, 0, 0, output, Finish("stop"))])
    return json.loads(aggregator.response())


def test_a_ranking_has_the_best_document_first_and_as_many_as_were_asked_for() -> None:
    body = of_scores(RERANK, 0.25, 0.75, 0.25, 0.5)
    assert [(each["index"], each["relevance_score"]) for each in body["results"]] == [
        (1, 0.75), (3, 0.5), (0, 0.25), (2, 0.25),
    ]  # fmt: skip
    assert all("document" not in each for each in body["results"])
    assert (body["id"], body["model"], body["usage"]) == ("r", "m", {"prompt_tokens": 12, "total_tokens": 12})
    assert body["meta"] == {"billed_units": {"search_units": 1}}
    best = of_scores(RERANK, 0.25, 0.75, top=1, shows_texts=True)["results"]
    assert best == [{"index": 1, "relevance_score": 0.75, "document": {"text": "b"}}]


def test_scores_come_in_the_order_of_their_pairs() -> None:
    body = of_scores(SCORE, 0.25, 0.75)
    assert body["data"] == [
        {"index": 0, "score": 0.25, "object": "score"}, {"index": 1, "score": 0.75, "object": "score"},
    ]  # fmt: skip
    assert (body["object"], body["created"], body["usage"]["total_tokens"]) == ("list", 5, 12)
