"""The summary of a request for lists and searches, from its messages. Pure.

It is part of the wire contract, so that commands and the gateway read the messages of a request in the same way.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, TypeVar, get_args
from urllib.parse import quote, unquote

import msgspec

from penstock.schemas.done import DONE_TYPE, Done, EarlierRevision, MadeWith, Outcome, Timings, Usage, request_of
from penstock.schemas.jobs import EarlierWorker
from penstock.schemas.requests import ADAPTER, FALLBACK, GenerateRequest, Priority, Sampling
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_MSG_ID, HEADER_NO_STORE, HEADER_SUMMARY
from penstock.schemas.tokens import FAILURES, File
from penstock.schemas.wire import decoder

State = Literal["queued", "running", "done", "failed", "cancelled", "unknown"]
QUEUED: Final = "queued"
RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
UNKNOWN: Final = "unknown"
STATES: tuple[State, ...] = get_args(State)
NOT_SAMPLED = ("embedding", "rerank", "score", "image", "video")  # endpoints whose answers are not drawn tokens


LATE_NS = 60_000_000_000


def record_is_lost(request: GenerateRequest, now_ns: int) -> bool:
    """Whether a request without a record must have ended: its deadline passed a minute ago (Unix time in ns)."""
    return now_ns > request.deadline_ns + LATE_NS


class RequestSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """An unfinished or ended request. Times are Unix time in ns, 0: not yet, or not recorded.

    Attributes:
        state: "queued" until a router has placed it; "unknown" if it ended, or must have, and its record cannot be
            read. Lists over HTTP and commands use the same values.
        code: the error code of a failure.
        reason: the finish reason of its first choice ("stop", "length", ...).
        attempts: number of the last one; 0: none yet.
        worker: the worker of the last attempt.
        earlier_workers: earlier workers of this and previous attempts; not in records of releases up to 0.1.
        api_key: the public part of its key; "": it had none.
        ran_as: its id in the cell that ran it; "": it ran in its own.
        origin: the id of the other cell's request that it runs; "": it belongs to this cell, and lists show it.
        revision, engine, build: as in ``done.MadeWith``.
        before: as in ``done.MadeWith``; not in lists.
        adapter: its LoRA adapter; "": none.
        sampling: None: unknown.
        files: generated images and videos.
        router: the router that placed its last attempt; "": unknown.
        asked: the requested model if ``model`` ran as its fallback; else "".
        reasoning_tokens: reasoning among ``completion_tokens``; -1: unknown.
    """

    id: str
    model: str
    state: State
    created_ns: int
    tenant: str = ""
    priority: str = ""
    endpoint: str = ""
    user: str = ""
    client_request_id: str = ""
    attempts: int = 0
    worker: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    routed_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    reason: str = ""
    code: str = ""
    message: str = ""
    api_key: str = ""
    ran_as: str = ""
    origin: str = ""
    earlier_workers: tuple[EarlierWorker, ...] = ()
    revision: str = ""
    engine: str = ""
    build: str = ""
    adapter: str = ""
    sampling: Sampling | None = None
    files: int = 0
    router: str = ""
    asked: str = ""
    before: tuple[EarlierRevision, ...] = ()
    reasoning_tokens: int = 0

    @property
    def workers(self) -> list[str]:
        """All of its workers, the first one first."""
        return list(dict.fromkeys(filter(None, (*(each.worker for each in self.earlier_workers), self.worker))))

    @property
    def lost_workers(self) -> list[str]:
        """Workers that were lost while they ran it."""
        return list(dict.fromkeys(each.worker for each in self.earlier_workers if each.lost))

    @property
    def ttft_ms(self) -> float | None:
        """From acceptance to the first token; None: there was none, or it is not recorded yet."""
        return (self.first_token_ns - self.created_ns) / 1e6 if self.first_token_ns else None

    @property
    def duration_ms(self) -> float | None:
        """From acceptance to the end; None: it has not ended."""
        return (self.ended_ns - self.created_ns) / 1e6 if self.ended_ns else None


def as_dict(summary: RequestSummary) -> dict[str, object]:
    """All fields, as commands write them in JSON; with the properties, which are computed."""
    return msgspec.structs.asdict(summary) | {
        "ttft_ms": summary.ttft_ms,
        "duration_ms": summary.duration_ms,
        "workers": summary.workers,
        "lost_workers": summary.lost_workers,
        "sampling": settings(summary.sampling),
    }


def settings(sampling: Sampling | None) -> dict[str, object]:
    """The temperature, and each other setting that is not off. Empty: unknown."""
    if sampling is None:
        return {}
    changed: dict[str, object] = msgspec.to_builtins(sampling, str_keys=True)
    return {"temperature": sampling.temperature} | changed


def settings_text(sampling: Sampling | None) -> str:
    """As ``settings``, as text: "temperature 0.7, top_p 0.9, seed 5"."""
    shown = dict(settings(sampling))
    if sampling is not None and sampling.logit_bias:
        shown["logit_bias"] = f"of {len(sampling.logit_bias)} tokens"
    if sampling is not None:
        named = [each.name for each in sampling.logits_processors if each.name not in (ADAPTER, FALLBACK)]
        if named:
            shown["logits_processors"] = " ".join(named)
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def of_request(
    request: GenerateRequest,
    *,
    state: State = QUEUED,
    attempt: int = 0,
    worker: str = "",
    routed_ns: int = 0,
    earlier_workers: tuple[EarlierWorker, ...] = (),
    revision: str = "",
    router: str = "",
) -> RequestSummary:
    """A request that has not ended."""
    return RequestSummary(
        request.id,
        request.model,
        state,
        request.created_ns,
        request.tenant,
        request.priority.value,
        request.endpoint,
        request.user,
        request.client_request_id,
        attempt,
        worker,
        request.prompt_tokens,
        routed_ns=routed_ns,
        api_key=request.api_key,
        origin=request.origin,
        earlier_workers=earlier_workers,
        revision=revision or request.revision,
        adapter=request.lora,
        sampling=request.sampling,
        router=router,
        asked=request.asked,
    )


def of_done(event: Done) -> RequestSummary:
    """A request that has ended, from its record.

    Raises:
        msgspec.MsgspecError: the request in the record is of a version that this one cannot read.
    """
    return _of_record(event, request_of(event), RequestSummary)


Kind = TypeVar("Kind", bound=RequestSummary)


def of_encoded_done(data: bytes, kind: type[Kind]) -> Kind | None:
    """As ``of_done``, from an encoded message of DONE; tokens are not decoded. None: it is not a record.

    Args:
        kind: what is made: ``RequestSummary``, or the same with other options.
    Raises:
        msgspec.MsgspecError: it is of a version that this one cannot read.
    """
    event = _decode_record(data)
    if isinstance(event, _Returned):
        return None
    return _of_record(event, _decode_origin(event.submitted) if event.submitted else None, kind)


class _Reason(msgspec.Struct):
    """Of an ``Outcome``."""

    reason: str = ""
    files: tuple[File, ...] = ()


class _Record(msgspec.Struct, tag="done"):
    """Of a ``Done``."""

    request: str
    model: str
    attempt: int
    worker: str = ""
    choices: tuple[_Reason, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    code: str = ""
    message: str = ""
    user: str = ""
    submitted: bytes = b""


class _Returned(msgspec.Struct, tag="returned"):
    pass


class _Origin(msgspec.Struct):
    """Of a ``GenerateRequest``."""

    tenant: str = "default"
    priority: Priority = Priority.standard
    endpoint: str = ""
    client_request_id: str = ""
    api_key: str = ""
    origin: str = ""
    ran_as: str = ""
    lora: str = ""
    sampling: Sampling = Sampling()
    asked: str = ""


_decode_record = decoder(_Record | _Returned)  # type: ignore[arg-type]
_decode_origin = decoder(_Origin)


_UNKNOWN = MadeWith()


def _of_record(event: Done | _Record, request: GenerateRequest | _Origin | None, kind: type[Kind]) -> Kind:
    times, usage, made_with = event.timings, event.usage, event.timings.made_with or _UNKNOWN
    first: Outcome | _Reason | None = event.choices[0] if event.choices else None
    reason = first.reason if first is not None else ""
    if event.code == "cancelled" or (not event.code and reason == "cancelled"):
        state: State = CANCELLED
    else:
        state = FAILED if event.code or reason in FAILURES else DONE
    return kind(
        event.request,
        event.model,
        state,
        times.created_ns,
        request.tenant if request is not None else "",
        request.priority.value if request is not None else "",
        request.endpoint if request is not None else "",
        event.user,
        request.client_request_id if request is not None else "",
        _attempts(event),
        event.worker,
        usage.prompt,
        usage.cached,
        usage.completion,
        times.routed_ns,
        times.client_first_token_ns,
        times.ended_ns,
        reason,
        event.code,
        event.message,
        request.api_key if request is not None else "",
        request.ran_as if request is not None else "",
        request.origin if request is not None else "",
        event.timings.earlier_workers,
        made_with.revision,
        made_with.engine,
        made_with.build,
        request.lora if request is not None else "",
        request.sampling if request is not None else None,
        sum(len(each.files) for each in event.choices),
        times.router,
        request.asked if request is not None else "",
        reasoning_tokens=usage.reasoning,
    )


def _attempts(event: Done | _Record) -> int:
    """The number of the last attempt that reached a worker."""
    if event.worker or not event.timings.earlier_workers:
        return event.attempt
    return max(each.attempt for each in event.timings.earlier_workers)


def headers_of(event: Done, request: GenerateRequest) -> dict[str, str]:
    """The headers of a record besides its id."""
    headers = {HEADER_CONTENT_TYPE: DONE_TYPE, HEADER_SUMMARY: header_of(event, request)}
    return headers | {HEADER_NO_STORE: "1"} if request.no_store else headers


def header_of(event: Done, request: GenerateRequest) -> str:
    """The ``Penstock-Summary`` header of a record, for readers that may not read its body.

    It has no text of the client. The first word is its version, so that a later version can add words.
    """
    one = _of_record(event, request, RequestSummary)
    return (
        f"1 {one.state} {one.attempts} {one.prompt_tokens} {one.cached_tokens} {one.completion_tokens} "
        f"{one.created_ns} {one.routed_ns} {one.first_token_ns} {one.ended_ns} {one.priority} "
        f"{one.endpoint or '-'} {_word(one.reason)} {_word(one.code)} {_word(one.worker)} {_word(one.model)} "
        f"{_earlier_word(one.earlier_workers) if one.earlier_workers else '-'} "
        f"{_word(one.api_key)} {_word(one.adapter)} {one.files} {one.origin or '-'}"
        + (f" {_word(one.asked)}" if one.asked or one.reasoning_tokens else "")
        + (f" {one.reasoning_tokens}" if one.reasoning_tokens else "")
    )


SUMMARY_WORDS = 21  # of a header; those of earlier releases have fewer, and say nothing of key, adapter and origin
_MOST_NAMED = 32  # earlier workers in a header, the last ones


def _earlier_word(workers: Sequence[EarlierWorker]) -> str:
    """Attempt, worker and the reason of its end, without details, which may quote an engine."""
    return ",".join(
        f"{each.attempt}:{quote(each.worker, safe='')}:{quote(each.ended.partition(':')[0], safe='')}"
        for each in workers[-_MOST_NAMED:]
    )


def _earlier_of(word: str) -> tuple[EarlierWorker, ...]:
    """Inverse of ``_earlier_word``.

    Raises:
        ValueError: malformed.
    """
    if word == "-":
        return ()
    parts = (each.split(":") for each in word.split(","))
    return tuple(EarlierWorker(int(attempt), unquote(worker), unquote(ended)) for attempt, worker, ended in parts)


@lru_cache(maxsize=256)  # of models, workers and reasons
def _word(text: str) -> str:
    return quote(text) or "-"


def of_headers(subject: str, headers: Mapping[str, str]) -> RequestSummary | None:
    """The summary in a record's headers; None: it has none, or one of a later version.

    Args:
        subject: of the record, or the one that it is republished to.
    """
    words = headers.get(HEADER_SUMMARY, "").split(" ")
    if len(words) < 16 or words[0] != "1" or words[1] not in STATES:
        return None
    try:
        counts = [int(word) for word in words[2:10]]
        earlier = _earlier_of(words[16]) if len(words) > 16 else ()
        files = int(words[19]) if len(words) >= SUMMARY_WORDS else 0
        reasoning = int(words[SUMMARY_WORDS + 1]) if len(words) > SUMMARY_WORDS + 1 else 0
    except ValueError:
        return None
    state: State = words[1]
    attempts, prompt, cached, completion, created, routed, first, ended = counts
    endpoint, reason, code, worker, model = map(_text, words[11:16])
    api_key, adapter, origin = map(_text, (*words[17:19], words[20])) if len(words) >= SUMMARY_WORDS else ("", "", "")
    return RequestSummary(
        headers.get(HEADER_MSG_ID, "") or subject.rpartition(".")[2],
        model,
        state,
        created,
        tenant=subject.split(".")[-3],
        priority=words[10],
        endpoint=endpoint,
        attempts=attempts,
        worker=worker,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        routed_ns=routed,
        first_token_ns=first,
        ended_ns=ended,
        reason=reason,
        code=code,
        api_key=api_key,
        origin=origin,
        earlier_workers=earlier,
        adapter=adapter,
        files=files,
        asked=_text(words[SUMMARY_WORDS]) if len(words) > SUMMARY_WORDS else "",
        reasoning_tokens=reasoning,
    )


def _text(word: str) -> str:
    """Inverse of ``_word``."""
    return "" if word == "-" else unquote(word)


class Criteria(msgspec.Struct, frozen=True):
    """The filters of a list of requests; empty or 0: no filter.

    Attributes:
        since_ns, until_ns: Unix time between which it was accepted.
        worker: id of one of its workers, or the beginning of it.
        lost: it lost a worker.
        code: the code of a failure; "any" for all failures.
        models: it ran on one of these.
        api_key: the public part of its key.
        min_ms, min_ttft_ms: least time from acceptance to the end, and to the first token.
        at_ns: it was unfinished at this time.
    """

    since_ns: int = 0
    until_ns: int = 0
    model: str = ""
    tenant: str = ""
    worker: str = ""
    user: str = ""
    states: frozenset[str] = frozenset()
    code: str = ""
    min_ms: float = 0.0
    min_ttft_ms: float = 0.0
    models: frozenset[str] = frozenset()
    api_key: str = ""
    lost: bool = False
    at_ns: int = 0

    @property
    def ended_since_ns(self) -> int:
        """Requests that ended before this time are not wanted; 0: all are."""
        return max(self.since_ns, self.at_ns)

    def accepts(self, summary: RequestSummary) -> bool:
        """Whether a list with these criteria shows this request."""
        return (
            not summary.origin
            and summary.created_ns >= self.since_ns
            and (not self.until_ns or summary.created_ns < self.until_ns)
            and (not self.at_ns or (summary.created_ns <= self.at_ns and not 0 < summary.ended_ns < self.at_ns))
            and self.model in ("", summary.model)
            and (not self.models or (summary.adapter.partition("@")[0] or summary.model) in self.models)
            and self.tenant in ("", summary.tenant)
            and self._ran_on(summary)
            and (not self.lost or bool(summary.lost_workers))
            and self.user in ("", summary.user)
            and self.api_key in ("", summary.api_key)
            and (not self.states or summary.state in self.states)
            and (not self.code or summary.code == self.code or (self.code == "any" and bool(summary.code)))
            and (summary.duration_ms or 0.0) >= self.min_ms
            and (summary.ttft_ms or 0.0) >= self.min_ttft_ms
        )

    def _ran_on(self, summary: RequestSummary) -> bool:
        if summary.worker.startswith(self.worker):
            return True
        return any(each.worker.startswith(self.worker) for each in summary.earlier_workers)
