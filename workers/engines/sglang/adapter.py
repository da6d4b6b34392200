"""The SGLang-specific part of an external engine; see ``penstock.workers.engines.external.engine``.

``SglangFollower`` runs in the loop thread: it submits sequences to SGLang and queues its outputs. A cursor converts
chunks (incremental streaming) to tokens, each reported once. A chunk is a dictionary with the new ``output_ids`` and a
``meta_info``, in which log-probabilities are lists of (logprob, token id, text or None) beside the new tokens. The last
chunk of an aborted request repeats a token.

Besides the engine thread and the loop thread, one thread per rank reads KV events into the same queue.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import Tree
from penstock.infra.model.adapter import AdapterFolder
from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo, RequestError, Scored, SequenceRequest
from penstock.workers.engines.external import sequences
from penstock.workers.engines.external.engine import LORA_S, EngineAdapter, EngineLoras, WeightCommands, unreadable
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.engines.external.event_streams import EMPTIED, KV_EVENTS_S, EventStreams
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.runtime import EngineRuntime, runs
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.sglang.api import SglangApi
from penstock.workers.engines.sglang.engine_inputs import SglangInputs, SglangOptions, check, meeting, offer, prepare

_BAD_REQUEST = 400


class SglangOutputCursor:
    """Position in the output of one sequence.

    Args:
        top: alternatives per token; None: no log-probabilities.
        stops: token ids that end the output although the engine continues.
        min_tokens: tokens before which they do not.
        continues: reaching the call's limit does not end the sequence: another call follows.
        adopted: its prompt's KV was fetched from another engine.

    Attributes:
        finished: the sequence has ended.
    """

    def __init__(
        self,
        *,
        top: int | None = None,
        stops: Collection[int] = (),
        min_tokens: int = 0,
        continues: bool = False,
        adopted: bool = False,
    ) -> None:
        self.finished = False
        self._top = top
        self._stops = frozenset(stops)
        self._min_tokens = min_tokens
        self._count = 0
        self._continues = continues
        self._adopted = adopted

    def take(self, chunk: Mapping[str, Any]) -> tuple[list[sequences.Token], sequences.SequenceFailure | None]:
        """Take one chunk; returns its new tokens and the failure, if any."""
        if self.finished:
            return [], None
        info = chunk["meta_info"]
        reason = info.get("finish_reason")
        if reason is not None and reason["type"] not in ("stop", "length"):
            self.finished = True
            return [], self._failure(reason)
        if reason is not None and isinstance(reason.get("matched"), str):
            # It is given no strings to stop at: so it ends an output whose logits are not numbers.
            self.finished = True
            return [], sequences.SequenceFailure(Code.engine_error, f"the engine ended the output: {reason['matched']}")
        new = []
        for at, token in enumerate(chunk["output_ids"]):
            stops = token in self._stops and self._count >= self._min_tokens
            self._count += 1
            finish, stop_token = ("stop", token) if stops else ("", None)
            new.append(sequences.Token(token, finish, self._logprob(token, at, info), stop_token))
            if stops:
                self.finished = True
                return new, None
        if reason is None or (reason["type"] == "length" and self._continues):
            return new, None
        self.finished = True
        matched = reason.get("matched")
        return sequences.last_token(new, reason["type"], matched if isinstance(matched, int) else None)

    def _failure(self, reason: Mapping[str, Any]) -> sequences.SequenceFailure:
        """Of an abort: the engine's status code says whose fault it is."""
        status, message = reason.get("status_code"), str(reason.get("message") or "the engine aborted the request")
        if status == _BAD_REQUEST:
            return sequences.SequenceFailure(Code.invalid_request, message)
        if status is None:
            return sequences.SequenceFailure(Code.cancelled, message)
        moved = self._adopted and not reason.get("err_type")  # errors of another kind, as of a grammar, name theirs
        return sequences.SequenceFailure(Code.transfer_failed if moved else Code.engine_error, message)

    def _logprob(self, token: int, at: int, info: Mapping[str, Any]) -> Logprob | None:
        if self._top is None:
            return None
        own = info.get("output_token_logprobs") or ()
        if at >= len(own) or own[at][0] is None:
            return Logprob(sequences.MISSING)
        best = (info.get("output_top_logprobs") or ()) if self._top else ()
        return Logprob(float(own[at][0]), _best(best[at] if at < len(best) else (), self._top))


def prompt_scores(info: Mapping[str, Any], tokens: int, first: int, top: int) -> list[Logprob]:
    """Log-probabilities of a prompt's tokens from ``first`` on, of a call with ``logprob_start_len`` = ``first`` - 1.

    SGLang reports no ranks: a token's is known if it is among the best.

    Args:
        tokens: of the prompt.
    Returns: an empty list if entries are missing: they could not be assigned to tokens.
    """
    own = info.get("input_token_logprobs") or ()
    best = (info.get("input_top_logprobs") or ()) if top else ()
    if len(own) < tokens - first + 1 or (top and len(best) < tokens - first + 1):
        return []
    scores = []
    for at in range(1, tokens - first + 1):  # the first entry is of the token before
        value, token = own[at][:2]
        alternatives = _best(best[at], top) if top else ()
        ranked = [each for each, _ in alternatives]
        scores.append(
            Logprob(
                sequences.MISSING if value is None else float(value),
                alternatives,
                ranked.index(token) + 1 if token in ranked else 0,
            )
        )
    return scores


def _best(entries: Seq[Any] | None, top: int) -> tuple[tuple[int, float], ...]:
    pairs = [(int(token), float(value)) for value, token, *_ in entries or ()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:top])


log = structlog.get_logger("engine")

RELEASED_S = 1.0  # from the release of a prompt to its abort, if it has not ended
LOAD_S = 0.1  # between two readings while there are outputs


class SglangCall(NamedTuple):
    """The calls of ``async_generate`` for one sequence.

    Attributes:
        prepare: the next call, from what the calls before it have generated.
        logprobs: how many alternatives each token reports; None: no log-probabilities.
        handoff: names the handoff that it is part of, on a prefill worker.
        offered: the state for the decode worker's engine, on a prefill worker.
        missing: why it cannot run on this engine of a pair.
    """

    prepare: Callable[[Seq[int]], SglangInputs]
    logprobs: int | None
    handoff: str = ""
    offered: bytes = b""
    missing: str = ""


class RankLoads:
    """The latest load of each rank. Written in the loop thread, read in the engine thread.

    Attributes:
        used_tokens: held by running requests, by rank.
        running: requests, by rank.
        slots: requests that run at once, by rank.
        preemptions: of ended requests, since start.
    """

    def __init__(self) -> None:
        self.used_tokens: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.preemptions = 0

    def take(self, loads: Iterable[Any]) -> None:
        """Take what ``get_loads`` has returned: an object for each rank."""
        for load in loads:
            rank = int(load.dp_rank)
            self.used_tokens[rank] = int(load.num_used_tokens)
            self.running[rank] = int(load.num_running_reqs)
            self.slots[rank] = int(load.max_running_requests)

    def used_blocks(self, block_size: int) -> int:
        """Blocks that running requests hold, on all ranks."""
        return sum(-(-tokens // block_size) for tokens in list(self.used_tokens.values()))


class SglangFollower(sequences.Follower[SglangApi, SglangCall]):
    """Follows one ``sglang.Engine``.

    Args:
        loads: where the ranks' load is noted.
        pids: of the engine's processes.
        slots: prompts that a prefill engine has at once. Those beyond are not handed over yet: routers see them wait.
    """

    def __init__(
        self,
        runtime: EngineRuntime[SglangApi],
        loads: RankLoads,
        pids: Collection[int],
        slots: int,
        options: SglangOptions,
    ) -> None:
        super().__init__(runtime)
        self._loads = loads
        self._pids = pids
        self._numbers = itertools.count()
        self._loads_read = float("-inf")
        self.options = options
        self._slots = asyncio.Semaphore(slots)
        self._together: dict[str, set[asyncio.Task[None]]] = {}  # prompts in computation, by their handoff

    def launch(self, sequence: sequences.ActiveSequence[SglangCall]) -> None:
        super().launch(sequence)
        if self.options.role == "prefill" and (task := sequence.task) is not None:
            handoff = sequence.call.handoff
            self._together.setdefault(handoff, set()).add(task)
            task.add_done_callback(lambda task: self._forget(handoff, task))

    def _forget(self, handoff: str, task: "asyncio.Task[None]") -> None:
        self._together[handoff].discard(task)
        if not self._together[handoff]:
            del self._together[handoff]

    def abort(self, sequence: sequences.ActiveSequence[SglangCall]) -> None:
        """Abort a sequence.

        On a prefill worker all choices of a request are handed over and released as one. A prompt that was fetched ends
        by itself a moment after its release.
        """
        if self.options.role == "prefill" and not sequence.cancelled:
            self._loop.later(RELEASED_S, self._cancel, sequence.call.handoff)
        else:
            super().abort(sequence)

    def _cancel(self, handoff: str) -> None:
        for task in self._together.get(handoff, ()):
            task.cancel()

    async def _prefill(self, sequence: sequences.ActiveSequence[SglangCall]) -> None:
        """Hand a sequence over, and compute its prompt while the decode engine waits for it."""
        async with self._slots:
            offered = sequence.call.offered if sequence.pin else None
            self._emit(sequences.SequenceUpdate(sequence, opaque=offered, handed=True))
            prepared = sequence.call.prepare(())
            try:
                stream = await self._llm.async_generate(**prepared.arguments, rid=self._name(), stream=True)
                try:
                    async for chunk in stream:
                        self._read_loads()
                        reason = chunk["meta_info"].get("finish_reason")
                        if reason is not None and reason["type"] == "abort":
                            log.warning("prompt_not_fetched", reason=reason.get("message"))
                finally:
                    await stream.aclose()
            except Exception as error:  # the decode engine gives the request back
                log.warning("prompt_not_computed", error=repr(error))

    async def _follow(self, sequence: sequences.ActiveSequence[SglangCall]) -> None:
        if sequence.call.missing:  # routers place it again
            self._fail(sequence, Code.transfer_failed, sequence.call.missing)
            return
        if self.options.role == "prefill":
            await self._prefill(sequence)
            return
        generated: list[int] = []
        try:
            prepared = sequence.call.prepare(generated)
            while not await self._generate(sequence, prepared, generated):
                prepared = sequence.call.prepare(generated)
        except TimeoutError:
            late = TimeoutError(f"no KV came from the prefill engine in {self.options.wait_s:g} s")
            self._failed(sequence, late, Code.transfer_failed)
        except (ValueError, TypeError) as error:  # it refuses the request, unless it has begun
            self._failed(sequence, error, Code.engine_error if sequence.responded else Code.invalid_request)
        except Exception as error:
            self._failed(sequence, error, Code.engine_error)

    def _name(self) -> str:
        """A request id. SGLang aborts every request whose id begins with the given one, so none is another's prefix."""
        return f"penstock-{next(self._numbers):016x}"

    async def _generate(
        self, sequence: sequences.ActiveSequence[SglangCall], prepared: SglangInputs, generated: list[int]
    ) -> bool:
        """One call, whose tokens are added to ``generated``; False: the sequence continues with another one."""
        cursor = SglangOutputCursor(
            top=sequence.call.logprobs,
            stops=prepared.stops,
            min_tokens=prepared.min_tokens,
            continues=prepared.continues,
            adopted=bool(self.options.layout),
        )
        before = len(generated)
        stream = await self._llm.async_generate(**prepared.arguments, rid=self._name(), stream=True)
        try:
            async with asyncio.timeout(self.options.wait_s or None) as first:  # for the prompt's KV
                async for chunk in stream:
                    first.reschedule(None)
                    generated += self._on_chunk(sequence, cursor, chunk)
                    if cursor.finished:
                        return True
        finally:
            await stream.aclose()  # aborts now, not at garbage collection
        if prepared.continues and len(generated) > before:
            return False
        self._fail(sequence, Code.engine_error, sequences.NO_REASON)
        return True

    def _on_chunk(
        self, sequence: sequences.ActiveSequence[SglangCall], cursor: SglangOutputCursor, chunk: Any
    ) -> list[int]:
        info = chunk["meta_info"]
        new, failure = cursor.take(chunk)
        if cursor.finished:
            self._loads.preemptions += int(info.get("num_retractions") or 0)
        if sequence.cancelled:
            return []
        self._read_loads()
        cached = sequence.first_output(info.get("cached_tokens")) if new else None
        scored = self._scored(sequence, info) if new else None
        if new or failure is not None:
            self._emit(sequences.SequenceUpdate(sequence, cached, new, failure, None, scored))
        return [each.token for each in new]

    def _scored(self, sequence: sequences.ActiveSequence[SglangCall], info: Any) -> Scored | None:
        """The prompt's log-probabilities, once: with the first token."""
        if not sequence.score:
            return None
        first, sequence.score = sequence.score, 0
        values = prompt_scores(info, sequence.prompt_len, first, sequence.scored_top)
        if not values:
            log.warning("prompt_logprobs_incomplete", tokens=sequence.prompt_len)
            return None
        return Scored(sequence.key, first, values)

    def _read_loads(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._loads_read >= LOAD_S:
            self._loads_read = now
            self._loop.task(self._take_loads(), "loads")

    async def _take_loads(self) -> None:
        self._loads.take(await self._llm.tokenizer_manager.get_loads())

    async def check(self) -> None:
        """Look after the engine's processes, and note the load.

        Raises:
            EngineError: one has ended.
        """
        for pid in self._pids:
            if not runs(pid):
                raise EngineError(f"a process of SGLang (pid {pid}: a scheduler or its detokenizer) has ended")
        await self._take_loads()


HEALTH_S = 0.5
NO_SAVER = (
    "SGLang frees memory only if it was started for that (--sleep-after-s, --share-device, or enable_memory_saver and "
    "enable_weights_cpu_backup in its arguments)"
)


def loras(runtime: EngineRuntime[SglangApi], settings: WorkerSettings) -> EngineLoras:
    """LoRA adapters, which SGLang knows by name: here by our id, which no other content has."""
    loop, llm = runtime.loop, runtime.llm

    def read(identity: str, folder: AdapterFolder) -> str:
        try:
            answer = loop.run(llm.async_load_lora_adapter(identity, str(folder.path)), LORA_S)
        except Exception as error:  # of SGLang's, of any kind
            raise unreadable("SGLang", folder, error) from error
        if not answer.success:
            raise unreadable("SGLang", folder, answer.error_message)
        return identity

    def drop(identity: str, name: str) -> None:
        async def unload() -> None:
            answer = await llm.async_unload_lora_adapter(name)
            if not answer.success:
                log.warning("adapter_kept", adapter=identity, error=answer.error_message)

        loop.task(unload(), "adapter")

    return EngineLoras(settings.max_loras, settings.max_lora_rank, runtime, read, drop)


def weight_commands(runtime: EngineRuntime[SglangApi], path: Path, tree: Tree) -> WeightCommands:
    """
    Args:
        path: of the model's folder.
        tree: the engine's arguments.
    """
    manager, commands = runtime.llm.tokenizer_manager, runtime.api.commands
    fixed = ""
    drafts = "a draft model stays on the device" if tree.get("speculative_algorithm") not in (None, "NGRAM") else ""
    if drafts:
        fixed = "SGLang loads a folder into the model and its draft model; restart workers"
    elif tree.get("enable_lora"):  # its wrapped layers name some of their tensors otherwise
        fixed = "SGLang's weights are not replaced below LoRA adapters; restart workers"
    saver = "" if tree.get("enable_memory_saver") else NO_SAVER

    async def idle() -> bool:
        return bool((await manager.flush_cache()).success)

    async def load(folder: Path) -> None:
        asked = commands.UpdateWeightFromDiskReqInput(model_path=str(folder))
        done, message, *_ = await manager.update_weights_from_disk(asked)
        if done:
            return
        # Before it touches them, it says so. What it calls a way back reads the new folder again (0.5.23).
        if message.startswith(("Failed to update weights", "Weights were updated")):
            raise EngineError(f"SGLang has loaded a part of {folder}: {message}")
        raise RequestError(Code.unsupported, f"SGLang does not load {folder}: {message}")

    async def sleep() -> None:
        await manager.release_memory_occupation(commands.ReleaseMemoryOccupationReqInput())

    async def wake() -> None:
        await manager.resume_memory_occupation(commands.ResumeMemoryOccupationReqInput())

    return WeightCommands(path, idle, load, sleep, wake, EMPTIED, fixed, drafts or saver)


def adapter_of(
    info: EngineInfo,
    runtime: EngineRuntime[SglangApi],
    options: SglangOptions,
    loads: RankLoads,
    pids: Collection[int],
    metrics: NativeSeries,
) -> EngineAdapter[SglangCall]:
    """
    Args:
        pids: of the engine's processes.
        metrics: SGLang's own.
    """
    consumed = ConsumedStates()

    def accept(request: SequenceRequest, lora: Any) -> ActiveSequence[SglangCall]:
        check(request, info, options)
        room, missing, offered = None, "", b""
        if options.layout:
            try:
                room = meeting(request, info, options, consumed)
            except ValueError as error:
                missing = str(error)
            if options.role == "prefill":
                offered = offer(request, info, options)

        def next_call(generated: Seq[int]) -> SglangInputs:
            return prepare(request, info, options, generated, room, lora)

        if request.constraint is not None:
            next_call(())  # refuses one that cannot be compiled
        call = SglangCall(next_call, request.sampling.logprobs, request.handoff, offered, missing)
        return ActiveSequence(request, call)

    def load() -> tuple[int, int]:
        return loads.used_blocks(info.block_size), loads.preemptions

    follower = SglangFollower(runtime, loads, pids, info.slots, options)
    follower.watch(follower.check, HEALTH_S)
    return EngineAdapter(
        "SGLang",
        accept,
        follower,
        EventStreams(info, options.root, load),
        collectors=[metrics],
        linger_s=KV_EVENTS_S,
    )
