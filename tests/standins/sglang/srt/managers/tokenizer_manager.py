"""As ``sglang.srt.managers.tokenizer_manager``: the part of the engine in its caller's process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from sglang._standin.scheduler import Job, Scheduler
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

STREAMED = ("output_token_logprobs", "output_top_logprobs")


class ReqState:
    def __init__(self) -> None:
        self.out_list: list[dict[str, Any]] = []
        self.finished = False
        self.event = asyncio.Event()
        self.last_token: list[int] = []


class TokenizerManager(TokenizerControlMixin):
    def __init__(self, server_args: ServerArgs, schedulers: list[Scheduler], watchdog: Any) -> None:
        self.server_args = server_args
        self.schedulers = schedulers
        self.context_len = schedulers[0].context_len
        self.num_reserved_tokens = server_args.reserved_tokens()
        self.rid_to_state: dict[str, ReqState] = {}
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.asyncio_tasks: set[asyncio.Task[None]] = set()
        self._subprocess_watchdog = watchdog
        self.reading = 0  # requests
        self.init_lora()

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is not None:
            return
        self.event_loop = asyncio.get_running_loop()
        for each in self.schedulers:  # in processes of their own; here they compute in the same loop
            self.asyncio_tasks.add(self.event_loop.create_task(each.serve(self.deliver)))

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[dict[str, Any], None]:
        self.auto_create_handle_loop()
        if obj.rid in self.rid_to_state:
            raise ValueError(f"Duplicate request ID detected: {obj.rid}")
        state = self.rid_to_state[obj.rid] = ReqState()
        dispatched = False
        self.reading += 1
        obj.lora_id = None
        try:
            if obj.lora_path:
                self._resolve_lora(obj)
            scheduler = self._rank(obj.routed_dp_rank)
            job = self._tokenize(obj)
            scheduler.accept(job)
            dispatched = True
            while True:
                await state.event.wait()
                chunks, state.out_list = state.out_list, []
                state.event.clear()
                yield self._coalesce(chunks)
                if state.finished:
                    return
        except BaseException:
            if self.rid_to_state.get(obj.rid) is state:
                if dispatched:
                    self.abort_request(obj.rid)
                else:
                    del self.rid_to_state[obj.rid]
            raise
        finally:
            self.reading -= 1
            if obj.lora_id is not None:
                self.lora_users[obj.lora_id] -= 1
                self.lora_ended.set()

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[bool, str, int]:
        self.auto_create_handle_loop()
        while self.reading:  # noqa: ASYNC110 - it takes a lock that requests share
            await asyncio.sleep(0.001)
        done, message = await self._at_all(lambda each: each.load_weights(obj.model_path, flush=obj.flush_cache))
        return done, message, 0

    def _resolve_lora(self, obj: Any) -> None:
        if not self.server_args.enable_lora:
            raise ValueError(f"LoRA adapter '{obj.lora_path}' was requested, but LoRA is not enabled.")
        if obj.lora_path not in self.lora_registry:
            seen = obj.lora_path in self.lora_ref_cache
            assert not seen, "the real one would read the folder again, which may have changed"
            raise ValueError(f"Got LoRA adapter that has never been loaded: {obj.lora_path}")
        obj.lora_id = self.lora_registry[obj.lora_path]
        self.lora_users[obj.lora_id] += 1

    def _rank(self, rank: int | None) -> Scheduler:
        if rank is not None and not 0 <= rank < len(self.schedulers):
            raise ValueError(f"routed_dp_rank={rank} out of range [0, {len(self.schedulers)})")
        return self.schedulers[rank or 0]

    def _tokenize(self, obj: Any) -> Job:
        if not isinstance(obj.input_ids, list) or not all(type(token) is int for token in obj.input_ids):
            raise ValueError("input_ids must be a list of int")
        if not obj.input_ids:
            raise ValueError("input_ids cannot be empty")
        length = len(obj.input_ids) + self.num_reserved_tokens
        if length >= self.context_len:
            raise ValueError(f"The input ({length} tokens) is longer than the model's context length")
        params = SamplingParams(**obj.sampling_params)
        if params.max_new_tokens is not None and params.max_new_tokens + length > self.context_len:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        params.normalize(None if self.server_args.skip_tokenizer_init else "a tokenizer")
        params.verify(self.schedulers[0].model.vocab)
        return Job(obj, params)

    def _coalesce(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        out = dict(chunks[-1])
        out["output_ids"] = [token for chunk in chunks for token in chunk["output_ids"]]
        info = out["meta_info"] = dict(out["meta_info"])
        for key in STREAMED:
            if any(key in chunk["meta_info"] for chunk in chunks):
                info[key] = [each for chunk in chunks for each in chunk["meta_info"].get(key, [])]
        return out

    def deliver(self, rid: str, tokens: list[int], info: dict[str, Any]) -> None:
        """One step's output of one request."""
        state = self.rid_to_state.get(rid)
        if state is None:
            return
        reason = info["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            tokens = state.last_token  # as the real one, which repeats it
        state.last_token = tokens[-1:] or state.last_token
        state.finished = reason is not None
        state.out_list.append({"output_ids": list(tokens), "meta_info": {"id": rid} | info})
        if state.finished:
            del self.rid_to_state[rid]
        state.event.set()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Of all requests whose ids begin with ``rid``."""
        if not abort_all and rid not in self.rid_to_state:
            return
        for each in self.schedulers:
            each.abort(rid, abort_all)

    async def close(self) -> None:
        for task in self.asyncio_tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


__all__ = ["SimpleNamespace", "TokenizerManager"]
