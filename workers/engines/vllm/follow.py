"""The asynchronous half of the engine: asks vLLM, follows its answers, tells facts. Runs in the loop's thread."""

import asyncio
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog

from schemas.errors import Code
from workers.engines.base import SequenceRequest
from workers.engines.external import engine
from workers.engines.external.answer import Ending
from workers.engines.external.engine import Broken, Heard
from workers.engines.loop import LoopThread
from workers.engines.vllm import handoff
from workers.engines.vllm.answers import Answer, Diverged
from workers.engines.vllm.api import Api
from workers.engines.vllm.prepare import Prepared

log = structlog.get_logger("engine")

HEALTH_S = 1.0


class Live(engine.Live):
    """One sequence."""

    __slots__ = ("again", "prepared", "top")

    def __init__(self, request: SequenceRequest, prepared: Prepared, again: Callable[[], Prepared]) -> None:
        super().__init__(request)
        self.top = request.sampling.logprobs
        self.prepared = prepared
        self.again = again  # the same without what came from elsewhere


class Events(NamedTuple):
    """Payloads of KV events of one rank. ``lost``: some are missing before them."""

    rank: int
    payloads: Seq[bytes]
    lost: bool


Fact = Heard | Events | Broken


class Follower:
    """Of one ``AsyncLLM``. Facts go to ``tell``, from the loop's thread."""

    def __init__(self, llm: Any, api: Api, loop: LoopThread, layout: str, tell: Callable[[Fact], None]) -> None:
        self._llm = llm
        self._api = api
        self._loop = loop
        self._layout = layout
        self._tell = tell
        self._broken = False
        self._numbers = itertools.count()

    def launch(self, live: Live) -> None:
        """Ask for a sequence."""
        if not live.cancelled and not self._broken:
            live.task = self._loop.task(self._follow(live), f"sequence {live.key!r:.60}")

    def abort(self, live: Live) -> None:
        """Have a sequence end: vLLM aborts what is no longer iterated, in whatever phase it is."""
        if live.task is not None:
            live.task.cancel()

    async def _follow(self, live: Live) -> None:
        try:
            try:
                await self._ask(live, live.prepared)
            except Diverged:
                log.info("handed_token_differs", action="going on behind it, from the fetched KV")
                await self._ask(live, live.again())
        except Exception as error:
            self._failed(live, error)

    async def _ask(self, live: Live, prepared: Prepared) -> None:
        params = self._api.sampling(output_kind=self._api.delta, **prepared.sampling)
        answer = Answer(known=prepared.known, top=live.top, adopted=prepared.adopted)
        name = f"penstock-{next(self._numbers)}"
        stream = self._llm.generate(
            prepared.prompt, params, name, trace_headers=live.trace, data_parallel_rank=prepared.rank
        )
        try:
            async for output in stream:
                self._hear(live, prepared, answer, output)
        finally:
            await stream.aclose()  # what is given up is aborted now, not when it is collected
        if not answer.finished:
            self._tell(Heard(live, ending=Ending(Code.engine_error, "the engine ended the answer and did not say how")))

    def _hear(self, live: Live, prepared: Prepared, answer: Answer, output: Any) -> None:
        if live.cancelled:
            return
        piece = output.outputs[0]
        new, ending = answer.take(piece.token_ids, piece.logprobs, piece.finish_reason, piece.stop_reason)
        opaque = None
        if live.hold and output.kv_transfer_params and new:
            opaque = handoff.pack(output.kv_transfer_params, self._layout, prepared.computed, new[-1].token)
        cached = None
        if new and not live.heard:
            live.heard = True
            cached = min(max(0, int(output.num_cached_tokens or 0)), live.prompt_len)
        scored = live.scored(output.prompt_logprobs[1:]) if live.score and output.prompt_logprobs else None
        if new or ending is not None or scored is not None:
            self._tell(Heard(live, cached, new, ending, opaque, scored))

    def _failed(self, live: Live, error: Exception) -> None:
        if isinstance(error, self._api.dead) or self._llm.errored:
            self.broken(error)
        elif not live.cancelled:
            self._tell(Heard(live, ending=Ending(self._code(live, error), str(error) or type(error).__name__)))

    def _code(self, live: Live, error: Exception) -> Code:
        if isinstance(error, self._api.transient):
            return Code.transfer_failed if live.prepared.adopted else Code.engine_error
        if isinstance(error, NotImplementedError):
            return Code.unsupported
        return Code.invalid_request if isinstance(error, self._api.refusals) else Code.engine_error

    async def watch(self) -> None:
        """The engine's own word on its health: it can end while nothing is asked of it."""
        while not self._broken:
            await asyncio.sleep(HEALTH_S)
            try:
                await self._llm.check_health()
            except Exception as error:
                self.broken(error)

    def broken(self, error: BaseException) -> None:
        self._broken = True
        self._tell(Broken(error))
