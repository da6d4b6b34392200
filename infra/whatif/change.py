"""What is different from the recorded deployment, and what each recorded decision becomes with it. Pure.

A job records the inputs of its decision: the score table with the loads of the cheapest targets, the seed, and the
weights' terms. So a decision is decided again without the index or the loads of then. Loads stay those of the record:
what an earlier change would have done to them is not followed. ``penstock bench router`` simulates that.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from router.decided_again import candidates_of, decide_again
from router.routing import Weights, draw
from schemas.jobs import Candidate, Job

Mode = Literal["kv", "round_robin", "random", "least_loaded"]


class Change(msgspec.Struct, frozen=True):
    """
    Attributes:
        without: workers, by id or name, that are not there.
        killed: workers that are not there from ``at_ns`` on (Unix time).
    """

    weights: Weights = Weights()
    mode: Mode = "kv"
    without: frozenset[str] = frozenset()
    killed: frozenset[str] = frozenset()
    at_ns: int = 0

    def removes(self, worker: str, at_ns: int) -> bool:
        """Whether a worker is missing at a time. Its id is its name and eight hexadecimal digits."""
        gone = self.without | self.killed if at_ns >= self.at_ns else self.without
        return worker in gone or worker.rpartition("-")[0] in gone

    def unknown(self, workers: Collection[str]) -> list[str]:
        """Names of missing workers that are none of ``workers``, so that nothing would change without them."""
        known = {*workers, *(worker.rpartition("-")[0] for worker in workers)}
        return sorted((self.without | self.killed) - known)


class Choice(msgspec.Struct, frozen=True):
    """One target for one request. Tokens of the prompt.

    Attributes:
        cached: that it holds, or is about to compute for another request.
        ahead: to be computed there before the first token of this request, relative to a worker of usual speed.
    """

    worker: str
    rank: int
    cached: int
    ahead: float


class Redecided(msgspec.Struct, frozen=True):
    """A recorded decision, and what becomes of it. ``then`` None: no target is left, the request would wait."""

    at_ns: int
    prompt_tokens: int
    recorded: Choice
    reproduced: bool  # this build decides the record as it was decided
    then: Choice | None


def redecide(job: Job, change: Change, turn: int) -> Redecided | None:
    """Decide a job's decision again.

    Args:
        turn: number of the decision, for round robin.
    Returns:
        None: the record does not suffice; see ``router.decided_again``.
    """
    again = decide_again(job)
    if again is None or job.inputs is None:
        return None
    decision, inputs = job.decision, job.inputs
    tokens = len(msgspec.msgpack.decode(job.request, type=_Prompt).prompt) // 4
    candidates = candidates_of(job)
    recorded = next(each for each in candidates if (each.worker, each.rank) == (decision.chosen, decision.rank))
    left = tuple(each for each in candidates if not change.removes(each.worker, decision.at_ns))
    then = _choose(job, left, change, draw(inputs.seed), turn)
    return Redecided(
        decision.at_ns,
        tokens,
        _choice(recorded, tokens, inputs.block_size),
        again.chosen == (decision.chosen, decision.rank),
        _choice(then, tokens, inputs.block_size) if then is not None else None,
    )


class _Prompt(msgspec.Struct):
    prompt: bytes = b""


def _choose(job: Job, left: tuple[Candidate, ...], change: Change, seed: int, turn: int) -> Candidate | None:
    if not left:
        return None
    order = sorted(left, key=lambda each: (each.worker, each.rank))  # as routers number their targets
    match change.mode:
        case "round_robin":
            return order[turn % len(order)]
        case "random":
            return order[seed % len(order)]
        case "least_loaded":
            return min(order, key=lambda each: (each.active_blocks, each.running))
    decision = msgspec.structs.replace(job.decision, candidates=left)
    again = decide_again(msgspec.structs.replace(job, decision=decision), change.weights)
    if again is None:
        return None
    return next(each for each in left if (each.worker, each.rank) == again.chosen)


def _choice(target: Candidate, prompt_tokens: int, block_size: int) -> Choice:
    cached = min(target.overlap_blocks * block_size, prompt_tokens)
    ahead = target.slowness * (target.prefill_tokens + max(1, prompt_tokens - cached))
    return Choice(target.worker, target.rank, cached, ahead)
