"""Measuring points of a profile against a small server: what is bounded, and what a failure leaves behind."""

from pathlib import Path

import pytest

from penstock.measure.profile.data import Profile, load
from penstock.measure.profile.profile_endpoint_command import Grid, ProfileFailed, Profiler
from penstock.measure.sweep.bodies import Bodies
from penstock.measure.sweep.endpoints import parse_endpoints
from penstock.measure.sweep.smoke import Abilities
from tests.penstock.measure.profile.test_data import SETUP
from tests.penstock.measure.sweep.fake_server import OVERHEAD, TEXTS, FakeServer, fake_server


def profiler(server: FakeServer, folder: Path) -> Profiler:
    (endpoint,) = parse_endpoints([f"e={server.url}"])
    bodies = Bodies(endpoint.target, "m", "chat", Abilities(overhead_tokens=OVERHEAD), TEXTS)
    empty = Profile(setup=SETUP, url=server.url)
    return Profiler(endpoint, bodies, empty, folder, seed=1, timeout_s=10.0, say=lambda text: None)


async def test_prompts_are_exact_and_of_no_two_lengths_alike(tmp_path: Path) -> None:
    async with fake_server() as server:
        assert await profiler(server, tmp_path).run(Grid(prefill=(100, 300), decode=(), requests=2)) == 0
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert [TEXTS.count(prompt) + OVERHEAD for prompt in prompts] == [100, 100, 300, 300]
    assert len({prompt[:50] for prompt in prompts}) == 4
    assert load(tmp_path).prefill.prefill_isl == (100, 300)


async def test_no_point_is_begun_after_the_time_is_over(tmp_path: Path) -> None:
    async with fake_server() as server:
        wanted = Grid(prefill=(100, 300), decode=((100, (1, 2)),), seconds=-1.0)
        assert await profiler(server, tmp_path).run(wanted) == 4
        assert server.bodies == []


async def test_answers_that_never_overlap_end_the_levels_of_their_length(tmp_path: Path) -> None:
    async with fake_server() as server:  # it sends an answer in one piece
        measured = profiler(server, tmp_path)
        assert await measured.run(Grid(prefill=(), decode=((100, (1, 2, 4)), (200, (1,))))) == 0
    assert [body["max_tokens"] for body in server.bodies] == [1, SETUP.osl, 1, SETUP.osl]
    assert measured.profile.decode.z_itl == ()
    assert any("did not all decode at once" in each for each in measured.profile.warnings)


async def test_a_failed_request_ends_the_profile_and_what_was_measured_stays(tmp_path: Path) -> None:
    async with fake_server() as server:
        server.fails_after = 3
        with pytest.raises(ProfileFailed, match=r"prompts of 300 tokens, 1 at once: .*HTTP 500: broken"):
            await profiler(server, tmp_path).run(Grid(prefill=(100, 300), decode=()))
    assert load(tmp_path).prefill.prefill_isl == (100,)
