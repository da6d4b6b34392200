"""When steps take long prompts' requests, in virtual time: python -m tests.perf.handoffs [--seconds 50]

Of an ``EngineLoop`` with 64 answers, on a device whose steps take 5.8 ms, with requests as they came on two H200 beside
4.2 long prompts a second: how long after a request its step is planned, and the time between steps. Requests are
expected from all layers on (0.9 ms before the first token), or from the leading layers on (12 ms before it).
"""

import argparse
import heapq
import itertools
import random
from collections.abc import Callable

from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engine_loop.step_output import Flush
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import StepResult
from tests.workers.engine_loop.test_loop import RunsAhead, new_choice, refuse, sequence

STEP_S, RATE, STREAMS = 0.0058, 4.2, 64


class Device(RunsAhead):
    """Steps and launches that vary; no step counts as one of a prompt, as none is computed here.

    Args:
        launch_s: of a launch on average, beyond 0.8 ms.
        late: share of the launches that take 3 ms more.
    """

    def __init__(self, launch_s: float, late: float) -> None:
        options = mock.MockOptions(vocab_size=1000, block_size=4, speedup=0, max_running=100, total_blocks=300_000)
        super().__init__(mock.build(options), STEP_S, 0.0)
        self._draw, self._launch, self._late = random.Random(5), launch_s, late

    def step(self) -> StepResult:
        self.launch_s = 0.0008 + self._draw.expovariate(1 / self._launch) + 0.003 * (self._draw.random() < self._late)
        self.step_s = STEP_S + abs(self._draw.gauss(0, 0.0003))
        result = super().step()
        result.computed_tokens = len(result.outputs)
        return result


def waits(device: Device, leading: bool, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds from each request to its step, and between steps."""
    loop, draw, numbers = EngineLoop(clock=lambda: device.now), random.Random(1), itertools.count()
    events: list[tuple[float, int, Callable[[], None]]] = []
    flushes: list[Flush] = []
    waiting: list[float] = []
    loop.begin_session(flushes.append)

    def at(when: float, run: Callable[[], None]) -> None:
        heapq.heappush(events, (when, next(numbers), run))

    def submit(name: str, tokens: int) -> None:
        loop.submit([sequence(new_choice(name), [1, 2], tokens)], refuse, name)
        if name.startswith("long"):
            waiting.append(device.now)

    def expect(when: float, name: str, within_s: float) -> None:
        at(when, lambda: loop.expect(name, within_s))

    for number in range(STREAMS):
        submit(f"answer {number}", 12_000)
    token, found, gaps, last = 1.0, list[float](), list[float](), 0.0
    while (token := token + draw.expovariate(RATE)) < seconds - 1:
        name, received = f"long {token}", token + 0.00125 + abs(draw.gauss(0, 0.0006))
        if leading:
            expect(token - 0.012, name, 0.0138 + draw.gauss(0, 0.0006))
        expect(token - 0.0009 + draw.gauss(0, 0.0003), name, 0.0027)
        expect(received, name, 0.0005)
        at(received + 0.0005, lambda name=name: submit(name, 5))  # type: ignore[misc]
    while device.now < seconds:
        steps, began = device.steps, device.now
        pause = loop.advance(device) or 0.0
        while flushes:
            flushes.pop()
            loop.flush_consumed()
        if device.steps > steps:
            gaps.append(1e3 * (device.now - last))
            last = device.now
            found += [1e3 * (began - each) for each in waiting]
            waiting.clear()
        if pause:
            device.now = min(device.now + pause, max(events[0][0], device.now) if events else seconds)
        while events and events[0][0] <= device.now:
            heapq.heappop(events)[2]()
    return sorted(found), sorted(gaps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=50.0, help="at most 60, in virtual time")
    asked = parser.parse_args()
    print("| launches | expected from | to its step, ms: p50 | p75 | p90 | between steps: p50 | p99 |")
    for launch_s, late in ((0.0001, 0.0), (0.0005, 0.0), (0.0005, 0.03), (0.001, 0.05)):
        for leading in (False, True):
            found, gaps = waits(Device(launch_s, late), leading, asked.seconds)
            columns = [found[int(share * len(found))] for share in (0.5, 0.75, 0.9)]
            columns += [gaps[int(share * len(gaps))] for share in (0.5, 0.99)]
            print(f"| {0.8 + 1e3 * launch_s:.1f} ms, {late:.0%} late | {'leading' if leading else 'all'} layers | "
                  + " | ".join(f"{each:.2f}" for each in columns) + " |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
