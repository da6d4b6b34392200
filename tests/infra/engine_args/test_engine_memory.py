"""Sizes of models against what was published, and the memory estimate against sums done by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import configs
from penstock.infra.engine_args.memory_estimate import (
    UnknownShape,
    estimate,
    kv_values,
    layer_windows,
    shape_of,
    weight_bytes,
)
from penstock.infra.engine_args.tree import decode

GIB = 1 << 30
MODELS = Path(configs.__file__).parent / "recipes" / "models"


def configs() -> Iterator[Any]:
    for path in sorted(MODELS.glob("*.json")):
        yield pytest.param(msgspec.json.decode(path.read_bytes()), id=path.stem)


def config(name: str) -> dict[str, Any]:
    (path,) = MODELS.glob(f"*{name}.json")
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return found


@pytest.mark.parametrize("model", list(configs()))
def test_a_model_has_as_many_parameters_as_it_is_advertised_with(model: dict[str, Any]) -> None:
    assert shape_of(model).parameters / 1e9 == pytest.approx(model["_parameters_b"], rel=0.005)


@pytest.mark.parametrize(
    ("name", "per_layer", "layers"),
    [
        ("Llama-3.1-8B-Instruct", 2048, 32),
        ("DeepSeek-R1", 576, 61),
        ("gpt-oss-120b", 1024, 36),
        ("gemma-3-1b-it", 512, 26),
    ],
)
def test_kv_values_per_token_and_layer_are_the_published_ones(name: str, per_layer: int, layers: int) -> None:
    shape = shape_of(config(name))
    assert (kv_values(shape, 1), shape.layers) == (per_layer, layers)


def test_kv_heads_split_over_ranks_until_each_has_one_but_a_latent_never_does() -> None:
    llama, deepseek = shape_of(config("Llama-3.1-8B-Instruct")), shape_of(config("DeepSeek-R1"))
    assert [kv_values(llama, ranks) for ranks in (1, 2, 8, 16)] == [2048, 1024, 256, 256]
    assert {kv_values(deepseek, ranks) for ranks in (1, 8)} == {576}


def test_weights_of_a_dense_model_are_two_bytes_per_parameter_over_the_ranks() -> None:
    shape = shape_of(config("Llama-3.1-8B-Instruct"))
    whole = weight_bytes(decode({}), shape)
    assert whole == 2 * shape.parameters
    for split in ({"tensor_parallel_size": 4}, {"pipeline_parallel_size": 4}):
        assert weight_bytes(decode(split), shape) == pytest.approx(whole / 4, rel=1e-6)


def test_attention_dp_keeps_the_attention_whole_and_splits_the_experts() -> None:
    shape = shape_of(config("DeepSeek-R1"))
    ranks = {"tensor_parallel_size": 8, "moe_expert_parallel_size": 8}
    split, whole = (weight_bytes(decode({**ranks, "enable_attention_dp": dp}), shape) for dp in (False, True))
    extra = shape.layers * shape.attention * 7 / 8 + 58 * shape.experts.shared * 7 / 8 if shape.experts else 0
    assert whole - split == pytest.approx(extra + shape.embeddings * 2 * 7 / 8, rel=1e-6)


def test_slots_of_the_load_balancer_cost_memory() -> None:
    shape = shape_of(config("DeepSeek-R1-FP4"))
    ranks = {"tensor_parallel_size": 16, "moe_expert_parallel_size": 16, "enable_attention_dp": True}
    plain = weight_bytes(decode(ranks), shape)
    more = weight_bytes(
        decode({**ranks, "moe_config": {"backend": "WIDEEP", "load_balancer": {"num_slots": 288}}}), shape
    )
    assert shape.experts is not None
    assert more - plain == pytest.approx(58 * 2 * shape.experts.parameters * 4.5 / 8, rel=1e-6)


def test_sliding_layers_bound_the_cache_and_global_ones_do_not() -> None:
    shape = shape_of(config("gemma-3-1b-it"))
    windowed = decode({"kv_cache_config": {"max_attention_window": [512] * 5 + [32768]}})
    assert [layer for layer, window in enumerate(layer_windows(windowed, shape)) if window == 32768] == [5, 11, 17, 23]
    short, long = (estimate(windowed, shape, 80 * GIB, length=length).per_sequence for length in (16384, 32768))
    assert long - short == 4 * 16384 * 512 * 2
    assert estimate(decode({}), shape, 80 * GIB, length=32768).per_sequence == 26 * 32768 * 512 * 2


def test_fp8_halves_the_cache() -> None:
    shape = shape_of(config("Llama-3.1-8B-Instruct"))
    bf16, fp8 = (
        estimate(decode({"kv_cache_config": {"dtype": dtype}}), shape, 80 * GIB, length=4096)
        for dtype in ("auto", "fp8")
    )
    assert bf16.kv_per_token == 2 * fp8.kv_per_token == 131072
    assert fp8.sequences in (2 * bf16.sequences, 2 * bf16.sequences + 1)


@given(st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.integers(20, 200), st.integers(32, 65536))
def test_a_larger_fraction_never_holds_less_and_nothing_exceeds_the_gpu(
    one: float, two: float, gib: int, length: int
) -> None:
    shape = shape_of(config("Llama-3.1-8B-Instruct"))
    small, large = (
        estimate(decode({"kv_cache_config": {"free_gpu_memory_fraction": f}}), shape, gib * GIB, length=length)
        for f in sorted((one, two))
    )
    assert small.blocks <= large.blocks
    assert large.weights + large.reserve + large.pool <= max(gib * GIB, large.weights + large.reserve)
    assert large.sequences * large.per_sequence <= large.pool


def test_a_limit_in_tokens_or_bytes_wins_over_the_fraction() -> None:
    shape = shape_of(config("Llama-3.1-8B-Instruct"))
    tokens = estimate(decode({"kv_cache_config": {"max_tokens": 4096}}), shape, 80 * GIB, length=1024)
    assert (tokens.sequences, tokens.blocks) == (4, 128)
    total = estimate(decode({"kv_cache_config": {"max_gpu_total_bytes": GIB}}), shape, 80 * GIB, length=1024)
    assert total.pool == GIB


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_config_without_sizes_is_refused_and_the_key_named(key: str) -> None:
    model = config("Llama-3.1-8B-Instruct")
    del model[key]
    with pytest.raises(UnknownShape, match=key):
        shape_of(model)


def test_a_long_answer_fits_where_encode_prefill_and_decode_are_apart_and_not_where_one_gpu_does_all() -> None:
    shape = shape_of(config("llava-v1.6-mistral-7b-hf"))
    without_vision = msgspec.structs.replace(shape, vision=0)
    gpu, prompt, answer = 20 * GIB, 8192, 14_000

    def fits(wide: int, length: int, shape: Any) -> bool:
        return estimate(decode({"max_num_tokens": wide, "max_batch_size": 16}), shape, gpu, length=length).fits

    assert not fits(prompt, prompt + answer, shape)  # vision, wide steps and the whole context at once
    assert fits(prompt, prompt, without_vision)  # prefill: its KV goes on before the answer grows
    assert fits(16, prompt + answer, without_vision)  # decode: a token per sequence and step
    assert not fits(prompt, prompt + answer, without_vision)  # the vision tower alone does not make the difference
