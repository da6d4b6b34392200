from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.model import modeldir
from penstock.workers.engines.logits.examples import AllowedTokens, ForcedText, Temperature
from tests.properties import examples
from tests.workers.engines.logits.own import TopK

MODEL = modeldir.load(modeldir.DEMO)
VOCAB = MODEL.vocab_size
EOS = MODEL.eos_token_ids
NEVER = float("-inf")


def forced(text: Any, prompt_len: int = 4, eos: tuple[int, ...] = EOS) -> ForcedText:
    return ForcedText(text, tokenizer=MODEL.tokenizer, prompt_len=prompt_len, eos_token_ids=eos)


@given(st.floats(0.01, 100), st.integers(0, 99))
@examples(40)
def test_temperature_divides(temperature: float, seed: int) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    expected = logits / temperature
    Temperature(temperature)([1], logits)
    assert torch.allclose(logits, expected)


@pytest.mark.parametrize("temperature", [0, -1.0, float("inf"), float("nan"), "1", None])
def test_a_temperature_that_is_none_is_refused(temperature: Any) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Temperature(temperature)


@given(st.text(min_size=1, max_size=30), st.data())
@examples(40)
def test_a_forced_text_comes_out_and_then_the_end_also_from_a_fresh_instance(text: str, data: st.DataObject) -> None:
    prompt = [9, 9, 9, 9]
    ids = list(prompt)
    processor = forced(text)
    while ids[-1] not in EOS:
        if data.draw(st.booleans()):
            processor = forced(text)  # another worker goes on
        logits = torch.randn(VOCAB)
        processor(ids, logits)
        ids.append(int(logits.argmax()))
        assert torch.isfinite(logits).sum() == 1
        assert len(ids) < 200
    assert ids[len(prompt) : -1] == MODEL.tokenizer.encode(text, add_special_tokens=False).ids


def test_after_a_forced_text_a_model_without_an_end_continues_as_it_likes() -> None:
    processor = forced("a", prompt_len=0, eos=())
    logits = torch.zeros(VOCAB)
    processor([1, 2, 3], logits)
    assert torch.equal(logits, torch.zeros(VOCAB))


@pytest.mark.parametrize("text", ["", 5, None])
def test_no_text_cannot_be_forced(text: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        forced(text)


@given(st.lists(st.integers(0, 49), min_size=1, max_size=50), st.booleans())
@examples(40)
def test_only_allowed_tokens_are_left_with_their_logits(tokens: list[int], end: bool) -> None:
    logits = torch.randn(50)
    before = logits.clone()
    processor = AllowedTokens(tokens, end, vocab_size=50, eos_token_ids=(7,))
    for _ in range(2):
        processor([1], logits)
    left = set(torch.isfinite(logits).nonzero().flatten().tolist())
    assert left == set(tokens) | ({7} if end else set())
    assert torch.equal(logits[list(left)], before[list(left)])


@pytest.mark.parametrize("tokens", [[], [50], [-1], [True], ["1"], 5, None, [1.0]])
def test_tokens_that_the_model_does_not_have_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="0 to 49"):
        AllowedTokens(tokens, vocab_size=50, eos_token_ids=())
    with pytest.raises(ValueError, match="end"):
        AllowedTokens([1], "no", vocab_size=50, eos_token_ids=())  # type: ignore[arg-type]


@given(st.integers(1, 50), st.integers(0, 99))
@examples(20)
def test_a_custom_top_k_leaves_k(k: int, seed: int) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    best = set(logits.topk(k).indices.tolist())
    TopK(k)([1], logits)
    assert set((logits != NEVER).nonzero().flatten().tolist()) == best
