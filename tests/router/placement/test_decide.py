"""Decisions: a golden score table, and what no decision may ever do."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.settings import RouterMode
from penstock.router.placement.cost import (
    ADAPTER_TOKENS,
    MOST_UNCOMPUTED,
    OCCUPANCY,
    rejection,
    target_costs,
    utilization,
)
from penstock.router.placement.decide import STORED_CANDIDATES, decide
from penstock.router.placement.routing import PATIENCE_S, RoutingContext, RoutingDecision, RoutingRequest, Weights
from penstock.router.state.target_loads import ExpectedLoad, RoutingTarget
from penstock.schemas.cells import HELD_UP, OWN_WORK, PASS_TOKENS
from penstock.schemas.errors import Code
from penstock.schemas.fleet import LoraAdapter, Registration, WorkerState
from tests.properties import examples

MODES: tuple[RouterMode, ...] = ("kv", "round_robin", "random", "least_loaded")


IDLE = ExpectedLoad()


def member(worker: str, *, load: ExpectedLoad = IDLE, rank: int = 0, **more: object) -> RoutingTarget:
    fields: dict[str, object] = {"slots": 4, "total_blocks": 1000, "max_model_len": 4096, "block_size": 32}
    registration = Registration(worker, "m", "aggregated", "mock", 1, **(fields | more))  # type: ignore[arg-type]
    return RoutingTarget((worker, rank), registration, load)


ASK = RoutingRequest("m", prompt_tokens=330, max_tokens=100, prompt_blocks=10)
EDITED = RoutingRequest("m", 1, 1, processors=frozenset({"x", "y"}))
EDITING: dict[str, Any] = {"logits_processors": ("x", "y", "z")}


def test_the_score_table_lists_the_chosen_the_others_and_the_rejected() -> None:
    members = [
        member("busy", load=ExpectedLoad(2, 2, 30, 2000.0, context_blocks=40)),
        member("idle"),
        member("full", load=ExpectedLoad(4, 4)),
        member("leaving", state=WorkerState.draining),
        member("small", total_blocks=10),
        member("short", max_model_len=429),
        member("elsewhere", aliases=()),
    ]
    members[-1] = RoutingTarget(
        ("elsewhere", 0), Registration("e", "x", "aggregated", "mock", 1, 32, 9, 9, 9999), ExpectedLoad()
    )
    choice = decide(RoutingContext(ASK, members, {("busy", 0): 10, ("idle", 0): 2}, "kv", Weights(), 0))
    assert choice.chosen == ("idle", 0)
    assert choice.overlap_blocks == 2
    assert [(c.worker, c.score, c.excluded) for c in choice.candidates] == [
        ("idle", OWN_WORK * (330 - 64) + OCCUPANCY * 32 * 10, ""),
        ("busy", 2000 * (1 + 10 / PASS_TOKENS) + (OWN_WORK + 2 * HELD_UP) * 10 + OCCUPANCY * 32 * (40 + 10), ""),
        ("full", 0.0, "full"),
        ("leaving", 0.0, "draining"),
        ("small", 0.0, "too_small"),
        ("short", 0.0, "too_long"),
    ]


def test_the_sequences_that_a_prompt_holds_up_count_up_to_an_end() -> None:
    members = [member(f"{n}", load=ExpectedLoad(n, n), slots=512) for n in (20, 100, 256)]
    members.append(member("computing", load=ExpectedLoad(20, 20, computing=4), slots=512))
    choice = decide(RoutingContext(ASK, members, {}, "kv", Weights(), 0))
    scores = {each.worker: each.score for each in choice.candidates}
    assert scores["100"] - scores["20"] == 330 * 2
    assert scores["256"] == scores["100"]
    assert scores["computing"] - scores["20"] == pytest.approx(330 * (4 / 8 - 4 / 40))


def test_a_request_with_an_adapter_goes_to_workers_that_have_it_rather_on_their_device() -> None:
    """The one that has it there may have more to do, up to what loading costs."""
    ready, waiting = LoraAdapter("poet", "0a", loaded=True), LoraAdapter("poet", "0a")
    older, broken = LoraAdapter("poet", "0b", loaded=True), LoraAdapter("poet", error="there is no such folder")
    asked = msgspec.structs.replace(ASK, adapter="poet@0a")

    def decided(backlog: float, **more: Any) -> RoutingDecision:
        members = [
            member("here", adapters=(ready,), load=ExpectedLoad(1, 1, 0, backlog), slots=512),
            member("there", adapters=(waiting,), slots=512),
            member("other", adapters=(older,)),
            member("failed", adapters=(broken,)),
            member("none"),
        ]
        return decide(
            RoutingContext(asked, [each for each in members if each.id[0] not in more], {}, "kv", Weights(), 0)
        )

    found = decided(100.0)
    scores = {each.worker: each.score for each in found.candidates}
    assert found.chosen == ("here", 0)
    assert {each.worker: each.excluded for each in found.candidates} == {
        "here": "",
        "there": "",
        "other": "no_adapter",
        "failed": "no_adapter",
        "none": "no_adapter",
    }
    assert scores["there"] == OWN_WORK * 330 + OCCUPANCY * 32 * 10 + ADAPTER_TOKENS
    assert decided(2 * ADAPTER_TOKENS).chosen == ("there", 0)
    nowhere = decided(0.0, here=True, there=True)
    assert (nowhere.route, nowhere.reason, nowhere.code) == ((), "no_adapter", None), "it waits, within a bound"


def test_overlap_wins_until_load_outweighs_it() -> None:
    def pick(backlog: float) -> str:
        members = [member("holder", load=ExpectedLoad(1, 1, 0, backlog)), member("idle")]
        chosen = decide(RoutingContext(ASK, members, {("holder", 0): 8}, "kv", Weights(), 0)).chosen
        assert chosen
        return chosen[0]

    assert [pick(backlog) for backlog in (0, 480, 540, 2000)] == ["holder", "holder", "idle", "idle"]


LOADS = st.builds(ExpectedLoad, st.integers(0, 6), st.integers(0, 6), st.integers(0, 200), st.floats(0, 10_000))
MEMBERS = st.lists(
    st.tuples(LOADS, st.sampled_from(list(WorkerState)), st.integers(5, 40), st.integers(200, 600), st.booleans()),
    max_size=24,
).map(
    lambda rows: [
        member(f"w{i}", load=load, state=state, total_blocks=blocks, max_model_len=length, rank=int(ranked))
        for i, (load, state, blocks, length, ranked) in enumerate(rows)
    ]
)


LONG = {"total_blocks": 10_000, "max_model_len": 1 << 20}
QUEUED = ExpectedLoad(1, 1, 1000, MOST_UNCOMPUTED + 1.0, computing=1)


@pytest.mark.parametrize(
    ("tokens", "cached", "load", "fits"),
    [
        (330, 0, QUEUED, False),
        (330, 0, ExpectedLoad(1, 1, 1000, float(MOST_UNCOMPUTED), computing=1), True),
        (330, 0, ExpectedLoad(1, 1, 1000, MOST_UNCOMPUTED + 1.0), True),  # an estimate, of a worker without KV events
        (640, 9, QUEUED, False),
        (640, 10, QUEUED, True),  # half of its 20 blocks
        (32 * 600, 600 - PASS_TOKENS // 32 - 1, QUEUED, False),
        (32 * 600, 600 - PASS_TOKENS // 32, QUEUED, True),  # the rest is computed in a pass
    ],
)
def test_a_busy_worker_with_much_to_compute_has_room_only_for_prompts_that_it_has_most_of(
    tokens: int, cached: int, load: ExpectedLoad, fits: bool
) -> None:
    ask = RoutingRequest("m", tokens, 1, prompt_blocks=tokens // 32)
    context = RoutingContext(ask, [member("w", load=load, **LONG)], {("w", 0): cached}, "kv", Weights(), 0)
    assert decide(context).reason == ("" if fits else "full")


def test_a_new_request_waits_for_a_better_worker_for_as_long_as_that_saves() -> None:
    ask = RoutingRequest("m", 40_000, 1, prompt_blocks=1250)
    members = [member("has", load=QUEUED, **LONG), member("idle", **LONG)]
    overlaps = {("has", 0): 900}

    def after(waited_s: float) -> RoutingDecision:
        return decide(RoutingContext(ask, members, overlaps, "kv", Weights(), 0, waited_s=waited_s))

    assert after(0.0).reason == "better_full"
    assert after(PATIENCE_S * 900 * 32).chosen == ("idle", 0)


@examples(200)
@given(
    MEMBERS,
    st.sampled_from(MODES),
    st.integers(0, 99),
    st.floats(0, 2),
    st.dictionaries(st.integers(0, 24), st.integers(1, 10)),
)
def test_a_decision_is_allowed_repeatable_and_explained(
    members: list[RoutingTarget], mode: RouterMode, seed: int, temperature: float, held: dict[int, int]
) -> None:
    overlaps = {m.id: held[i] for i, m in enumerate(members) if i in held}
    weights = Weights(temperature=temperature)
    choice = decide(RoutingContext(ASK, members, overlaps, mode, weights, seed, number=seed))
    assert choice == decide(RoutingContext(ASK, members, overlaps, mode, weights, seed, number=seed))
    context = RoutingContext(ASK, members, overlaps, mode, weights, seed, number=seed)
    costs = target_costs(context)
    usable = {m.id: m for m in members if not rejection(ASK, m) and (mode != "kv" or costs[m.id].fits)}
    assert (choice.chosen in usable) == bool(usable)
    assert len(choice.candidates) == min(STORED_CANDIDATES, len(members))
    if choice.chosen is None:
        assert choice.reason
        return
    scores = {p: costs[p].whole if mode == "kv" else utilization(m) for p, m in usable.items()}
    first = choice.candidates[0]
    assert (first.worker, first.rank) == choice.chosen
    assert first.score == scores[choice.chosen]
    assert choice.overlap_blocks == overlaps.get(choice.chosen, 0)
    if temperature == 0 and mode in ("kv", "least_loaded"):
        assert scores[choice.chosen] == pytest.approx(min(scores.values()), abs=1e-6)


def test_ties_are_broken_evenly_and_round_robin_takes_turns() -> None:
    members = [member(f"w{i}") for i in range(4)]
    picks = [decide(RoutingContext(ASK, members, {}, "kv", Weights(), seed)).chosen for seed in range(400)]
    assert min(picks.count(m.id) for m in members) > 60
    turns = [decide(RoutingContext(ASK, members, {}, "round_robin", Weights(), 0, number=t)).chosen for t in range(8)]
    assert turns == [m.id for m in members] * 2


def test_temperature_prefers_the_better_without_always_taking_it() -> None:
    members, weights = [member("a"), member("b", load=ExpectedLoad(1, 1, 50))], Weights(temperature=1.0)
    picks = [decide(RoutingContext(ASK, members, {}, "kv", weights, seed)).chosen for seed in range(400)]
    assert 50 < picks.count(("b", 0)) < 160  # softmax over 0 and 1: 27 %


@pytest.mark.parametrize(
    ("members", "ask", "mode", "reason", "code"),
    [
        ([], ASK, "kv", "no_worker", None),
        ([member("a", load=ExpectedLoad(4, 4)), member("b", total_blocks=1)], ASK, "kv", "full", None),
        ([member("a", total_blocks=1)], ASK, "kv", "too_small", Code.out_of_blocks),
        ([member("a", max_model_len=100)], ASK, "kv", "too_long", Code.context_length_exceeded),
        ([member("a")], ASK, "direct", "worker_not_named", Code.invalid_request),
        ([member("a")], RoutingRequest("m", 1, 1, worker="b"), "direct", "unknown_worker", Code.invalid_request),
        ([member("a", logits_processors=("x",))], EDITED, "kv", "no_processor", Code.invalid_request),
        ([member("a"), member("b", **EDITING, load=ExpectedLoad(4, 4))], EDITED, "kv", "full", None),
    ],
)
def test_a_refusal_says_why_and_whether_waiting_helps(
    members: list[RoutingTarget], ask: RoutingRequest, mode: RouterMode, reason: str, code: Code | None
) -> None:
    choice = decide(RoutingContext(ask, members, {}, mode, Weights(), 0))
    assert (choice.chosen, choice.reason, choice.code) == (None, reason, code)


def test_direct_finds_a_worker_by_id_or_name_and_no_other() -> None:
    members = [member("a"), member("b", name="named")]
    for wanted in ("b", "named"):
        ask = RoutingRequest("m", 1, 1, worker=wanted)
        assert decide(RoutingContext(ask, members, {}, "direct", Weights(), 0)).chosen == ("b", 0)


def test_only_a_worker_with_all_the_logits_processors_is_taken() -> None:
    busy = member("b", load=ExpectedLoad(3, 3, 500), **EDITING)
    members = [member("a", logits_processors=("x",)), busy, member("c")]
    assert decide(RoutingContext(EDITED, members, {}, "kv", Weights(), 0)).chosen == busy.id
    assert decide(RoutingContext(ASK, members, {}, "kv", Weights(), 0)).chosen != busy.id


def test_an_empty_worker_takes_a_request_wider_than_its_slots_and_a_busy_one_does_not() -> None:
    wide = RoutingRequest("m", 1, 1, n=9)
    assert rejection(wide, member("a")) == ""
    assert rejection(wide, member("a", load=ExpectedLoad(1, 1))) == "full"


def test_a_worker_that_failed_the_request_is_taken_only_if_it_is_the_last() -> None:
    ask = RoutingRequest("m", 330, 100, 10, avoid=frozenset({"a"}))
    both = [member("a"), member("b", load=ExpectedLoad(1, 1, 500))]
    assert decide(RoutingContext(ask, both, {("a", 0): 10}, "kv", Weights(), 0)).chosen == ("b", 0)
    assert decide(RoutingContext(ask, both[:1], {}, "kv", Weights(), 0)).chosen == ("a", 0)
