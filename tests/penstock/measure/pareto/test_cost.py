"""The cost of a million output tokens, by hand and by proportion."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.pareto.records import BadPrices, GpuCost, Prices, cost, gpu_of, read_prices

FILE = """
currency: EUR
energy_price_per_kwh: 0.2
pue: 1.5
utilisation: 0.5
gpus:
  big: {price_per_hour: 3.6, watts: 1000, idle_watts: 200}
"""
AMOUNTS = st.floats(0.01, 1e4)


def test_a_cost_computed_by_hand() -> None:
    prices = read_prices(FILE)
    found = cost(prices, gpu_of(prices, ""), 1000.0)
    # 3.6 M tokens in a busy hour, half of the hours busy: 1/1.8 hours, at (500 + 100) W × 1.5 = 0.9 kW.
    assert found.hardware == pytest.approx(2.0)
    assert found.energy_kwh == pytest.approx(0.5)
    assert found.energy == pytest.approx(0.1)
    assert found.total == pytest.approx(2.1)


@given(AMOUNTS, AMOUNTS, AMOUNTS, st.floats(0.05, 1.0))
def test_twice_the_throughput_costs_half_and_idle_hours_never_make_it_cheaper(
    price: float, watts: float, throughput: float, utilisation: float
) -> None:
    gpu = GpuCost(price_per_hour=price, watts=watts, idle_watts=watts / 4)
    full = Prices(gpus={"x": gpu}, energy_price_per_kwh=0.1, pue=1.2)
    partly = Prices(gpus={"x": gpu}, energy_price_per_kwh=0.1, pue=1.2, utilisation=utilisation)
    assert cost(full, gpu, 2 * throughput).total == pytest.approx(cost(full, gpu, throughput).total / 2)
    assert cost(partly, gpu, throughput).total >= cost(full, gpu, throughput).total * (1 - 1e-9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus: {}", "no GPU has a price"),
        ("gpus: {x: {price_per_hour: -1}}", ">= 0"),
        ("gpus: {x: {price_per_hour: 1}}\npue: 0.5", ">= 1"),
        ("gpus: {x: {price_per_hour: 1}}\nutilisation: 0", "> 0"),
        ("gpus: {x: {price_per_hour: 1, wats: 3}}", "wats"),
        ("gpus: [", "parsing"),
        ("", "object"),
    ],
)
def test_a_price_file_that_cannot_be_used_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(BadPrices, match=says):
        read_prices(text)


def test_a_type_without_a_price_is_named_with_those_that_have_one() -> None:
    prices = Prices(gpus={"a": GpuCost(price_per_hour=1), "b": GpuCost(price_per_hour=2)})
    assert gpu_of(prices, "b").price_per_hour == 2
    with pytest.raises(BadPrices, match="GPU type c; the price file has a, b"):
        gpu_of(prices, "c")
    with pytest.raises(BadPrices, match="unknown"):
        gpu_of(prices, "")
