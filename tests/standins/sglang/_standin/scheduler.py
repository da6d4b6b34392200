"""One rank's scheduler: steps, samples and ends requests as SGLang does, over the core that stands in for vLLM's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang._standin.disaggregation import Bootstrap, Room
from sglang._standin.pool import Pool
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, InvalidGrammarObject
from sglang.srt.disaggregation.kv_events import KVEventBatch, publisher
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from tensorrt_llm._standin.model import Model
from tensorrt_llm._standin.sampling import pick, shaped
from tokenizers import Tokenizer
from vllm._standin.core import Core, Piece, Request, _logprobs

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
Deliver = Callable[[str, list[int], dict[str, Any]], None]


class Job:
    """A request on its way to a scheduler."""

    def __init__(self, obj: Any, params: SamplingParams) -> None:
        self.rid, self.tokens, self.params = obj.rid, list(obj.input_ids), params
        self.logprob, self.top = bool(obj.return_logprob), obj.top_logprobs_num or 0
        self.start = -1 if obj.logprob_start_len is None else obj.logprob_start_len
        self.salt, self.lora = obj.cache_salt, obj.lora_id
        self.fake = obj.bootstrap_host == FAKE_BOOTSTRAP_HOST
        self.room: Room | None = None
        self.sees_room = obj.bootstrap_room is not None
        if self.sees_room and not self.fake:
            assert obj.bootstrap_host
            self.room = Room(obj.bootstrap_port, obj.bootstrap_room)
        self.first: Piece | None = None  # prefill: computed, and not fetched yet
        self.deadline = 0.0


class Scheduler(Core):
    def __init__(self, args: Any, model: Model, context: int, rank: int, bootstrap: Bootstrap) -> None:
        size = (args.resolved_dict()["page_size"] or 1) * args.dcp_size
        total = (args.max_total_tokens or 65536) // size
        caching = not args.disable_radix_cache and (
            bootstrap.mode != "decode" or args.disaggregation_decode_enable_radix_cache
        )
        config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=total + 1, block_size=size, enable_prefix_caching=caching),
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=args.chunked_prefill_size or 8192, max_num_seqs=args.max_running_requests or 256
            ),
            kv_transfer_config=None,
            model_config=SimpleNamespace(max_model_len=context, skip_tokenizer_init=True),
        )
        super().__init__(config, model)  # type: ignore[arg-type]
        self.pool = Pool(total + 1, size, caching=caching)
        self.args, self.asleep = args, False
        self._backup: Model | None = None
        self._pairs = args.drafts
        self.rank, self.context_len = rank, context
        self.deterministic = bool(args.enable_deterministic_inference)
        self.process: Any = None
        self.nodes: Any = None  # of an engine over several machines
        self.capacity = total * size
        self.longest = min(context - 1, self.capacity - 1) - 5
        self._bootstrap = bootstrap
        self.jobs: dict[str, Job] = {}
        self._meeting: list[Job] = []  # wait for the other engine
        self._work = asyncio.Event()
        self._compiled: dict[str, Any] = {}
        self._grammars: GuidanceBackend | None = None
        if not args.skip_tokenizer_init and args.grammar_backend == "llguidance":
            tokenizer = Tokenizer.from_file(str(Path(args.model_path) / "tokenizer.json"))
            self._grammars = GuidanceBackend(tokenizer, model.vocab, model.eos)
        self._publisher = publisher(args.kv_events_config, rank) if caching else None
        self.deliver: Deliver = lambda rid, tokens, info: None

    def close(self) -> None:
        self.dead = True
        if self._publisher is not None:
            self._publisher.shutdown()
            self._publisher = None

    # -- requests

    def accept(self, job: Job) -> None:
        self.jobs[job.rid] = job
        length = len(job.tokens)
        room = max(0, min(job.params.max_new_tokens or TOP_K_ALL, self.longest + 5 - length - 1))
        room = max(0, min(room, self.capacity - -(-length // self.size) * self.size - self.size - 1))
        job.params.max_new_tokens = 1 if self._bootstrap.mode == "prefill" else room
        job.deadline = time.monotonic() + float(os.environ.get("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "300"))
        if length >= self.longest:
            return self._abort_now(job, f"Input length ({length} tokens) exceeds the maximum allowed length", 400)
        if self._bootstrap.mode != "null" and not job.sees_room:
            return self._abort_now(job, "Disaggregated request received without bootstrap room id.", 400)
        if self._bootstrap.mode == "null" or job.fake:
            self._queue(job)
        else:
            if self._bootstrap.mode == "decode":
                assert job.room is not None
                job.room.want()
            self._meeting.append(job)
        self._work.set()
        return None

    def _queue(self, job: Job, generated: tuple[int, ...] = (), kv: Any = None) -> None:
        params = job.params
        wanted = SimpleNamespace(
            logprobs=job.top if job.logprob else None,
            prompt_logprobs=job.top if job.logprob and job.start >= 0 and not generated else None,
            skip_reading_prefix_cache=job.logprob and job.start >= 0,
        )
        transfer = {"do_remote_prefill": True, "kv": kv} if kv is not None else None
        request = Request(job.rid, job.tokens, wanted, job.salt, transfer, None)  # type: ignore[arg-type]
        if job.lora is not None:
            request.lora = job.lora, job.lora  # it has a cache of its own each time it is loaded
        request.generated = list(generated)
        wanted.of = params
        if params.ebnf:
            assert self._grammars is not None
            if params.ebnf not in self._compiled:
                self._compiled[params.ebnf] = self._grammars.dispatch_ebnf(params.ebnf)
            template = self._compiled[params.ebnf]
            if isinstance(template, InvalidGrammarObject):
                return self._abort_now(job, f"Failed to compile ebnf grammar: {template.error_message}", 400)
            request.grammar = template.copy()
            for token in generated:
                request.grammar.accept_token(token)
        self.add(request)
        self._work.set()
        return None

    def abort(self, rid: str, everything: bool) -> None:
        for job in list(self.jobs.values()):
            if everything or job.rid.startswith(rid):
                if job.room is not None:
                    job.room.fail()
                if job.first is not None:
                    self.pool.release(job.first.request.blocks)
                super().abort(job.rid)
                self._abort_now(job, "Aborted", None)

    def _abort_now(self, job: Job, message: str, status: int | None) -> None:
        self.jobs.pop(job.rid, None)
        if job in self._meeting:
            self._meeting.remove(job)
        reason = {"type": "abort", "message": message, "status_code": status, "err_type": None}
        asyncio.get_running_loop().call_soon(self.deliver, job.rid, [], {"finish_reason": reason})

    def flush(self) -> bool:
        done = not self.works and not self._meeting and self.pool.reset()
        self._tell()
        return done

    # -- weights

    def load_weights(self, path: str, *, flush: bool) -> tuple[bool, str]:
        """As ``update_weights_from_disk`` of 0.5.23, whose way back reads the new folder once more.

        Raises:
            Exception: in the scheduler, which ends by it.
        """
        if not any(Path(path).glob("*.safetensors")):
            return False, f"Failed to get weights iterator: Cannot find any model weights with `{path}`."
        self.model, problem = self.model.with_weights(Path(path))
        if problem:
            self.model, problem = self.model.with_weights(Path(path))
            raise RuntimeError(problem)
        if flush and not self.flush():
            return False, "Weights were updated, but the cache was not flushed because requests are still running"
        return True, "Succeeded to update model weights."

    def release(self) -> None:
        """Without the memory saver, this frees nothing."""
        assert not self.works, "release_memory_occupation should be called only when server is idle."
        self.flush()
        if self.args.enable_memory_saver:
            self._backup = self.model if self.args.enable_weights_cpu_backup else self.model.without_weights()
            self.model = self.model.without_weights()
            self.asleep = True

    def resume(self) -> None:
        if self._backup is not None:
            self.model, self._backup = self._backup, None
        self.asleep = False

    def load(self) -> LoadSnapshot:
        used = (self.pool.usable - len(self.pool.free)) * self.size
        return LoadSnapshot(
            dp_rank=self.rank,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_used_tokens=used,
            max_total_num_tokens=self.pool.usable * self.size,
            max_running_requests=self.config.scheduler_config.max_num_seqs,
            token_usage=self.pool.usage,
        )

    # -- steps

    def _content(self, request: Request) -> list[Any]:
        """With a draft head each token stands beside the next one."""
        return list(zip(request.tokens, request.tokens[1:], strict=False)) if self._pairs else request.tokens

    async def serve(self, deliver: Deliver) -> None:
        self.deliver = deliver
        while not self.dead:
            if self.process.poll() is not None:
                return  # nothing more is heard of a process that has ended
            self._meet()
            if self.works:
                assert not self.asleep, "an illegal memory access was encountered"
                if self.nodes is not None:
                    await self.nodes.step()
                for piece in self.step():
                    self._on_piece(piece)
                self._tell()
                await asyncio.sleep(0)
            elif self._meeting:
                await asyncio.sleep(0.002)
            else:
                self._work.clear()
                try:
                    await asyncio.wait_for(self._work.wait(), 0.1)
                except TimeoutError:
                    continue

    def _tell(self) -> None:
        if self.pool.events and self._publisher is not None:
            self._publisher.publish(KVEventBatch(time.time(), self.pool.events))
        self.pool.events = []

    def _on_piece(self, piece: Piece) -> None:
        job = self.jobs.get(piece.request.id)
        if job is None:
            return
        if self._bootstrap.mode == "prefill" and job.room is not None:
            job.first = piece
            self._send(job, piece)
            self._meeting.append(job)
            return
        self._report(job, piece)

    def _report(self, job: Job, piece: Piece) -> None:
        request = piece.request
        info: dict[str, Any] = {
            "finish_reason": None,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.generated),
            "cached_tokens": request.cached or 0,
            "num_retractions": 0,
        }
        if job.logprob:
            info |= self._logprobs_of(job, piece)
        if piece.finish is not None:
            self.jobs.pop(job.rid, None)
            stop = {"type": "stop", "matched": piece.stop_reason}
            info["finish_reason"] = stop if piece.finish == "stop" else {"type": "length", "length": 1}
            info["num_retractions"] = getattr(request, "retractions", 0)
        self.deliver(job.rid, [] if piece.token is None else [piece.token], info)

    def _logprobs_of(self, job: Job, piece: Piece) -> dict[str, Any]:
        assert piece.logprobs is not None
        own = piece.logprobs[piece.token]  # type: ignore[index]
        info: dict[str, Any] = {"output_token_logprobs": [(own.logprob, piece.token, None)]}
        if job.top:
            info["output_top_logprobs"] = [_top(piece.logprobs, job.top)]
        if job.start >= 0:
            scored = piece.request.scored
            rows = [(None, job.tokens[job.start], None)]
            best: list[Any] = [None]
            for at in range(job.start + 1, len(scored)):
                row = scored[at]
                assert row is not None
                rows.append((row[job.tokens[at]].logprob, job.tokens[at], None))
                best.append(_top(row, job.top))
            info |= {"input_token_logprobs": rows, "input_top_logprobs": best if job.top else []}
        return info

    def _preempt(self, request: Request, *, queue: bool = True) -> None:
        super()._preempt(request, queue=queue)
        if queue:
            request.retractions = getattr(request, "retractions", 0) + 1  # type: ignore[attr-defined]

    def _draw(self, request: Request, logits: Any) -> tuple[int, Any]:
        params: Any = request.params.of  # type: ignore[attr-defined]
        if request.grammar is not None:
            logits = logits.masked_fill(request.grammar.barred()[: len(logits)], float("-inf"))
        bias = torch.zeros_like(logits)
        for token, value in (params.logit_bias or {}).items():
            bias[int(token)] = value
        wanted = SimpleNamespace(
            embedding_bias=bias,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=0,
            end_id=-1,
            temperature=params.temperature,
            top_k=0 if params.top_k == TOP_K_ALL else params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            _greedy=params.top_k == 1,
            _get_bad_words=list,
        )
        edited = shaped(logits, wanted, [], request.generated)
        generator = torch.default_generator
        if self.deterministic:
            seed = 42 if params.sampling_seed is None else params.sampling_seed
            generator = torch.Generator()
            generator.manual_seed(hash((seed, len(request.tokens) - 1)) & (2**63 - 1))
        token = pick(edited, wanted, generator)
        wanted_logprobs = request.params.logprobs
        return token, None if wanted_logprobs is None else _logprobs(logits, token, wanted_logprobs)

    def _check_stop(self, request: Request, piece: Piece) -> None:
        params: Any = request.params.of  # type: ignore[attr-defined]
        if not params.ignore_eos and (piece.token in (params.stop_token_ids or ()) or piece.token in self.model.eos):
            piece.finish, piece.stop_reason = "stop", piece.token
        elif len(request.generated) >= params.max_new_tokens:
            piece.finish = "length"

    # -- prefill and decode

    def _meet(self) -> None:
        for job in list(self._meeting):
            room = job.room
            assert room is not None
            late = time.monotonic() > job.deadline
            if room.failed or late or (self._bootstrap.mode == "decode" and room.unreachable):
                room.fail()
                if job.first is not None:
                    self.pool.release(job.first.request.blocks)
                self._abort_now(job, "KV transfer failed", 500)
            elif self._bootstrap.mode == "decode":
                if (found := room.fetch()) is not None:
                    self._meeting.remove(job)
                    self._start_decode(job, *found)
            elif job.first is None:
                if room.wanted:
                    self._meeting.remove(job)
                    self._queue(job)
            elif room.taken:
                self._meeting.remove(job)
                piece, job.first = job.first, None
                self.pool.release(piece.request.blocks)
                piece.request.blocks = []
                self._report(job, piece)

    def _send(self, job: Job, piece: Piece) -> None:
        request = piece.request
        assert job.room is not None
        kv = self.model.piece(request.kv, 0, len(job.tokens))
        own = None
        if piece.logprobs is not None:
            own = [(token, each.logprob, each.rank) for token, each in piece.logprobs.items()]
        job.room.send(kv, {"token": piece.token, "cached": request.cached, "logprobs": own})

    def _start_decode(self, job: Job, kv: Any, meta: dict[str, Any]) -> None:
        from vllm.logprobs import Logprob

        self._queue(job, (meta["token"],), kv)
        request = self.waiting[-1]
        request.cached = meta["cached"]
        logprobs = None
        if meta["logprobs"] is not None:
            logprobs = {token: Logprob(value, rank) for token, value, rank in meta["logprobs"]}
        piece = Piece(request, meta["token"], logprobs)
        self._check_stop(request, piece)
        if piece.finish is not None:
            self.waiting.remove(request)
        self._report(job, piece)

    def _fetch(self, params: dict[str, Any], tokens: int) -> Any:
        return params["kv"]

    def _end(self, request: Request, *, keep: bool) -> None:
        job = self.jobs.get(request.id)
        if job is not None and self._bootstrap.mode == "prefill" and job.room is not None and request.generated:
            if request in self.running:
                self.running.remove(request)
            return  # its blocks are kept until they were fetched
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.kv = [], None


def _top(row: Any, wanted: int) -> list[tuple[float, int, None]]:
    ordered = sorted(row.items(), key=lambda pair: pair[1].rank)
    return [(each.logprob, token, None) for token, each in ordered[:wanted]]
