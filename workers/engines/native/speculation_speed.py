"""Whether speculation can be faster than none on this device, by measured steps of one short request."""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.base import EngineInfo, SequenceRequest
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import Executor, OverlapExecutor
from penstock.workers.engines.core.speculation import Speculation

log = structlog.get_logger("engine")

PROMPT, ANSWER = 2, 40  # tokens
SKIPPED = 4  # steps: those of the prompt, and the first that decode


class BothExecutor(Executor, OverlapExecutor, Protocol):
    """Computes steps at once, or launches them."""


def can_pay(
    executor: BothExecutor,
    speculation: Speculation,
    tokens: int,
    info: EngineInfo,
    make_scheduler: Callable[[], Scheduler],
) -> bool:
    """Whether a step with ``tokens`` proposals is shorter than the steps of as many tokens without them.

    One sequence is measured, for which proposals pay most. A False is logged: with every proposal right, answers would
    be slower than without speculation.

    Args:
        executor: of the target model.
        make_scheduler: of a pool that nothing uses yet.
    """
    plain = _step_seconds(ScheduledEngine(info, make_scheduler(), None, ahead=executor))
    proposing = _step_seconds(ScheduledEngine(info, make_scheduler(), executor, speculation=speculation))
    if proposing < plain * (tokens + 1):
        return True
    log.warning(
        "speculation_off",
        reason=f"a step with {tokens} proposed tokens takes {proposing * 1e3:.2f} ms, one without {plain * 1e3:.2f}: "
        "answers would be slower even if every proposal were right",
    )
    return False


def _step_seconds(engine: ScheduledEngine) -> float:
    """Median time of a step of one sequence. The engine is not closed: its executor is another's."""
    sampling = Sampling(temperature=0.0)
    engine.submit(SequenceRequest("speed", [0] * PROMPT, sampling, Stop(ANSWER, ignore_eos=True)))
    times = []
    while engine.has_work():
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[SKIPPED:] or times)
