from typing import Any

import msgspec

from gateway.images.model_registry import REMEMBERED, DiffusionModelRegistry
from schemas.fleet import Diffuser, Registration, State

MADE = Diffuser("image", "FluxPipeline", 64, 64, 4, ("png",), 1 << 20, 50)


def registration(worker: str = "w", model: str = "painter", **more: Any) -> Registration:
    fields: dict[str, Any] = {"role": "diffusion", "diffusion": MADE} | more
    return Registration(
        worker, model, engine="diffusers", epoch=1, block_size=32, total_blocks=0, slots=1, max_model_len=0, **fields
    )


def test_a_model_is_known_by_all_its_names_from_its_first_worker_on() -> None:
    diffusion_models = DiffusionModelRegistry()
    assert not diffusion_models.known
    diffusion_models.put(registration(aliases=("artist",)))
    assert dict(diffusion_models.known) == {"painter": MADE, "artist": MADE} == diffusion_models.present()


def test_a_worker_of_another_role_makes_no_pictures() -> None:
    diffusion_models = DiffusionModelRegistry()
    diffusion_models.put(registration(role="aggregated"))
    diffusion_models.put(registration(diffusion=None))
    assert not diffusion_models.known


def test_a_model_without_workers_stays_known_but_is_not_listed() -> None:
    diffusion_models = DiffusionModelRegistry()
    diffusion_models.put(registration("a"))
    diffusion_models.put(registration("b"))
    diffusion_models.left("a")
    assert diffusion_models.present()
    diffusion_models.put(registration("b", state=State.draining))
    assert (diffusion_models.present(), dict(diffusion_models.known)) == ({}, {"painter": MADE})
    diffusion_models.left("b")
    diffusion_models.left("nobody")
    assert (diffusion_models.present(), dict(diffusion_models.known)) == ({}, {"painter": MADE})


def test_the_last_to_register_says_what_is_made() -> None:
    diffusion_models = DiffusionModelRegistry()
    more = msgspec.structs.replace(MADE, max_steps=99)
    diffusion_models.put(registration("a"))
    diffusion_models.put(registration("b", diffusion=more))
    assert diffusion_models.known["painter"] == more


def test_the_number_of_models_is_bounded() -> None:
    diffusion_models = DiffusionModelRegistry()
    for number in range(REMEMBERED + 10):
        diffusion_models.put(registration(model=f"m{number}"))
    assert len(diffusion_models.known) == REMEMBERED
    assert "m0" not in diffusion_models.known
    assert f"m{REMEMBERED + 9}" in diffusion_models.known
