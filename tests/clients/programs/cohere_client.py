"""The ``cohere`` package: ``Client`` asks /v1/rerank, ``ClientV2`` /v2/rerank."""

import asyncio

import cohere
from harness import KEY, MODEL, RANKER, TEXTS, URL, check, run

client = cohere.Client(KEY, base_url=URL)
client_v2 = cohere.ClientV2(KEY, base_url=URL)
QUERY = TEXTS[0]


def ranked(answer: object, count: int) -> None:
    """``count`` of the three documents, the best first, of which two are equal."""
    scores = [each.relevance_score for each in answer.results]
    assert scores == sorted(scores, reverse=True)
    assert len({each.index for each in answer.results}) == len(scores) == count
    assert answer.meta.billed_units.search_units == 1
    assert answer.id


@check("rerank", "Client.rerank, with texts and objects, top_n and return_documents")
def rerank() -> None:
    whole = client.rerank(model=RANKER, query=QUERY, documents=TEXTS)
    ranked(whole, 3)
    by_index = {each.index: each.relevance_score for each in whole.results}
    assert abs(by_index[0] - by_index[2]) < 1e-5
    assert abs(by_index[0] - by_index[1]) > 1e-5
    objects = [{"text": text} for text in TEXTS]
    best = client.rerank(model=RANKER, query=QUERY, documents=objects, top_n=2, return_documents=True)
    ranked(best, 2)
    assert [each.document.text for each in best.results] == [TEXTS[each.index] for each in best.results]


@check("rerank", "ClientV2.rerank, with max_tokens_per_doc; AsyncClientV2, four at once")
async def rerank_v2() -> None:
    ranked(client_v2.rerank(model=RANKER, query=QUERY, documents=TEXTS, top_n=2, max_tokens_per_doc=4), 2)
    several = cohere.AsyncClientV2(KEY, base_url=URL)
    asked = [several.rerank(model=RANKER, query=QUERY, documents=TEXTS) for _ in range(4)]
    for answer in await asyncio.gather(*asked):
        ranked(answer, 3)


@check("keys", "a wrong key: UnauthorizedError")
def keys() -> None:
    try:
        cohere.ClientV2("pst-wrong", base_url=URL).rerank(model=RANKER, query=QUERY, documents=TEXTS)
    except cohere.UnauthorizedError:
        return
    raise AssertionError("a wrong key was accepted")


@check("errors", "BadRequestError, NotFoundError")
def errors() -> None:
    for model, kind in ((MODEL, cohere.BadRequestError), ("nosuch", cohere.NotFoundError)):
        try:
            client_v2.rerank(model=model, query=QUERY, documents=TEXTS)
        except kind as error:
            assert RANKER in str(error.body), error.body  # noqa: PT017
        else:
            raise AssertionError(f"{model} was not refused")


run("cohere")
