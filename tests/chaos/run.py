"""One run: start, learn the undisturbed answers, load and disturb, wait, audit."""

import asyncio
import contextlib
import io
import json
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
from rich.console import Console

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.model.modeldir import MODELS, load
from penstock.log_tools.requests.inspect import show
from penstock.log_tools.requests.inspection import inspect
from penstock.log_tools.timeline.read import read_timeline
from penstock.operate import key_store
from penstock.schemas.keys import ApiKey, digest_of, new_key
from penstock.schemas.requests import cell_in
from penstock.schemas.subjects import cell_namespace
from penstock.schemas.wire import pack_tokens
from tests.chaos import audit, builds, log, recipes, table
from tests.chaos.audit import Circumstances, End, Expected, Footprint, Judgement, Problem
from tests.chaos.brokers import SETTLE_S, heap_problems
from tests.chaos.builds import OtherBuild
from tests.chaos.clients import PATIENCE_S, Failed, HttpClients
from tests.chaos.disk import found_in, requests_with
from tests.chaos.http import Broken, opened
from tests.chaos.nats_clients import NatsClients
from tests.chaos.plan import BROKER, Act, Disturbance, Hit, plan
from tests.chaos.recipes import NO_STORE, PRIVATE, Recipe, draw, with_stop
from tests.chaos.seen import Seen
from tests.chaos.system import System
from tests.chaos.topology import TOPOLOGIES

QUIET_S = 45.0  # within which nothing may be held any more
EXPLAINED = 5
ASKED_AGAIN = 60
TELL_S = 10.0
PATIENT = ("cancel", "slow", "repeat", "nats-cancel")  # kinds whose answers are learned by reading them like any other
RPM = 30  # of the key that has a limit
DELETE_S = 10.0
KNOWN_S = 15.0  # within which every gateway knows a new key, or a new model
ERASED_AGAIN_S = 30.0  # after a deletion, what a broker that died has again is erased once more
ERASED_S = 60.0  # after the end of a request with no_store, nothing of it is anywhere
REPLICATION = "_js_"  # a node's log of what it replicates, which forgets with its next snapshot (docs/operations.md)
MARKED_TOKENS = 8  # of a prompt, in a row, that must not be on the disk: 32 bytes
FEWEST_SHOWN = 12  # characters of an answer to look for: a shorter one, or none, is on any disk
CONSUMERS_S = 150.0  # the server keeps a dead worker's consumer for 120 s
LEFT_S = 180.0  # the same, and message ids to recognise repeats by: for as long


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
    clock_s: float | None = None  # how far apart clocks are; None: the topology's
    acts: tuple[Act, ...] = tuple(Act)  # that may happen
    disturbances: tuple[Disturbance, ...] = ()  # these instead of those of the seed


class Report(msgspec.Struct):
    """What came of a run; ``text`` is for people."""

    judgement: Judgement
    text: str

    @property
    def clean(self) -> bool:
        return not self.judgement.problems


async def run(home: Path, options: Options, say: Callable[[str], None]) -> Report:
    """A whole run on a deployment of its own below ``home``."""
    topology = TOPOLOGIES[options.topology]
    if options.clock_s is not None:
        topology = topology._replace(clock_s=options.clock_s)
    system = await System.started(home, topology, say, options.other, options.seed)
    try:
        return await run_on(system, options, say)
    finally:
        await system.stop()


async def run_on(system: System, options: Options, say: Callable[[str], None]) -> Report:
    """A run on a deployment that stays."""
    async with contextlib.AsyncExitStack() as opened:
        buses = []
        for cell, url in enumerate(system.nats_urls):
            namespace = cell_namespace(system.deployment.state.namespace, cell)
            bus = await connect(url, role="client", name="chaos", namespace=namespace)
            buses.append(await opened.enter_async_context(bus))
        return await Run(system, buses, options, say).whole()


class Run:
    """Clients of one deployment, the answers that they must get, and what they saw."""

    def __init__(self, system: System, buses: Sequence[Bus], options: Options, say: Callable[[str], None]) -> None:
        self._system, self._buses, self._options, self._say = system, buses, options, say
        topology = system.topology
        needs = {"image": topology.images, "embed": topology.embed, "picture": topology.painter}
        needs |= dict.fromkeys(("limited", "denied"), topology.keys)
        left_out = {kind for kind, there in needs.items() if not there}
        self._kinds = [kind for kind in options.kinds or recipes.KINDS if kind not in left_out]
        self._recipes: list[Recipe] = []
        self._expected: dict[str, Expected] = {}
        self._seen: list[Seen] = []
        self._most: dict[str, int] = {}  # resident memory, looked at now and then
        self._http = HttpClients(system.urls, keys=False)
        self._nats = NatsClients(system.client_url, system.deployment.state.namespace)

    async def whole(self) -> Report:
        async with self:
            return await self._audited()

    async def __aenter__(self) -> Self:
        await self._nats.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._nats.close()

    @property
    def recipes(self) -> Sequence[Recipe]:
        """What was learned."""
        return self._recipes

    def wrong(self, seen: Seen) -> list[Problem]:
        """What is wrong with what one client saw, while nothing is disturbed."""
        found = list(audit.client_problems(seen, self._expected.get(seen.recipe, Expected({}))))
        return found + list(audit.outcome_problems(seen, audit.Log(), {}, audit.UNDISTURBED))

    async def _audited(self) -> Report:
        await self.learn()
        await asyncio.sleep(SETTLE_S)
        before, heaps = self._system.footprints(), await self._system.heaps()
        there = await self._inventory()
        since_ns, surplus = time.time_ns(), await self._surplus()
        await self._load()
        settled = await self._system.settle()
        left = await self._delete_left(since_ns)
        await self._erased()
        self._say("all is quiet; reading the log")
        gone = sum(hit.at > _kept_since(self._system.hits, time.time()) for hit in self._system.hits)
        found = await log.whole(self._buses, since_ns, self._system.urls, within_s=QUIET_S, gone=gone)
        found.on_disk = await self._kept()
        found.miscounted = await self._miscounted(surplus, left)
        await log.until_none(lambda: self._left(before, heaps, len(found.accepted)), LEFT_S)
        after, heaps_after = self._system.footprints(), await self._system.heaps()
        around = Circumstances(self._system.hits, self._most_a_minute(), self._system.topology.cells)
        judgement = audit.judge(self._seen, found, self._expected, once=self._http.keys, around=around)
        judgement.problems += audit.memory_problems(before, after)
        judgement.problems += [
            Problem("memory", text) for text in heap_problems(heaps, heaps_after, len(found.accepted))
        ]
        judgement.problems += await self._asked_again()
        judgement.problems += [
            Problem("residue", f"{name} is new in the broker, or gone from it")
            for name in sorted(set(there) ^ set(await self._inventory()))
        ]
        judgement.problems += [Problem("late", line) for line in self._system.late]
        if not settled:
            judgement.problems.append(Problem("residue", "not everything runs again"))
        waits = [audit.recovery(hit.at, [seen.arrivals for seen in self._seen]) for hit in self._system.hits]
        parts = [
            table.counts(judgement),
            table.disturbances(self._system.hits, waits),
            table.memory(before, self._most, after),
            table.heaps(heaps, heaps_after, len(found.accepted)),
        ]
        if self._options.other is not None:
            parts.append(table.builds(builds.counted(self._system.starts)))
        if judgement.problems:
            parts += [table.problems(judgement), await self._explained(judgement)]
        return Report(judgement, "\n\n".join(parts))

    async def _surplus(self) -> dict[str, int]:
        """Nothing is compared where another build runs that may have no ledger."""
        return await log.surplus(self._buses) if self._options.other is None else {}

    async def _miscounted(self, before: Mapping[str, int], left: Collection[str]) -> list[str]:
        """
        Args:
            left: requests that the runner deleted, or tried to.
        """
        if not before:
            return []
        deleted = {seen.request for seen in self._seen if seen.outcome == "deleted"}
        known = deleted | set(left)
        most = len(known) + sum(seen.kind == "delete" and seen.request not in known for seen in self._seen)
        return list(audit.miscounted(before, await self._surplus(), len(deleted), most))

    async def _inventory(self) -> list[str]:
        return [name for bus in self._buses for name in await log.inventory(bus)]

    async def _ends_since(self, since_ns: int) -> list[End]:
        return [end for bus in self._buses for end in await log.ends_since(bus, since_ns)]

    def _bus_of(self, request: str) -> Bus:
        """The connection to the cell of a request."""
        return self._buses[max(0, cell_in(request)) if len(self._buses) > 1 else 0]

    async def _left(self, before: Mapping[str, Footprint], heaps: Mapping[str, int], stored: int) -> list[str]:
        """Files and brokers' memory of what has ended. In a cluster, each consumer has a log, which is a file."""
        problems = audit.memory_problems(before, self._system.footprints())
        files = [problem.text for problem in problems if problem.what == "files"]
        return files or heap_problems(heaps, await self._system.heaps(), stored)

    async def _asked_again(self) -> list[Problem]:
        """Some of the answers once more, by their ids."""
        answered = [
            seen
            for seen in self._seen
            if seen.outcome == "answered" and seen.request and seen.kind not in (*NO_STORE, "picture")
        ]
        sample = random.Random(self._options.seed).sample(answered, min(ASKED_AGAIN, len(answered)))
        found: list[Problem] = []
        for seen in sample:
            again = Seen(seen.tag, seen.recipe, seen.kind, len(seen.choices))
            try:
                again.take_whole(await self._http.result(seen.request))
            except Failed as failure:
                problems = [Problem("lost", f"asked again later: {failure}", seen.request)]
            else:
                called = recipes.CALLED if seen.kind == "tools" else ""
                problems = list(audit.later_problems(seen.request, again.choices, self._expected[seen.recipe], called))
            found += [problem._replace(tag=seen.tag, kind=seen.kind) for problem in problems]
        return found

    async def learn(self) -> None:
        """Ask everything once while nothing is disturbed."""
        await self._prepare()
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
            painter="painter" if topology.painter else "",
        )
        self._http.keys = await self._knows_keys()
        learned = await self._ask_all([recipe for recipe in self._recipes if recipe.kind != "denied"], "learn")
        stops = [recipe for recipe in self._recipes if recipe.kind == "stop"]
        shorter = [with_stop(recipe, learned[recipe.name].choices[0].text, rng) for recipe in stops]
        self._recipes = [recipe for recipe in self._recipes if recipe.kind != "stop"] + shorter
        await self._ask_all(shorter, "learn-stop")
        self._say(f"{len(self._expected)} undisturbed answers are known; idempotency keys: {self._http.keys}")

    async def _knows_keys(self) -> bool:
        """Whether every gateway takes a repeated key for the same request."""
        apart = (*recipes.NATS_KINDS, *PRIVATE, "denied", "limited", "chain", "picture")
        over_http = [recipe for recipe in self._recipes if recipe.kind not in apart]
        recipe = next((recipe for recipe in over_http if not recipe.streamed), None)
        if recipe is None:
            return False
        asked = recipe._replace(kind="repeat")
        for url in self._system.urls:
            http = HttpClients([url], keys=True, bearers=self._http.bearers)
            found = await http.ask(asked, "learn-keys", random.Random(0))
            if len({seen.request for seen in found if seen.request}) != 1:
                return False
        return True

    async def _ask_all(self, asked: Sequence[Recipe], tag: str) -> dict[str, Seen]:
        since_ns = time.time_ns()
        room = asyncio.Semaphore(4)

        async def one(recipe: Recipe) -> list[Seen]:
            async with room:
                kind = recipe.kind
                if kind in PATIENT or kind == "limited":
                    kind = "nats-repeat" if kind in recipes.NATS_KINDS else "stream"
                return await self.ask(recipe._replace(kind=kind), f"{tag}-{recipe.name}", random.Random(0))

        asked_all = await asyncio.gather(*map(one, asked))
        found = {seen.recipe: seen for several in asked_all for seen in several[::-1]}
        for name, seen in found.items():
            if seen.outcome != "answered":
                raise RuntimeError(f"undisturbed, {name} is not answered: {seen.code} {seen.message} {seen.notes}")
        tokens = {}
        for _ in range(40):  # an answer may come before its terminal event is stored
            tokens = {end.request: end.tokens for end in await self._ends_since(since_ns)}
            if all(seen.request in tokens for seen in found.values()):
                break
            await asyncio.sleep(0.25)
        for name, seen in found.items():
            exact = seen.kind != "picture"  # of an image they say how long each step took
            self._expected[name] = Expected(seen.choices, tokens[seen.request], exact)
        return found

    async def _prepare(self) -> None:
        """API keys, and models that gateways come to know only after they are ready."""
        topology = self._system.topology
        if topology.keys:
            for kind, rpm in (("", 0), ("limited", RPM)):
                name, text = new_key()
                key = ApiKey(name, digest_of(text.encode()), requests_per_minute=rpm, created_ns=time.time_ns())
                await key_store.add(self._buses[0], key)
                self._http.bearers[kind] = text
            self._http.bearers["denied"] = new_key()[1]
        models = {topology.model, topology.embed, "painter" if topology.painter else ""} - {""}
        for url in self._system.urls:
            for kind in [kind for kind in self._http.bearers if kind != "denied"] or [""]:
                async with asyncio.timeout(KNOWN_S):
                    while not models <= await self._models(url, kind):  # noqa: ASYNC110 - other processes
                        await asyncio.sleep(0.1)

    async def _models(self, url: str, kind: str) -> set[str]:
        with contextlib.suppress(Broken):
            async with opened("GET", url, "/v1/models", None, self._http.headers(kind)) as answer:
                raw = await answer.read()
            return {card["id"] for card in json.loads(raw)["data"]} if answer.status == 200 else set()
        return set()

    def _most_a_minute(self) -> int:
        """Requests of the limited key. Gateways whose clocks differ count other minutes as the present one."""
        return RPM * (2 if self._system.topology.clock_s else 1) if self._system.topology.keys else 0

    # -- what must be gone ----------------------------------------------------------------------------------------

    async def _delete_left(self, since_ns: int) -> list[str]:
        """Responses that their client would have deleted, had it known of them, and those that were learned."""
        left = []
        deleted = {seen.request for seen in self._seen if seen.outcome == "deleted"}
        accepted = [log.accepted_of(await log.stored_since(bus, 0)) for bus in self._buses]
        for request, (tag, _) in [one for cell in accepted for one in cell.items()]:
            if "-delete-" in tag and request not in deleted:
                left.append(request)
                with contextlib.suppress(Failed, TimeoutError):  # then it is found on the disk
                    async with asyncio.timeout(DELETE_S):
                        await self._http.delete(request)
                for seen in self._seen:
                    if seen.tag == tag:
                        seen.deleted_for_it(request)
        return left

    async def _erased(self) -> None:
        """What was deleted while a broker was away is erased once it is there again."""
        deleted = [seen.request for seen in self._seen if seen.outcome == "deleted" and seen.request]
        for bus in self._buses:
            own = [request for request in deleted if self._bus_of(request) is bus]
            await log.until_none(partial(log.records_left, bus, own), ERASED_S)

    async def _kept(self) -> list[str]:
        """Words and tokens of private prompts and answers that some file of the broker has."""
        kinds = PRIVATE if self._options.other is None else ("delete",)
        private = [recipe for recipe in self._recipes if recipe.kind in kinds]
        if not private:
            return []
        deadline = time.monotonic() + ERASED_S
        while True:
            found: dict[str, str] = {}
            for those, left_out in ((NO_STORE, ""), (("delete",), REPLICATION)):
                wanted = self._marks([recipe for recipe in private if recipe.kind in those])
                there = await asyncio.to_thread(found_in, self._system.store, wanted, left_out)
                for name, path in there.items():
                    if not left_out or await asyncio.to_thread(self._must_be_gone, path, wanted[name]):
                        found[name] = path
            if not found or time.monotonic() > deadline:
                return [f"{name} in {path}" for name, path in sorted(found.items())]
            await asyncio.sleep(2)

    def _must_be_gone(self, path: str, wanted: bytes) -> bool:
        """Not if the broker died during the deletion: it may have removed the message, and not overwritten it yet."""
        around, deadly = Circumstances(self._system.hits), (Act.kill, Act.restart, Act.roll, Act.crash, Act.fill)
        deleted = {seen.request: seen.ended for seen in self._seen if seen.outcome == "deleted"}
        with contextlib.suppress(OSError):  # the broker removes files meanwhile
            for request in requests_with(self._system.store / path, wanted):
                at = deleted.get(request, 0.0)
                if not around.hit((BROKER, "all"), at - DELETE_S, at + ERASED_AGAIN_S, deadly):
                    return True
                self._say(f"a broker died while {request} was deleted, and kept its bytes in {path}")
        return False

    def _marks(self, private: Sequence[Recipe]) -> dict[str, bytes]:
        """By a name: the words themselves, and their tokens as they are in messages."""
        tokenizer = load(MODELS / self._system.topology.model).tokenizer
        wanted = {}
        for recipe in private:
            ids = tokenizer.encode(f" {recipe.mark}", add_special_tokens=False).ids
            wanted[f"{recipe.name}: words of its prompt"] = recipe.mark[:40].encode()
            wanted[f"{recipe.name}: tokens of its prompt"] = tokens = pack_tokens(ids[-MARKED_TOKENS - 2 : -2])
            wanted[f"{recipe.name}: tokens of its packed prompt"] = tokens[::4]  # their lowest bytes
            shown = self._expected[recipe.name].choices[0].text
            if recipe.kind in NO_STORE and len(shown) >= FEWEST_SHOWN:
                wanted[f"{recipe.name}: words of its answer"] = shown[:40].encode()
        return wanted

    # -- load -----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        options = self._options
        targets, more = self._system.topology.targets, self._system.more
        disturbances = list(options.disturbances) or plan(
            options.seed,
            options.seconds,
            targets,
            every_s=options.every_s,
            more=more,
            several=self._system.topology.cells > 1,
        )
        disturbances = [each for each in disturbances if each.act in options.acts]
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
            self._seen += await self.ask(recipe, f"c{number}-{asked}-{recipe.name}", rng)

    async def ask(self, recipe: Recipe, tag: str, rng: random.Random) -> list[Seen]:
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
                found = inspect(await read_timeline(self._bus_of(request), request), with_tokens=False)
                show(found, console, now_ns=time.time_ns())
        return console.export_text()
