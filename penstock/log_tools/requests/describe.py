"""Any message of the log as one line or as plain data: what ``penstock tail`` prints. Pure."""

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.cli.figures import counted
from penstock.schemas import done, jobs, kv, plans, requests, tokens, transfer
from penstock.schemas.block_hashes import DIGEST_BYTES
from penstock.schemas.done import Done
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import request_of
from penstock.schemas.tokens import ANOTHER_MODEL, COUNTS, PROMPT, WHOLE_REQUEST
from penstock.schemas.wire import unpack_tokens

if TYPE_CHECKING:  # it loads slowly
    from penstock.infra.text.detokenizer import Detokenizer


class Described(NamedTuple):
    """One message.

    Attributes:
        requests: ids of the requests it is about.
        content: the decoded message; None: it has no body, or cannot be read.
    """

    kind: str
    requests: frozenset[str]
    text: str
    content: Any = None


def describe(subject: str, headers: Mapping[str, str], data: bytes) -> Described:
    """Describe a message. Never raises: a message that cannot be decoded is described as such."""
    kind = subject.split(".")[1]
    reader = _READERS.get(kind)
    if reader is None:
        return Described(kind, _NONE, f"{len(data)} bytes")
    if not data:
        about = request_of(headers)
        why = headers.get("KV-Operation", headers.get("Nats-Marker-Reason", "no body"))
        return Described(kind, frozenset((about,)) if about else _NONE, why)
    try:
        return reader(data)
    except (msgspec.MsgspecError, ValueError) as error:
        return Described(kind, _NONE, f"{len(data)} bytes that cannot be read: {error}")


def plain(content: Any) -> Any:
    """A decoded message as data for JSON: packed token ids as numbers, other bytes as base64."""
    return msgspec.to_builtins(_open(content), str_keys=True)


def _request(data: bytes) -> Described:
    request = requests.decode(data)
    prompt = counted(request.prompt_tokens, "token")
    if request.no_store and not request.prompt:
        prompt = f"{prompt}, not kept (no_store)" if request.prompt_tokens else "not kept (no_store)"
    text = (
        f"{request.model} {request.priority.value} prompt {prompt}, "
        f"at most {request.stop.max_tokens} out, from {request.gateway}"
    )
    return Described("request", frozenset((request.id,)), text, request)


def _work(data: bytes) -> Described:
    message = jobs.decode(data)
    if isinstance(message, jobs.Revoke):
        return Described("revoke", frozenset((message.request,)), f"attempts up to {message.attempt}", message)
    job = message if isinstance(message, jobs.Job) else jobs.decode_job(message.job)
    request = requests.decode(job.request)
    decision = job.decision
    if isinstance(message, jobs.Job):
        route = " → ".join(f"{stage.role} {stage.worker}" for stage in decision.route) or decision.chosen
        resumed = sum(map(len, job.resume)) // 4
        text = f"attempt {job.attempt} ({decision.reason}) to {route}, waited {decision.waited_ns / 1e6:.1f} ms"
        text += f", after {counted(resumed, 'token')}" if resumed else ""
        return Described("job", frozenset((request.id,)), text, jobs.with_candidates(message))
    kind = "prefilled" if isinstance(message, transfer.Prefilled) else "encoded"
    ticket = message.ticket
    text = (
        f"attempt {job.attempt} by {ticket.worker}, {counted(len(ticket.blocks) // 4, 'block')} of pool {ticket.pool}"
    )
    return Described(kind, frozenset((request.id,)), text, message)


def _tokens(data: bytes) -> Described:
    batch = tokens.decode(data)
    names = frozenset(item.request for item in batch.items)
    parts = []
    for item in batch.items:
        count = len(item.logprobs or ()) if item.choice == PROMPT else len(item.tokens) // 4
        where = {PROMPT: " prompt", WHOLE_REQUEST: " all", ANOTHER_MODEL: " fallback", COUNTS: " counts"}.get(
            item.choice, f"[{item.choice}]"
        )
        end = f" {item.finish.reason}" if item.finish is not None else ""
        about = item.request[-6:] if len(names) > 1 else ""
        parts.append(f"{about}{where} +{count} at {item.first}{end}".strip())
    text = f"{batch.worker}#{batch.seq}: {'; '.join(parts)}"
    return Described("tokens", names, text, batch)


def _done(data: bytes) -> Described:
    event = done.decode(data)
    if isinstance(event, done.Returned):
        text = f"attempt {event.attempt} by {event.worker}: {event.reason}"
        return Described("returned", frozenset((event.request,)), text, event)
    usage, times = event.usage, event.timings
    how = event.code or ",".join(choice.reason for choice in event.choices)
    took = f" in {(times.ended_ns - times.created_ns) / 1e6:.0f} ms" if times.ended_ns else ""
    where = event.worker or "the router"
    text = f"{how} on attempt {event.attempt} at {where}: {usage.prompt} → {counted(usage.completion, 'token')}{took}"
    return Described("done", frozenset((event.request,)), text, event)


def _kv(data: bytes) -> Described:
    batch = kv.decode(data)
    parts = []
    for event in batch.events:
        if isinstance(event, kv.Cleared):
            parts.append("cleared")
        else:
            sign = "+" if isinstance(event, kv.Stored) else "-"
            parts.append(f"{sign}{len(event.digests) // DIGEST_BYTES}" + (f" tier {event.tier}" if event.tier else ""))
    return Described(
        "kv", _NONE, f"{batch.worker}/{batch.rank}#{batch.seq}: {' '.join(parts) or 'nothing'} blocks", batch
    )


def _handoff(data: bytes) -> Described:
    ledger = transfer.decode_ledger(data)
    names = frozenset(event.ticket.partition(":")[0] for event in ledger.events)
    lines = "; ".join(
        f"{event.ticket.partition(':')[2]} {event.state} {event.source} → {event.target}"
        + (f" ({event.cause})" if event.cause else "")
        for event in ledger.events
    )
    return Described("handoff", names, f"{ledger.worker}: {lines}", ledger)


def _plan(data: bytes) -> Described:
    planned = plans.decode(data)
    parts = [
        f"{role} {change.current} → {change.target}" + (f" ({', '.join(change.reasons)})" if change.reasons else "")
        for role, change in planned.decision.changes.items()
    ]
    rate = f"{planned.decision.observed.rate:.2f} requests/s, planned for {planned.decision.demand.rate:.2f}"
    failed = f"; failed: {planned.failure}" if planned.failure else ""
    return Described("plan", _NONE, f"{planned.model}: {rate}; {'; '.join(parts)}{failed}", planned)


_NONE: frozenset[str] = frozenset()
_READERS: dict[str, Callable[[bytes], Described]] = {
    "request": _request,
    "work": _work,
    "tokens": _tokens,
    "done": _done,
    "returned": _done,
    "kv": _kv,
    "handoff": _handoff,
    "plan": _plan,
}
_TOKENS = frozenset({"prompt", "tokens", "resume"})
_JOBS = {"job": jobs.decode_job, "request": requests.decode, "submitted": requests.decode}


def _open(value: Any, name: str = "") -> Any:
    """Structs as dictionaries, with packed and encoded fields decoded."""
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        return {encoded: _open(getattr(value, field), field) for field, encoded in names}
    if isinstance(value, msgspec.Raw) or (isinstance(value, bytes) and name == "submitted"):
        try:
            return _open(_JOBS[name](bytes(value))) if len(bytes(value)) else None
        except (KeyError, msgspec.MsgspecError):
            return base64.b64encode(bytes(value)).decode()
    if isinstance(value, bytes):
        return list(unpack_tokens(value)) if name in _TOKENS else base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _open(each, name) for key, each in value.items()}
    if isinstance(value, tuple | list | frozenset | set):
        return [_open(each, name) for each in value]
    return value


class Texts:
    """
    Args:
        model_path: a directory, bundled model or Hugging Face id, for all models; "": each model's own name.
    """

    def __init__(self, model_path: str = "") -> None:
        self._path = model_path
        self._of: dict[str, Detokenizer] = {}

    def prompt(self, request: GenerateRequest) -> str:
        """The prompt as the model got it, without special tokens.

        Raises:
            ValueError: the model's tokenizer is not to be found.
        """
        if request.diffusion is not None:
            return request.diffusion.prompt
        if request.embedding is not None and request.embedding.texts:
            return "\n".join((*request.embedding.queries, *request.embedding.texts))
        return self._decode(request.model, request.prompt)

    def outputs(self, record: Done) -> list[str]:
        """What each choice generated, without special tokens.

        Raises:
            ValueError: the model's tokenizer is not to be found.
        """
        return [self._decode(record.model, choice.tokens) for choice in record.choices]

    def token_ids(self, packed: bytes) -> tuple[int, ...]:
        """Token ids as they were recorded."""
        return tuple(unpack_tokens(packed))

    def detokenizer(self, model: str) -> "Detokenizer":
        """
        Raises:
            ValueError: the model's tokenizer is not to be found.
        """
        found = self._of.get(model)
        if found is None:
            from penstock.infra.model.modeldir import ModelError, load_tokenizer, resolve  # 40 ms, only for texts
            from penstock.infra.text.detokenizer import Detokenizer

            try:
                found = self._of[model] = Detokenizer(load_tokenizer(resolve(self._path or model)))
            except ModelError as error:
                raise ValueError(
                    f"no tokenizer for model {model!r}: name its directory with --model-path ({error})"
                ) from error
        return found

    def _decode(self, model: str, packed: bytes) -> str:
        return self.detokenizer(model).text(unpack_tokens(packed)) if packed else ""
