"""Smoke requests: what a server supports, and what ends a sweep before any load."""

import pytest

from penstock.measure.load_generator import parse_target
from penstock.measure.sweep.smoke import Abilities, Smoke, Unhealthy, smoke
from tests.penstock.measure.sweep.fake_server import OVERHEAD, TEXTS, FakeServer, fake_server


async def ask(server: FakeServer, model: str = "", *, stream: bool = True) -> Smoke:
    return await smoke(parse_target(server.url), "chat", model, TEXTS, stream=stream)


async def test_a_server_that_takes_all_is_asked_once() -> None:
    async with fake_server() as server:
        found = await ask(server)
    assert found == Smoke("m", Abilities(overhead_tokens=OVERHEAD), (), "fp_1")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("refuses", "abilities", "warned"),
    [
        ({"ignore_eos"}, Abilities(exact="min_tokens", overhead_tokens=OVERHEAD), ""),
        ({"ignore_eos", "min_tokens"}, Abilities(exact="none", overhead_tokens=OVERHEAD), "may be shorter"),
        ({"stream_options"}, Abilities(usage=False), "no usage"),
        ({"max_tokens"}, Abilities(limit="max_completion_tokens", overhead_tokens=OVERHEAD), ""),
    ],
)
async def test_what_a_server_refuses_is_left_out_and_said(refuses: set[str], abilities: Abilities, warned: str) -> None:
    async with fake_server() as server:
        server.refuses = refuses
        found = await ask(server)
    assert found.abilities == abilities
    assert (warned in " ".join(found.warnings)) if warned else not found.warnings
    body = abilities.length(5) | abilities.body("m", stream=True)
    assert not refuses & body.keys()


async def test_an_unhealthy_server_is_named_with_its_reason() -> None:
    async with fake_server() as server:
        with pytest.raises(Unhealthy, match="has no model 'other'; it serves m"):
            await ask(server, "other")
        server.models = []
        with pytest.raises(Unhealthy, match="serves no model yet"):
            await ask(server)
        server.models, server.fails_after = ["m"], 0
        with pytest.raises(Unhealthy, match="status 500: broken"):
            await ask(server)
        server.refuses = {"model"}
        with pytest.raises(Unhealthy, match="refuses the smoke request"):
            await ask(server)
    with pytest.raises(Unhealthy, match="no server answers at"):
        await ask(server)
