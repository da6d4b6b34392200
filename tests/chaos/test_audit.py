"""The auditor finds every kind of broken promise, and nothing where all were kept: each case is one log."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.schemas.wire import pack_tokens
from tests.chaos.audit import (
    GRACE_S,
    REFUSED_S,
    SLACK_S,
    UNDISTURBED,
    Circumstances,
    End,
    Expected,
    Footprint,
    Log,
    Problem,
    Streamed,
    difference,
    judge,
    later_problems,
    memory_problems,
    miscounted,
    recovery,
)
from tests.chaos.brokers import heap_of, heap_problems
from tests.chaos.plan import Act, Hit
from tests.chaos.seen import Seen, Shown

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENS = pack_tokens(range(9))
EXPECTED = {"r": Expected({0: Shown(TEXT, "stop", [("the", -0.7)])}, (TOKENS,))}


class Case(NamedTuple):
    """One request with one client, as it should be; a test breaks one thing in it."""

    seen: Seen
    log: Log


def kept(kind: str = "stream") -> Case:
    seen = Seen("tag", "r", kind)
    seen.request, seen.outcome, seen.began, seen.ended = "id", "answered", 100.0, 110.0
    seen.choices[0] = Shown(TEXT, "stop", [("the", -0.701)])
    end = End("id", "", (TOKENS,), at=110.0, worker="worker-1-f00")
    streamed = {"id": Streamed({0: 9}, 109.9)}
    return Case(seen, Log(accepted=[("id", "tag")], ends=[end], times={"id": 100.0}, streamed=streamed))


def found(case: Case, *, once: bool = True, around: Circumstances = UNDISTURBED) -> list[Problem]:
    return judge([case.seen], case.log, EXPECTED, once=once, around=around).problems


def kinds(case: Case, around: Circumstances = UNDISTURBED) -> set[str]:
    return {problem.what for problem in found(case, around=around)}


def hits(*names: str, at: float = 105.0, act: Act = Act.kill, hold_s: float = 0.0) -> Circumstances:
    return Circumstances([Hit(at, act, name, hold_s) for name in names])


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
    for code, tokens in (("cancelled", (TOKENS[:8],)), ("cancelled", ()), ("", (TOKENS,))):
        case = kept()
        left_early(case)
        case.log.ends = [case.log.ends[0]._replace(code=code, tokens=tokens)]
        assert found(case) == []


def test_a_cancel_may_cross_the_end_of_the_answer() -> None:
    case = kept()
    case.log.ends = [End("id", "cancelled", (TOKENS,))]
    assert [problem.what for problem in found(case)] == ["failed"]
    case.seen.left = True
    assert found(case) == []


def test_a_client_that_cannot_know_is_content_with_a_right_record() -> None:
    case = kept()
    case.seen.outcome, case.seen.choices[0], case.seen.request = "unknown", Shown(), ""
    case.seen.ended = 106.0
    assert found(case, around=hits("gateway-0")) == []
    case.log.accepted = case.log.ends = []
    assert found(case, around=hits("gateway-0")) == []


@pytest.mark.parametrize(
    "around", [UNDISTURBED, hits("worker-0"), hits("gateway-0", at=60.0), hits("gateway-1", at=120)]
)
def test_a_connection_without_a_key_breaks_only_if_a_gateway_was_disturbed(around: Circumstances) -> None:
    case = kept()
    case.seen.outcome, case.seen.choices[0], case.seen.request = "unknown", Shown(), ""
    assert kinds(case, around) == {"broken"}


def test_an_acceptance_that_was_not_confirmed_needs_a_fault_of_the_broker_and_may_end_cancelled() -> None:
    case = kept()
    case.seen.outcome, case.seen.choices[0], case.seen.request, case.seen.left = "unknown", Shown(), "", True
    case.log.ends = [case.log.ends[0]._replace(code="cancelled", tokens=())]
    assert kinds(case, hits("nats")) == set()
    assert kinds(case, hits("worker-0")) == {"broken"}


def test_a_cancelled_client_that_was_told_an_id_is_in_the_log() -> None:
    case = kept()
    left_early(case)
    case.log.accepted, case.log.ends = [], []
    assert kinds(case) == {"missing"}


def test_an_ok_record_has_all_tokens_or_says_that_they_did_not_fit() -> None:
    for tokens in ((b"",), ()):
        case = kept()
        case.log.ends = [case.log.ends[0]._replace(tokens=tokens)]
        assert "wrong" in kinds(case), tokens
        case.log.ends = [case.log.ends[0]._replace(left_out=("tokens",))]
        assert kinds(case) == set()
    case = kept()
    case.log.ends = [case.log.ends[0]._replace(left_out=("tokens",))]
    assert kinds(case) == {"kept"}


LATE: dict[str, dict[str, Streamed]] = {
    "never": {},
    "in part": {"id": Streamed({0: 8}, 109.0)},
    "late": {"id": Streamed({0: 9}, 113.0)},
}


@pytest.mark.parametrize("name", LATE)
def test_an_answer_that_only_its_record_completes_is_counted_and_needs_a_cause(name: str) -> None:
    case = kept()
    case.log.streamed = LATE[name]
    for around in (UNDISTURBED, hits("router-0"), hits("worker-0"), hits("nats", at=60.0), hits("nats", at=140.0)):
        assert kinds(case, around) == {"unsaid"}
    for around in (hits("nats"), hits("worker-1"), hits("all"), hits("worker-1", at=80, act=Act.stop, hold_s=20.0)):
        judgement = judge([case.seen], case.log, EXPECTED, once=True, around=around)
        assert judgement.problems == []
        assert judgement.rows["stream"]["late"] == 1


def test_tokens_that_came_in_time_are_not_counted_as_late() -> None:
    case = kept()
    assert judge([case.seen], case.log, EXPECTED, once=True).rows["stream"]["late"] == 0
    case.log.streamed = {"id": Streamed({0: 9}, 110.5)}  # resent, and stored just behind the end
    assert judge([case.seen], case.log, EXPECTED, once=True).rows["stream"]["late"] == 0


@pytest.mark.parametrize(("outcome", "kind"), [("denied", "denied"), ("limited", "limited")])
def test_only_the_client_that_expects_it_is_refused_and_nothing_of_it_is_accepted(outcome: str, kind: str) -> None:
    case = kept(kind)
    case.seen.outcome, case.seen.choices[0], case.seen.request = outcome, Shown(), ""
    assert "extra" in kinds(case), "accepted all the same"
    case.log.accepted, case.log.ends = [], []
    assert kinds(case) == set()
    other = kept("stream")
    other.seen.outcome, other.seen.choices[0], other.seen.request = outcome, Shown(), ""
    other.log.accepted, other.log.ends = [], []
    assert kinds(other) == {"failed"}


def test_a_client_without_a_valid_key_that_is_answered_was_admitted() -> None:
    assert kinds(kept("denied")) == {"admitted"}


@pytest.mark.parametrize("spacing_s", [1.9, 2.1])
def test_a_limited_key_gets_no_more_requests_in_any_minute_than_it_has(spacing_s: float) -> None:
    several, log = [], Log(accepted=[], ends=[], times={}, streamed=None)
    for number in range(60):
        case = kept("limited")
        name = f"{number}"
        case.seen.tag, case.seen.request = name, name
        several.append(case.seen)
        log.accepted.append((name, name))
        log.ends.append(case.log.ends[0]._replace(request=name))
        log.times[name] = 1000 + number * spacing_s
    problems = judge(several, log, EXPECTED, once=True, around=Circumstances(rpm=30)).problems
    assert [problem.what for problem in problems] == (["admitted"] if spacing_s < 2 else [])


def test_a_deleted_response_is_in_no_part_of_the_log_and_was_right_before() -> None:
    case = kept("delete")
    case.seen.outcome = "deleted"
    assert kinds(case) == {"kept"}
    case.log.accepted = []
    assert "kept" in kinds(case), "its record is left"
    case.log.ends = []
    assert kinds(case) == set()
    shown(case, TEXT[1:])
    assert kinds(case) == {"wrong"}
    stream = kept()
    stream.seen.outcome = "deleted"
    assert "failed" in kinds(stream)


@pytest.mark.parametrize(
    ("outcome", "finished", "expected"),
    [("answered", True, set()), ("unknown", False, set()), ("hung", False, {"hung", "missing"})],
)
def test_what_the_runner_deleted_for_a_client_excuses_nothing_else(
    outcome: str, finished: bool, expected: set[str]
) -> None:
    """One that cannot know its request is not told of it; one that hung has hung."""
    case = kept("delete")
    case.seen.outcome = outcome
    case.log.accepted, case.log.ends = [], []
    if not finished:
        case.seen.choices[0] = Shown()
        case.seen.request = "r" if outcome == "hung" else ""
    case.seen.deleted_for_it("r")
    assert kinds(case, hits("gateway-0")) == expected


def test_a_request_that_ran_in_another_cell_was_accepted_once_and_is_erased_there_too() -> None:
    case = kept()
    carry(case, End("copy", ""))
    assert kinds(case) == set()
    case = kept("delete")
    case.seen.outcome, case.seen.request = "deleted", "id"
    case.log.accepted, case.log.ends, case.log.carried = [], [], {"copy": "id"}
    assert "kept" in kinds(case)


def test_what_only_memory_had_may_be_lost_with_broker_and_gateway_together_and_not_otherwise() -> None:
    case = kept("no-store")
    case.seen.outcome, case.seen.code, case.seen.choices[0] = "failed", "content_lost", Shown()
    case.log.ends = [case.log.ends[0]._replace(code="content_lost", tokens=(), left_out=("prompt", "tokens"))]
    for around in (hits("nats", "gateway-0"), hits("all", act=Act.crash), hits("nats-0", "nats-2", "gateway-0")):
        assert kinds(case, around) == set()
    stops = hits("nats", "gateway-0", act=Act.stop, hold_s=3.0)
    one_of_three = hits("nats-1", "gateway-0")
    for around in (UNDISTURBED, hits("nats"), hits("gateway-0"), hits("nats", "worker-0"), stops, one_of_three):
        assert "failed" in kinds(case, around)
    case.seen.outcome, case.seen.code = "unknown", ""  # its client cannot know; the record may say so all the same
    case.seen.request = ""
    assert kinds(case, hits("nats", "gateway-0")) == set()
    assert "failed" in kinds(case, hits("gateway-0"))
    stored = kept()
    stored.seen.outcome, stored.seen.code = "failed", "content_lost"
    assert "failed" in kinds(stored, hits("nats", "gateway-0"))


def test_of_an_image_only_the_number_of_tokens_is_known() -> None:
    expected = {"r": EXPECTED["r"]._replace(exact=False)}
    case = kept("picture")
    case.log.ends = [case.log.ends[0]._replace(tokens=(TOKENS[::-1],))]
    assert judge([case.seen], case.log, expected, once=True).problems == []
    case.log.ends = [case.log.ends[0]._replace(tokens=(TOKENS[4:],))]
    assert [each.what for each in judge([case.seen], case.log, expected, once=True).problems] == ["wrong"]


@pytest.mark.parametrize(("waited_s", "what"), [(GRACE_S - 10, {"failed", "lost"}), (GRACE_S + 1, set())])
def test_an_answer_is_called_erased_only_once_its_grace_is_over(waited_s: float, what: set[str]) -> None:
    case = kept("no-store")
    case.seen.outcome, case.seen.code, case.seen.choices[0] = "failed", "request_erased", Shown(TEXT[:5])
    case.seen.ended = case.log.ends[0].at + waited_s
    case.log.ends = [case.log.ends[0]._replace(tokens=(b"",), left_out=("prompt", "tokens"))]
    assert kinds(case) == what


def test_a_refusal_takes_no_longer_than_promised_beside_the_time_for_which_the_gateway_stood_still() -> None:
    case = kept()
    case.seen.refusal_s = REFUSED_S + SLACK_S - 1
    assert kinds(case) == set()
    case.seen.refusal_s += 5
    assert kinds(case) == {"slow"}
    assert kinds(case, hits("gateway-1", at=101.0, act=Act.stop, hold_s=6.0)) == set()
    assert kinds(case, hits("worker-1", at=101.0, act=Act.stop, hold_s=6.0)) == {"slow"}


def carry(case: Case, *ends: End) -> None:
    """It has run in another cell as "copy"."""
    case.log.carried, case.log.ends = {"copy": "id"}, [*case.log.ends, *ends]


BROKEN: dict[str, tuple[str, Callable[[Case], object]]] = {
    "no terminal event": ("missing", lambda case: setattr(case.log, "ends", [])),
    "two terminal events": ("duplicated", lambda case: setattr(case.log, "ends", [End("id", ""), End("id", "")])),
    "no request in the log": ("missing", lambda case: setattr(case.log, "accepted", [])),
    "accepted twice": ("duplicated", lambda case: setattr(case.log, "accepted", [("id", "tag"), ("other", "tag")])),
    "run in another cell for nobody": ("extra", lambda case: setattr(case.log, "carried", {"copy": "nobody"})),
    "ended twice in another cell": ("duplicated", lambda case: carry(case, End("copy", ""), End("copy", ""))),
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
    "words on the disk": ("kept", lambda case: setattr(case.log, "on_disk", ["no-store-0: words"])),
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


FIELDS: dict[str, Callable[[Any], Any]] = {
    "request": lambda value: "other",
    "code": lambda value: "internal",
    "tokens": lambda value: (value[0][::-1],),
}


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_of_a_terminal_event_can_be_another_unnoticed(field: str) -> None:
    case = kept()
    end = case.log.ends[0]
    case.log.ends = [end._replace(**{field: FIELDS[field](getattr(end, field))})]
    assert found(case) != []


@given(st.data())
def test_whatever_characters_of_an_answer_are_lost_doubled_or_changed_it_is_found(data: st.DataObject) -> None:
    case = kept()
    at = data.draw(st.integers(0, len(TEXT) - 1))
    behind = data.draw(st.integers(at + 1, len(TEXT)))
    part = TEXT[at:behind]
    put = data.draw(st.sampled_from(("", part * 2, part[::-1], part.upper(), f"{part} ")))
    assume(put != part)
    shown(case, TEXT[:at] + put + TEXT[behind:])
    case.seen.outcome = data.draw(st.sampled_from(("answered", "cancelled", "failed")))
    if case.seen.outcome == "answered" or not TEXT.startswith(case.seen.choices[0].text):
        assert "wrong" in kinds(case)


def test_a_request_that_was_sent_again_may_be_accepted_twice_where_there_are_no_keys() -> None:
    case = kept()
    case.log.accepted = [("id", "tag"), ("other", "tag")]
    case.log.ends = [case.log.ends[0], case.log.ends[0]._replace(request="other")]
    case.log.streamed = {name: Streamed({0: 9}, 109.0) for name in ("id", "other")}
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


def test_of_a_call_that_was_cut_off_a_whole_answer_has_the_text() -> None:
    streamed = Expected({0: Shown('note{"ages": [1, 2', "length")})
    whole = Shown('<tool_call>\n{"name": "note", "arguments": {"ages": [1, 2', "length")
    assert list(later_problems("id", {0: whole}, streamed, "note")) == []
    for called, other in (("", whole), ("note", Shown(whole.text[:-1], "length")), ("note", Shown(whole.text, "stop"))):
        assert [each.what for each in later_problems("id", {0: other}, streamed, called)] == ["wrong"]


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
    before = {"gateway-0": Footprint(1, 0, 30), "gateway-1": Footprint(2, 0, 30, {"socket": 20, "other": 10})}
    now = Footprint(2, 0, 90, {"socket": 60, "msgs of ps_WORK": 25, "other": 5})
    problems = memory_problems(before, {"gateway-0": Footprint(1, 0, 60), "gateway-1": now})
    assert [(problem.what, problem.text) for problem in problems] == [
        ("files", "gateway-1: 30 open files before, 90 after: +25 msgs of ps_WORK, +40 socket")
    ]


def test_a_broker_may_refer_to_so_much_for_each_stored_request_however_much_garbage_it_has() -> None:
    mib = 1 << 20
    assert not memory_problems({"nats-0": Footprint(1, 50 * mib)}, {"nats-0": Footprint(1, 400 * mib)})
    before = {"nats-0": 6 * mib, "nats-1": 6 * mib, "nats-2": 6 * mib}
    after = {"nats-0": 16 * mib, "nats-1": 30 * mib}  # the third is away
    assert heap_problems(before, after, 3 * 1024) == [
        "nats-1 uses 30 MiB after 3072 more requests, 6 before, 8192 bytes a request"
    ]


PROFILE = """heap profile: 5: 8661000 [9: 9900000] @ heap/1048576
1: 8388608 [2: 16777216] @ 0x1 0x2
#\t0x1\tgithub.com/nats-io/nats-server/v2/server.init.func10+0x24\t\t/src/server/filestore.go:1
#\t0x2\tgithub.com/nats-io/nats-server/v2/server.getMsgBlockBuf+0x9\t\t/src/server/filestore.go:2

3: 196608 [3: 196608] @ 0x3
#\t0x3\tgithub.com/nats-io/nats-server/v2/server.(*client).readLoop+0x24\t/src/server/client.go:1


# runtime.MemStats
# Alloc = 20971520
# HeapAlloc = 20971520
"""


def test_blocks_of_files_in_memory_are_no_part_of_what_a_broker_keeps() -> None:
    assert heap_of(PROFILE) == 20 * 2**20 - 8 * 2**20


def test_recovery_is_the_wait_of_the_slowest_stream_that_was_under_way() -> None:
    streams = [[1.0, 2.0, 3.0], [1.5, 6.0], [0.5, 1.0], [9.0, 10.0], []]
    assert recovery(2.0, streams) == 4.0
    assert recovery(20.0, streams) is None


def test_what_a_client_was_told_that_it_used_is_what_its_record_has() -> None:
    case = kept()
    case.seen.usage = (30, 9)
    case.log.ends[0:1] = [case.log.ends[0]._replace(usage=(30, 9))]  # type: ignore[index]
    assert kinds(case) == set()
    case.seen.usage = (30, 10)
    assert kinds(case) == {"usage"}


NOTHING_MORE = {"requests": 0, "prompt": 0, "completion": 0}


@pytest.mark.parametrize(
    ("more", "deleted", "most", "lines"),
    [
        ({}, 0, 0, 0),
        ({"requests": 1, "prompt": 20, "completion": 3}, 1, 1, 0),
        ({"requests": 1, "prompt": 20, "completion": 3}, 0, 1, 0),
        ({}, 1, 1, 1),
        ({"requests": 1, "prompt": 20}, 0, 0, 2),
        ({"requests": 3, "prompt": 60}, 1, 2, 1),
        ({"completion": -3}, 0, 0, 1),
        ({"completion": -3}, 0, 1, 1),
    ],
)
def test_the_ledger_has_what_the_records_have_and_what_was_deleted(
    more: dict[str, int], deleted: int, most: int, lines: int
) -> None:
    before = {"requests": 2, "prompt": 9, "completion": 5}
    after = {name: before[name] + each for name, each in (NOTHING_MORE | more).items()}
    assert len(list(miscounted(before, after, deleted, most))) == lines
