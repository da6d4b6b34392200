"""What is sent to a server, and its answers as tokens."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.openai.protocol import (
    BadAnswer,
    CompletionReader,
    ConcurrencyWindow,
    ServerAbilities,
    body_of,
    check,
    text_of,
    tokens_of,
)
from tests.properties import examples

INFO = EngineInfo("openai", 16, 64, 4, 512, 4096, (2,), kv_events=False)
IDS, TEXT = ServerAbilities("m", takes_ids=True, sends_ids=True), ServerAbilities("m", takes_ids=False, sends_ids=False)


@cache
def model() -> ModelDir:
    return modeldir.load(modeldir.TINY)


SEEDED = Sampling(seed=5)


def asked(max_tokens: int = 8, sampling: Sampling = SEEDED, **stop: Any) -> SequenceRequest:
    return SequenceRequest("k", [20, 21, 22], sampling, Stop(max_tokens, **stop))


def chunk(finish: str | None = None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish, **choice}]}


def reader(request: SequenceRequest, abilities: ServerAbilities, said: tuple[int, ...] = ()) -> CompletionReader:
    return CompletionReader(request, said, abilities, INFO, model().tokenizer)


@given(st.lists(st.text(max_size=12), max_size=8), st.lists(st.integers(20, 900), min_size=1, max_size=4))
@examples(60)
def test_pieces_of_text_become_tokens_that_write_the_same_text(pieces: list[str], prompt: list[int]) -> None:
    tokenizer, tokens = model().tokenizer, list(prompt)
    for piece in pieces:
        tokens += tokens_of(tokenizer, tokens, piece) if piece else []
    before = tokenizer.decode(prompt, skip_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == before + "".join(pieces)


def test_a_text_that_no_tokens_write_is_an_error() -> None:
    class Deaf:
        def encode(self, text: str, **_: Any) -> Any:
            return type("Encoding", (), {"ids": [7] * len(text)})

        def decode(self, ids: list[int], **_: Any) -> str:
            return "?" * len(ids)

    with pytest.raises(BadAnswer, match="does not write 'hello'"):
        tokens_of(Deaf(), [], "hello")  # type: ignore[arg-type]


def test_ids_are_taken_as_they_come_and_the_count_ends_an_answer() -> None:
    read = reader(asked(4), IDS, (30,))
    assert [token.token for token in read.take(chunk(token_ids=[31, 32]))] == [31, 32]
    (last,) = read.take(chunk(token_ids=[33, 34]))
    assert (last.token, last.finish, read.finished, read.said) == (33, "length", True, [30, 31, 32, 33])
    assert read.take(chunk("length", token_ids=[])) == []


@pytest.mark.parametrize(("finish", "stop_token"), [("stop", 2), ("length", None)])
def test_an_end_without_a_token_gets_the_end_token(finish: str, stop_token: int | None) -> None:
    """The server keeps it to itself, or counts tokens in another way."""
    read = reader(asked(), TEXT)
    assert read.take({"choices": []}) == []
    text = "".join(model().tokenizer.decode([token.token]) for token in read.take(chunk(text=" hello wor")))
    assert text == " hello wor"
    (last,) = read.take(chunk(finish, text=""))
    assert (last.token, last.finish, last.stop_token) == (2, finish, stop_token)


def test_a_last_piece_at_the_server_s_limit_ends_with_its_own_tokens() -> None:
    """Usage counts what was said, and no token of the end beside it."""
    new = reader(asked(50), TEXT).take(chunk("length", text=" hello wor"))
    assert model().tokenizer.decode([each.token for each in new], skip_special_tokens=False) == " hello wor"
    assert [each.finish for each in new] == [*[""] * (len(new) - 1), "length"]


def test_a_stop_token_ends_an_answer_unless_it_comes_too_early() -> None:
    read = reader(asked(8, token_ids=(40,), min_tokens=2), IDS)
    assert [token.finish for token in read.take(chunk(token_ids=[40, 41, 40]))] == ["", "", "stop"]


def test_another_end_is_an_error() -> None:
    with pytest.raises(BadAnswer, match="'content_filter'"):
        reader(asked(), TEXT).take(chunk("content_filter", text=""))


def test_a_body_continues_behind_what_was_said_and_names_only_what_is_asked() -> None:
    body = body_of(asked(8), [30, 31], IDS, INFO, model().tokenizer)
    assert (body["prompt"], body["max_tokens"], body["return_token_ids"]) == ([20, 21, 22, 30, 31], 6, True)
    assert body["seed"] != body_of(asked(8), [], IDS, INFO, model().tokenizer)["seed"], "no stream of draws repeats"
    plain = body_of(asked(8), [], TEXT, INFO, model().tokenizer)
    assert plain.keys() == {"model", "prompt", "max_tokens", "stream", "seed", "temperature", "top_p"}
    assert plain["prompt"] == text_of(model().tokenizer, [20, 21, 22])
    more = body_of(
        asked(8, Sampling(temperature=0.0, logprobs=2), ignore_eos=True, min_tokens=3), [], IDS, INFO, model().tokenizer
    )
    assert (more["temperature"], more["ignore_eos"], more["min_tokens"], more["logprobs"]) == (0.0, True, 3, 2)


def test_log_probabilities_need_ids() -> None:
    check(asked(sampling=Sampling(logprobs=1)), INFO, IDS)
    with pytest.raises(RequestError, match="sends no token ids"):
        check(asked(sampling=Sampling(logprobs=1)), INFO, TEXT)
    with pytest.raises(RequestError, match="no log-probabilities of prompts"):
        check(asked(sampling=Sampling(prompt_logprobs=0)), INFO, IDS)
    read = reader(asked(sampling=Sampling(logprobs=2)), IDS)
    found = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:9": -0.5, "token_id:8": -1.0}]}
    (token,) = read.take(chunk(token_ids=[9], logprobs=found))
    assert token.logprob is not None
    assert (token.logprob.logprob, token.logprob.top) == (-0.5, ((9, -0.5), (8, -1.0)))


def test_a_window_halves_once_an_overload_and_grows_by_one_as_many_end() -> None:
    window = ConcurrencyWindow(64)
    for _ in range(5):
        window.overloaded(40, 10.0, 2.0)
    assert window.size == 20
    window.overloaded(20, 12.0, 1.0)
    assert window.size == 10
    for _ in range(11):
        window.ended()
    assert window.size == 11
    for _ in range(5000):
        window.ended()
    assert window.size == 64
    for at in range(20):
        window.overloaded(1, 100.0 + at, 0.5)
    assert window.size == 1
