"""The asynchronous half of the adapter: submits to vLLM and queues its outputs. Runs in the loop thread.

Outputs are deltas (``RequestOutputKind.DELTA``), which a cursor converts to tokens, each reported once. Every delta has
the new tokens, including the ending one. An engine that took over another's KV draws that engine's last token again: it
must be the same, and is not reported twice.
"""

import asyncio
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog

from penstock.schemas.errors import Code
from penstock.workers.engines.external import sequences
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.vllm import engine_inputs
from penstock.workers.engines.vllm.api import VllmApi
from penstock.workers.engines.vllm.engine_inputs import VllmInputs, VllmOptions


class Diverged(Exception):
    """The engine drew another token than the one already reported, after which it must continue."""


class VllmOutputCursor:
    """Position in the output of one sequence.

    Args:
        known: tokens already reported that the engine draws again.
        top: alternatives per token; None: no log-probabilities.
        adopted: its prompt's KV was fetched from another engine.
    """

    def __init__(self, *, known: Seq[int] = (), top: int | None = None, adopted: bool = False) -> None:
        self.finished = False
        self._known = list(known)
        self._top = top
        self._adopted = adopted

    def take(
        self,
        token_ids: Seq[int],
        logprobs: Seq[Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> tuple[list[sequences.Token], sequences.SequenceFailure | None]:
        """Take one delta; returns its new tokens and the failure, if any.

        Raises:
            Diverged: nothing of this output can be used.
        """
        if self.finished:
            return [], None
        new: list[sequences.Token] = []
        for at, token in enumerate(token_ids):
            if self._known:
                if token != self._known.pop(0):
                    raise Diverged
                continue
            new.append(sequences.Token(token, "", sequences.logprob_at(logprobs, at, token, self._top)))
        if finish is None:
            return new, None
        if finish in ("stop", "repetition", "length") and self._known:
            raise Diverged
        self.finished = True
        if finish in ("abort", "error"):
            return new, self._failed(finish)
        stop_token = stop_reason if isinstance(stop_reason, int) else None
        return sequences.last_token(new, "length" if finish == "length" else "stop", stop_token)

    def _failed(self, finish: str) -> sequences.SequenceFailure:
        if finish == "abort":
            return sequences.SequenceFailure(Code.cancelled, "the engine ended the request: abort")
        code = Code.transfer_failed if self._adopted else Code.engine_error
        return sequences.SequenceFailure(code, "the engine failed on this request; see its log")


log = structlog.get_logger("engine")

OTHER_TOKENS = (
    "vLLM's image processor made other tokens of an image than the gateway counted; serve this model's images with the "
    "native engine"
)


class VllmCall(NamedTuple):
    """The call of ``generate`` for one sequence.

    Attributes:
        prepare_without_handoff: prepares the same call without another engine's KV.
        logprobs: how many alternatives each token reports; None: no log-probabilities.
        lora: vLLM's LoRARequest; None: it has no LoRA adapter.
    """

    prepared: VllmInputs
    prepare_without_handoff: Callable[[], VllmInputs]
    logprobs: int | None
    lora: Any = None


class VllmFollower(sequences.Follower[VllmApi, VllmCall]):
    """Follows one ``AsyncLLM``."""

    def __init__(self, runtime: EngineRuntime[VllmApi], options: VllmOptions) -> None:
        super().__init__(runtime)
        self._layout = options.layout
        self._images = options.images
        self._numbers = itertools.count()

    async def _follow(self, sequence: sequences.ActiveSequence[VllmCall]) -> None:
        try:
            try:
                await self._generate(sequence, sequence.call.prepared)
            except Diverged:
                log.info("handoff_token_differs", action="continuing after the reported token, from the fetched KV")
                await self._generate(sequence, sequence.call.prepare_without_handoff())
        except Exception as error:
            self._failed(sequence, error, self._code(sequence, error))

    async def _generate(self, sequence: sequences.ActiveSequence[VllmCall], prepared: VllmInputs) -> None:
        params = self._api.sampling_params(prepared.sampling)
        cursor = VllmOutputCursor(known=prepared.known, top=sequence.call.logprobs, adopted=prepared.adopted)
        name = f"penstock-{next(self._numbers)}"
        prompt = prepared.prompt
        if prepared.images and (store := self._images) is not None:
            pictures = await asyncio.to_thread(lambda: [store.decode(raw) for raw in prepared.images])
            prompt = prompt | {"multi_modal_data": {"image": pictures}}
        stream = self._llm.generate(
            prompt,
            params,
            name,
            lora_request=sequence.call.lora,
            trace_headers=sequence.trace,
            data_parallel_rank=prepared.rank,
        )
        try:
            async for output in stream:
                self._on_output(sequence, prepared, cursor, output)
        finally:
            await stream.aclose()  # aborts now, not at garbage collection
        if not cursor.finished:
            self._fail(sequence, Code.engine_error, sequences.NO_REASON)

    def _on_output(
        self, sequence: sequences.ActiveSequence[VllmCall], prepared: VllmInputs, cursor: VllmOutputCursor, output: Any
    ) -> None:
        if sequence.cancelled:
            return
        if prepared.whole and not sequence.responded and tuple(output.prompt_token_ids or ()) != prepared.whole:
            self._fail(sequence, Code.engine_error, OTHER_TOKENS)
            sequence.cancelled = True
            self.abort(sequence)
            return
        piece = output.outputs[0]
        new, failure = cursor.take(piece.token_ids, piece.logprobs, piece.finish_reason, piece.stop_reason)
        opaque = None
        if sequence.pin and output.kv_transfer_params and new:
            opaque = engine_inputs.pack(output.kv_transfer_params, self._layout, prepared.computed, new[-1].token)
        cached = sequence.first_output(output.num_cached_tokens) if new else None
        scored = sequence.scored(output.prompt_logprobs[1:]) if sequence.score and output.prompt_logprobs else None
        if new or failure is not None or scored is not None:
            self._emit(sequences.SequenceUpdate(sequence, cached, new, failure, opaque, scored))

    def _code(self, sequence: sequences.ActiveSequence[VllmCall], error: Exception) -> Code | None:
        if isinstance(error, self._api.dead) or self._llm.errored:
            return None
        if isinstance(error, self._api.transient):
            return Code.transfer_failed if sequence.call.prepared.adopted else Code.engine_error
        if isinstance(error, NotImplementedError):
            return Code.unsupported
        return Code.invalid_request if isinstance(error, self._api.refusals) else Code.engine_error
