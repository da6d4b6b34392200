from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas import done
from penstock.schemas.done import Done, Outcome
from penstock.schemas.token_dedup import TokenReassembler, replay, scores
from penstock.schemas.tokens import ANOTHER_MODEL, PROMPT, WHOLE_REQUEST, Finish, Logprob, TokenItem
from penstock.schemas.wire import pack_tokens, unpack_tokens


def item(first: int, tokens: list[int], *, attempt: int = 1, choice: int = 0, finish: str = "") -> TokenItem:
    logprobs = tuple(Logprob(-float(token)) for token in tokens)
    return TokenItem(
        "r", attempt, choice, first, pack_tokens(tokens), Finish(finish) if finish else None, logprobs or None
    )


FENCE = WHOLE_REQUEST


def fence(attempt: int) -> TokenItem:
    return TokenItem("r", attempt, FENCE, 0)


def read(fold: TokenReassembler, items: list[TokenItem]) -> dict[int, list[int]]:
    """Tokens that came out per choice, checking that each item continues the one before."""
    out: dict[int, list[int]] = {}
    for pushed in items:
        mark = fold.mark
        returned = fold.push(pushed)
        assert fold.mark > mark if returned else fold.mark >= mark
        for due in returned:
            tokens = out.setdefault(due.choice, [])
            assert due.first == len(tokens)
            new = list(unpack_tokens(due.tokens))
            assert [-entry.logprob for entry in due.logprobs or ()] == new
            tokens += new
    return out


@st.composite
def cut(draw: st.DrawFn, *, attempt: int, choice: int, start: int, end: int, finish: bool) -> list[TokenItem]:
    """Tokens start .. end of one choice (token = 10 * position) in items of random sizes, some overlapping."""
    items, at = [], start
    while at < end:
        size = draw(st.integers(1, 4))
        back = draw(st.integers(0, min(2, at - start)))
        upto = min(end, at + size)
        items.append(
            item(at - back, [10 * position for position in range(at - back, upto)], attempt=attempt, choice=choice)
        )
        at = upto
    if finish:
        items.append(item(end, [], attempt=attempt, choice=choice, finish="stop"))
    return items


def test_the_attempt_that_ended_a_request_continues_after_a_fence() -> None:
    items = [
        item(0, [0, 10]),
        fence(2),
        item(2, [21], attempt=2),
        item(2, [20, 30]),
        item(3, [31], attempt=2, finish="stop"),
        item(4, [], finish="length"),
    ]
    fold = TokenReassembler(last_attempt=1)
    assert read(fold, items) == {0: [0, 10, 20, 30]}
    assert not fold.open
    assert read(TokenReassembler(last_attempt=2), items) == read(TokenReassembler(), items) == {0: [0, 10, 21, 31]}


@given(st.data())
def test_each_token_comes_out_once_and_in_order_however_an_attempts_items_are_mixed(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    items: list[TokenItem] = []
    for choice, length in enumerate(lengths):
        items += data.draw(cut(attempt=1, choice=choice, start=0, end=length, finish=True))
    items += data.draw(st.lists(st.sampled_from(items), max_size=10))
    fold = TokenReassembler(len(lengths))
    out = read(fold, data.draw(st.permutations(items)))
    assert fold.open == 0
    assert not fold.waiting
    for choice, length in enumerate(lengths):
        assert out.get(choice, []) == [10 * position for position in range(length)]


@given(st.data())
def test_a_zombies_tokens_after_the_fence_count_nowhere(data: st.DataObject) -> None:
    kept, total = data.draw(st.integers(0, 8)), data.draw(st.integers(8, 16))
    before = data.draw(cut(attempt=1, choice=0, start=0, end=kept, finish=False))
    after = data.draw(cut(attempt=2, choice=0, start=kept, end=total, finish=True))
    zombie = [item(kept + k, [666, 667], attempt=1) for k in range(4)] + [item(kept, [], attempt=1, finish="length")]
    mixed = data.draw(st.permutations(after + data.draw(st.lists(st.sampled_from(zombie + before), max_size=8))))
    fold = TokenReassembler()
    out = read(fold, [*before, fence(2), *mixed])
    assert out.get(0, []) == [10 * position for position in range(total)]
    assert fold.open == 0


def test_items_held_behind_a_gap_are_dropped_with_their_attempt() -> None:
    fold = TokenReassembler()
    assert read(fold, [item(0, [0]), item(2, [666])]) == {0: [0]}
    assert fold.waiting
    assert fold.push(fence(2)) == ()
    assert not fold.waiting
    assert [list(unpack_tokens(due.tokens)) for due in fold.push(item(1, [10, 20], attempt=2))] == [[10, 20]]


def test_an_item_in_order_is_passed_on_as_it_is() -> None:
    fold, first = TokenReassembler(), item(0, [1, 2])
    assert fold.push(first)[0] is first


def test_the_end_of_a_whole_request_ends_the_choices_that_are_open() -> None:
    fold = TokenReassembler(3)
    fold.push(item(0, [7], choice=1, finish="stop"))
    fold.push(item(0, [8], choice=2))
    failed = Finish("error", code="worker_lost")
    ended = fold.push(TokenItem("r", 1, WHOLE_REQUEST, 0, b"", failed))
    assert [(due.choice, due.first, due.finish) for due in ended] == [(0, 0, failed), (2, 1, failed)]
    assert fold.open == 0
    assert fold.push(TokenItem("r", 1, WHOLE_REQUEST, 0, b"", failed)) == []


def test_nothing_follows_a_finish() -> None:
    fold = TokenReassembler()
    fold.push(item(0, [1], finish="stop"))
    assert fold.push(item(1, [2])) == ()
    assert fold.push(item(0, [1], attempt=2, finish="length")) == ()


def test_a_finish_that_overlaps_known_tokens_is_kept() -> None:
    fold = TokenReassembler()
    fold.push(item(0, [1, 2]))
    (due,) = fold.push(item(1, [2], finish="stop"))
    assert (due.first, due.tokens, due.finish) == (2, b"", Finish("stop"))


def test_items_of_unknown_choices_are_ignored() -> None:
    fold = TokenReassembler(2)
    assert fold.push(item(0, [1], choice=2)) == ()
    assert fold.push(item(0, [1], choice=-3)) == ()


def prompt_item(first: int, stop: int, *, attempt: int = 1) -> TokenItem:
    """Log-probabilities of the prompt's positions ``first`` .. ``stop`` - 1: each minus its position."""
    values = tuple(Logprob(-float(position), rank=attempt) for position in range(first, stop))
    return TokenItem("r", attempt, PROMPT, first, logprobs=values)


def read_prompt(fold: TokenReassembler, items: list[TokenItem]) -> list[int]:
    """Positions that came out, checking that each item continues the one before; tokens are passed over."""
    out: list[int] = []
    for pushed in items:
        for due in fold.push(pushed):
            if due.choice == PROMPT:
                assert due.first == len(out) + 1
                out += [int(-entry.logprob) for entry in due.logprobs or ()]
    return out


@given(st.data())
def test_each_of_the_prompts_logprobs_comes_out_once_and_in_order(data: st.DataObject) -> None:
    """In pieces that overlap, repeat and overtake each other and the tokens, over two attempts."""
    length, lost = data.draw(st.integers(2, 30)), data.draw(st.integers(1, 30))

    def pieces(attempt: int, start: int, stop: int) -> list[TokenItem]:
        cuts = sorted({start, stop, *data.draw(st.lists(st.integers(start, stop), max_size=4))})
        found = []
        for first, end in pairwise(cuts):
            found.append(prompt_item(data.draw(st.integers(max(1, first - 2), first)), end, attempt=attempt))
        return found

    before = pieces(1, 1, min(lost, length))
    known = len(scores(before)) + 1
    again = pieces(2, data.draw(st.integers(1, max(1, known))), length)
    tokens = data.draw(cut(attempt=2, choice=0, start=0, end=3, finish=True))
    later = again + data.draw(st.lists(st.sampled_from([*again, *before, *tokens]), max_size=6)) + tokens
    items = [*before, fence(2), *data.draw(st.permutations(later))]
    fold = TokenReassembler()
    assert read_prompt(fold, items) == list(range(1, length))
    assert fold.scored == len(scores(items)) + 1 == length
    assert fold.open == 0
    assert not fold.waiting
    assert [list(unpack_tokens(part.tokens)) for part in replay(items)] == [[0, 10, 20]]


def test_the_prompts_logprobs_behind_a_gap_are_dropped_with_their_attempt() -> None:
    fold = TokenReassembler()
    assert fold.scored == 0
    assert read_prompt(fold, [prompt_item(1, 3), prompt_item(5, 7)]) == [1, 2]
    assert (fold.scored, fold.waiting) == (3, True)
    assert fold.push(fence(2)) == ()
    assert not fold.waiting
    assert fold.push(prompt_item(3, 5)) == ()  # of the attempt before
    (due,) = fold.push(prompt_item(1, 5, attempt=2))
    assert (due.first, [entry.rank for entry in due.logprobs or ()]) == (3, [2, 2])


def test_replay_returns_what_was_streamed_and_what_ended() -> None:
    items = [item(0, [1, 2]), item(0, [5], choice=1, finish="stop"), item(1, [2, 3]), fence(2), item(3, [666])]
    first, second = replay(items, 2)
    assert (list(unpack_tokens(first.tokens)), first.finish) == ([1, 2, 3], None)
    assert (list(unpack_tokens(second.tokens)), second.finish) == ([5], Finish("stop"))


@given(st.data())
def test_a_terminal_event_completes_what_came_before_it_once_and_without_a_hole(data: st.DataObject) -> None:
    """Whatever was lost of the stream, whatever attempts began, and whatever still comes behind it."""
    lengths = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))
    streamed: list[TokenItem] = []
    for choice, length in enumerate(lengths):
        streamed += data.draw(cut(attempt=1, choice=choice, start=0, end=length, finish=True))
    kept = [each for each in data.draw(st.permutations(streamed)) if data.draw(st.booleans())]
    if data.draw(st.booleans()):
        kept.append(fence(2))
    outcomes = []
    for length in lengths:
        known = [10 * position for position in range(length)]
        logprobs = tuple(Logprob(-float(token)) for token in known)
        outcomes.append(Outcome(pack_tokens(known), "stop", logprobs=logprobs))
    fold = TokenReassembler(len(lengths))
    out = read(fold, kept)
    for due in fold.conclude(done.items(Done("r", "m", data.draw(st.integers(1, 2)), choices=tuple(outcomes)))):
        tokens = out.setdefault(due.choice, [])
        assert due.first == len(tokens)
        new = list(unpack_tokens(due.tokens))
        assert [-entry.logprob for entry in due.logprobs or ()] == new
        tokens += new
    assert out == {choice: [10 * position for position in range(length)] for choice, length in enumerate(lengths)}
    assert fold.open == 0
    assert not fold.waiting
    assert [due for late in [*streamed, item(0, [0, 10], attempt=3)] for due in fold.push(late)] == []


@given(
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 6), st.sampled_from(["same", "other"]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_the_record_of_a_revoked_attempt_never_continues_another_text(
    before: int, after: int, own: int, text: str, later: bool, silent: bool
) -> None:
    """Its worker stored the end while the next attempt already streamed: parts of two texts would be one answer."""
    before = 0 if silent else before  # then nothing of the revoked attempt was stored but its record
    first = [10 * position for position in range(before + own)]
    second = [10 * position + (text == "other") for position in range(before, before + after)]
    fold = TokenReassembler()
    pushed = [*([] if silent else [item(0, first[:before])]), fence(2), item(before, second, attempt=2)]
    shown = read(fold, [*pushed, fence(3)] if later else pushed).get(0, [])
    record = Done("r", "m", 1, choices=(Outcome(pack_tokens(first), "stop"),))
    rests = fold.conclude(done.items(record))
    answer = shown + [token for due in rests for token in unpack_tokens(due.tokens)]
    ends = [due.finish for due in rests if due.finish is not None]
    if second == first[before : before + after]:  # else they are others, or more
        assert (answer, [end.reason for end in ends]) == (first, ["stop"])
    else:
        assert (answer, [end.code for end in ends]) == (first[:before] + second, ["worker_lost"])
    assert fold.open == 0


def test_a_terminal_event_of_a_failure_ends_every_choice_with_it_but_those_that_had_ended() -> None:
    fold = TokenReassembler(3)
    fold.push(item(0, [0], finish="stop"))
    event = Done("r", "m", 1, choices=(Outcome(pack_tokens([0]), "stop"), Outcome(b"", "error")), code="worker_lost")
    ends = {due.choice: due.finish for due in fold.conclude(done.items(event))}
    assert {choice: end.code for choice, end in ends.items() if end is not None} == {1: "worker_lost", 2: "worker_lost"}
    assert fold.open == 0


def test_an_answer_whose_beginning_the_log_has_lost_is_taken_over_from_its_beginning() -> None:
    lost = [item(0, [0, 10]), item(2, [20])]
    left = [item(3, [30, 40]), item(5, [50]), fence(2)]
    (progress,) = replay(left)
    assert (progress.tokens, progress.finish) == (b"", None)
    # The client had everything; of what is computed again it takes what it does not have.
    again = [item(0, [0, 10, 20, 30], attempt=2), item(4, [40, 50, 60], attempt=2, finish="length")]
    assert read(TokenReassembler(1), [*lost, *left, *again]) == {0: [0, 10, 20, 30, 40, 50, 60]}


def test_the_fallback_of_the_highest_attempt_counts_and_is_no_item_of_the_answer() -> None:
    fold = TokenReassembler(2)
    assert not fold.push(TokenItem("r", 2, ANOTHER_MODEL, 1))
    assert (fold.attempt, fold.fallback, fold.open) == (2, 1, 2)
    assert not fold.push(TokenItem("r", 1, ANOTHER_MODEL, 2)), "of an attempt that is over"
    assert fold.fallback == 1
    assert fold.push(TokenItem("r", 2, 0, 0, pack_tokens([5])))
    assert not fold.push(TokenItem("r", 3, ANOTHER_MODEL, 1)), "its next worker says so again"
    assert fold.position(0) == 1
    parts = replay([TokenItem("r", 2, ANOTHER_MODEL, 1), TokenItem("r", 2, 0, 0, pack_tokens([5]))])
    assert [list(unpack_tokens(part.tokens)) for part in parts] == [[5]]


def test_a_servers_counts_are_returned_before_the_end_and_void_after_a_fence() -> None:
    counts = done.counted("r", 1, 0, done.Usage(12, 7, 4))
    fold = TokenReassembler(1)
    assert fold.push(item(0, [0]))
    assert list(fold.push(counts)) == [counts]
    assert done.counts_in(counts) == done.Usage(12, 7, 4, foreign=True)
    fold.push(fence(2))
    assert list(fold.push(counts)) == []
    fold.push(item(1, [10], attempt=2, finish="stop"))
    assert list(fold.push(done.counted("r", 2, 0, done.Usage()))) == [], "nothing follows an end"
    assert replay([item(0, [0]), counts, item(1, [10], finish="stop")])[0].tokens == pack_tokens([0, 10])


def test_a_request_counts_its_prompt_once_and_only_as_a_server_that_counted_all_of_it() -> None:
    first, second = done.Usage(12, 7, 4, 5, foreign=True), done.Usage(12, 2, 0, -1, foreign=True)
    assert done.total({0: first}, 2) is None
    assert done.total({0: first, 1: second}, 2) == done.Usage(12, 9, 0, -1, foreign=True)
    assert done.total({WHOLE_REQUEST: first}, 2) == first
    (counts, *_) = done.items(Done("r", "m", 1, choices=(Outcome(b"", "stop"),), usage=first))
    assert done.total({counts.first: done.counts_in(counts)}, 1) == first
