"""Text of exactly so many tokens, for the tokenizers of real models."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.infra.model.modeldir import DEMO, TINY, load_tokenizer
from penstock.measure.sweep.workload import NoShortWord, TokenText

TEXTS = {path.name: TokenText(load_tokenizer(path)) for path in (DEMO, TINY)}


@given(st.sampled_from(sorted(TEXTS)), st.integers(0, 700), st.integers(0, 300), st.integers(0, 5))
def test_a_text_has_exactly_so_many_tokens_also_behind_a_prefix(name: str, tokens: int, more: int, seed: int) -> None:
    texts = TEXTS[name]
    prefix = texts.text(Random(seed), tokens)
    assert texts.count(prefix) == tokens
    whole = texts.after(prefix, Random(seed), tokens, tokens + more)
    assert whole.startswith(prefix)
    assert texts.count(whole) == tokens + more


def test_where_tokens_do_not_add_up_a_text_is_corrected() -> None:
    texts = TEXTS["tiny"]
    rng = Random(1)
    for wrong in ("", " time year", " time" * 60):
        assert texts.count(texts.corrected(" people way", wrong, 40, rng)) == 40


def test_a_tokenizer_without_short_words_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE({each: at for at, each in enumerate(" abcdefghijklmnopqrstuvwxyz0123456789")}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    with pytest.raises(NoShortWord, match="cannot be made to length"):
        TokenText(tokenizer)
