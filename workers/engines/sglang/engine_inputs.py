"""From one of our sequences to calls of ``Engine.async_generate`` (0.5.23). Pure: names and values, no engine types.

An engine without a tokenizer takes no ``min_new_tokens``, and with ``ignore_eos`` it heeds no stop ids either. So the
first tokens of an output with ``min_tokens`` are a call of their own, in which the ending tokens are barred, and stop
ids beside ``ignore_eos`` are watched for by the follower.

Draws are counter-based, (seed, position), but only in engines with ``enable_deterministic_inference``; others ignore
the seed.

A prefill and a decode engine run a sequence at the same time. The prefill engine does not begin before the decode
engine has reserved blocks, and reports its token only after the KV was fetched; the decode engine gets the first token
with the KV. So the prefill worker hands a request over before it has computed anything (``StepResult.handed``), and the
state has no KV's location but that of the prefill engine's bootstrap server and a room, a number that both engines are
given. Each choice of a request has a room of its own.

A decode engine cannot compute a prompt. Without a state that it can use the attempt is given back, and a router places
the request on another pair.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from blake3 import blake3

from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external import constrained, handoff_state
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.sampling import bias, check_sampling, greedy, seed_of, shape, stop_ids
from penstock.workers.engines.sglang.plugin import behind

BARRED = -1e9  # bias of a token that must not be drawn; below any logit, and finite in each data type


def sampling_arguments(
    sampling: Sampling,
    *,
    max_tokens: int,
    choice: int = 0,
    earlier: Seq[int] = (),
    ends: Collection[int] = (),
    barred: Collection[int] = (),
    grammar: str = "",
) -> dict[str, Any]:
    """Fields of ``SamplingParams``. Those left out have defaults in the engine that mean the same.

    Args:
        max_tokens: tokens that are still to be generated.
        earlier: generated tokens that the engine sees as prompt. It counts penalties over its own output only, so
            those of ``earlier`` are passed as a bias, ``repetition_penalty`` excepted.
        ends: token ids that end the output, besides the model's own; empty: nothing does.
        barred: token ids that are not drawn.
        grammar: what the output matches, in llguidance's dialect of Lark.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "ignore_eos": not ends,
        "sampling_seed": seed_of(sampling.seed, choice, 0),  # positions are part of the engine's own draw
    }
    if ends:
        parameters["stop_token_ids"] = sorted(ends)
    if grammar:
        parameters["ebnf"] = grammar
    if greedy(sampling):
        parameters["temperature"] = 0.0
    shaped = shape(sampling)
    if shaped.get("top_k", 1) <= 0:
        del shaped["top_k"]  # all tokens
    parameters |= shaped
    if biases := bias(sampling, earlier) | dict.fromkeys(barred, BARRED):
        parameters["logit_bias"] = {str(token): value for token, value in biases.items()}
    return parameters


FAKE_HOST = "2.2.2.2"  # SGLang's: a request with it runs without the other engine, and its answer is worthless
_ROOM_BITS = 52  # of a request; the choice is added
_CHOICES = 1 << 10


class Address(NamedTuple):
    """Of a prefill engine's bootstrap server."""

    host: str
    port: int


class Room(NamedTuple):
    """Where the engines meet for one sequence. ``rank``: of the prefill engine, if it has several."""

    address: Address
    number: int
    rank: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``async_generate``, equal on both sides."""
        found: dict[str, Any] = {
            "bootstrap_host": self.address.host,
            "bootstrap_port": self.address.port,
            "bootstrap_room": self.number,
        }
        return found if self.rank is None else found | {"disagg_prefill_dp_rank": self.rank}


def room(address: Address, handoff: str, choice: int, rank: int | None = None) -> Room:
    """The room of a choice. Never 0, which SGLang takes for "none"; no two handoffs share one, but for a chance of
    2**-52 per pair.

    Args:
        handoff: names the handoff of a request in one attempt.
    """
    base = int.from_bytes(blake3(handoff.encode()).digest(length=8), "big") >> (64 - _ROOM_BITS)
    return Room(address, (base + 1) * _CHOICES + choice % _CHOICES, rank)


def pack(address: Address, handoff: str, layout: str, tokens: Seq[int], rank: int | None = None) -> bytes:
    """The state for ``PinnedPrompt.opaque``.

    Args:
        tokens: prompt and output so far, of which the prefill engine computes the KV.
    """
    params = {"host": address.host, "port": address.port, "name": handoff, "rank": rank}
    return handoff_state.pack(params, layout, tokens, [])


def unpack(opaque: bytes, layout: str, tokens: Seq[int], choice: int) -> Room:
    """The room of a choice that continues ``tokens``.

    Raises:
        ValueError: the state is damaged, or from another prompt, attempt or KV layout.
    """
    state = handoff_state.unpack(opaque, layout)
    if state.context != handoff_state.digest(tokens):
        raise ValueError("it belongs to other tokens than these")
    host, port, name, rank = (state.params.get(key) for key in ("host", "port", "name", "rank"))
    if not isinstance(host, str) or not isinstance(port, int) or not isinstance(name, str):
        raise ValueError("it names no bootstrap server")
    return room(Address(host, port), name, choice, rank if isinstance(rank, int) else None)


class SglangOptions(NamedTuple):
    """Fixed properties of an engine besides ``EngineInfo``.

    Attributes:
        root: parent of the first block's name for prompts without tenant or adapter; other roots become a cache salt.
        role: "prefill" or "decode": it runs sequences together with another engine only.
        layout: fingerprint of engines that can; empty: it runs them alone.
        address: of a prefill engine's bootstrap server.
        wait_s: how long a decode engine waits for a prompt's KV.
        salts: the engine keeps prefixes of requests with a salt apart.
    """

    root: bytes
    role: str = "aggregated"
    layout: str = ""
    address: Address = Address("", 0)
    wait_s: float = 0.0
    salts: bool = True


class SglangInputs(NamedTuple):
    """One call of the engine.

    Attributes:
        arguments: of ``async_generate``, without ``rid`` and ``stream``.
        stops: token ids that end the sequence although the engine continues, after ``least`` tokens.
        continues: when the call reaches its limit, another one follows.
    """

    arguments: dict[str, Any]
    stops: frozenset[int] = frozenset()
    min_tokens: int = 0
    continues: bool = False


def check(request: SequenceRequest, info: EngineInfo, options: SglangOptions) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    check_sampling(request, info)
    if request.sampling.logits_processors:
        raise RequestError(Code.unsupported, "this worker's engine (SGLang) runs no logits processors")
    if request.media:
        raise RequestError(Code.unsupported, "this worker's engine takes text only; send the request without images")
    if request.root not in (b"", options.root) and not options.salts:
        raise RequestError(
            Code.unsupported,
            "this worker's SGLang has no cache_salt, so prefixes of tenants cannot be kept apart; install 0.5.23",
        )
    if request.pin and options.role != "prefill":
        raise RequestError(Code.unsupported, "this worker does not hand off KV; start it with --role prefill")
    if options.layout and request.score and request.sampling.prompt_logprobs is not None:
        raise RequestError(
            Code.unsupported, "prompt_logprobs: not with separate prefill and decode workers on SGLang; start one whole"
        )


def meeting(request: SequenceRequest, info: EngineInfo, options: SglangOptions, consumed: ConsumedStates) -> Room:
    """Where this engine meets the other one of its pair.

    Args:
        consumed: rooms that this engine has been to; both engines enter a room once.

    Raises:
        ValueError: there is no such place.
    """
    if options.role == "prefill":
        if not request.handoff:
            raise ValueError("this worker computes prompts for decode workers only")
        return room(options.address, request.handoff, request.choice, _rank(request, info))
    if not request.opaque:
        raise ValueError("this worker only continues prompts of prefill workers")
    found = unpack(request.opaque, options.layout, [*request.prompt, *request.generated], request.choice)
    if not consumed.claim(found):
        raise ValueError("it was used before")
    return found


def offer(request: SequenceRequest, info: EngineInfo, options: SglangOptions) -> bytes:
    """What the decode worker's engine needs to meet this one."""
    tokens = [*request.prompt, *request.generated]
    return pack(options.address, request.handoff, options.layout, tokens, _rank(request, info))


def _rank(request: SequenceRequest, info: EngineInfo) -> int | None:
    return request.rank % info.dp_size if info.dp_size > 1 else None


def prepare(
    request: SequenceRequest,
    info: EngineInfo,
    options: SglangOptions,
    generated: Seq[int] = (),
    room: Room | None = None,
    lora: str | None = None,
) -> SglangInputs:
    """The next call for a sequence that has passed ``check``.

    Args:
        generated: what earlier calls for it have generated.
        room: where the pair meets. A sequence is then one call, so ending tokens may be drawn before ``min_tokens``.
        lora: SGLang's name of its LoRA adapter.

    Raises:
        RequestError: its constraint cannot be compiled.
    """
    earlier = [*request.generated, *generated]
    tokens = [*request.prompt, *earlier]
    limit = min(request.stop.max_tokens, info.max_model_len - len(request.prompt)) - len(earlier)
    rules = constrained.ends(request.stop, request.constraint)
    ends = stop_ids(rules, info.eos_token_ids)
    continues, stops = False, frozenset[int]()
    min_tokens = min(rules.min_tokens - len(earlier), limit)
    grammar = "" if request.constraint is None else behind(constrained.grammar_text(request.constraint), earlier)
    if min_tokens > 0 and ends and room is None:
        ends_here, barred, continues = frozenset[int](), ends, min_tokens < limit
        limit = min_tokens
    elif min_tokens > 0 and ends:
        ends_here, barred, stops = frozenset(), frozenset(), ends
    elif rules.ignore_eos:  # the model's own end would end it, too
        ends_here, barred, stops = frozenset(), frozenset[int](), ends
    else:
        ends_here, barred = ends, frozenset()
    arguments: dict[str, Any] = {
        "input_ids": tokens,
        "sampling_params": sampling_arguments(
            request.sampling,
            max_tokens=limit,
            choice=request.choice,
            earlier=earlier,
            ends=ends_here,
            barred=barred,
            grammar=grammar,
        ),
    }
    scores = 0 < request.score < len(request.prompt) and not generated
    if request.sampling.logprobs is not None or scores:
        best = max(request.sampling.logprobs or 0, (request.sampling.prompt_logprobs or 0) if scores else 0)
        arguments |= {"return_logprob": True, "top_logprobs_num": best}
        arguments["logprob_start_len"] = request.score - 1 if scores else -1
    if request.root and request.root != options.root:
        arguments["cache_salt"] = request.root.hex()
    if (rank := _rank(request, info)) is not None:
        arguments["routed_dp_rank"] = rank
    if request.trace is not None:
        arguments["external_trace_header"] = dict(request.trace)
    if lora is not None:
        arguments["lora_path"] = lora
    if room is not None:
        arguments |= room.arguments
    return SglangInputs(arguments, stops, max(0, min_tokens) if stops else 0, continues)
