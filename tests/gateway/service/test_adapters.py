"""Who may load and unload adapters. What loading does is in ``tests/pipeline/test_adapters.py``."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.gateway.access.authentication import ANYONE, OPERATOR, Caller, Sight
from penstock.gateway.service import adapters as adapters_module
from penstock.gateway.service.adapters import AdapterLoading
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import AdapterEntry, LoraAdapter, Registration, decode_adapter
from penstock.schemas.keys import ApiKey
from penstock.schemas.subjects import Subjects, adapter_key
from penstock.schemas.wire import encode
from tests.schemas.samples import REQUEST
from tests.workers.support import dial

BODY = json.dumps({"lora_name": "poet", "lora_path": "poet"}).encode()


class NoModels:
    """A fleet that was asked: the caller has passed."""

    models: tuple[Any, ...] = ()
    models_by_name: dict[str, Any] = {}

    def adapters(self, caller: Caller) -> tuple[Any, ...]:
        return ()


def key(**fields: Any) -> ApiKey:
    return ApiKey("0a1b2c3d4e5f", b"", "acme", **fields)


@pytest.mark.parametrize("open_to_all", [False, True])
@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        (OPERATOR, True),
        (Caller("acme", None, key=key(operator=True)), True),
        (Caller("acme", "acme", key=key()), False),
        (Caller("acme", "acme", key=key(), models=["m"]), False),
        (ANYONE, None),
    ],
)
async def test_only_operators_change_adapters_unless_no_keys_are_in_use_and_all_may(
    caller: Caller, allowed: bool | None, open_to_all: bool
) -> None:
    fleet: Any = NoModels()
    loading = AdapterLoading((), fleet, fleet, open_to_all=open_to_all)
    for work, passed in ((loading.load, Code.invalid_request), (loading.unload, Code.model_not_found)):
        with pytest.raises(ServingError) as refused:
            await work(BODY, caller)
        may = open_to_all if allowed is None else allowed
        assert refused.value.code is (passed if may else Code.permission_denied)


@pytest.mark.parametrize(("names", "code"), [(["m"], Code.permission_denied), (["m", "poet"], Code.invalid_request)])
async def test_an_operator_s_key_for_certain_names_loads_no_others(names: list[str], code: Code) -> None:
    """It could replace what others use by a name that it may not even ask."""
    fleet: Any = NoModels()
    loading = AdapterLoading((), fleet, fleet, open_to_all=True)
    with pytest.raises(ServingError) as refused:
        await loading.load(BODY, Caller("acme", None, key=key(operator=True), models=names))
    assert refused.value.code is code


def test_a_key_for_an_adapter_reads_its_requests_and_not_the_model_s() -> None:

    adapted = msgspec.structs.replace(REQUEST, lora="poet@0a")
    plain = msgspec.structs.replace(REQUEST, lora="")
    assert Sight(models=frozenset({"poet"})).includes(adapted)
    assert not Sight(models=frozenset({"poet"})).includes(plain)
    assert not Sight(models=frozenset({REQUEST.model})).includes(adapted)


@pytest.fixture
async def bus(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Bus]:
    async with dial(broker, pipeline) as made:
        yield made


class OneModel(NoModels):
    """A fleet whose only worker serves one adapter, and has unloaded it when it is looked at again."""

    def __init__(self, adapter: LoraAdapter) -> None:
        worker = Registration("w", "m", "aggregated", "mock", 1, 32, 9, 9, 99, adapters=(adapter,), adapter_slots=1)
        self.model = SimpleNamespace(name="m", expected=True, workers={"w"}, adapters={})
        self.adapter = adapter
        self._members: list[dict[str, Any]] = [{}, {"w": SimpleNamespace(registration=worker)}]

    @property
    def watches(self) -> list[Any]:
        return [SimpleNamespace(members=self._members.pop() if len(self._members) > 1 else self._members[0])]

    def adapters(self, caller: Caller) -> tuple[Any, ...]:
        return ((self.adapter, self.model),)


async def test_entries_of_unloaded_adapters_are_bounded_but_for_those_of_flags(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "MOST_UNLOADED", 3)
    monkeypatch.setattr(adapters_module, "PRUNED_AT_ONCE", 2)
    bucket = bus.subjects.bucket("adapters")

    async def entries() -> dict[str, AdapterEntry]:
        found = [decode_adapter(each.data) async for each in read(bus, f"KV_{bucket}", f"$KV.{bucket}.>") if each.data]
        return {each.name: each for each in found}

    async def unload(name: str, *, revision: int = 1) -> None:
        fleet: Any = OneModel(LoraAdapter(name, "d", revision=revision))
        loading = AdapterLoading((bus,), fleet, fleet, open_to_all=True)
        await loading.unload(json.dumps({"lora_name": name}).encode(), ANYONE)

    subject = f"$KV.{bucket}.{adapter_key('m', 'in-use')}"
    await bus.nc.request(subject, encode(AdapterEntry("in-use", "m", "x")), timeout=5)
    await unload("flagged", revision=0)
    await unload("flagged", revision=7)  # it was replaced meanwhile: the flag is still there
    for number in range(5):
        await unload(f"step-{number}")
    assert set(await entries()) == {"in-use", "flagged", *(f"step-{number}" for number in range(5))}
    await unload("step-5")
    assert set(await entries()) == {"in-use", "flagged", "step-3", "step-4", "step-5"}
    assert (await entries())["flagged"] == AdapterEntry("flagged", "m", unloaded=True, flagged=True)
