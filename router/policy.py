"""Which worker gets a request: filter, score, pick. Pure; the lowest score wins.

``score = prefill_weight · uncached / B + active / B − (overlap_weight − 1) · overlap``, in blocks of B tokens:
``uncached`` are prompt tokens that the worker would still have to compute, for its unfinished requests (as far as
they were not cached when placed, fading while they run) and for this one; ``active`` are prompt tokens of its
unfinished requests, which share its memory and its steps. Ties are broken at random, so that equal workers share.
"""

import math
import random
from collections.abc import Sequence

import msgspec

from router.loads import Load
from schemas import jobs
from schemas.errors import Code
from schemas.fleet import Registration, State
from schemas.jobs import Decision
from schemas.requests import GenerateRequest

SHOWN = 16
TIE = 1e-9


class Candidate(msgspec.Struct):
    """A member as one request sees it."""

    registration: Registration
    load: Load
    overlap_blocks: int
    suspect: bool = False
    score: float = 0.0
    excluded: str = ""
    for_good: bool = False  # excluded whatever the load


class Verdict(msgspec.Struct):
    """``worker`` is empty when the request has to wait; ``hopeless`` when no registered worker could ever run it."""

    mode: str
    worker: str = ""
    role: str = "aggregated"
    overlap_blocks: int = 0
    candidates: Sequence[Candidate] = ()
    hopeless: Code | None = None
    why: str = ""

    def decision(
        self,
        *,
        router: str,
        at_ns: int,
        waited_ns: int,
        reason: str,
        positions: tuple[int, int, int],
        prompt_blocks: int,
    ) -> Decision:
        """The record that goes into the job: the chosen worker and the best of the others."""
        shown: Sequence[Candidate] = self.candidates
        if len(shown) > SHOWN:
            ranked = sorted(shown, key=lambda c: (c.registration.worker != self.worker, bool(c.excluded), c.score))
            shown = ranked[:SHOWN]
        return Decision(
            mode=self.mode,
            chosen=self.worker,
            router=router,
            at_ns=at_ns,
            candidates=tuple(
                jobs.Candidate(
                    c.registration.worker,
                    c.overlap_blocks,
                    c.load.prompt_tokens // c.registration.block_size,
                    c.load.prefill_tokens,
                    c.load.running,
                    c.registration.slots,
                    c.score,
                    c.excluded,
                )
                for c in shown
            ),
            prompt_blocks=prompt_blocks,
            waited_ns=waited_ns,
            kv_seq=positions[0],
            work_seq=positions[1],
            done_seq=positions[2],
            reason=reason,
        )


class Policy:
    """One router's way of choosing. Keeps nothing but the round-robin counter and the random generator."""

    def __init__(
        self,
        mode: str,
        *,
        overlap_weight: float = 1.0,
        prefill_weight: float = 1.0,
        temperature: float = 0.0,
        rng: random.Random,
    ) -> None:
        self.mode = mode
        self._overlap_weight = overlap_weight
        self._prefill_weight = prefill_weight
        self._temperature = temperature
        self._rng = rng
        self._turn = 0

    def choose(self, request: GenerateRequest, candidates: list[Candidate]) -> Verdict:
        """Pick a worker, or say that none has room, or that none ever will."""
        verdict = Verdict(self.mode, candidates=candidates)
        mine = [c for c in candidates if _serves(c.registration, request.model)]
        verdict.candidates = mine
        prompt_tokens = len(request.prompt) // 4
        fit = [c for c in mine if self._fits(c, request, prompt_tokens)]
        if not fit:
            if mine and all(c.for_good for c in mine):
                verdict.hopeless, verdict.why = _hopeless(request, mine, prompt_tokens)
            return verdict
        chosen = self._pick(fit, prompt_tokens)
        verdict.worker = chosen.registration.worker
        verdict.role = chosen.registration.role
        verdict.overlap_blocks = chosen.overlap_blocks
        return verdict

    def _fits(self, candidate: Candidate, request: GenerateRequest, prompt_tokens: int) -> bool:
        registration = candidate.registration
        if self.mode == "direct" and registration.worker != request.worker and registration.name != request.worker:
            candidate.excluded = "not the named worker"
        elif prompt_tokens >= registration.max_model_len:
            candidate.excluded, candidate.for_good = "context too short", True
        elif prompt_tokens // registration.block_size + 1 > registration.total_blocks:
            candidate.excluded, candidate.for_good = "too few blocks", True
        elif registration.state is not State.ready:
            candidate.excluded = "draining"
        elif candidate.suspect:
            candidate.excluded = "connection lost"
        elif candidate.load.running and (
            candidate.load.running + request.n > registration.slots + registration.queue
        ):
            candidate.excluded = "full"
        return not candidate.excluded

    def _pick(self, fit: list[Candidate], prompt_tokens: int) -> Candidate:
        if self.mode == "round_robin":
            self._turn += 1
            return sorted(fit, key=lambda c: c.registration.worker)[self._turn % len(fit)]
        if self.mode == "random":
            return self._rng.choice(fit)
        for candidate in fit:
            candidate.score = self._score(candidate, prompt_tokens)
        best = min(c.score for c in fit)
        if self._temperature > 0:
            return self._sample(fit, best)
        ties = [c for c in fit if c.score <= best + TIE]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)

    def _score(self, candidate: Candidate, prompt_tokens: int) -> float:
        load, block = candidate.load, candidate.registration.block_size
        if self.mode == "least_loaded":
            return float(load.running)
        overlap = candidate.overlap_blocks
        uncached = load.prefill_tokens + max(prompt_tokens - overlap * block, 0)
        return (
            self._prefill_weight * uncached / block
            + load.prompt_tokens / block
            - (self._overlap_weight - 1.0) * overlap
        )

    def _sample(self, fit: list[Candidate], best: float) -> Candidate:
        """Softmax over scores, scaled to their spread."""
        spread = max(c.score for c in fit) - best
        if spread <= TIE:
            return self._rng.choice(fit)
        weights = [math.exp(-(c.score - best) / (spread * self._temperature)) for c in fit]
        return self._rng.choices(fit, weights)[0]


def _serves(registration: Registration, model: str) -> bool:
    return registration.model == model or model in registration.aliases


def _hopeless(request: GenerateRequest, mine: list[Candidate], prompt_tokens: int) -> tuple[Code, str]:
    longest = max(c.registration.max_model_len for c in mine)
    if prompt_tokens >= longest:
        return Code.context_length_exceeded, f"the prompt has {prompt_tokens} tokens; the workers take {longest}"
    blocks = max(c.registration.total_blocks for c in mine)
    return (
        Code.out_of_blocks,
        f"the prompt needs {prompt_tokens // request.block_size + 1} KV blocks; the largest worker has {blocks} "
        "(--kv-blocks)",
    )
