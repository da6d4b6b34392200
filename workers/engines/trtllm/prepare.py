"""From one of our sequences to one call of ``generate_async``, or the reason why it can never run here."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog

from schemas.errors import Code
from workers.engines.base import EngineInfo, MediaSpan, RequestError, SequenceRequest
from workers.engines.external import requests
from workers.engines.external.handoff_state import ConsumedStates
from workers.engines.external.sampling import stop_ids
from workers.engines.trtllm import disagg, sampling
from workers.engines.trtllm.output_cursor import OutputCursor

log = structlog.get_logger("engine")


class Options(NamedTuple):
    """What is fixed besides ``EngineInfo``.

    Attributes:
        prompt_limit: tokens of a prompt, at most.
        layout: fingerprint of the KV cache, compared at a hand-over.
        root: of the names of blocks without tenant or adapter; others get a salt of their own.
        disaggregated: TensorRT-LLM's DisaggregatedParams.
        scheduling: its SchedulingParams, for attention DP only.
        publish: statistics are read, and requests measured.
        trace_headers: it exports spans, and takes whose children they are.
        abort_hold_s: an abort of a request whose prompt is still being fetched waits so long for that to end.
        processors: the logits processors of a request.
        pictures: what ``generate_async`` takes for tokens with media.
    """

    prompt_limit: int
    layout: str
    root: bytes
    disaggregated: type[Any]
    scheduling: type[Any] | None = None
    publish: bool = True
    trace_headers: bool = False
    abort_hold_s: float = 30.0
    processors: Callable[[SequenceRequest], Any] | None = None
    pictures: Callable[[Seq[int], Seq[MediaSpan]], dict[str, Any]] | None = None


class Prepared(NamedTuple):
    """``sampling``: of SamplingParams, made anew for the call, which changes it. ``arguments``: the call's others.

    ``tokens``: all that are prompt to the engine. ``adopted``: its prompt's KV is fetched from another engine.
    """

    cursor: OutputCursor
    sampling: dict[str, Any]
    arguments: dict[str, Any]
    tokens: list[int]
    adopted: bool


def check(request: SequenceRequest, info: EngineInfo, prompt_limit: int) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    requests.check(request, info)
    known = len(request.prompt) + len(request.generated)
    if known > prompt_limit:
        raise RequestError(
            Code.context_length_exceeded,
            f"the prompt has {known} tokens; this worker computes {prompt_limit} at once (max_num_tokens; set "
            "enable_chunked_prefill)",
        )


def prepare(request: SequenceRequest, info: EngineInfo, options: Options, consumed: ConsumedStates) -> Prepared:
    """
    Args:
        used: states of prefill engines that were taken over here; each can be only once.

    Raises:
        RequestError: its media cannot be given to the engine.
    """
    stop, eos = request.stop, info.eos_token_ids
    takes_over = bool(request.opaque) and not request.score  # what is scored is computed here
    params, repeated = _take_over(request, options, consumed) if takes_over else (None, 0)
    adopted = params is not None
    if request.hold:
        params = options.disaggregated(request_type=disagg.CONTEXT)
    before = len(request.generated) - repeated  # generated tokens that are prompt to the engine
    room = info.max_model_len - len(request.prompt)
    limit = 1 if request.hold else min(stop.max_tokens, room) - len(request.generated)
    given = sampling.arguments(
        request.sampling,
        stop,
        eos=eos,
        max_tokens=limit + repeated,
        min_tokens=stop.min_tokens - before,
        prompt_len=len(request.prompt),
        choice=request.choice,
        position=len(request.generated),
        perf_metrics=options.publish or request.trace is not None,
        prompt_logprobs=request.sampling.prompt_logprobs if request.score else None,
    )
    if "embedding_bias" in given:
        given["embedding_bias"] = bias(given["embedding_bias"], info.vocab_size)
    if options.processors is not None and (found := options.processors(request)) is not None:
        given["logits_processor"] = found
    tokens = [*request.prompt, *request.generated[:before]]
    arguments: dict[str, Any] = {"inputs": tokens, "streaming": not request.hold}
    if request.media and not adopted and options.pictures is not None:
        arguments["inputs"] = options.pictures(tokens, request.media)
    if params is not None:
        arguments["disaggregated_params"] = params
    if request.trace is not None and options.trace_headers:
        arguments["trace_headers"] = request.trace
    if request.root and request.root != options.root:
        arguments["cache_salt"] = request.root.hex()
    if options.scheduling is not None:
        # Relaxed: where that rank is full, another takes it. Left to its default of None, two waiting requests cannot
        # be compared and the engine dies of it.
        arguments["scheduling_params"] = options.scheduling(
            attention_dp_rank=request.rank % info.dp_size, attention_dp_relax=True
        )
    cursor = OutputCursor(
        limit=limit,
        stops=stop_ids(stop, eos),
        min_tokens=max(0, stop.min_tokens - len(request.generated)),
        end_id=sampling.end_id(stop, eos),
        skip=request.generated[before:],
        top=request.sampling.logprobs,
    )
    return Prepared(cursor, given, arguments, tokens, adopted)


def _take_over(request: SequenceRequest, options: Options, consumed: ConsumedStates) -> tuple[Any, int]:
    """Parameters to take over the KV that another engine computed, and how many of the tokens are that engine's.

    (None, 0) where it cannot be taken over: then the prompt is computed here. The choices of a request share one state.
    """
    try:
        tokens = [*request.prompt, *request.generated]
        params, own = disagg.unpack(request.opaque, options.disaggregated, options.layout, tokens, len(request.prompt))
    except (ValueError, TypeError) as error:
        log.warning("handed_state_unusable", error=str(error), action="computing the prompt here")
        return None, 0
    if not consumed.claim(params.ctx_request_id, params.opaque_state):
        return None, 0
    return params, own


def bias(values: Mapping[int, float], vocab_size: int) -> Any:
    """A tensor of (vocab_size,) float32."""
    import torch

    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    if values:
        tensor[list(values)] = torch.tensor(list(values.values()), dtype=torch.float32)
    return tensor
