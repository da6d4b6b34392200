"""One engine computes the prompt, another goes on: TensorRT-LLM moves the KV, ours carry its state."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.schemas.requests import Sampling
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.trtllm import adapter
from tests.workers.engines.trtllm.conftest import BLOCK, GREEDY, Results, ask, run, until

Make = Callable[..., Any]
PROMPT = [100 + (7 * n) % 300 for n in range(3 * BLOCK + 5)]


def prefilled(engine: Any, key: str = "p", sampling: Sampling = GREEDY, **more: Any) -> tuple[list[int], bytes]:
    """First token and state."""
    generated = more.get("generated", ())
    results = run(engine, ask(key, PROMPT, len(generated) + 1, sampling, pin=True, ignore_eos=True, **more))
    assert results.of(key)[-1].finish == "length"
    (pinned,) = results.pinned
    assert (pinned.blocks, pinned.generations) == ([], [])
    return results.tokens(key), pinned.opaque


def went_on(engine: Any, first: list[int], opaque: bytes, **more: Any) -> Results:
    before = [*more.pop("generated", ()), *first]
    return run(engine, ask("d", PROMPT, 12, generated=before, opaque=opaque, ignore_eos=True, **more))


@pytest.fixture
def whole(make: Make) -> list[int]:
    """The answer of an engine that does everything."""
    return run(make(), ask("a", PROMPT, 12, ignore_eos=True)).tokens("a")


def test_weights_that_are_quantized_as_they_are_loaded_pair_with_their_like_only(make: Make) -> None:
    assert make().info.quantization == ""
    assert make(override_engine_args='{"force_dynamic_quantization": true}').info.quantization == "dynamic"


@pytest.mark.parametrize("repeats", [True, False])
def test_the_answer_is_that_of_one_engine(make: Make, quirks: Any, whole: list[int], repeats: bool) -> None:
    quirks.decode_repeats_first = repeats
    prefill, decode = make(role="prefill"), make(role="decode")
    assert prefill.info.handoff_layout == decode.info.handoff_layout != ""
    assert prefill.info.connector == "trtllm NIXL"
    assert prefill.info.connector_tokens >= prefill.info.max_model_len
    first, opaque = prefilled(prefill)
    results = went_on(decode, first, opaque)
    assert first + results.tokens("d") == whole
    assert results.cached("d") > 0  # it computed nothing of the prompt
    again = run(decode, ask("e", PROMPT, 12, ignore_eos=True, generated=first, opaque=prefilled(prefill, "q")[1]))
    assert first + again.tokens("e") == whole


def test_only_one_choice_takes_the_state_over_and_the_others_compute(make: Make, whole: list[int]) -> None:
    prefill, decode = make(role="prefill"), make(role="decode")
    first, opaque = prefilled(prefill)
    results = run(
        decode,
        *(ask(n, PROMPT, 12, ignore_eos=True, generated=first, opaque=opaque, choice=n) for n in range(3)),
    )
    assert [first + results.tokens(n) for n in range(3)] == [whole] * 3


@pytest.mark.parametrize("damage", ["bytes", "tokens", "layout"])
def test_a_state_that_cannot_be_used_costs_a_prompt_not_a_request(make: Make, whole: list[int], damage: str) -> None:
    prefill, decode = make(role="prefill"), make(role="decode")
    first, opaque = prefilled(prefill)
    if damage == "bytes":
        opaque = opaque[:-9]
    elif damage == "layout":
        opaque = opaque.replace(b"trtllm:", b"other:")
    else:
        first = whole[:3]  # of another attempt, which had more (and ends with the same token)
        assert first[-1] == first[0]
    results = went_on(decode, first, opaque)
    assert first + results.tokens("d") == whole


def test_a_transfer_that_fails_is_reported_as_such(make: Make, tmp_path: Any) -> None:
    prefill, decode = make(role="prefill"), make(role="decode")
    first, opaque = prefilled(prefill)
    for file in tmp_path.iterdir():
        file.unlink()
    results = went_on(decode, first, opaque)
    assert results.failure("d").code in ("transfer_failed", "engine_error")


def test_a_cancel_while_kv_is_fetched_waits_for_that(make: Make, monkeypatch: Any) -> None:
    from tensorrt_llm._standin import hooks

    prefill, decode = make(role="prefill"), make(role="decode")
    first, opaque = prefilled(prefill)
    llm = decode.runtime.llm
    aborted: list[int] = []
    hooks.hold(llm)
    request: SequenceRequest = ask("d", PROMPT, 400, generated=first, opaque=opaque, ignore_eos=True)
    decode.submit(request)
    sequence = decode.active["d"]
    while sequence.call.result is None:
        decode.step()
    monkeypatch.setattr(sequence.call.result, "abort", lambda: aborted.append(1))
    monkeypatch.setattr(adapter, "ABORT_S", 0.1)
    assert decode.cancel("d")
    for _ in range(5):
        decode.step()
    assert aborted == []
    hooks.free(llm)
    until(decode, lambda results: bool(aborted))
    assert aborted == [1]


def test_choices_that_hold_nothing_get_their_first_token_the_ordinary_way(make: Make, whole: list[int]) -> None:
    prefill = make(role="prefill")
    results = run(prefill, ask("h", PROMPT, 1, pin=True), ask("o", PROMPT, 1))
    assert results.tokens("h") == results.tokens("o") == whole[:1]
    assert [each.key for each in results.pinned] == ["h"]
