"""The auditor finds every kind of broken promise, and nothing where all were kept: each case is one log."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from schemas.wire import pack_tokens
from tests.chaos.audit import (
    End,
    Expected,
    Footprint,
    Log,
    Problem,
    difference,
    judge,
    later_problems,
    memory_problems,
    recovery,
)
from tests.chaos.seen import Seen, Shown

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENS = pack_tokens(range(9))
EXPECTED = {"r": Expected({0: Shown(TEXT, "stop", [("the", -0.7)])}, (TOKENS,))}


class Case(NamedTuple):
    """One request with one client, as it should be; a test breaks one thing in it."""

    seen: Seen
    log: Log


def kept() -> Case:
    seen = Seen("tag", "r", "stream")
    seen.request, seen.outcome = "id", "answered"
    seen.choices[0] = Shown(TEXT, "stop", [("the", -0.701)])
    return Case(seen, Log(accepted=[("id", "tag")], ends=[End("id", "", (TOKENS,))]))


def found(case: Case, *, once: bool = True) -> list[Problem]:
    return judge([case.seen], case.log, EXPECTED, once=once).problems


def shown(case: Case, text: str) -> None:
    case.seen.choices[0].text = text


def left_early(case: Case) -> None:
    case.seen.outcome = "cancelled"
    case.seen.choices[0] = Shown(TEXT[:9])


def test_nothing_is_found_where_every_promise_was_kept() -> None:
    judgement = judge([kept().seen], kept().log, EXPECTED, once=True)
    assert judgement.problems == []
    assert judgement.rows["stream"]["ok"] == judgement.rows["stream"]["asked"] == 1


def test_a_client_that_leaves_may_have_the_beginning_and_its_request_ends_cancelled_or_not() -> None:
    for end in (End("id", "cancelled", (TOKENS[:8],)), End("id", "cancelled"), End("id", "", (TOKENS,))):
        case = kept()
        left_early(case)
        case.log.ends = [end]
        assert found(case) == []


def test_a_cancel_may_cross_the_end_of_the_answer() -> None:
    case = kept()
    case.log.ends = [End("id", "cancelled", (TOKENS,))]
    assert [problem.what for problem in found(case)] == ["failed"]
    case.seen.left = True
    assert found(case) == []


def test_a_client_that_cannot_know_is_content_with_a_right_record() -> None:
    case = kept()
    case.seen.outcome, case.seen.choices[0] = "unknown", Shown()
    assert found(case) == []
    case.log.accepted = case.log.ends = []
    assert found(case) == []


BROKEN: dict[str, tuple[str, Callable[[Case], object]]] = {
    "no terminal event": ("missing", lambda case: setattr(case.log, "ends", [])),
    "two terminal events": ("duplicated", lambda case: setattr(case.log, "ends", [End("id", ""), End("id", "")])),
    "no request in the log": ("missing", lambda case: setattr(case.log, "accepted", [])),
    "accepted twice": ("duplicated", lambda case: setattr(case.log, "accepted", [("id", "tag"), ("other", "tag")])),
    "other text": ("wrong", lambda case: shown(case, TEXT.replace("quick", "quack"))),
    "a hole in the text": ("wrong", lambda case: shown(case, TEXT.replace("quick ", ""))),
    "text twice": ("wrong", lambda case: shown(case, TEXT.replace("quick ", "quick quick "))),
    "text cut short": ("wrong", lambda case: shown(case, TEXT[:-4])),
    "another finish reason": ("wrong", lambda case: setattr(case.seen.choices[0], "finish", "length")),
    "other log-probabilities": ("wrong", lambda case: setattr(case.seen.choices[0], "logprobs", [("the", -3.0)])),
    "log-probabilities left out": ("wrong", lambda case: setattr(case.seen.choices[0], "logprobs", [])),
    "events twice": ("duplicated", lambda case: setattr(case.seen, "repeats", 1)),
    "a gap in the numbers": ("hole", lambda case: setattr(case.seen, "holes", 1)),
    "no end for the client": ("hung", lambda case: setattr(case.seen, "outcome", "hung")),
    "never run": ("hung", lambda case: setattr(case.seen, "outcome", "")),
    "an error for the client": ("failed", lambda case: setattr(case.seen, "outcome", "failed")),
    "an error though the record is ok": ("lost", lambda case: setattr(case.seen, "outcome", "failed")),
    "no end though the record is ok": ("lost", lambda case: setattr(case.seen, "outcome", "hung")),
    "an error in the record": ("failed", lambda case: setattr(case.log, "ends", [End("id", "worker_lost")])),
    "cancelled by nobody": ("failed", lambda case: setattr(case.log, "ends", [End("id", "cancelled", (TOKENS,))])),
    "another record": ("wrong", lambda case: setattr(case.log, "ends", [End("id", "", (TOKENS[4:],))])),
    "a record cut short": ("wrong", lambda case: setattr(case.log, "ends", [End("id", "", (TOKENS[:8],))])),
    "an end of no request": ("extra", lambda case: case.log.ends.append(End("ghost", ""))),
    "a request of no client": ("extra", lambda case: case.log.accepted.append(("ghost", "stranger"))),
    "an open lease": ("lease", lambda case: setattr(case.log, "leases", ["ticket"])),
    "blocks in use": ("held", lambda case: setattr(case.log, "held", ["worker-0"])),
    "a consumer left over": ("residue", lambda case: setattr(case.log, "residue", ["consumer"])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_promise_is_found(name: str) -> None:
    what, break_it = BROKEN[name]
    case = kept()
    break_it(case)
    assert what in {problem.what for problem in found(case)}


def test_a_problem_names_its_request_and_costs_the_row_its_ok() -> None:
    case = kept()
    shown(case, "")
    judgement = judge([case.seen], case.log, EXPECTED, once=True)
    assert [(p.request, p.tag, p.kind) for p in judgement.problems] == [("id", "tag", "stream")]
    assert (judgement.rows["stream"]["ok"], judgement.rows["stream"]["wrong"]) == (0, 1)


def test_a_request_that_was_sent_again_may_be_accepted_twice_where_there_are_no_keys() -> None:
    case = kept()
    case.log.accepted = [("id", "tag"), ("other", "tag")]
    case.log.ends = [End("id", "", (TOKENS,)), End("other", "", (TOKENS,))]
    assert found(case, once=False) == []


def test_copies_of_one_request_are_one_row_and_each_is_looked_at() -> None:
    right, wrong = kept(), kept()
    shown(wrong, "")
    judgement = judge([right.seen, wrong.seen], right.log, EXPECTED, once=True)
    assert judgement.rows["stream"]["asked"] == 1
    assert [problem.what for problem in judgement.problems] == ["wrong"]


def test_an_answer_that_is_asked_for_again_must_be_the_same() -> None:
    assert list(later_problems("id", {0: Shown(TEXT, "stop")}, EXPECTED["r"])) == []
    for other in (Shown(TEXT[:-1], "stop"), Shown(TEXT, "length"), Shown()):
        assert [each.what for each in later_problems("id", {0: other}, EXPECTED["r"])] == ["wrong"]
    assert [each.what for each in later_problems("id", {}, EXPECTED["r"])] == ["wrong"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT[:9], "cut short after 9 of"),
        (TEXT + " and", "4 characters too many"),
        (TEXT.replace("quick ", ""), "a hole of 6 characters after 4"),
        (TEXT.replace("quick ", "quick quick "), "6 characters twice after"),
        (TEXT.replace("fox", "cat"), "another text after 16 of"),
    ],
)
def test_a_difference_is_named(text: str, words: str) -> None:
    assert words in difference(TEXT, text)


def test_processes_that_are_larger_afterwards_than_they_may_be_are_named() -> None:
    mib = 1 << 20
    names = ("gateway-0", "gateway-1", "router-0", "worker-0", "decode-1", "nats")
    before = {name: Footprint(pid, 100 * mib) for pid, name in enumerate(names, 1)}
    after = {
        "gateway-0": Footprint(1, 130 * mib),
        "gateway-1": Footprint(9, 150 * mib),  # also another process than before
        "worker-0": Footprint(4, 170 * mib),
        "decode-1": Footprint(5, 200 * mib),
        "nats": Footprint(6, 300 * mib),
    }
    problems = memory_problems(before, after)
    assert [problem.text.partition(":")[0] for problem in problems] == ["gateway-1", "decode-1"]


def test_processes_that_keep_files_open_are_named() -> None:
    before = {"gateway-0": Footprint(1, 0, 30), "gateway-1": Footprint(2, 0, 30)}
    problems = memory_problems(before, {"gateway-0": Footprint(1, 0, 60), "gateway-1": Footprint(2, 0, 90)})
    assert [(problem.what, problem.text) for problem in problems] == [
        ("files", "gateway-1: 30 open files before, 90 after")
    ]


def test_recovery_is_the_wait_of_the_slowest_stream_that_was_under_way() -> None:
    streams = [[1.0, 2.0, 3.0], [1.5, 6.0], [0.5, 1.0], [9.0, 10.0], []]
    assert recovery(2.0, streams) == 4.0
    assert recovery(20.0, streams) is None
