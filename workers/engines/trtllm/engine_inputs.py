"""From one of our sequences to one call of ``generate_async`` (1.2.1), and from its output to tokens. Pure.

The worker handles stop strings and detokenization; the engine sees token ids only. Every request names its end tokens:
an engine without a tokenizer knows none, and one with a tokenizer adds none once ``end_id`` is set. ``ignore_eos`` is
not used together with stop tokens: it would disable those as well.

TensorRT-LLM returns the same list again and again as it grows by several tokens, and its last version may be shorter (a
stop token was trimmed). Our protocol reports every token once, including the ending one, which is marked.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog
import torch

from penstock.infra.constraints.llguidance_releases import for_release
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.engine_protocol import EngineInfo, MediaSpan, RequestError, SequenceRequest
from penstock.workers.engines.external.constrained import ends, grammar_text
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.images import ImageStore
from penstock.workers.engines.external.sampling import check_sampling, seed_of, shape, stop_ids
from penstock.workers.engines.external.sequences import SequenceFailure, Token, collapse, last_token, logprob_at
from penstock.workers.engines.support import ServedOptions, problem
from penstock.workers.engines.trtllm import disagg
from penstock.workers.engines.trtllm.engine_health import ANSWER_S, QUIET_S

_ENDED = frozenset({"stop", "length", "timeout", "cancelled"})  # "not_finished": another engine continues


class TrtllmOutputCursor:
    """Position in the output of one sequence.

    Args:
        limit: new tokens after which it ends.
        stops: token ids that end it, after at least ``min_tokens`` new tokens.
        end_id: the token that a finish reason "stop" without a token stands for; -1: none.
        skip: tokens already reported (a prefill worker's) that the engine may repeat at the start.
        top: alternatives per token; None: no log-probabilities.
    """

    def __init__(
        self,
        *,
        limit: int,
        stops: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        end_id: int = -1,
        skip: Seq[int] = (),
        top: int | None = None,
    ) -> None:
        self.reported = 0  # new tokens
        self.finished = False
        self.repeats: bool | None = None if skip else False  # the output starts with ``skip``; None: unknown
        self._skip = list(skip)
        self._limit = limit
        self._stops = stops
        self._min_tokens = min_tokens
        self._end_id = end_id
        self._top = top

    def take(
        self,
        token_ids: Seq[int],
        logprobs: Seq[Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> tuple[list[Token], SequenceFailure | None]:
        """Take one version of the output; returns its new tokens and the failure, if any."""
        if self.finished:
            return [], None
        offset = self._offset(token_ids, finish)
        if offset is None:
            return [], None
        new: list[Token] = []
        for at in range(offset + self.reported, len(token_ids)):
            token = token_ids[at]
            self.reported += 1
            ends = self._ends(token)
            # With fewer entries than tokens, the entries of a prefill worker's tokens are missing at the front.
            value = logprob_at(logprobs, at - len(token_ids) + len(logprobs or ()), token, self._top)
            new.append(Token(token, ends, value, token if ends == "stop" else None))
            if ends:
                self.finished = True
                return new, None
        if finish in _ENDED:
            return self._engine_ended(new, finish, stop_reason)
        return new, None

    def _offset(self, token_ids: Seq[int], finish: str | None) -> int | None:
        """Where the new tokens start; None: not known yet."""
        if self.repeats is None:
            skipped = len(self._skip)
            if len(token_ids) < skipped and list(token_ids) == self._skip[: len(token_ids)] and finish not in _ENDED:
                return None
            self.repeats = list(token_ids[:skipped]) == self._skip
        return len(self._skip) if self.repeats else 0

    def _ends(self, token: int) -> str:
        if token in self._stops and self.reported > self._min_tokens:
            return "stop"
        return "length" if self.reported >= self._limit else ""

    def _engine_ended(
        self, new: list[Token], finish: str, stop_reason: int | str | None
    ) -> tuple[list[Token], SequenceFailure | None]:
        """Handle an end that the tokens did not show."""
        self.finished = True
        if finish in ("cancelled", "timeout"):
            code = Code.cancelled if finish == "cancelled" else Code.deadline_exceeded
            return new, SequenceFailure(code, f"the engine ended the request: {finish}")
        trimmed = stop_reason if isinstance(stop_reason, int) else self._end_id if stop_reason is None else -1
        if finish == "stop" and trimmed >= 0:  # our protocol includes the stop token
            self.reported += 1
            return [*new, Token(trimmed, "stop", logprob_at((), 0, trimmed, self._top), trimmed)], None
        return last_token(new, finish)


def end_id(stop: Stop, eos: Seq[int]) -> int:
    """The single end token that the engine takes; -1: none."""
    return -1 if stop.ignore_eos or not eos else eos[0]


def sampling_arguments(
    sampling: Sampling,
    stop: Stop,
    *,
    eos: Seq[int],
    max_tokens: int,
    min_tokens: int = 0,
    counted_prompt: int = 0,
    prompt_len: int = 0,
    choice: int = 0,
    position: int = 0,
    perf_metrics: bool = False,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``. Those left out have defaults in the engine that mean the same.

    ``embedding_bias`` is a mapping from token id to bias here; the caller makes the tensor.

    Args:
        eos: end tokens of the model.
        max_tokens, min_tokens: of the tokens that are still to be generated.
        counted_prompt: tokens of the prompt that the engine's ``min_tokens`` counts as well.
        prompt_len: tokens of the client's prompt, which presence and frequency penalties do not count.
        choice: number of the choice in its request.
        position: of the first of these tokens in the output.
        perf_metrics: have the engine measure the request.
        prompt_logprobs: alternatives per prompt token; None: no log-probabilities of the prompt.
    """
    ends = stop_ids(stop, eos)
    end = end_id(stop, eos)
    parameters: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": end,
        "pad_id": eos[0] if eos else 0,
        "detokenize": False,
        "add_special_tokens": False,
        "include_stop_str_in_output": True,  # otherwise the list of tokens shrinks at its end
        "n": 1,
        "best_of": 1,
        "seed": seed_of(sampling.seed, choice, position),
    }
    other_ends = sorted(ends - {end})
    if other_ends and min_tokens <= 0:  # min_tokens protects only end_id: the cursor stops the output instead
        parameters["stop_token_ids"] = other_ends
    if min_tokens > 0 and end >= 0:  # with -1, TorchSampler bars the last token of the vocabulary
        parameters["min_tokens"] = min_tokens + counted_prompt
    parameters |= shape(sampling)
    if prompt_len and "presence_penalty" in parameters:
        parameters["prompt_ignore_length"] = prompt_len
    if sampling.logit_bias:
        parameters["embedding_bias"] = dict(sampling.logit_bias)
    if sampling.logprobs is not None:
        parameters["logprobs"] = max(1, sampling.logprobs)  # 0 would switch them off
    if prompt_logprobs is not None:
        parameters["prompt_logprobs"] = max(1, prompt_logprobs)
    if perf_metrics:
        parameters["return_perf_metrics"] = True
    return parameters


log = structlog.get_logger("engine")

NOT_CONTINUED = (
    "an output with a constraint was lost with its worker: TensorRT-LLM continues it on an aggregated worker with "
    "disable_overlap_scheduler: true only"
)


class TrtllmOptions(NamedTuple):
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
    served: ServedOptions = ServedOptions()
    vocab_size: int = 0
    one_token: Callable[[], dict[str, Any]] = dict
    quiet_s: float = QUIET_S
    answer_s: float = ANSWER_S


class TrtllmInputs(NamedTuple):
    """One call of the engine.

    Attributes:
        cursor: position in its output.
        sampling: arguments of SamplingParams, which the call changes and which is therefore made for each.
        arguments: the call's other arguments.
        tokens: the prompt that the engine sees.
        adopted: the prompt's KV is fetched from another engine.
    """

    cursor: TrtllmOutputCursor
    sampling: dict[str, Any]
    arguments: dict[str, Any]
    tokens: list[int]
    adopted: bool


def check(request: SequenceRequest, info: EngineInfo, prompt_limit: int) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    check_sampling(request, info)
    length = len(request.prompt) + len(request.generated)
    if length > prompt_limit:
        raise RequestError(
            Code.context_length_exceeded,
            f"the prompt has {length} tokens; this worker takes {prompt_limit} (max_num_tokens); set "
            "enable_chunked_prefill for longer ones",
        )


def prepare(
    request: SequenceRequest, info: EngineInfo, options: TrtllmOptions, consumed: ConsumedStates
) -> TrtllmInputs:
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
    if request.pin:
        params = options.disaggregated(request_type=disagg.CONTEXT)
    before = len(request.generated) - repeated  # generated tokens that the engine sees as prompt
    room = info.max_model_len - len(request.prompt)
    limit = 1 if request.pin else min(stop.max_tokens, room) - len(request.generated)
    barred = stop.min_tokens - before if end_id(stop, eos) >= 0 else 0
    if reason := problem(request.sampling, barred, options.served):
        raise RequestError(Code.unsupported, reason)
    parameters = sampling_arguments(
        request.sampling,
        stop,
        eos=eos,
        max_tokens=limit + repeated,
        min_tokens=stop.min_tokens - before,
        counted_prompt=len(request.prompt) + before if options.served.min_tokens == "all" else 0,
        prompt_len=len(request.prompt),
        choice=request.choice,
        position=len(request.generated),
        perf_metrics=options.publish or request.trace is not None,
        prompt_logprobs=request.sampling.prompt_logprobs if request.score else None,
    )
    if "embedding_bias" in parameters:
        parameters["embedding_bias"] = bias(parameters["embedding_bias"], info.vocab_size)
    parameters |= _edits(request, options, continues=before > 0)
    tokens = [*request.prompt, *request.generated[:before]]
    arguments: dict[str, Any] = {"inputs": tokens, "streaming": not request.pin}
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
    cursor = TrtllmOutputCursor(
        limit=limit,
        stops=stop_ids(stop, eos),
        min_tokens=max(0, stop.min_tokens - len(request.generated)),
        end_id=end_id(stop, eos),
        skip=request.generated[before:],
        top=request.sampling.logprobs,
    )
    return TrtllmInputs(cursor, parameters, arguments, tokens, adopted)


def _edits(request: SequenceRequest, options: TrtllmOptions, *, continues: bool) -> dict[str, Any]:
    """Arguments of SamplingParams that edit the logits.

    Args:
        continues: the prompt that the engine sees ends in tokens of the output.
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


def _take_over(request: SequenceRequest, options: TrtllmOptions, consumed: ConsumedStates) -> tuple[Any, int]:
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
    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    if values:
        tensor[list(values)] = torch.tensor(list(values.values()), dtype=torch.float32)
    return tensor


def image_inputs(model: ModelDir, store: ImageStore, tokens: Seq[int], spans: Seq[MediaSpan]) -> dict[str, Any]:
    """The ``inputs`` of ``generate_async`` for a prompt with images.

    TensorRT-LLM takes images and embeddings only with a *text* prompt that has one placeholder per image. The prompt's
    tokens are therefore decoded to text, and that text must encode to the same tokens.

    Args:
        tokens: with as many placeholders per image as it has embeddings.

    Raises:
        RequestError: the prompt cannot be written as text, or only some of its images are embedded.
    """
    assert model.vision is not None
    short = collapse(tokens, spans, model.vision.image_token_id)
    text = model.tokenizer.decode(short, skip_special_tokens=False)
    if model.tokenizer.encode(text, add_special_tokens=False).ids != short:
        raise RequestError(
            Code.unsupported,
            "this prompt with images has no text that encodes to the same tokens, and TensorRT-LLM takes images with "
            "text only; send it to a worker with the native engine",
        )
    if images := store.images(spans):
        return {"prompt": text, "multi_modal_data": {"image": list(images)}, "mm_processor_kwargs": {}}
    return {"prompt": text, "multi_modal_embeddings": {"image": store.embeddings(spans)}}
