"""Requests, answers and handoffs as data."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.errors import Code
from penstock.schemas.requests import LogitsProcessor, Sampling, Stop
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.engine_protocol import EngineInfo, MediaSpan, RequestError, SequenceRequest
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.sampling import seed_of
from penstock.workers.engines.external.sequences import MISSING, SequenceFailure, Token
from penstock.workers.engines.vllm import engine_inputs as handoff
from penstock.workers.engines.vllm.adapter import Diverged, VllmOutputCursor
from penstock.workers.engines.vllm.engine_inputs import VllmOptions, check, prepare, sampling_arguments

INFO = EngineInfo("vllm", 16, 20, 4, 512, 100, (2, 3), True, handoff_layout="l")
OPTIONS = VllmOptions(b"r" * 16, "l")
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "1", "remote_block_ids": [[1, 2]]}


def given_of(sampling: Sampling, stop: Stop | None = None, **more: Any) -> dict[str, Any]:
    return sampling_arguments(sampling, stop or Stop(8), eos=(2, 3), max_tokens=8, **more)


# -- sampling


def test_a_greedy_request_asks_for_no_more_than_it_needs() -> None:
    found = given_of(Sampling(temperature=0.0, top_p=0.5, top_k=7), Stop(8, ignore_eos=True))
    assert found == {
        "n": 1,
        "max_tokens": 8,
        "detokenize": False,
        "ignore_eos": True,
        "stop_token_ids": [],
        "seed": 0,
        "temperature": 0.0,
    }
    for narrow in (Sampling(top_k=1), Sampling(top_p=0.0)):
        assert given_of(narrow)["temperature"] == 0.0


def test_every_option_reaches_the_engine() -> None:
    found = given_of(
        Sampling(0.7, 0.9, 11, 0.1, 5, 0.2, 0.3, 1.1, {4: 2.0}, 3), Stop(8, 2, (9,)), min_tokens=2, choice=1
    )
    assert found == {
        "n": 1,
        "max_tokens": 8,
        "min_tokens": 2,
        "detokenize": False,
        "ignore_eos": True,
        "stop_token_ids": [2, 3, 9],
        "seed": seed_of(5, 1, 0),
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {4: 2.0},
        "logprobs": 3,
    }


def test_min_tokens_are_never_more_than_the_engine_takes() -> None:
    assert sampling_arguments(Sampling(), Stop(9, 9), eos=(2,), max_tokens=1, min_tokens=9)["min_tokens"] == 1
    assert "min_tokens" not in sampling_arguments(Sampling(), Stop(9, 2), eos=(2,), max_tokens=1, min_tokens=-3)


def test_penalties_count_what_was_generated_before() -> None:
    found = given_of(Sampling(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 1.0}), earlier=[7, 8, 7])
    assert found["logit_bias"] == {7: pytest.approx(1.0 - 0.5 - 0.5), 8: pytest.approx(-0.75)}
    assert "logit_bias" not in given_of(Sampling(), earlier=[7])


@given(st.integers(0, 2**63 - 1))
def test_seeds_fit_and_differ_by_choice_and_position(seed: int) -> None:
    found = {seed_of(seed, choice, position) for choice in range(3) for position in range(3)}
    assert len(found) == 9
    assert all(0 <= each < 1 << 63 for each in found)


# -- answers


@given(st.lists(st.integers(4, 99), min_size=1, max_size=20), st.data())
def test_however_pieces_are_cut_tokens_come_once(tokens: list[int], data: st.DataObject) -> None:
    known = data.draw(st.integers(0, len(tokens) - 1))
    finish = data.draw(st.sampled_from(["length", "stop"]))
    answer, results, at = VllmOutputCursor(known=tokens[:known]), list[Token](), 0
    while at < len(tokens):
        end = data.draw(st.integers(at + 1, len(tokens)))
        last = end == len(tokens)
        reason = tokens[-1] if last and finish == "stop" else None
        new, failure = answer.take(tokens[at:end], None, finish if last else None, reason)
        assert failure is None
        results += new
        at = end
    assert [token.token for token in results] == tokens[known:]
    assert [token.finish for token in results[:-1]] == [""] * (len(results) - 1)
    assert results[-1].finish == finish
    assert results[-1].stop_token == (tokens[-1] if finish == "stop" else None)
    assert answer.take([5], None, "length") == ([], None)


@pytest.mark.parametrize("piece", [([6],), ([5, 6],), ([5], None, "length")])
def test_another_token_than_the_streamed_one_cannot_be_continued(piece: Any) -> None:
    with pytest.raises(Diverged):
        VllmOutputCursor(known=[5, 7]).take(*piece)


@pytest.mark.parametrize(
    ("finish", "adopted", "code"),
    [
        ("abort", False, Code.cancelled),
        ("error", False, Code.engine_error),
        ("error", True, Code.transfer_failed),
        ("stop", False, Code.engine_error),
    ],
)
def test_ends_without_a_token_are_failures(finish: str, adopted: bool, code: Code) -> None:
    new, failure = VllmOutputCursor(adopted=adopted).take([], None, finish)
    assert new == []
    assert isinstance(failure, SequenceFailure)
    assert failure.code == code


def test_tokens_before_a_failure_are_returned() -> None:
    new, failure = VllmOutputCursor().take([4], None, "error")
    assert (new, failure is not None) == ([Token(4)], True)


def test_logprobs_are_of_the_drawn_token_and_the_best() -> None:
    entry = {9: SimpleNamespace(logprob=-3.0), 4: SimpleNamespace(logprob=-0.5), 5: SimpleNamespace(logprob=-1.0)}
    (token,), _ = VllmOutputCursor(top=2).take([9], [entry])
    assert token.logprob == Logprob(-3.0, ((4, -0.5), (5, -1.0)))
    assert VllmOutputCursor(top=0).take([9], [entry])[0][0].logprob == Logprob(-3.0)
    assert VllmOutputCursor(top=1).take([9], None)[0][0].logprob == Logprob(MISSING)
    assert VllmOutputCursor().take([9], [entry])[0][0].logprob is None
    (token,), _ = VllmOutputCursor(known=[8], top=0).take([8, 9], [{8: SimpleNamespace(logprob=-9.0)}, entry])
    assert token.logprob == Logprob(-3.0)


# -- handoff


def test_a_state_is_read_by_an_engine_of_the_same_kind_with_the_same_tokens() -> None:
    state = handoff.pack(PARAMS | {"remote_prefill_cached_tokens": 3}, "l", [5, 6], 7)
    assert handoff.unpack(state, "l", [5, 6, 7]) == PARAMS
    for layout, tokens in (("m", [5, 6, 7]), ("l", [5, 6, 8]), ("l", [5, 7]), ("l", []), ("l", [5, 6, 7, 8])):
        with pytest.raises(ValueError):
            handoff.unpack(state, layout, tokens)


@given(st.binary(max_size=40))
def test_damaged_states_are_refused(junk: bytes) -> None:
    with pytest.raises(ValueError):
        handoff.unpack(junk, "l", [5, 6, 7])
    with pytest.raises(ValueError, match="offers no KV"):
        handoff.unpack(handoff.pack({}, "l", [5], 7), "l", [5, 7])


def ask(**changes: Any) -> SequenceRequest:
    return SequenceRequest(**{"key": 0, "prompt": [5] * 20, "sampling": Sampling(), "stop": Stop(8)} | changes)


def test_a_prefill_worker_computes_one_token_and_keeps_the_kv() -> None:
    found = prepare(ask(pin=True, generated=[6]), INFO, OPTIONS, ConsumedStates())
    assert found.prompt == {"prompt_token_ids": [5] * 20 + [6]}
    assert found.sampling["max_tokens"] == 1
    assert found.sampling["extra_args"]["kv_transfer_params"]["do_remote_decode"]
    assert found.computed == (5,) * 20 + (6,)


def test_a_decode_worker_fetches_what_the_other_computed_once() -> None:
    used = ConsumedStates()
    state = handoff.pack(PARAMS, "l", [5] * 20, 6)
    request = ask(generated=[6], opaque=state, root=b"t" * 16)
    found = prepare(request, INFO, OPTIONS, used)
    assert found.prompt == {"prompt_token_ids": [5] * 20, "cache_salt": (b"t" * 16).hex()}
    assert (found.known, found.adopted, found.sampling["max_tokens"]) == ((6,), True, 8)
    assert found.sampling["extra_args"] == {"kv_transfer_params": PARAMS}
    again = prepare(request, INFO, OPTIONS, used)
    assert (again.known, again.adopted, again.sampling["max_tokens"]) == ((), False, 7)
    assert again.prompt["prompt_token_ids"] == [5] * 20 + [6]
    for useless in (ask(generated=[6], opaque=b"junk"), ask(opaque=state)):
        assert not prepare(useless, INFO, OPTIONS, ConsumedStates()).adopted
    assert not prepare(request, INFO, VllmOptions(b"r" * 16), ConsumedStates()).adopted


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"media": [MediaSpan(0, 1, b"")]}, Code.unsupported),
        ({"sampling": Sampling(logits_processors=(LogitsProcessor("x"),))}, Code.unsupported),
        ({"sampling": Sampling(logit_bias={100: 1.0})}, Code.invalid_request),
        ({"sampling": Sampling(logprobs=21)}, Code.invalid_request),
        ({"prompt": [5] * 512}, Code.context_length_exceeded),
        ({"prompt": [100]}, Code.invalid_request),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], code: Code) -> None:
    with pytest.raises(RequestError) as caught:
        check(ask(**changes), INFO, OPTIONS)
    assert caught.value.code == code
    with pytest.raises(RequestError, match="--role prefill"):
        check(ask(pin=True), INFO, VllmOptions(b"r" * 16))


@pytest.mark.parametrize(("ranks", "rank", "given"), [(1, 0, None), (4, 0, 0), (4, 3, 3)])
def test_the_rank_reaches_the_engine_where_there_are_several(ranks: int, rank: int, given: int | None) -> None:
    info = msgspec.structs.replace(INFO, dp_size=ranks, total_blocks=20 * ranks)
    request = SequenceRequest("k", [1, 2], Sampling(), Stop(4), rank=rank)
    check(request, info, OPTIONS)
    assert prepare(request, info, OPTIONS, ConsumedStates()).rank == given
