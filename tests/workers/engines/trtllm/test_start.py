"""From settings to an engine: what is asked of TensorRT-LLM, what is refused, and that nothing stays behind."""

import functools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.trtllm import api, build, from_settings
from penstock.workers.engines.trtllm.engine_health import LogWatch
from penstock.workers.runners.token_backend import build_engine
from tests import standins
from tests.workers.engines.trtllm.conftest import BLOCK, LIMIT, MODEL, ask, run, until

Make = Callable[..., Any]
PROMPT = [100 + n for n in range(BLOCK)]


def settings(**options: Any) -> WorkerSettings:
    return WorkerSettings(engine="trtllm", model=str(MODEL), block_size=BLOCK, max_model_len=LIMIT, **options)


def test_without_the_package_the_error_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if standins.real("tensorrt_llm"):
        pytest.skip("it is installed")
    with pytest.raises(
        EngineError, match=r"pip install 'tensorrt_llm==1\.2\.1' --extra-index-url https://pypi\.nvidia"
    ):
        from_settings(settings(), MODEL)


def test_a_release_without_a_part_that_is_needed_is_refused(standin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorrt_llm.SamplingParams", dict)
    with pytest.raises(EngineError, match=r"SamplingParams of tensorrt_llm 1\.2\.1 lacks add_special_tokens, .*seed"):
        from_settings(settings(), MODEL)


def test_the_worker_builds_it_by_its_name(standin: None) -> None:
    engine = build_engine(settings(), MODEL)
    assert engine.info.name == "trtllm"
    engine.close()


def test_facts_come_from_the_model_and_the_running_engine(make: Make, vocabulary: modeldir.ModelDir) -> None:
    info = make(kv_blocks=77).info
    assert (info.block_size, info.max_model_len, info.slots, info.total_blocks) == (BLOCK, LIMIT, 8, 77)
    assert (info.vocab_size, info.eos_token_ids) == (vocabulary.vocab_size, vocabulary.eos_token_ids)
    assert info.load_seconds > 0
    assert info.handoff_layout == ""
    assert info.dp_size == 1


def test_attention_dp_makes_ranks_with_slots_of_their_own(make: Make, quirks: Any) -> None:
    quirks.gpus = 2
    engine = make(tensor_parallel_size=2, override_engine_args='{"enable_attention_dp": true}')
    assert (engine.info.dp_size, engine.info.slots) == (2, 16)
    results = run(engine, *(ask(n, PROMPT, 3, ignore_eos=True) for n in range(6)))
    assert all(len(results.tokens(n)) == 3 for n in range(6))


@pytest.mark.parametrize("backend", ["pytorch", "autodeploy"])
def test_both_back_ends_are_built(make: Make, backend: str) -> None:
    engine = make(trtllm_backend=backend)
    args = engine.runtime.llm.args
    assert args.backend == (None if backend == "pytorch" else "_autodeploy")
    assert len(run(engine, ask("a", PROMPT, 3, ignore_eos=True)).tokens("a")) == 3


def test_files_and_overrides_reach_the_engine(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "extra.yaml"
    file.write_text("max_batch_size: 4\nkv_cache_config: {free_gpu_memory_fraction: 0.4}\n")
    engine = make(extra_engine_args=str(file), override_engine_args='{"kv_cache_config": {"host_cache_size": 4096}}')
    args = engine.runtime.llm.args
    assert (args.max_batch_size, engine.info.slots) == (4, 4)
    kv = args.kv_cache_config
    assert (kv.free_gpu_memory_fraction, kv.host_cache_size, kv.tokens_per_block) == (0.4, 4096, BLOCK)


def test_speculation_changes_no_token_and_its_acceptance_is_counted(make: Make) -> None:
    from prometheus_client import CollectorRegistry

    asked = [ask("greedy", PROMPT, 60, ignore_eos=True)]  # soon goes round in circles, which are easily foreseen
    plain = run(make(), *asked)
    speculation = '{"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}}'
    engine = make(override_engine_args=speculation)
    results = run(engine, *asked)
    assert results.tokens("greedy") == plain.tokens("greedy")
    registry = CollectorRegistry()
    for collector in engine.collectors():
        registry.register(collector)

    def count(name: str) -> float:
        return registry.get_sample_value(f"trtllm_spec_{name}_tokens_total") or 0.0

    steps = [len([o for o in step.outputs if o.key == "greedy"]) for step in results.steps]
    results = until(engine, lambda _: count("draft") >= count("accepted") > 0)
    assert max(steps) > 1  # right ones come together


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"extra_engine_args": "/gone.yaml"}, "--extra-engine-args"),
        ({"override_engine_args": '{"nonsense": 1}'}, "nonsense: no such key"),
        ({"override_engine_args": '{"max_stats_len": "many"}'}, "max_stats_len"),
        ({"max_model_len": 10**9}, "this model takes"),
        (
            {
                "override_engine_args": '{"speculative_config": {"decoding_type": "Eagle", "max_draft_len": 2, '
                '"speculative_model": "/gone/draft"}}'
            },
            "no directory /gone/draft",
        ),
        (
            {
                "override_engine_args": '{"speculative_config": {"decoding_type": "DraftTarget", "max_draft_len": 2, '
                f'"speculative_model": "{modeldir.TINY}"}}}}'
            },
            "vocabulary",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(standin: None, options: Any, says: str) -> None:
    base: dict[str, Any] = {"engine": "trtllm", "model": str(MODEL), "block_size": BLOCK, "max_model_len": LIMIT}
    with pytest.raises(BadArguments) as error:
        from_settings(WorkerSettings(**base | options), MODEL)
    assert says in str(error.value)


def test_too_few_gpus_end_the_start(make: Make) -> None:
    with pytest.raises(EngineError, match="Only 1 GPUs are available, but 2 are required"):
        make(tensor_parallel_size=2)


@pytest.mark.parametrize("phase", ["construction", "warm-up", "capacity"])
def test_a_start_that_fails_leaves_neither_engine_nor_thread(make: Make, monkeypatch: Any, phase: str) -> None:
    """``make`` checks the threads."""
    from tensorrt_llm import LLM

    ended: list[int] = []
    real = LLM.shutdown

    def shutdown(self: Any) -> None:
        if not self._closed:
            ended.append(1)
        real(self)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(LLM, "shutdown", shutdown)
    if phase == "construction":
        monkeypatch.setattr(LLM, "__init__", fail)
        monkeypatch.setattr(LLM, "__del__", lambda self: None)
    elif phase == "warm-up":
        monkeypatch.setattr(LLM, "generate_async", fail)
    else:
        monkeypatch.setattr(build, "capacity", fail)
    before = threading.active_count()
    with pytest.raises((EngineError, RuntimeError), match="no luck"):
        make()
    assert ended == ([] if phase == "construction" else [1])
    for thread in threading.enumerate():
        if thread.name == "engine output":  # it has nothing to read any more
            thread.join(10)
    assert threading.active_count() <= before


def test_the_first_request_finds_an_engine_that_has_answered_before(make: Make, monkeypatch: Any) -> None:
    from tensorrt_llm import LLM

    asked: list[Any] = []
    real = LLM.generate_async

    @functools.wraps(real)
    def generate_async(self: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        asked.append((list(inputs), more.get("cache_salt")))
        return real(self, inputs, *rest, **more)

    monkeypatch.setattr(LLM, "generate_async", generate_async)
    make()
    assert asked
    assert set(map(str, asked)) == {str(([1] * build.WARM_UP_TOKENS, build.WARM_UP_SALT))}  # apart from clients' caches


def test_ranks_started_without_the_launcher_do_not_serve(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(EngineError, match="trtllm-llmapi-launch"):
        make()


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_its_log_has_the_workers_level(monkeypatch: pytest.MonkeyPatch, level: Any) -> None:
    monkeypatch.delenv("TLLM_LOG_LEVEL", raising=False)
    said: list[str] = []
    theirs = logging.getLogger("TRT-LLM")
    before = theirs.level
    with standins.installed():
        api.set_log_level(settings(log_level=level).log_level)
        monkeypatch.setattr(theirs, "warning", said.append)
        api.load_trtllm()
        from tensorrt_llm.logger import logger

        assert logger.level == level
        assert os.environ["TLLM_LOG_LEVEL"] == level.upper()  # for its ranks
        api.set_log_level("debug")
        assert os.environ["TLLM_LOG_LEVEL"] == level.upper()  # what is set stays
    theirs.setLevel(before)
    assert said == []  # it was not asked for what it refuses


def test_what_its_processes_write_is_watched_and_forwarded(capfd: pytest.CaptureFixture[str]) -> None:
    words = "num_fitting_reqs=0 and fitting_disagg_gen_init_requests is empty, may not have enough kvCache"
    code = (
        f"import sys; print('ready', flush=True); sys.stdin.read(1); print({words!r}); "
        "print('x' * 200_000); print('Can not find sequence 5', end=''); print('last words', file=sys.stderr)"
    )
    before = set(threading.enumerate())
    with capture_logs() as lines:
        watch = LogWatch()
        with watch.processes():
            process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        os.write(1, b"of ours: num_fitting_reqs=0, fitting_disagg_gen_init_requests=[]\n")  # not read
        threads = set(threading.enumerate()) - before
        assert lines == []
        process.communicate(b"x", timeout=20)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()  # nobody can write any more
    results = capfd.readouterr()
    assert sorted(line["code"] for line in lines) == ["disagg_deadlock", "sequence_lost"]
    assert results.out.count(words) == 1
    assert "of ours" in results.out
    assert results.out.endswith("x" * 200_000 + "\nCan not find sequence 5")
    assert results.err == "last words\n"


def test_lines_of_its_log_become_diagnoses_while_it_runs(make: Make) -> None:
    engine = make()
    logger = logging.getLogger("TRT-LLM")
    with capture_logs() as lines:
        logger.warning("num_fitting_reqs=%d and fitting_disagg_gen_init_requests is empty, may not have enough", 0)
    assert [line["code"] for line in lines if line["event"] == "engine_diagnosis"] == ["disagg_deadlock"]
    engine.close()
    with capture_logs() as lines:
        logger.warning("Can not find sequence 5")
    assert lines == []


@pytest.mark.parametrize(
    ("version", "words"), [("1.2.0", "use 1.2.1"), ("1.2.1", ""), ("1.3.0rc29", "written for 1.2.1")]
)
def test_releases_with_a_warning(version: str, words: str) -> None:
    said = list(api.notes(version))
    assert (words in said[0]) if words else not said


def test_a_container_with_a_known_regression_is_warned_of_at_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = f'{{"kv_cache_config": {{"max_attention_window": [{4 * BLOCK}, {LIMIT}]}}}}'
    for release, warned in ((None, False), ("0.5.0", False), ("0.5.1", True)):
        monkeypatch.setattr(build, "container", lambda release=release: release)
        monkeypatch.setattr(build, "_shape", lambda path: None)  # the model has no windows, and a rule would say so
        with capture_logs() as lines:
            make(override_engine_args=windows)
        said = [line for line in lines if line.get("rule") == "A61"]
        assert [line["fix"] for line in said] == (["use 0.5.0, or a release from 0.6 on"] if warned else [])


def test_a_container_is_known_by_the_dynamo_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.container() is None
    monkeypatch.setattr(api.metadata, "version", {"ai-dynamo-runtime": "0.5.1"}.__getitem__)
    assert api.container() == "0.5.1"


class TestLater:
    """Release 1.3, as far as it is known."""

    @pytest.fixture
    def later(self) -> Any:
        with standins.installed("1.3"):
            yield

    def test_what_it_has_is_found_by_looking(self, later: None) -> None:
        found = api.load_trtllm()
        assert found.version.startswith("1.3")
        assert found.capacity
        assert {"priority", "conversation_params"} <= found.call

    def test_it_answers_and_its_word_on_its_health_counts(self, later: None) -> None:
        engine = from_settings(settings(kv_blocks=50), MODEL)
        try:
            well = [True]
            llm: Any = engine.runtime.llm
            llm._check_health = lambda: well[0]
            assert engine.info.total_blocks == 50
            assert len(run(engine, ask("a", PROMPT, 3, ignore_eos=True)).tokens("a")) == 3
            well[0] = False
            with pytest.raises(EngineError, match="is unhealthy"):
                until(engine, lambda results: False)
        finally:
            engine.close()
