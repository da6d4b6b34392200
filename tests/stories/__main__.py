"""``python -m tests.stories [NAME ...]``: each story breaks something, and asks the tools for the cause.

It passes if the cause stands on the first screen of what a command prints, of 24 lines. With ``--show`` that screen is
printed, too. A story takes 15 to 40 s.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from penstock.infra.model.modeldir import TINY, revision
from tests.pipeline.support import MODEL, ROOT, START_S, Deployment, token_prompt

LINES, COLUMNS = 24, 120
CRASH_TOKEN = 4001  # above those of ``token_prompt``


class CauseHidden(Exception):
    """The first screen does not have the cause."""


class Story(NamedTuple):
    """``act``: breaks something, and returns nothing if the cause was seen."""

    about: str
    act: Callable[["Scene"], Awaitable[None]]


class Scene:
    """The deployments of one story, and what is asked of them."""

    def __init__(self, home: Path, *, show: bool) -> None:
        self.home = home
        self._show = show
        self._deployments: list[Deployment] = []

    async def deployment(self, *flags: str, name: str = "one") -> Deployment:
        home = self.home / name
        home.mkdir(exist_ok=True)
        made = await asyncio.to_thread(Deployment, home, *flags)
        self._deployments.append(made)
        return made

    def end(self) -> None:
        for each in self._deployments:
            each.stop()

    async def asks(self, here: Deployment, *argv: str, lines: int = LINES) -> str:
        """The first screen of what a command prints."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *argv, "--data-dir", str(here.data_dir)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self.home,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "NO_COLOR": "1"},
        )
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
        screen = "\n".join(said.decode().splitlines()[:lines] if lines else said.decode().splitlines())
        if self._show and "--json" not in argv:
            print(f"$ penstock {' '.join(argv)}\n{screen}\n")
        return screen

    async def sees(self, here: Deployment, *argv: str, cause: Sequence[str]) -> None:
        """
        Raises:
            CauseHidden: a word of the cause is not on the first screen.
        """
        screen = " ".join((await self.asks(here, *argv)).split())
        if missing := [word for word in cause if word not in screen]:
            raise CauseHidden(f"penstock {' '.join(argv)} does not say {missing}:\n{screen}")

    async def requests(self, here: Deployment, *flags: str) -> list[dict[str, Any]]:
        """Those that ``penstock requests`` lists, as JSON."""
        said = await self.asks(here, "requests", "--json", *flags, lines=0)
        return [msgspec.json.decode(line) for line in said.splitlines()]


def body(seed: int, *, prompt: int = 40, tokens: int = 100, **more: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": token_prompt(prompt, seed), "max_tokens": tokens, "ignore_eos": True}
    return asked | {"temperature": 0} | more


async def ask(here: Deployment, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """The answers, all asked for at once."""
    async with httpx.AsyncClient(base_url=here.urls[0], trust_env=False, timeout=90) as http:
        return list(await asyncio.gather(*(http.post("/v1/completions", json=each) for each in bodies)))


def process(here: Deployment, name: str) -> int:
    return next(each.pid for each in here.state.processes if each.name == name)


# --- the stories ---


async def killed_worker(scene: Scene) -> None:
    here = await scene.deployment("--mock-speedup", "0.5", "--workers", "3")
    asking = asyncio.create_task(ask(here, *(body(seed, tokens=150) for seed in range(24))))
    await asyncio.sleep(1.0)  # in the midst of the answers
    os.kill(process(here, "worker-1"), signal.SIGKILL)
    assert {answer.status_code for answer in await asking} == {200}
    lost = await scene.requests(here, "--lost", "-n", "0")
    assert lost, "no request ran on the killed worker"
    assert all(any(name.startswith("worker-1-") for name in each["workers"]) for each in lost)
    await scene.sees(here, "requests", "--lost", cause=[lost[0]["lost_workers"][0], "→"])
    await scene.sees(here, "inspect", lost[0]["id"][:18], cause=[f"lost {lost[0]['lost_workers'][0]}", "2 attempts"])


async def slow_by_neighbours(scene: Scene) -> None:
    here = await scene.deployment("--mock-speedup", "0.5", "--workers", "1")
    asking = asyncio.create_task(ask(here, *(body(seed, prompt=1500, tokens=4, user="bulk") for seed in range(12))))
    await asyncio.sleep(0.1)  # behind the others
    await ask(here, body(99, tokens=4, user="victim"))
    await asking
    (victim,) = await scene.requests(here, "--user", "victim")
    await scene.sees(here, "requests", "--sort", "ttft", "-n", "20", cause=[victim["id"]])
    await scene.sees(
        here, "inspect", victim["id"], "--neighbours", cause=["Ahead: ", "prompt tokens to compute", "ahead"]
    )


async def stopped_worker(scene: Scene) -> None:
    here = await scene.deployment("--mock-speedup", "0.5", "--workers", "3")
    pid = process(here, "worker-1")
    for turn in range(2):
        asking = asyncio.create_task(ask(here, *(body(100 * turn + seed, tokens=200) for seed in range(12))))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(4.5)  # a lease lasts 3 s
        os.kill(pid, signal.SIGCONT)
        assert {answer.status_code for answer in await asking} == {200}
        await asyncio.sleep(1.0)
    await scene.sees(here, "requests", "--lost", cause=["worker-1-", "→"])
    await scene.sees(here, "top", "--once", cause=["worker-1", "lost its lease"])


async def changed_revision(scene: Scene) -> None:
    model = scene.home / "models--penstock--tiny"
    shutil.copytree(TINY, model)
    flags = ("--mock-speedup", "0", "--model", str(model), "--served-model-name", "tiny", "--record")
    here = await scene.deployment(*flags)
    await ask(here, *(body(seed, tokens=8) for seed in range(4)))
    await asyncio.to_thread(here.stop)
    before = revision(model)
    configuration = model / "config.json"
    configuration.write_text(configuration.read_text().rstrip().rstrip("}") + ', "changed": true}\n')
    assert revision(model) != before
    here = await scene.deployment(*flags)
    await scene.sees(
        here, "replay", "--since", "10m", cause=[f"the revision changed from {before} to {revision(model)}"]
    )
    await scene.sees(here, "requests", cause=["revision", before[:12], revision(model)[:12]])


async def unbalanced_fleet(scene: Scene) -> None:
    here = await scene.deployment("--mock-speedup", "1", "--workers", "2")
    slow = ("--engine", "mock", "--mock-speedup", "0.05", "--model", str(MODEL), "--name", "worker-slow")
    await asyncio.to_thread(here.also("worker", *slow).wait_for, "worker_registered", START_S)
    for turn in range(4):
        await ask(here, *(body(100 * turn + seed, tokens=30) for seed in range(16)))
    screen = await scene.asks(here, "whatif")
    row = next((line for line in screen.splitlines() if line.startswith("worker-slow-") and "slower" in line), "")
    if not row:
        raise CauseHidden(f"penstock whatif does not say that worker-slow is slower:\n{screen}")


async def poison(scene: Scene) -> None:
    here = await scene.deployment(
        "--mock-speedup", "0.5", "--workers", "4", "--mock-crash-token", str(CRASH_TOKEN), "--drain-s", "10"
    )
    asked = body(7)
    asked["prompt"] = [*asked["prompt"], CRASH_TOKEN]
    (answer,) = await ask(here, asked)
    assert answer.json()["error"]["code"] == "poisoned_request", answer.text
    (dead,) = await scene.requests(here, "--code", "poisoned_request")
    await scene.sees(here, "dead", "list", cause=[dead["id"], "attempt 1", "attempt 3"])
    await scene.sees(here, "inspect", dead["id"], cause=["poisoned_request", "lost worker-"])


STORIES = {
    "killed": Story("a worker was killed", killed_worker),
    "neighbours": Story("a request is slow because of those beside it", slow_by_neighbours),
    "stopped": Story("a worker stops for seconds, again and again", stopped_worker),
    "revision": Story("the model's revision changed", changed_revision),
    "unbalanced": Story("one worker gets next to nothing", unbalanced_fleet),
    "poison": Story("a request crashes its workers", poison),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stories", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*STORIES, []], help=", ".join(STORIES))
    parser.add_argument("--show", action="store_true", help="print the first screens")
    args = parser.parse_args(argv)
    failed = 0
    for name in args.names or STORIES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="penstock-story-") as home:
            scene = Scene(Path(home), show=args.show)
            try:
                asyncio.run(STORIES[name].act(scene))
                said = "seen"
            except (CauseHidden, AssertionError, TimeoutError) as error:
                failed += 1
                said = f"NOT SEEN: {error}"
            finally:
                scene.end()
        print(f"{name}: {STORIES[name].about}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
