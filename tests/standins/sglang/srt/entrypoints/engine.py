"""As ``sglang.srt.entrypoints.engine``: the engine, whose schedulers compute in the caller's loop."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang._standin.disaggregation import Bootstrap
from sglang._standin.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from tensorrt_llm._standin.model import load
from vllm._standin.nodes import Meeting, rank, ready


@dataclass
class SchedulerInitResult:
    scheduler_infos: list[dict[str, Any]]
    all_child_pids: list[int] = field(default_factory=list)


class SubprocessWatchdog:
    """The real one raises SIGQUIT in this process when one of its own has ended."""

    def __init__(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False


class Engine:
    server_args_class = ServerArgs

    def __init__(self, **kwargs: Any) -> None:
        load_plugins()
        args = self.server_args = self.server_args_class(**kwargs)
        if args.disaggregation_mode not in ("null", "prefill", "decode"):
            raise ValueError(f"disaggregation_mode: {args.disaggregation_mode}")
        model = load(Path(args.model_path))
        context = args.context_length or model.max_positions
        if context > model.max_positions and os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") != "1":
            raise ValueError(f"User-specified context_length ({context}) is greater than the derived context_length")
        if args.page_size is not None and args.page_size < 1:
            raise ValueError("page_size must be at least 1")
        if args.chunked_prefill_size and args.disaggregation_mode != "decode":
            assert args.chunked_prefill_size % (args.resolved_dict()["page_size"] or 1) == 0, (
                "chunked_prefill_size must be divisible by page_size"
            )
        assert ":" not in (args.served_model_name or args.model_path), "served_model_name cannot contain a colon"
        if args.nnodes > 1:
            assert args.tp_size * args.pp_size % args.nnodes == 0
            assert not (args.dp_size > 1 and not args.enable_dp_attention), "multi-node data parallel is not supported"
        if args.node_rank > 0:
            self._follow(args)
            return
        self._nodes = None
        if args.nnodes > 1:
            host, _, port = args.dist_init_addr.rpartition(":")
            elsewhere = args.tp_size * args.pp_size * (args.nnodes - 1) // args.nnodes
            self._nodes = Meeting(host, int(port), elsewhere)
        if args.enable_lora and not args.lora_paths:
            assert args.max_lora_rank, "you need to specify both --max-lora-rank and --lora-target-modules"
            assert args.lora_target_modules, "you need to specify both --max-lora-rank and --lora-target-modules"
        ranks = max(args.dp_size, args.attn_dp_size)
        bootstrap = Bootstrap(args.disaggregation_mode, args.disaggregation_bootstrap_port)
        schedulers = [Scheduler(args, model, context, rank, bootstrap) for rank in range(ranks)]
        # Its schedulers and its detokenizer are processes of their own.
        self.processes = [subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL) for _ in range(ranks + 1)]
        for scheduler, process in zip(schedulers, self.processes, strict=False):
            scheduler.process = process
            scheduler.nodes = self._nodes
        tokens = schedulers[0].pool.usable * schedulers[0].size
        info = {"status": "ready", "max_total_num_tokens": tokens, "max_req_input_len": schedulers[0].longest}
        self._bootstrap = bootstrap
        self._scheduler_init_result = SchedulerInitResult([info], [each.pid for each in self.processes])
        self.tokenizer_manager = TokenizerManager(args, schedulers, SubprocessWatchdog())

    def _follow(self, args: ServerArgs) -> None:
        """Only schedulers; unless a variable says otherwise, it returns at their end."""
        host, _, port = args.dist_init_addr.rpartition(":")
        self.processes = [rank(host, int(port)) for _ in range(args.tp_size * args.pp_size // args.nnodes)]
        self.tokenizer_manager = None
        self._bootstrap = None
        self._scheduler_init_result = SchedulerInitResult([], [each.pid for each in self.processes])
        if not all(ready(each) for each in self.processes):
            raise RuntimeError("Initialization failed. Please see the error messages above.")
        if os.environ.get("SGLANG_BLOCK_NONZERO_RANK_CHILDREN") != "0":
            for each in self.processes:
                each.wait()

    def get_all_child_pids(self) -> list[int]:
        return self._scheduler_init_result.all_child_pids

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        mm_hashes: Any = None,
        mm_content_hashes: Any = None,
        return_logprob: Any = False,
        logprob_start_len: Any = None,
        top_logprobs_num: Any = None,
        token_ids_logprob: Any = None,
        lora_path: Any = None,
        custom_logit_processor: Any = None,
        require_reasoning: bool = False,
        return_hidden_states: Any = False,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        bootstrap_host: Any = None,
        bootstrap_port: Any = None,
        bootstrap_room: Any = None,
        routed_dp_rank: int | None = None,
        disagg_prefill_dp_rank: int | None = None,
        kv_hints: dict[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        external_trace_header: dict[str, Any] | None = None,
        rid: Any = None,
        session_params: dict[str, Any] | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: Any = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        given = dict(locals())
        for name in ("prompt", "image_data", "custom_logit_processor", "data_parallel_rank", "priority"):
            assert given[name] is None, f"the stand-in has no {name}"
        assert stream is True
        assert type(rid) is str
        assert self.server_args.incremental_streaming_output
        del given["self"]
        return self.tokenizer_manager.generate_request(SimpleNamespace(**given), None)

    async def async_load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> SimpleNamespace:
        obj = SimpleNamespace(lora_name=lora_name, lora_path=lora_path, pinned=pinned)
        return await self.tokenizer_manager.load_lora_adapter(obj, None)

    async def async_unload_lora_adapter(self, lora_name: str) -> SimpleNamespace:
        return await self.tokenizer_manager.unload_lora_adapter(SimpleNamespace(lora_name=lora_name), None)

    def shutdown(self) -> None:
        """The real one kills every child of this process."""
        if self.tokenizer_manager is not None:
            self._bootstrap.close()
            if self._nodes is not None:
                self._nodes.close()
            for scheduler in self.tokenizer_manager.schedulers:
                scheduler.close()
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
