from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.infra.text.detokenizer import Detokenizer, StopMatcher
from tests.properties import examples
from tests.tiny_model import CORPUS, byte_level_json, metaspace_json


@cache
def byte_level() -> tuple[Tokenizer, Detokenizer]:
    tokenizer = Tokenizer.from_str(byte_level_json())
    return tokenizer, Detokenizer(tokenizer)


@cache
def metaspace() -> tuple[Tokenizer, Detokenizer]:
    tokenizer = Tokenizer.from_str(metaspace_json())
    return tokenizer, Detokenizer(tokenizer)


def shown(detokenizer: Detokenizer, ids: list[int], **options: object) -> list[str]:
    stream = detokenizer.stream(**options)  # type: ignore[arg-type]
    return [*map(stream.push, ids), stream.finish()]


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string complete first; of those, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


TOKENS = st.lists(st.integers(0, 620), max_size=40)


@given(TOKENS)
def test_byte_level_text_of_any_tokens_is_the_tokenizers_own(ids: list[int]) -> None:
    tokenizer, detokenizer = byte_level()
    assert "".join(shown(detokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert detokenizer.text(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
def test_text_survives_tokenising_and_streaming(text: str) -> None:
    tokenizer, detokenizer = byte_level()
    pieces = shown(detokenizer, tokenizer.encode(text, add_special_tokens=False).ids)
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@given(st.text(alphabet="aeth Güß東京🙂.", max_size=40))
def test_other_vocabularies_stream_what_the_tokenizer_decodes(text: str) -> None:
    tokenizer, detokenizer = metaspace()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = shown(detokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert detokenizer.text(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.sampled_from(["broker", "keeps", "the", "东", "ü"]), min_size=2, max_size=8), st.integers(1, 7))
def test_a_text_that_continues_another_keeps_the_blank_before_its_first_word(words: list[str], at: int) -> None:
    for tokenizer, detokenizer in (byte_level(), metaspace()):
        ids = tokenizer.encode(" ".join(words[:at]), add_special_tokens=False).ids
        more = tokenizer.encode(" ".join(words), add_special_tokens=False).ids[len(ids) :]
        continued = "".join(shown(detokenizer, more, continues=True))
        assert tokenizer.decode(ids) + continued == tokenizer.decode([*ids, *more])
    _, other = metaspace()
    blank = metaspace()[0].encode("the", add_special_tokens=False).ids
    assert "".join(shown(other, blank)) == "the"
    assert "".join(shown(other, blank, continues=True)) == " the"


def test_both_kinds_of_vocabulary_are_distinguished() -> None:
    assert type(byte_level()[1].stream()).__name__ == "ByteStream"
    assert type(metaspace()[1].stream()).__name__ == "WindowStream"


def test_a_character_is_shown_whole_with_its_last_byte() -> None:
    tokenizer, detokenizer = byte_level()
    ids = tokenizer.encode("🦊", add_special_tokens=False).ids
    assert len(ids) > 1
    assert shown(detokenizer, ids) == [""] * (len(ids) - 1) + ["🦊", ""]


def test_an_unfinished_character_ends_as_one_replacement() -> None:
    tokenizer, detokenizer = byte_level()
    ids = tokenizer.encode("🦊", add_special_tokens=False).ids
    assert shown(detokenizer, ids[:-1])[-1] == "\ufffd"


def test_special_tokens_have_no_text_but_raw_bytes() -> None:
    _, detokenizer = byte_level()
    assert shown(detokenizer, [0, 1, 2]) == [""] * 4
    assert detokenizer.raw(2) == b"<|im_end|>"


@given(TOKENS)
def test_special_tokens_that_are_shown_have_the_tokenizers_text(ids: list[int]) -> None:
    tokenizer, detokenizer = byte_level()
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in whole:
        assert "".join(shown(detokenizer, ids, marks=detokenizer.special)) == whole
    _, other = metaspace()
    assert shown(other, [2], marks=other.special) == [other.special[2], ""]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    _, detokenizer = byte_level()
    assert shown(detokenizer, [639, 4_000_000_000]) == ["", "", ""]
    assert detokenizer.raw(4_000_000_000) == b""


def test_a_long_run_of_broken_bytes_is_shown_in_bounded_time_by_other_vocabularies() -> None:
    tokenizer, detokenizer = metaspace()
    broken = tokenizer.token_to_id("<0xE2>")
    stream = detokenizer.stream()
    text = "".join(stream.push(broken) for _ in range(1000)) + stream.finish()
    assert text.count("\ufffd") == 1000


@given(st.data())
def test_what_is_shown_after_k_tokens_depends_on_those_k_alone(data: st.DataObject) -> None:
    ids, stops = data.draw(TOKENS), data.draw(st.lists(st.text(min_size=1, max_size=3), max_size=3))
    k = data.draw(st.integers(0, len(ids)))
    for _, detokenizer in (byte_level(), metaspace()):
        whole = shown(detokenizer, ids, stops=stops)
        assert whole[:k] == shown(detokenizer, ids[:k], stops=stops)[:k]


@given(st.data())
def test_stop_strings_cut_at_the_first_complete_one_however_the_text_is_split(data: st.DataObject) -> None:
    letters = st.text(alphabet="ab.🙂", min_size=1, max_size=4)
    pieces, stops = data.draw(st.lists(letters, max_size=12)), data.draw(st.lists(letters, min_size=1, max_size=4))
    expected, stop = naive_cut("".join(pieces), stops)
    matcher, out, found = StopMatcher(stops), "", None
    for piece in pieces:
        safe, found = matcher.push(piece)
        out += safe
        assert expected.startswith(out)
    out += matcher.flush()
    assert (out, found) == (expected, stop)


@given(st.data())
def test_text_is_held_back_only_while_it_may_become_a_stop_string(data: st.DataObject) -> None:
    letters = st.text(alphabet="abc", min_size=1, max_size=4)
    pieces, stops = data.draw(st.lists(letters, max_size=10)), data.draw(st.lists(letters, min_size=1, max_size=3))
    matcher, out, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        safe, found = matcher.push(piece)
        if found:
            return
        out, seen = out + safe, seen + piece
        held = seen[len(out) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_after_a_stop_string_nothing_is_shown() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("so E") == ("so ", None)
    assert matcher.push("ND and more") == ("", "END")
    assert matcher.push("again") == ("", "END")
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_stop_string_can_be_shown() -> None:
    tokenizer, detokenizer = byte_level()
    ids = tokenizer.encode("The broker keeps every request", add_special_tokens=False).ids
    assert "".join(shown(detokenizer, ids, stops=["keeps"])) == "The broker "
    assert "".join(shown(detokenizer, ids, stops=["keeps"], stops_shown=True)) == "The broker keeps"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    tokenizer, detokenizer = byte_level()
    ids = tokenizer.encode("The broker keeps every broker", add_special_tokens=False).ids
    first = next(k for k, _ in enumerate(ids) if "broker" in tokenizer.decode(ids[: k + 1]))
    assert "".join(shown(detokenizer, ids, stops=["broker"], min_tokens=first + 1)) == "The "
    assert "".join(shown(detokenizer, ids, stops=["broker"], min_tokens=first + 2)) == "The broker keeps every "


@given(st.text("ab", max_size=16), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), st.data())
def test_a_stop_string_may_begin_before_min_tokens_but_not_end(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """The definition: the first to end in what counts; of several that end there, the longest."""
    skipped = data.draw(st.integers(0, len(text)))
    matcher, out, stop = StopMatcher(stops), "", None
    for at, letter in enumerate(text):
        if at < skipped:
            out += matcher.skip(letter)
        else:
            safe, stop = matcher.push(letter)
            out += safe
    ends = [(end, stop) for end in range(skipped + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    end, found = min(ends, key=lambda each: (each[0], -len(each[1])), default=(len(text), ""))
    assert stop == (found or None)
    assert out + (matcher.flush() if stop is None else "") == text[: end - len(found)]


@examples(50)
@given(st.integers(0, len(CORPUS) - 50), st.integers(1, 50))
def test_worker_and_gateway_agree_where_a_stop_string_ends_the_answer(start: int, size: int) -> None:
    """A worker sends tokens up to the one that completes the stop; what the gateway shows is the same."""
    tokenizer, detokenizer = byte_level()
    ids = tokenizer.encode(CORPUS[start:], add_special_tokens=False).ids[:200]
    stop = CORPUS[start + size : start + size + 5]
    worker = detokenizer.stream([stop])
    text, sent = "", []
    for token in ids:
        text += worker.push(token)
        sent.append(token)
        if worker.stop:
            break
    gateway = detokenizer.stream([stop])
    assert "".join(map(gateway.push, sent)) == text
    assert gateway.stop == worker.stop == stop


MARKS = {1: "<|im_start|>", 2: "<|im_end|>"}


@given(st.lists(TOKENS, max_size=6), st.lists(st.sampled_from(["a", " t", "th"]), max_size=2), st.booleans())
def test_tokens_at_once_have_the_texts_of_each(parts: list[list[int]], stops: list[str], marked: bool) -> None:
    for _, detokenizer in (byte_level(), metaspace()):
        singly, at_once = (detokenizer.marked_stream(MARKS) if marked else detokenizer.stream(stops) for _ in range(2))
        for number, tokens in enumerate(parts):
            if number == 3:
                singly.show({1: "<a>"})
                at_once.show({1: "<a>"})
            assert at_once.push_all(tokens) == [singly.push(token) for token in tokens]
        assert (at_once.finish(), at_once.stop) == (singly.finish(), singly.stop)


@given(TOKENS)
def test_chosen_special_tokens_can_have_a_text(ids: list[int]) -> None:
    _, detokenizer = byte_level()
    assert {detokenizer.added[text]: text for text in MARKS.values()} == MARKS
    kept = [token for token in ids if token]
    stream = detokenizer.marked_stream(MARKS)
    whole = "".join([*map(stream.push, kept), stream.finish()])
    parts = "".join(shown(detokenizer, [token for token in kept if token not in MARKS]))
    assert whole.replace("<|im_start|>", "").replace("<|im_end|>", "") == parts
    assert whole.count("<|im_start|>") == kept.count(1)
