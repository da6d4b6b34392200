"""From one of our sequences to one call of ``generate_async``."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog

from penstock.infra.constraints.llguidance_releases import for_release
from penstock.schemas.errors import Code
from penstock.workers.engines.base import EngineInfo, MediaSpan, RequestError, SequenceRequest
from penstock.workers.engines.external import requests
from penstock.workers.engines.external.constrained import ends, grammar_text
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.sampling import stop_ids
from penstock.workers.engines.served import Served, problem
from penstock.workers.engines.trtllm import disagg, sampling
from penstock.workers.engines.trtllm.liveness import ANSWER_S, QUIET_S
from penstock.workers.engines.trtllm.output_cursor import OutputCursor

log = structlog.get_logger("engine")

NOT_CONTINUED = (
    "an output with a constraint was lost with its worker: TensorRT-LLM continues it on an aggregated worker with "
    "disable_overlap_scheduler: true only"
)


class Options(NamedTuple):
    """Fixed properties of an engine besides ``EngineInfo``.

    Attributes:
        prompt_limit: longest prompt, tokens.
        layout: fingerprint of the KV cache, compared at a handoff.
        root: parent of the first block's name for prompts without tenant or adapter; other roots become a cache salt.
        disaggregated: TensorRT-LLM's DisaggregatedParams.
        scheduling: its SchedulingParams, for attention DP only.
        logprob: its class of a token's log-probability.
        publish: read statistics and measure requests.
        trace_headers: the engine exports spans and takes the headers of their parents.
        abort_hold_s: how long an abort waits for the fetch of the prompt's KV to end, seconds.
        processors: from a request to its logits processors.
        continuing: from a sequence that another worker began to the processor that applies its constraint; None: the
            engine runs no processors, or runs them a token late (the overlap scheduler).
        image_inputs: from tokens and media to the ``inputs`` of ``generate_async``.
        served: what the engine does with sampling options.
        vocab_size: width of the logits.
        one_token: arguments of ``generate_async`` for a request of one token.
        quiet_s, answer_s: see ``liveness``.
    """

    prompt_limit: int
    layout: str
    root: bytes
    disaggregated: type[Any]
    scheduling: type[Any] | None = None
    logprob: type[Any] | None = None
    publish: bool = True
    trace_headers: bool = False
    abort_hold_s: float = 30.0
    processors: Callable[[SequenceRequest], Any] | None = None
    continuing: Callable[[SequenceRequest], Any] | None = None
    image_inputs: Callable[[Seq[int], Seq[MediaSpan]], dict[str, Any]] | None = None
    served: Served = Served()
    vocab_size: int = 0
    one_token: Callable[[], dict[str, Any]] = dict
    quiet_s: float = QUIET_S
    answer_s: float = ANSWER_S


class Prepared(NamedTuple):
    """One call of the engine.

    Attributes:
        cursor: position in its output.
        sampling: arguments of SamplingParams, which the call changes and which is therefore made for each.
        arguments: the call's other arguments.
        tokens: the prompt that the engine sees.
        adopted: the prompt's KV is fetched from another engine.
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
    length = len(request.prompt) + len(request.generated)
    if length > prompt_limit:
        raise RequestError(
            Code.context_length_exceeded,
            f"the prompt has {length} tokens; this worker takes {prompt_limit} (max_num_tokens); set "
            "enable_chunked_prefill for longer ones",
        )


def prepare(request: SequenceRequest, info: EngineInfo, options: Options, consumed: ConsumedStates) -> Prepared:
    """
    Args:
        consumed: states of prefill engines that this engine has taken over; each can be taken over once.

    Raises:
        RequestError: the engine cannot take its media, or not apply its constraint.
    """
    stop, eos = ends(request.stop, request.constraint), info.eos_token_ids
    takes_over = bool(request.opaque) and not request.score  # prompts that are scored are computed here
    params, repeated = _take_over(request, options, consumed) if takes_over else (None, 0)
    adopted = params is not None
    if request.hold:
        params = options.disaggregated(request_type=disagg.CONTEXT)
    before = len(request.generated) - repeated  # generated tokens that the engine sees as prompt
    room = info.max_model_len - len(request.prompt)
    limit = 1 if request.hold else min(stop.max_tokens, room) - len(request.generated)
    barred = stop.min_tokens - before if sampling.end_id(stop, eos) >= 0 else 0
    if reason := problem(request.sampling, barred, options.served):
        raise RequestError(Code.unsupported, reason)
    parameters = sampling.arguments(
        request.sampling,
        stop,
        eos=eos,
        part=sampling.OutputPart(
            max_tokens=limit + repeated,
            min_tokens=stop.min_tokens - before,
            counted_prompt=len(request.prompt) + before if options.served.min_tokens == "all" else 0,
            prompt_len=len(request.prompt),
            choice=request.choice,
            position=len(request.generated),
        ),
        perf_metrics=options.publish or request.trace is not None,
        prompt_logprobs=request.sampling.prompt_logprobs if request.score else None,
    )
    if "embedding_bias" in parameters:
        parameters["embedding_bias"] = bias(parameters["embedding_bias"], info.vocab_size)
    parameters |= _edits(request, options, continues=before > 0)
    tokens = [*request.prompt, *request.generated[:before]]
    arguments: dict[str, Any] = {"inputs": tokens, "streaming": not request.hold}
    if request.media and not adopted and options.image_inputs is not None:
        arguments["inputs"] = options.image_inputs(tokens, request.media)
    if params is not None:
        arguments["disaggregated_params"] = params
    if request.trace is not None and options.trace_headers:
        arguments["trace_headers"] = request.trace
    if request.root and request.root != options.root:
        arguments["cache_salt"] = request.root.hex()
    if options.scheduling is not None:  # relaxed: if that rank is full, another takes it; None would end the engine
        rank = request.rank % info.dp_size
        arguments["scheduling_params"] = options.scheduling(attention_dp_rank=rank, attention_dp_relax=True)
    cursor = OutputCursor(
        limit=limit,
        stops=stop_ids(stop, eos),
        min_tokens=max(0, stop.min_tokens - len(request.generated)),
        end_id=sampling.end_id(stop, eos),
        skip=request.generated[before:],
        top=request.sampling.logprobs,
    )
    return Prepared(cursor, parameters, arguments, tokens, adopted)


def _edits(request: SequenceRequest, options: Options, *, continues: bool) -> dict[str, Any]:
    """Arguments of SamplingParams that edit the logits.

    Args:
        continues: the prompt that the engine sees ends in tokens of the output.

    Raises:
        RequestError: the engine cannot apply them.
    """
    found: dict[str, Any] = {}
    processors = None if options.processors is None else options.processors(request)
    if request.constraint is not None and not continues:
        found["guided_decoding"] = {"grammar": for_release(grammar_text(request.constraint), options.vocab_size)}
    elif request.constraint is not None:
        if options.continuing is None:
            raise RequestError(Code.engine_error, NOT_CONTINUED)
        constraint = options.continuing(request)
        processors = constraint if processors is None else [processors, constraint]
    if processors is not None:
        found["logits_processor"] = processors
    return found


def _take_over(request: SequenceRequest, options: Options, consumed: ConsumedStates) -> tuple[Any, int]:
    """Parameters for taking over another engine's KV, and how many of the last tokens that engine drew.

    Returns: (None, 0) if it cannot be taken over: then the prompt is computed here. The choices of a request share one
    state, which only the first of them takes over.
    """
    try:
        tokens = [*request.prompt, *request.generated]
        params, drawn = disagg.unpack(
            request.opaque, options.disaggregated, options.layout, tokens, len(request.prompt), options.logprob
        )
    except (ValueError, TypeError) as error:
        log.warning("handoff_state_unusable", error=str(error), action="computing the prompt here")
        return None, 0
    if not consumed.claim(params.ctx_request_id, params.opaque_state):
        return None, 0
    return params, drawn


def bias(values: Mapping[int, float], vocab_size: int) -> Any:
    """Biases by token id as a tensor of (vocab_size,) float32."""
    import torch

    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    if values:
        tensor[list(values)] = torch.tensor(list(values.values()), dtype=torch.float32)
    return tensor
