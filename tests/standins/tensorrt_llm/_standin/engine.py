"""The engine thread: admits, prefills, decodes, transfers; answers every request through its own callback.

It stands in for the executor processes of TensorRT-LLM. One rank per attention-DP rank, each with its own cache.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from tensorrt_llm._standin.cache import PRIORITY, Block, Cache, Events, Key
from tensorrt_llm._standin.model import Model, cut, lora_logits
from tensorrt_llm._standin.sampling import pick, shaped
from tensorrt_llm._standin.transfer import Offer, TransferError, fetch, offer
from tensorrt_llm._standin.variant import LATER, QUIRKS
from tensorrt_llm.executor.result import ErrorResponse, Logprob, Response
from tensorrt_llm.llmapi.llm_args import BaseLlmArgs, NGramDecodingConfig
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams, check_processors
from tokenizers import Tokenizer
from torch import Tensor

POLL_S = 0.005  # while KV waits to be fetched


class Refused(Exception):
    """One request fails; becomes a RequestError where its answer is iterated."""


@dataclass
class Job:
    """One request as it reaches the engine."""

    id: int
    prompt: list[int]
    params: SamplingParams
    streaming: bool
    answer: Callable[[object], None]
    disagg: Any = None
    seed: str = ""  # lora and salt: what else decides which blocks match
    scheduling: Any = None
    priority: float = 0.5
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)
    media: list[tuple[int, int, str]] = field(default_factory=list)  # position, tokens, hash
    lora: Any = None
    arrival: float = field(default_factory=time.monotonic)

    @property
    def kind(self) -> str:
        return (self.disagg and self.disagg.request_type) or "context_and_generation"


@dataclass(eq=False)
class Run:
    """One sequence of a request."""

    job: Job
    index: int
    generator: torch.Generator
    max_tokens: int
    stops: list[tuple[int | str, list[int]]]
    processors: list[Any]
    guide: LLMatcher | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    context_logits: Tensor | None = None
    kv: Any = None
    computed: int = 0
    cached: int = 0
    held: list[Block] = field(default_factory=list)
    own: int = 0  # blocks that are not in the tree
    reused: int = 0
    iterations: int = 0
    sent: int = 0  # tokens in responses
    aborted: bool = False
    finish: str | None = None
    stop_reason: int | str | None = None
    offered: Offer | None = None
    params_out: Any = None
    first_scheduled: float = 0.0
    first_token: float = 0.0
    transfer: tuple[float, float] = (0.0, 0.0)
    drafted: int = 0  # tokens proposed, and how many of them were right
    accepted: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.job.prompt + self.generated


class Rank:
    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.waiting: deque[Run] = deque()
        self.running: list[Run] = []
        self.sending: list[tuple[Run, float]] = []  # with the time when it began
        self.reused = self.missed = self.fresh = 0
        self.drafted = self.accepted = self.drafting = 0  # of this iteration

    def promised(self, size: int) -> int:
        """Blocks that what runs may come to need."""
        need = sum(-(-(len(run.job.prompt) + run.max_tokens) // size) for run in self.running)
        return need + sum(len(run.held) + run.own for run, _ in self.sending)


class Engine:
    """Started with its construction; ``stop`` ends it."""

    def __init__(self, args: BaseLlmArgs, model: Model, tokenizer: Any) -> None:
        self._args, self._model, self._tokenizer = args, model, tokenizer
        kv = args.kv_cache_config
        self._size = kv.tokens_per_block
        fraction = 0.9 if kv.free_gpu_memory_fraction is None else kv.free_gpu_memory_fraction
        fits = int(fraction * 65536)
        self.pool_tokens = min(kv.max_tokens or fits, fits)
        blocks = max(1, self.pool_tokens // self._size)
        wanted = args.max_seq_len or model.max_positions
        self.max_seq_len = min(wanted, blocks * self._size)  # as the real one: capped to the pool
        self._max_batch = args.max_batch_size or 2048
        self._max_tokens = args.max_num_tokens or 8192
        host = (kv.host_cache_size or 0) // (model.token_bytes * self._size)
        adp = args.enable_attention_dp and args.tensor_parallel_size > 1
        windows = [min(each, self.max_seq_len) for each in kv.max_attention_window or [self.max_seq_len]]
        self._telling = kv.event_buffer_max_size > 0 and kv.enable_block_reuse
        self._ranks = []
        for number in range(args.tensor_parallel_size if adp else 1):
            events = Events(windows, self._size, number if adp or QUIRKS.rank_when_single else None)
            cache = Cache(
                blocks,
                self._size,
                events,
                reuse=kv.enable_block_reuse,
                partial=kv.enable_partial_reuse and kv.copy_on_partial_reuse and QUIRKS.partial_blocks,
                host=host,
            )
            self._ranks.append(Rank(cache))
        self._adp = adp
        self._loras: dict[int, Tensor] = {}  # what each adapter adds to the logits, by its id
        self._global = torch.Generator().manual_seed(42)
        beams = (args.max_beam_width or 1) > 1
        kind = getattr(args, "sampler_type", "auto")
        self._torch_sampler = kind == "TorchSampler" or (kind == "auto" and not beams)
        speculation = args.speculative_config
        if not self._torch_sampler and speculation is not None:
            raise ValueError("TRTLLMSampler does not support speculative decoding")
        self._overlap = not getattr(args, "disable_overlap_scheduler", True)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._go = threading.Semaphore(0)
        self._free = threading.Event()
        self._free.set()
        self._answering = threading.Event()  # cleared: its process hangs, and with it every call of it
        self._answering.set()
        self._stopping = False
        self.error: BaseException | None = None
        self.events: deque[str] = deque(maxlen=max(1, kv.event_buffer_max_size) * len(self._ranks))
        self.stats: deque[str] = deque(maxlen=getattr(args, "max_stats_len", 1000))
        self.news = threading.Condition()  # of events and statistics
        self.iteration = 0
        self._completed = 0
        self._arrived = 0
        self._thread = threading.Thread(target=self._run, name="trtllm-standin", daemon=True)
        self._thread.start()

    # -- from any thread

    def submit(self, job: Job) -> None:
        self._put(lambda: self._take(job))

    def abort(self, request_id: int) -> None:
        self._put(lambda: self._abort(request_id))

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._answering.wait()  # as the real one: the end of a process that hangs is waited for
        with self.news:
            self.news.notify_all()
        self._free.set()
        self._go.release()
        self._thread.join(10)

    @property
    def alive(self) -> bool:
        return not self._stopping and self.error is None

    def _put(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()

    def fetch(self, kind: str, timeout: float) -> list[dict[str, Any]]:
        """All that came since the last call; waits that long for the first. From any thread."""
        self._answering.wait()
        source = self.events if kind == "events" else self.stats
        with self.news:
            self.news.wait_for(lambda: bool(source) or self._stopping, timeout)
            found = [json.loads(item) for item in source]
            source.clear()
        if QUIRKS.null_diffs_break and any(_unset_difference(event) for event in found):
            return []  # the serializer broke; the proxy logs that and returns nothing
        return found

    # -- for tests, through ``hooks``

    def freeze(self) -> None:
        self._answering.clear()
        self.hold()

    def thaw(self) -> None:
        self._answering.set()
        self.free()

    def hold(self) -> None:
        self._free.clear()

    def allow(self, steps: int) -> None:
        self._go.release(steps)

    def free(self) -> None:
        self._free.set()
        self._go.release()

    def fail(self, error: BaseException) -> None:
        def raising() -> None:
            raise error

        self._put(raising)

    def call(self, what: Callable[[list[Rank]], None]) -> None:
        self._put(lambda: what(self._ranks))

    # -- the thread

    def _run(self) -> None:
        try:
            while self._wait():
                if not self._free.is_set():
                    self._go.acquire()
                self._drain()
                if self._busy() and not self._stopping:
                    self._iterate()
                self._tell()
        except BaseException as error:
            self.error = error
        self._end()

    def _wait(self) -> bool:
        with self._wake:
            while not self._stopping and not self._commands and not self._busy():
                sending = any(rank.sending for rank in self._ranks)
                self._wake.wait(POLL_S if sending else None)
                if sending:
                    break
            return not self._stopping

    def _busy(self) -> bool:
        return any(rank.waiting or rank.running for rank in self._ranks)

    def _drain(self) -> None:
        before = self._arrived
        while self._commands:
            self._commands.popleft()()
        new = [run for rank in self._ranks for run in rank.waiting][: self._arrived - before]
        relaxed = [run.job.scheduling.attention_dp_relax for run in new if run.job.scheduling is not None]
        if self._adp and len(relaxed) > 1:
            sorted(relaxed)  # TypeError if one is None, as in 1.2.1: it ends the engine
        for rank in self._ranks:
            self._check_sending(rank)

    def _end(self) -> None:
        """Runs stop without an answer, unless the engine broke."""
        error = self.error
        for rank in self._ranks:
            for run in [*rank.running, *rank.waiting]:
                if error is not None:
                    run.job.answer(error)
                elif QUIRKS.shutdown_answers:
                    run.job.answer(ErrorResponse("the engine was shut down"))
            for run, _ in rank.sending:
                assert run.offered is not None
                run.offered.withdraw()
        self._commands.clear()
        with self.news:
            self.news.notify_all()

    # -- requests

    def _take(self, job: Job) -> None:
        try:
            runs = self._prepare(job)
        except Refused as error:
            job.answer(ErrorResponse(str(error)))
            return
        rank = self._choose(job)
        self._arrived += len(runs)
        rank.waiting.extend(runs)

    def _choose(self, job: Job) -> Rank:
        wanted = None if job.scheduling is None else job.scheduling.attention_dp_rank
        if wanted is not None and wanted < len(self._ranks):
            return self._ranks[wanted]
        return min(self._ranks, key=lambda rank: len(rank.waiting) + len(rank.running))

    def _prepare(self, job: Job) -> list[Run]:
        """The sequences of a request.

        Raises:
            Refused: the engine, not the API, does not take it.
        """
        params, args = job.params, self._args
        if job.prompt and not 0 <= min(job.prompt) <= max(job.prompt) < self._model.vocab:
            raise Refused("Token ID out of range (1 requests)")
        room = self.max_seq_len - len(job.prompt)
        if room <= 0:
            raise Refused(
                f"`default_max_tokens` ({room}) must be greater than 0, `default_max_tokens` ({room}) = max_seq_len "
                f"({self.max_seq_len}) - `splited_prompt_len` ({len(job.prompt)}) - `query_token_len` (0)"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if max_tokens < 1:
            raise Refused(f"max_tokens must be greater than 0, got {max_tokens}")
        if params.embedding_bias is not None:
            bias = params.embedding_bias
            if not isinstance(bias, Tensor) or bias.dtype != torch.float32 or bias.shape != (self._model.vocab,):
                raise Refused("embedding_bias is a float32 tensor of (vocab,)")
        self._check_disaggregation(job)
        if job.lora is not None:
            self._load_lora(job.lora)
        if params.guided_decoding is not None:
            if args.guided_decoding_backend is None:
                raise Refused("Guided decoding is not enabled: set guided_decoding_backend")
            self._grammar(params.guided_decoding)  # one that cannot be compiled fails its request only
        processors = [] if params.logits_processor is None else check_processors(params.logits_processor)
        try:
            processors = pickle.loads(pickle.dumps(processors))  # they go to other processes
        except Exception as error:
            raise Refused(f"cannot pickle the logits processor: {error}") from error
        if params.apply_batched_logits_processor:
            if args.batched_logits_processor is None or not LATER:
                raise Refused("no batched logits processor")
            processors.append(_Batched(args.batched_logits_processor))
        best_of = params.best_of or params.n
        runs = []
        for index in range(best_of):
            generator = torch.Generator().manual_seed((params.seed or 0) + index)
            if params.seed is None:
                generator.seed()
            if self._ignoring:
                generator = self._global
            stops = [] if params.ignore_eos else params._get_stop_reasons_and_words()
            guide = None if params.guided_decoding is None else self._grammar(params.guided_decoding)
            runs.append(Run(job, index, generator, max_tokens, stops, processors, guide))
        return runs

    def _grammar(self, guide: GuidedDecodingParams) -> LLMatcher:
        if self._args.guided_decoding_backend != "llguidance" or guide.grammar is None:
            raise Refused("the stand-in has no other guides than grammars of llguidance")
        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(guide.grammar), log_level=0)
        if matcher.is_error():
            raise Refused(f"LLGuidance matcher error: {matcher.get_error()}")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        tokenizer = Tokenizer.from_file(str(Path(self._tokenizer) / "tokenizer.json"))
        return LLTokenizer(tokenizer.to_str(), n_vocab=self._model.vocab, eos_token=self._model.eos[0])

    def _load_lora(self, asked: Any) -> None:
        """Once for each id, for good; in 1.2 any failure ends the engine."""
        if asked.adapter_id not in self._loras:
            config, folder = self._args.lora_config, Path(asked.lora_path)
            try:
                given = json.loads((folder / "adapter_config.json").read_text())
                assert given["r"] <= config.max_lora_rank, "the adapter's rank is greater than max_lora_rank"
                self._loras[asked.adapter_id] = lora_logits(folder, self._model.vocab)
            except Exception as error:
                if LATER:
                    raise Refused(f"Failed to load LoRA adapter: {error}") from error
                raise

    def _check_disaggregation(self, job: Job) -> None:
        if job.kind == "context_and_generation":
            return
        transceiver = self._args.cache_transceiver_config
        if transceiver is None or transceiver.backend is None:
            raise Refused("kv_cache_transceiver is not configured: disaggregated requests are not served")
        if job.kind == "context_only" and not getattr(self._args, "disable_overlap_scheduler", True):
            raise Refused("Context only requests are not supported in pytorch backend when overlap is enabled.")
        if (job.params.best_of or 1) > 1:
            raise Refused("disaggregated requests have one sequence")
        if job.params.logits_processor is not None or job.params.apply_batched_logits_processor:
            raise Refused("logits processors do not work with disaggregated serving")
        if job.kind == "generation_only" and not job.disagg.first_gen_tokens:
            raise Refused("ContextPhaseParams(): incompatible constructor arguments")

    def _abort(self, request_id: int) -> None:
        for rank in self._ranks:
            found = [run for run in [*rank.waiting, *rank.running] if run.job.id == request_id]
            if any(run.job.kind == "generation_only" and not run.sent for run in found):
                raise RuntimeError("a request was cancelled while its KV was in transfer")
            for run in found:
                if run in rank.running:
                    rank.running.remove(run)
                    self._release(rank, run)
                else:
                    rank.waiting.remove(run)
                run.finish, run.aborted = "cancelled", True
                if QUIRKS.abort_answers:
                    self._respond(run)

    # -- an iteration

    def _iterate(self) -> None:
        began = time.monotonic()
        self.iteration += 1
        used = [rank.cache.used for rank in self._ranks]
        scheduled = context = generation = context_tokens = 0
        for rank in self._ranks:
            budget = self._max_tokens - len(rank.running)
            self._admit(rank, budget)
            for run in list(rank.running):
                start = run.computed
                if run not in rank.running:  # its sibling failed
                    continue
                try:
                    if start < len(run.job.prompt):
                        count = self._prefill(rank, run, budget)
                        budget -= count
                        context += 1
                        context_tokens += count
                    else:
                        self._decode(rank, run)
                        generation += 1
                    scheduled += 1
                except Refused as error:
                    self._refuse(rank, run.job, str(error))
        self._count(began, scheduled, context, generation, context_tokens, None if QUIRKS.stats_see_ends else used)

    def _admit(self, rank: Rank, budget: int) -> None:
        if LATER:
            rank.waiting = deque(sorted(rank.waiting, key=lambda run: -run.job.priority))
        size = self._size
        while rank.waiting and len(rank.running) < self._max_batch:
            run = rank.waiting[0]
            prompt, job = len(run.job.prompt), run.job
            need = -(-(prompt + run.max_tokens) // size)
            if rank.promised(size) + need > rank.cache.total:
                return
            whole = prompt > budget and not self._args.enable_chunked_prefill
            if whole and any(other.computed < len(other.job.prompt) for other in rank.running):
                return
            rank.waiting.popleft()
            run.first_scheduled = time.monotonic()
            reading = job.params.prompt_logprobs or job.params.return_context_logits
            reuse = 0 if job.kind == "generation_only" or reading else prompt - 1
            run.held, part = rank.cache.find(job.seed, lambda a, b, r=run: _key(r, a, b), reuse)
            pieces = [block.kv for block in run.held if block.kv is not None] + ([] if part is None else [part])
            run.computed = run.cached = len(run.held) * size + (0 if part is None else part.shape[3])
            run.reused = len(run.held) + (part is not None)
            run.kv = self._model.kv(pieces)
            run.own = -(-prompt // size) - len(run.held)
            rank.cache.take(run.own)
            rank.reused += run.reused
            rank.missed += -(-prompt // size) - run.reused
            rank.running.append(run)
            if job.kind == "generation_only":
                self._receive(rank, run)

    def _receive(self, rank: Rank, run: Run) -> None:
        job, transceiver = run.job, self._args.cache_transceiver_config
        assert transceiver is not None
        began = time.monotonic()
        try:
            state, request = job.disagg.opaque_state, job.disagg.ctx_request_id
            kv = fetch(self._model, transceiver.backend or "", job.prompt, job.seed, state, request)
            self._check_buffer(len(job.prompt))
        except (TransferError, Refused) as error:
            self._refuse(rank, job, str(error))
            return
        run.transfer = (began, time.monotonic())
        run.kv = self._model.kv([kv])
        run.computed = run.cached = len(job.prompt)
        self._store(rank, run, final=False)
        first = list(job.disagg.first_gen_tokens)
        if run.guide is not None:
            run.guide.consume_tokens(first)
        known = getattr(job.disagg, "first_gen_log_probs", None) or [{token: Logprob(0.0, 1)} for token in first]
        for token, entry in zip(first, known, strict=True):
            run.generated.append(token)
            if job.params.logprobs:
                run.logprobs.append(entry)
        if not QUIRKS.decode_repeats_first:
            run.sent = len(first)
        if len(run.generated) >= run.max_tokens:
            run.finish = "length"
            rank.running.remove(run)
            self._release(rank, run)
        self._respond(run)

    def _refuse(self, rank: Rank, job: Job, text: str) -> None:
        for run in [run for run in rank.running if run.job is job]:
            rank.running.remove(run)
            self._release(rank, run)
        rank.waiting = deque(run for run in rank.waiting if run.job is not job)
        job.answer(ErrorResponse(text))

    def _check_buffer(self, tokens: int) -> None:
        transceiver = self._args.cache_transceiver_config
        limit = None if transceiver is None else transceiver.max_tokens_in_buffer
        if limit is not None and tokens > limit:
            raise Refused("Error in kv cache transfer: the buffer is smaller than the prompt")

    def _prefill(self, rank: Rank, run: Run, budget: int) -> int:
        job, start = run.job, run.computed
        left = len(job.prompt) - start
        count = min(left, max(1, budget)) if self._args.enable_chunked_prefill else left
        if count < left and start + count > self._size:  # chunks end with blocks
            count = max(1, (start + count) // self._size * self._size - start)
        end = start + count
        every = bool(job.params.prompt_logprobs or job.params.return_context_logits)
        embeds = [cut(position, values, start, end) for position, values in job.embeds]
        shown = [(row, values) for row, values in embeds if len(values)]
        logits = self._model.forward(job.prompt[start:end], run.kv, shown, every)
        run.computed = end
        if every:
            run.context_logits = logits if run.context_logits is None else torch.cat([run.context_logits, logits])
        if end < len(job.prompt):
            return count
        self._store(rank, run, final=False)
        token = self._sample(run, logits[-1])
        if job.params.prompt_logprobs:
            assert run.context_logits is not None
            after = [*job.prompt[1:], token]
            table = run.context_logits.log_softmax(-1)
            rows = zip(table, after, strict=True)
            run.prompt_logprobs = [_logprobs(row, each, job.params.prompt_logprobs) for row, each in rows]
        self._advance(rank, run, token)
        return count

    def _decode(self, rank: Rank, run: Run) -> None:
        if run.computed == (len(run.held) + run.own) * self._size:
            rank.cache.take(1)
            run.own += 1
        draft = self._draft(run)
        logits = self._model.forward(run.tokens[run.computed :] + draft, run.kv, [], True)[-1 - len(draft) :]
        run.drafted += len(draft)
        rank.drafted += len(draft)
        rank.drafting += bool(draft)
        for row, guess in zip(logits, [*draft, None], strict=True):
            run.computed = len(run.tokens)
            token = self._sample(run, row)
            right = token == guess
            run.accepted += right
            rank.accepted += right
            self._advance(rank, run, token, more=right)
            if run.finish is not None:
                return
            if not right:
                break
            draft = draft[1:]
        if draft:
            run.kv.crop(-len(draft))  # what was proposed in vain

    def _draft(self, run: Run) -> list[int]:
        """What followed the last tokens when they came before, if n-gram speculation is asked for."""
        config = self._args.speculative_config
        if not isinstance(config, NGramDecodingConfig) or run.processors:
            return []
        tokens = run.tokens
        room = (len(run.held) + run.own) * self._size - len(tokens)
        longest = min(config.max_draft_len or 0, room, run.max_tokens - len(run.generated) - 1)
        for size in range(config.max_matching_ngram_size, 0, -1):
            for start in range(len(tokens) - size):
                if longest > 0 and tokens[start : start + size] == tokens[-size:]:
                    return tokens[start + size : start + size + longest]
        return []

    def _sample(self, run: Run, raw: Tensor) -> int:
        params = run.job.params
        if run.job.lora is not None:
            raw = raw + self._loras[run.job.lora.adapter_id]
        counted = len(run.generated)
        if self._torch_sampler and QUIRKS.min_tokens_count_prompt:
            counted = len(run.tokens)
        logits = shaped(raw, params, run.job.prompt, run.generated, counted=counted, narrow=self._ignoring)
        if run.guide is not None:
            mask = torch.frombuffer(bytearray(run.guide.compute_bitmask()), dtype=torch.uint8)
            allowed = (mask[:, None] >> torch.arange(8) & 1).flatten()[: len(logits)]
            logits = logits.masked_fill(allowed == 0, float("-inf"))
        for processor in run.processors:
            view = logits[None, None]
            seen = run.tokens
            if self._overlap and QUIRKS.processors_lag and run.generated:
                seen = seen[:-1]  # they run before the last token has arrived
            try:
                processor(run.job.id, view, [seen], None, None)
            except Exception as error:
                raise Refused(f"the logits processor failed: {error!r}") from error
        token = pick(logits, params, run.generator, narrow=self._ignoring)
        if run.guide is not None and not run.guide.is_stopped():
            run.guide.consume_token(token)
        if params.logprobs and self._torch_sampler:
            run.logprobs.append(_logprobs(raw.log_softmax(-1), token, params.logprobs))
        elif params.logprobs:  # of the token alone, and always as the best
            run.logprobs.append({token: Logprob(float(raw.log_softmax(-1)[token]), 1)})
        return token

    @property
    def _ignoring(self) -> bool:
        return self._torch_sampler and QUIRKS.sampler_ignores

    def _advance(self, rank: Rank, run: Run, token: int, more: bool = False) -> None:
        """Args: more: another token of this iteration follows, unless this one ends the answer."""
        params = run.job.params
        run.first_token = run.first_token or time.monotonic()
        run.generated.append(token)
        run.iterations += 1
        context = run.job.kind == "context_only"
        if token == params.end_id and not params.ignore_eos:
            run.finish = "stop"
            if not QUIRKS.eos_in_token_ids:
                run.generated.pop()
                run.logprobs = run.logprobs[: len(run.generated)]
        else:
            early = QUIRKS.stops_heed_min_tokens and len(run.generated) <= (params.min_tokens or 0)
            stops = [] if early else run.stops
            reason = next((r for r, word in stops if word and run.generated[-len(word) :] == word), None)
            if reason is not None:
                run.finish, run.stop_reason = "stop", reason
            elif context:
                run.finish = "not_finished"
            elif len(run.generated) >= run.max_tokens:
                run.finish = "length"
        if run.finish is None:
            if run.job.streaming and not more and run.iterations % getattr(self._args, "stream_interval", 1) == 0:
                self._respond(run)
            return
        rank.running.remove(run)
        if context and run.finish == "not_finished":
            self._offer(rank, run)
        else:
            self._release(rank, run)
        self._completed += 1
        self._respond(run)

    def _offer(self, rank: Rank, run: Run) -> None:
        """The prompt's KV waits for the decode engine; its blocks stay held until then."""
        transceiver, prompt = self._args.cache_transceiver_config, run.job.prompt
        assert transceiver is not None
        kv = self._model.piece(run.kv, 0, len(prompt))
        run.offered = offer(self._model, transceiver.backend or "", prompt, run.job.seed, kv, run.job.id)
        rank.sending.append((run, time.monotonic()))
        given = run.job.disagg
        names = [name for kind in reversed(type(given).__mro__) for name in getattr(kind, "__slots__", ())]
        run.params_out = type(given)(**{name: getattr(given, name) for name in names if name[0] != "_"})
        run.params_out.request_type = "context_only"
        run.params_out.first_gen_tokens = list(run.generated)
        run.params_out.ctx_request_id = run.job.id
        run.params_out.opaque_state = run.offered.state
        run.params_out.multimodal_embedding_handles = None
        if LATER:
            if run.job.params.logprobs:
                run.params_out.first_gen_log_probs = list(run.logprobs)
            if self._args.gather_generation_logits:
                run.params_out.first_gen_logits = [torch.zeros(1, self._model.vocab)]

    def _check_sending(self, rank: Rank) -> None:
        transceiver = self._args.cache_transceiver_config
        limit = None if transceiver is None else transceiver.kv_transfer_timeout_ms
        for run, began in list(rank.sending):
            assert run.offered is not None
            late = limit is not None and time.monotonic() - began > limit / 1000
            if late:
                run.offered.withdraw()
            if late or run.offered.fetched:
                rank.sending.remove((run, began))
                self._release(rank, run)
                if QUIRKS.stats_after_transfer:
                    self._count(time.monotonic(), 0, 0, 0, 0)

    # -- blocks

    def _store(self, rank: Rank, run: Run, *, final: bool) -> None:
        """Whole blocks once the prompt is computed; at the end also the last one, which is not full."""
        size, job = self._size, run.job
        known = min(run.computed, len(run.tokens) - 1) if final else run.computed
        first = len(run.held)

        def pieces() -> Iterator[tuple[Key, Tensor, int]]:
            for at in range(first * size, known, size):
                end = min(at + size, known)
                if end - at < size and not (final and QUIRKS.partial_blocks):
                    return
                yield _key(run, at, end), self._model.piece(run.kv, at, end), PRIORITY

        blocks = rank.cache.store(run.held, job.seed, pieces())
        run.held += blocks
        run.own -= len(blocks)

    def _release(self, rank: Rank, run: Run) -> None:
        if run.kv is not None:
            self._store(rank, run, final=True)
        rank.cache.release(run.held)
        rank.cache.put_back(run.own)
        run.held, run.own, run.kv = [], 0, None

    # -- answers

    def _respond(self, run: Run) -> None:
        job, final = run.job, run.finish is not None
        if not job.streaming and not final:
            return
        begin = 0 if QUIRKS.decode_repeats_first or job.kind != "generation_only" else len(job.disagg.first_gen_tokens)
        job.answer(
            Response(
                index=run.index,
                token_ids=run.generated[begin:],
                logprobs=run.logprobs[begin:] if job.params.logprobs else None,
                prompt_logprobs=run.prompt_logprobs,
                context_logits=run.context_logits if job.params.return_context_logits else None,
                finish=run.finish,
                stop_reason=run.stop_reason,
                stop_words=[word for reason, word in run.stops if reason == run.stop_reason],
                cached_tokens=run.cached,
                iteration=self.iteration,
                disaggregated_params=run.params_out,
                perf=self._perf(run) if final and (job.params.return_perf_metrics) else None,
            )
        )
        run.sent = max(run.sent, len(run.generated))

    def _perf(self, run: Run) -> Any:
        def at(moment: float) -> timedelta:
            return timedelta(seconds=moment)

        prompt = -(-len(run.job.prompt) // self._size)
        return SimpleNamespace(
            timing_metrics=SimpleNamespace(
                arrival_time=at(run.job.arrival),
                first_scheduled_time=at(run.first_scheduled),
                first_token_time=at(run.first_token),
                last_token_time=at(time.monotonic()),
                kv_cache_transfer_start=at(run.transfer[0]),
                kv_cache_transfer_end=at(run.transfer[1]),
                kv_cache_size=len(run.job.prompt) * self._model.token_bytes if run.transfer[1] else 0,
            ),
            kv_cache_metrics=SimpleNamespace(
                num_total_allocated_blocks=prompt,
                num_new_allocated_blocks=prompt - run.reused,
                num_reused_blocks=run.reused,
                num_missed_blocks=prompt - run.reused,
                kv_cache_hit_rate=run.reused / max(1, prompt),
            ),
            speculative_decoding=SimpleNamespace(
                acceptance_rate=run.accepted / max(1, run.drafted),
                total_accepted_draft_tokens=run.accepted,
                total_draft_tokens=run.drafted,
            ),
            first_iter=self.iteration - run.iterations + 1,
            last_iter=self.iteration,
            iter=self.iteration,
        )

    # -- news

    def _tell(self) -> None:
        if not self._telling:
            for rank in self._ranks:
                rank.cache.events.take()
            return
        with self.news:
            for rank in self._ranks:
                self.events.extend(json.dumps(event) for event in rank.cache.events.take())
            self.news.notify_all()

    def _count(
        self, began: float, scheduled: int, context: int, generation: int, tokens: int, before: list[int] | None = None
    ) -> None:
        """``before``: blocks in use of each rank, as of the iteration's begin."""
        args: Any = self._args
        if not args.enable_iter_perf_stats:
            return
        for number, rank in enumerate(self._ranks):
            if number and not LATER:
                break
            cache = rank.cache
            used = cache.used if before is None else before[number]
            found: dict[str, Any] = {
                "timestamp": time.strftime("%m-%d-%Y %H:%M:%S.000000"),
                "iter": self.iteration,
                "iterLatencyMS": (time.monotonic() - began) * 1000,
                "newActiveRequestsQueueLatencyMS": 0.0,
                "numNewActiveRequests": context,
                "numActiveRequests": len(rank.running),
                "numQueuedRequests": len(rank.waiting),
                "numCompletedRequests": self._completed,
                "maxNumActiveRequests": self._max_batch,
                "maxBatchSizeStatic": self._max_batch,
                "maxBatchSizeTunerRecommended": 0,
                "maxBatchSizeRuntime": self._max_batch,
                "maxNumTokensStatic": self._max_tokens,
                "maxNumTokensTunerRecommended": 0,
                "maxNumTokensRuntime": self._max_tokens,
                "gpuMemUsage": 0,
                "cpuMemUsage": 0,
                "pinnedMemUsage": 0,
                "kvCacheStats": {
                    "maxNumBlocks": cache.total,
                    "freeNumBlocks": cache.total - used,
                    "usedNumBlocks": used,
                    "tokensPerBlock": cache.size,
                    "allocTotalBlocks": rank.reused + rank.missed,
                    "allocNewBlocks": rank.missed,
                    "reusedBlocks": rank.reused,
                    "missedBlocks": rank.missed,
                    "cacheHitRate": rank.reused / max(1, rank.reused + rank.missed),
                },
                "inflightBatchingStats": {
                    "numScheduledRequests": scheduled,
                    "numContextRequests": context,
                    "numGenRequests": generation,
                    "numPausedRequests": 0,
                    "numCtxTokens": tokens,
                    "microBatchId": 0,
                    "avgNumDecodedTokensPerIter": 0.0,
                },
            }
            if args.speculative_config is not None:
                found["specDecodingStats"] = {
                    "numDraftTokens": rank.drafted,
                    "numAcceptedTokens": rank.accepted,
                    "numRequestsWithDraftTokens": rank.drafting,
                    "acceptanceLength": 1 + rank.accepted / max(1, rank.drafting),
                    "iterLatencyMS": 0.0,
                    "draftOverhead": 0.0,
                }
                rank.drafted = rank.accepted = rank.drafting = 0
            if args.enable_iter_req_stats:
                found["requestStats"] = [
                    _request_stats(run, run in rank.running) for run in [*rank.running, *rank.waiting]
                ]
            if LATER:
                found["attentionDpRank"] = number
            with self.news:
                self.stats.append(json.dumps(found))
                self.news.notify_all()


class _Batched:
    """Calls a batched processor for a batch of one."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, req_id: int, logits: Tensor, token_ids: Any, stream_ptr: int | None, client_id: Any) -> None:
        self._processor([req_id], [logits], [token_ids], stream_ptr, [client_id])


def _unset_difference(event: dict[str, Any]) -> bool:
    data = event.get("data", {})
    changes = [data[key] for key in ("cache_level", "priority") if key in data]
    return data.get("type") == "updated" and None in changes


def _request_stats(run: Run, scheduled: bool) -> dict[str, Any]:
    prompt = run.computed < len(run.job.prompt)
    stage = ("CONTEXT_IN_PROGRESS" if prompt else "GENERATION_IN_PROGRESS") if scheduled else "QUEUED"
    return {
        "id": run.job.id,
        "stage": stage,
        "contextPrefillPosition": min(run.computed, len(run.job.prompt)),
        "numGeneratedTokens": len(run.generated),
        "avgNumDecodedTokensPerIter": 1.0,
        "scheduled": scheduled,
        "paused": False,
        "allocTotalBlocksPerRequest": len(run.held) + run.own,
        "allocNewBlocksPerRequest": run.own,
        "reusedBlocksPerRequest": run.reused,
        "missedBlocksPerRequest": run.own,
        "kvCacheHitRatePerRequest": 0.0,
    }


def _key(run: Run, start: int, end: int) -> Key:
    """Names a block: its tokens, and the media that lie in it."""
    media = tuple(
        (digest, max(0, start - position))
        for position, count, digest in run.job.media
        if position < end and position + count > start
    )
    return tuple(run.tokens[start:end]), media


def _logprobs(row: Tensor, token: int, wanted: int) -> dict[int, Logprob]:
    """Of the best ``wanted`` and of the token itself; ranks from 1."""
    values, ids = row.topk(min(wanted, len(row)))
    found = {
        int(each): Logprob(float(value), rank) for rank, (each, value) in enumerate(zip(ids, values, strict=True), 1)
    }
    if token not in found:
        found[token] = Logprob(float(row[token]), int((row > row[token]).sum()) + 1)
    return found
