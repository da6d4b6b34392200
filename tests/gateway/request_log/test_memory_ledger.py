"""What can be deleted from memory storage, against a plain model of both streams."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.request_log.unstored import Fronts, MemoryLedger, merged
from penstock.schemas import done
from penstock.schemas.tokens import COUNTS, Finish, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.properties import examples


@given(st.integers(0, 2**32))
@examples(100)
def test_nothing_of_a_live_request_is_deleted_and_in_the_end_nothing_is_left(seed: int) -> None:
    rng, ledger = random.Random(seed), MemoryLedger()
    contents: dict[int, str] = {}  # sequence -> request
    tokens: dict[int, set[str]] = {}
    live: list[str] = []
    unstored: list[str] = []
    next_content, next_token = 1, 1
    for number in range(200):
        match rng.randrange(5):
            case 0:
                ledger.began(f"r{number}", number)
                unstored.append(f"r{number}")
            case 1 if unstored:
                name = unstored.pop(rng.randrange(len(unstored)))
                contents[next_content] = name
                ledger.stored(name, next_content)
                live.append(name)
                next_content += 1 + rng.randrange(3)  # other gateways' in between
            case 2 if live:
                tokens[next_token] = set(rng.sample(live, rng.randint(1, len(live))))
                ledger.read(next_token)
                next_token += 1 + rng.randrange(3)
            case 3 if live:
                ledger.over(live.pop(rng.randrange(len(live))))
            case 4:
                delete(ledger, contents, tokens)
        assert set(live) <= set(contents.values())
        assert all(name in contents.values() for name in live)
    for name in (*live, *unstored):
        ledger.over(name)
    delete(ledger, contents, tokens)
    assert not contents
    assert not tokens
    assert ledger.fronts() == Fronts(0, 0)


def delete(ledger: MemoryLedger, contents: dict[int, str], tokens: dict[int, set[str]]) -> None:
    fronts = ledger.fronts()
    for stored, front in ((contents, fronts.contents), (tokens, fronts.tokens)):
        for seq in [seq for seq in stored if seq < front]:
            del stored[seq]  # type: ignore[attr-defined]
    ledger.deleted(fronts)


def test_fronts_and_late_ones_are_found_without_a_look_at_all_that_are_in_their_grace_period() -> None:
    """Tens of thousands are, at a thousand requests a second. What was stored again holds back from there on only."""
    ledger = MemoryLedger()
    for number in range(1, 1001):
        ledger.began(f"r{number}", float(number))
        ledger.stored(f"r{number}", number)
        ledger.read(number)
    ledger.over("r500")
    assert ledger.fronts() == Fronts(0, 0), "r1 holds back everything"
    for number in (1, 2):
        ledger.moved(f"r{number}", 1000, 1001.0)
    assert ledger.late(1001.0, 990.0, 99) == [f"r{number}" for number in range(3, 11)]
    for number in range(3, 1001):
        ledger.over(f"r{number}")
    assert ledger.fronts().tokens == 1001
    assert ledger.fronts().contents == 0, "the content of the first one was not stored again"


def test_tokens_behind_a_request_that_runs_for_long_can_be_deleted_once_it_was_stored_again() -> None:
    ledger = MemoryLedger()
    ledger.began("long", 0.0)
    ledger.stored("long", 1)
    for number in range(10):
        ledger.began(f"r{number}", 1.0)
        ledger.stored(f"r{number}", 2 + number)
        ledger.read(1 + number)
        ledger.over(f"r{number}")
    assert ledger.fronts() == Fronts(0, 0)
    assert ledger.late(30.0, 60.0, 8) == []
    assert ledger.late(61.0, 60.0, 8) == ["long"]
    ledger.moved("long", ledger.position, 61.0)
    assert ledger.fronts() == Fronts(0, 11)
    assert ledger.late(62.0, 60.0, 8) == []
    assert ledger.left(3) == ["r7", "r8", "r9"], "their contents are deleted one by one"


def test_after_the_streams_were_lost_sequences_begin_again() -> None:
    ledger = MemoryLedger()
    ledger.began("a", 0.0)
    ledger.stored("a", 500)
    ledger.read(900)
    ledger.renewed()
    ledger.stored("a", 1)
    ledger.read(3)
    ledger.over("a")
    assert ledger.fronts() == Fronts(2, 4)


def test_what_a_gateway_has_read_keeps_the_counts_of_each_choice_before_its_end() -> None:
    counts = [done.counted("r", 1, choice, done.Usage(9, 4 + choice)) for choice in (0, 1)]
    ends = [TokenItem("r", 1, choice, 1, pack_tokens([choice]), Finish("stop")) for choice in (0, 1)]
    begun = TokenItem("r", 1, 0, 0, pack_tokens([7]))
    items = merged([begun, counts[0], ends[0], counts[1], ends[1]], 2)
    assert [(each.choice, each.first) for each in items] == [(COUNTS, 0), (COUNTS, 1), (0, 0), (1, 1)]
    assert [done.counts_in(each).completion for each in items[:2]] == [4, 5]
    assert items[2].tokens == pack_tokens([7, 0])
