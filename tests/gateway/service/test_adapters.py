"""Who may load and unload adapters. What loading does is in ``tests/pipeline/test_adapters.py``."""

import json
from typing import Any

import msgspec
import pytest

from penstock.gateway.access.authentication import ANYONE, OPERATOR, Caller, Sight
from penstock.gateway.service.adapters import AdapterLoading
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey
from tests.schemas.samples import REQUEST

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
