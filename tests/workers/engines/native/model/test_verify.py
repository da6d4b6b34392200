"""How far a model's logits may be from transformers' own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.model import Model, UnsupportedModel, float32_product
from penstock.workers.engines.native.model.verify import Expected, reference, reference_attention, verify
from tests.workers.engines.native.models import CONFIGS


def described(name: str, dtype: torch.dtype) -> Model:
    attention.register()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention.NAME, dtype=dtype)
    return describe(model.eval().requires_grad_(False))


def test_only_mixtures_of_experts_in_low_precision_have_noise() -> None:
    assert 0 < reference(described("qwen3_moe", torch.bfloat16)).noise < 1
    assert reference(described("qwen3_moe", torch.float32)).noise == 0
    assert reference(described("llama", torch.bfloat16)).noise == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_logits_are_not_rounded_to_the_models_dtype(name: str) -> None:
    """The output layer's sums are those of float32; soft-caps and scales behind it are computed in it, too."""
    model = described(name, torch.bfloat16)
    states = list[torch.Tensor]()
    head = model.forward.get_output_embeddings()
    head.register_forward_hook(lambda module, given, out: states.extend((given[0], out)))
    logits = reference(model).logits
    given, product = states
    assert given.dtype == torch.bfloat16
    assert logits.dtype == product.dtype == torch.float32
    torch.testing.assert_close(product, given.float() @ head.weight.float().T)
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


@pytest.mark.parametrize("cast", [1, 100, 1 << 20])
def test_a_weight_that_a_cpu_casts_in_parts_gives_the_same_logits(cast: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.engines.native.model.model.CAST", cast)
    x, weight, bias = (torch.randn(size).bfloat16() for size in ((2, 5, 8), (33, 8), (33,)))
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(float32_product(x, weight, bias), expected)


def test_logits_may_be_as_far_as_twice_the_noise() -> None:
    model = described("llama", torch.float32)
    away = reference(model).logits * 1.15
    with pytest.raises(UnsupportedModel, match="cannot be paged"):
        verify(model, Expected(away), reference_attention)
    with pytest.raises(UnsupportedModel, match="cannot be paged"):
        verify(model, Expected(away, noise=0.06), reference_attention)
    verify(model, Expected(away, noise=0.07), reference_attention)
