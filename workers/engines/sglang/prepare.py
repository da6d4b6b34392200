"""From one of our sequences to calls of ``Engine.async_generate``. Pure."""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from schemas.errors import Code
from workers.engines.base import EngineInfo, RequestError, SequenceRequest
from workers.engines.external import requests
from workers.engines.external.sampling import stop_ids
from workers.engines.sglang import sampling


class Options(NamedTuple):
    """Fixed properties of an engine besides ``EngineInfo``.

    Attributes:
        root: parent of the first block's name for prompts without tenant or adapter; other roots become a cache salt.
    """

    root: bytes


class Prepared(NamedTuple):
    """One call of the engine.

    Attributes:
        arguments: of ``async_generate``, without ``rid`` and ``stream``.
        stops: token ids that end the sequence though the engine goes on.
        goes_on: when the call reaches its limit, another one follows.
    """

    arguments: dict[str, Any]
    stops: frozenset[int] = frozenset()
    goes_on: bool = False


def check(request: SequenceRequest, info: EngineInfo, options: Options) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    requests.check(request, info)
    if request.sampling.logits_processors:
        raise RequestError(Code.unsupported, "this worker's engine (SGLang) runs no logits processors")
    if request.media:
        raise RequestError(Code.unsupported, "this worker's engine takes text only; send the request without images")
    if request.hold:
        raise RequestError(Code.unsupported, "this worker does not hand off KV; start it with --role prefill")


def prepare(request: SequenceRequest, info: EngineInfo, options: Options, said: Seq[int] = ()) -> Prepared:
    """The next call for a sequence that has passed ``check``.

    Args:
        said: what earlier calls for it have generated.
    """
    earlier = [*request.generated, *said]
    tokens = [*request.prompt, *earlier]
    limit = min(request.stop.max_tokens, info.max_model_len - len(request.prompt)) - len(earlier)
    ends = stop_ids(request.stop, info.eos_token_ids)
    goes_on, stops = False, frozenset[int]()
    least = min(request.stop.min_tokens - len(earlier), limit)
    if least > 0 and ends:
        ends_here, barred, goes_on = frozenset[int](), ends, least < limit
        limit = least
    elif request.stop.ignore_eos:  # the model's own end would end it, too
        ends_here, barred, stops = frozenset(), frozenset[int](), ends
    else:
        ends_here, barred = ends, frozenset()
    arguments: dict[str, Any] = {
        "input_ids": tokens,
        "sampling_params": sampling.arguments(
            request.sampling,
            max_tokens=limit,
            choice=request.choice,
            earlier=earlier,
            ends=ends_here,
            barred=barred,
        ),
    }
    scores = 0 < request.score < len(request.prompt) and not said
    if request.sampling.logprobs is not None or scores:
        best = max(request.sampling.logprobs or 0, (request.sampling.prompt_logprobs or 0) if scores else 0)
        arguments |= {"return_logprob": True, "top_logprobs_num": best}
        arguments["logprob_start_len"] = request.score - 1 if scores else -1
    if request.root and request.root != options.root:
        arguments["cache_salt"] = request.root.hex()
    if info.dp_size > 1:
        arguments["routed_dp_rank"] = request.rank % info.dp_size
    if request.trace is not None:
        arguments["external_trace_header"] = dict(request.trace)
    return Prepared(arguments, stops, goes_on)
