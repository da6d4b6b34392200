"""The cost of a million output tokens, in money and in energy, from a price file. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

_Amount = Annotated[float, Meta(ge=0)]
_HOUR_S = 3600
_MILLION = 1e6


class BadPrices(ValueError):
    """A price file that cannot be used, or that lacks a type of GPU."""


class GpuCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU with its share of the host.

    Attributes:
        price_per_hour: rent, or purchase and upkeep spread over the years of use; without separately paid energy.
        watts: power under load.
        idle_watts: power without load; None: the same as under load.
    """

    price_per_hour: _Amount
    watts: _Amount = 0.0
    idle_watts: _Amount | None = None


class Prices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Attributes:
        gpus: by type.
        energy_price_per_kwh: 0 if the rent includes it.
        pue: power usage effectiveness: energy of the whole data centre for each unit of the machines'.
        utilisation: share of the hours that the deployment spends at the measured load; idle hours are paid, too.
    """

    gpus: dict[str, GpuCost]
    currency: str = "USD"
    energy_price_per_kwh: _Amount = 0.0
    pue: Annotated[float, Meta(ge=1)] = 1.0
    utilisation: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Cost(Struct, frozen=True):
    """The cost of a million output tokens: both parts in the file's currency, the energy also in kWh."""

    hardware: float
    energy: float
    energy_kwh: float

    @property
    def total(self) -> float:
        return self.hardware + self.energy


def read_prices(text: str) -> Prices:
    """
    Args:
        text: YAML.

    Raises:
        BadPrices: it is none, or has unknown or impossible values.
    """
    import yaml

    try:
        prices = msgspec.convert(yaml.safe_load(text), Prices)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise BadPrices(str(error)) from None
    if not prices.gpus:
        raise BadPrices("no GPU has a price: add one under `gpus`")
    return prices


def gpu_of(prices: Prices, name: str) -> GpuCost:
    """The prices of a type of GPU; "" stands for the only one.

    Raises:
        BadPrices: the file has no such type, or several and none was named.
    """
    if not name and len(prices.gpus) == 1:
        return next(iter(prices.gpus.values()))
    if name not in prices.gpus:
        names = ", ".join(sorted(prices.gpus))
        raise BadPrices(f"GPU type {name or 'unknown'}; the price file has {names}")
    return prices.gpus[name]


def cost(prices: Prices, gpu: GpuCost, tokens_per_s_per_gpu: float) -> Cost:
    """The cost of a million output tokens at a throughput above 0."""
    busy = prices.utilisation
    idle_watts = gpu.watts if gpu.idle_watts is None else gpu.idle_watts
    kwh_per_hour = (busy * gpu.watts + (1 - busy) * idle_watts) / 1e3 * prices.pue
    hours = _MILLION / (tokens_per_s_per_gpu * _HOUR_S * busy)
    kwh = kwh_per_hour * hours
    return Cost(gpu.price_per_hour * hours, kwh * prices.energy_price_per_kwh, kwh)
