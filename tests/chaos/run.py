"""One run: start, learn the undisturbed answers, load and disturb, wait, audit."""

import asyncio
import contextlib
import io
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from infra.bus.connection import Bus, connect
from infra.timeline.inspection import inspect
from infra.timeline.read import read_timeline
from infra.timeline.show_inspection import show
from tests.chaos import audit, builds, log, recipes, table
from tests.chaos.audit import Expected, Judgement, Problem
from tests.chaos.builds import OtherBuild
from tests.chaos.clients import PATIENCE_S, Failed, HttpClients
from tests.chaos.nats_clients import NatsClients
from tests.chaos.plan import Act, plan
from tests.chaos.recipes import Recipe, draw, with_stop
from tests.chaos.seen import Seen
from tests.chaos.system import Hit, System
from tests.chaos.topology import TOPOLOGIES

QUIET_S = 45.0  # within which nothing may be held any more
EXPLAINED = 5
ASKED_AGAIN = 60
TELL_S = 10.0
PATIENT = ("cancel", "slow", "repeat", "nats-cancel")  # kinds whose answers are learned by reading them like any other
CONSUMERS_S = 150.0  # the server keeps a dead worker's consumer for 120 s


def _kept_since(hits: Sequence[Hit], now: float) -> float:
    """Consumers of workers that died after this may still be there: a broker that starts begins their time anew."""
    since = now - CONSUMERS_S
    for hit in sorted(hits, key=lambda hit: hit.at, reverse=True):
        if hit.name.startswith(("nats", "all")) and hit.act is not Act.stop and hit.at > since:
            since = min(since, hit.at - CONSUMERS_S)
    return since


class Options(msgspec.Struct, frozen=True):
    seconds: float
    seed: int = 1
    topology: str = "aggregated"
    clients: int = 12
    every_s: float = 3.0
    kinds: tuple[str, ...] = ()
    each: int = 4  # recipes of a kind
    other: OtherBuild | None = None  # of which some processes are
    share: bool = False  # three routers, which share their requests now and then


class Report(msgspec.Struct):
    """What came of a run; ``text`` is for people."""

    judgement: Judgement
    text: str

    @property
    def clean(self) -> bool:
        return not self.judgement.problems


async def run(home: Path, options: Options, say: Callable[[str], None]) -> Report:
    """A whole run on a deployment of its own below ``home``."""
    system = await System.started(home, TOPOLOGIES[options.topology], say, options.other, options.share)
    try:
        return await run_on(system, options, say)
    finally:
        await system.stop()


async def run_on(system: System, options: Options, say: Callable[[str], None]) -> Report:
    """A run on a deployment that stays."""
    bus = await connect(system.deployment.state.nats_url, role="client", name="chaos")
    try:
        return await _Run(system, bus, options, say).whole()
    finally:
        await bus.close()


class _Run:
    def __init__(self, system: System, bus: Bus, options: Options, say: Callable[[str], None]) -> None:
        self._system, self._bus, self._options, self._say = system, bus, options, say
        topology = system.topology
        left_out = {kind for kind, there in (("image", topology.images), ("embed", topology.embed)) if not there}
        self._kinds = [kind for kind in options.kinds or recipes.KINDS if kind not in left_out]
        self._recipes: list[Recipe] = []
        self._expected: dict[str, Expected] = {}
        self._seen: list[Seen] = []
        self._most: dict[str, int] = {}  # resident memory, looked at now and then
        self._http = HttpClients(system.urls, keys=False)
        self._nats = NatsClients(system.client_url, system.deployment.state.namespace)

    async def whole(self) -> Report:
        await self._nats.open()
        try:
            return await self._audited()
        finally:
            await self._nats.close()

    async def _audited(self) -> Report:
        await self._learn()
        before = self._system.footprints()
        there = await log.inventory(self._bus)
        since_ns = time.time_ns()
        await self._load()
        settled = await self._system.settle()
        self._say("all is quiet; reading the log")
        gone = sum(hit.at > _kept_since(self._system.hits, time.time()) for hit in self._system.hits)
        found = await log.whole(self._bus, since_ns, self._system.urls, within_s=QUIET_S, gone=gone)
        after = self._system.footprints()
        judgement = audit.judge(self._seen, found, self._expected, once=self._http.keys)
        judgement.problems += audit.memory_problems(before, after)
        judgement.problems += await self._asked_again()
        judgement.problems += [
            Problem("residue", f"{name} is new in the broker, or gone from it")
            for name in sorted(set(there) ^ set(await log.inventory(self._bus)))
        ]
        judgement.problems += [Problem("late", line) for line in self._system.late]
        if not settled:
            judgement.problems.append(Problem("residue", "not everything runs again"))
        waits = [audit.recovery(hit.at, [seen.arrivals for seen in self._seen]) for hit in self._system.hits]
        parts = [
            table.counts(judgement),
            table.disturbances(self._system.hits, waits),
            table.memory(before, self._most, after),
        ]
        if self._options.other is not None:
            parts.append(table.builds(builds.counted(self._options.other)))
        if judgement.problems:
            parts += [table.problems(judgement), await self._explained(judgement)]
        return Report(judgement, "\n\n".join(parts))

    async def _asked_again(self) -> list[Problem]:
        """Some of the answers once more, by their ids."""
        answered = [seen for seen in self._seen if seen.outcome == "answered" and seen.request]
        sample = random.Random(self._options.seed).sample(answered, min(ASKED_AGAIN, len(answered)))
        found: list[Problem] = []
        for seen in sample:
            again = Seen(seen.tag, seen.recipe, seen.kind, len(seen.choices))
            try:
                again.take_whole(await self._http.result(seen.request))
            except Failed as failure:
                problems = [Problem("lost", f"asked again later: {failure}", seen.request)]
            else:
                problems = list(audit.later_problems(seen.request, again.choices, self._expected[seen.recipe]))
            found += [problem._replace(tag=seen.tag, kind=seen.kind) for problem in problems]
        return found

    async def _learn(self) -> None:
        """Ask everything once while nothing is disturbed."""
        rng = random.Random(self._options.seed)
        topology = self._system.topology
        other = self._options.other
        nats = (other is None or other.nats) and await self._nats.knows_reads()
        kinds = [kind for kind in self._kinds if nats or kind not in recipes.NATS_KINDS]
        self._recipes = recipes.make(
            self._options.seed,
            topology.model,
            kinds,
            embed=topology.embed,
            each=self._options.each,
            tokens=topology.tokens,
            real=topology.real,
        )
        self._http.keys = await self._knows_keys()
        learned = await self._ask_all(self._recipes, "learn")
        stops = [recipe for recipe in self._recipes if recipe.kind == "stop"]
        shorter = [with_stop(recipe, learned[recipe.name].choices[0].text, rng) for recipe in stops]
        self._recipes = [recipe for recipe in self._recipes if recipe.kind != "stop"] + shorter
        await self._ask_all(shorter, "learn-stop")
        self._say(f"{len(self._expected)} undisturbed answers are known; idempotency keys: {self._http.keys}")

    async def _knows_keys(self) -> bool:
        """Whether every gateway takes a repeated key for the same request."""
        over_http = [recipe for recipe in self._recipes if recipe.kind not in recipes.NATS_KINDS]
        recipe = next((recipe for recipe in over_http if not recipe.streamed), None)
        if recipe is None:
            return False
        asked = recipe._replace(kind="repeat")
        for url in self._system.urls:
            http = HttpClients([url], keys=True)
            found = await http.ask(asked, "learn-keys", random.Random(0))
            if len({seen.request for seen in found if seen.request}) != 1:
                return False
        return True

    async def _ask_all(self, asked: Sequence[Recipe], tag: str) -> dict[str, Seen]:
        since_ns = time.time_ns()
        room = asyncio.Semaphore(4)

        async def one(recipe: Recipe) -> Seen:
            async with room:
                kind = "nats-repeat" if recipe.kind in recipes.NATS_KINDS else "stream"
                patient = recipe._replace(kind=kind) if recipe.kind in PATIENT else recipe
                return (await self._ask(patient, f"{tag}-{recipe.name}", random.Random(0)))[0]

        found = {recipe.name: seen for recipe, seen in zip(asked, await asyncio.gather(*map(one, asked)), strict=True)}
        for name, seen in found.items():
            if seen.outcome != "answered":
                raise RuntimeError(f"undisturbed, {name} is not answered: {seen.code} {seen.message} {seen.notes}")
        tokens = {}
        for _ in range(40):  # an answer may come before its terminal event is stored
            tokens = {end.request: end.tokens for end in await log.ends_since(self._bus, since_ns)}
            if all(seen.request in tokens for seen in found.values()):
                break
            await asyncio.sleep(0.25)
        for name, seen in found.items():
            self._expected[name] = Expected(seen.choices, tokens[seen.request])
        return found

    async def _load(self) -> None:
        options = self._options
        disturbances = plan(options.seed, options.seconds, self._system.topology.targets, every_s=options.every_s)
        self._say(f"{options.clients} clients, {len(disturbances)} disturbances in {options.seconds:g} s")
        until = time.monotonic() + options.seconds
        clients = [asyncio.create_task(self._client(n, until), name=f"client-{n}") for n in range(options.clients)]
        disturbing = asyncio.create_task(self._system.carry_out(disturbances, until), name="disturb")
        watching = asyncio.create_task(self._tell(), name="tell")
        try:
            limit = options.seconds + 2 * PATIENCE_S
            done, _ = await asyncio.wait([disturbing, *clients], timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (watching, disturbing, *clients):
                task.cancel()
            await asyncio.gather(watching, disturbing, *clients, return_exceptions=True)

    async def _client(self, number: int, until: float) -> None:
        rng = random.Random(f"client-{self._options.seed}-{number}")
        asked = 0
        while time.monotonic() < until:
            recipe = draw(rng, self._recipes)
            asked += 1
            self._seen += await self._ask(recipe, f"c{number}-{asked}-{recipe.name}", rng)

    async def _ask(self, recipe: Recipe, tag: str, rng: random.Random) -> list[Seen]:
        clients = self._nats if recipe.kind in recipes.NATS_KINDS else self._http
        return await clients.ask(recipe, tag, rng)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self._say(f"{len(self._seen)} answers so far, {len(self._system.hits)} disturbances")
            for name, now in self._system.footprints().items():
                self._most[name] = max(now.rss, self._most.get(name, 0))

    async def _explained(self, judgement: Judgement) -> str:
        """The stories of the first requests that something is wrong with."""
        wrong = list(dict.fromkeys(problem.request for problem in judgement.problems if problem.request))
        console = Console(record=True, width=160, file=io.StringIO())
        for request in wrong[:EXPLAINED]:
            console.rule(request)
            with contextlib.suppress(ValueError):
                found = inspect(await read_timeline(self._bus, request), with_tokens=False)
                show(found, console, now_ns=time.time_ns())
        return console.export_text()
