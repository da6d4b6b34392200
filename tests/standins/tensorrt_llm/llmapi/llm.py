"""``LLM`` of 1.2.1 (or 1.3): what is refused at the call, what later; see sections 1, 2, 7 and 8 of the reference."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import secrets
import weakref
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensorrt_llm._standin.engine import Engine, Job
from tensorrt_llm._standin.model import Model, load
from tensorrt_llm._standin.variant import LATER, QUIRKS
from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import GenerationResult, IterationResult
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.inputs import prompt_inputs
from tensorrt_llm.llmapi.llm_args import BaseLlmArgs, TorchLlmArgs, visible_gpus
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

_ids = itertools.count(1)


class RequestOutput(GenerationResult):
    """What ``generate_async`` returns."""


class BaseLLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        kind: type[BaseLlmArgs] = TorchLlmArgs
        if kwargs.get("backend") == "_autodeploy":
            from tensorrt_llm._torch.auto_deploy.llm_args import LlmArgs

            kind = LlmArgs
        self.args = kind.from_kwargs(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        world = self.args._world
        here = min(world, self.args.gpus_per_node or world)
        if visible_gpus() < here:
            raise RuntimeError(f"Only {visible_gpus()} GPUs are available, but {here} are required.")
        path = Path(model)
        if not (path / "config.json").is_file():
            raise OSError(f"{model} is neither a folder with a model nor in the Hugging Face cache")
        self._model = load(path.resolve())
        self._tokenizer_of = None if skip_tokenizer_init else (tokenizer or path)
        self._standin: Engine = self._start()
        self._closed = False
        self._generated = False  # events and statistics exist from the first request on
        atexit.register(_shutdown, weakref.ref(self))

    def _start(self) -> Engine:
        return Engine(self.args, self._model, self._tokenizer_of)

    @cached_property
    def _tokenizer(self) -> Any:
        """Late: most adapters give token ids, and the import of transformers is most of an engine's start."""
        if self._tokenizer_of is None:
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._tokenizer_of)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    # -- requests

    def _generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None,
        streaming: bool,
        disaggregated_params: Any,
        scheduling_params: Any,
        cache_salt: str | None,
        priority: float = 0.5,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        self._check_alive()
        params = self._prepare(sampling_params)
        if disaggregated_params is not None and not isinstance(disaggregated_params, DisaggregatedParams):
            raise TypeError("disaggregated_params must be a DisaggregatedParams")
        kind = None if disaggregated_params is None else disaggregated_params.request_type
        if disaggregated_params is not None:
            disaggregated_params.get_request_type()
        if kind == "context_only":
            params.max_tokens = 1
        if scheduling_params is not None and not isinstance(scheduling_params, SchedulingParams):
            raise TypeError("scheduling_params must be a SchedulingParams")
        seed = ""
        if cache_salt is not None:
            if not isinstance(cache_salt, str):
                raise TypeError("cache_salt must be a str")
            seed = "salt:" + hashlib.blake2b(cache_salt.encode()).hexdigest()[:16]
        if self.args.lora_config is None:
            lora_request = None  # as the real one, which ignores it then
        if lora_request is not None:
            seed = f"lora:{lora_request.adapter_id} {seed}"
        text, tokens, embeds, media = self._read(prompt_inputs(inputs), params, disaggregated_params)
        self._check_arguments(tokens, params, kind == "generation_only")
        result = RequestOutput(next(_ids), text, tokens, params, self._tokenizer if params.detokenize else None)
        engine = self._standin
        result._abort = engine.abort
        result.trace_headers = trace_headers
        result._otlp = self.args.otlp_traces_endpoint
        self._generated = True
        engine.submit(
            Job(
                id=result.request_id,
                prompt=list(tokens),
                params=params,
                streaming=streaming,
                answer=result._inbox.put,
                disagg=disaggregated_params,
                seed=seed,
                scheduling=scheduling_params,
                priority=priority,
                embeds=embeds,
                media=media,
                lora=lora_request,
            )
        )
        return result

    def _check_alive(self) -> None:
        if self._closed or not self._standin.alive:
            raise RuntimeError("LLM is shutting down")

    def _prepare(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(params)}")
        if params._needs_tokenizer:
            if self._tokenizer is None:
                raise ValueError("tokenizer is required to initialize a default sampling_params, or end_id must be set")
            params._setup(self._tokenizer, self._model.eos)
        if params.ignore_eos:
            params.end_id = -1
        params.return_perf_metrics = params.return_perf_metrics or self.args.return_perf_metrics
        params._stream_interval = getattr(self.args, "stream_interval", 1)
        params._get_stop_words()
        params._get_bad_words()
        return params

    def _check_arguments(self, tokens: list[int], params: SamplingParams, generation_only: bool) -> None:
        args = self.args
        if not generation_only and not args.enable_chunked_prefill and args.max_num_tokens:
            length = len(tokens) / args.context_parallel_size
            if length > args.max_num_tokens:
                raise RequestError(
                    f"The sum of prompt length ({length}) and query length (0) should not exceed max_num_tokens "
                    f"({args.max_num_tokens})"
                )
        if params.use_beam_search:
            raise NotImplementedError("this stand-in does not search with beams")

    # -- prompts

    def _read(
        self, inputs: dict[str, Any], params: SamplingParams, disagg: DisaggregatedParams | None
    ) -> tuple[str | None, list[int], list[tuple[int, torch.Tensor]], list[tuple[int, int, str]]]:
        """Text, token ids, embeddings by position, and media by position, tokens and hash."""
        handles = None if disagg is None else disagg.multimodal_embedding_handles
        ids, text = inputs.get("prompt_token_ids"), inputs.get("prompt")
        if handles is not None:
            assert disagg is not None
            if not self._model.sees:
                raise ValueError("Multimodal disaggregated inference is not supported for this model")
            if disagg.request_type == "generation_only":
                raise ValueError("Generation-only mode should not need multimodal parameters")
            if not text:
                raise ValueError("Text prompt is required but not provided")
            tensors = [SharedTensorContainer.from_dict(handle).get_local_view() for handle in handles]
            words = disagg.multimodal_hashes
            hashes = [_hex(each) for each in words] if words else [secrets.token_hex(32) for _ in tensors]
            tokens = self._encode(text, params)
            return (text, *self._expand(tokens, tensors, hashes[0]))
        data = inputs.get("multi_modal_data")
        if not text and ids and data and self._model.sees:
            text, ids = self._tokenizer.decode(ids), None
            inputs = {"prompt": text, "multi_modal_data": data}  # embeddings are dropped on this way
        if ids is not None:
            if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
                raise TypeError("prompt_token_ids must be a list of int")
            if not ids:
                raise IndexError("list index out of range")
            return text, ids, [], []
        if text is None:
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        tokens = self._encode(text, params)
        embeddings = inputs.get("multi_modal_embeddings")
        if data is None and embeddings is None:
            return text, tokens, [], []
        if not self._model.sees:
            raise ValueError("this model takes text only")
        if inputs.get("mm_processor_kwargs", {}) is None:
            raise TypeError("argument after ** must be a mapping, not NoneType")
        if embeddings is not None:
            features = list(embeddings["image"])
            digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in features)).hexdigest()
        else:
            assert data is not None
            images = data["image"] if isinstance(data["image"], list) else [data["image"]]
            features = self._model.embed(images)
            digest = image_hash(images)
        return (text, *self._expand(tokens, features, digest))

    def _encode(self, text: str, params: SamplingParams) -> list[int]:
        if self._tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer")
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=params.add_special_tokens)
        return tokens

    def _expand(
        self, tokens: list[int], features: list[torch.Tensor], digest: str
    ) -> tuple[list[int], list[tuple[int, torch.Tensor]], list[tuple[int, int, str]]]:
        """One placeholder per image in the text becomes as many as it has embeddings."""
        places = tokens.count(self._model.image_token)
        if len(features) != places:  # one tensor for images of equal size
            whole = torch.cat(features)
            if not places or len(whole) % places:
                raise ValueError(f"{places} image placeholders in the prompt, {len(whole)} embeddings")
            features = list(whole.split(len(whole) // places))
        if any(len(each) < 2 for each in features):
            raise ValueError("give one placeholder per image: they are expanded here")
        out: list[int] = []
        embeds, media = [], []
        for token in tokens:
            if token != self._model.image_token:
                out.append(token)
                continue
            rows = features[len(embeds)]
            embeds.append((len(out), rows))
            media.append((len(out), len(rows), digest))
            out += [token] * len(rows)
        return out, embeds, media

    # -- events and statistics

    def _fetch(self, kind: str, timeout: float | None, shortest: float = 0.0) -> list[Any]:
        """A call of the executor's process: it blocks, and has no end of its own if that process does not answer."""
        if not self._generated:
            return []
        return self._standin.fetch(kind, max(timeout or 0.0, shortest))

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._fetch("events", timeout)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._fetch("stats", timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._fetch("events", timeout, QUIRKS.polls_block_s))

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._fetch("stats", timeout, QUIRKS.polls_block_s))

    # -- end

    def shutdown(self) -> None:
        if not getattr(self, "_closed", True):
            self._closed = True
            self._standin.stop()

    def __del__(self) -> None:
        self.shutdown()


def _shutdown(reference: weakref.ref[BaseLLM]) -> None:
    llm = reference()
    if llm is not None:
        llm.shutdown()


def image_hash(images: list[Any]) -> str:
    """64 hex characters."""
    return hashlib.sha256(b"".join(image.tobytes() for image in images)).hexdigest()


def words_of(digest: str) -> list[int]:
    """A hash as 8 int32 words."""
    raw = bytes.fromhex(digest)
    return [int.from_bytes(raw[i : i + 4], "big", signed=True) for i in range(0, 32, 4)]


def _hex(words: list[int]) -> str:
    return b"".join(word.to_bytes(4, "big", signed=True) for word in words).hex()


if not LATER:

    class LLM(BaseLLM):
        def generate_async(
            self,
            inputs: Any,
            sampling_params: SamplingParams | None = None,
            lora_request: Any = None,
            prompt_adapter_request: Any = None,
            streaming: bool = False,
            kv_cache_retention_config: Any = None,
            disaggregated_params: DisaggregatedParams | None = None,
            trace_headers: Mapping[str, str] | None = None,
            _postproc_params: Any = None,
            scheduling_params: SchedulingParams | None = None,
            cache_salt: str | None = None,
        ) -> RequestOutput:
            """An ordinary function: tokenising happens here, on the caller's thread."""
            return self._generate_async(
                inputs,
                sampling_params,
                streaming,
                disaggregated_params,
                scheduling_params,
                cache_salt,
                trace_headers=trace_headers,
                lora_request=lora_request,
            )

else:

    class LLM(BaseLLM):  # type: ignore[no-redef]
        def generate_async(
            self,
            inputs: Any,
            sampling_params: SamplingParams | None = None,
            lora_request: Any = None,
            prompt_adapter_request: Any = None,
            streaming: bool = False,
            kv_cache_retention_config: Any = None,
            disaggregated_params: DisaggregatedParams | None = None,
            trace_headers: Mapping[str, str] | None = None,
            _postproc_params: Any = None,
            scheduling_params: SchedulingParams | None = None,
            cache_salt: str | None = None,
            conversation_params: Any = None,
            priority: float = 0.5,
        ) -> RequestOutput:
            if not 0.0 <= priority <= 1.0:
                raise ValueError(f"priority must be in [0.0, 1.0], got {priority}")
            return self._generate_async(
                inputs,
                sampling_params,
                streaming,
                disaggregated_params,
                scheduling_params,
                cache_salt,
                priority,
                trace_headers,
                lora_request,
            )

        def get_kv_cache_capacity(self) -> dict[str, int]:
            engine = self._standin
            size = self.args.kv_cache_config.tokens_per_block
            return {"maxNumBlocks": max(1, engine.pool_tokens // size), "tokensPerBlock": size}

        def _check_health(self) -> bool:
            return not self._closed and self._standin.alive


__all__ = ["LLM", "BaseLLM", "Model", "RequestOutput", "image_hash", "words_of"]
