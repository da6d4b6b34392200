from typing import Any

import msgspec

from gateway.images.models import REMEMBERED, Studios
from schemas.fleet import Diffuser, Registration, State

MADE = Diffuser("image", "FluxPipeline", 64, 64, 4, ("png",), 1 << 20, 50)


def registration(worker: str = "w", model: str = "painter", **more: Any) -> Registration:
    fields: dict[str, Any] = {"role": "diffusion", "diffusion": MADE} | more
    return Registration(
        worker, model, engine="diffusers", epoch=1, block_size=32, total_blocks=0, slots=1, max_model_len=0, **fields
    )


def test_a_model_is_known_by_all_its_names_from_its_first_worker_on() -> None:
    studios = Studios()
    assert not studios.known
    studios.put(registration(aliases=("artist",)))
    assert dict(studios.known) == {"painter": MADE, "artist": MADE} == studios.present()


def test_a_worker_of_another_role_makes_no_pictures() -> None:
    studios = Studios()
    studios.put(registration(role="aggregated"))
    studios.put(registration(diffusion=None))
    assert not studios.known


def test_a_model_without_workers_stays_known_but_is_not_listed() -> None:
    studios = Studios()
    studios.put(registration("a"))
    studios.put(registration("b"))
    studios.left("a")
    assert studios.present()
    studios.put(registration("b", state=State.draining))
    assert (studios.present(), dict(studios.known)) == ({}, {"painter": MADE})
    studios.left("b")
    studios.left("nobody")
    assert (studios.present(), dict(studios.known)) == ({}, {"painter": MADE})


def test_the_last_to_register_says_what_is_made() -> None:
    studios = Studios()
    more = msgspec.structs.replace(MADE, max_steps=99)
    studios.put(registration("a"))
    studios.put(registration("b", diffusion=more))
    assert studios.known["painter"] == more


def test_the_number_of_models_is_bounded() -> None:
    studios = Studios()
    for number in range(REMEMBERED + 10):
        studios.put(registration(model=f"m{number}"))
    assert len(studios.known) == REMEMBERED
    assert "m0" not in studios.known
    assert f"m{REMEMBERED + 9}" in studios.known
