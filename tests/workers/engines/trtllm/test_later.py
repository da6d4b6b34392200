"""Releases 1.3 and 1.4, as far as their public source says how they differ."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.schemas.requests import Sampling
from penstock.workers.engines.trtllm import disagg
from tests import standins
from tests.workers.engines.trtllm.conftest import GREEDY, ask, run

Make = Callable[..., Any]
PROMPT = list(range(40, 90))


@pytest.fixture(scope="module", params=["1.3", "1.4"])
def later(request: pytest.FixtureRequest) -> Iterator[str]:
    with standins.installed(request.param):
        yield request.param


@pytest.fixture
def make(later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    from penstock.workers.engines import trtllm

    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))
    made: list[Any] = []

    def build(*, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        defaults: dict[str, Any] = {"engine": "trtllm", "block_size": 16, "max_model_len": 512, "kv_blocks": 64}
        text = json.dumps(arguments) if arguments else ""
        settings = WorkerSettings(**defaults | options, override_engine_args=text)
        made.append(trtllm.from_settings(settings, modeldir.DEMO))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def test_log_probabilities_of_prefills_tokens_survive_the_handoff_and_its_logits_stay_behind(make: Make) -> None:
    prefill = make(role="prefill", arguments={"gather_generation_logits": True})
    decode = make(role="decode")
    asked = Sampling(temperature=0.0, logprobs=2)
    whole = run(decode, ask("w", PROMPT, 6, asked, ignore_eos=True))
    results = run(prefill, ask("p", PROMPT, 1, asked, pin=True, ignore_eos=True))
    first, opaque = results.tokens("p"), results.pinned[0].opaque
    rest = run(decode, ask("d", PROMPT, 6, asked, generated=first, opaque=opaque, ignore_eos=True))
    assert rest.failures == []
    assert [*first, *rest.tokens("d")] == whole.tokens("w")
    assert rest.cached("d") > 0
    assert run(prefill, ask("next", PROMPT, 3, GREEDY, ignore_eos=True)).tokens("next")  # it goes on


def test_a_state_that_cannot_be_sent_fails_its_request_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = make(role="prefill")
    real = disagg.encode
    monkeypatch.setattr(disagg, "encode", lambda params: {**real(params), "ctx_usage": object()})
    results = run(prefill, ask("p", PROMPT, 1, pin=True, ignore_eos=True))
    assert results.failure("p").code == "transfer_failed" or results.pinned == []
    monkeypatch.setattr(disagg, "encode", real)
    assert run(prefill, ask("q", PROMPT, 3, ignore_eos=True)).tokens("q")


def test_fields_of_the_state_are_passed_on(later: str) -> None:
    from tensorrt_llm.executor.result import Logprob
    from tensorrt_llm.llmapi import DisaggregatedParams

    before = DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=[7],
        opaque_state=b"\x00\xff",
        disagg_request_id=2**63 - 1,
        ctx_dp_rank=3,
        ctx_info_endpoint="tcp://10.0.0.1:1234",
        first_gen_log_probs=[{7: Logprob(-0.25, 1), 9: Logprob(-2.0, 2)}],
        conversation_id="c",
    )
    after, drawn = disagg.unpack(
        disagg.pack(before, "layout", [1, 2]), DisaggregatedParams, "layout", [1, 2, 7], 2, Logprob
    )
    assert drawn == 1
    assert after.request_type == "generation_only"
    for name in ("disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "conversation_id", "opaque_state"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.first_gen_log_probs == before.first_gen_log_probs


@pytest.mark.parametrize("kind", ["NGram", "Eagle", "Eagle3", "Draft_Target", "DraftTarget"])
def test_kinds_of_speculation_have_their_name_of_the_release(make: Make, kind: str) -> None:
    config: dict[str, Any] = {"decoding_type": kind, "max_draft_len": 3}
    config |= {"max_matching_ngram_size": 2} if kind == "NGram" else {"speculative_model": str(modeldir.DEMO)}
    engine = make(arguments={"speculative_config": config})
    found = engine.runtime.llm.args.speculative_config
    assert type(found).__name__.replace("DecodingConfig", "") == kind.replace("_", "")


def test_what_a_release_has_beyond_1_2_is_passed_on_and_what_nobody_has_is_refused(make: Make) -> None:
    with pytest.raises(BadArguments, match="nonsense: no such key"):
        make(arguments={"nonsense": 1})
    with pytest.raises(BadArguments, match="nonsense"):
        make(arguments={"kv_cache_config": {"nonsense": 1}})
    assert make(arguments={"kv_cache_config": {"use_kv_cache_manager_v2": True}}).info.kv_events
