from typing import Any

import msgspec

from gateway.role_models import MAX_MODELS, RoleModels
from schemas.fleet import DIFFUSION, Diffuser, Registration, State

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
    registry.put(registration("b", state=State.draining))
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
