"""From a body to a request for embed workers: what is taken, what is refused, and the limit that the error names."""

import json
from typing import Any

import pytest

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.embeddings import MAX_FLOATS, MAX_INPUTS, MAX_TOKENS, prepare_embedding
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Embedder
from penstock.schemas.requests import (
    EMBEDDING,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    PAIRS,
    RERANK,
    SCORE,
    Embedding,
    decode,
)
from penstock.schemas.wire import encode, unpack_tokens

MODELS = {
    "small": Embedder(64, max_tokens=8, vocab_size=100, pooling="mean"),
    "nested": Embedder(768, max_tokens=512, vocab_size=100, matryoshka=(256, 128)),
    "prompted": Embedder(
        64, max_tokens=8, vocab_size=100, prompts=("query", "document", "Clustering", "passage"), default_dimensions=16
    ),
    "wide": Embedder(8192, max_tokens=512, vocab_size=100),
}
RANKER = Embedder(1, max_tokens=64, vocab_size=100, scores=True)


def asked(endpoint: str, model: str = "ranker", **body: Any) -> PreparedRequest:
    data = json.dumps({"model": model} | body).encode()
    return prepare_embedding(
        data,
        MODELS | {"ranker": RANKER},
        endpoint=endpoint,
        gateway="g",
        default_deadline_s=60,
        now_ns=1_000,
        request_id="r",
        others={"talker": "/v1/chat/completions"},
    )


def prepared(model: str = "small", **body: Any) -> PreparedRequest:
    return asked(EMBEDDING, model, **body)


@pytest.mark.parametrize(
    ("given", "texts", "lengths", "tokens"),
    [
        ("one", ("one",), (), []),
        (["one", "two"], ("one", "two"), (), []),
        ([1, 2, 3], (), (3,), [1, 2, 3]),
        ([[1, 2, 3], [0]], (), (3, 1), [1, 2, 3, 0]),
        ([0], (), (1,), [0]),
    ],
)
def test_inputs_come_in_four_forms(given: Any, texts: Any, lengths: Any, tokens: list[int]) -> None:
    request = prepared(input=given).request
    assert request.embedding is not None
    assert (request.embedding.texts, request.embedding.lengths) == (texts, lengths)
    assert unpack_tokens(request.prompt).tolist() == tokens
    assert (request.endpoint, request.output, request.n) == (EMBEDDING, EMBEDDING, 1)


def test_options_are_resolved_to_what_any_worker_does_the_same() -> None:
    given = prepared("nested", input="x", dimensions=128, encoding_format="base64", truncate_prompt_tokens=-1)
    found = given.request.embedding
    assert found is not None
    assert (found.dimensions, found.base64, found.truncate) == (128, True, 512)
    plain = prepared("nested", input="x").request.embedding
    assert plain is not None
    assert (plain.dimensions, plain.base64, plain.truncate) == (768, False, 0)
    cut = prepared(input=[[1, 2, 3, 4], [5]], truncate_prompt_tokens=3).request
    assert unpack_tokens(cut.prompt).tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"input": ""}, "input", r"input\[0\] is empty"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", ""]}, "input", r"input\[1\] is empty"),
        ({"input": [[1], []]}, "input", r"input\[1\] is empty"),
        ({"input": ["a", [1]]}, "input", "mixes kinds"),
        ({"input": [1, "a"]}, "input", "then every entry must be one"),
        ({"input": ["a", 1]}, "input", "mixes kinds"),
        ({"input": [-1]}, "input[0]", ">= 0"),
        ({"input": {"text": "a"}}, "input", "got `object`"),
        ({"input": None}, "input", "got `null`"),
        ({}, "input", "missing required field"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"the limit is {MAX_INPUTS}"),
        ({"input": [[1] * 300] * 1001}, "input", f"the limit is {MAX_TOKENS}"),
        ({"input": [1] * 9}, "input", "input.0. has 9 tokens; this model takes 8"),
        ({"input": [[1], [7, 100]]}, "input", "input.1. has the token id 100; this model's are below 100"),
        ({"input": "a", "dimensions": 65}, "dimensions", "vectors have 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "model": "nested", "dimensions": 200}, "dimensions", "trained for 128, 256"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "Invalid enum"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "use 1 or more"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
        ({"input": "a", "stream": True}, "stream", "not streamed"),
        ({"input": ["a"] * 513, "model": "wide"}, "input", f"the limit is {MAX_FLOATS}"),
    ],
)
def test_what_cannot_be_embedded_is_refused_with_the_field_and_the_limit(
    body: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(ServingError, match=says) as refused:
        prepared(**body)
    assert refused.value.param == field
    assert refused.value.code.status == 400


@pytest.mark.parametrize(
    ("endpoint", "body", "texts", "cut", "dimensions"),
    [
        (OLLAMA_EMBED, {"input": "a"}, ("a",), 512, 768),
        (OLLAMA_EMBED, {"input": ["a", "b"], "truncate": False, "dimensions": 128}, ("a", "b"), 0, 128),
        (OLLAMA_EMBED, {"input": ["a"], "truncate": True, "dimensions": 0, "keep_alive": -1}, ("a",), 512, 768),
        (OLLAMA_EMBEDDINGS, {"prompt": "a", "options": {"num_ctx": 64}}, ("a",), 512, 768),
    ],
)
def test_ollamas_clients_get_vectors_of_texts_which_are_cut_unless_they_refuse(
    endpoint: str, body: dict[str, Any], texts: tuple[str, ...], cut: int, dimensions: int
) -> None:
    for model in ("nested", "nested:latest"):
        request = asked(endpoint, model, **body).request
        assert request.embedding is not None
        found = request.embedding
        assert (found.texts, found.truncate, found.dimensions) == (texts, cut, dimensions)
        assert (request.model, request.endpoint, request.output) == ("nested", endpoint, EMBEDDING)


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        (OLLAMA_EMBED, {"input": []}, "input"),
        (OLLAMA_EMBED, {"input": ["a", ""]}, "input"),
        (OLLAMA_EMBED, {"input": [[1]]}, "input[0]"),
        (OLLAMA_EMBED, {"input": "a", "stream": True}, "stream"),
        (OLLAMA_EMBED, {"input": "a", "dimensions": 769}, "dimensions"),
        (OLLAMA_EMBEDDINGS, {"prompt": ""}, "prompt"),
        (OLLAMA_EMBEDDINGS, {"input": "a"}, "prompt"),
        (OLLAMA_EMBEDDINGS, {"prompt": "a", "model": "talker"}, "model"),
    ],
)
def test_what_ollamas_clients_cannot_have_is_refused_with_their_name_of_the_field(
    endpoint: str, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(ServingError) as refused:
        asked(endpoint, **{"model": "nested"} | body)
    assert refused.value.param == field


def test_a_model_that_generates_is_distinguished_from_one_that_is_not_served() -> None:
    with pytest.raises(
        ServingError, match=r"'talker' makes embeddings; it serves /v1/chat.*'small'.*--role embed"
    ) as generates:
        prepared("talker", input="a")
    with pytest.raises(ServingError, match=r"no model 'other' makes embeddings") as unknown:
        prepared("other", input="a")
    assert (generates.value.code, unknown.value.code) == (Code.unsupported, Code.model_not_found)


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}])
def test_a_model_that_is_not_named_is_the_only_one_that_there_is(given: dict[str, object]) -> None:
    def prepare(models: dict[str, Embedder]) -> str:
        data = json.dumps({"input": "a"} | given).encode()
        made = prepare_embedding(data, models, gateway="g", default_deadline_s=60, now_ns=1_000, request_id="r")
        return made.request.model

    one = MODELS["small"]
    assert prepare({"small": one}) == prepare({"small": one, "alias": one}) == "small"
    for models in (MODELS, {}):
        with pytest.raises(ServingError) as caught:
            prepare(models)
        assert caught.value.code is Code.model_not_found


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        (None, ""),
        ("query", "query"),
        ("search_query", "query"),
        ("document", "document"),
        ("search_document", "document"),
        ("passage", "passage"),
        ("clustering", "Clustering"),
    ],
)
def test_the_kind_of_texts_chooses_the_models_prompt(kind: str | None, prompt: str) -> None:
    embedding = prepared("prompted", input="one", input_type=kind).request.embedding
    assert embedding is not None
    assert (embedding.prompt, embedding.dimensions) == (prompt, 16)


def test_a_model_without_prompts_takes_queries_and_documents_as_they_are() -> None:
    for kind in ("query", "search_document"):
        embedding = prepared("small", input="one", input_type=kind).request.embedding
        assert embedding is not None
        assert embedding.prompt == ""


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "one", "input_type": "poem"}, "input_type", "knows query, document, Clustering, passage"),
        ({"input": [1, 2], "input_type": "query"}, "input_type", "token ids are taken as they are"),
        ({"input": "one", "truncate_dim": 8, "dimensions": 9}, "truncate_dim", "mean the same"),
        ({"input": "one", "truncate_dim": 65}, "truncate_dim", "truncate_dim is 65; this model's vectors have 64"),
    ],
)
def test_kinds_and_lengths_that_do_not_fit_are_named(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ServingError) as refused:
        prepared("prompted", **body)
    assert refused.value.param == param
    assert words in refused.value.message
    embedding = prepared("prompted", input="one", truncate_dim=8).request.embedding
    assert embedding is not None
    assert embedding.dimensions == 8


def test_a_ranking_pairs_the_query_with_each_document_and_cuts_what_is_too_long() -> None:
    request = asked(RERANK, query="q", documents=["a", {"text": "b"}, ""]).request
    found = request.embedding
    assert found == Embedding(1, ("a", "b", ""), prompt=PAIRS, queries=("q",), truncate=64)
    assert (request.endpoint, request.output, request.prompt) == (RERANK, SCORE, b"")
    options = {"top_n": 2, "return_documents": True, "max_tokens_per_doc": 9}
    found = asked(RERANK, query="q", documents=["a"], truncate_prompt_tokens=32, **options).request.embedding
    assert found is not None
    assert (found.truncate, found.top, found.shows_texts, found.document_tokens) == (32, 2, True, 9)
    unlimited: dict[str, Any] = {"top_n": 1 << 70, "max_tokens_per_doc": 1 << 70, "truncate_prompt_tokens": 1 << 70}
    found = decode(encode(asked(RERANK, query="q", documents=["a"], **unlimited).request)).embedding
    assert found is not None
    assert (found.truncate, found.top, found.document_tokens) == (64, MAX_INPUTS, 64), "more than a message can hold"
    for name in ("truncate", "truncation"):
        found = asked(RERANK, query="q", documents=["a"], **{name: False}).request.embedding
        assert found is not None
        assert found.truncate == 0, "what is too long is refused"


@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("queries", "documents")])
def test_scores_are_of_one_text_with_each_of_several_or_of_two_lists(first: str, second: str) -> None:
    def pairs(one: Any, other: Any) -> Any:
        found = asked(SCORE, **{first: one, second: other}).request.embedding
        assert found is not None
        return found.queries, found.texts, found.truncate

    assert pairs("q", "a") == (("q",), ("a",), 0)
    assert pairs("q", ["a", "b"]) == pairs(["q"], ["a", "b"]) == (("q",), ("a", "b"), 0)
    assert pairs(["q", "p"], ["a", "b"]) == (("q", "p"), ("a", "b"), 0)
    with pytest.raises(ServingError, match=f"{first} has 2 texts and {second} 3; give one and any number") as refused:
        pairs(["q", "p"], ["a", "b", "c"])
    assert refused.value.param == first


@pytest.mark.parametrize(
    ("endpoint", "body", "field", "says"),
    [
        (RERANK, {"query": "q"}, "documents", "missing required field"),
        (RERANK, {"query": "q", "documents": []}, "documents", "documents is empty"),
        (RERANK, {"query": "", "documents": ["a"]}, "query", "query is empty"),
        (RERANK, {"query": "q", "documents": [{"title": "a"}]}, "documents[0]", "missing required field `text`"),
        (RERANK, {"query": "q", "documents": ["a"] * (MAX_INPUTS + 1)}, "documents", f"the limit is {MAX_INPUTS}"),
        (RERANK, {"query": "q" * 65_536, "documents": ["a"] * 257}, "documents", "the limit is 16777216: send sev"),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n", ">= 1"),
        (RERANK, {"query": "q", "documents": ["a"], "stream": True}, "stream", "not streamed"),
        (RERANK, {"query": "q", "documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "use 1"),
        (RERANK, {"query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", ">= 1"),
        (SCORE, {"text_1": "q"}, "text_2", "give either text_2 or documents"),
        (SCORE, {"text_1": "q", "queries": "q", "text_2": "a"}, "text_1", "give either text_1 or queries"),
        (SCORE, {"text_1": ["q", ""], "text_2": ["a", "b"]}, "text_1", "has an empty text"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_field_and_the_limit(
    endpoint: str, body: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(ServingError, match=says) as refused:
        asked(endpoint, **body)
    assert (refused.value.param, refused.value.code.status) == (field, 400)


@pytest.mark.parametrize(
    ("endpoint", "model", "says"),
    [
        (RERANK, "small", "'small' scores pairs of texts; it serves /v1/embeddings. Models that do: 'ranker'"),
        (SCORE, "talker", "'talker' scores pairs of texts; it serves /v1/chat/completions. Models that do: 'ranker'"),
        (EMBEDDING, "ranker", "'ranker' makes embeddings; it serves /v1/rerank or /v1/score. Models that do: 'small'"),
    ],
)
def test_a_model_of_another_kind_is_refused_with_the_endpoints_that_it_serves(
    endpoint: str, model: str, says: str
) -> None:
    body = {"input": "a", "query": "q", "documents": ["a"], "text_1": "q", "text_2": "a"}
    fields = {EMBEDDING: ("input",), RERANK: ("query", "documents"), SCORE: ("text_1", "text_2")}[endpoint]
    with pytest.raises(ServingError, match=says) as refused:
        asked(endpoint, model, **{name: body[name] for name in fields})
    assert (refused.value.code, refused.value.code.status) == (Code.unsupported, 400)


def test_the_only_model_that_scores_needs_no_name_beside_models_of_vectors() -> None:
    assert asked(RERANK, "", query="q", documents=["a"]).request.model == "ranker"
