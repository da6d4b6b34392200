"""What a job records of its decision suffices to decide again."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.decided_again import candidates_of, decide_again
from router.load_tracker import LoadTracker
from router.placement.decisions import Decisions, array_decisions
from router.routing import RoutingDecision, RoutingRequest, Weights
from schemas.fleet import Registration
from schemas.jobs import Decision, DecisionInputs, Job, LoadHeader
from tests.schemas.samples import REQUEST

BLOCK = 16


def job(decision: RoutingDecision, blocks: int, inputs: DecisionInputs, mode: str = "kv") -> Job:
    first = decision.route[0]
    request = msgspec.structs.replace(REQUEST, prompt=bytes(4 * (blocks * BLOCK + 3)), n=1)
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
) -> None:
    tracker = LoadTracker()
    for number in range(workers):
        tracker.put_worker(
            Registration(f"w{number:02}", "m", "aggregated", "mock", 1, BLOCK, 40, 2, 1 << 20, dp_size=1 + number % 2)
        )
    for number, (at, family, blocks) in enumerate(loads):
        prompt = [family * 1000 + n for n in range(blocks)] if number % 3 else []
        load = LoadHeader(blocks * BLOCK + 5, 0, "", 1 << 62, "")
        tracker.admit(str(number), 1, f"w{at:02}", load, now_ns=0, keys=prompt)
        if number < slow and prompt:
            tracker.stored((f"w{at:02}", 0), prompt, 10_000_000_000)
    family, blocks, shared = asked
    keys = [family * 1000 + n for n in range(blocks)]
    request = RoutingRequest("m", blocks * BLOCK + 3, 5, prompt_blocks=blocks, shared_blocks=min(shared, blocks))
    overlaps = {(f"w{at:02}", 0): count for at, count in held.items() if at < workers}
    decision = Decisions(tracker, array_decisions(tracker), "kv", weights).decide(
        request, keys, overlaps, now_ns=now_ns, seed=seed
    )
    if not decision.route:
        return
    inputs = DecisionInputs(seed, shared_blocks=request.shared_blocks, block_size=BLOCK)
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
