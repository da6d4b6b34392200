"""Outputs with LoRA adapters equal those of models with the adapters merged into their weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.infra.model.adapter import WEIGHTS, AdapterError, read_adapter
from penstock.schemas.block_hashes import root
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from tests.adapters import ALL, greedy, merged, write_adapter
from tests.workers.engines.native.models import prompt, request, run, tokens

COUNT = 12


def engine_of(model: Path, **options: Any) -> ScheduledEngine:
    settings = {"block_size": 8, "kv_blocks": 96, "device": "cpu", "max_loras": 2, "max_lora_rank": 8, **options}
    return build(str(model), NativeOptions(**settings))


def add(engine: ScheduledEngine, folder: Path) -> str:
    adapters = engine.adapters
    assert adapters is not None
    read = read_adapter(folder, adapters.max_rank)
    identity = f"{folder.name}@{read.digest}"
    adapters.add(identity, adapters.prepare(read, identity))
    return identity


def asked(key: object, length: int, adapter: str = "", salt: int = 0) -> Any:
    return request(key, prompt(length, salt), COUNT, adapter=adapter, root=root("rev", adapter))


@pytest.fixture(params=["llama", "qwen3", "mistral"])
def model(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> Path:
    return model_dir(request.param)


@pytest.fixture
def llama(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("llama")


def test_two_adapters_and_the_model_itself_in_one_batch_equal_merged_weights(model: Path, tmp_path: Path) -> None:
    poet = write_adapter(tmp_path / "poet", model, seed=1, rank=8)
    clerk = write_adapter(tmp_path / "clerk", model, seed=2, rank=3, targets=("q_proj", "down_proj"), use_rslora=True)
    engine = engine_of(model)
    named = {"": None, add(engine, poet): poet, add(engine, clerk): clerk}
    wanted = [(adapter, length, folder) for length in (5, 21) for adapter, folder in named.items()]
    together = tokens(run(engine, [asked((adapter, length), length, adapter) for adapter, length, _ in wanted]))
    expected = {
        (adapter, length): greedy(merged(model, folder), prompt(length), COUNT) for adapter, length, folder in wanted
    }
    assert together == expected
    assert len({tuple(expected[adapter, 21]) for adapter in named}) == 3, "the adapters change nothing"
    alone = engine_of(model)
    for adapter, folder in named.items():
        if folder is not None:
            add(alone, folder)
        assert tokens(run(alone, [asked(0, 21, adapter)]))[0] == expected[adapter, 21]


def test_more_adapters_than_slots_take_turns_with_the_same_results(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama, max_loras=1)
    folders = {}
    for seed in range(4):
        folder = write_adapter(tmp_path / f"a{seed}", llama, seed=seed)
        folders[add(engine, folder)] = folder
    found = tokens(run(engine, [asked(adapter, 9, adapter) for adapter in folders]))
    for adapter, folder in folders.items():
        assert found[adapter] == greedy(merged(llama, folder), prompt(9), COUNT)


def test_adapters_work_with_proposed_tokens(llama: Path, tmp_path: Path) -> None:
    poet = write_adapter(tmp_path / "poet", llama)
    engine = engine_of(llama, speculative_model="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    adapter = add(engine, poet)
    found = tokens(run(engine, [asked("poet", 30, adapter), asked("", 30)]))
    assert found["poet"] == greedy(merged(llama, poet), prompt(30), COUNT)
    assert found[""] == greedy(merged(llama, None), prompt(30), COUNT)
    assert engine.stats().draft_tokens


def test_a_replaced_adapter_leaves_running_sequences_as_they_were(llama: Path, tmp_path: Path) -> None:
    old = write_adapter(tmp_path / "old" / "poet", llama, seed=1)
    new = write_adapter(tmp_path / "new" / "poet", llama, seed=2)
    engine = engine_of(llama, max_loras=1)
    adapters = engine.adapters
    assert adapters is not None
    before = add(engine, old)
    engine.submit(asked("before", 9, before))
    drawn = [output.token for _ in range(3) for output in engine.step().outputs]
    adapters.remove(before)
    after = add(engine, new)
    assert before != after
    with pytest.raises(RequestError, match=rf"{before} is no longer served: it was replaced or unloaded"):
        engine.submit(asked("late", 9, before))
    found = tokens(run(engine, [asked("after", 9, after)]))
    assert drawn + found["before"] == greedy(merged(llama, old), prompt(9), COUNT)
    assert found["after"] == greedy(merged(llama, new), prompt(9), COUNT)
    assert adapters.loaded == (after,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "DoRA .* not supported; merge it into the model"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank or alpha of its own"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; only LORA is"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"r": 3}, "do not fit r = 3"),
        ({"r": 64}, "rank 64, above --max-lora-rank 8; raise that"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    llama: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "a", llama, **change)
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder, 8)


def test_an_adapter_of_another_model_is_refused(llama: Path, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", model_dir("deepseek_v3"), targets=("q_a_proj", "o_proj"))
    with pytest.raises(AdapterError, match=r"changes 3 modules .*layers\.0\.self_attn\.q_a_proj.* of another model\?"):
        add(engine_of(llama), other)
    head = write_adapter(tmp_path / "head", llama, targets=(*ALL, "lm_head"))
    with pytest.raises(AdapterError, match=r"lm_head.*only linear layers of attention and MLP"):
        add(engine_of(llama), head)


def test_an_adapter_of_what_latents_are_expanded_by_is_refused_and_others_are_not(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """A hook behind the product would change nothing: queries are multiplied by its weight."""
    model = model_dir("deepseek_v3")
    engine = engine_of(model)
    known = write_adapter(tmp_path / "known", model, targets=("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
    name = add(engine, known)
    found = tokens(run(engine, [asked("with", 21, name), asked("without", 21)]))
    assert found["with"] == greedy(merged(model, known), prompt(21), COUNT) != found["without"]
    other = write_adapter(tmp_path / "other", model, targets=("kv_b_proj", "o_proj"))
    with pytest.raises(AdapterError, match=r"kv_b_proj.*only linear layers of .* can, without kv_b_proj"):
        add(engine, other)


def test_weights_that_end_early_or_exceed_the_model_s_dtype_are_refused(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    cut = write_adapter(tmp_path / "cut", llama, targets=("q_proj",))
    whole = (cut / WEIGHTS).read_bytes()
    (cut / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(AdapterError, match=f"{WEIGHTS} cannot be read"):
        add(engine, cut)
    large = write_adapter(tmp_path / "large", llama, targets=("q_proj",), alpha=1e9, strength=1e9)
    tensors = load_file(large / WEIGHTS)
    save_file({name: each.double() * 1e36 for name, each in tensors.items()}, large / WEIGHTS)
    with pytest.raises(AdapterError, match=r"too large for the model's torch\.float32"):
        add(engine, large)


@pytest.mark.parametrize("option", [{"quantization": "fp8"}, {"batch_invariant": True}])
def test_options_that_exclude_adapters_are_refused_at_start(llama: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="excludes LoRA adapters"):
        engine_of(llama, **option)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_weights_merged_by_hand_are_those_that_peft_merges(llama: Path, tmp_path: Path) -> None:
    """So that the other tests compare with the right thing."""
    peft = pytest.importorskip("peft")
    for name, more in (("plain", {}), ("rslora", {"use_rslora": True, "alpha": 5})):
        folder = write_adapter(tmp_path / name, llama, rank=6, **more)  # type: ignore[arg-type]
        loaded = peft.PeftModel.from_pretrained(merged(llama, None), folder).merge_and_unload()
        by_hand = dict(merged(llama, folder).named_parameters())
        for path, weight in loaded.named_parameters():
            torch.testing.assert_close(weight, by_hand[path])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_peft_itself_writes_is_served(llama: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(
        merged(llama, None),
        peft.LoraConfig(
            r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        ),
    )
    made.save_pretrained(tmp_path / "own")
    adapter = add(engine := engine_of(llama), tmp_path / "own")
    expected = greedy(made.merge_and_unload(), prompt(9), COUNT)
    assert tokens(run(engine, [asked(0, 9, adapter)]))[0] == expected
    assert expected != greedy(merged(llama, None), prompt(9), COUNT)
