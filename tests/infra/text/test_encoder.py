import json
from array import array
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.infra.model import modeldir
from penstock.infra.text import encoder as text_encoder
from penstock.infra.text.encoder import TextEncoder, ascii_pattern

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
POSSESSIVE = r"\p{L}+|\p{N}{1,3}+|[^\p{L}\p{N}]"  # Oniguruma repeats the three digits, Python matches them possessively
INCOMPLETE = r"\p{L}+"
LINES = r"(?m).+|\n"  # Oniguruma's "." matches line breaks, too, and Python's never
END = r"\w+\Z|.|\n"  # Oniguruma's end may be before a line break
DEEPSEEK = (  # three splits, one after the other
    "\\p{N}{1,3}\n[一-龥぀-ゟ゠-ヿ]+\n"
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NESTED = r"\p{L}+|[[:digit:]]+|[^\p{L}]"


@cache
def tokenizer(pattern: str) -> Tokenizer:
    """The tiny model's, with other patterns, a line for each; "": GPT-2's, which is part of its byte-level step."""
    described = json.loads((modeldir.TINY / "tokenizer.json").read_text())
    split, byte_level = described["pre_tokenizer"]["pretokenizers"]
    if pattern:
        splits = [split | {"pattern": {"Regex": each}} for each in pattern.split("\n")]
        described["pre_tokenizer"]["pretokenizers"] = [*splits, byte_level]
    else:
        described["pre_tokenizer"] = byte_level | {"use_regex": True}
    return Tokenizer.from_str(json.dumps(described))


def expected(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@cache
def encoder(pattern: str) -> TextEncoder:
    return TextEncoder(tokenizer(pattern))


texts = st.lists(
    st.one_of(
        st.text(st.characters(max_codepoint=127), max_size=12),
        st.sampled_from(["<|im_end|>", "<|im_end", " 's", "it'LL", "12345", "   ", "\r\n\n", "…", "ſ", "\x85", "é"]),
    )
).map("".join)


@given(pattern=st.sampled_from([QWEN, GPT_OSS, "", POSSESSIVE, INCOMPLETE, LINES]), text=texts)
def test_the_ids_are_the_tokenizers(pattern: str, text: str) -> None:
    assert list(encoder(pattern).encode(text, special=False)) == expected(tokenizer(pattern), text)


@given(path=st.sampled_from([modeldir.TINY, modeldir.DEMO]), text=texts)
def test_of_bundled_models_too(path: Path, text: str) -> None:
    model = bundled(path)
    assert list(model.encoder.encode(text, special=True)) == list(model.tokenizer.encode(text).ids)


bundled = cache(modeldir.load)


@pytest.mark.parametrize("pattern", [QWEN, GPT_OSS, ""], ids=str)
def test_common_patterns_are_understood(pattern: str) -> None:
    splitter = encoder(pattern).splitter
    assert splitter is not None
    assert splitter.words("one two") == ["one", " two"]
    assert splitter.words("à la") is None


@pytest.mark.parametrize(
    "pattern", [DEEPSEEK, POSSESSIVE, NESTED, LINES, END, r"\p{Han}+|\p{L}+", r"(\p{L})+|."], ids=str
)
def test_words_of_others_are_left_to_the_tokenizer(pattern: str) -> None:
    splitter = encoder(pattern).splitter
    assert splitter is not None
    assert splitter.words("one two") is None


@pytest.mark.parametrize(
    ("before", "after"), [(["<|im_start|>"], []), (["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]), ([], [])]
)
def test_tokens_around_a_text_are_added(before: list[str], after: list[str]) -> None:
    around = Tokenizer.from_str(tokenizer(QWEN).to_str())
    around.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, around.token_to_id(token)) for token in {*before, *after}],
    )
    for text in ("", "a", "one two", "é<|im_start|>"):
        assert list(TextEncoder(around).encode(text, special=True)) == list(around.encode(text).ids)
        assert list(TextEncoder(around).encode(text, special=False)) == expected(around, text)


def test_added_tokens_that_take_their_neighbours_are_left_to_the_tokenizer() -> None:
    described = json.loads((modeldir.TINY / "tokenizer.json").read_text())
    described["added_tokens"][0]["lstrip"] = True
    assert TextEncoder(Tokenizer.from_str(json.dumps(described))).splitter is None


def test_an_added_token_that_is_ascii_once_it_is_normalized_is_found() -> None:
    described = json.loads((modeldir.TINY / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "NFKC"}
    entry = {"id": 4096, "content": "＜end＞", "normalized": True}
    described["added_tokens"] = [each | {"normalized": True} for each in described["added_tokens"]]
    described["added_tokens"].append(described["added_tokens"][0] | entry)
    normalizing = Tokenizer.from_str(json.dumps(described))
    assert expected(normalizing, "a<end>") == [64, 4096]
    assert list(TextEncoder(normalizing).encode("a<end>", special=False)) == [64, 4096]


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoder, "CACHED_BYTES", 20_000)
    bounded = TextEncoder(tokenizer(QWEN))
    text = " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}<|im_end|>" for n in range(200)) + "x" * 1_000
    assert list(bounded.encode(text, special=False)) == expected(tokenizer(QWEN), text)
    assert bounded.known_words.size_bytes <= 20_000 + text_encoder._WORD * 4 + 200
    assert len(bounded.known_words) <= 100
    assert max(map(len, bounded.known_words)) < 100


spaced = st.lists(
    st.one_of(
        texts,
        st.sampled_from(
            [
                "the ",
                "cat sat ",
                "it's a ",
                "x \n y ",
                "one two ",
                "a<|im_end|>b ",
                "à la ",
                "cat 中文 ",
                "x e\u0301 o ",
            ]
        ),
    )
)


@given(
    pattern=st.sampled_from([QWEN, GPT_OSS, "", DEEPSEEK, INCOMPLETE, POSSESSIVE, NESTED, LINES, END]),
    beginning=spaced.map("".join),
    ends=st.tuples(texts, texts),
    most=st.sampled_from([0, 20, 1000]),
)
def test_texts_that_begin_alike_share_pieces_and_have_the_tokenizers_ids(
    pattern: str, beginning: str, ends: tuple[str, str], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "PIECE", 5)
        patch.setattr(text_encoder, "NEW_TEXT", most)
        patch.setattr(text_encoder, "_SHORT", 6)
        for text in (beginning + ends[0], beginning + ends[1], beginning + ends[0]):
            assert list(encoder(pattern).encode(text, special=False)) == expected(tokenizer(pattern), text)


def test_a_piece_is_kept_from_the_second_time_on() -> None:
    model, prompt = bundled(modeldir.DEMO), "".join(f"this is sentence {number} of many, and " for number in range(100))
    fresh = TextEncoder(model.tokenizer)
    fresh.encode(prompt + "one", special=False)
    assert fresh.known_pieces.size_bytes == 0
    fresh.encode(prompt + "two", special=False)
    kept = fresh.known_pieces.size_bytes
    assert kept >= len(prompt) - 2 * text_encoder.PIECE
    ids = fresh.encode(prompt + "three", special=False)
    assert fresh.known_pieces.size_bytes == kept
    assert list(ids) == expected(model.tokenizer, prompt + "three")


def test_what_is_new_in_a_long_text_is_left_to_the_tokenizer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoder, "NEW_TEXT", 2_000)
    model, asked = bundled(modeldir.DEMO), list[int]()

    class Counting(TextEncoder):
        def _tokenize(self, texts: list[str], special: bool) -> "list[array[int]]":
            asked.append(len(texts))
            return super()._tokenize(texts, special)

    fresh = Counting(model.tokenizer)
    text = "".join(f"this is sentence {number} of many, and a déjà-vu\n" for number in range(200))
    for _ in range(3):
        assert list(fresh.encode(text, special=False)) == expected(model.tokenizer, text)
    assert asked[0] == asked[2] == 1 < asked[1]  # what is kept is encoded by itself, and then known


def test_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoder, "CACHED_PIECES_BYTES", 20_000)
    bounded = TextEncoder(tokenizer(QWEN))
    for _ in range(2):
        for first in "abcdefghij":
            bounded.encode(f"{first}bc def ghi " * 200, special=False)
    assert 10_000 < bounded.known_pieces.size_bytes <= 20_000


@pytest.mark.parametrize("pattern", [r"\w+ \w+|\W|\w+", r"[a-z ]+|[^a-z ]"], ids=str)
def test_where_words_reach_over_spaces_no_text_is_cut(pattern: str) -> None:
    text = "one two three " * 100
    splitter = encoder(pattern).splitter
    assert splitter is None or [*splitter.pieces(text)] == [text]
    for _ in range(3):
        assert list(encoder(pattern).encode(text, special=False)) == expected(tokenizer(pattern), text)


def test_an_added_token_is_found_while_another_thread_empties_the_cache() -> None:
    encoder = TextEncoder(tokenizer(QWEN))
    dict.clear(encoder.known_words)
    assert list(encoder.encode("a<|im_end|>", special=False)) == expected(tokenizer(QWEN), "a<|im_end|>")


def test_classes_inside_and_outside_of_sets() -> None:
    assert ascii_pattern(r"[^\r\p{L}\]\p{N}]?\p{L}+|\p{Lu}\[") == r"[^\rA-Za-z\]0-9]?[A-Za-z]+|[A-Z]\["
