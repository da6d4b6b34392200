"""Searching the texts of requests: the quick way against decoding every text."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.log_tools.requests import text_search
from penstock.log_tools.requests.describe import Texts
from penstock.log_tools.requests.find_requests import ended
from penstock.log_tools.requests.list_requests import match_in
from penstock.log_tools.requests.text_search import RecordSearch
from penstock.log_tools.sources.data_folder import StoredLog
from penstock.log_tools.sources.store_files import HAS_HEADERS, HEADER
from penstock.schemas.done import Done, Outcome, Returned, not_recorded, recorded
from penstock.schemas.done import packed as packed_record
from penstock.schemas.requests import Diffusion, Embedding, GenerateRequest, Stop, new_request_id, packed
from penstock.schemas.subjects import KEPT, Subjects
from penstock.schemas.summary import Criteria
from penstock.schemas.wire import WIDTHS, encode, narrowed, pack_tokens, unpack_tokens
from tests.properties import examples

TEXTS, MODEL = Texts(), str(TINY)
SIZE = len(TEXTS.detokenizer(MODEL).spoken)
TOKENS = st.lists(st.integers(0, SIZE + 3) | st.sampled_from(load_tokenizer(TINY).encode("ein Knödel ﬁts İ 日本").ids))
LITERALS = st.text("aAiIkKßKſİ日é .�\ud800", max_size=3)
PATTERNS = st.recursive(
    st.builds(re.escape, LITERALS) | st.sampled_from([".", r"\d", r"\b", "[ab]", "(?i:AB)", "$", "x*", "(?!a)"]),
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}){}".format, inner, st.sampled_from(["", "?", "*", "+", "{2}", "{0,2}", "+?"]))
        | st.builds("({}|{})".format, inner, inner)
    ),
    max_leaves=5,
)


def matching(pattern: re.Pattern[str], rows: Sequence[tuple[Sequence[int], ...]]) -> list[bool]:
    """What is found in records of prompts and answers: of this build, and of an earlier one, which had prompts."""
    ours, theirs = [], []
    for prompt, *answers in rows:
        request = GenerateRequest("r", MODEL, "g", pack_tokens(prompt), Stop(8), 1, 2, b"", 16)
        choices = tuple(Outcome(pack_tokens(answer), "stop") for answer in answers)
        done = Done("r", MODEL, 1, choices=choices)
        for accepted in (encode(request), encode(packed(request))):
            ours.append((encode(packed_record(msgspec.structs.replace(done, submitted=recorded(request)))), accepted))
        theirs.append((encode(msgspec.structs.replace(done, submitted=encode(request))), b""))
    search = RecordSearch(pattern, TEXTS)
    if not rows:
        assert search.matching([], []) == []
        return []
    found = search.matching(*zip(*theirs, strict=True))
    assert [one for one in found for _ in range(2)] == search.matching(*zip(*ours, strict=True))
    return found


def has(pattern: re.Pattern[str], *rows: Sequence[int]) -> bool:
    text_of = TEXTS.detokenizer(MODEL).text
    return any(pattern.search(text_of(unpack_tokens(pack_tokens(row)))) is not None for row in rows)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=4), st.data(), st.booleans())
def test_a_part_of_a_text_is_found_wherever_tokens_cut_it(
    rows: list[tuple[list[int], list[int]]], data: st.DataObject, any_case: bool
) -> None:
    texts = [TEXTS.detokenizer(MODEL).text(tokens) for row in rows for tokens in row if tokens] or ["none"]
    text = data.draw(st.sampled_from(texts))
    start = data.draw(st.integers(0, len(text)))
    part = text[start : start + data.draw(st.integers(1, 40))]
    pattern = re.compile(re.escape(part.swapcase() if any_case else part), re.IGNORECASE if any_case else 0)
    found = matching(pattern, rows)
    assert found == [has(pattern, *row) for row in rows]


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=3), PATTERNS, st.booleans())
@example([(load_tokenizer(TINY).encode("K K").ids, [])], "k k", True)
def test_any_pattern_finds_what_it_finds_in_the_texts(
    rows: list[tuple[list[int], list[int]]], source: str, any_case: bool
) -> None:
    pattern = re.compile(source, re.IGNORECASE if any_case else 0)
    found = matching(pattern, rows)
    assert found == [has(pattern, *row) for row in rows]


@pytest.mark.parametrize(
    ("source", "literal"),
    [
        ("invoice", "invoice"),
        (r"invoice \d+ is paid", "invoice "),
        (r"\b(?:order|cart)\b of (user) [0-9]+", " of "),
        (r"a?bcd+e*", "bc"),
        ("(?i)INVOICE", "nvo"),
        ("paid|open", ""),
        ("(?i:ab)", ""),
    ],
)
def test_the_longest_literal_is_what_every_match_has(source: str, literal: str) -> None:
    assert text_search._longest_literal(re.compile(source)) == literal.encode()


def test_texts_without_the_literal_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_text = load_tokenizer(TINY).encode
    rows = [(encode_text(text).ids,) for text in ("the capital of France", "nothing at all", "a capital city")]
    decoded: list[Sequence[int]] = []
    detokenizer = TEXTS.detokenizer(MODEL)
    text_of = type(detokenizer).text

    def noted(self: object, tokens: Sequence[int]) -> str:
        decoded.append(tokens)
        return text_of(detokenizer, tokens)

    monkeypatch.setattr(type(detokenizer), "text", noted)
    assert matching(re.compile("capital of .rance"), rows) == [True, False, False]
    assert len(decoded) == 3, "one text of each three records"


# --- files of a stopped deployment ---

WIDE, SHIFT = "wide", 1 << 16  # a second model, which has each token of the demo model twice; the second takes 17 bits
SUBJECTS = Subjects("ps")
NOW_NS = 1_795_963_746_364_309_555


class _Wide:
    spoken = (*TEXTS.detokenizer(MODEL).spoken, *[b"-"] * (SHIFT - SIZE), *TEXTS.detokenizer(MODEL).spoken)

    def text(self, tokens: Iterable[int]) -> str:
        return b"".join([self.spoken[token] for token in tokens if token < SHIFT + SIZE]).decode("utf-8", "replace")


class _BothModels(Texts):
    def detokenizer(self, model: str) -> Any:
        return _Wide() if model == WIDE else TEXTS.detokenizer(MODEL)


BOTH = _BothModels()
KINDS = ("packed", "plain", "copied", "gone", "older", "vectors", "image", "open", "returned", "later")
WORDS = [load_tokenizer(TINY).encode(text).ids for text in ("the capital of", " Paris", "ein Knödel", "İ 日本")]
SAID = st.lists(st.sampled_from(WORDS) | st.lists(st.integers(0, SIZE + 3), max_size=3), max_size=5).map(
    lambda parts: [token for part in parts for token in part]
)


def place(tokens: Sequence[int], model: str, number: int) -> bytes:
    """Tokens of the demo model as those of a model."""
    return pack_tokens([token + SHIFT * (model == WIDE and number % 2) for token in tokens])


def write(folder: Path, name: str, rows: Sequence[tuple[int, str, str, bytes]], per_block: int) -> None:
    """The files of a stream with messages: time, subject, message id, body."""
    msgs = folder / name / "msgs"
    msgs.mkdir(parents=True)
    (msgs.parent / "meta.inf").write_text('{"created":"2026-11-22T00:00:00Z"}')
    for start in range(0, len(rows), per_block):
        out = b""
        for seq, (time_ns, subject, message_id, body) in enumerate(rows[start : start + per_block], start + 1):
            headers = f"NATS/1.0\r\nNats-Msg-Id: {message_id}\r\n\r\n".encode()
            rest = subject.encode() + len(headers).to_bytes(4, "little") + headers + body + bytes(8)
            out += HEADER.pack(HEADER.size + len(rest) | HAS_HEADERS, seq, time_ns, len(subject)) + rest
        (msgs / f"{start // per_block + 1}.blk").write_bytes(out)


async def found(stored: StoredLog, pattern: re.Pattern[str], search: RecordSearch | None) -> list[str]:
    """The requests that are listed, newest end first."""
    listed = []
    async for _, each in ended(stored, Criteria(), search=search, prompts=search is None):
        assert each.request is not None
        if match_in(pattern, BOTH, each) is not None:
            listed.append(each.request.id)
    return listed


Row = tuple[str, list[int], list[list[int]], str, int]  # kind, prompt, answers, model, ns from acceptance to the end


def stored(folder: Path, rows: Sequence[Row], per_block: int) -> StoredLog:
    """Requests of all kinds, accepted one after the other, in files of so many messages."""
    asked, done = [], []
    for number, (kind, prompt, answers, model, took_ns) in enumerate(rows):
        at_ns = NOW_NS + number * 50_000_000
        packed_prompt = place(prompt, model, number)
        request = GenerateRequest(new_request_id(at_ns), model, "g", packed_prompt, Stop(8), at_ns, at_ns)
        if kind == "vectors":
            request = msgspec.structs.replace(request, embedding=Embedding(4, texts=("a capital",)))
        if kind == "image":
            diffusion = Diffusion("image", "Paris", 8, 8, 1, "png")
            request = msgspec.structs.replace(request, prompt=b"", diffusion=diffusion)
        subject = SUBJECTS.request(model, "standard", request.id)
        message_id = f"{request.id}:{KEPT}:3" if kind == "copied" else request.id
        if kind != "gone":
            asked.append((at_ns, subject, message_id, encode(packed(request) if kind != "plain" else request)))
        choices = tuple(Outcome(place(answer, model, number + at), "stop") for at, answer in enumerate(answers))
        body = recorded(request) if kind != "older" else encode(request)
        left_out = not_recorded(request) if kind != "older" else ()
        event = Done(request.id, model, 1, choices=choices, submitted=body, left_out=left_out)
        record = encode(packed_record(event) if kind != "older" else event)
        if kind == "later":  # a field in front that this build does not know
            record = bytes((record[0] + 1,)) + encode("news") + encode(1) + record[1:]
        if kind == "returned":
            returned = encode(Returned(request.id, model, 1, "w", "capital"))
            done.append((at_ns + 1, SUBJECTS.returned(model), f"{request.id}:1:returned", returned))
        if kind != "open":
            done.append((at_ns + took_ns, SUBJECTS.done("default", model, request.id), request.id, record))
    names = [SUBJECTS.stream(name) for name in ("REQUESTS", "DONE")]
    for name, messages in zip(names, (asked, sorted(done)), strict=True):
        write(folder, name, messages, per_block)
    return StoredLog(folder, SUBJECTS, names)


@pytest.mark.parametrize(
    ("pattern", "count"), [("capital", 18), ("Paris", 38), (r"(?i)PARI. \d", 0), ("Knödel", 0), ("", 54), ("a|b", 52)]
)
async def test_a_text_in_files_is_found_in_every_kind_of_request(tmp_path: Path, pattern: str, count: int) -> None:
    capital, paris, *_ = WORDS
    rows: list[Row] = [
        (kind, prompt, [answer], model, took_ns)
        for kind in KINDS
        for took_ns, (prompt, answer) in enumerate([(capital, []), ([], paris), ([7, 8], [9, *paris])], 1)
        for model in (MODEL, WIDE)
    ]
    log, wanted = stored(tmp_path, rows, 7), re.compile(pattern)
    search = RecordSearch(wanted, BOTH)
    names = await found(log, wanted, search)
    assert names == await found(log, wanted, None)
    assert len(names) == count
    assert search.without_prompt == 4


@examples(25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            SAID,
            st.lists(SAID, max_size=2),
            st.sampled_from([MODEL, WIDE]),
            st.sampled_from([1, 120_000_000, 4_000_000_000]),
        ),
        min_size=2,
        max_size=8,
    ),
    st.data(),
    st.integers(1, 4),
)
async def test_in_files_the_same_is_found_as_when_every_message_is_decoded(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], data: st.DataObject, per_block: int
) -> None:
    log = stored(tmp_path_factory.mktemp("store"), rows, per_block)
    texts = [BOTH.detokenizer(MODEL).text(part) for _, prompt, answers, *_ in rows for part in (prompt, *answers)]
    text = data.draw(st.sampled_from([*filter(None, texts), "none"]))
    start = data.draw(st.integers(0, len(text) - 1))
    any_case = data.draw(st.booleans())
    pattern = re.compile(re.escape(text[start : start + data.draw(st.integers(1, 12))]), re.IGNORECASE * any_case)
    search = RecordSearch(pattern, BOTH)
    assert await found(log, pattern, search) == await found(log, pattern, None)
    assert search.without_prompt == sum(kind == "gone" and bool(prompt) for kind, prompt, *_ in rows)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_literal_is_found_at_every_width_of_ids(bits: int) -> None:
    vocabulary, largest = [b"ab", b"c", b"", b"xa", b"bcx", b"-"], (1 << bits) - 1
    may_be = ([0, 1], [5, 3, 4], [0, 2, 1], [0], [5, 0])  # of the last two, something may follow that has no text
    cannot = ([1, 0, 5], [3, 0, 5], [5, 4])
    parts = [narrowed(pack_tokens([largest, *tokens])) for tokens in (*may_be, *cannot)]
    assert {part[0] for part in parts} == {bits}
    table = text_search._Beginnings(vocabulary, b"abc", any_case=False)
    assert table.candidates(parts).tolist() == list(range(len(may_be)))
    assert table.candidates([narrowed(pack_tokens([0, largest, 1])), b"\x03abc"]).tolist() == [0, 1]
