"""What is sent to a server, and its answers as tokens."""

from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.openai.protocol import (
    START,
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


def test_what_a_server_refuses_by_name_is_left_out() -> None:
    drawn = asked(8, Sampling(temperature=0.5, top_k=5, min_p=0.1, seed=3))
    tokenizer = model().tokenizer
    assert {"top_k", "min_p"} <= body_of(drawn, [], TEXT, INFO, tokenizer).keys()
    left = body_of(drawn, [], TEXT._replace(refuses=frozenset({"top_k", "repetition_penalty"})), INFO, tokenizer)
    assert "min_p" in left
    assert "top_k" not in left


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


def test_an_answer_that_the_server_gave_up_keeps_what_came() -> None:
    read = reader(asked(), IDS)
    assert [token.token for token in read.take(chunk("abort", token_ids=[30]))] == [30]
    assert (read.aborted, read.finished, read.said) == ("abort", False, [30])


def test_a_salt_goes_to_servers_that_take_one() -> None:
    salted = SequenceRequest("k", [20], SEEDED, Stop(4), salt="team")
    tokenizer = model().tokenizer
    assert body_of(salted, [], IDS._replace(takes_salt=True), INFO, tokenizer)["cache_salt"] == "team"
    assert "cache_salt" not in body_of(salted, [], IDS, INFO, tokenizer)
    assert "cache_salt" not in body_of(asked(), [], IDS._replace(takes_salt=True), INFO, tokenizer)


def test_a_window_doubles_at_first_halves_once_an_overload_and_then_grows_by_one_as_many_begin() -> None:
    window = ConcurrencyWindow(64)
    sizes = [window.size]
    for _ in range(60):
        window.first_token(0.1, 100, window.size, 1.0)
        sizes.append(window.size)
    assert (sizes[0], sizes[4], sizes[12], sizes[60]) == (4, 8, 16, 64), "as many more as began: it doubles"
    for _ in range(5):
        window.overloaded(40, 10.0, 2.0)
    assert (window.size, window.pause_s(11.5), window.pause_s(12.0)) == (20, 0.5, 0.0)
    window.first_token(0.1, 100, 20, 11.0)
    assert window.size == 20, "it was on its way before"
    for _ in range(21):
        window.first_token(0.1, 100, window.size, 20.0)
    assert window.size == 21
    window.first_token(0.1, 100, 5, 20.0)
    assert window.size == 21, "what is not used shows nothing"
    for at in range(20):
        window.overloaded(1, 100.0 + at, 0.5)
    assert window.size == 1


def test_late_first_tokens_shrink_a_window_once_for_all_that_were_on_their_way() -> None:
    window = ConcurrencyWindow(32)
    for at in range(40):
        window.first_token(0.2, 100, window.size, float(at))
    assert window.size == 32
    for _ in range(10):
        window.first_token(3.0, 100, 32, 50.0)
    assert window.size == 25
    window.first_token(3.0, 5000, 25, 60.0)
    assert window.size == 25, "of such long prompts nothing is known"


@given(st.integers(1, 40), st.integers(1, 64), st.booleans(), st.integers(0, 2**32))
@examples(60)
def test_a_window_finds_what_a_server_takes_and_is_never_beyond_its_bounds(
    takes: int, most: int, refuses: bool, seed: int
) -> None:
    """A server computes ``takes`` at a time, a second each. Others it refuses, or they wait in its own queue."""
    draw, window, now, ends, sizes = Random(seed), ConcurrencyWindow(most), 0.0, list[float](), list[int]()
    firsts: list[tuple[float, float]] = []  # when, and when it was asked for
    for _ in range(600):
        now += 0.05
        for first in sorted(each for each in firsts if each[0] <= now):
            firsts.remove(first)
            window.first_token(first[0] - first[1], 100, len(ends), now)
        ends = [end for end in ends if end > now]
        while len(ends) < window.size and not window.pause_s(now):
            if refuses and len(ends) >= takes:
                window.overloaded(len(ends), now, 0.5)
                break
            begins = sorted(ends)[-takes] if len(ends) >= takes else now
            ends.append(begins + draw.uniform(0.9, 1.1))
            firsts.append((begins + 0.05, now))
        assert 1 <= window.size <= most
        sizes.append(window.size)
    later = sorted(sizes[300:])
    assert later[len(later) // 2] >= min(takes, most) // 2
    assert later[len(later) // 2] <= max(2 * START, 4 * takes)
