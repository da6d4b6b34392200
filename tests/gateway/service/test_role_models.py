from typing import Any

import msgspec
import pytest

from penstock.gateway.service import fleet
from penstock.gateway.service.fleet import MAX_MODELS, RoleModels, ServedLately
from penstock.infra.bus.connection import Bus
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import DIFFUSION, Diffuser, Registration, WorkerState
from penstock.schemas.requests import EMBEDDING, new_request_id
from penstock.schemas.wire import encode
from tests.gateway.request_log.test_inflight import request_of

MODEL = Diffuser("image", "FluxPipeline", 64, 64, 4, ("png",), 1 << 20, 50)


def models() -> RoleModels[Diffuser]:
    return RoleModels(DIFFUSION, lambda registration: registration.diffusion)


def registration(worker: str = "w", model: str = "painter", **more: Any) -> Registration:
    fields: dict[str, Any] = {"role": "diffusion", "diffusion": MODEL} | more
    return Registration(
        worker, model, engine="diffusers", epoch=1, block_size=32, total_blocks=0, slots=1, max_model_len=0, **fields
    )


def test_a_model_is_known_by_all_its_names_from_its_first_worker_on() -> None:
    registry = models()
    assert not registry.known
    registry.put(registration(aliases=("artist",)))
    assert dict(registry.known) == {"painter": MODEL, "artist": MODEL} == registry.ready()


def test_a_worker_of_another_role_is_not_registered() -> None:
    registry = models()
    registry.put(registration(role="aggregated"))
    registry.put(registration(diffusion=None))
    assert not registry.known


def test_a_model_without_workers_stays_known_but_is_not_listed() -> None:
    registry = models()
    registry.put(registration("a"))
    registry.put(registration("b"))
    registry.remove("a")
    assert registry.ready()
    registry.put(registration("b", state=WorkerState.draining))
    assert (registry.ready(), dict(registry.known)) == ({}, {"painter": MODEL})
    registry.remove("b")
    registry.remove("nobody")
    assert (registry.ready(), dict(registry.known)) == ({}, {"painter": MODEL})


def test_the_worker_that_registered_last_counts() -> None:
    registry = models()
    more = msgspec.structs.replace(MODEL, max_steps=99)
    registry.put(registration("a"))
    registry.put(registration("b", diffusion=more))
    assert registry.known["painter"] == more


def test_the_number_of_models_is_bounded() -> None:
    registry = models()
    for number in range(MAX_MODELS + 10):
        registry.put(registration(model=f"m{number}"))
    assert len(registry.known) == MAX_MODELS
    assert "m0" not in registry.known
    assert f"m{MAX_MODELS + 9}" in registry.known


# --- models of workers that a gateway has not seen ---


async def accepted(bus: Bus, model: str, endpoint: str) -> None:
    request = msgspec.structs.replace(request_of(), model=model, endpoint=endpoint)
    await bus.js.publish(bus.subjects.request(model, "standard", new_request_id()), encode(request))


async def code_of(lately: ServedLately, name: str, endpoint: str = EMBEDDING) -> Code | None:
    try:
        await lately.check(endpoint, name)
    except ServingError as error:
        return error.code if error.retry_after else None
    return None


async def test_a_model_of_which_the_log_has_a_request_is_expected_back(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accepted(bus, "vectors.v2", EMBEDDING)
    await accepted(bus, "tiny", "chat")
    lately = ServedLately(bus)
    assert await code_of(lately, "vectors.v2") is Code.broker_unavailable
    for name, endpoint in (("tiny", EMBEDDING), ("vectors.v2", "image"), ("vectors", EMBEDDING), ("*", EMBEDDING)):
        assert await code_of(lately, name, endpoint) is None
    monkeypatch.setattr(fleet, "LATELY_NS", -1_000_000_000)
    assert await code_of(lately, "vectors.v2") is Code.broker_unavailable, "the answer is kept for a while"
    assert await code_of(ServedLately(bus), "vectors.v2") is None, "its last request was too long ago"


async def test_unknown_names_cost_no_memory_and_the_broker_one_question_each(bus: Bus) -> None:
    lately, before = ServedLately(bus), bus.nc.stats["out_msgs"]
    for _ in range(3):
        assert await code_of(lately, "nothing") is None
    assert bus.nc.stats["out_msgs"] - before <= 2
    for number in range(MAX_MODELS + 5):
        await code_of(lately, f"no-{number}")
    assert len(lately._looked) == MAX_MODELS
