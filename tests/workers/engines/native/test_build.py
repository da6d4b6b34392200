import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.modeldir import DEMO
from penstock.infra.process import budgets
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines import native
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model import attention as attention_module
from penstock.workers.engines.native.model import loading, pools
from penstock.workers.engines.native.model import pool as pool_module
from penstock.workers.engines.native.model.adapters import places_of
from penstock.workers.engines.native.model.attention import UnsupportedAttention, attention
from penstock.workers.engines.native.model.executor import TorchExecutor
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pool import KvPool, KvShape
from penstock.workers.engines.native.weights import DeviceWeights, HostCopy
from penstock.workers.kv_transfer.staging import BUFFER_BYTES
from penstock.workers.runners.token_backend import build_engine
from tests.adapters import other_weights
from tests.workers.engines.native.models import COMMON, EOS, VOCAB, prompt, reference, request, run, tokens


@pytest.fixture
def llama(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("llama")


def test_facts_come_from_the_model(llama: Path) -> None:
    info = build(str(llama), NativeOptions(device="cpu", kv_blocks=9, max_running=3)).info
    assert (info.total_blocks, info.slots, info.vocab_size, info.max_model_len) == (9, 3, VOCAB, 512)
    assert info.eos_token_ids == (EOS,)
    assert info.load_seconds > 0


def test_pools_whose_addresses_other_workers_know_stay_where_they_are(llama: Path) -> None:
    """They would read and write what is there by then, such as other weights."""
    engine = build(str(llama), NativeOptions(device="cpu", kv_blocks=9))
    pool = engine.memory()["kv"]
    assert engine.weights is not None
    engine.weights.hold()
    with pytest.raises(RequestError, match=r"a KV cache that other workers reach stays on the device, so this worker"):
        engine.weights.sleep()
    store = engine.weights.store
    assert isinstance(store, DeviceWeights)
    with pytest.raises(RequestError, match="restart this worker with them"):
        store._rebuild(store._target.model, str(llama))
    assert engine.memory()["kv"] == pool
    engine.weights.proceed()
    assert run(engine, [request("a", prompt(5), 3)])["a"]


def test_graphs_are_captured_again_only_for_the_modules_that_had_some(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of others may not be compiled yet."""
    weights = build(str(llama), NativeOptions(device="cpu", kv_blocks=9)).weights
    assert weights is not None
    store, made = weights.store, list[bool]()
    assert isinstance(store, DeviceWeights)
    make = store._make
    monkeypatch.setattr(store, "_make", lambda target, again: made.append(again) or make(target, again))
    store.sleep()
    store.wake()
    store._rebuild(store._target.model, str(llama))
    assert made == [True, False]


def test_default_pool_is_a_share_of_memory_that_is_only_taken_when_used(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 1 << 40)
    block_bytes = 3 * 2 * 32 * 2 * 16 * 4
    engine = build(str(llama), NativeOptions(device="cpu"))
    assert engine.info.total_blocks == budgets.CPU_LIMIT_BYTES // block_bytes
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 100 * block_bytes)
    assert build(str(llama), NativeOptions(device="cpu")).info.total_blocks == 25
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 40 * block_bytes)
    # One sequence of the longest length goes before the share of memory.
    assert build(str(llama), NativeOptions(device="cpu")).info.total_blocks == 512 // 32
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 0)
    with pytest.raises(EngineError, match="kv_blocks"):
        build(str(llama), NativeOptions(device="cpu"))


@given(fraction=st.floats(0.01, 1.0), beside=st.integers(0, 1100))
def test_the_number_of_blocks_follows_the_fraction(fraction: float, beside: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "free_bytes", lambda device: 1000)
        for device in ("cpu", "cuda"):
            found = pool_module.blocks_that_fit(10, 50, torch.device(device), fraction, beside=beside)
            assert found == int((1000 - min(beside, 500)) * fraction) // 10


def test_a_gpus_pool_leaves_memory_for_logits_and_transfers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the share of memory that activations need does not cover them: 256 rows of a vocabulary of 262,144."""
    model = dataclasses.replace(loading.load(str(llama), device=torch.device("cpu")), device=torch.device("cuda"))
    huge = dataclasses.replace(model, vocab_size=262_144)
    rows = 256 * 262_144 * 4
    options = NativeOptions(max_running=256)
    assert pools.beside_bytes(dataclasses.replace(huge, device=torch.device("cpu")), options) == 0
    alone = pools.beside_bytes(huge, options)
    assert 3 * rows < alone < 7 * rows
    assert pools.beside_bytes(model, options) < rows
    assert pools.beside_bytes(huge, dataclasses.replace(options, transfer_bytes=1 << 28)) == alone + (1 << 28)
    speculative = dataclasses.replace(options, speculative_model="draft", num_speculative_tokens=3)
    assert pools.beside_bytes(huge, speculative, model) > alone + 9 * rows
    taken = []
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(pools, "KvPool", lambda shape, blocks, *rest: taken.append(blocks))
    for each in (options, dataclasses.replace(options, transfer_bytes=1 << 28), NativeOptions(kv_blocks=7)):
        pools.make_pools(huge, each, 512, hybrid=False)
    block = model.shape.block_bytes(32, model.dtype)
    assert taken == [int(((8 << 30) - alone) * 0.85) // block, int(((8 << 30) - alone - (1 << 28)) * 0.85) // block, 7]
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 1 << 30)
    pools.make_pools(huge, options, 512, hybrid=False)
    assert taken[-1] == int((1 << 29) * 0.85) // block, "a model that fits starts also where that is too much to leave"


@pytest.mark.parametrize(
    ("width", "role", "taken"), [(2, "decode", BUFFER_BYTES), (2, "aggregated", 0), (1, "decode", 0)]
)
def test_only_ranks_that_read_kv_leave_memory_for_blocks_of_other_widths(
    monkeypatch: pytest.MonkeyPatch, width: int, role: Any, taken: int
) -> None:
    given: dict[str, int] = {}
    monkeypatch.setattr(native, "from_settings", lambda *_, **options: given.update(options))
    build_engine(WorkerSettings(model="m", role=role, tensor_parallel_size=width), Path("m"))
    assert given == {"transfer_bytes": taken}


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_a_pool_takes_the_configured_fraction(llama: Path, monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    block_bytes = 3 * 2 * 32 * 2 * 16 * 4
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 100 * block_bytes)
    settings = WorkerSettings(model=str(llama), device="cpu", kv_memory_fraction=fraction)
    monkeypatch.setattr(native, "registry_from_settings", lambda settings, path: None)  # this model has no tokenizer
    assert native.from_settings(settings, llama).info.total_blocks == 100 * fraction


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16), ("fp8", torch.float8_e4m3fn)],
)
def test_kv_is_kept_in_the_dtype_that_was_asked_for(llama: Path, name: str, dtype: torch.dtype) -> None:
    """Half the bytes, twice the blocks; and what is computed from it differs by its rounding only."""
    engine: Any = build(str(llama), NativeOptions(device="cpu", block_size=8, kv_blocks=16, kv_dtype=name))
    assert engine.executor.pool.data.dtype == dtype
    assert engine.memory()["kv"].block_bytes == 3 * 2 * 8 * 2 * 16 * dtype.itemsize
    sampling = Sampling(temperature=0, logprobs=0)
    found = run(engine, [request(0, prompt(20), 8, sampling), request(1, prompt(20), 8, sampling)])
    exact = run(
        build(str(llama), NativeOptions(device="cpu", block_size=8, kv_blocks=16)),
        [request(0, prompt(20), 8, sampling)],
    )[0]
    assert tokens(found)[0] == tokens(found)[1]
    first, wanted = found[0][0].logprob, exact[0].logprob  # of tokens computed from the pool's values
    assert first is not None
    assert wanted is not None
    assert first.logprob == pytest.approx(wanted.logprob, abs={4: 1e-6, 2: 0.1, 1: 1.0}[dtype.itemsize])
    assert (abs(first.logprob - wanted.logprob) < 1e-5) == (dtype == torch.float32)  # it is really narrowed


def test_numbers_that_eight_bits_do_not_hold_become_the_largest() -> None:
    pool = KvPool(KvShape(1, 1, 2), 2, 4, torch.float8_e4m3fn, torch.device("cpu"), torch.float32)
    place = torch.tensor([1]), torch.tensor([2])
    pool.write(0, *place, torch.tensor([[[1e9, 0.3]]]), torch.tensor([[[-1e9, 2.0]]]))
    keys, values = pool.read(0, torch.tensor([[1]]))
    assert keys.dtype == torch.float32
    assert keys[0, 0, 2].tolist() == [448.0, 0.3125]
    assert values[0, 0, 2].tolist() == [-448.0, 2.0]
    pool.clear([1])
    assert not pool.read(0, torch.tensor([[1]]))[0].any()


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_a_workers_first_request_finds_an_engine_that_has_answered_before(
    llama: Path, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    computed: list[list[int]] = []
    real = TorchExecutor.execute

    def execute(self: TorchExecutor, plan: Any, scoring: Any = ()) -> Any:
        computed.append([slot.count for slot in plan])
        return real(self, plan, scoring)

    monkeypatch.setattr(TorchExecutor, "execute", execute)
    monkeypatch.setattr(native, "registry_from_settings", lambda settings, path: None)  # this model has no tokenizer
    engine = native.from_settings(WorkerSettings(device="cpu", kv_blocks=8, block_size=block_size), llama)
    assert computed == [[2], [1]]  # a prompt and a token
    assert not engine.has_work()
    assert engine.dump() == []
    stats = engine.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks, stats.prompt_tokens) == (0, 0, 8, 0)


def test_one_block_is_one_contiguous_range() -> None:
    pool = KvPool(KvShape(layers=3, kv_heads=2, head_dim=4), 5, 8, torch.float32, torch.device("cpu"))
    assert pool.data[2].is_contiguous()
    assert pool.data[3].data_ptr() - pool.data[2].data_ptr() == pool.block_bytes == 3 * 2 * 8 * 2 * 4 * 4


def test_a_length_beyond_the_model_is_refused(llama: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"513.*takes 512"):
        build(str(llama), NativeOptions(device="cpu", max_model_len=513))
    assert build(str(llama), NativeOptions(device="cpu", kv_blocks=4, max_model_len=100)).info.max_model_len == 100


def test_rope_that_depends_on_the_batch_is_kept_within_its_constant_range(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    LlamaForCausalLM(LlamaConfig(**{**COMMON, "rope_parameters": rope})).save_pretrained(tmp_path)
    assert build(str(tmp_path), NativeOptions(device="cpu", kv_blocks=4)).info.max_model_len == 64


def test_as_far_as_rope_scaling_goes_a_longer_length_may_be_asked_for(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    LlamaForCausalLM(LlamaConfig(**{**COMMON, "rope_parameters": rope})).save_pretrained(tmp_path)

    def length(wanted: int) -> int:
        return build(str(tmp_path), NativeOptions(device="cpu", kv_blocks=4, max_model_len=wanted)).info.max_model_len

    assert (length(0), length(100), length(2048)) == (512, 100, 2048)
    with pytest.raises(UnsupportedModel, match=r"2049.*takes 2048"):
        length(2049)


def test_an_empty_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        build(str(tmp_path), NativeOptions(device="cpu"))


def test_missing_weights_are_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="safetensors"):
        build(str(tmp_path), NativeOptions(device="cpu"))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba"}, "attention"),
        ({"model_type": "vit"}, "decoder-only"),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv layers"),
        ({"model_type": "no-such-thing"}, "config"),
    ],
)
def test_other_architectures_are_refused_before_weights_are_read(
    kind: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(kind))
    with pytest.raises(UnsupportedModel, match=complaint):
        build(str(tmp_path), NativeOptions(device="cpu"))


def test_models_that_do_more_than_the_interface_has_are_refused(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiffLlamaForCausalLM(DiffLlamaConfig(**COMMON)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="attends twice"):
        build(str(tmp_path), NativeOptions(device="cpu", kv_blocks=4))

    def unscaled(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **{**kwargs, "scaling": 1.0})

    with monkeypatch.context() as patch:
        patch.setattr(attention_module, "attention", unscaled)
        with pytest.raises(UnsupportedModel, match="cannot be paged"):
            build(str(model_dir("qwen3")), NativeOptions(device="cpu", kv_blocks=4))
    build(str(model_dir("qwen3")), NativeOptions(device="cpu", kv_blocks=4))


def test_attention_beyond_causal_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    module: Any = torch.nn.Module()
    paged: Any = object()
    with pytest.raises(UnsupportedAttention, match="position_bias"):
        attention(module, q, q, q, None, paged=paged, position_bias=torch.zeros(2))
    with pytest.raises(UnsupportedAttention, match="causal"):
        attention(module, q, q, q, torch.zeros(3, 3), paged=paged)
    with pytest.raises(UnsupportedAttention, match="shape"):
        attention(module, q, q, q[..., :2], None, paged=paged)


def test_an_executor_that_runs_out_of_memory_names_the_knobs(llama: Path) -> None:
    engine = build(str(llama), NativeOptions(device="cpu", kv_blocks=16))
    executor: Any = engine.executor

    def full(**_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    object.__setattr__(executor.model, "forward", full)
    engine.submit(request(0, prompt(3), 4))
    with pytest.raises(EngineError, match=r"max_batched_tokens.*max_running.*kv_blocks"):
        engine.step()


def test_seeded_answers_are_the_same_alone_together_and_resumed(llama: Path) -> None:
    def ask(n: int, **more: Any) -> Any:
        return request(n, prompt(9 + n), 20, Sampling(temperature=0.8, top_p=0.95, seed=n), choice=n % 2, **more)

    def engine() -> Any:
        return build(str(llama), NativeOptions(device="cpu", block_size=8, kv_blocks=64))

    together = tokens(run(engine(), [ask(n) for n in range(6)]))
    for n in range(6):
        assert tokens(run(engine(), [ask(n)]))[n] == together[n]
    for cut in range(1, 20, 6):
        assert tokens(run(engine(), [ask(3, generated=together[3][:cut])]))[3] == together[3][cut:]
    assert len({tuple(answer) for answer in together.values()}) == 6


def test_penalties_survive_preemption_and_resumption(llama: Path) -> None:
    def ask(n: int, **more: Any) -> Any:
        return request(n, prompt(20, n), 24, Sampling(temperature=0, frequency_penalty=1.0), **more)

    roomy = tokens(run(build(str(llama), NativeOptions(device="cpu", block_size=8)), [ask(n) for n in range(4)]))
    tight = build(str(llama), NativeOptions(device="cpu", block_size=8, kv_blocks=14))
    assert tokens(run(tight, [ask(n) for n in range(4)])) == roomy
    assert tight.stats().preemptions
    assert tokens(run(tight, [ask(0, generated=roomy[0][:9])]))[0] == roomy[0][9:]


def test_logprobs_are_those_of_a_plain_forward(llama: Path) -> None:
    answer = run(
        build(str(llama), NativeOptions(device="cpu", kv_blocks=16)), [request(0, prompt(11), 6, Sampling(logprobs=4))]
    )[0]
    drawn = [output.token for output in answer]
    with torch.inference_mode():
        logits = reference(llama)(torch.tensor([[*prompt(11), *drawn]])).logits[0, 10:-1]
    for output, row in zip(answer, logits.log_softmax(-1), strict=True):
        assert output.logprob is not None
        assert output.logprob.logprob == pytest.approx(float(row[output.token]), abs=1e-4)
        assert [value for _, value in output.logprob.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_eos_ends_unless_too_early_or_ignored(llama: Path) -> None:
    engine = build(str(llama), NativeOptions(device="cpu", kv_blocks=16))
    eager = Sampling(temperature=0, logit_bias={EOS: 100.0})

    def ask(**stop: Any) -> tuple[list[int], str]:
        outputs = run(engine, [request(0, prompt(5), 12, eager, stop=Stop(12, **stop))])[0]
        return [output.token for output in outputs], outputs[-1].finish

    assert ask() == ([EOS], "stop")
    answer, finish = ask(min_tokens=7)
    assert (len(answer), finish) == (8, "stop")
    assert EOS not in answer[:7]
    assert ask(ignore_eos=True) == ([EOS] * 12, "length")
    assert ask(ignore_eos=True, min_tokens=12) == ([EOS] * 12, "length")


class _Merged(torch.nn.Module):
    """As ``cuda.modules`` merge layers: the first of several computes all."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(layers[0].in_features, sum(each.out_features for each in layers), bias=False)
        self.linear.weight.data = torch.cat([each.weight.data for each in layers])
        self._sizes = [each.out_features for each in layers]

    def parts(self, path: str) -> list[tuple[str, torch.nn.Linear, int, int]]:
        above, starts = path.rpartition(".")[0], (0, self._sizes[0], sum(self._sizes[:2]))
        names = (f"{above}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        return [
            (name, self.linear, *each) for name, each in zip(names, zip(starts, self._sizes, strict=True), strict=True)
        ]


def test_weights_find_their_places_in_a_model_whose_layers_were_merged() -> None:
    model, merged = (LlamaForCausalLM(LlamaConfig(**COMMON | {"tie_word_embeddings": True})) for _ in range(2))
    for layer in merged.model.layers:
        attends = layer.self_attn
        attends.q_proj = _Merged([attends.q_proj, attends.k_proj, attends.v_proj])
        attends.k_proj, attends.v_proj = torch.nn.Identity(), torch.nn.Identity()
    places, values = places_of(merged), dict(model.named_parameters())
    assert values.keys() <= places.keys()
    for name, value in values.items():
        places[name].copy_(value.data)
    first, expected = merged.model.layers[0].self_attn, model.model.layers[0].self_attn
    whole = torch.cat([each.weight for each in (expected.q_proj, expected.k_proj, expected.v_proj)])
    assert torch.equal(first.q_proj.linear.weight, whole)
    assert torch.equal(merged.lm_head.weight, model.lm_head.weight), "tied to the embeddings"


def test_tied_weights_are_still_tied_wherever_they_are() -> None:
    model = LlamaForCausalLM(LlamaConfig(**COMMON | {"tie_word_embeddings": True}))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data)  # as a rewritten layer has it
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    host, kept = HostCopy(model), model.lm_head.weight.data  # kept, so that its memory is not taken again
    for _ in range(2):
        for move in (host.leave, lambda: host.bring(torch.device("cpu"))):
            move()
            assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
            assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
            assert model.lm_head.weight.data_ptr() != kept.data_ptr(), "not moved"
            kept = model.lm_head.weight.data


@pytest.mark.parametrize(("changed", "told"), [({"rms_norm_eps": 0.1}, "rms_norm_eps differ"), ({}, "")])
def test_weights_of_another_configuration_are_refused(
    llama: Path, tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    """They would load, and answer otherwise than the model that they are of."""
    engine = build(str(llama), NativeOptions(device="cpu", kv_blocks=9))
    other = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | changed | {"transformers_version": "0"}))
    assert engine.weights is not None
    engine.weights.hold()
    with pytest.raises(RequestError, match=told) if told else contextlib.nullcontext():
        engine.weights.replace(engine.weights.read(other), lambda key, generated: b"r" * 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_of_sampled_tokens_are_those_of_transformers(dtype: str) -> None:
    """As a trainer recomputes them: on average within 0.01, at most 0.1 in bfloat16."""
    engine = build(str(DEMO), NativeOptions(device="cpu", dtype=dtype, kv_blocks=40))
    known = prompt(40)
    engine.submit(request("a", known, 60, Sampling(temperature=0.8, seed=3, logprobs=0)))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=getattr(torch, dtype)).eval()
    drawn = [each.token for each in outputs]
    with torch.inference_mode():
        values = model(torch.tensor([[*known, *drawn]])).logits[0].float().log_softmax(-1)
    wanted = values[len(known) - 1 : -1].gather(1, torch.tensor(drawn)[:, None])[:, 0]
    found = torch.tensor([each.logprob.logprob for each in outputs if each.logprob is not None])
    difference = (found - wanted).abs()
    assert len(found) == 60
    assert float(difference.mean()) <= 0.01
    assert float(difference.max()) <= 0.1


@pytest.mark.parametrize(
    ("name", "quantization", "mapped"),
    [("gemma3", "", True), ("gpt_oss", "fp8", True), ("phi3", "fp8", True), ("mixtral", "", False)],
)
def test_new_weights_answer_as_an_engine_that_was_started_with_them(
    name: str, quantization: str, mapped: bool, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Mapped where tensors have the names of modules; those with a tensor per expert are loaded whole."""
    trained = other_weights(model_dir(name), tmp_path / "trained")
    options = NativeOptions(device="cpu", block_size=8, kv_blocks=64, threads=1, quantization=quantization)
    asked = [request(1, prompt(13), 12)]
    engine, fresh = build(str(model_dir(name)), options), build(str(trained), options)
    assert engine.weights is not None
    read = engine.weights.read(trained)
    assert (read.values is not None) == mapped
    engine.weights.hold()
    engine.weights.replace(read, lambda key, generated: b"r" * 16)
    engine.weights.proceed()
    assert tokens(run(engine, asked)) == tokens(run(fresh, asked))
