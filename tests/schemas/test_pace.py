"""Which workers are much slower than their peers: not those that have other things to do."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.schemas.fleet import Load, Registration
from penstock.schemas.pace import FLOOR_US, SLOW, compare
from penstock.workers.engines.mock.executor import decode_seconds, prefill_seconds

CAPACITY = 16_384 * 32  # of a worker's KV pool, tokens


def worker(
    name: str, latency_us: int, engine_us: int = 0, work_ns: int = 0, decode_us: int = 0, **more: object
) -> Registration:
    load = Load(
        latency_us=latency_us,
        engine_us=engine_us or latency_us,
        work_ns=work_ns or 1_000 * latency_us,
        decode_us=decode_us,
    )
    fields = {"model": "m", "role": "aggregated", "engine": "mock", "epoch": 1, "block_size": 32, "total_blocks": 100,
              "slots": 8, "max_model_len": 64, "load": load}  # fmt: skip
    return Registration(name, **(fields | more))  # type: ignore[arg-type]


def slow(*workers: Registration) -> dict[str, int]:
    return {name: round(pace.slowness) for name, pace in compare(workers).items() if pace.is_slow}


def test_of_two_the_slower_one_is_named_and_of_several_each_slow_one() -> None:
    assert slow(worker("a", 10_000), worker("b", 200_000)) == {"b": 20}
    assert slow(worker("a", 10_000), worker("b", 200_000), worker("c", 190_000)) == {"b": 20, "c": 19}
    assert slow(*(worker(f"w-{at}", 10_000 + at) for at in range(9)), worker("b", 200_000)) == {"b": 20}
    assert compare([worker("a", 10_000), worker("b", 200_000)])["b"].peer_latency_us == 10_000


def test_idle_workers_and_those_without_a_peer_are_not_compared() -> None:
    idle = worker("idle", 0)
    assert compare([idle, worker("b", 200_000)]) == {}
    assert slow(idle, worker("a", 10_000), worker("b", 200_000)) == {"b": 20}
    for name, value in (("model", "n"), ("role", "decode"), ("engine", "vllm"), ("device", "1x NVIDIA L4")):
        other = replace(worker("a", 10_000), **{name: value})
        assert compare([other, worker("b", 200_000)]) == {}


def test_a_wait_that_no_one_notices_is_not_slow() -> None:
    assert slow(worker("a", 100), worker("b", FLOOR_US - 1)) == {}
    assert slow(worker("a", 100), worker("b", FLOOR_US)) == {"b": 50}


def paced(name: str, batch: int, computed: int, cached: int, output: int, speed: float) -> Registration:
    """A worker that is busy with ``batch`` requests after the other, by the mock's step times."""
    prefill = prefill_seconds(1, cached, computed) * speed
    decode = speed * decode_seconds(batch * (computed + cached + output // 2), CAPACITY)
    cycle_s = batch * prefill + output * decode
    latency_us, engine_us = 1e6 * (cycle_s - prefill) / output, 1e6 * cycle_s / (batch * output)
    work_ns = 1e9 * cycle_s / (batch * (computed + output))
    return worker(name, int(latency_us), int(engine_us), int(work_ns), int(1e6 * decode))


def batches(length: int) -> st.SearchStrategy[tuple[int, int]]:
    """Concurrent requests that fit, and how many tokens of each prompt are computed."""
    return st.tuples(st.integers(1, min(256, CAPACITY // length)), st.integers(1, length))


MIXES = st.tuples(st.integers(16, 12_000), st.integers(4, 1_000)).flatmap(
    lambda mix: st.tuples(st.just(mix), batches(sum(mix)), batches(sum(mix)))
)


@given(mix=MIXES)
def test_load_and_caches_alone_make_no_worker_slow(
    mix: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
) -> None:
    (prompt, output), *loads = mix
    names = [
        paced(f"w-{at}", batch, min(computed, prompt), prompt - min(computed, prompt), output, 1.0)
        for at, (batch, computed) in enumerate(loads)
    ]
    assert all(pace.slowness < SLOW for pace in compare(names).values())
    without = [replace(each, load=replace(each.load, decode_us=0)) for each in names]
    assert all(pace.slowness < 1.1 for pace in compare(without).values())


@given(batch=st.integers(1, 8), share=st.floats(0.5, 2.0), prompt=st.integers(100, 4_000), output=st.integers(20, 500))
def test_a_worker_that_is_twenty_times_slower_is_named(batch: int, share: float, prompt: int, output: int) -> None:
    other = max(1, round(batch * share))
    fast, straggler = paced("a", other, prompt, 0, output, 1.0), paced("b", batch, prompt, 0, output, 20.0)
    assert slow(fast, straggler).keys() == {"b"}
    assert compare([fast, straggler])["b"].slowness > 2 * SLOW


@given(
    speed=st.floats(10.0, 20.0),
    batch=st.integers(1, 4),
    more=st.floats(1.0, 10.0),
    prompt=st.integers(100, 2_000),
    output=st.integers(20, 500),
)
def test_a_slow_worker_is_named_however_many_requests_pile_up_there(
    speed: float, batch: int, more: float, prompt: int, output: int
) -> None:
    """They stay longer than at its peers, and a larger batch made each token look as cheap as theirs."""
    fast = [paced(f"fast-{at}", batch, prompt, 0, output, 1.0) for at in range(2)]
    straggler = paced("b", min(round(batch * more), CAPACITY // (prompt + output)), prompt, 0, output, speed)
    assert slow(*fast, straggler).keys() == {"b"}
