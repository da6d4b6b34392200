"""prompt_logprobs and echo: which bodies ask for what, and what the answers show."""

import json
from itertools import pairwise
from typing import Any

import pytest

from penstock.gateway.apis.chat.aggregator import AnswerAggregator
from penstock.gateway.apis.chat.bodies import MAX_LOGPROBS
from penstock.gateway.apis.chat.prepare_chat import (
    MAX_PROMPT_LOGPROBS,
    PreparedRequest,
    prepare_chat,
    prepare_completion,
)
from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Sampling
from penstock.schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from penstock.schemas.wire import encode, pack_tokens, unpack_tokens

NOW = 1_700_000_000 * 10**9


def chat(context: PrepareContext, **options: Any) -> PreparedRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **options}
    done = prepare_chat(json.dumps(body).encode(), context, now_ns=NOW, request_id="r")
    assert isinstance(done, PreparedRequest)
    return done


def text(context: PrepareContext, prompt: Any = "The broker keeps", **options: Any) -> PreparedRequest:
    return prepare_completion(
        json.dumps({"model": "tiny", "prompt": prompt, **options}).encode(), context, now_ns=NOW, request_id="r"
    )


def sampling(context: PrepareContext, **options: Any) -> Sampling:
    return text(context, **options).request.sampling


def test_a_request_that_does_not_ask_has_no_field_for_it(context: PrepareContext) -> None:
    request = text(context, logprobs=3).request
    assert (request.sampling.prompt_logprobs, request.echo, request.unanswered) == (None, False, False)
    assert b"prompt_logprobs" not in encode(request)


def test_prompt_logprobs_and_echo_with_logprobs_ask_for_the_prompt_s(context: PrepareContext) -> None:
    assert chat(context, prompt_logprobs=0).request.sampling.prompt_logprobs == 0
    assert sampling(context, prompt_logprobs=5).logprobs is None
    assert sampling(context, echo=True).prompt_logprobs is None
    assert sampling(context, echo=True, logprobs=2).prompt_logprobs == 2
    assert sampling(context, echo=True, logprobs=2, prompt_logprobs=7).prompt_logprobs == 7
    assert sampling(context, echo=True, logprobs=4, prompt_logprobs=0).prompt_logprobs == 4
    assert sampling(context, logprobs=4, prompt_logprobs=1).prompt_logprobs == 1


def test_no_tokens_with_echo_computes_one_that_is_not_shown(context: PrepareContext) -> None:
    request = text(context, echo=True, max_tokens=0).request
    assert (request.stop.max_tokens, request.echo, request.unanswered) == (1, True, True)
    assert not text(context, echo=True, max_tokens=1).request.unanswered


@pytest.mark.parametrize(
    ("options", "field", "code", "says"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs", Code.invalid_request, ">= 0"),
        ({"prompt_logprobs": MAX_LOGPROBS + 1}, "prompt_logprobs", Code.invalid_request, f"<= {MAX_LOGPROBS}"),
        ({"prompt_logprobs": True}, "prompt_logprobs", Code.invalid_request, "int"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", Code.unsupported, "stream"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", Code.unsupported, "stream"),
        ({"echo": True, "stream": True, "logprobs": 9, "prompt": [5] * 900}, "logprobs", Code.invalid_request, "8192"),
        ({"max_tokens": 0}, "max_tokens", Code.invalid_request, "at least 1"),
        ({"max_tokens": 0, "echo": False}, "max_tokens", Code.invalid_request, "echo"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", Code.invalid_request, "must not exceed"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", Code.invalid_request, ">= 0"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field(
    context: PrepareContext, options: dict[str, Any], field: str, code: Code, says: str
) -> None:
    with pytest.raises(ServingError) as caught:
        text(context, **options)
    assert (caught.value.param, caught.value.code, caught.value.code.status) == (field, code, 400)
    assert says in caught.value.message


def test_chat_answers_have_at_least_a_token(context: PrepareContext) -> None:
    with pytest.raises(ServingError, match=">= 1"):
        chat(context, max_tokens=0)


@pytest.mark.parametrize("field", ["prompt_logprobs", "logprobs"])
def test_tokens_times_alternatives_have_a_limit(
    context: PrepareContext, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.apis.chat.prepare_chat.MAX_PROMPT_LOGPROBS", 400)
    options = {"echo": True, "max_tokens": 1}
    assert text(context, [5] * 80, **{field: 4}, **options)
    with pytest.raises(ServingError) as caught:
        text(context, [5] * 81, **{field: 4}, **options)
    assert (caught.value.param, caught.value.code) == (field, Code.invalid_request)
    assert "81 tokens" in caught.value.message
    assert "405 values" in caught.value.message
    assert "the limit is 400" in caught.value.message
    assert MAX_PROMPT_LOGPROBS == 131_072


def test_the_limit_counts_what_each_choice_of_a_text_repeats(
    context: PrepareContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.apis.chat.prepare_chat.MAX_PROMPT_LOGPROBS", 400)
    assert text(context, [5] * 50, prompt_logprobs=1, n=4)
    with pytest.raises(ServingError, match=r"408 values.* in each of 4 choices.* fewer choices") as caught:
        text(context, [5] * 51, prompt_logprobs=1, n=4)
    assert caught.value.param == "prompt_logprobs"
    assert chat(context, prompt_logprobs=1, n=100)  # shown once


# -- answers


def value(position: int, token: int, top: int = 2) -> Logprob:
    """The token itself is second."""
    best = tuple((token + 1 - at, -0.5 * (position + at)) for at in range(top))
    return Logprob(-0.5 * (position + 1), best, 2)


def prompt_items(request: GenerateRequest, size: int = 3, top: int = 2) -> list[TokenItem]:
    tokens = unpack_tokens(request.prompt)
    values = [value(at, tokens[at], top) for at in range(1, len(tokens))]
    return [
        TokenItem("r", 1, PROMPT, 1 + at, b"", None, tuple(values[at : at + size]))
        for at in range(0, len(values), size)
    ]


def scored_items(model: ModelDir, words: str, *, choice: int = 0, logprobs: bool = False) -> list[TokenItem]:
    ids = model.tokenizer.encode(words, add_special_tokens=False).ids
    values = tuple(value(100 + at, token) for at, token in enumerate(ids)) if logprobs else None
    return [TokenItem("r", 1, choice, 0, pack_tokens(ids), Finish("length"), values)]


def shown(request: GenerateRequest, model: ModelDir, items: list[TokenItem], **options: Any) -> Any:
    collector = AnswerAggregator(request, model.detokenizer, **options)
    assert collector.push(items)
    return json.loads(collector.response())


def test_each_prompt_token_is_described_and_the_first_is_null(model: ModelDir, context: PrepareContext) -> None:
    request = text(context, prompt_logprobs=2, n=2).request
    tokens = unpack_tokens(request.prompt)
    items = [*prompt_items(request), *scored_items(model, " all", choice=1), *scored_items(model, " none")]
    choices = shown(request, model, items)["choices"]
    assert [choice["text"] for choice in choices] == [" none", " all"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, *others = choices[0]["prompt_logprobs"]
    assert first is None
    assert len(others) == len(tokens) - 1
    for position, (entry, token) in enumerate(zip(others, tokens[1:], strict=True), 1):
        assert list(entry) == [str(token), str(token + 1)]
        assert entry[str(token)] == {
            "logprob": -0.5 * (position + 1),
            "rank": 2,
            "decoded_token": model.detokenizer.raw(token).decode(),
        }
        assert entry[str(token + 1)]["rank"] == 1
        assert entry[str(token + 1)]["logprob"] == -0.5 * position


def test_a_chat_answer_has_them_once(model: ModelDir, context: PrepareContext) -> None:
    request = chat(context, prompt_logprobs=0, n=2).request
    items = [*prompt_items(request, top=0), *scored_items(model, "a"), *scored_items(model, "b", choice=1)]
    body = shown(request, model, items)
    assert all("prompt_logprobs" not in choice for choice in body["choices"])
    tokens = unpack_tokens(request.prompt)
    assert [list(entry) for entry in body["prompt_logprobs"][1:]] == [[str(token)] for token in tokens[1:]]


def test_who_does_not_ask_is_not_shown_any(model: ModelDir, context: PrepareContext) -> None:
    request = text(context).request
    body = shown(request, model, scored_items(model, "a"))
    assert "prompt_logprobs" not in body["choices"][0]
    assert "prompt_logprobs" not in shown(chat(context).request, model, scored_items(model, "a"))


def test_an_impossible_token_has_a_number_and_an_unknown_rank_is_null(model: ModelDir, context: PrepareContext) -> None:
    request = text(context, [5, 6], prompt_logprobs=1).request
    item = TokenItem("r", 1, PROMPT, 1, b"", None, (Logprob(float("-inf"), ((9, -0.1),)),))
    entry = shown(request, model, [item, *scored_items(model, "a")])["choices"][0]["prompt_logprobs"][1]
    assert (entry["6"]["logprob"], entry["6"]["rank"]) == (-9999.0, None)
    assert entry["9"]["rank"] == 1


def test_echo_puts_the_prompt_in_front_with_its_logprobs_and_offsets(model: ModelDir, context: PrepareContext) -> None:
    words = "The broker keeps héé 漢字 and 🙂"
    request = text(context, words, echo=True, logprobs=1).request
    items = [*prompt_items(request), *scored_items(model, " all of it", logprobs=True)]
    choice = shown(request, model, items)["choices"][0]
    assert choice["text"] == words + " all of it"
    logprobs = choice["logprobs"]
    tokens = [*unpack_tokens(request.prompt), *unpack_tokens(items[-1].tokens)]
    assert {len(column) for column in logprobs.values()} == {len(tokens)}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(each is not None for each in logprobs["token_logprobs"][1:])
    assert all(1 <= len(each) <= 2 for each in logprobs["top_logprobs"][1:])  # one alternative and the token itself
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    for (start, end), token in zip(pairwise(offsets), tokens, strict=False):
        piece = choice["text"][start:end]
        raw = model.detokenizer.raw(token).decode("utf-8", "replace")
        assert piece == raw or "\ufffd" in raw or not piece
    assert choice["text"][offsets[len(unpack_tokens(request.prompt))] :] == " all of it"


def test_echo_without_logprobs_is_text_only(model: ModelDir, context: PrepareContext) -> None:
    body = shown(text(context, echo=True).request, model, scored_items(model, " all"))
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == ("The broker keeps all", None)
    assert body["usage"]["completion_tokens"] == len(unpack_tokens(scored_items(model, " all")[0].tokens))


def test_scoring_alone_shows_the_prompt_alone(model: ModelDir, context: PrepareContext) -> None:
    request = text(context, echo=True, logprobs=2, max_tokens=0).request
    stopped = [TokenItem("r", 1, 0, 0, pack_tokens([2]), Finish("stop", 2), (Logprob(-1.0),))]
    for items in (scored_items(model, "a", logprobs=True), stopped):
        assert len(items[0].tokens) == 4
        body = shown(request, model, [*prompt_items(request), *items])
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("The broker keeps", "length")
        assert len(choice["logprobs"]["tokens"]) == len(unpack_tokens(request.prompt))
        assert body["usage"]["completion_tokens"] == 0


def test_an_answer_without_its_prompt_s_values_is_an_error_unless_they_are_forgotten(
    model: ModelDir, context: PrepareContext
) -> None:
    request = text(context, prompt_logprobs=2).request
    items = [*prompt_items(request)[:-1], *scored_items(model, " all")]
    with pytest.raises(ServingError) as caught:
        shown(request, model, items)
    assert caught.value.code is Code.engine_error
    late = shown(request, model, scored_items(model, " all"), late=True)
    assert late["choices"][0]["prompt_logprobs"] is None
    echoed = text(context, echo=True, logprobs=1).request
    logprobs = shown(echoed, model, scored_items(model, " all", logprobs=True), late=True)["choices"][0]["logprobs"]
    own = len(unpack_tokens(scored_items(model, " all")[0].tokens))
    assert logprobs["token_logprobs"][:-own] == [None] * len(unpack_tokens(echoed.prompt))
    assert None not in logprobs["token_logprobs"][-own:]


def test_a_stream_that_is_attached_to_it_shows_the_answer(model: ModelDir, context: PrepareContext) -> None:
    request = text(context, prompt_logprobs=2, echo=True, n=2).request
    renderer = StreamRenderer(request, model.detokenizer)
    data = renderer.push(
        [*prompt_items(request), *scored_items(model, " all"), *scored_items(model, " none", choice=1)]
    )
    assert renderer.done
    bodies = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    texts = ["", ""]
    for choice in (choice for body in bodies for choice in body["choices"]):
        assert "prompt_logprobs" not in choice
        texts[choice["index"]] += choice["text"]
    assert texts == ["The broker keeps all", "The broker keeps none"]  # echoed, as it would be whole
    hidden = text(context, echo=True, max_tokens=0).request
    assert b'"text":"a"' not in StreamRenderer(hidden, model.detokenizer).push(scored_items(model, "a"))
    assert b'"text":"a"' in StreamRenderer(request, model.detokenizer).push(scored_items(model, "a"))


def test_large_answers_are_written_beside_the_streams_of_others(model: ModelDir, context: PrepareContext) -> None:
    assert not AnswerAggregator(text(context).request, model.detokenizer).large
    assert not AnswerAggregator(text(context, prompt_logprobs=2).request, model.detokenizer).large
    assert AnswerAggregator(text(context, [5] * 400, prompt_logprobs=2, max_tokens=5).request, model.detokenizer).large
