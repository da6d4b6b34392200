"""Engines made of a scheduler and an executor, of a vision encoder, or of both."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec

from schemas.errors import Code
from schemas.kv import KvEvent
from schemas.transfer import Memory
from workers.engines.base import (
    EngineInfo,
    EngineStats,
    Failure,
    KvTransfer,
    MediaReservation,
    MediaSpan,
    RequestError,
    SequenceRequest,
    StepResult,
)
from workers.engines.core.embeddings import EmbeddingCache, VisionEncoder
from workers.engines.core.scheduler import Scheduler
from workers.engines.core.sequence import Executor, OverlapExecutor, PendingStep, Sampled, Slot
from workers.engines.logits.registry import Registry

MISSING_EMBEDDINGS = "the embeddings of an image are not on this worker"
TEXT_ONLY = "this model takes text only; send the request without images, or to a model that takes them"


class VisionMixin:
    """Implements ``workers.engines.base.VisionEngine``. Without an encoder ``slot_tokens`` is 0."""

    def __init__(self, encoder: VisionEncoder | None) -> None:
        self._encoder = encoder
        self._embeddings = None if encoder is None else EmbeddingCache(encoder.slots, encoder.slot_tokens)
        self.slot_tokens = 0 if encoder is None else encoder.slot_tokens

    def _look(self) -> tuple[VisionEncoder, EmbeddingCache]:
        if self._encoder is None or self._embeddings is None:
            raise RequestError(Code.invalid_request, TEXT_ONLY)
        return self._encoder, self._embeddings

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium; from any thread.

        Raises:
            RequestError: it cannot be decoded, or the model does not take it.
        """
        return self._look()[0].prepare(raw, kind)

    def media_reserve(self, media: Seq[tuple[bytes, int]]) -> MediaReservation | None:
        """Hold slots for (digest, tokens) each; None: there is no room now.

        Raises:
            RequestError: there can never be.
        """
        _, cache = self._look()
        if any(tokens < 1 for _, tokens in media):
            raise RequestError(Code.invalid_request, "a medium takes at least one token of the prompt")
        needed = cache.needed(media)
        if needed > cache.total_slots:
            raise RequestError(
                Code.out_of_blocks,
                f"the media take {needed} embedding slots of {cache.slot_tokens} tokens; this worker has "
                f"{cache.total_slots} (embed_slots)",
            )
        return cache.reserve(media)

    def encode(self, reservation: MediaReservation, prepared: Mapping[int, object]) -> None:
        """Compute media (by their number in the reservation) into their slots, and adopt them.

        Raises:
            RequestError: a medium has another number of tokens than was reserved; nothing was computed.
            EngineError: the device is lost.
        """
        encoder, cache = self._look()
        for number, medium in prepared.items():
            given, wanted = encoder.tokens(medium), cache.tokens(reservation, number)
            if given != wanted:
                raise RequestError(
                    Code.invalid_request,
                    f"medium {number} has {given} tokens, the prompt has places for {wanted} of it",
                )
        encoder.fill([(reservation.slots[number], medium) for number, medium in prepared.items()])
        cache.adopt(reservation, prepared)

    def media_adopt(self, reservation: MediaReservation) -> None:
        self._look()[1].adopt(reservation)

    def media_release(self, reservation: MediaReservation) -> None:
        self._look()[1].release(reservation)

    def media_generations(self, reservation: MediaReservation) -> list[int]:
        return self._look()[1].generations_of(reservation)

    def _embeds(self) -> dict[str, Memory]:
        """The embedding pool by its name, or nothing."""
        if self._encoder is None or self._embeddings is None:
            return {}
        generations, _ = self._embeddings.generations.buffer_info()
        return {"embeds": msgspec.structs.replace(self._encoder.memory(), generations=generations)}

    def _check_media(self, media: Seq[MediaSpan], prompt: int, adopted: bool) -> None:
        """That every medium lies in the prompt, after the one before, and in slots that exist.

        Args:
            adopted: the prompt's KV came from elsewhere, so that its embeddings need not be here.
        """
        _, cache = self._look()
        free = 0
        for position, tokens, _, slots in media:
            if position < free or tokens < 1 or position + tokens > prompt:
                raise RequestError(
                    Code.invalid_request,
                    f"a medium cannot take {tokens} tokens from position {position} on: {free} to {prompt} are free",
                )
            free = position + tokens
            if not slots:
                if not adopted:
                    raise RequestError(Code.transfer_failed, MISSING_EMBEDDINGS)
                continue
            if len(slots) != -(-tokens // cache.slot_tokens):
                raise RequestError(
                    Code.invalid_request, f"a medium of {tokens} tokens came with {len(slots)} embedding slots"
                )
            if not 0 <= min(slots) <= max(slots) < cache.total_slots:
                raise RequestError(Code.invalid_request, f"there are only {cache.total_slots} embedding slots")


class InflightStep(NamedTuple):
    """A step that was launched and not yet committed."""

    plan: list[Slot]
    scoring: list[Slot]
    failures: list[Failure]
    launched: PendingStep


class ScheduledEngine(VisionMixin):
    """Implements ``workers.engines.base.Engine`` and ``VisionEngine``; owns ``executor`` and ``encoder``, closes both.

    Args:
        processors: that requests may name; None: none, they are refused.
        executor: None: ``ahead`` is given.
        ahead: an executor that takes the next plan while it computes one: a step's outputs are returned by the call
            after it, which has launched the next step before it waits for them.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        executor: Executor | None,
        encoder: VisionEncoder | None = None,
        processors: Registry | None = None,
        ahead: OverlapExecutor | None = None,
    ) -> None:
        super().__init__(encoder)
        self._ahead = ahead
        self._inflight: InflightStep | None = None
        self._processors = processors or Registry()
        self.info = info
        self.kv_transfer: KvTransfer | None = scheduler.reservations if scheduler.windows is None else None
        self._scheduler = scheduler
        self._executor = executor
        owned = executor if executor is not None else ahead
        assert owned is not None
        self._owned: Executor | OverlapExecutor = owned
        self._may_lack_embeddings = False  # a sequence was taken without its embeddings

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here (too long, unknown token ids, nothing to generate, media whose
                embeddings are not here, a logits processor that is not registered or refuses its arguments).
        """
        highest = max(max(request.prompt, default=0), max(request.generated, default=0))
        if highest >= self.info.vocab_size:
            raise RequestError(
                Code.invalid_request, f"token id {highest} is outside the vocabulary of {self.info.vocab_size}"
            )
        if request.media:
            self._check_media(request.media, len(request.prompt), request.reservation is not None)
            self._may_lack_embeddings = self._may_lack_embeddings or not all(span.slots for span in request.media)
        self._scheduler.submit(request, self._processors.chain(request))

    def cancel(self, key: object) -> bool:
        return self._scheduler.cancel(key)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def step(self) -> StepResult:
        """One batch.

        Raises:
            EngineError: the executor is broken; so is this engine.
        """
        scheduler = self._scheduler
        plan = scheduler.schedule()
        failures: list[Failure] = []
        scoring = scheduler.scoring.slots
        if self._may_lack_embeddings and (missing := [slot for slot in plan if _lacks_embeddings(slot)]):
            plan = scheduler.unplan(plan, missing)
            scoring = [slot for slot in scoring if slot not in missing]
            failures = [Failure(slot.sequence.key, Code.transfer_failed, MISSING_EMBEDDINGS) for slot in missing]
        if self._executor is None:
            return self._step_overlapped(plan, scoring, failures)
        sampled: list[Sampled] = self._executor.execute(plan, scoring) if plan else []
        result = scheduler.commit(plan, sampled, scoring)
        return result._replace(failures=result.failures + failures) if failures else result

    def _step_overlapped(self, plan: list[Slot], scoring: list[Slot], failures: list[Failure]) -> StepResult:
        """Launch this plan, then commit the one before."""
        assert self._ahead is not None
        done, self._inflight = self._inflight, None
        if plan:
            self._inflight = InflightStep(plan, scoring, failures, self._ahead.launch(plan, scoring))
            failures = []
        if done is None:
            result = self._scheduler.commit([], [], [])
        else:
            result = self._scheduler.commit(done.plan, done.launched.result(), done.scoring)
            failures = done.failures + failures
        return result._replace(failures=result.failures + failures) if failures else result

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self._scheduler.stats(), logits_errors=self._processors.faults.count)

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._scheduler.blocks.dump()

    @property
    def blocked(self) -> bool:
        return self._scheduler.blocked

    def memory(self) -> dict[str, Memory]:
        """Each pool with the generations of its owner."""
        generations, _ = self._scheduler.blocks.generations.buffer_info()
        pools = self._owned.memory()
        return {
            name: msgspec.structs.replace(pool, generations=generations) for name, pool in pools.items()
        } | self._embeds()

    def release_held(self, key: object) -> bool:
        return self._scheduler.held.release(key)

    def close(self) -> None:
        self._inflight = None
        self._owned.close()
        if self._encoder is not None:
            self._encoder.close()


def _lacks_embeddings(slot: Slot) -> bool:
    """Its KV came from elsewhere, was lost to a preemption, and cannot be computed again: there are no embeddings."""
    end = slot.start + slot.count
    return any(
        not slots and position < end and position + tokens > slot.start
        for position, tokens, _, slots in slot.sequence.media
    )


class EncodeEngine(VisionMixin):
    """The engine of an encode worker: a ``VisionEngine`` with as much of ``Engine`` as every worker asks for.

    Its blocks, in ``info`` and ``stats``, are slots of the embedding pool.
    """

    def __init__(self, info: EngineInfo, encoder: VisionEncoder) -> None:
        super().__init__(encoder)
        self.info = info
        self.kv_transfer: KvTransfer | None = None

    def submit(self, request: SequenceRequest) -> None:
        """Refused.

        Raises:
            RequestError: always.
        """
        raise RequestError(Code.unsupported, "an encode worker generates nothing; submit to another worker")

    def cancel(self, key: object) -> bool:
        return False

    def has_work(self) -> bool:
        return False

    def step(self) -> StepResult:
        return StepResult([], [], [], [], 0)

    @property
    def blocked(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        _, cache = self._look()
        return EngineStats(
            running=0,
            waiting=0,
            used_blocks=cache.used_slots,
            cached_blocks=cache.cached_slots,
            free_blocks=cache.free_slots,
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return []

    def memory(self) -> dict[str, Memory]:
        return self._embeds()

    def release_held(self, key: object) -> bool:
        return False

    def close(self) -> None:
        encoder, _ = self._look()
        encoder.close()
