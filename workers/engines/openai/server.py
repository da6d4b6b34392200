"""The shell of engine "openai": finds out what the server can do, asks it, and follows its answers.

A server that refuses because it is busy (429, 503) is asked again when it says, and gets fewer at once
(``ConcurrencyWindow``). A connection that breaks is opened again, and the answer continues after what came: the server
computes the rest of it from the prompt and what was sent. If the server itself is gone, the engine has failed: its
worker gives all requests back to routers, which have other workers continue them in the same way.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import structlog
from tokenizers import Tokenizer

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.process.sockets import is_loopback
from penstock.schemas.errors import Code
from penstock.schemas.fleet import AUTO
from penstock.schemas.kv import KvEvent
from penstock.schemas.requests import CARRIED_CHAT
from penstock.workers.engines.engine_protocol import EngineAway, EngineError, EngineInfo, SequenceRequest
from penstock.workers.engines.external.engine import BlockCounts, EngineAdapter, ExternalEngine, Slots
from penstock.workers.engines.external.runtime import EngineRuntime, LoopThread
from penstock.workers.engines.external.sequences import ActiveSequence, Follower, SequenceUpdate, Token
from penstock.workers.engines.openai import chat
from penstock.workers.engines.openai.protocol import (
    CHAT_OPTIONAL,
    OPTIONAL,
    BadAnswer,
    CompletionReader,
    ConcurrencyWindow,
    ServerAbilities,
    body_of,
    check,
)

log = structlog.get_logger("engine")

COMPLETIONS, CHATS = "completions", "chat/completions"
_OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "probe", "strict": True, "schema": _OBJECT}}
LEAST_TOKENS = 16  # that a model which thinks needs to answer at all
KEY_VARIABLE = "PENSTOCK_URL_KEY"
CONNECT_S = 10.0
SILENT_S = 600.0  # between two pieces of an answer, and before the first: the server has a queue of its own
ANSWERS_S = 5.0  # within which a server that is there lists its models
COUNTS_S = 5.0  # for a server's counts to come after an answer's end
PROBE_S = 30.0  # within which one that works answers a question of one token
TRIES = 3  # of a connection that breaks without a token in between
MOST_DIGITS = 10  # of a Retry-After in seconds
OF_REQUESTS = (400, 413, 422)  # statuses by which a server refuses what it was sent, and not who asks it or where
MOST_EVENT_BYTES = 1 << 20  # one event has a few tokens
MOST_ANSWER_BYTES = 16 << 20  # of what is not a stream of events: the list of models, and answers of few tokens
TURN_S = 0.05  # between two looks whether the server may be asked, of those that it refused
BUSY = "the server behind this worker is busy, and asks to wait for {:.1f} s"
FAILS = "the server fails on this request, and is there; the worker's log has its words"
MOST_WORDS = 300  # bytes of an error that are read and passed on
BUSY_S, LONGEST_BUSY_S = 1.0, 300.0  # before a busy server is asked again: where it does not say, and at most
BLOCKS = 16384  # KV blocks that routers take its cache to have, unless --kv-blocks says it
PROBE = "The quick brown fox, 1234 times: über naïve 東京 \n\tdef f(x): return x"

_json = msgspec.json.encode
_decode = msgspec.json.decode


class CompletionRefused(Exception):
    """The server refuses a request as it is.

    Args:
        said: its words.
    """

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


class ServerBusy(Exception):
    """The server takes no further request now."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"busy for {wait_s:g} s")
        self.wait_s = wait_s


class ServerLost(Exception):
    """The server has failed, or is not there."""


class ServerFault(ServerLost):
    """The server is there, and says that it has failed."""


class AnswerAborted(ServerLost):
    """The server is there, and has given up this answer."""


def _seconds_in(retry_after: str) -> float:
    """What a Retry-After asks for, as seconds or as a date; 0: nothing that can be read."""
    if retry_after.isdecimal():
        return float(retry_after) if len(retry_after) < MOST_DIGITS else 0.0
    with contextlib.suppress(ValueError):
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    return 0.0


class CompletionServer:
    """One server, asked from one event loop.

    Args:
        url: a user and a password in it are sent, and not shown in ``url``.
    Raises:
        BadArguments: it is not a URL.
    """

    def __init__(self, url: str, key: str) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise BadArguments([f"--url: {error}"]) from error
        base = str(parsed.copy_with(userinfo=b"")).rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.http = httpx.AsyncClient(
            headers=headers,
            auth=(parsed.username, parsed.password) if parsed.userinfo else None,
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=not is_loopback(parsed.host),  # no proxy (HTTP_PROXY) reaches a server of this machine
        )

    async def models(self) -> dict[str, int]:
        """The models' names, each with its longest sequence; 0: it does not say.

        Raises:
            ServerLost: it does not answer.
        """
        try:
            answer, content = await self._whole("GET", "models", ANSWERS_S)
            answer.raise_for_status()
            return {str(each["id"]): int(each.get("max_model_len") or 0) for each in _decode(content)["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerLost(f"{self.url}/models: {error!r}") from error

    async def _whole(self, method: str, path: str, within_s: float, body: bytes = b"") -> tuple[httpx.Response, bytes]:
        """
        Raises:
            ServerLost: it has not sent all of its answer in time, or too much.
        """
        content, ask = bytearray(), self.http.stream(method, f"{self.url}/{path}", content=body or None)
        try:
            async with asyncio.timeout(within_s), ask as answer:
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > MOST_ANSWER_BYTES:
                        raise ServerLost(f"{self.url}/{path} answers with more than {MOST_ANSWER_BYTES >> 20} MiB")
                return answer, bytes(content)
        except TimeoutError as error:
            raise ServerLost(f"{self.url}/{path} has not answered within {within_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServerLost(f"{self.url}/{path}: {error!r}") from error

    async def complete(self, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        """A whole answer; of one that is streamed, nothing.

        Raises:
            CompletionRefused, ServerBusy, ServerLost: there is none.
        """
        answer, content = await self._whole("POST", path, SILENT_S, _json(body))
        _raise(answer, content)
        if body.get("stream"):
            return {}
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ServerLost(f"{self.url}/{path} answers with no completion: {error}") from error


def _raise(answer: httpx.Response, content: bytes) -> None:
    """
    Raises:
        CompletionRefused, ServerBusy, ServerLost: as the status says.
    """
    if answer.status_code < 300:
        return
    said = content[:MOST_WORDS].decode(errors="replace")
    if answer.status_code in (429, 503):
        wait_s = _seconds_in(answer.headers.get("retry-after", ""))
        raise ServerBusy(min(wait_s, LONGEST_BUSY_S) if wait_s > 0 else BUSY_S)
    if answer.status_code >= 500:
        raise ServerFault(f"{answer.status_code}: {said}")
    raise CompletionRefused(answer.status_code, said)


async def abilities_of(server: CompletionServer, wanted: str, model: ModelDir, api: str = "auto") -> ServerAbilities:
    """
    Args:
        wanted: the model's name there; "": the only one, or the one that is named as here.
        api: "completions", "chat", or "auto": completions, else chats.
    Raises:
        BadArguments: the server has not one such model, or not this API.
        ServerBusy, ServerLost: it does not answer now.
    """
    there = await server.models()
    name = wanted or (next(iter(there)) if len(there) == 1 else model.name)
    if name not in there and (there or not wanted):  # some list none
        raise BadArguments([f"--url-model {name}: {server.url} has {', '.join(sorted(there)) or 'no model'}"])
    if api == "chat":
        return await chat_abilities_of(server, name, there.get(name, 0))
    try:
        probe = await server.complete(model=name, prompt=PROBE, max_tokens=1, temperature=0.0)
    except CompletionRefused as error:
        problem = f"--url: {server.url}/{COMPLETIONS} takes no prompt ({error})"
        if api != "auto" or error.status in (401, 403):
            raise BadArguments([problem]) from error
        log.info("server_has_chats_only", url=server.url, reason=str(error))
        try:
            return await chat_abilities_of(server, name, there.get(name, 0))
        except BadArguments as neither:
            raise BadArguments([problem, *neither.problems]) from error
    counted = int((probe.get("usage") or {}).get("prompt_tokens") or 0)
    encoded = [len(model.tokenizer.encode(PROBE, add_special_tokens=special).ids) for special in (True, False)]
    takes_ids, sends_ids, ids = counted in encoded, False, model.tokenizer.encode(PROBE).ids
    if takes_ids:
        try:
            answer = await server.complete(model=name, prompt=ids, max_tokens=1, temperature=0.0, return_token_ids=True)
            sends_ids = any(each.get("token_ids") for each in answer.get("choices") or ())
        except (CompletionRefused, ServerFault):
            try:  # it may not know the option; some servers fail on what they do not know
                await server.complete(model=name, prompt=ids, max_tokens=1, temperature=0.0)
            except (CompletionRefused, ServerFault):
                takes_ids = False
    else:
        log.warning(
            "prompts_sent_as_text", counted=counted, encoded=encoded[0], reason="the server counts other tokens"
        )

    async def takes(**options: Any) -> bool:
        try:
            await server.complete(model=name, prompt=PROBE, max_tokens=1, **({"temperature": 0.5} | options))
        except (CompletionRefused, ServerFault):
            return False
        return True

    takes_salt = await takes(cache_salt="probe")
    refuses = frozenset[str]()
    if not await takes(**OPTIONAL):
        refuses = frozenset([option for option, value in OPTIONAL.items() if not await takes(**{option: value})])
        log.warning("options_left_out", options=sorted(refuses), reason="the server refuses them")
    return ServerAbilities(name, takes_ids, sends_ids, there.get(name, 0), takes_salt, refuses)


async def chat_abilities_of(server: CompletionServer, name: str, max_model_len: int) -> ServerAbilities:
    """
    Args:
        name: of the model.
    Raises:
        BadArguments: it takes no chat.
        ServerBusy, ServerLost: it does not answer now.
    """
    question = {"role": "user", "content": "What is 3 - 2? Answer with one digit."}
    limit: dict[str, int] = {"max_tokens": 1}

    async def prompt_tokens(*messages: dict[str, str], **options: Any) -> int:
        answer = await server.complete(CHATS, model=name, messages=messages, **limit, **options)
        return int((answer.get("usage") or {}).get("prompt_tokens") or 0)

    async def takes(*messages: dict[str, str], **options: Any) -> int:
        """The tokens of the prompt, or -1 where they are not said; 0: it is refused."""
        try:
            return await prompt_tokens(*messages, **options) or -1
        except (CompletionRefused, ServerFault):  # some fail on what they do not know
            return 0

    try:
        answer = await prompt_tokens(question)
    except CompletionRefused as error:
        limit = {"max_completion_tokens": LEAST_TOKENS}  # its newer name, which newer models demand
        try:
            answer = await prompt_tokens(question)
        except CompletionRefused:
            raise BadArguments([f"--url: {server.url}/{CHATS} takes no chat ({error})"]) from error

    async def taken(options: dict[str, Any]) -> bool:
        return bool(await takes(question, **options, **({"stream": True} if "stream_options" in options else {})))

    async def applied() -> bool:
        """Whether an answer matches a schema: some servers pass over it."""
        try:
            found = await server.complete(
                CHATS, model=name, messages=[question], response_format=SCHEMA, **dict.fromkeys(limit, LEAST_TOKENS)
            )
            text = found["choices"][0]["message"].get("content") or "{"  # it may still think
        except (CompletionRefused, ServerFault):
            return False
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerLost(f"{server.url}/{CHATS} answers with no completion: {error!r}") from error
        return str(text).lstrip().startswith("{")

    refuses = frozenset[str]()
    if not await taken(dict(CHAT_OPTIONAL)):
        refuses = frozenset([option for option, value in CHAT_OPTIONAL.items() if not await taken({option: value})])
        log.warning("options_left_out", options=sorted(refuses), reason="the server refuses them")
    begun = {"role": "assistant", "content": "1"}
    how = chat.continues(answer, await takes(question, begun, **chat.BY_FLAGS), await takes(question, begun))
    return ServerAbilities(
        name, takes_ids=False, sends_ids=False, max_model_len=max_model_len, refuses=refuses, chat=True,
        takes_salt=await taken({"cache_salt": "probe"}), limit=next(iter(limit)), continues=how,
        schemas=await applied(),
    )  # fmt: skip


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of a stream's events, without the mark of its end. Only line feeds end a line: the text of an answer may
    hold the other separators of Unicode.

    Raises:
        BadAnswer: an event has more than ``MOST_EVENT_BYTES``.
    """
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                data = bytes(line[5:]).strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    yield data
        if len(rest) > MOST_EVENT_BYTES:
            raise BadAnswer(f"the server sent an event of more than {MOST_EVENT_BYTES} bytes")


def _waits(request: SequenceRequest, waited_s: float) -> bool:
    """Whether a request may have waited for so long, rather than run on another model."""
    return not request.falls_back or bool(request.generated) or not 0 < request.patience_s < waited_s


class OpenaiFollower(Follower[None, SequenceRequest]):
    """Asks the server for each sequence."""

    def __init__(
        self,
        runtime: EngineRuntime[None],
        info: EngineInfo,
        abilities: ServerAbilities,
        tokenizer: Tokenizer,
        window: ConcurrencyWindow,
    ) -> None:
        super().__init__(runtime)
        self._server: CompletionServer = runtime.llm
        self._info = info
        self._abilities = abilities
        self._tokenizer = tokenizer
        self._window = window
        self._running = 0
        self._received = 0  # tokens, of all sequences
        self._shown = window.size

    async def _follow(self, sequence: ActiveSequence[SequenceRequest]) -> None:
        """Ask, and ask again after what came, until the sequence has ended."""
        said, tries, received, began = list(sequence.call.generated), 0, 0, time.monotonic()
        while True:
            before, reader = len(said), self._reader(sequence.call, said)
            try:
                while pause_s := self._pause_s():
                    if not _waits(sequence.call, time.monotonic() + pause_s - began):
                        self._fail(sequence, Code.overloaded, BUSY.format(pause_s))
                        return
                    await asyncio.sleep(pause_s)
                await self._ask(sequence, reader)
                return
            except ServerBusy as busy:
                self._window.overloaded(self._running, time.monotonic(), busy.wait_s)
                self._show_window()
            except CompletionRefused as error:
                self._refused(sequence, error)
                return
            except BadAnswer as error:
                self._fail(sequence, Code.engine_error, str(error))
                return
            except (ServerLost, httpx.HTTPError) as error:
                if not tries or len(reader.said) > before:
                    tries, received = 0, self._received
                tries += 1
                log.warning("server_connection_lost", error=repr(error), tokens=len(reader.said), tries=tries)
                there = await self._is_there()
                lost_to_others = sequence.call.falls_back and not reader.said and isinstance(error, ServerFault)
                fails_on_this = there and tries >= TRIES
                if fails_on_this and self._received == received and not isinstance(error, AnswerAborted):
                    fails_on_this = await self._answers()
                if there and (lost_to_others or fails_on_this):
                    self._fail(sequence, Code.engine_error, FAILS)
                    return
                if tries >= TRIES or not there:
                    self.broken(EngineError(f"the server at {self._server.url} is gone: {error!r}"))
                    return
                await asyncio.sleep(BUSY_S)
            except Exception:  # else its client would wait for the deadline
                self._fail(sequence, Code.engine_error, "the worker could not ask its server; its log has the error")
                raise  # into the log
            said = reader.said
            if said and self._abilities.chat and not chat.can_continue(said, self._abilities, self._tokenizer):
                self._fail(sequence, Code.worker_lost, chat.LOST.format(len(said)))
                return

    def _pause_s(self) -> float:
        """How long to wait before the server is asked; 0: it may be asked now."""
        pause_s = self._window.pause_s(time.monotonic())
        return pause_s or (TURN_S if self._running >= self._window.size else 0.0)

    def _refused(self, sequence: ActiveSequence[SequenceRequest], error: CompletionRefused) -> None:
        if error.status in OF_REQUESTS:
            self._fail(sequence, Code.invalid_request, f"the server refuses the request with {error}")
            return
        log.error("server_refuses", error=str(error), action="check --url, --url-model and the server's key")
        said = f"the server behind this worker answers {error.status} to it; the worker's log has the server's words"
        self._fail(sequence, Code.engine_error, said)

    def _reader(self, request: SequenceRequest, said: Seq[int]) -> CompletionReader | chat.ChatReader:
        of = chat.ChatReader if self._abilities.chat else CompletionReader
        return of(request, said, self._abilities, self._info, self._tokenizer)

    async def _ask(self, sequence: ActiveSequence[SequenceRequest], reader: CompletionReader | chat.ChatReader) -> None:
        if self._abilities.chat:
            path, body = CHATS, chat.chat_body_of(sequence.call, reader.said, self._abilities, self._tokenizer)
        else:
            path = COMPLETIONS
            body = body_of(sequence.call, reader.said, self._abilities, self._info, self._tokenizer)
        ask = self._server.http.stream("POST", f"{self._server.url}/{path}", content=_json(body))
        self._running += 1
        began = time.monotonic()
        try:
            async with ask as answer:
                if answer.status_code >= 300:
                    words = b""
                    async for piece in answer.aiter_bytes():
                        words += piece
                        if len(words) >= MOST_WORDS:
                            break
                    _raise(answer, words)
                self._report(sequence, reader, [])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None) as bound:
                        async for data in events(answer.aiter_bytes()):
                            waited = not self._on_chunk(sequence, reader, data)
                            if began and not waited:
                                now, length = time.monotonic(), sequence.prompt_len + len(reader.said)
                                self._window.first_token(now - began, length, self._running, now)
                                self._show_window()
                                began = 0.0
                            if reader.finished:
                                return
                            if reader.aborted:
                                raise AnswerAborted(f"it ended the answer with {reader.aborted!r}")
                            if reader.waits and bound.when() is None:
                                bound.reschedule(asyncio.get_running_loop().time() + COUNTS_S)
                if new := reader.end():
                    self._report(sequence, reader, new)
                    return
        finally:
            self._running -= 1
        raise ServerLost("the answer ended without a reason")

    def _on_chunk(
        self, sequence: ActiveSequence[SequenceRequest], reader: CompletionReader | chat.ChatReader, data: bytes
    ) -> bool:
        """Whether it has tokens."""
        try:
            chunk = _decode(data)
            failure = chunk.get("error")
            new = [] if failure else reader.take(chunk)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            shown = data[:80].decode(errors="replace")
            raise BadAnswer(f"the server sent {shown!r} instead of an event") from error
        if failure:
            raise ServerLost(str(failure)[:MOST_WORDS])
        self._received += len(new)
        if new:
            self._report(sequence, reader, new)
        return bool(new)

    def _report(
        self, sequence: ActiveSequence[SequenceRequest], reader: CompletionReader | chat.ChatReader, new: list[Token]
    ) -> None:
        """Note that the server has the sequence, and new tokens."""
        if not sequence.cancelled:
            self._emit(
                SequenceUpdate(sequence, sequence.first_output(0), new, usage=reader.usage if reader.finished else None)
            )

    async def _is_there(self) -> bool:
        for _ in range(2):  # the first may meet a connection that the server has just closed
            with contextlib.suppress(ServerLost):
                await self._server.models()
                return True
        return False

    async def _answers(self) -> bool:
        """Whether the server answers a question of one token, so that what it fails on is the request."""
        of, question = self._abilities, [{"role": "user", "content": "1"}]
        asked = {"messages": question, of.limit: LEAST_TOKENS} if of.chat else {"prompt": "1", "max_tokens": 1}
        try:
            async with asyncio.timeout(PROBE_S):
                await self._server.complete(CHATS if of.chat else COMPLETIONS, model=of.model, **asked)
        except (CompletionRefused, ServerBusy):
            return True
        except (ServerLost, TimeoutError):
            return False
        return True

    def _show_window(self) -> None:
        if self._window.size != self._shown:
            self._shown = self._window.size
            self._emit(Slots(self._shown))


class UnknownBlocks:
    """Implements ``external.engine.KnownBlocks``: servers say nothing of their blocks."""

    def __init__(self, total: int) -> None:
        self._total = total

    def take(self, event: Any) -> dict[int, list[KvEvent]]:
        return {}

    def counts(self, *, active: bool, pinned: int) -> BlockCounts:
        return BlockCounts(0, 0, self._total, 0)

    def dump(self, rank: int) -> list[KvEvent]:
        return []


def adapter_of(
    info: EngineInfo,
    runtime: EngineRuntime[None],
    abilities: ServerAbilities,
    tokenizer: Tokenizer,
    window: ConcurrencyWindow,
) -> EngineAdapter[SequenceRequest]:
    def accept(request: SequenceRequest, lora: Any) -> ActiveSequence[SequenceRequest]:
        if abilities.chat:
            chat.check_chat(request, info, abilities, tokenizer)
        else:
            check(request, info, abilities)
        return ActiveSequence(request, request)

    follower = OpenaiFollower(runtime, info, abilities, tokenizer, window)
    return EngineAdapter("the server", accept, follower, UnknownBlocks(info.total_blocks))


def key_of(settings: WorkerSettings) -> str:
    """The key that the server wants: of a file or a variable; "": none.

    Raises:
        BadArguments: the file cannot be read, or no header can have what is in it.
    """
    source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "")
    if settings.url_key_file:
        source = f"--url-key-file {settings.url_key_file}"
        try:
            key = Path(settings.url_key_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadArguments([f"--url-key-file: {error}"]) from error
    key = key.strip()
    if not (key.isascii() and key.isprintable()):  # errors of headers would show it
        raise BadArguments([f"{source}: the key has other characters than printable ASCII, such as a line feed"])
    return key


def from_settings(settings: WorkerSettings, path: Path) -> ExternalEngine[SequenceRequest]:
    """
    Raises:
        BadArguments: the settings do not fit the server; one line per problem.
        EngineAway: the server does not answer.
        EngineError: it refuses what the worker needs.
        modeldir.ModelError: the directory cannot be used.
    """
    began = time.perf_counter()
    if not settings.url.startswith(("http://", "https://")):
        raise BadArguments(["--engine openai: name the server with --url, such as http://127.0.0.1:8000"])
    server, model = CompletionServer(settings.url, key_of(settings)), modeldir.load(path)
    with contextlib.ExitStack() as undo:
        loop = LoopThread("openai")
        undo.callback(loop.close)

        async def found() -> ServerAbilities:
            try:
                return await abilities_of(server, settings.url_model, model, settings.url_api)
            except BaseException:
                await server.http.aclose()
                raise

        try:
            abilities = loop.run(found(), SILENT_S)
        except CompletionRefused as error:
            raise EngineError(f"the server at {server.url} cannot be used: {error}") from error
        except (ServerBusy, ServerLost, TimeoutError) as error:  # it may be starting, too
            raise EngineAway(f"the server at {server.url} cannot be used: {error or 'it does not answer'}") from error
        undo.callback(lambda: loop.run(server.http.aclose(), CONNECT_S))
        longest = model.length.limit(settings.max_model_len)
        if abilities.chat and settings.max_model_len:  # the folder may be of another model
            longest = settings.max_model_len
        info = EngineInfo(
            name="openai",
            block_size=settings.block_size,
            total_blocks=settings.kv_blocks or max(BLOCKS, 2 * longest // settings.block_size),
            slots=settings.max_running,
            max_model_len=min(settings.max_model_len or longest, abilities.max_model_len or longest),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            kv_events=False,
            load_seconds=time.perf_counter() - began,
            max_batched_tokens=settings.max_batched_tokens,
            ignored_options=tuple(sorted(abilities.refuses - {"stream_options"})),
            logits_processors=(CARRIED_CHAT,) if abilities.chat else (),
        )
        window = ConcurrencyWindow(settings.max_running)
        runtime: EngineRuntime[None] = EngineRuntime(server, None, loop, undo.pop_all())
        tokenizer = model.tokenizer
        parsers = {"--reasoning-parser": settings.reasoning_parser, "--tool-call-parser": settings.tool_call_parser}
        abilities = abilities._replace(named=frozenset(flag for flag, name in parsers.items() if name != AUTO))
        if abilities.chat:  # the text of a special token in an answer is text
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.encode_special_tokens = True
            chat.check_marks(tokenizer)
        adapter = adapter_of(info, runtime, abilities, tokenizer, window)
    log.info("server_ready", url=server.url, **abilities._asdict())
    return ExternalEngine(info, runtime, adapter, slots=window.size)
