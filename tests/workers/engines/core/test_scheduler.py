import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.process import class_queue
from penstock.infra.process.class_queue import StartShare
from penstock.schemas.block_hashes import chain, root, split
from penstock.schemas.errors import Code
from penstock.schemas.kv import Removed, Stored
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.engine import scheduler_stats
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.engine_protocol import Failure, Output, RequestError, SequenceRequest, Started
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, expected_tokens
from tests.properties import examples
from tests.workers.engines.core.support import GREEDY, ROOT, Bench, Mirror, PoolMemory, check_pool, names, request

ACTIONS = ("pin", "release_pinned", "reserve", "use", "release", "cancel", "step")


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_ones() -> None:
    bench = Bench(max_batched_tokens=6)
    bench.scheduler.submit(request("a", [5] * 3))
    bench.step()
    bench.scheduler.submit(request("b", list(range(10, 22))))
    shapes = []
    for _ in range(3):
        result = bench.step()
        assert result.computed_tokens <= 6
        shapes.append(bench.shape)
    assert shapes == [
        [("a", 3, 1, True), ("b", 0, 5, False)],
        [("a", 4, 1, True), ("b", 5, 5, False)],
        [("a", 5, 1, True), ("b", 10, 2, True)],
    ]


def test_steps_beside_answers_take_fewer_tokens_of_prompts_where_a_limit_is_set() -> None:
    bench = Bench(max_batched_tokens=32, mixed_chunk_tokens=4)
    for key, length in (("a", 6), ("b", 5)):
        bench.scheduler.submit(request(key, [ord(key)] * length, max_tokens=3))
    shapes = []
    for number in range(6):
        bench.step()
        shapes.append(bench.shape)
        if not number:  # the answers of these two begin
            for key, length in (("c", 6), ("d", 5), ("e", 7)):
                bench.scheduler.submit(request(key, [ord(key)] * length, max_tokens=1))
    assert shapes == [
        [("a", 0, 6, True), ("b", 0, 5, True)],
        [("a", 6, 1, True), ("b", 5, 1, True), ("c", 0, 4, False)],
        [("a", 7, 1, True), ("b", 6, 1, True), ("c", 4, 2, True), ("d", 0, 2, False)],
        [("d", 2, 3, True), ("e", 0, 7, True)],  # no answer is left
        [],
        [],
    ]


def test_a_step_of_prompts_for_other_workers_takes_no_more_once_it_fills_the_device() -> None:
    bench = Bench(total_blocks=2000, max_batched_tokens=8192, max_model_len=4096)
    for key, length in (("a", 3000), ("b", 1000), ("c", 1500), ("d", 200)):
        bench.scheduler.submit(request(key, [ord(key)] * length, max_tokens=1, pin=True))
    shapes = []
    for _ in range(2):
        bench.step()
        shapes.append([slot[0] for slot in bench.shape])
    assert shapes == [["a"], ["b", "c"]]


def test_a_step_of_prompts_that_are_answered_here_takes_all_that_fit() -> None:
    bench = Bench(total_blocks=2000, max_batched_tokens=8192, max_model_len=4096)
    for key, length in (("a", 3000), ("b", 1000)):
        bench.scheduler.submit(request(key, [ord(key)] * length, max_tokens=2))
    bench.step()
    assert [slot[0] for slot in bench.shape] == ["a", "b"]


def test_slots_are_given_first_come_first_served_and_again_when_one_ends() -> None:
    bench = Bench(max_running=2)
    for key in "abc":
        bench.scheduler.submit(request(key, [7], max_tokens=2 if key == "a" else 5))
    bench.step()
    assert [slot[0] for slot in bench.shape] == ["a", "b"]
    stats = scheduler_stats(bench.scheduler)
    assert (stats.running, stats.waiting) == (2, 1)
    bench.step()
    bench.step()
    assert [slot[0] for slot in bench.shape] == ["b", "c"]


def test_the_head_of_the_queue_is_not_overtaken_by_one_that_would_fit() -> None:
    bench = Bench(total_blocks=4)
    bench.scheduler.submit(request("a", [5] * 8, max_tokens=3))
    bench.step()
    bench.scheduler.submit(request("large", [6] * 12, max_tokens=1))
    bench.scheduler.submit(request("small", [7], max_tokens=1))
    bench.step()
    assert [slot[0] for slot in bench.shape] == ["a"]
    bench.finish()


def of(tenant: str, key: object, tokens: int = 8, weight: float = 1.0, rank: int = 1) -> SequenceRequest:
    return request(key, [ord(tenant)] * tokens, max_tokens=1, share=StartShare(rank, tenant, weight))


def started(bench: Bench, steps: int = 100) -> list[object]:
    """Who starts in which order."""
    keys: list[object] = []
    for _ in range(steps):
        if not bench.scheduler.has_work():
            break
        keys += [each.key for each in bench.step().started]
    return keys


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tenant is ahead of its share by more than a request."""
    monkeypatch.setattr(class_queue, "QUANTUM", 0)
    monkeypatch.setattr(class_queue, "LEAST", 1)


@pytest.mark.usefixtures("exact")
def test_a_tenant_with_one_request_does_not_wait_behind_all_those_of_another() -> None:
    bench = Bench(max_batched_tokens=8, prefix_cache=False)
    for number in range(9):
        bench.scheduler.submit(of("a", f"a{number}"))
    bench.step()
    bench.scheduler.submit(of("b", "b"))
    assert started(bench) == ["a1", "b", *(f"a{number}" for number in range(2, 9))]


@pytest.mark.usefixtures("exact")
def test_tenants_of_a_class_start_by_weight_and_classes_in_turn() -> None:
    bench = Bench(max_batched_tokens=8, prefix_cache=False)
    bench.scheduler.submit(of("x", "runs"))
    for number in range(6):
        bench.scheduler.submit(of("a", f"a{number}"))
    for number in range(6):
        bench.scheduler.submit(of("b", f"b{number}", weight=2.0))
    for number in range(3):
        bench.scheduler.submit(of("a", f"late{number}", rank=2))
    keys = [str(key) for key in started(bench)]
    first = keys[1:10]
    assert sum(key.startswith("b") for key in first) == 6, "of two thirds of the work"
    assert keys[-3:] == ["late0", "late1", "late2"], "their class had its turns after those of the other"


@pytest.mark.usefixtures("exact")
def test_what_is_cached_does_not_count_for_a_tenants_share() -> None:
    bench = Bench(max_batched_tokens=1000, max_running=1)
    bench.scheduler.submit(request("first", [1] * 200, max_tokens=1, share=StartShare(1, "a")))
    bench.step()
    for number in range(4):
        bench.scheduler.submit(request(f"a{number}", [1] * 200 + [number], max_tokens=1, share=StartShare(1, "a")))
        bench.scheduler.submit(request(f"b{number}", [2 + number] * 8, max_tokens=1, share=StartShare(1, "b")))
    assert sorted(map(str, started(bench)[:5])) == ["a0", "a1", "a2", "a3", "b0"]


def test_a_preempted_sequence_starts_before_all_that_wait() -> None:
    bench = Bench(total_blocks=4, prefix_cache=False)
    bench.scheduler.submit(request("a0", [5] * 7, max_tokens=6, share=StartShare(1, "a")))
    bench.scheduler.submit(request("a1", [6] * 7, max_tokens=6, share=StartShare(1, "a")))
    bench.step()
    bench.scheduler.submit(request("a2", [7] * 7, max_tokens=1, share=StartShare(1, "a")))
    bench.scheduler.submit(request("b0", [8] * 7, max_tokens=1, share=StartShare(1, "b")))
    order = []
    while bench.scheduler.has_work():
        bench.step()
        order += [key for key, _, count, _ in bench.shape if count > 1]
    assert scheduler_stats(bench.scheduler).preemptions == 1
    assert order[0] == "a1"
    assert sorted(map(str, order[1:])) == ["a2", "b0"]


@given(
    st.lists(st.tuples(st.sampled_from("+++-sss"), st.sampled_from("abc"), st.integers(1, 14)), max_size=60),
    st.integers(0, 3),
)
def test_everything_ends_whoever_comes_and_leaves(steps: list[tuple[str, str, int]], mixed: int) -> None:
    """Small pools, so that heads wait and sequences are preempted."""
    bench = Bench(total_blocks=6, max_running=3, max_batched_tokens=12, mixed_chunk_tokens=mixed)
    keys: list[str] = []
    for number, (step, tenant, tokens) in enumerate(steps):
        if step == "+":
            keys.append(f"{tenant}{number}")
            bench.scheduler.submit(of(tenant, keys[-1], tokens, weight=float(number % 3 + 1), rank=number % 2))
        elif step == "-" and keys:
            bench.scheduler.cancel(keys.pop(tokens % len(keys)))
        elif bench.scheduler.has_work():
            bench.step()
    bench.finish()
    assert not len(bench.scheduler.queue)
    check_pool(bench.blocks, [])


def test_a_prefix_computed_in_an_earlier_step_is_not_computed_again() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", list(range(10))))
    assert bench.step().started == [Started("a", 0)]
    bench.scheduler.submit(request("b", [*range(10), 77]))
    assert bench.step().started == [Started("b", 8)]
    assert bench.shape[-1] == ("b", 8, 3, True)
    stats = scheduler_stats(bench.scheduler)
    assert (stats.hit_tokens, stats.prompt_tokens) == (8, 21)
    first, second = bench.plan
    assert first.sequence.blocks[:2] == second.sequence.blocks[:2]


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_known_token_is_always_computed(length: int, cached: int) -> None:
    bench = Bench()
    for key in "ab":
        bench.scheduler.submit(request(key, list(range(length)), max_tokens=1))
        (start,) = bench.step().started
    assert start == Started("b", cached)


def test_a_follow_up_finds_the_answer_before_it() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", list(range(6)), max_tokens=7))
    answer = [item.token for item in bench.finish()["a"] if isinstance(item, Output)]
    bench.scheduler.submit(request("b", [*range(6), *answer, 9]))
    # 12 of the 13 tokens were computed, the 13th was only drawn.
    assert bench.step().started == [Started("b", 12)]


def test_what_follows_a_found_prefix_is_named_while_it_is_computed() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.scheduler.submit(request("a", list(range(9)), max_tokens=1))
    bench.finish()
    prompt = [*range(9), *range(50, 63)]
    digests = split(chain(pack_tokens(prompt), 4, b""))
    bench.scheduler.submit(request("b", prompt))
    assert bench.step().events == [Stored(b"".join(digests[2:4]), digests[1])]
    assert bench.step().events == [Stored(digests[4], digests[3])]


def test_a_resumed_sequence_finds_what_it_generated_but_only_prompt_tokens_count_as_hits() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", list(range(6)), max_tokens=8))
    answer = [item.token for item in bench.finish()["a"] if isinstance(item, Output)]
    bench.scheduler.submit(request("b", list(range(6)), max_tokens=20, generated=answer[:7]))
    assert bench.step().started == [Started("b", 6)]
    assert bench.shape == [("b", 12, 1, True)]


def test_digests_from_the_request_and_own_ones_are_the_same_names() -> None:
    prompt = list(range(9))
    given_names = split(chain(pack_tokens(prompt), 4, ROOT))
    stored = Stored(b"".join(given_names))
    for digests in (given_names, [], [b"x" * 16]):  # the last: of another block size
        bench = Bench()
        bench.scheduler.submit(request("a", prompt, digests=digests, root=ROOT))
        assert bench.step().events == [stored]


def test_another_root_shares_nothing() -> None:
    bench = Bench()
    for key, salt in (("a", ROOT), ("b", root("weights", salt="tenant"))):
        bench.scheduler.submit(request(key, list(range(9)), root=salt, max_tokens=1))
        result = bench.step()
    assert result.started == [Started("b", 0)]


def test_without_prefix_cache_nothing_is_found_or_reported() -> None:
    bench = Bench(prefix_cache=False)
    for key in "ab":
        bench.scheduler.submit(request(key, list(range(9)), max_tokens=9))
        result = bench.step()
        assert result.started == [Started(key, 0)]
        assert result.events == []
    bench.finish()
    assert bench.blocks.free_blocks == 64


def test_the_newest_is_preempted_keeps_its_tokens_and_finds_its_blocks() -> None:
    bench = Bench(total_blocks=5, max_batched_tokens=100)
    bench.scheduler.submit(request("old", [1] * 7, max_tokens=8))
    bench.scheduler.submit(request("new", [3] * 7, max_tokens=4))
    bench.step()  # 2 blocks each; each has 8 tokens known, 7 computed
    bench.step()  # 8 computed: both tables are full
    result = bench.step()  # the fifth block is for the old one
    assert [slot[0] for slot in bench.shape] == ["old"]
    stats = scheduler_stats(bench.scheduler)
    assert (stats.running, stats.waiting, stats.preemptions) == (1, 1, 1)
    assert [output.key for output in result.outputs] == ["old"]
    assert [(each.key, each.preemptions) for each in result.measured] == [("new", 1)]
    got = bench.finish()
    assert [item.token for item in got["new"] if isinstance(item, Output)] == [109, 110]
    assert len(got["old"]) == 5
    assert scheduler_stats(bench.scheduler).hit_tokens == 0, "only a first admission counts"


def test_a_preempted_one_is_started_once_and_goes_before_the_waiting() -> None:
    bench = Bench(total_blocks=5)
    for key, first in (("old", 1), ("new", 3), ("later", 5)):
        bench.scheduler.submit(request(key, [first] * 7, max_tokens=5))
    order, started = [], []
    while bench.scheduler.has_work():
        result = bench.step()
        started += [item.key for item in result.started]
        order += [output.key for output in result.outputs if output.finish]
    assert order == ["old", "new", "later"]
    assert started == ["old", "new", "later"]
    assert scheduler_stats(bench.scheduler).preemptions > 0


def test_where_nobody_may_be_evicted_a_sequence_waits_for_room_for_its_longest_answer() -> None:
    bench = Bench(total_blocks=5, no_evict=True)
    bench.scheduler.submit(request("old", [1] * 7, max_tokens=8))  # 4 blocks in the end
    bench.scheduler.submit(request("new", [3] * 7, max_tokens=4))  # 3
    bench.step()
    assert [slot[0] for slot in bench.shape] == ["old"]
    assert scheduler_stats(bench.scheduler).waiting == 1
    got = bench.finish()
    assert [len(got[key]) for key in ("old", "new")] == [7, 4]
    assert scheduler_stats(bench.scheduler).preemptions == 0
    bench.scheduler.submit(request("whole", [5] * 7, max_tokens=100))  # its answer ends where the pool does
    assert isinstance(bench.finish()["whole"][-1], Failure)


@examples(150)
@given(
    asked=st.lists(
        st.tuples(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=9), st.integers(1, 12), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    block_size=st.integers(1, 4),
    total_blocks=st.integers(6, 24),
    prefix_cache=st.booleans(),
)
def test_where_nobody_may_be_evicted_nobody_is(
    asked: list[tuple[list[int], int, int]], block_size: int, total_blocks: int, prefix_cache: bool
) -> None:
    """Prompts that share beginnings, coming at any time; all that can end at all end, with no step done twice."""
    answers = {}
    for no_evict in (True, False):
        bench = Bench(total_blocks=total_blocks, block_size=block_size, prefix_cache=prefix_cache, no_evict=no_evict)
        got: dict[object, list[int]] = {}
        for key, (prompt, max_tokens, pause) in enumerate(asked):
            try:
                bench.scheduler.submit(request(key, prompt, max_tokens=max_tokens))
            except RequestError:  # larger than the pool
                continue
            for _ in range(pause):
                for output in bench.step().outputs:
                    got.setdefault(output.key, []).append(output.token)
        for key, items in bench.finish(2000).items():
            got.setdefault(key, []).extend(item.token for item in items if isinstance(item, Output))
        check_pool(bench.blocks, [])
        if no_evict:
            assert scheduler_stats(bench.scheduler).preemptions == 0
        answers[no_evict] = got
    assert answers[True] == answers[False]


def test_cancel_frees_at_once_in_any_state() -> None:
    bench = Bench(total_blocks=8, max_running=2, max_batched_tokens=8)
    bench.scheduler.submit(request("decoding", [5] * 4, max_tokens=50))
    bench.step()
    bench.scheduler.submit(request("prefilling", list(range(12)), max_tokens=50))
    bench.scheduler.submit(request("waiting", [6] * 4))
    bench.step()
    assert bench.shape[-1] == ("prefilling", 0, 7, False)
    for key, used in (("waiting", 5), ("prefilling", 2), ("decoding", 0)):
        assert bench.scheduler.cancel(key)
        assert not bench.scheduler.cancel(key)
        assert bench.blocks.used_blocks == used
    assert bench.finish() == {}
    assert bench.blocks.cached_blocks + bench.blocks.free_blocks == 8


def test_a_cancelled_preempted_one_does_not_come_back() -> None:
    bench = Bench(total_blocks=5)
    bench.scheduler.submit(request("old", [1] * 7, max_tokens=8))
    bench.scheduler.submit(request("new", [3] * 7, max_tokens=8))
    while not scheduler_stats(bench.scheduler).preemptions:
        bench.step()
    assert bench.scheduler.cancel("new")
    assert set(bench.finish()) == {"old"}


def test_a_key_may_be_used_again_after_its_end() -> None:
    bench = Bench()
    for _ in range(2):
        bench.scheduler.submit(request("a", [5], max_tokens=1))
        with pytest.raises(RequestError, match="already") as caught:
            bench.scheduler.submit(request("a", [5]))
        assert caught.value.code == Code.invalid_request
        assert len(bench.finish()["a"]) == 1


# -- how sequences end ---------------------------------------------------------------------------------------


def outputs(bench: Bench, key: object = "a") -> list[Output]:
    return [item for item in bench.finish()[key] if isinstance(item, Output)]


def test_max_tokens_ends_with_length_and_counts_earlier_attempts() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", [5] * 3, max_tokens=6, generated=[9, 9, 9, 9]))
    assert outputs(bench) == [Output("a", 107), Output("a", 108, "length")]


@pytest.mark.parametrize(("more", "length"), [({}, 1), ({"ignore_eos": True}, 8), ({"min_tokens": 3}, 4)])
def test_eos_ends_unless_ignored_and_not_before_min_tokens(more: dict[str, object], length: int) -> None:
    bench = Bench(token=lambda slot: 2)
    bench.scheduler.submit(request("a", [5], **more))
    got = outputs(bench)
    assert len(got) == length
    assert not any(output.finish for output in got[:-1])
    assert got[-1] == (Output("a", 2, "length") if "ignore_eos" in more else Output("a", 2, "stop", None, 2))


def test_min_tokens_counts_earlier_attempts() -> None:
    bench = Bench(token=lambda slot: 2)
    bench.scheduler.submit(request("a", [5], min_tokens=3, generated=[2, 2]))
    assert [output.finish for output in outputs(bench)] == ["", "stop"]


def test_a_stop_token_ends_also_when_eos_is_ignored() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", [5] * 4, token_ids=(106,), ignore_eos=True))
    assert outputs(bench) == [Output("a", 104), Output("a", 105), Output("a", 106, "stop", None, 106)]


def test_a_stop_token_wins_over_the_length() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", [5] * 4, token_ids=(105,), max_tokens=2))
    assert outputs(bench)[-1].finish == "stop"


def test_the_model_s_length_ends_with_length() -> None:
    bench = Bench(max_model_len=7)
    bench.scheduler.submit(request("a", [5] * 4))
    assert [output.finish for output in outputs(bench)] == ["", "", "length"]


def test_a_sequence_that_outgrows_the_pool_fails_by_name_and_its_neighbour_continues() -> None:
    bench = Bench(total_blocks=3)
    bench.scheduler.submit(request("a", [5] * 6, max_tokens=50))
    bench.scheduler.submit(request("b", [6] * 3, max_tokens=3))
    got = bench.finish()
    failure = got["a"][-1]
    assert isinstance(failure, Failure)
    assert failure.code == Code.out_of_blocks
    assert "12 tokens (3 blocks of 4)" in failure.message
    assert len(got["a"]) == 8  # 12 tokens in the pool, one more drawn
    assert [item.token for item in got["b"] if isinstance(item, Output)] == [103, 104, 105]
    assert bench.blocks.used_blocks == 0


def test_an_answer_that_just_fits_the_pool_ends_well() -> None:
    bench = Bench(total_blocks=3)
    bench.scheduler.submit(request("a", [5] * 6, max_tokens=7))
    assert outputs(bench)[-1].finish == "length"


@pytest.mark.parametrize(
    ("prompt", "more", "code", "text"),
    [
        ([], {}, Code.invalid_request, "no tokens"),
        ([1], {"max_tokens": 0}, Code.invalid_request, "max_tokens is 0"),
        ([1], {"max_tokens": 2, "generated": [5, 5]}, Code.invalid_request, "max_tokens is 2 and 2 are generated"),
        ([1] * 20, {}, Code.context_length_exceeded, "this model takes 20"),
        ([1] * 18, {"generated": [5, 5]}, Code.context_length_exceeded, "this model takes 20"),
        ([1] * 16, {}, Code.out_of_blocks, "16 tokens .4 blocks of 4."),
        ([-1], {}, Code.invalid_request, "token ids are integers"),
        (["x"], {}, Code.invalid_request, "token ids are integers"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    prompt: list[int], more: dict[str, object], code: Code, text: str
) -> None:
    bench = Bench(total_blocks=4, max_model_len=20)
    with pytest.raises(RequestError, match=text) as caught:
        bench.scheduler.submit(request("a", prompt, **more))  # type: ignore[arg-type]
    assert caught.value.code == code
    assert not bench.scheduler.has_work()


@pytest.mark.parametrize("name", ["block_size", "max_running", "max_batched_tokens", "max_model_len"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    limits = {"block_size": 4, "max_running": 1, "max_batched_tokens": 1, "max_model_len": 1, name: 0}
    with pytest.raises(ValueError, match=name):
        Scheduler(BlockManager(1), SchedulerConfig(**limits))


def test_names_of_a_sequence_cancelled_last_are_still_reported() -> None:
    bench = Bench()
    for key in "ab":  # the same prompt at once: two copies, the first has the names
        bench.scheduler.submit(request(key, [5] * 4, max_tokens=9, token_ids=(), sampling=GREEDY))
    bench.token = lambda slot: 50 if slot.sequence.key == "a" else 60
    for _ in range(6):
        events = bench.step().events
    assert bench.scheduler.cancel("a")
    assert bench.scheduler.cancel("b")
    assert bench.scheduler.has_work()
    events = bench.step().events
    assert len(events) == 1
    assert isinstance(events[0], Stored)
    assert not bench.scheduler.has_work()


def test_an_evicted_name_is_reported_in_the_step_that_took_its_block() -> None:
    bench = Bench(total_blocks=3)
    bench.scheduler.submit(request("a", [5] * 4, max_tokens=1))
    (stored,) = bench.step().events
    bench.scheduler.submit(request("b", [6] * 11, max_tokens=1))
    removed, added = bench.step().events
    assert isinstance(stored, Stored)
    assert removed == Removed(stored.digests)
    assert isinstance(added, Stored)


# -- any history ---------------------------------------------------------------------------------------------

VOCABULARY = MockVocabulary(6, excluded=(2,))

_requests = st.tuples(
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=9),  # few tokens: prefixes are shared
    st.integers(1, 12),  # max_tokens
    st.integers(0, 4),  # tokens of earlier attempts
)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), _requests),
        st.tuples(st.just("submit"), _requests),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=12,
    max_size=40,
)


@examples(200)
@given(
    history=_steps,
    block_size=st.integers(1, 4),
    total_blocks=st.integers(3, 16),
    max_running=st.integers(1, 5),
    max_batched_tokens=st.integers(1, 20),
    prefix_cache=st.booleans(),
)
def test_any_history_ends_with_the_tokens_of_an_uninterrupted_run(
    history: list[tuple[str, object]],
    block_size: int,
    total_blocks: int,
    max_running: int,
    max_batched_tokens: int,
    prefix_cache: bool,
) -> None:
    manager = BlockManager(total_blocks, prefix_cache=prefix_cache)
    scheduler = Scheduler(
        manager,
        SchedulerConfig(
            block_size=block_size,
            max_running=max_running,
            max_batched_tokens=max_batched_tokens,
            max_model_len=24,
        ),
    )
    memory = PoolMemory(MockExecutor(VOCABULARY, 1, speedup=0), block_size, ROOT)
    mirror = Mirror()
    prompts: dict[int, list[int]] = {}  # with what earlier attempts generated
    wanted: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    started: set[object] = set()

    def check() -> None:
        check_pool(manager, [sequence.blocks for sequence in scheduler.running])
        assert len(scheduler.running) <= max_running
        if prefix_cache:
            memory.check_names(manager)
        else:
            assert not manager.cached_blocks

    def step() -> None:
        plan = scheduler.schedule()
        assert sum(slot.count for slot in plan) <= max_batched_tokens
        assert len({slot.sequence.key for slot in plan}) == len(plan)
        check()
        result = scheduler.commit(plan, memory.execute(plan) if plan else [])
        check()
        mirror.apply(result.events)
        assert mirror.parents.keys() == manager.cache.keys()
        fresh = Mirror()
        fresh.apply(manager.dump())
        assert fresh.parents == mirror.parents
        for item in result.started:
            assert item.key not in started
            started.add(item.key)
        for output in result.outputs:
            assert isinstance(output.key, int)
            assert output.key in started
            assert output.key not in ends
            tokens[output.key].append(output.token)
            if output.finish:
                ends[output.key] = output.finish
        for failure in result.failures:
            assert isinstance(failure.key, int)
            assert failure.code == Code.out_of_blocks
            assert failure.key not in ends
            assert len(prompts[failure.key]) + len(tokens[failure.key]) == total_blocks * block_size + 1
            ends[failure.key] = "failed"

    for number, (kind, detail) in enumerate(history):
        if kind == "submit":
            prompt, max_tokens, resumed = detail  # type: ignore[misc]
            generated = expected_tokens(prompt, min(resumed, max_tokens - 1), VOCABULARY)
            known = len(prompt) + len(generated)
            submission = request(number, prompt, max_tokens, generated=generated, root=ROOT)
            if known >= total_blocks * block_size or known >= 24:
                with pytest.raises(RequestError):
                    scheduler.submit(submission)
                continue
            scheduler.submit(submission)
            prompts[number], wanted[number], tokens[number] = prompt + generated, max_tokens - len(generated), []
        elif kind == "cancel":
            assert isinstance(detail, int)
            if scheduler.cancel(detail):
                assert detail not in ends
                ends[detail] = "cancelled"
        else:
            assert isinstance(detail, int)
            for _ in range(detail):
                step()
        check()
    for _ in range(2000):
        if not scheduler.has_work():
            break
        step()
    assert not scheduler.has_work(), "it hangs"
    assert ends.keys() == prompts.keys()
    assert manager.used_blocks == 0
    for number, prompt in prompts.items():
        count = len(tokens[number])
        assert tokens[number] == expected_tokens(prompt, count, VOCABULARY)
        if ends[number] == "length":
            assert count == min(wanted[number], 24 - len(prompt))


# -- handoff ----------------------------------------------------------------------------------------------------


def test_blocks_of_a_pinned_sequence_outlive_it_until_they_are_dropped() -> None:
    bench = Bench(total_blocks=8)
    prompt = list(range(10, 20))  # two full blocks and a half one
    bench.scheduler.submit(request("a", prompt, max_tokens=1, pin=True, root=ROOT))
    result = bench.step()
    (pinned,) = result.pinned
    assert (pinned.key, len(pinned.blocks)) == ("a", 3)
    assert pinned.generations == [bench.blocks.generations[block] for block in pinned.blocks]
    assert scheduler_stats(bench.scheduler).pinned_blocks == scheduler_stats(bench.scheduler).used_blocks == 3
    check_pool(bench.blocks, [pinned.blocks])
    assert bench.scheduler.pinned.release("a")
    assert not bench.scheduler.pinned.release("a")
    assert scheduler_stats(bench.scheduler).pinned_blocks == bench.blocks.used_blocks == 0
    check_pool(bench.blocks, [])


def test_a_generation_changes_when_a_block_gets_a_new_owner_and_only_then() -> None:
    bench = Bench(total_blocks=3)
    bench.scheduler.submit(request("a", list(range(10, 20)), max_tokens=1, pin=True, root=ROOT))
    (pinned,) = bench.step().pinned
    bench.scheduler.pinned.release("a")
    assert pinned.generations == [bench.blocks.generations[block] for block in pinned.blocks]
    bench.scheduler.submit(request("b", list(range(30, 40)), max_tokens=1))
    bench.step()
    assert all(bench.blocks.generations[b] != g for b, g in zip(pinned.blocks, pinned.generations, strict=True))


def test_an_adopted_prompt_is_not_computed_and_each_choice_continues_in_its_own_last_block() -> None:
    bench = Bench()
    prompt = list(range(10, 20))
    reservation = bench.scheduler.reservations.reserve(names(prompt), tails=2, users=2)
    assert reservation is not None
    assert (reservation.have, len(reservation.blocks), len(reservation.tails)) == (0, 2, 2)
    tails = list(reservation.tails)
    bench.scheduler.reservations.adopt(reservation)
    for choice in range(2):
        bench.scheduler.submit(
            request(choice, prompt, root=ROOT, choice=choice, generated=[7], reservation=reservation)
        )
    result = bench.step()
    assert bench.shape == [(0, 10, 1, True), (1, 10, 1, True)]
    assert next(event for event in result.events if isinstance(event, Stored)).digests == b"".join(names(prompt))
    tables = [sequence.blocks for sequence in bench.scheduler.running]
    assert sorted(table[2] for table in tables) == sorted(tails)
    assert tables[0][:2] == tables[1][:2]
    assert scheduler_stats(bench.scheduler).pinned_blocks == 0
    bench.finish()
    check_pool(bench.blocks, [])


def test_a_reservation_takes_what_the_cache_has_and_leaves_room_for_what_runs() -> None:
    bench = Bench(total_blocks=8)
    prompt = list(range(10, 22))
    bench.scheduler.submit(request("warm", prompt, max_tokens=1, root=ROOT))
    bench.finish()
    reservation = bench.scheduler.reservations.reserve(names(prompt), tails=0, users=1)
    assert reservation is not None
    assert reservation.have == 3
    bench.scheduler.reservations.release(reservation)
    bench.scheduler.submit(request("runs", [1] * 15, max_tokens=100))
    bench.step()  # holds four blocks of eight
    assert bench.scheduler.reservations.reserve(names(list(range(50, 66))), tails=0, users=1) is None, (
        "what runs could not grow"
    )
    assert bench.scheduler.reservations.reserve(names(list(range(50, 62))), tails=0, users=1) is not None


def test_a_pool_full_of_pinned_blocks_waits_and_continues_when_they_come_free() -> None:
    bench = Bench(total_blocks=4)
    bench.scheduler.submit(request("a", list(range(10, 25)), max_tokens=1, pin=True, root=ROOT))
    assert bench.step().pinned
    bench.scheduler.submit(request("b", [5] * 8, max_tokens=3))
    for _ in range(3):
        assert bench.step().computed_tokens == 0
        assert bench.scheduler.blocked
    bench.scheduler.pinned.release("a")
    assert [item.token for item in bench.finish()["b"]] == [108, 109, 110]  # type: ignore[union-attr]


def test_the_only_running_sequence_waits_too_if_all_other_blocks_are_pinned() -> None:
    bench = Bench(total_blocks=4)
    bench.scheduler.submit(request("a", list(range(10, 18)), max_tokens=1, pin=True, root=ROOT))
    bench.step()
    bench.scheduler.submit(request("b", [5] * 7, max_tokens=6))
    for _ in range(4):
        bench.step()
    assert bench.scheduler.blocked
    bench.scheduler.pinned.release("a")
    assert len(bench.finish()["b"]) >= 3


def test_a_cancelled_sequence_lets_go_of_its_reservation_and_so_does_one_that_never_came() -> None:
    bench = Bench()
    prompt = list(range(10, 20))
    reservation = bench.scheduler.reservations.reserve(names(prompt), tails=2, users=2)
    assert reservation is not None
    bench.scheduler.reservations.adopt(reservation)
    for choice in range(2):
        bench.scheduler.submit(request(choice, prompt, root=ROOT, generated=[7], reservation=reservation))
    bench.scheduler.cancel(0)
    assert scheduler_stats(bench.scheduler).pinned_blocks == 4
    bench.scheduler.cancel(1)
    assert scheduler_stats(bench.scheduler).pinned_blocks == bench.blocks.used_blocks == 0
    unused = bench.scheduler.reservations.reserve(names(prompt), tails=1, users=1)
    assert unused is not None
    bench.scheduler.reservations.release(unused)
    bench.scheduler.reservations.release(unused)
    assert bench.blocks.used_blocks == 0


@examples(150)
@given(st.data())
def test_handoffs_leak_nothing_whatever_happens(data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from([3, 16, 64]))
    bench = Bench(total_blocks=data.draw(st.integers(6, 24)), max_batched_tokens=budget)
    scheduler, mirror = bench.scheduler, Mirror()
    pinned: list[object] = []
    reserved: list[object] = []
    prompts = [[base] * 3 + list(range(base, base + size)) for base in (10, 40, 70) for size in (2, 5, 9)]
    for number in range(data.draw(st.integers(5, 30))):
        prompt = data.draw(st.sampled_from(prompts))
        match data.draw(st.sampled_from([*ACTIONS, "step"])):
            case "pin":
                scheduler.submit(request(number, prompt, max_tokens=1, pin=True, root=ROOT))
            case "release_pinned" if pinned:
                assert scheduler.pinned.release(pinned.pop())
            case "reserve":
                users = data.draw(st.integers(1, 2))
                found = scheduler.reservations.reserve(names(prompt), users if len(prompt) % 4 else 0, users)
                if found is not None:
                    reserved.append((found, prompt))
            case "use" if reserved:
                found, prompt = reserved.pop()  # type: ignore[misc]
                if data.draw(st.booleans()):
                    scheduler.reservations.adopt(found)
                for user in range(found.users):
                    key = (number, user)
                    scheduler.submit(request(key, prompt, root=ROOT, generated=[7], reservation=found))
            case "release" if reserved:
                scheduler.reservations.release(reserved.pop()[0])  # type: ignore[index]
            case "cancel":
                scheduler.cancel(data.draw(st.sampled_from([*scheduler.by_key, None])))
            case _:
                result = bench.step()
                mirror.apply(list(result.events))
                pinned += [one.key for one in result.pinned]
        tables = [s.blocks for s in scheduler.running] + scheduler.pinned.tables
        waiting = {
            id(s.reservation): s.reservation for s in scheduler.queue.waiting.values() if s.reservation is not None
        }
        tables += [r.blocks + r.tails for r in waiting.values()] + [r.blocks + r.tails for r, _ in reserved]  # type: ignore[misc, has-type]
        check_pool(bench.blocks, tables)
    for key in list(scheduler.by_key):
        scheduler.cancel(key)
    for key in scheduler.pinned.keys:
        scheduler.pinned.release(key)
    for found, _ in reserved:  # type: ignore[misc, assignment]
        scheduler.reservations.release(found)
    assert scheduler_stats(scheduler).pinned_blocks == bench.blocks.used_blocks == 0
