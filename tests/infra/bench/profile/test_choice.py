"""The configuration that is chosen, against engines whose best one is known."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.bench.profile.choice import Sla, choose_decode, choose_prefill, workers
from infra.bench.profile.data import Decode, DecodePoint, Prefill, Profile
from infra.bench.profile.suggestion import suggestion
from tests.infra.bench.profile.test_data import SETUP

KV_TOKENS = 400_000
SLA = Sla(ttft_ms=300.0, itl_ms=25.0, isl=4000, osl=500)


def engine(
    gpus: int, prefill_ms: float, step_ms: float, growth_ms: float, *, up: str = "", kv_tokens: int = KV_TOKENS
) -> Profile:
    """Prefill takes ``prefill_ms`` per 1,000 tokens, a step ``step_ms`` and ``growth_ms`` per 1,000 of context."""
    prefill, decode = Prefill(), Decode(max_kv_tokens=kv_tokens)
    for isl in (100, 4096, 7680):
        prefill = prefill.added(isl, prefill_ms * isl / 1e3, 1e6 / prefill_ms / gpus)
    for isl in (100, 3000, 7692):
        context = isl + SLA.osl / 2
        for concurrency in (1, 20, 40, 80):
            itl = step_ms + growth_ms * context * concurrency / 1e3
            point = DecodePoint(
                isl=isl,
                concurrency=concurrency,
                kv_usage=context * concurrency / kv_tokens,
                context=context,
                itl_ms=itl,
                throughput=concurrency / itl * 1e3 / gpus,
            )
            decode = decode.added(point)
    setup = msgspec.structs.replace(SETUP, gpus=gpus, max_kv_tokens=kv_tokens, max_batch=80, up=up)
    return Profile(setup=setup, url="http://h", prefill=prefill, decode=decode)


def test_the_known_best_is_chosen_for_prefill_and_decode_apart() -> None:
    profiles = {
        "tp1": engine(1, 100.0, 30.0, 0.2),  # TTFT 400 ms, ITL above 25 ms at once
        "tp2": engine(2, 60.0, 12.0, 0.05),  # 240 ms
        "tp4": engine(4, 40.0, 6.0, 0.01),  # 160 ms, at 40 % less for each GPU
    }
    prefill, decode = choose_prefill(profiles, SLA), choose_decode(profiles, SLA)
    assert [option.name for option in prefill.options] == ["tp2", "tp4"]
    assert prefill.options[0].latency_ms == pytest.approx(240.0)
    assert prefill.options[0].throughput_per_gpu == pytest.approx(4000 / 0.24 / 2)
    assert prefill.rejected == {"tp1": "TTFT 400.0 ms"}
    # 12 + 0.05 * 4.25 * n <= 25 gives 61; 6 + 0.01 * 4.25 * n stays below, up to the 80 that were measured.
    assert [(option.name, option.concurrency) for option in decode.options] == [("tp4", 80), ("tp2", 61)]
    assert decode.options[0].throughput_per_gpu == pytest.approx(80 / (6 + 0.01 * 4.25 * 80) * 1e3 / 4)
    assert decode.rejected["tp1"].startswith("ITL 30.85 ms")


@given(st.floats(1, 30), st.floats(0, 0.5), st.floats(5, 60), st.integers(20_000, KV_TOKENS))
def test_the_concurrency_is_the_best_that_a_search_of_all_finds(
    step: float, growth: float, limit: float, kv_tokens: int
) -> None:
    sla = msgspec.structs.replace(SLA, itl_ms=limit)
    best = choose_decode({"a": engine(1, 10.0, step, growth, kv_tokens=kv_tokens)}, sla).best

    def itl(concurrency: int) -> float:
        return step + growth * 4.25 * concurrency

    fits = [each for each in range(1, 81) if each * 4500 <= kv_tokens and itl(each) <= limit * (1 - 1e-9)]
    if best is None:
        assert not fits
        return
    assert best.latency_ms <= limit
    assert best.latency_ms == pytest.approx(itl(best.concurrency))
    assert best.concurrency * 4500 <= kv_tokens
    assert all(best.throughput_per_gpu >= each / itl(each) * 1e3 * (1 - 1e-6) for each in fits)


def test_what_was_not_measured_is_not_chosen() -> None:
    profiles = {"a": engine(1, 10.0, 5.0, 0.01), "b": Profile(setup=SETUP, url="")}
    far = msgspec.structs.replace(SLA, isl=9000)
    assert "from 100 to 7680 tokens were measured, not 9000" in choose_prefill(profiles, far).rejected["a"]
    assert "from 350 to 7942 tokens were measured, not 9250" in choose_decode(profiles, far).rejected["a"]
    assert choose_prefill(profiles, SLA).rejected == {"b": "prefill was not measured"}
    assert choose_decode(profiles, SLA).rejected == {"b": "decode was not measured"}
    small = {"a": engine(1, 10.0, 5.0, 0.01, kv_tokens=4499)}
    assert "do not fit into the KV cache of 4499" in choose_decode(small, SLA).rejected["a"]
    assert suggestion(small, SLA, choose_prefill(small, SLA), choose_decode(small, SLA), rate=1, utilization=1) is None


@given(st.floats(0.01, 1000), st.floats(0.05, 1))
def test_workers_are_enough_and_not_one_too_many(rate: float, utilization: float) -> None:
    option = choose_prefill({"a": engine(1, 10.0, 5.0, 0.01)}, SLA).options[0]
    count = workers(option, rate, utilization)
    served = option.requests_per_s * utilization
    assert count * served >= rate * (1 - 1e-6)
    assert count == 1 or (count - 1) * served < rate


def test_a_suggestion_is_one_command_where_all_workers_have_the_same_flags() -> None:
    def found(prefill_up: str, decode_up: str) -> tuple[str, ...]:
        profiles = {
            "fast": engine(1, 10.0, 40.0, 0.01, up=prefill_up),
            "long": engine(1, 90.0, 10.0, 0.01, up=decode_up),
        }
        made = suggestion(
            profiles, SLA, choose_prefill(profiles, SLA), choose_decode(profiles, SLA), rate=30.0, utilization=0.8
        )
        assert made is not None
        assert (made.prefill.configuration, made.decode.configuration) == ("fast", "long")
        # 25 prompts per second, and 80 / (10 + 0.01 * 4.25 * 80) / 500 answers per millisecond
        assert made.prefill.workers == math.ceil(30 / (25 * 0.8))
        assert made.decode.workers == math.ceil(30 / (80 / 13.4 / 0.5 * 0.8))
        assert made.decode_per_prefill == pytest.approx(25 / (80 / 13.4 / 0.5), abs=1e-3)
        return made.commands

    assert found("--x 1", "--x 1") == ("penstock up --prefill 2 --decode 4 --x 1",)
    assert found("--x 1", "--y") == (
        *["penstock worker --role prefill --x 1"] * 2,
        *["penstock worker --role decode --y"] * 4,
    )
