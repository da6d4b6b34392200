"""Prefill and decode on two SGLang engines that meet in a room, over the stand-in."""

import os
import re
from typing import Any

import msgspec
import pytest

from penstock.infra.constraints.constraint_grammar import REGEX
from penstock.infra.model.modeldir import TINY, load
from penstock.schemas.errors import Code
from penstock.schemas.requests import Constraint, Sampling
from penstock.workers.engines.engine_protocol import EngineError, PinnedPrompt, RequestError, SequenceRequest
from penstock.workers.engines.external import handoff_state
from penstock.workers.engines.sglang import engine_inputs
from penstock.workers.engines.sglang.engine_inputs import Address
from tests.workers.engines.contract import WORDS, Driver, Seen, ask
from tests.workers.engines.sglang.conftest import Make, inner, scheduler

PROMPT = WORDS[5:105]
WHOLE = dict[tuple[int, ...], list[int]]


def offered(source: Driver, request: SequenceRequest, name: str = "request-1:1:decode") -> PinnedPrompt:
    """What a prefill worker hands over: at once, and without a token."""
    first = msgspec.structs.replace(request, key=("pinned", name), pin=True, handoff=name)
    source.engine.submit(first)
    source.until(lambda: any(pinned.key == first.key for pinned in source.seen.pinned), "the offer")
    (pinned,) = [pinned for pinned in source.seen.pinned if pinned.key == first.key]
    assert pinned.opaque
    assert source.seen.of(first.key) == []
    return pinned


def carried_on(source: Driver, target: Driver, request: SequenceRequest, name: str = "request-1:1:decode") -> Seen:
    pinned = offered(source, request, name)
    seen = target.run(msgspec.structs.replace(request, opaque=pinned.opaque))
    assert source.engine.release_pinned(pinned.key)
    return seen


@pytest.fixture
def pair(make: Make) -> tuple[Driver, Driver]:
    return make(role="prefill"), make(role="decode")


def test_an_answer_is_the_one_of_an_engine_alone(make: Make, pair: tuple[Driver, Driver]) -> None:
    source, target = pair
    alone = make()
    drawn = Sampling(temperature=0.9, seed=11, logprobs=2)
    for number, request in enumerate(
        (
            ask(0, PROMPT, 12),
            ask(0, PROMPT, 12, drawn, generated=(5, 6)),  # a later attempt
            ask(0, WORDS[:7], 1),
        )
    ):
        whole = alone.run(request)
        seen = carried_on(source, target, request, f"{number}:1:decode")
        assert seen.failures == []
        assert [o.token for o in seen.outputs] == [o.token for o in whole.outputs]
        assert [o.finish for o in seen.outputs] == [o.finish for o in whole.outputs]
        if request.sampling.logprobs is not None:
            for one, other in zip(seen.outputs, whole.outputs, strict=True):
                assert one.logprob is not None
                assert other.logprob is not None
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-3)
    source.idle()
    target.idle()
    source.until(lambda: scheduler(source).pool.usage == 0.0, "the end of what was fetched")
    assert scheduler(target).pool.usage == 0.0
    assert source.engine.info.pair_only
    assert source.engine.info.handoff_layout == target.engine.info.handoff_layout != ""
    assert source.engine.info.connector == "sglang nixl"


def test_prompts_that_both_have_seen_come_from_the_prefill_engine_s_cache(pair: tuple[Driver, Driver]) -> None:
    source, target = pair
    assert carried_on(source, target, ask(0, PROMPT, 3), "a:1").cached() == 0
    source.remembers(PROMPT)
    assert carried_on(source, target, ask(0, PROMPT, 3), "b:1").cached() >= 64
    assert not target.engine.info.kv_events  # SGLang's decode engine has no prefix cache by default


def test_each_choice_has_a_room_of_its_own(make: Make, pair: tuple[Driver, Driver]) -> None:
    source, target = pair
    drawn = Sampling(temperature=1.0, seed=3)
    alone = make()
    wanted = [alone.answer(ask(0, PROMPT, 6, drawn, choice=choice)) for choice in range(2)]
    for choice in (1, 0):
        first = ask(("p", choice), PROMPT, 6, drawn, choice=choice, pin=not choice, handoff="n:1")
        source.engine.submit(first)
    source.until(lambda: bool(source.seen.pinned), "the offer")
    (pinned,) = source.seen.pinned
    both = [ask(choice, PROMPT, 6, drawn, choice=choice, opaque=pinned.opaque) for choice in range(2)]
    seen = target.run(*both)
    assert [seen.tokens(choice) for choice in range(2)] == wanted


def test_ending_tokens_count_from_min_tokens_on(make: Make, pair: tuple[Driver, Driver]) -> None:
    source, target = pair
    whole = make().answer(ask(0, PROMPT, 12))
    stop = next(token for token in whole[2:] if token not in whole[:2])
    at = whole.index(stop)
    for min_tokens in (0, at, at + 2):
        rules = {"token_ids": (stop,), "min_tokens": min_tokens}
        seen = carried_on(source, target, ask(0, PROMPT, 12, stop=rules), f"{min_tokens}:1")
        assert seen.tokens() == whole[: len(seen.tokens())]
        assert (len(seen.tokens()) == at + 1) == (min_tokens <= at)


def test_a_constraint_holds_on_both_engines(pair: tuple[Driver, Driver]) -> None:
    source, target = pair
    constraint = Constraint(REGEX, "[0-9]{6}")
    seen = carried_on(source, target, ask(0, PROMPT, 60, constraint=constraint))
    assert (seen.failures, seen.outputs[-1].finish) == ([], "stop")
    ends = source.engine.info.eos_token_ids
    text = load(TINY).tokenizer.decode([token for token in seen.tokens() if token not in ends])
    assert re.fullmatch("[0-9]{6}", text)


@pytest.mark.parametrize("opaque", [b"", b"garbage", b"{}"], ids=["none", "garbage", "empty"])
def test_without_a_state_that_can_be_used_the_attempt_is_given_back(make: Make, opaque: bytes) -> None:
    target = make(role="decode")
    (failure,) = target.run(ask(0, PROMPT, opaque=opaque)).failures
    assert failure.code == Code.transfer_failed
    assert target.engine.stats().running == target.engine.stats().waiting == 0


def test_a_state_is_good_once_and_for_its_own_tokens(pair: tuple[Driver, Driver]) -> None:
    source, target = pair
    pinned = offered(source, ask(0, PROMPT, 3))
    for wrong in (
        ask(1, PROMPT[::-1], 3, opaque=pinned.opaque),
        ask(1, PROMPT, 3, generated=(7,), opaque=pinned.opaque),
    ):
        (failure,) = target.run(wrong).failures
        assert (failure.code, "other tokens" in failure.message) == (Code.transfer_failed, True)
    assert len(target.run(ask(1, PROMPT, 3, opaque=pinned.opaque)).tokens(1)) == 3
    (failure,) = target.run(ask(1, PROMPT, 3, opaque=pinned.opaque)).failures
    assert "used before" in failure.message


def test_a_prefill_engine_that_is_gone_costs_the_attempt(pair: tuple[Driver, Driver]) -> None:
    source, target = pair
    pinned = offered(source, ask(0, PROMPT, 3))
    source.engine.close()
    (failure,) = target.run(ask(1, PROMPT, 3, opaque=pinned.opaque)).failures
    assert failure.code == Code.transfer_failed


def test_kv_that_does_not_come_in_time_costs_the_attempt(make: Make) -> None:
    source, target = make(role="prefill"), make(role="decode", handoff_lease_s=0.1)
    layout = source.engine.info.handoff_layout
    port = source.engine.adapter.follower.options.address.port  # type: ignore[attr-defined]
    never = engine_inputs.pack(Address("127.0.0.1", port), "never:1", layout, PROMPT)
    (failure,) = target.run(ask(1, PROMPT, 3, opaque=never)).failures
    assert (failure.code, failure.message) == (Code.transfer_failed, "no KV came from the prefill engine in 0.1 s")


def test_a_prompt_that_nobody_fetches_is_dropped_with_its_lease(
    pair: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker died: the lease ends, and with it the request of the prefill engine."""
    monkeypatch.setattr("penstock.workers.engines.sglang.adapter.RELEASED_S", 0.02)
    source, _ = pair
    pinned = offered(source, ask(0, PROMPT, 3))
    assert source.engine.stats().pinned_blocks == 4
    assert len(scheduler(source).jobs) == 1
    assert source.engine.release_pinned(pinned.key)
    assert not source.engine.release_pinned(pinned.key)
    source.until(lambda: not scheduler(source).jobs, "the abort")
    assert source.engine.stats().pinned_blocks == 0


def test_prompts_beyond_the_slots_are_not_handed_over_yet(make: Make) -> None:
    source, target = make(role="prefill", max_running=2), make(role="decode")
    requests = [ask(number, WORDS[number : number + 40], 2) for number in range(3)]
    for number, request in enumerate(requests):
        first = msgspec.structs.replace(request, key=("p", number), pin=True, handoff=f"{number}:1")
        source.engine.submit(first)
    source.until(lambda: len(source.seen.pinned) == 2, "two offers")
    assert source.engine.stats().waiting == 1
    target.run(msgspec.structs.replace(requests[0], opaque=source.seen.pinned[0].opaque))
    source.until(lambda: len(source.seen.pinned) == 3, "the third")


def test_a_prefill_engine_runs_nothing_alone_and_scores_nothing(make: Make) -> None:
    source = make(role="prefill")
    (failure,) = source.run(ask(0, PROMPT, 3)).failures
    assert failure.code == Code.transfer_failed
    scored = ask(0, PROMPT, 3, Sampling(temperature=0.0, prompt_logprobs=1), score=1, pin=True, handoff="s:1")
    with pytest.raises(RequestError, match="prompt_logprobs") as caught:
        source.engine.submit(scored)
    assert caught.value.code == Code.unsupported


def test_the_other_engine_reaches_this_one_where_the_broker_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes the interface towards the internet unless a variable says otherwise."""
    import sglang.srt.entrypoints.engine as real  # type: ignore[import-not-found, unused-ignore]

    construct, seen = real.Engine.__init__, []

    def noted(self: Any, **named: Any) -> None:
        seen.append(os.environ.get("SGLANG_HOST_IP"))
        construct(self, **named)

    monkeypatch.setattr(real.Engine, "__init__", noted)
    for name in ("SGLANG_HOST_IP", "HOST_IP", "SGLANG_LOCAL_IP_NIC"):
        monkeypatch.delenv(name, raising=False)
    made = [make(role=role) for role in ("prefill", "decode", "aggregated")]
    monkeypatch.setenv("SGLANG_LOCAL_IP_NIC", "ib0")
    make(role="decode")
    assert seen == ["127.0.0.1", "127.0.0.1", None, None]
    assert inner(made[0]).server_args.host == "127.0.0.1"
    assert "SGLANG_HOST_IP" not in os.environ


def test_without_nixl_a_handoff_is_refused_at_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.engines.sglang.api.SglangApi.nixl", lambda self: False)
    with pytest.raises(EngineError, match="pip install nixl"):
        make(role="decode")


def test_rooms_are_equal_on_both_sides_and_of_one_handoff_each() -> None:
    address = Address("10.0.0.1", 8998)
    opaque = engine_inputs.pack(address, "r:1:decode", "layout", [1, 2], rank=3)
    mine = engine_inputs.room(address, "r:1:decode", 5, 3)
    assert engine_inputs.unpack(opaque, "layout", [1, 2], 5) == mine
    assert mine.arguments["disagg_prefill_dp_rank"] == 3
    rooms = {engine_inputs.room(address, f"r:{attempt}", choice).number for attempt in range(50) for choice in range(4)}
    assert len(rooms) == 200
    assert all(0 < number < 2**63 for number in rooms)
    with pytest.raises(ValueError, match="KV is"):
        engine_inputs.unpack(opaque, "another", [1, 2], 5)
    broken = handoff_state.pack({"host": 7}, "layout", [1, 2], [])
    with pytest.raises(ValueError, match="no bootstrap server"):
        engine_inputs.unpack(broken, "layout", [1, 2], 5)


def test_the_bootstrap_server_is_reachable_from_other_machines(make: Make) -> None:
    args = inner(make(role="prefill", nats_url="nats://127.0.0.1:4222")).server_args
    assert args.host == "127.0.0.1"  # this machine's address towards the broker
    assert (args.disaggregation_mode, args.disaggregation_transfer_backend) == ("prefill", "nixl")
    assert args.disaggregation_bootstrap_port > 0
