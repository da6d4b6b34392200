"""Processes of all roles are killed and stopped under load: nothing is lost, nothing stays held."""

import asyncio
import base64
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import MODELS
from penstock.log_tools.requests.leases import leases
from tests.chaos.log import ends_since
from tests.chaos.plan import BROKER, Act, plan
from tests.chaos.run import Options, run_on
from tests.chaos.system import System
from tests.chaos.topology import TOPOLOGIES
from tests.demo_model import vision
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, bus_of, joined, ok, parse_sse, token_prompt

# test_structured_survival kills decode workers, pairs/test_disaggregated cancels, chaos/test_cases is a slice of chaos.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LEASE_S = 3.0
TOPOLOGY = TOPOLOGIES["pd"]
# Eight kills, restarts and stops in 12 s; the seed is one that draws a kill of every role, of other processes each.
OPTIONS = Options(seconds=12.0, seed=18239, topology="pd", clients=6, every_s=1.5, each=1)
TOKENS = 40


@pytest.fixture(scope="module")
def fleet(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(*TOPOLOGY.flags, "--no-store-grace-s", "1")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MODELS / "demo-vision")


fleet_bus = bus_of("fleet")


def text(tokens: int, seed: int) -> dict[str, Any]:
    return {"prompt": [16 + token % 1200 for token in token_prompt(tokens, seed)]}


def picture(number: int) -> dict[str, Any]:
    raw = base64.b64encode(vision.png(vision.scene(random.Random(number), True))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{raw}"}},
        {"type": "text", "text": f"What do you see in picture {number}? " * 4},
    ]
    return {"messages": [{"role": "user", "content": content}]}


async def ask(http: httpx.AsyncClient, question: dict[str, Any]) -> tuple[str, str]:
    """The request's id and the whole answer."""
    path = "/v1/chat/completions" if "messages" in question else "/v1/completions"
    asked = {"model": "demo-vision", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    answer = await ok(http.post(path, json=asked | question))
    return answer.headers["x-request-id"], joined(parse_sse(answer.content))


async def test_kills_and_stops_of_every_stage_break_no_promise(
    fleet: Deployment, fleet_bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slice of ``make chaos``: all its kinds of clients, and its audit of what they and the log saw."""
    disturbances = plan(OPTIONS.seed, OPTIONS.seconds, TOPOLOGY.targets, every_s=OPTIONS.every_s)
    done = {(each.act, each.target) for each in disturbances}
    assert done >= {(Act.kill, role) for role in TOPOLOGY.targets if role != BROKER}
    assert any(each.hold_s > LEASE_S for each in disturbances), "a stopped worker loses its lease"
    began_ns = time.time_ns()
    system = System(lambda: pytest.fail("nothing starts it again"), fleet, None, TOPOLOGY, print)
    report = await run_on(system, OPTIONS, print)
    assert report.clean, capsys.readouterr().out + report.text
    assert len(system.hits) == len(disturbances)
    assert sum(row["asked"] for row in report.judgement.rows.values()) > 40
    attempts = [end.attempt for end in await ends_since(fleet_bus, began_ns)]
    assert max(attempts) > 1, "nobody was disturbed"
    lines = Counter([lease.last.state for lease in (await leases(fleet_bus, time.time_ns())).values()])
    assert lines["released"] > 20, lines


async def test_cancelled_prefills_do_not_delay_the_next_request(fleet: Deployment, oracle: Oracle) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        long = {"model": "demo-vision", "temperature": 0, "max_tokens": 50, "stream": True}
        for number in range(10):  # half a minute of prefill, were they computed
            asked = {**long, **text(8000, 500 + number)}
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.status_code == 200
        short = {"model": "demo-vision", "temperature": 0, "max_tokens": 2, **text(100, 600)}
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=short)
        waited = time.monotonic() - began
        assert answer.json()["choices"][0]["text"] == oracle.answer(short, 2)
        assert waited < 10.0


async def test_images_of_a_request_with_no_store_never_reach_a_disk(fleet: Deployment, oracle: Oracle) -> None:
    asked = picture(77)
    url = asked["messages"][0]["content"][0]["image_url"]["url"]
    raw = base64.b64decode(url.partition(",")[2])
    wanted = [raw[at : at + 16] for at in range(64, len(raw) - 16, 32)]
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        answers = await asyncio.gather(*(ask(http, picture(number)) for number in range(6)))
        assert len({said for _, said in answers}) == 6, "the answer depends on the picture"
        _, said = await ask(http, asked | {"no_store": True})
        assert on_disk(fleet.data_dir, wanted) == []
        assert (await ask(http, asked))[1] == said
        assert on_disk(fleet.data_dir, wanted), "one that is stored stays"


def on_disk(folder: Path, wanted: list[bytes]) -> list[bytes]:
    """Those that some file of the broker contains."""
    stored = b"\0\0".join(path.read_bytes() for path in folder.rglob("*.blk"))
    return [each for each in wanted if each in stored]
