"""The engine core: schedules, computes with a real model, keeps blocks, hands off KV. One step at a time."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensorrt_llm._standin.model import Model, cut
from tensorrt_llm._standin.sampling import NEVER, pick, shaped
from torch import Tensor
from vllm._standin.blocks import Block, Pool, chain
from vllm.config import VllmConfig
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import GuidanceGrammar, StructuredOutputManager

ENGINES: dict[str, Core] = {}  # by engine_id: what NIXL reaches through the side channel
PULLS = ("NixlConnector", "NixlPullConnector")


class Piece:
    """What one step brought for one request."""

    def __init__(self, request: Request, token: int | None, logprobs: dict[int, Logprob] | None) -> None:
        self.request, self.token, self.logprobs = request, token, logprobs
        self.finish: str | None = None
        self.stop_reason: int | None = None
        self.params: dict[str, Any] | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(eq=False)
class Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    salt: str | None
    transfer: dict[str, Any] | None
    generator: torch.Generator | None
    lora: tuple[str, int] | None = None  # name and number
    media: list[tuple[int, int, str]] = field(default_factory=list)  # position, tokens, identifier
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)  # by position
    edits: list[Any] | None = None  # of logits
    generated: list[int] = field(default_factory=list)
    kv: Any = None
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    named: int = 0  # blocks that can be found
    cached: int | None = None
    fetching: bool = False
    scored: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    scores_sent: bool = False  # of ``scored``
    grammar: GuidanceGrammar | None = None
    compiling: Future[GuidanceGrammar] | None = None

    @property
    def request_id(self) -> str:
        return self.id

    @property
    def sampling_params(self) -> SamplingParams:
        return self.params

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated


class Core:
    def __init__(self, config: VllmConfig, model: Model) -> None:
        self.config, self.model = config, model
        self.grammars = StructuredOutputManager(config, model.vocab, model.eos)
        cache = config.cache_config
        self.pool = Pool(cache.num_gpu_blocks, cache.block_size, caching=cache.enable_prefix_caching)
        self.size = cache.block_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.offers: dict[str, tuple[list[Block], float]] = {}  # request id -> blocks, when they go
        self.preempted = 0
        self.dead = False
        self.processors: list[Any] = []  # of logits, of whoever uses it
        for name in getattr(config.model_config, "logits_processors", None) or ():
            module, _, kind = name.partition(":")
            self.processors.append(getattr(importlib.import_module(module), kind)(config, torch.device("cpu"), False))
        self.loras: dict[int, Tensor] = {}  # what each adapter adds to the logits, by its number
        transfer = config.kv_transfer_config
        self.engine_id = ""
        self.lease = 30.0
        self.policy = "fail"
        if transfer is not None and (found := _puller(transfer)) is not None:
            assert transfer.engine_id
            self.engine_id, self.policy = transfer.engine_id, transfer.kv_load_failure_policy
            self.lease = float(found.get("kv_lease_duration", 30))
            self.port = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"))
            taken = any(other.port == self.port for other in ENGINES.values())
            assert not taken, "the real one would wait for its port for ever"
            ENGINES[self.engine_id] = self

    def close(self) -> None:
        ENGINES.pop(self.engine_id, None)
        self.grammars.executor.shutdown(cancel_futures=True)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, id: str) -> bool:
        for request in [*self.waiting, *self.running]:
            if request.id == id:
                self._end(request, keep=False)
                return True
        return False

    @property
    def works(self) -> bool:
        return bool(self.waiting or self.running)

    def expire(self, now: float) -> None:
        for id, (_, until) in list(self.offers.items()):
            file = shelf(self.engine_id, id)
            if now >= until or (file is not None and not file.exists()):
                self.let_go(id)

    def let_go(self, id: str) -> None:
        blocks, _ = self.offers.pop(id, ([], 0.0))
        self.pool.release(blocks)
        if (file := shelf(self.engine_id, id)) is not None:
            file.unlink(missing_ok=True)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            num_running_reqs=len(self.running), num_waiting_reqs=len(self.waiting), kv_cache_usage=self.pool.usage
        )

    # -- a step

    def step(self) -> list[Piece]:
        self.expire(time.monotonic())
        budget = self.config.scheduler_config.max_num_batched_tokens
        pieces: list[Piece] = []
        plan: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            count = min(len(request.tokens) - request.computed, budget)
            if self._room(request, count):
                plan.append((request, count))
                budget -= count
        pieces += self._take_grammars()
        while budget > 0 and len(self.running) < self.config.scheduler_config.max_num_seqs:
            request = next((each for each in self.waiting if each.compiling is None), None)
            if request is None:
                break
            if not request.blocks and not self._admit(request, pieces):
                break
            if request not in self.waiting:
                continue
            if request.fetching:  # the transfer runs beside this step
                request.fetching = False
                break
            count = min(len(request.tokens) - request.computed, budget)
            if not self._room(request, count, preempt=False):
                self._preempt(request, queue=False)  # what waits holds nothing
                break
            self.waiting.remove(request)
            self.running.append(request)
            plan.append((request, count))
            budget -= count
        for request, count in plan:
            if request in self.running:
                piece = self._compute(request, count)
                if piece is not None:
                    pieces.append(piece)
        return pieces

    def _take_grammars(self) -> list[Piece]:
        """Take the grammars that are compiled; returns the ends of requests whose grammars cannot be."""
        failed = []
        for request in list(self.waiting):
            if request.compiling is None or not request.compiling.done():
                continue
            if request.compiling.exception() is None:
                request.grammar, request.compiling = request.compiling.result(), None
                continue
            piece = Piece(request, None, None)
            piece.finish = "error"
            self._end(request, keep=False)
            failed.append(piece)
        return failed

    def _admit(self, request: Request, pieces: list[Piece]) -> bool:
        """Look for what is cached or offered; False: there is no room."""
        tokens = request.tokens
        most = 0 if request.params.skip_reading_prefix_cache else (len(tokens) - 1) // self.size
        found = self.pool.find(self._hashes(request), most)
        asked = request.transfer is not None and bool(request.transfer.get("do_remote_prefill"))
        self.pool.touch(found)
        request.blocks, request.named = list(found), len(found)
        request.computed = len(found) * self.size
        parts = [block.kv for block in found]
        if asked:
            assert request.transfer is not None
            request.transfer["do_remote_prefill"] = False
            more = -(-len(tokens) // self.size) - len(found)
            taken = self.pool.take(more)
            if taken is None:
                self.pool.release(request.blocks)
                request.blocks, request.computed, request.named = [], 0, 0
                request.transfer["do_remote_prefill"] = True
                return False
            kv = self._fetch(request.transfer, len(tokens))
            if kv is None and self.policy == "fail":
                self.pool.release(taken)
                piece = Piece(request, None, None)
                piece.finish = "error"
                self._end(request, keep=False)
                pieces.append(piece)
                return True
            if kv is None:
                self.pool.release(taken)
            else:
                parts.append(kv[:, :, :, request.computed : len(tokens) - 1])
                request.blocks += taken
                request.computed = len(tokens) - 1  # the last token is computed here, for its logits
                request.fetching = True
        request.kv = self.model.kv(parts)
        if request.cached is None:
            request.cached = request.computed
        return True

    def _fetch(self, params: dict[str, Any], tokens: int) -> Tensor | None:
        """The KV of so many tokens, as it lies in the other's blocks now, whatever it is of; None: unreachable."""
        source = ENGINES.get(str(params.get("remote_engine_id")))
        id, groups = params.get("remote_request_id"), params.get("remote_block_ids")
        if not isinstance(id, str) or not isinstance(groups, list | tuple) or not groups:
            return None
        if source is None:  # of another process
            file = shelf(str(params.get("remote_engine_id")), id)
            if file is None or not file.exists():
                return None
            found: Tensor = load_file(file)["kv"][:, :, :, :tokens]
            file.unlink(missing_ok=True)
            return found
        assert source.size == self.size, "block sizes differ"
        blocks, _ = source.offers.get(id, ([], 0.0))
        assert len(groups[0]) >= -(-tokens // self.size), "fewer remote blocks than local ones"
        kv = None
        if blocks:
            kv = torch.cat([block.kv for block in blocks], dim=3)[:, :, :, :tokens]
        source.let_go(id)
        return kv

    def _room(self, request: Request, count: int, *, preempt: bool = True) -> bool:
        """Blocks for its next tokens; the youngest running requests give way."""
        need = -(-(request.computed + count) // self.size) - len(request.blocks)
        while True:
            taken = self.pool.take(max(0, need))
            if taken is not None:
                request.blocks += taken
                return True
            if not preempt:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, request: Request, *, queue: bool = True) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.kv, request.computed, request.named = [], None, 0, 0
        if queue:
            self.running.remove(request)
            self.waiting.appendleft(request)
            self.preempted += 1

    def _compute(self, request: Request, count: int) -> Piece | None:
        tokens = request.tokens
        start, end = request.computed, request.computed + count
        every = request.params.prompt_logprobs is not None
        shown = [cut(position, values, start, end) for position, values in request.embeds]
        shown = [(row, values) for row, values in shown if len(values)]
        rows = self.model.forward(tokens[start:end], request.kv, shown, every=every)
        logits = rows[-1]
        for edit in self._edits(request):
            logits = edit(logits.clone())
        if request.lora is not None:
            logits = logits + self.loras[request.lora[1]]
        if every:
            self._score(request, rows)
        request.computed = end
        self._name(request)
        if end < len(tokens):
            return None
        token, logprobs = self._draw(request, logits)
        request.generated.append(token)
        if request.grammar is not None:
            request.grammar.accept_tokens(request.id, [token])
        piece = Piece(request, token, logprobs)
        if every and not request.scores_sent:
            request.scores_sent, piece.prompt_logprobs = True, request.scored
        self._check_stop(request, piece)
        if piece.finish is not None:
            offered = request.transfer is not None and bool(request.transfer.get("do_remote_decode"))
            if offered and self.engine_id and piece.finish in ("length", "stop"):
                piece.params = self._offer(request)
            self._end(request, keep=piece.params is not None)
        return piece

    def _edits(self, request: Request) -> list[Any]:
        """Custom logits processors, as the real one makes them when a request is added to the batch."""
        if request.edits is None:
            states = [each._new_state(request.params, request.prompt, request.generated) for each in self.processors]
            request.edits = [state for state in states if state is not None]
        return request.edits

    def _hashes(self, request: Request) -> list[bytes]:
        lora = request.lora and request.lora[0]
        return chain(self._content(request), self.size, request.salt, lora or None, request.media)

    def _content(self, request: Request) -> list[Any]:
        """What blocks are named by."""
        return request.tokens

    def _name(self, request: Request) -> None:
        """Full blocks whose KV is there can be found from now on."""
        tokens = self._content(request)
        full = min(request.computed, len(tokens)) // self.size
        for at in range(request.named, full):
            request.blocks[at].kv = self.model.piece(request.kv, at * self.size, (at + 1) * self.size)
        if full > request.named:
            hashes = self._hashes(request)
            self.pool.cache(
                request.blocks[:full], hashes, tokens, request.named, request.salt, request.lora, request.media
            )
            request.named = full

    def _draw(self, request: Request, logits: Tensor) -> tuple[int, dict[int, Logprob] | None]:
        params = request.params
        if request.grammar is not None:
            logits = logits.masked_fill(request.grammar.barred()[: len(logits)], NEVER)
        bias = torch.zeros_like(logits)
        for token, value in (params.logit_bias or {}).items():
            bias[token] = value
        wanted = SimpleNamespace(
            embedding_bias=bias,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=0,
            end_id=-1,
            temperature=params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            min_p=params.min_p,
            _greedy=params.temperature < 1e-5,
            _get_bad_words=list,
        )
        edited = shaped(logits, wanted, request.prompt, request.generated)
        if len(request.generated) < params.min_tokens:
            edited[sorted(params._all_stop_token_ids)] = NEVER
        token = pick(edited, wanted, request.generator or torch.default_generator)
        return token, None if params.logprobs is None else _logprobs(logits, token, params.logprobs)

    def _score(self, request: Request, rows: Tensor) -> None:
        """What the rows of a step say of the prompt's tokens behind them; after a preemption some again."""
        wanted = request.params.prompt_logprobs
        assert wanted is not None
        for at, row in enumerate(rows, request.computed + 1):
            if len(request.scored) == at < len(request.prompt):
                request.scored.append(_logprobs(row, request.prompt[at], wanted))

    def _check_stop(self, request: Request, piece: Piece) -> None:
        params, said = request.params, len(request.generated)
        if said < params.min_tokens:
            pass
        elif not params.ignore_eos and piece.token == params._eos_token_id:
            piece.finish = "stop"
            return
        elif piece.token in (params.stop_token_ids or ()):
            piece.finish, piece.stop_reason = "stop", piece.token
            return
        if len(request.tokens) >= self.config.model_config.max_model_len or said >= (params.max_tokens or 1 << 60):
            piece.finish = "length"

    def _offer(self, request: Request) -> dict[str, Any]:
        at = request.named * self.size
        if at < request.computed:  # the last block, as far as it is filled
            request.blocks[request.named].kv = self.model.piece(request.kv, at, request.computed)
        if (file := shelf(self.engine_id, request.id)) is not None:
            whole = torch.cat([block.kv for block in request.blocks], dim=3)
            save_file({"kv": whole.contiguous()}, file)
        self.offers[request.id] = (request.blocks, time.monotonic() + self.lease)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": ([block.number for block in request.blocks],),
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.id,
            "remote_host": "localhost",
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.computed,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": request.cached,
        }

    def _end(self, request: Request, *, keep: bool) -> None:
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        params = request.transfer
        if params is not None and params.get("do_remote_prefill"):  # never admitted: the other may let go
            source = ENGINES.get(str(params.get("remote_engine_id")))
            if source is not None:
                source.let_go(str(params.get("remote_request_id")))
        if not keep:
            self.pool.release(request.blocks)
        request.blocks, request.kv = [], None


def _logprobs(logits: Tensor, token: int, wanted: int) -> dict[int, Logprob]:
    raw = logits.log_softmax(-1)
    ordered = raw.sort(descending=True, stable=True)
    rank = int((raw > raw[token]).sum()) + 1
    found = {token: Logprob(float(raw[token]), rank)}
    for place in range(wanted if wanted >= 0 else len(raw)):
        found.setdefault(int(ordered.indices[place]), Logprob(float(ordered.values[place]), place + 1))
    return found


def shelf(engine: str, request: str) -> Path | None:
    """Where engines of other processes find an offer, as long as it holds; None: there are none."""
    folder = os.environ.get("VLLM_STANDIN_KV")
    return Path(folder) / f"{engine}-{request}.kv" if folder else None


def _puller(config: Any) -> dict[str, Any] | None:
    """The extra configuration of the connector that fetches, if there is one."""
    if config.kv_connector in PULLS:
        _check_role(config.kv_role)
        return dict(config.kv_connector_extra_config)
    for each in config.kv_connector_extra_config.get("connectors", []):
        if each.get("kv_connector") in PULLS:
            _check_role(each["kv_role"])
            return dict(each.get("kv_connector_extra_config") or {})
    return None


def _check_role(role: str) -> None:
    if role == "kv_both":  # the real one says so in its log
        warnings.warn("Using kv_role='kv_both' with NixlConnector is deprecated", DeprecationWarning, stacklevel=1)
