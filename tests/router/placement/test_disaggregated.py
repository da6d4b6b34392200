"""Decisions in fleets of encode, prefill and decode workers: golden tables, and what no decision may ever do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.settings import RouterMode
from penstock.router.placement import decide as encoders
from penstock.router.placement.cost import MOST_UNCOMPUTED, OCCUPANCY, describe, rejection, target_costs, utilization
from penstock.router.placement.decide import (
    FAR,
    MEDIUM,
    NEAR,
    STORED_CANDIDATES,
    WAITS,
    PrefillPool,
    decide,
    distance,
    transfer_kind,
)
from penstock.router.placement.routing import RoutingContext, RoutingDecision, RoutingRequest, Weights
from penstock.router.state.target_loads import ExpectedLoad, RoutingTarget
from penstock.schemas.cells import OWN_WORK
from penstock.schemas.errors import Code
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.jobs import Stage
from penstock.schemas.transfer import Endpoint, Memory
from tests.properties import examples
from tests.router.support import endpoint

IDLE = ExpectedLoad()
FULL = ExpectedLoad(4, 4)
HERE = endpoint("h1")
ASK = RoutingRequest("m", prompt_tokens=4000, max_tokens=100, prompt_blocks=125)
MODES: tuple[RouterMode, ...] = ("kv", "round_robin", "random", "least_loaded")


def member(
    worker: str, role: str, load: ExpectedLoad = IDLE, transfer: Endpoint | None = HERE, rank: int = 0, **more: object
) -> RoutingTarget:
    fields: dict[str, object] = {"slots": 4, "total_blocks": 1000, "max_model_len": 8192, "block_size": 32}
    registration = Registration(worker, "m", role, "mock", 1, transfer=transfer, **(fields | more))  # type: ignore[arg-type]
    return RoutingTarget((worker, rank), registration, load)


def decided(
    *members: RoutingTarget,
    ask: RoutingRequest = ASK,
    held: dict[str, int] | None = None,
    mode: RouterMode = "kv",
    weights: Weights = Weights(),  # noqa: B008  # frozen
    seed: int = 0,
    number: int = 0,
) -> RoutingDecision:
    overlaps = {m.id: held[m.id[0]] for m in members if held and m.id[0] in held}
    return decide(RoutingContext(ask, members, overlaps, mode, weights, seed, number))


def reading(blocks: int) -> ExpectedLoad:
    """One sequence, whose steps read so many blocks."""
    return ExpectedLoad(1, 1, blocks, context_blocks=blocks)


def computing(tokens: int, sequences: int = 4) -> ExpectedLoad:
    return ExpectedLoad(sequences, sequences, 100, float(tokens), computing=sequences)


def behind(worker: str = "p", tokens: int = 15_000, **more: object) -> RoutingTarget:
    return member(worker, "prefill", computing(tokens), slots=64, **more)


def names(choice: RoutingDecision) -> list[str]:
    return [f"{stage.role} {stage.worker}" for stage in choice.route]


# -- pairs --------------------------------------------------------------------------------------------------------


def test_a_pair_has_the_cheapest_stages_and_a_table_of_both_pools() -> None:
    choice = decided(
        member("d1", "decode", ExpectedLoad(1, 1, 200, context_blocks=200)),
        member("d2", "decode", ExpectedLoad(1, 1, 20, context_blocks=20)),
        member("p1", "prefill", ExpectedLoad(2, 2, 50, 640.0, context_blocks=50)),
        member("p2", "prefill", ExpectedLoad(1, 1, 10, 320.0, context_blocks=10)),
        member("p3", "prefill", FULL),
        held={"p1": 100, "d2": 7},
    )
    assert choice.route == (Stage("prefill", "p1"), Stage("decode", "d2"))
    assert (choice.chosen, choice.prefill_worker, choice.overlap_blocks, choice.kind) == (("p1", 0), "p1", 100, "split")
    assert choice.how == "split: 118 of 125 blocks to compute, worth a transfer on the same host"
    p1 = 640 + OWN_WORK * (4000 - 3200) + OCCUPANCY * 32 * (50 + 125)
    p2 = 320 + OWN_WORK * 4000 + OCCUPANCY * 32 * (10 + 125)
    step, decode = 32 * NEAR, OCCUPANCY * 32
    assert [(c.worker, c.role, c.score, c.overlap_blocks, c.excluded) for c in choice.candidates] == [
        ("p1", "prefill", pytest.approx(p1 + step * 118), 100, ""),
        ("d2", "decode", pytest.approx(p1 + step * 118 + decode * (20 + 125)), 7, ""),
        ("d1", "decode", pytest.approx(p1 + step * 125 + decode * (200 + 125)), 0, ""),
        ("p2", "prefill", pytest.approx(p2), 0, ""),
        ("p3", "prefill", 0.0, 0, "full"),
    ]


@pytest.mark.parametrize(
    ("decode", "prefills", "expected"),
    [
        (endpoint("h1"), {"near": endpoint("h1"), "far": endpoint("h2")}, "near"),
        (endpoint("h1", rdma=True), {"rdma": endpoint("h2", rdma=True), "far": endpoint("h3")}, "rdma"),
        (endpoint("h1"), {"other": endpoint("h1", layout="y"), "far": endpoint("h2")}, "far"),
        (endpoint("h1"), {"other": endpoint("h1", backend="loopback"), "far": endpoint("h2")}, "far"),
        (endpoint("h1"), {"other": endpoint("h1", quantization="fp8"), "far": endpoint("h2")}, "far"),
        (endpoint("h1"), {"none": None, "far": endpoint("h2")}, "far"),
    ],
)
def test_blocks_take_the_nearest_transfer_path(
    decode: Endpoint, prefills: dict[str, Endpoint | None], expected: str
) -> None:
    pool = [member(name, "prefill", transfer=found) for name, found in prefills.items()]
    assert names(decided(member("d", "decode", transfer=decode), *pool)) == [f"prefill {expected}", "decode d"]


def test_workers_of_different_widths_are_partners_if_their_blocks_are_equal() -> None:
    def over(ranks: int, heads: int) -> Endpoint:
        pool = Memory(0, 64 // ranks, 10, layout=f"float32(2,2,2,{heads // ranks},1)", all_heads=heads)
        return Endpoint(f"agent of {ranks}", "nixl", pools={"kv": pool}, host="h1")

    whole = Endpoint("agent", "nixl", pools={"kv": Memory(0, 64, 10, layout="float32(2,2,2,8,1)")}, host="h1")
    pool = [member(name, "prefill", transfer=found) for name, found in (("other", over(2, 4)), ("same", over(4, 8)))]
    for reader in (over(2, 8), whole):
        assert names(decided(member("d", "decode", transfer=reader), *pool)) == ["prefill same", "decode d"]


def test_a_near_worker_wins_until_its_backlog_outweighs_the_transfer() -> None:
    def pick(tokens: float) -> str:
        near = member("near", "prefill", ExpectedLoad(1, 1, 0, tokens))
        far = member("far", "prefill", transfer=endpoint("h2"))
        return decided(member("d", "decode"), near, far).route[0].worker

    way = (FAR - NEAR) * 125 * 32
    assert [pick(tokens) for tokens in (0, way - 32, way + 32, 10_000)] == ["near", "near", "far", "far"]


HOSTS = st.tuples(
    st.sampled_from(["", "h1", "h2", "h3"]), st.booleans(), st.sampled_from(["nixl", "loopback"]), st.sampled_from("xy")
).map(lambda t: endpoint(t[0], rdma=t[1], backend=t[2], layout=t[3]))
LOADS = st.builds(ExpectedLoad, st.integers(0, 6), st.integers(0, 6), st.integers(0, 200), st.floats(0, 10_000))


@examples(200)
@given(
    st.lists(st.tuples(HOSTS | st.none(), LOADS), max_size=9),
    HOSTS | st.none(),
    st.integers(0, 125),
    st.floats(0, 3),
)
def test_the_cheapest_partner_is_what_trying_all_of_them_finds(
    rows: list[tuple[Endpoint | None, ExpectedLoad]], target: Endpoint | None, blocks: int, weight: float
) -> None:
    pool = [member(f"p{i}", "prefill", load, found) for i, (found, load) in enumerate(rows)]

    costs = target_costs(RoutingContext(ASK, pool, {}, "kv", Weights(), 0))

    def cost(each: RoutingTarget) -> float:
        return costs[each.id].prefill

    decode = member("d", "decode", transfer=target).registration
    partners = PrefillPool(pool, [], cost, weight)
    brute = [
        cost(each) + weight * blocks * 32 * distance(each.registration, decode)
        for each in pool
        if transfer_kind(each.registration) is not None and transfer_kind(each.registration) == transfer_kind(decode)
    ]
    cheapest = partners.cheapest(decode, blocks)
    assert (cheapest is None) == (not brute)
    assert sorted(each.cost for each in partners.partners(decode, blocks)) == pytest.approx(sorted(brute))
    if cheapest is not None:
        assert cheapest == pytest.approx(min(brute))
    assert NEAR < MEDIUM < FAR


def test_idle_prefill_workers_take_turns_by_chance() -> None:
    pool = [member(f"p{i}", "prefill") for i in range(4)]
    picks = [decided(member("d", "decode"), *pool, seed=seed).route[0].worker for seed in range(200)]
    assert min(picks.count(m.id[0]) for m in pool) > 25


# -- split or not -------------------------------------------------------------------------------------------------

D, P, A = member("d", "decode"), member("p", "prefill"), member("a", "aggregated")
E, V = member("e", "encode"), member("v", "aggregated", transfer=None, vision=True)
SMALL = member("d", "decode", total_blocks=9)


@pytest.mark.parametrize(
    ("members", "held", "route", "how", "kind"),
    [
        ([D, P], {}, ["prefill p", "decode d"], "split: 125 of 125 blocks", "split"),
        ([D, P], {"d": 117}, ["decode d"], "local: 256 tokens to compute, limit 256", "local"),
        ([D, P], {"d": 116}, ["prefill p", "decode d"], "split: 9 of 125 blocks", "split"),
        ([D], {}, ["decode d"], "no prefill worker", "local"),
        ([P], {}, ["prefill p"], "no decode worker", "local"),
        ([D, member("p", "prefill", state=WorkerState.draining)], {}, ["decode d"], "no prefill worker", "local"),
        ([D, member("p", "prefill", total_blocks=9)], {}, ["decode d"], "no prefill worker", "local"),
        ([D, member("p", "prefill", max_model_len=99)], {}, ["decode d"], "no prefill worker", "local"),
        ([P, member("d", "decode", state=WorkerState.draining)], {}, ["prefill p"], "no decode worker", "local"),
        ([P, member("d", "decode", total_blocks=9)], {}, ["prefill p"], "no decode worker", "local"),
        ([D, member("p", "prefill", transfer=None)], {}, ["decode d"], "no prefill worker with a compatible", "local"),
        ([D, member("p", "prefill", FULL), A], {}, ["aggregated a"], "aggregated: no other target", "aggregated"),
        (
            [D, P, member("a", "aggregated", reading(300))],
            {},
            ["prefill p", "decode d"],
            "split",
            "split",
        ),
        ([D, P, A], {"a": 100}, ["aggregated a"], "aggregated: score ", "aggregated"),
        ([D, P, A], {"d": 124}, ["decode d"], "local: 32 tokens", "local"),
        ([A], {}, ["aggregated a"], "", "aggregated"),
    ],
)
def test_a_request_runs_where_its_prompt_and_the_pools_lead_it_and_says_why(
    members: list[RoutingTarget], held: dict[str, int], route: list[str], how: str, kind: str
) -> None:
    choice = decided(*members, held=held)
    assert names(choice) == route
    assert choice.how.startswith(how)
    assert bool(choice.how) == bool(how)
    assert choice.kind == kind
    computing = next(stage.worker for stage in choice.route)
    assert choice.overlap_blocks == held.get(computing, 0)


def test_prompts_up_to_the_local_limit_stay_on_a_decode_worker() -> None:
    short = RoutingRequest("m", 250, 10, 7)
    assert names(decided(D, P, ask=short)) == ["decode d"]
    assert names(decided(D, P, ask=short, weights=Weights(local_prefill_tokens=249))) == ["prefill p", "decode d"]
    assert names(decided(D, P, ask=RoutingRequest("m", 250, 10, 7, resumed_tokens=10))) == ["prefill p", "decode d"]
    assert names(decided(D, P, weights=Weights(local_prefill_tokens=4000))) == ["decode d"]


def test_without_a_limit_decode_workers_on_gpus_compute_no_prompt_while_a_prefill_worker_is_there() -> None:
    on_gpu = endpoint("h1", kv=Memory(0, 100, 1000, "cuda"))
    gpu, prefill = member("g", "decode", transfer=on_gpu), member("p", "prefill", transfer=on_gpu)
    short = RoutingRequest("m", 250, 10, 7)
    assert names(decided(gpu, prefill, ask=short)) == ["prefill p", "decode g"]
    assert names(decided(gpu, prefill, ask=short, weights=Weights(local_prefill_tokens=250))) == ["decode g"]
    assert names(decided(gpu, ask=short)) == ["decode g"]


@pytest.mark.parametrize(
    ("members", "held", "route", "queue"),
    [
        ([D, behind()], {}, ["decode d"], 19_000),
        ([D, behind(tokens=14_432)], {}, ["prefill p", "decode d"], 0),
        ([D, behind(tokens=14_433)], {}, ["decode d"], 18_433),
        ([D, behind(), behind("q", 9000)], {}, ["prefill q", "decode d"], 0),
        ([D, behind(), behind("q", 16_000)], {}, ["decode d"], 19_000),
        ([D, behind(), behind("q", 9000, transfer=endpoint("h1", layout="other"))], {}, ["decode d"], 19_000),
        ([D, behind()], {"p": 120}, ["prefill p", "decode d"], 0),  # which has most of the prompt
        ([D, behind(tokens=MOST_UNCOMPUTED + 1)], {}, ["decode d"], 20_385),  # and is full
        ([D, member("p", "prefill", FULL)], {}, [], 0),  # full for another reason: the request waits
        ([member("d", "decode", pair_only=True), behind()], {}, ["prefill p", "decode d"], 0),
        ([member("d", "decode", pair_only=True), behind(tokens=MOST_UNCOMPUTED + 1)], {}, [], 0),
        ([member("d", "decode", ExpectedLoad(3, 3, 900)), behind()], {}, [], 0),  # its KV cache is full
        # what the decode worker has to compute itself
        ([member("d", "decode", computing(4000, 1)), behind()], {}, ["decode d"], 19_000),
        ([member("d", "decode", computing(13_000), slots=64), behind()], {}, ["prefill p", "decode d"], 0),
        ([member("d", "decode", computing(20_000), slots=64), behind()], {}, ["prefill p", "decode d"], 0),
        # and the answers that the prompt would delay
        ([member("d", "decode", ExpectedLoad(60, 60, 400), slots=64), behind()], {}, ["decode d"], 19_000),
        ([member("d", "decode", ExpectedLoad(99, 99, 400), slots=128), behind()], {}, ["decode d"], 19_000),
        (
            [member("d", "decode", ExpectedLoad(99, 99, 400, 4000.0, 1), slots=128), behind()],
            {},
            ["prefill p", "decode d"],
            0,
        ),
    ],
)
def test_a_decode_worker_computes_a_prompt_where_all_its_prefill_workers_are_behind_and_it_costs_less(
    members: list[RoutingTarget], held: dict[str, int], route: list[str], queue: int
) -> None:
    choice = decided(*members, held=held)
    assert names(choice) == route
    assert (choice.kind == "local_behind") == bool(queue)
    if queue:
        assert choice.how == f"local: prefill workers are behind, {queue} tokens with this prompt, limit 18432"
    never = decided(*members, held=held, weights=Weights(prefill_queue_tokens=0))
    assert [stage.role for stage in never.route] in ([], ["prefill", "decode"])
    for mode in MODES[1:]:
        assert decided(*members, held=held, mode=mode).kind != "local_behind"


def test_a_prefill_worker_is_not_behind_while_a_prompt_is_most_of_what_it_computes() -> None:
    long = RoutingRequest("m", 7000, 100, 218)
    for tokens in range(0, 20_000, 500):
        chosen = names(decided(D, behind(tokens=tokens), ask=long, weights=Weights(prefill_queue_tokens=1)))
        assert chosen == (["decode d"] if tokens >= WAITS * 7000 else ["prefill p", "decode d"])


def test_a_burst_is_shared_between_prefill_and_decode_workers() -> None:
    tokens = dict.fromkeys(("p", "d0", "d1"), 0)
    for seed in range(12):
        decodes = [
            member(name, "decode", computing(tokens[name], tokens[name] // 4000), slots=64) for name in ("d0", "d1")
        ]
        choice = decided(*decodes, behind(tokens=tokens["p"]), seed=seed)
        if choice.route:
            tokens[choice.prefill_worker] += 4000
    assert tokens["p"] == 20_000
    assert {tokens["d0"], tokens["d1"]} == {12_000, 16_000}


def test_media_come_through_the_encode_worker_to_a_decode_worker_that_computes_the_prompt() -> None:
    ask = RoutingRequest("m", 4000, 100, 125, medium=b"x" * 32)
    choice = decided(E, D, behind(), ask=ask)
    assert names(choice) == ["encode e", "decode d"]
    assert choice.kind == "local_behind"


def test_one_decode_worker_that_holds_the_prompt_is_better_than_another_with_a_transfer() -> None:
    warm, cold = member("warm", "decode", ExpectedLoad(1, 1, 80)), member("cold", "decode")
    assert names(decided(warm, cold, P, held={"warm": 120})) == ["decode warm"]
    overloaded = member("warm", "decode", ExpectedLoad(1, 1, 800, 20_000.0))
    assert names(decided(overloaded, cold, P, held={"warm": 120})) == ["prefill p", "decode cold"]


@pytest.mark.parametrize(
    ("members", "ask", "reason", "code"),
    [
        ([D, member("p", "prefill", FULL)], ASK, "full", None),
        ([member("d", "decode", FULL), P], ASK, "full", None),
        ([member("d", "decode", ExpectedLoad(1, 3)), P], RoutingRequest("m", 4000, 1, 125, n=2), "full", None),
        ([member("d", "decode", state=WorkerState.draining)], ASK, "draining", None),
        ([member("d", "decode", computing(MOST_UNCOMPUTED + 1), slots=64)], ASK, "full", None),
        ([SMALL, member("p", "prefill", total_blocks=9)], ASK, "too_small", "out_of_blocks"),
        ([member("e", "encode")], ASK, "no_worker", None),
        ([member("x", "diffusion")], ASK, "no_worker", None),
        ([member("e", "encode"), D], RoutingRequest("m", 9, 1, worker="e"), "encode_only", "invalid_request"),
        ([D, P], RoutingRequest("m", 9, 1, worker="x"), "unknown_worker", "invalid_request"),
    ],
)
def test_a_full_pool_is_waited_for_and_what_never_fits_is_refused(
    members: list[RoutingTarget], ask: RoutingRequest, reason: str, code: str | None
) -> None:
    choice = decided(*members, ask=ask)
    assert (choice.route, choice.chosen, choice.reason, choice.code) == ((), None, reason, code)
    assert describe(reason).startswith(reason)
    assert (describe(reason) != reason) == (code is not None)


@pytest.mark.parametrize("mode", ["kv", "direct"])
@pytest.mark.parametrize("named", ["d", "p", "a"])
def test_a_named_worker_does_everything(mode: RouterMode, named: str) -> None:
    choice = decided(D, P, A, ask=RoutingRequest("m", 4000, 10, 125, worker=named), mode=mode)
    assert [stage.worker for stage in choice.route] == [named]
    assert choice.how == "the request names its worker"


def test_other_modes_pick_each_stage_in_their_way() -> None:
    decodes = [member(f"d{i}", "decode", ExpectedLoad(i, i)) for i in range(3)]
    prefills = [member(f"p{i}", "prefill", ExpectedLoad(2 - i, 2 - i)) for i in range(3)]
    fleet = [*decodes, *prefills]
    assert names(decided(*fleet, mode="least_loaded")) == ["prefill p2", "decode d0"]
    turns = [names(decided(*fleet, mode="round_robin", number=t)) for t in range(4)]
    assert turns == [[f"prefill p{t % 3}", f"decode d{t % 3}"] for t in range(4)]
    drawn = {tuple(names(decided(*fleet, mode="random", seed=seed))) for seed in range(150)}
    assert len(drawn) == 9
    short = RoutingRequest("m", 100, 10, 3)
    for mode in MODES:
        assert [stage.role for stage in decided(*fleet, ask=short, mode=mode).route] == ["decode"]


def test_a_worker_that_failed_the_request_is_avoided_at_every_stage() -> None:
    fleet = [member(w, role) for role in ("decode", "prefill", "encode") for w in (f"{role}1", f"{role}2")]
    ask = RoutingRequest("m", 4000, 10, 125, avoid=frozenset({"decode1", "prefill2", "encode1"}), medium=b"x" * 32)
    for seed in range(8):
        assert names(decided(*fleet, ask=ask, seed=seed)) == ["encode encode2", "prefill prefill1", "decode decode2"]


def test_ranks_are_targets_and_the_stage_names_them() -> None:
    ranked = [member("w", "aggregated", reading(9 * (rank != 2)), rank=rank, dp_size=4) for rank in range(4)]
    assert decided(*ranked).route == (Stage("aggregated", "w", 2),)
    pair = [member("d", "decode", reading(9 * (rank != 1)), rank=rank, dp_size=2) for rank in range(2)]
    pool = [member("p", "prefill", reading(9 * (rank != 3)), rank=rank, dp_size=4) for rank in range(4)]
    choice = decided(*pair, *pool)
    assert choice.route == (Stage("prefill", "p", 3), Stage("decode", "d", 1))
    assert [(c.worker, c.rank) for c in choice.candidates[:2]] == [("p", 3), ("d", 1)]


MEMBERS = st.lists(
    st.tuples(
        st.sampled_from(["aggregated", "prefill", "decode", "encode"]),
        LOADS,
        st.sampled_from(list(WorkerState)),
        HOSTS | st.none(),
        st.integers(100, 200),
        st.booleans(),
    ),
    max_size=14,
).map(
    lambda rows: [
        member(f"w{i}", role, load, found, state=state, total_blocks=blocks, vision=vision)
        for i, (role, load, state, found, blocks, vision) in enumerate(rows)
    ]
)


@examples(200)
@given(
    MEMBERS,
    st.sampled_from(MODES),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.7]),
    st.dictionaries(st.integers(0, 14), st.integers(1, 125)),
    st.booleans(),
)
def test_a_route_is_one_that_its_workers_can_go_and_is_explained(
    members: list[RoutingTarget], mode: RouterMode, seed: int, temperature: float, held: dict[int, int], picture: bool
) -> None:
    ask = RoutingRequest("m", 4000, 100, 125, medium=b"m" * 32 if picture else b"")
    overlaps = {m.id: held[i] for i, m in enumerate(members) if i in held}
    weights = Weights(temperature=temperature)
    choice = decide(RoutingContext(ask, members, overlaps, mode, weights, seed, number=seed))
    assert choice == decide(RoutingContext(ask, members, overlaps, mode, weights, seed, number=seed))
    assert len(choice.candidates) <= STORED_CANDIDATES
    lines = [(c.worker, c.rank, c.role) for c in choice.candidates]
    assert len(lines) == len(set(lines))
    if not choice.route:
        assert choice.reason
        return
    by_place = {m.id: m for m in members}
    stages = [by_place[stage.worker, stage.rank] for stage in choice.route]
    assert [stage.role for stage in choice.route] == [m.registration.role for m in stages]
    assert [(c.worker, c.rank) for c in choice.candidates[: len(stages)]] == [m.id for m in stages]
    assert all(not c.excluded for c in choice.candidates[: len(stages)])
    assert all(not rejection(ask, m) for m in stages)
    roles = [stage.role for stage in choice.route]
    if roles[0] == "encode":
        assert picture
        backends = {m.registration.transfer.backend for m in stages if m.registration.transfer}
        assert len(backends) == 1
        assert all(m.registration.transfer for m in stages)
        roles = roles[1:]
    elif picture:
        assert all(m.registration.vision for m in stages)
    assert roles in (["aggregated"], ["prefill"], ["decode"], ["prefill", "decode"])
    if roles == ["prefill", "decode"]:
        source, target = stages[-2].registration, stages[-1].registration
        assert transfer_kind(source) is not None
        assert transfer_kind(source) == transfer_kind(target)
        assert 4000 - 32 * overlaps.get(stages[-1].id, 0) > weights.local_tokens(gpu=False)
    assert choice.overlap_blocks == overlaps.get(stages[-len(roles)].id, 0)


# -- media --------------------------------------------------------------------------------------------------------

IMAGE = RoutingRequest("m", 4000, 10, 125, medium=b"i" * 32)
EMBEDS, LOOPBACK = endpoint("h1", embeds=Memory(0, 100, 10)), endpoint("h1", backend="loopback")
SEEING_P = member("p", "prefill", vision=True)


def test_an_image_goes_through_an_encode_worker_and_then_where_text_goes() -> None:
    encode = [member(f"e{i}", "encode") for i in range(3)]
    choice = decided(*encode, D, P, ask=IMAGE)
    preferred = encoders.by_preference(IMAGE.medium, encode)[0].id[0]
    assert names(choice) == [f"encode {preferred}", "prefill p", "decode d"]
    assert (choice.chosen, choice.prefill_worker) == ((preferred, 0), "p")
    assert choice.how == (
        f"split: 125 of 125 blocks to compute, worth a transfer on the same host; media through {preferred}"
    )
    assert [c.role for c in choice.candidates] == ["encode", "prefill", "decode", "encode", "encode"]
    assert names(decided(*encode, A, ask=IMAGE)) == [f"encode {preferred}", "aggregated a"]
    assert names(decided(*encode, D, P, ask=IMAGE, held={"d": 120})) == [f"encode {preferred}", "decode d"]
    assert names(decided(*encode, D, P)) == ["prefill p", "decode d"], "text does not"


@pytest.mark.parametrize(
    ("members", "route", "reason", "code"),
    [
        ([member("e", "encode", FULL), A], [], "full", None),
        ([E, member("a", "aggregated", transfer=None)], [], "no_vision", Code.unsupported),
        ([E, member("a", "aggregated", FULL)], [], "full", None),
        ([E, member("a", "aggregated", transfer=LOOPBACK)], [], "no_vision", Code.unsupported),
        ([E, V], ["aggregated v"], "", None),
        ([member("e", "encode", transfer=None), A, V], ["aggregated v"], "", None),
        ([member("e", "encode", state=WorkerState.draining), V], ["aggregated v"], "", None),
        ([V, A], ["aggregated v"], "", None),
        ([SEEING_P, D], ["prefill p"], "", None),
        ([SEEING_P, member("d", "decode", vision=True)], ["prefill p", "decode d"], "", None),
        ([A, D], [], "no_vision", Code.unsupported),
        ([member("a", "aggregated", transfer=EMBEDS)], [], "no_encoder", None),
        ([member("a", "aggregated", FULL, vision=True), D], [], "full", None),
        ([], [], "no_worker", None),
    ],
)
def test_an_image_goes_to_a_worker_that_can_take_it_or_nowhere(
    members: list[RoutingTarget], route: list[str], reason: str, code: Code | None
) -> None:
    choice = decided(*members, ask=IMAGE)
    assert (names(choice), choice.reason, choice.code) == (route, reason, code)


def test_a_named_worker_without_vision_gets_an_encode_worker_in_front() -> None:
    blind, visions, encode = A, member("v", "aggregated", vision=True), member("e", "encode")
    for named, route in (("a", ["encode e", "aggregated a"]), ("v", ["aggregated v"])):
        ask = RoutingRequest("m", 400, 10, 12, worker=named, medium=b"i" * 32)
        assert names(decided(blind, visions, encode, ask=ask, mode="direct")) == route


def test_the_same_image_meets_the_same_worker_and_few_move_when_one_leaves() -> None:
    pool = [member(f"e{i}", "encode") for i in range(5)]
    media = [bytes([i]) * 32 for i in range(200)]
    homes = {medium: encoders.pick(medium, pool)[0].id for medium in media}
    assert {place: list(homes.values()).count(place) for place in homes.values()}.keys() == {m.id for m in pool}
    assert homes == {medium: encoders.pick(medium, pool[::-1])[0].id for medium in media}
    for medium, home in homes.items():
        left = encoders.pick(medium, [m for m in pool if m.id != ("e2", 0)])[0].id
        assert left == home or home == ("e2", 0)


@given(st.binary(min_size=1, max_size=32), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_no_encode_worker_gets_much_more_than_its_share(medium: bytes, loads: list[int]) -> None:
    pool = [member(f"e{i}", "encode", ExpectedLoad(n, n), slots=100) for i, n in enumerate(loads)]
    chosen, preferred = encoders.pick(medium, pool)
    assert chosen.load.requests < 1.25 * (sum(loads) + 1) / len(loads) + 1
    assert preferred == (chosen is encoders.by_preference(medium, pool)[0])
    ordered = encoders.by_preference(medium, pool)
    passed_over = ordered[: ordered.index(chosen)]
    assert all(
        m.load.requests > chosen.load.requests or m.load.requests >= sum(loads) / len(loads) for m in passed_over
    )


def test_an_overloaded_encode_worker_is_skipped_and_the_decision_says_so() -> None:
    pool = [member(f"e{i}", "encode", slots=50) for i in range(3)]
    first = encoders.by_preference(IMAGE.medium, pool)[0].id[0]
    loaded = [member(m.id[0], "encode", ExpectedLoad(9, 9) if m.id[0] == first else IDLE, slots=50) for m in pool]
    choice = decided(*loaded, A, ask=IMAGE)
    assert choice.route[0].worker == encoders.by_preference(IMAGE.medium, pool)[1].id[0]
    assert choice.how.endswith("since the preferred one is overloaded")
    assert utilization(loaded[0]) <= 9 / 50


# -- engines that run a request only as one of a pair -------------------------------------------------------------


SHORT = RoutingRequest("m", prompt_tokens=40, max_tokens=100, prompt_blocks=1)


@pytest.mark.parametrize("mode", MODES)
def test_engines_that_need_a_partner_get_one_even_for_a_short_prompt(mode: RouterMode) -> None:
    prefill, decode = member("p", "prefill", pair_only=True), member("d", "decode", pair_only=True)
    assert names(decided(prefill, decode, ask=SHORT, mode=mode)) == ["prefill p", "decode d"]
    assert names(decided(prefill, member("d", "decode"), ask=SHORT, mode=mode)) == ["decode d"]
    cached = decided(prefill, decode, ask=SHORT, mode=mode, held={"d": 1})
    assert names(cached) == ["prefill p", "decode d"]


def test_without_a_partner_they_wait_and_others_are_taken() -> None:
    prefill, decode = member("p", "prefill", pair_only=True), member("d", "decode", pair_only=True)
    other = member("p2", "prefill", transfer=endpoint("h2", layout="another"))
    for alone in ([prefill], [decode], [decode, other]):
        choice = decided(*alone)
        assert (choice.route, choice.reason, choice.code) == ((), "no_partner", None)
    busy = decided(decode, member("p", "prefill", FULL, pair_only=True))
    assert (busy.route, busy.code) == ((), None)
    assert {line.excluded for line in busy.candidates} == {"full", "prefill_full"}
    assert names(decided(prefill, decode, member("w", "aggregated"), ask=SHORT)) in (
        ["aggregated w"],
        ["prefill p", "decode d"],
    )
    assert names(decided(decode, member("w", "aggregated", ExpectedLoad(3, 3)))) == ["aggregated w"]


def test_one_that_is_named_alone_is_refused() -> None:
    ask = RoutingRequest("m", prompt_tokens=40, max_tokens=100, prompt_blocks=1, worker="d")
    choice = decided(member("p", "prefill", pair_only=True), member("d", "decode", pair_only=True), ask=ask)
    assert (choice.route, choice.reason, choice.code) == ((), "pair_only", Code.invalid_request)
