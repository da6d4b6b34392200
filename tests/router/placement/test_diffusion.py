"""Requests for images and videos go to diffusion workers, and no other request does."""

from typing import Any

import pytest

from penstock.configs.settings import RouterMode
from penstock.router.placement.decide import decide
from penstock.router.placement.routing import RoutingContext, RoutingRequest, Weights
from penstock.router.state.target_loads import ExpectedLoad, RoutingTarget
from penstock.schemas.errors import Code
from penstock.schemas.fleet import Diffuser, Registration, WorkerState

MODES: tuple[RouterMode, ...] = ("kv", "round_robin", "random", "least_loaded")
IMAGES = Diffuser("image", "FluxPipeline", 64, 64, 4, ("png",), 1 << 20, 50)
VIDEOS = Diffuser("video", "WanPipeline", 64, 64, 4, ("webp",), 1 << 20, 50)
ASK = RoutingRequest("m", 0, 4, output="image")
IDLE, BUSY = ExpectedLoad(), ExpectedLoad(1, 1)


def member(worker: str, made: Diffuser | None = IMAGES, load: ExpectedLoad = IDLE, **more: Any) -> RoutingTarget:
    role = "diffusion" if made else "aggregated"
    slots = 1 if made else 4
    registration = Registration(worker, "m", role, "e", 1, 32, 100, slots, 1000, diffusion=made, **more)
    return RoutingTarget((worker, 0), registration, load)


def pick(ask: RoutingRequest, *members: RoutingTarget, mode: RouterMode = "kv") -> Any:
    return decide(RoutingContext(ask, members, {}, mode, Weights(), 1))


@pytest.mark.parametrize("mode", MODES)
def test_an_image_is_generated_by_a_free_worker_of_its_kind(mode: RouterMode) -> None:
    fleet = (member("text", None), member("film", VIDEOS), member("full", load=BUSY), member("free"))
    choice = pick(ASK, *fleet, mode=mode)
    assert choice.chosen == ("free", 0)
    assert choice.route[0].role == "diffusion"
    assert [(c.worker, c.excluded) for c in choice.candidates] == [("free", ""), ("full", "full")]
    film = pick(RoutingRequest("m", 0, 4, output="video"), *fleet, mode=mode)
    assert film.chosen == ("film", 0)


@pytest.mark.parametrize("mode", MODES)
def test_text_never_goes_to_a_diffusion_worker(mode: RouterMode) -> None:
    text = RoutingRequest("m", 10, 10)
    assert pick(text, member("a"), member("b", None), mode=mode).chosen == ("b", 0)
    alone = pick(text, member("a"), mode=mode)
    assert (alone.route, alone.code) == ((), None)


@pytest.mark.parametrize(
    "others", [(), (member("text", None),), (member("film", VIDEOS),), (member("full", load=BUSY),)]
)
def test_without_a_free_worker_an_image_waits(others: tuple[RoutingTarget, ...]) -> None:
    choice = pick(ASK, *others)
    assert (choice.route, choice.code) == ((), None)


def test_a_draining_worker_takes_none() -> None:
    choice = pick(ASK, member("leaving", state=WorkerState.draining))
    assert (choice.route, choice.reason, choice.code) == ((), "draining", None)


def test_a_worker_that_failed_the_request_is_the_last_resort() -> None:
    avoiding = RoutingRequest("m", 0, 4, output="image", avoid=frozenset({"bad"}))
    assert pick(avoiding, member("bad"), member("good")).chosen == ("good", 0)
    assert pick(avoiding, member("bad")).chosen == ("bad", 0)


def test_a_named_worker_is_waited_for_or_refused() -> None:
    def named(worker: str) -> RoutingRequest:
        return RoutingRequest("m", 0, 4, output="image", worker=worker)

    fleet = (member("a"), member("full", load=BUSY), member("text", None))
    assert pick(named("a"), *fleet, mode="direct").chosen == ("a", 0)
    assert (pick(named("full"), *fleet).reason, pick(named("full"), *fleet).code) == ("full", None)
    for worker in ("text", "nobody"):
        assert pick(named(worker), *fleet).code is Code.invalid_request
