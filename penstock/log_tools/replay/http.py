"""Replays requests on an OpenAI-compatible server, which gets them as token ids for ``/v1/completions``.

Tokens are compared if the server sends them, otherwise texts. A request whose prompt a server made goes to
``/v1/chat/completions`` as the chat that it was; texts are compared, with the marks of thoughts and tool calls that the
recorded tokens have.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpcore2
import msgspec

from penstock.log_tools.export.recording import RecordedRun
from penstock.log_tools.replay.comparison import Changes, NamingInputs, compare, compare_texts
from penstock.log_tools.replay.nats import MAX_OPEN, PlannedReplay, plan_replay
from penstock.log_tools.replay.report import Replayed
from penstock.log_tools.requests.describe import Texts
from penstock.schemas.block_hashes import DEFAULT_BLOCK_SIZE
from penstock.schemas.done import Done, Outcome, Timings, Usage
from penstock.schemas.requests import MARKS, Constraint, GenerateRequest, Sampling
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
    delta: dict[str, Any] | None = None


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
    if request.chat:
        return _chat_of(request, model)
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


def _chat_of(request: GenerateRequest, model: str) -> bytes:
    """The chat as its client gave it, with the seed that the worker sent, and what was changed since."""
    from penstock.workers.engines.external.sampling import seed_of  # the engine takes a while to load
    from penstock.workers.engines.openai.protocol import SEEDS

    sampling, stop, defaults = request.sampling, request.stop, Sampling()
    body: dict[str, Any] = msgspec.json.decode(request.chat)
    for name in (*_STANDARD, *_EXTENSIONS, "logit_bias"):
        value = getattr(sampling, name)
        if name in body or value != getattr(defaults, name):
            body[name] = value
    if "max_tokens" in body:
        body["max_tokens"] = stop.max_tokens
    if stop.strings:
        body["stop"] = list(stop.strings)
    if request.n > 1:
        body["n"] = request.n
    body |= {"seed": seed_of(sampling.seed, 0, 0) & SEEDS}
    return msgspec.json.encode(body | {"model": model, "stream": True, "stream_options": {"include_usage": True}})


def _structured(constraint: Constraint) -> dict[str, Any]:
    """A constraint as vLLM's option."""
    kind = "json" if constraint.kind == "json_schema" else constraint.kind
    return {kind: msgspec.json.decode(constraint.text) if kind in ("json", "choice") else constraint.text}


def unsupported(request: GenerateRequest) -> str:
    """Why a request cannot be asked over HTTP; "": it can."""
    if request.chat:
        return ""
    if request.constraint is not None and request.constraint.kind == "lark":
        return "with tool calls or reasoning that a grammar keeps"
    if request.media:
        return "with media, which HTTP takes in chat messages only"
    if request.stop.strings and request.parsing is not None:
        return "with stop strings that count in the content only, which the text of a completion does not know apart"
    named = [each for each in request.sampling.logits_processors if each.name not in MARKS]
    return "with logits processors, which are registered by name" if named else ""


class _ChatAnswers:
    """The choices of a chat's answer, as the texts and ends that the engine would have recorded."""

    def __init__(self, count: int) -> None:
        from penstock.workers.engines.openai import chat, protocol

        self._texts = [chat.AnswerText() for _ in range(count)]
        self._ends, self._bad = chat.ENDS, protocol.BadAnswer

    def take(self, choice: _Choice) -> tuple[str, str | None]:
        text, reason = self._texts[choice.index], choice.finish_reason
        try:
            content = text.take(choice.delta or {})
        except (self._bad, AttributeError) as error:
            raise ValueError(f"an answer that cannot be read: {error}") from error
        return (content + text.close(), self._ends.get(reason, reason)) if reason else (content, None)


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
        self._chat = _ChatAnswers(request.n) if request.chat else None
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
            text, ids = choice.text, choice.token_ids or []
            reason = choice.finish_reason
            if self._chat is not None:  # the recorded tokens are not the server's
                text, reason = self._chat.take(choice)
                ids = []
            count = len(ids) or bool(text)
            if ids:
                self.exact = True
                self._tokens[choice.index] += ids
            self.texts[choice.index] += text
            if count:
                self._first_ns = self._first_ns or now_ns
                self._stored.setdefault(choice.index, []).append((now_ns, count))
            if reason:
                self._finish[choice.index] = reason, choice.stop_reason

    def fail(self, code: str, message: str, now_ns: int) -> None:
        self._code, self._message, self._ended_ns = code, message[:500], now_ns

    def end(self, now_ns: int) -> None:
        """The stream has ended."""
        self._ended_ns = self._ended_ns or now_ns
        if not self._code and not all(reason for reason, _ in self._finish):
            self._code, self._message = "incomplete", "the stream ended before the answer"

    def run(self, name: str) -> RecordedRun:
        """The answer as a ``RecordedRun``, as if it had been read from a log. Tokens are empty unless ``exact``."""
        choices = tuple(
            Outcome(pack_tokens(tokens), reason, stop)
            for tokens, (reason, stop) in zip(self._tokens, self._finish, strict=True)
        )
        times = Timings(self._created_ns, 0, 0, self._first_ns, self._ended_ns)
        done = Done(name, self._request.model, 1, "", choices, self._usage, times, self._code, self._message)
        return RecordedRun(name, self._request, done, 1, (), self._stored)


_FAILURES = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError, ValueError)
ERROR_BYTES = 65_536


class HttpReplay(NamedTuple):
    """Answers by recorded id. ``seconds``: from the first request to the last end."""

    answers: dict[str, HttpAnswer]
    seconds: float


class HttpSender:
    """
    Args:
        url: of the server, with or without /v1.
        key: bearer token; "": none.
        concurrency: requests, and connections, at a time.
        timeout_s: of one request.
    """

    def __init__(self, url: str, key: str, *, concurrency: int, timeout_s: float) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not urlsplit(base).hostname:
            raise ValueError(f"--target {url}: no host in it")
        self._url = f"{base}/v1"
        host = urlsplit(base).netloc.rpartition("@")[2]
        self._headers = [(b"Content-Type", b"application/json"), (b"Host", host.encode())]
        if key:
            self._headers.append((b"Authorization", f"Bearer {key}".encode()))
        self._room = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._timeout_s = timeout_s

    async def send(self, planned: Sequence[PlannedReplay]) -> HttpReplay:
        """Send all requests and wait for their answers."""
        answers: dict[str, HttpAnswer] = {}
        began = time.perf_counter()
        async with (
            httpcore2.AsyncConnectionPool(
                max_connections=self._concurrency, max_keepalive_connections=self._concurrency
            ) as pool,
            asyncio.TaskGroup() as group,
        ):
            for each in planned:
                if each.at_s:
                    await asyncio.sleep(max(0.0, began + each.at_s - time.perf_counter()))
                await self._room.acquire()
                now_ns = time.time_ns()
                request = each.make(each.recorded, now_ns)
                answer = answers[each.recorded] = HttpAnswer(request, now_ns)
                group.create_task(self._ask(pool, request, answer))
        return HttpReplay(answers, time.perf_counter() - began)

    async def _ask(self, pool: httpcore2.AsyncConnectionPool, request: GenerateRequest, answer: HttpAnswer) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                body = body_of(request, request.model)
                headers = [*self._headers, (b"X-Request-Id", request.client_request_id.encode())]
                url = f"{self._url}/{'chat/' if request.chat else ''}completions"
                async with pool.stream("POST", url, headers=headers, content=body) as response:
                    if response.status != 200:
                        refusal = (await response.aread())[:ERROR_BYTES].decode(errors="replace")
                        answer.fail(f"http_{response.status}", refusal, time.time_ns())
                        return
                    async for part in response.aiter_stream():
                        answer.feed(part, time.time_ns())
        except TimeoutError:
            answer.fail("timeout", f"no whole answer within {self._timeout_s:g} s", time.time_ns())
        except _FAILURES as error:
            answer.fail("connection", f"{type(error).__name__}: {error}", time.time_ns())
        finally:
            answer.end(time.time_ns())
            self._room.release()


async def replay_over_http(
    args: argparse.Namespace, runs: Sequence[RecordedRun], changes: Changes, speed: float
) -> Replayed:
    """Run recorded requests on the server at ``args.target``.

    Raises:
        ValueError: the URL has no host, or texts are to be compared and the model's tokenizer is not to be found.
    """
    concurrency = MAX_OPEN if speed else max(1, args.concurrency)
    sender = HttpSender(args.target, args.api_key, concurrency=concurrency, timeout_s=args.timeout_s)

    def inputs_of(request: GenerateRequest) -> NamingInputs:
        return NamingInputs(changes.model or request.model, "", DEFAULT_BLOCK_SIZE, "")

    sent = await sender.send(plan_replay(runs, changes, speed, inputs_of=inputs_of))
    texts = Texts(args.model_path)
    pairs, comparisons = [], []
    for run in runs:
        answer = sent.answers[run.id]
        again = answer.run(answer.name)
        assert run.done is not None
        pairs.append((run, again))
        if answer.exact or again.done is None or again.done.code:
            comparisons.append(compare(run, again))
        else:
            comparisons.append(compare_texts(run, again, _shown(run, texts), answer.texts))
    return Replayed(args.target, pairs, comparisons, sent.seconds)


def _shown(run: RecordedRun, texts: Texts) -> list[str]:
    """The texts as clients got them: without the stop string that ended them, unless the request included it."""
    assert run.done is not None
    assert run.request is not None
    outputs = texts.outputs(run.done)
    for index, choice in enumerate(run.done.choices):
        if isinstance(choice.stop, str) and not run.request.stops_shown:
            outputs[index] = outputs[index][: outputs[index].rfind(choice.stop)]
    return outputs
