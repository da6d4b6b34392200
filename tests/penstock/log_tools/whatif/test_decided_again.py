"""What a job records of its decision suffices to decide again."""

from collections.abc import Mapping

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.log_tools.whatif.change import UNRECORDED, candidates_of, decide_again, insufficient
from penstock.router.placement.decision_inputs import Decisions, array_decisions, brought_back, links, with_pairs
from penstock.router.placement.routing import RoutingDecision, RoutingRequest, Weights
from penstock.router.state.holders import TargetId, TierDepths
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import LoraAdapter, Registration
from penstock.schemas.jobs import Decision, DecisionInputs, Job, LoadHeader
from penstock.schemas.transfer import Endpoint, Memory
from tests.schemas.samples import REQUEST

BLOCK = 16


def job(decision: RoutingDecision, blocks: int, inputs: DecisionInputs, mode: str = "kv") -> Job:
    first = decision.route[0]
    request = msgspec.structs.replace(REQUEST, prompt=bytes(4 * (blocks * BLOCK + 3)), n=1, worker="")
    route = decision.route if len(decision.route) > 1 else ()
    record = Decision(
        mode, first.worker, "r", 1, decision.candidates, prompt_blocks=blocks, rank=first.rank, route=route
    )
    return Job(msgspec.Raw(msgspec.msgpack.encode(request)), 1, record, inputs=inputs)


@given(
    loads=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 3), st.integers(0, 20)), max_size=30),
    workers=st.integers(1, 20),
    slow=st.integers(0, 3),
    asked=st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)),
    held=st.dictionaries(st.integers(0, 19), st.integers(1, 25)),
    weights=st.builds(Weights, overlap=st.sampled_from([0.0, 0.5, 1.0]), prefill=st.sampled_from([0.5, 1.0])),
    seed=st.integers(0, 99),
    now_ns=st.integers(0, 3_000_000),
    session=st.sampled_from([(), (("w00", 0),), (("w01", 1),)]),
    adapted=st.booleans(),
    lower=st.just({}) | st.dictionaries(st.integers(0, 19), st.tuples(st.integers(0, 25), st.integers(0, 25))),
)
def test_the_record_of_a_decision_leads_to_the_same_choice_and_scores(
    loads: list[tuple[int, int, int]],
    workers: int,
    slow: int,
    asked: tuple[int, int, int],
    held: dict[int, int],
    weights: Weights,
    seed: int,
    now_ns: int,
    session: tuple[TargetId, ...],
    adapted: bool,
    lower: dict[int, tuple[int, int]],
) -> None:
    tracker = LoadTracker()
    for number in range(workers):
        fields = (f"w{number:02}", "m", "aggregated", "mock", 1, BLOCK, 40, 2, 1 << 20)
        adapter = LoraAdapter("poet", "0a", loaded=number % 3 == 0)
        tracker.put_worker(Registration(*fields, dp_size=1 + number % 2, adapters=(adapter,), tier_costs=(0.2, 0.7)))
    for number, (at, family, blocks) in enumerate(loads):
        prompt = [family * 1000 + n for n in range(blocks)] if number % 3 else []
        load = LoadHeader(blocks * BLOCK + 5, 0, "", 1 << 62, "")
        tracker.admit(str(number), 1, f"w{at:02}", load, now_ns=0, keys=prompt)
        if number < slow and prompt:
            tracker.stored((f"w{at:02}", 0), prompt, 10_000_000_000)
    family, blocks, shared = asked
    keys = [family * 1000 + n for n in range(blocks)]
    request = RoutingRequest(
        "m",
        blocks * BLOCK + 3,
        5,
        prompt_blocks=blocks,
        shared_blocks=min(shared, blocks),
        session=session,
        adapter="poet@0a" if adapted else "",
    )
    overlaps: Mapping[TargetId, int] = {(f"w{at:02}", 0): count for at, count in held.items() if at < workers}
    if lower:
        below = [{(f"w{at:02}", 0): count[tier] for at, count in lower.items() if count[tier]} for tier in (0, 1)]
        overlaps = TierDepths(overlaps, below)
    decision = Decisions(tracker, array_decisions(tracker), "kv", weights).decide(
        request, keys, overlaps, now_ns=now_ns, seed=seed
    )
    if not decision.route:
        return
    unloaded = tuple(f"w{number:02}" for number in range(workers) if number % 3) if adapted else ()
    brought = brought_back(tracker, decision.candidates, overlaps, keys) if isinstance(overlaps, TierDepths) else ()
    inputs = DecisionInputs(
        seed,
        shared_blocks=request.shared_blocks,
        block_size=BLOCK,
        session=session,
        unloaded=unloaded,
        lower_tiers=tuple(brought),
    )
    again = decide_again(job(decision, blocks, inputs), weights)
    assert again is not None
    assert again.chosen == decision.chosen
    for line, score in zip(decision.candidates, again.scores, strict=True):
        assert (score is None) == bool(line.excluded)
        assert score is None or abs(score - line.score) <= 1e-6 * max(1.0, abs(score))


def test_a_prefill_worker_takes_no_request_that_its_decode_worker_computes_itself() -> None:
    tracker = LoadTracker()
    for name, role in (("p", "prefill"), ("d", "decode")):
        tracker.put_worker(Registration(name, "m", role, "mock", 1, BLOCK, 40, 2, 1 << 20))
    # The decode worker is busy, so the idle prefill worker would cost less, were it to be asked for the whole request.
    tracker.admit("other", 1, "d", LoadHeader(3 * BLOCK, 0, "", 1 << 62, ""), now_ns=0, keys=[7])
    request = RoutingRequest("m", BLOCK + 3, 5, prompt_blocks=1)
    decision = Decisions(tracker, None, "kv", Weights()).decide(request, [1], {}, now_ns=1, seed=1)
    made = job(decision, 1, DecisionInputs(1, block_size=BLOCK))
    assert (made.decision.chosen, made.decision.route) == ("d", ())
    prefill, decode = sorted(made.decision.candidates, key=lambda each: each.worker, reverse=True)
    assert prefill.score < decode.score
    again = decide_again(made)
    assert again is not None
    assert again.chosen == ("d", 0)
    assert candidates_of(made) == (decode,)


def test_a_record_that_does_not_suffice_is_left_alone() -> None:
    tracker = LoadTracker()
    tracker.put_worker(Registration("w", "m", "aggregated", "mock", 1, BLOCK, 40, 2, 1 << 20))
    request = RoutingRequest("m", BLOCK + 3, 5, prompt_blocks=1)
    decision = Decisions(tracker, None, "kv", Weights()).decide(request, [1], {}, now_ns=1, seed=1)
    inputs = DecisionInputs(1, block_size=BLOCK)
    assert decide_again(job(decision, 1, inputs)) is not None
    assert decide_again(job(decision, 1, DecisionInputs(1))) is None
    assert decide_again(job(decision, 1, inputs, mode="round_robin")) is None
    assert decide_again(job(decision, 1, inputs), Weights(temperature=0.5)) is None
    assert decide_again(msgspec.structs.replace(job(decision, 1, inputs), inputs=None)) is None


_ROLES = st.lists(st.sampled_from(["aggregated", "prefill", "decode", "decode", "prefill"]), min_size=2, max_size=9)
_PLACES = st.lists(
    st.tuples(st.sampled_from(["", "h1", "h2"]), st.booleans(), st.integers(0, 3)), min_size=9, max_size=9
)


@given(
    roles=_ROLES,
    places=_PLACES,
    loads=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(0, 20)), max_size=40),
    held=st.dictionaries(st.integers(0, 8), st.integers(1, 25)),
    asked=st.tuples(st.integers(0, 3), st.integers(1, 20)),
    weights=st.builds(
        Weights,
        overlap=st.sampled_from([0.5, 1.0]),
        transfer=st.sampled_from([0.0, 0.5, 1.0]),
        local_prefill_tokens=st.sampled_from([-1, 0, 2 * BLOCK, 500]),
        prefill_queue_tokens=st.sampled_from([0, 1, 5 * BLOCK, 20 * BLOCK, 16384]),
    ),
    seed=st.integers(0, 99),
)
def test_pairs_are_decided_again_as_the_policy_decides_them(
    roles: list[str],
    places: list[tuple[str, bool, int]],
    loads: list[tuple[int, int, int]],
    held: dict[int, int],
    asked: tuple[int, int],
    weights: Weights,
    seed: int,
) -> None:
    tracker = LoadTracker()
    for number, (role, (host, rdma, kind)) in enumerate(zip(roles, places, strict=False)):
        pool = Memory(0, 1, 9, "cuda" if number % 3 else "cpu", layout=f"layout-{kind % 2}")
        endpoint = Endpoint(f"a{number}", "nixl", pools={"kv": pool}, host=host, rdma=rdma)
        tracker.put_worker(
            Registration(
                f"w{number}",
                "m",
                role,
                "mock",
                1,
                BLOCK,
                60,
                3,
                1 << 20,
                transfer=endpoint if kind else None,
                pair_only=kind == 3 and role != "aggregated",
            )
        )
    for number, (at, family, blocks) in enumerate(loads):
        load = LoadHeader(blocks * BLOCK + 5, 0, "", 1 << 62, "")
        prompt = [family * 1000 + n for n in range(blocks)]
        tracker.admit(str(number), 1, f"w{at % len(roles)}", load, now_ns=0, keys=prompt)
    family, blocks = asked
    keys = [family * 1000 + n for n in range(blocks)]
    request = RoutingRequest("m", blocks * BLOCK + 3, 5, prompt_blocks=blocks)
    overlaps = {(f"w{at}", 0): count for at, count in held.items() if at < len(roles)}
    decision = Decisions(tracker, None, "kv", weights).decide(request, keys, overlaps, now_ns=1, seed=seed)
    if not decision.route:
        return
    registered = [tracker.worker(each.worker) for each in decision.candidates]
    inputs = DecisionInputs(seed, block_size=BLOCK)
    if decision.how:
        inputs = with_pairs(inputs, registered)
    again = decide_again(job(decision, blocks, inputs), weights)
    assert again is not None
    assert again.route == tuple((stage.worker, stage.rank) for stage in decision.route)
    for line, score in zip(decision.candidates, again.scores, strict=True):
        if score is not None and line.role != "prefill":
            assert abs(score - line.score) <= 1e-6 * max(1.0, abs(score))


def test_a_pair_without_its_prefill_worker_is_decided_as_its_decode_worker_alone() -> None:
    tracker = LoadTracker()
    endpoint = Endpoint("a", "nixl", pools={"kv": Memory("l", 1, 9)})
    for name, role in (("p", "prefill"), ("d", "decode")):
        tracker.put_worker(Registration(name, "m", role, "mock", 1, BLOCK, 60, 3, 1 << 20, transfer=endpoint))
    request = RoutingRequest("m", 30 * BLOCK, 5, prompt_blocks=30)
    decision = Decisions(tracker, None, "kv", Weights()).decide(request, range(30), {}, now_ns=1, seed=1)
    assert [stage.role for stage in decision.route] == ["prefill", "decode"]
    known = links(tracker.worker(each.worker) for each in decision.candidates)
    recorded = job(decision, 30, DecisionInputs(1, block_size=BLOCK, links=known))
    whole = decide_again(recorded, without={"p"})
    assert (whole.route if whole is not None else None) == (("d", 0),)
    assert decide_again(recorded, without={"p", "d"}) is None


def test_a_job_without_the_inputs_of_its_decision_is_left_out_with_the_reason() -> None:
    tracker = LoadTracker()
    tracker.put_worker(Registration("w", "m", "aggregated", "mock", 1, BLOCK, 60, 3, 1 << 20))
    request = RoutingRequest("m", BLOCK, 5, prompt_blocks=1)
    decision = Decisions(tracker, None, "kv", Weights()).decide(request, range(1), {}, now_ns=1, seed=1)
    without = msgspec.structs.replace(job(decision, 1, DecisionInputs(1, block_size=BLOCK)), inputs=None)
    assert insufficient(without) == UNRECORDED
    assert decide_again(without) is None
