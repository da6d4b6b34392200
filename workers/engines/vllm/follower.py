"""The asynchronous half of the adapter: submits to vLLM and queues its outputs. Runs in the loop thread."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from penstock.schemas.errors import Code
from penstock.workers.engines.external.outputs import SequenceFailure
from penstock.workers.engines.external.runtime import EngineFailed, EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence, SequenceUpdate
from penstock.workers.engines.vllm import handoff
from penstock.workers.engines.vllm.api import Api
from penstock.workers.engines.vllm.output_cursor import Diverged, OutputCursor
from penstock.workers.engines.vllm.prepare import Prepared

log = structlog.get_logger("engine")

HEALTH_S = 1.0
NO_REASON = "the engine ended the output without a reason"


class Call(NamedTuple):
    """The call of ``generate`` for one sequence.

    Attributes:
        prepare_without_handoff: prepares the same call without another engine's KV.
        logprobs: how many alternatives each token reports; None: no log-probabilities.
    """

    prepared: Prepared
    prepare_without_handoff: Callable[[], Prepared]
    logprobs: int | None


class Follower:
    """Follows one ``AsyncLLM`` and queues its events, in the loop thread."""

    def __init__(self, runtime: EngineRuntime[Api], layout: str) -> None:
        self._llm = runtime.llm
        self._api = runtime.api
        self._loop = runtime.loop
        self._layout = layout
        self._emit = runtime.inbox.put
        self._broken = False
        self._numbers = itertools.count()

    def launch(self, sequence: ActiveSequence[Call]) -> None:
        """Submit a sequence."""
        if not sequence.cancelled and not self._broken:
            sequence.task = self._loop.task(self._follow(sequence), f"sequence {sequence.key!r:.60}")

    def abort(self, sequence: ActiveSequence[Call]) -> None:
        """Abort a sequence: vLLM aborts requests whose stream is no longer iterated, in any phase."""
        if sequence.task is not None:
            sequence.task.cancel()

    async def _follow(self, sequence: ActiveSequence[Call]) -> None:
        try:
            try:
                await self._generate(sequence, sequence.call.prepared)
            except Diverged:
                log.info("handoff_token_differs", action="continuing after the reported token, from the fetched KV")
                await self._generate(sequence, sequence.call.prepare_without_handoff())
        except Exception as error:
            self._failed(sequence, error)

    async def _generate(self, sequence: ActiveSequence[Call], prepared: Prepared) -> None:
        params = self._api.sampling_params(prepared.sampling)
        cursor = OutputCursor(known=prepared.known, top=sequence.call.logprobs, adopted=prepared.adopted)
        name = f"penstock-{next(self._numbers)}"
        stream = self._llm.generate(
            prepared.prompt, params, name, trace_headers=sequence.trace, data_parallel_rank=prepared.rank
        )
        try:
            async for output in stream:
                self._on_output(sequence, prepared, cursor, output)
        finally:
            await stream.aclose()  # aborts now, not at garbage collection
        if not cursor.finished:
            self._emit(
                SequenceUpdate(
                    sequence,
                    failure=SequenceFailure(Code.engine_error, NO_REASON),
                )
            )

    def _on_output(self, sequence: ActiveSequence[Call], prepared: Prepared, cursor: OutputCursor, output: Any) -> None:
        if sequence.cancelled:
            return
        piece = output.outputs[0]
        new, failure = cursor.take(piece.token_ids, piece.logprobs, piece.finish_reason, piece.stop_reason)
        opaque = None
        if sequence.hold and output.kv_transfer_params and new:
            opaque = handoff.pack(output.kv_transfer_params, self._layout, prepared.computed, new[-1].token)
        cached = None
        if new and not sequence.responded:
            sequence.responded = True
            cached = min(max(0, int(output.num_cached_tokens or 0)), sequence.prompt_len)
        scored = sequence.scored(output.prompt_logprobs[1:]) if sequence.score and output.prompt_logprobs else None
        if new or failure is not None or scored is not None:
            self._emit(SequenceUpdate(sequence, cached, new, failure, opaque, scored))

    def _failed(self, sequence: ActiveSequence[Call], error: Exception) -> None:
        if isinstance(error, self._api.dead) or self._llm.errored:
            self.broken(error)
        elif not sequence.cancelled:
            self._emit(
                SequenceUpdate(
                    sequence, failure=SequenceFailure(self._code(sequence, error), str(error) or type(error).__name__)
                )
            )

    def _code(self, sequence: ActiveSequence[Call], error: Exception) -> Code:
        if isinstance(error, self._api.transient):
            return Code.transfer_failed if sequence.call.prepared.adopted else Code.engine_error
        if isinstance(error, NotImplementedError):
            return Code.unsupported
        return Code.invalid_request if isinstance(error, self._api.refusals) else Code.engine_error

    async def watch(self) -> None:
        """Poll the engine's health: it can fail while it has no requests."""
        while not self._broken:
            await asyncio.sleep(HEALTH_S)
            try:
                await self._llm.check_health()
            except Exception as error:
                self.broken(error)

    def broken(self, error: BaseException) -> None:
        self._broken = True
        self._emit(EngineFailed(error))
