"""Models that are split over ranks: the same tokens as whole, and the end of any rank.

Most ranks are threads here, with sockets and exchanges as between processes: those take seconds to import torch.
"""

import queue
import signal
import subprocess
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GptOssConfig

from penstock.schemas.block_hashes import chain, split
from penstock.schemas.requests import Sampling
from penstock.schemas.transfer import KV, WINDOWS, Memory
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import EngineError, NodeLost, RequestError
from penstock.workers.engines.native import build as build_module
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model import loading
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.ranks import (
    EngineRanks,
    LeadingOverlapExecutor,
    RankLink,
    RankSockets,
    serve,
    start_process,
)
from penstock.workers.kv_transfer.ranks import RankTransports, RemoteTransport, serve_transport
from tests.adapters import other_weights
from tests.demo_model.eagle import random_head
from tests.properties import some
from tests.workers.engines.native.model.test_mxfp4 import narrow
from tests.workers.engines.native.models import CONFIGS, VOCAB, drain, expected, prompt, request, run, save, tokens
from tests.workers.engines.native.test_handoff import ROOT, prefilled
from tests.workers.kv_transfer.loopback import LoopbackNetwork, open_loopback

LENGTHS = (1, 13, 33)  # around block borders and windows
COUNT = 12


@pytest.fixture(autouse=True)
def one_load_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads by global state, and a rank is not alone in its process here."""
    lock, load = threading.Lock(), loading.weights

    def weights(*args: Any, **more: Any) -> Any:
        with lock:
            return load(*args, **more)

    monkeypatch.setattr(loading, "weights", weights)


class RankThread:
    """``RankProcess`` as a thread. ``kill``: its socket closes, as if the process had ended."""

    def __init__(self, ends: RankSockets, network: LoopbackNetwork | None = None) -> None:
        self._ends = RankSockets(*(end.dup() for end in ends))
        self._network = network
        self._status = 0
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._status = serve(RankLink(self._ends.steps), build_module.build_follower, self._built)
        self.kill()

    def _built(self, pools: dict[str, Memory]) -> None:
        if self._network is not None:
            opened = partial(open_loopback, self._network)
            arguments = (
                RankLink(self._ends.transfers),
                pools,
                lambda backend, agent, pools, **more: opened(agent, pools),
            )
            threading.Thread(target=serve_transport, args=arguments, daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self._status

    def kill(self) -> None:
        for end in self._ends:
            end.close()


@contextmanager
def engine(
    model: Path, width: int, *, start: Any = RankThread, lost: Any = print, **options: Any
) -> Iterator[ScheduledEngine]:
    chosen: dict[str, Any] = {
        "device": "cpu",
        "block_size": 8,
        "kv_blocks": 64,
        "threads": 1,
        "tensor_parallel_size": width,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "EngineRanks", partial(EngineRanks, start=start))
        made = build(str(model), NativeOptions(**chosen | options), lost=lost)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("name", "width"),
    some(
        [*((name, 2) for name in sorted(CONFIGS)), ("llama", 4), ("phi3", 4), ("qwen3_moe", 4)],
        *(("deepseek_v2", 2), ("gemma3", 2), ("gpt_oss", 2), ("phi3", 4), ("qwen3_moe", 4)),
    ),
)
def test_a_split_model_answers_as_transformers_does(name: str, width: int, model_dir: Callable[[str], Path]) -> None:
    """Of two KV heads, each is on two of four ranks."""
    model = model_dir(name)
    with engine(model, width) as native:
        answers = tokens(run(native, [request(n, prompt(n), COUNT) for n in LENGTHS]))
    assert answers == {n: expected(model, prompt(n), COUNT) for n in LENGTHS}


def test_experts_of_four_bits_are_split_by_steps_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three steps, one rank has two and the other one; what it lacks are zeros."""
    config = GptOssConfig(**CONFIGS["gpt_oss"].to_dict() | {"intermediate_size": 192})
    monkeypatch.setitem(CONFIGS, "uneven", config)
    model = narrow(save("uneven", tmp_path))
    with engine(model, 2) as native:
        answers = tokens(run(native, [request(n, prompt(n), COUNT) for n in LENGTHS]))
    assert answers == {n: expected(model, prompt(n), COUNT) for n in LENGTHS}


def test_drawn_tokens_and_log_probabilities_are_those_of_the_whole_model(model_dir: Callable[[str], Path]) -> None:
    model = model_dir("llama")
    sampling = Sampling(temperature=1.0, seed=7, top_p=0.9, logprobs=3, repetition_penalty=1.1)
    asked = [request(n, prompt(n), COUNT, sampling) for n in (5, 20)]
    with engine(model, 2) as split:
        found = run(split, asked)
    whole = run(build(str(model), NativeOptions(device="cpu", block_size=8, kv_blocks=64)), asked)
    assert tokens(found) == tokens(whole)
    for key, outputs in found.items():
        for ours, theirs in zip(outputs, whole[key], strict=True):
            assert ours.logprob is not None
            assert theirs.logprob is not None
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)


def test_tables_follow_preempted_sequences_cached_prefixes_and_proposed_tokens(
    model_dir: Callable[[str], Path],
) -> None:
    model = model_dir("llama")
    lengths = {(n, times): n for times in (0, 1) for n in (17, 23, 30)}
    asked = [request(key, prompt(n), 40) for key, n in lengths.items()]
    with engine(model, 2, kv_blocks=14, max_running=3, speculative_model="ngram", prompt_lookup_min=1) as split:
        found = {**tokens(run(split, asked[:3])), **tokens(run(split, asked[3:]))}
        stats = split.stats()
    assert stats.preemptions
    assert stats.hit_tokens
    assert stats.accepted_tokens
    assert found == {key: expected(model, prompt(n), 40) for key, n in lengths.items()}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_eagle_head_proposes_for_a_split_model(name: str, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Rank 0 alone has the head, and its pool; those of sliding windows are of one size in all ranks."""
    model, head = model_dir(name), random_head(tmp_path / "head", vocab=VOCAB, inputs=64, proposed=100)
    with engine(model, 2, speculative_model=str(head)) as split:
        assert (split.scheduler.kv_cache.windows is not None) == (name == "gemma3")
        found = tokens(run(split, [request(n, prompt(n), 20) for n in (9, 33)]))
        assert split.stats().draft_tokens
    assert found == {n: expected(model, prompt(n), 20) for n in (9, 33)}


def test_a_head_that_lacks_weights_that_are_split_is_refused(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_dir("llama")
    shared = random_head(tmp_path / "shared", vocab=VOCAB, inputs=64)
    refusal = pytest.raises(UnsupportedModel, match="and the model's is split over GPUs")
    with refusal, engine(model, 2, speculative_model=str(shared)):
        pass


def test_each_rank_has_its_heads_part_of_a_block(model_dir: Callable[[str], Path]) -> None:
    whole: Any = build(str(model_dir("llama")), NativeOptions(device="cpu", block_size=8, kv_blocks=5))
    with engine(model_dir("llama"), 2, kv_blocks=5) as split:
        found: Any = split.executor
        assert found.pool.block_bytes * 2 == whole.executor.pool.block_bytes


@pytest.mark.parametrize(
    ("name", "width", "options", "says"),
    [
        ("gpt2", 2, {}, "GPT2LMHeadModel cannot be split.*leave out --tensor-parallel-size"),
        ("llama", 3, {}, r"q_proj has 4 heads, which 3 GPUs cannot share.*--tensor-parallel-size that divides 4"),
        ("llama", 2, {"max_loras": 1}, "excludes max_loras"),
        ("llama", 2, {"kv_offloading_size": 0.1}, "excludes kv_offloading_size"),
    ],
)
def test_what_cannot_be_split_is_refused(
    name: str, width: int, options: dict[str, Any], says: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    if name == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    model = tmp_path if name == "gpt2" else model_dir(name)
    with pytest.raises(UnsupportedModel, match=says), engine(model, width, **options):
        pass


@pytest.mark.parametrize("when", ["before they meet", "behind it"])
def test_a_rank_that_does_not_start_says_which_it_is_and_why(
    when: str, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = build_module.build_follower

    def fails(model: str, options: NativeOptions, group: Any) -> Any:
        if group.rank == 1:
            if when == "behind it":
                make(model, options, group)
            raise EngineError("there is no memory")
        return make(model, options, group)

    monkeypatch.setattr(build_module, "build_follower", fails)
    with pytest.raises(EngineError, match=r"rank 1 of 2 .*: there is no memory"), engine(model_dir("llama"), 2) as made:
        run(made, [request(0, prompt(3), 200)])


def test_a_killed_rank_ends_the_engine_and_no_request_is_to_blame(model_dir: Callable[[str], Path]) -> None:
    """Real processes, one of them killed in mid-answer. It takes as long as they take to import torch."""
    started: list[subprocess.Popen[bytes]] = []
    lost: queue.SimpleQueue[EngineError] = queue.SimpleQueue()

    def start(ends: RankSockets) -> Any:
        started.append(cast("subprocess.Popen[bytes]", start_process(ends)))
        return started[-1]

    with engine(model_dir("llama"), 2, lost=lost.put, start=start) as native:
        native.submit(request(0, prompt(9), 400))
        for _ in range(5):
            native.step()
        started[0].kill()
        with pytest.raises(NodeLost, match="rank 1 of 2 was ended by SIGKILL"):
            drain(native)
        assert "SIGKILL" in str(lost.get(timeout=5))
    with pytest.raises(queue.Empty):
        lost.get_nowait()


class Waiting:
    """A process that ends when it is killed."""

    def __init__(self, ends: RankSockets) -> None:
        self._ended = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        assert self._ended.wait(timeout)
        return -signal.SIGKILL

    def kill(self) -> None:
        self._ended.set()


class Ahead:
    """A step on a device that waits for no rank any more: it returns tokens, whatever they are."""

    def launch(self, plan: Any, scoring: Any = ()) -> Any:
        return SimpleNamespace(result=lambda: [(7, None)])

    def close(self) -> None:
        pass


def test_tokens_that_were_computed_without_a_lost_rank_are_not_returned() -> None:
    processes: list[Waiting] = []

    def start(ends: RankSockets) -> Any:
        processes.append(Waiting(ends))
        return processes[-1]

    ranks = EngineRanks("model", NativeOptions(tensor_parallel_size=2), start=start)
    leading = LeadingOverlapExecutor(cast("Any", Ahead()), ranks)
    ranks.group.peers = cast("Any", SimpleNamespace(stopped=False, stop=lambda: None))
    assert leading.launch([]).result() == [(7, None)]
    step = leading.launch([])
    processes[0].kill()
    ranks.group.peers = cast("Any", SimpleNamespace(stopped=True, stop=lambda: None))
    with pytest.raises(NodeLost, match="rank 1 of 2 was ended by SIGKILL"):
        step.result()
    leading.close()


def test_ranks_end_with_their_engine(model_dir: Callable[[str], Path]) -> None:
    made: list[RankThread] = []

    def start(ends: RankSockets) -> RankThread:
        made.append(RankThread(ends))
        return made[-1]

    with engine(model_dir("llama"), 2, start=start):
        assert len(made) == 1
    assert made[0].wait(0) == 0


@pytest.mark.parametrize(
    ("name", "widths"),
    some(
        [
            *(("llama", widths) for widths in ((2, 1), (1, 2), (2, 4))),
            *((name, widths) for name in ("deepseek_v2", "gemma3") for widths in ((1, 2), (2, 1))),
        ],
        *(("llama", (2, 1)), ("deepseek_v2", (1, 2)), ("gemma3", (2, 1))),
    ),
    ids=str,
)
def test_a_prompt_prefilled_at_another_width_continues_as_if_here(
    name: str, widths: tuple[int, int], model_dir: Callable[[str], Path]
) -> None:
    """Nothing of the prompt is computed again, and all ranks have their part of it, or all latents."""
    network, model, words = LoopbackNetwork(), model_dir(name), prompt(30)

    def transport(made: ScheduledEngine, name: str) -> RankTransports:
        others = [RemoteTransport(link, f"{name}:{at}", print, 5.0) for at, link in enumerate(made.transfers)]
        return RankTransports(open_loopback(network, name, made.memory()), others)

    start = partial(RankThread, network=network)
    with engine(model, widths[0], start=start) as source, engine(model, widths[1], start=start) as target:
        owner, reader = transport(source, "owner"), transport(target, "reader")
        pinned, first = prefilled(source, request(0, words, 1, root=ROOT))
        digests = split(chain(pack_tokens(array("I", words)), 8, ROOT))
        assert target.kv_transfer is not None
        held = pinned.windows
        reservation = target.kv_transfer.reserve(digests, 1, 1, len(words))
        assert reservation is not None
        into = reservation.blocks + reservation.tails
        moved = [reader.read(owner.endpoint, KV, pinned.blocks, into, generations=pinned.generations)]
        if held.rows:
            rows = [fill.row for fill in reservation.fills]
            moved.append(reader.read(owner.endpoint, WINDOWS, held.rows, rows, generations=held.generations))
        assert all(each.result(20).bytes for each in moved)
        target.kv_transfer.adopt(reservation)
        again = request(0, words, 12, root=ROOT, digests=digests, generated=[first], reservation=reservation)
        target.submit(again)
        results = drain(target)
        reader.close()
        owner.close()
    answer = [first, *(output.token for result in results for output in result.outputs)]
    assert answer == expected(model, words, 12)
    assert results[0].started[0].cached_tokens == len(words)
    assert results[0].computed_tokens == 1


@pytest.mark.parametrize(("name", "width"), some([("llama", 2), ("llama", 4), ("qwen3_moe", 2)], ("qwen3_moe", 2)))
def test_each_rank_takes_its_part_of_new_weights(
    name: str, width: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Under the names of a trainer's modules, as those of merged experts."""
    model, trained = model_dir(name), other_weights(model_dir(name), tmp_path / "trained")
    modules = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).state_dict()
    save_file({key: each.clone() for key, each in modules.items()}, trained / "model.safetensors", {"format": "pt"})
    wanted = expected(trained, prompt(13), COUNT)
    assert wanted != expected(model, prompt(13), COUNT)
    with engine(model, width) as native:
        weights = native.weights
        assert weights is not None
        before = run(native, [request("before", prompt(13), COUNT)])
        read = weights.read(trained)
        weights.hold()
        weights.replace(read, lambda key, generated: b"another")
        weights.proceed()
        after = run(native, [request("after", prompt(13), COUNT)])
    assert (tokens(before)["before"], tokens(after)["after"]) == (expected(model, prompt(13), COUNT), wanted)


def test_a_split_model_keeps_its_weights_where_one_rank_cannot_read_the_new_ones(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model, trained = model_dir("llama"), other_weights(model_dir("llama"), tmp_path / "trained")
    wanted = expected(model, prompt(13), COUNT)
    with engine(model, 2) as native:
        weights = native.weights
        assert weights is not None
        read = weights.read(trained)
        trained.rename(tmp_path / "away")
        weights.hold()
        with pytest.raises(RequestError, match="rank 1 of 2"):
            weights.replace(read, lambda key, generated: b"another")
        weights.proceed()
        assert tokens(run(native, [request(0, prompt(13), COUNT)])) == {0: wanted}
        with pytest.raises(RequestError, match="does not sleep"):
            weights.sleep()
