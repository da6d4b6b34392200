"""As ``vllm.v1.engine.async_llm``: the asynchronous engine. Its core runs in the same loop, one step per turn."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensorrt_llm._standin.model import load, lora_logits
from vllm._standin.core import Core, Piece, Request
from vllm._standin.nodes import Meeting
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GenerationError, VLLMClientError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

PROMPT = frozenset(["prompt_token_ids", "prompt", "cache_salt", "token_type_ids", "prompt_token_offsets"])
PROMPT |= {"multi_modal_data", "multi_modal_uuids"}


class Collector:
    """Outputs of one request that were not read yet; with DELTA, they grow together."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._aggregate = kind == RequestOutputKind.DELTA
        self._output: RequestOutput | Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        if self._output is None or isinstance(output, Exception):
            self._output = output
        elif isinstance(self._output, RequestOutput):
            self._output.add(output, aggregate=self._aggregate)
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        output, self._output = self._output, None
        if isinstance(output, Exception):
            raise output
        assert output is not None
        return output


def _initialise(config: VllmConfig) -> None:
    """What the core process finds wrong; its parent says no more than that."""
    cache = config.cache_config
    problem = ""
    if current_platform.is_cpu() and cache.block_size % 32:
        problem = f"No common block size for {cache.block_size} (CPU_ATTN: [MultipleOf(32)])."
    if (cache.num_gpu_blocks - 1) * cache.block_size < config.model_config.max_model_len:
        problem = "To serve at least one request with the model's max seq len, more KV cache is needed"
    if problem:
        logging.getLogger("vllm").error(problem)
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


class AsyncLLM:
    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Any],
        log_stats: bool,
        usage_context: Any = None,
        mm_registry: Any = None,
        log_requests: bool = True,
        start_engine_loop: bool = True,
        stat_loggers: list[Any] | None = None,
        aggregate_engine_logging: bool = False,
        client_addresses: dict[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
        profiler: Any = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        _initialise(vllm_config)
        load_general_plugins()
        parallel = vllm_config.parallel_config
        assert parallel.node_rank == 0, "collective_rpc should not be called on follower node"
        elsewhere = parallel.world_size - parallel.world_size // parallel.nnodes
        self._nodes = Meeting(parallel.master_addr, parallel.master_port, elsewhere) if elsewhere else None
        self.core = Core(vllm_config, load(Path(vllm_config.model_config.model)))
        self._loggers = [factory(vllm_config, 0) for factory in stat_loggers or []]
        for logger in self._loggers:
            logger.log_engine_initialized()
        self._collectors: dict[str, Collector] = {}
        self._awake: Any = None  # the model, while it is asleep
        events = vllm_config.kv_events_config
        self.events: ZmqEventPublisher | None = None
        self._events_config = events
        if events is not None and events.enable_kv_cache_events and events.publisher == "zmq":
            self.events = ZmqEventPublisher(
                0,
                events.endpoint,
                events.replay_endpoint,
                events.buffer_steps,
                events.hwm,
                events.max_queue_size,
                events.topic,
            )
        # Its core runs in a process of its own, which does not notice when this one is killed.
        self._process = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
        self._work = asyncio.Event()
        self.output_handler: asyncio.Task[None] | None = None
        try:
            asyncio.get_running_loop()
            self._run_output_handler()
        except RuntimeError:
            pass

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: list[Any] | None = None,
    ) -> AsyncLLM:
        config = engine_args.create_engine_config(usage_context)
        return cls(config, object, not engine_args.disable_log_stats, stat_loggers=stat_loggers)

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            self.output_handler = asyncio.get_running_loop().create_task(self._serve(), name="output_handler")

    async def _serve(self) -> None:
        core = self.core
        try:
            while not core.dead:
                if core.works:
                    assert self._awake is None, "its scheduler is paused"
                    if self._nodes is not None:
                        await self._nodes.step()
                    self._deliver(core.step())
                    self._tell()
                    await asyncio.sleep(0)
                else:
                    self._work.clear()
                    core.expire(time.monotonic())
                    try:
                        await asyncio.wait_for(self._work.wait(), 0.1)
                    except TimeoutError:
                        continue
        except Exception:
            core.dead = True
            raise
        finally:
            if core.dead:
                for collector in self._collectors.values():
                    collector.put(EngineDeadError())

    def _tell(self) -> None:
        core = self.core
        if core.pool.events and self.events is not None:
            self.events.publish(KVEventBatch(time.time(), core.pool.events))
        core.pool.events = []
        preempted, core.preempted = core.preempted, 0
        for logger in self._loggers:
            logger.record(
                scheduler_stats=core.stats(),
                iteration_stats=SimpleNamespace(num_preempted_reqs=preempted),
                mm_cache_stats=None,
                engine_idx=0,
            )

    def _deliver(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            collector = self._collectors.get(piece.request.id)
            if collector is not None:
                collector.put(self._output(piece))

    def _output(self, piece: Piece) -> RequestOutput:
        request = piece.request
        kind = request.params.output_kind
        new = [] if piece.token is None else [piece.token]
        tokens = new if kind == RequestOutputKind.DELTA else list(request.generated)
        logprobs = [piece.logprobs] if piece.logprobs is not None else None
        completion = CompletionOutput(
            0, "", tokens, None, logprobs, finish_reason=piece.finish, stop_reason=piece.stop_reason
        )
        return RequestOutput(
            request.id,
            None,
            list(request.prompt),
            piece.prompt_logprobs,
            [completion],
            piece.finish is not None,
            num_cached_tokens=request.cached,
            kv_transfer_params=piece.params,
        )

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        admitted = False
        try:
            collector = self._add(prompt, sampling_params, request_id, lora_request)
            admitted = True
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            if admitted:
                await self.abort(request_id, internal=True)
            raise
        except (EngineDeadError, VLLMClientError, GenerationError):
            raise
        except Exception as error:
            if admitted:
                await self.abort(request_id, internal=True)
            raise EngineGenerateError from error
        finally:
            self._collectors.pop(request_id, None)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Adapters of the same content change the logits alike."""
        config = self.vllm_config.lora_config
        if config is None:
            raise RuntimeError("Call to add_lora with no LoRA config")
        folder = Path(lora_request.lora_path)
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > config["max_lora_rank"]:
            raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank {config['max_lora_rank']}.")
        new = lora_request.lora_int_id not in self.core.loras
        self.core.loras[lora_request.lora_int_id] = lora_logits(folder, self.core.model.vocab)
        return new

    async def remove_lora(self, lora_id: int) -> bool:
        return self.core.loras.pop(lora_id, None) is not None

    def _add(self, prompt: Any, params: SamplingParams, request_id: str, lora: LoRARequest | None) -> Collector:
        if self.errored:
            raise EngineDeadError
        self._run_output_handler()
        if not isinstance(params, SamplingParams):
            raise TypeError("params must be SamplingParams")
        if not isinstance(prompt, dict) or set(prompt) - PROMPT or "prompt_token_ids" not in prompt:
            raise TypeError(f"the stand-in takes prompts of tokens only, not {prompt!r:.80}")
        if request_id in self._collectors:
            raise ValueError(f"Request id {request_id} already running.")
        tokens = prompt["prompt_token_ids"]
        core = self.core
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise TypeError("prompt_token_ids must be a list of int")
        if not tokens:
            raise VLLMValidationError("The decoder prompt cannot be empty")
        tokens, embeds, media = self._with_images(tokens, prompt)
        if max(tokens) >= core.model.vocab or min(tokens) < 0:
            raise VLLMValidationError(f"Token id {max(tokens)} is out of vocabulary")
        if len(tokens) >= self.model_config.max_model_len:
            raise VLLMValidationError(f"The decoder prompt ({len(tokens)}) is longer than the maximum model length")
        if params.n != 1:
            raise VLLMValidationError("the stand-in answers once")
        if params.structured_outputs is not None:
            if self.model_config.skip_tokenizer_init:
                raise VLLMValidationError("Structured outputs requires a tokenizer")
            if self.vllm_config.structured_outputs_config.backend != "guidance":
                raise VLLMValidationError("the stand-in has no other backend than guidance")
            from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar  # here, as vLLM does it

            validate_guidance_grammar(params)
        if params.detokenize:
            raise VLLMValidationError("detokenize without a tokenizer")
        if (params.logprobs or 0) > self.model_config.max_logprobs:
            raise VLLMValidationError(f"Requested sample logprobs of {params.logprobs}, greater than max allowed")
        if (params.prompt_logprobs or 0) > self.model_config.max_logprobs:
            raise VLLMValidationError(f"Requested prompt logprobs of {params.prompt_logprobs}, greater than allowed")
        unknown = [token for token in params.logit_bias or {} if not 0 <= token < core.model.vocab]
        if unknown:
            raise VLLMValidationError(f"token_id(s) {unknown} in logit_bias contain out-of-vocab token ids.")
        salt = prompt.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise VLLMValidationError("cache_salt must be a non-empty string")
        params = SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__})  # a clone
        params._all_stop_token_ids.update(core.model.eos)
        if not params.ignore_eos:
            params.stop_token_ids = sorted({*(params.stop_token_ids or ()), *core.model.eos})
        generator = None
        if params.seed is not None:
            generator = torch.Generator()
            generator.manual_seed(params.seed)
        transfer = (params.extra_args or {}).get("kv_transfer_params")
        if transfer is not None and not isinstance(transfer, dict):
            raise VLLMValidationError("kv_transfer_params must be a dictionary")
        own = dict(transfer) if transfer is not None and core.engine_id else None
        if lora is not None and self.vllm_config.lora_config is None:
            raise VLLMValidationError(f"Got lora_request {lora} but LoRA is not enabled!")
        assert lora is None or lora.lora_int_id in core.loras, "it would read the folder, which may have changed"
        named = None if lora is None else (lora.lora_name, lora.lora_int_id)
        request = Request(request_id, list(tokens), params, salt, own, generator, named, media, embeds)
        core.grammars.grammar_init(request)
        core.add(request)
        collector = self._collectors[request_id] = Collector(params.output_kind)
        self._work.set()
        return collector

    def _with_images(
        self, tokens: list[int], prompt: Mapping[str, Any]
    ) -> tuple[list[int], list[tuple[int, torch.Tensor]], list[tuple[int, int, str]]]:
        """The prompt with as many placeholders as its images have embeddings; these, and what blocks are named by."""
        images = (prompt.get("multi_modal_data") or {}).get("image", [])
        names = (prompt.get("multi_modal_uuids") or {}).get("image", [])
        if not images:
            return tokens, [], []
        model = self.core.model
        if not model.sees:
            raise VLLMValidationError("At most 0 image(s) may be provided in one prompt.")
        if self.model_config.skip_tokenizer_init:
            raise VLLMValidationError("You cannot pass images when `skip_tokenizer_init=True`")
        if tokens.count(model.image_token) != len(images):
            raise VLLMValidationError(f"Failed to apply prompt replacement for mm_items['image'][{len(images)}]")
        assert len(names) == len(images)
        embedded = isinstance(images[0], torch.Tensor)  # a list of (tokens, hidden); LLaVA takes no other form
        if embedded and not self.model_config.enable_mm_embeds:
            raise ValueError("You must set `--enable-mm-embeds` to input `image_embeds`")
        if embedded and any(rows.ndim != 2 for rows in images):
            raise ValueError("Image embedding must be 2D (seq_len, hidden_size)")
        assert embedded or all(image.mode == "RGB" for image in images)
        out: list[int] = []
        embeds: list[tuple[int, torch.Tensor]] = []
        media = []
        for token in tokens:
            if token != model.image_token:
                out.append(token)
                continue
            image = images[len(embeds)]
            (rows,) = [image] if embedded else model.embed([image])
            media.append((len(out), len(rows), names[len(embeds)]))
            embeds.append((len(out), rows))
            out += [token] * len(rows)
        return out, embeds, media

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for id in ids:
            self.core.abort(id)
            collector = self._collectors.get(id)
            if collector is not None and not internal:
                completion = CompletionOutput(0, "", [], None, None, finish_reason="abort")
                collector.put(RequestOutput(id, None, None, None, [completion], True))
        self._work.set()

    async def check_health(self) -> None:
        if self.errored:
            raise self.dead_error

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        assert method == "reload_weights", f"the stand-in has no {method}"
        head = self.core.model.tied_head if current_platform.is_cpu() else None
        self.core.model, problem = self.core.model.with_weights(Path((kwargs or {})["weights_path"]), head)
        if problem:
            raise RuntimeError(f"Call to collective_rpc method failed: {problem}")
        return [None]

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Without ``enable_sleep_mode`` it frees nothing. It forgets what is cached, and schedules nothing."""
        assert not self.core.works
        self.core.pool.reset()
        self._tell()
        if self.model_config.enable_sleep_mode:
            self._awake, self.core.model = self.core.model, self.core.model.without_weights()

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        if self._awake is not None:
            self.core.model, self._awake = self._awake, None
        return True

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = self.core.pool.reset()
        self._tell()
        return done

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        return {0: self._events_config} if self.events is not None and self._events_config is not None else {}

    @property
    def is_running(self) -> bool:
        return self.output_handler is None or not self.output_handler.done()

    @property
    def errored(self) -> bool:
        return self.core.dead or not self.is_running

    @property
    def dead_error(self) -> BaseException:
        return EngineDeadError()

    def shutdown(self, timeout: float | None = None) -> None:
        self.core.close()
        if self._nodes is not None:
            self._nodes.close()
        self._process.kill()
        self._process.wait()
        if self.events is not None:
            self.events.shutdown()
            self.events = None
        handler = self.output_handler
        if handler is not None and not handler.done():
            if not handler.cancelling():  # it notices the end of the core before it is cancelled
                logging.getLogger("vllm").error("AsyncLLM output_handler failed.")
            handler.get_loop().call_soon_threadsafe(handler.cancel)
