"""A request as a body for ``/v1/completions``, and the streamed answer as a ``Run``. Pure."""

from typing import Any

import msgspec

from penstock.log.export.recording import Run
from penstock.schemas.done import Done, Outcome, Timings, Usage
from penstock.schemas.requests import CONSTRAINT_MARKS, Constraint, GenerateRequest
from penstock.schemas.wire import pack_tokens, unpack_tokens

_STANDARD = ("temperature", "top_p", "seed")  # always sent: servers have other defaults
_EXTENSIONS = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
MAX_EVENT_BYTES = 8 << 20


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_read_event = msgspec.json.Decoder(_Event).decode


def body_of(request: GenerateRequest, model: str) -> bytes:
    """The body that asks for the same tokens. Extensions with their default value are left out."""
    sampling, stop = request.sampling, request.stop
    defaults = type(sampling)()
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(unpack_tokens(request.prompt)),
        "max_tokens": stop.max_tokens,
        "n": request.n,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # vLLM's; servers that do not have it ignore it
    }
    for name in (*_STANDARD, *_EXTENSIONS):
        value = getattr(sampling, name)
        if name in _STANDARD or value != getattr(defaults, name):
            body[name] = value
    for field, value in (
        ("logit_bias", {str(token): bias for token, bias in sampling.logit_bias.items()}),
        ("logprobs", sampling.logprobs),
        ("stop", list(stop.strings)),
        ("stop_token_ids", list(stop.token_ids)),
        ("min_tokens", stop.min_tokens),
        ("ignore_eos", stop.ignore_eos),
        ("include_stop_str_in_output", request.stops_shown),
    ):
        if value:
            body[field] = value
    if request.constraint is not None:
        body["structured_outputs"] = _structured(request.constraint)
    return msgspec.json.encode(body)


def _structured(constraint: Constraint) -> dict[str, Any]:
    """A constraint as vLLM's option."""
    kind = "json" if constraint.kind == "json_schema" else constraint.kind
    return {kind: msgspec.json.decode(constraint.text) if kind in ("json", "choice") else constraint.text}


def unsupported(request: GenerateRequest) -> str:
    """Why a request cannot be asked over HTTP; "": it can."""
    if request.constraint is not None and request.constraint.kind == "lark":
        return "with tool calls or reasoning that a grammar keeps"
    if request.media:
        return "with media, which HTTP takes in chat messages only"
    if request.stop.strings and request.parsing is not None:
        return "with stop strings that count in the content only, which the text of a completion does not know apart"
    named = [each for each in request.sampling.logits_processors if each.name not in CONSTRAINT_MARKS]
    return "with logits processors, which are registered by name" if named else ""


class HttpAnswer:
    """One streamed answer.

    Attributes:
        name: the server's id of it.
        texts: of each choice.
        exact: the server sends token ids.
    """

    def __init__(self, request: GenerateRequest, created_ns: int) -> None:
        self._request = request
        self._created_ns = created_ns
        self._first_ns = self._ended_ns = 0
        self._tokens: list[list[int]] = [[] for _ in range(request.n)]
        self._finish: list[tuple[str, str | int | None]] = [("", None)] * request.n
        self._stored: dict[int, list[tuple[int, int]]] = {}
        self._usage = Usage()
        self._code = self._message = ""
        self.name = ""
        self._buffer = b""
        self.texts = [""] * request.n
        self.exact = False

    def feed(self, data: bytes, now_ns: int) -> None:
        """Add bytes of the event stream.

        Raises:
            ValueError: they are not an event stream.
        """
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
                try:
                    self._event(_read_event(text), now_ns)
                except msgspec.MsgspecError as error:
                    raise ValueError(f"an event that cannot be read: {error}") from error

    def _event(self, event: _Event, now_ns: int) -> None:
        self.name = self.name or event.id
        if event.usage is not None:
            usage, details = event.usage, event.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else 0
            self._usage = Usage(usage.prompt_tokens, usage.completion_tokens, cached)
        if event.error is not None:
            self.fail(str(event.error.code or event.error.type or "error"), event.error.message, now_ns)
        for choice in event.choices:
            if choice.index >= len(self.texts):
                continue
            count = len(choice.token_ids or ()) or bool(choice.text)
            if choice.token_ids:
                self.exact = True
                self._tokens[choice.index] += choice.token_ids
            self.texts[choice.index] += choice.text
            if count:
                self._first_ns = self._first_ns or now_ns
                self._stored.setdefault(choice.index, []).append((now_ns, count))
            if choice.finish_reason:
                self._finish[choice.index] = choice.finish_reason, choice.stop_reason

    def fail(self, code: str, message: str, now_ns: int) -> None:
        self._code, self._message, self._ended_ns = code, message[:500], now_ns

    def end(self, now_ns: int) -> None:
        """The stream has ended."""
        self._ended_ns = self._ended_ns or now_ns
        if not self._code and not all(reason for reason, _ in self._finish):
            self._code, self._message = "incomplete", "the stream ended before the answer"

    def run(self, name: str) -> Run:
        """The answer as a ``Run``, as if it had been read from a log. Tokens are empty unless ``exact``."""
        choices = tuple(
            Outcome(pack_tokens(tokens), reason, stop)
            for tokens, (reason, stop) in zip(self._tokens, self._finish, strict=True)
        )
        times = Timings(self._created_ns, 0, 0, self._first_ns, self._ended_ns)
        done = Done(name, self._request.model, 1, "", choices, self._usage, times, self._code, self._message)
        return Run(name, self._request, done, 1, (), self._stored)
