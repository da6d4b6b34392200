"""Streams chat completions from an OpenAI-compatible server: the conversation sent, and the answer by events.

Servers differ in what they call thoughts: ``reasoning_content`` and ``reasoning`` are both read.
"""

import asyncio
import base64
import mimetypes
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpcore2
import msgspec

from penstock.infra.nats_server.datadir import write_private

MAX_EVENT_BYTES = 8 << 20
MAX_CHARS = 16 << 20  # of text, thoughts and arguments together: some 4 million tokens


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_read_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamedToolCall(msgspec.Struct):
    """A tool call. ``arguments``: JSON, as far as it has come."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class AnswerDelta(NamedTuple):
    """What one event adds; "": nothing of this kind."""

    text: str = ""
    thought: str = ""


class StreamedAnswer:
    """
    Attributes:
        finish: why it ended; "": it has not.
        last_event: id of the last event, after which a broken stream is resumed; "": the server sends none.
        prompt_tokens, tokens: as the server counts them; 0: it does not say.
    """

    def __init__(self) -> None:
        self.text = self.thoughts = ""
        self.calls: list[StreamedToolCall] = []
        self.finish = ""
        self.request_id = ""
        self.last_event = ""
        self.prompt_tokens = self.tokens = 0
        self.complete = False
        self._left = b""
        self._chars = 0

    def feed(self, data: bytes) -> Iterator[AnswerDelta]:
        """Bytes of the stream, in pieces of any length; yields what they add, also before an error in them.

        Raises:
            ValueError: the server reports an error, or this is not such a stream.
        """
        *events, self._left = (self._left + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._left) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the answer is larger than {MAX_EVENT_BYTES >> 20} MiB")
        for event in events:
            yield from self._event(event)

    def restart(self) -> None:
        """The stream begins again after ``last_event``."""
        self._left = b""

    def _event(self, event: bytes) -> list[AnswerDelta]:
        id, payload = "", b""
        for line in event.split(b"\n"):
            name, _, value = line.partition(b":")
            if name == b"id":
                id = value.strip().decode(errors="replace")
            elif name == b"data":
                payload += value.strip()
        if not payload:
            return []
        if payload == b"[DONE]":
            self.complete = True
            return []
        try:
            chunk = _read_chunk(payload)
        except msgspec.MsgspecError as error:
            raise ValueError(f"the answer is not a stream of chat completion chunks: {error}") from error
        if chunk.error is not None:
            raise ValueError(chunk.error.message or "the server ended the answer with an error")
        self.request_id = chunk.id.removeprefix("chatcmpl-") or self.request_id
        self.last_event = id or self.last_event
        if chunk.usage is not None:
            self.prompt_tokens, self.tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        return [part for choice in chunk.choices if (part := self._choice(choice)) is not None]

    def _choice(self, choice: _Choice) -> AnswerDelta | None:
        self.finish = choice.finish_reason or self.finish
        delta = choice.delta
        if delta is None:
            return None
        for call in delta.tool_calls or ():
            self._call(call)
        text, thought = delta.content or "", delta.reasoning_content or delta.reasoning or ""
        self._count(text, thought)
        self.text += text
        self.thoughts += thought
        return AnswerDelta(text, thought) if text or thought else None

    def _count(self, *texts: str) -> None:
        self._chars += sum(map(len, texts))
        if self._chars > MAX_CHARS:
            raise ValueError(f"the answer is longer than {MAX_CHARS >> 20} Mi characters; it ends here")

    def _call(self, delta: _ToolCall) -> None:
        index = max(0, min(delta.index, 127))
        while len(self.calls) <= index:
            self.calls.append(StreamedToolCall())
        call = self.calls[index]
        call.id = delta.id or call.id
        if delta.function is not None:
            self._count(delta.function.name or "", delta.function.arguments or "")
            call.name += delta.function.name or ""
            call.arguments += delta.function.arguments or ""


IMAGE_BYTES = 20 << 20  # of one image or video file
VIDEO_NAMES = (".mp4", ".mov", ".webm", ".mkv")
Message = dict[str, Any]


class Conversation(msgspec.Struct):
    """
    Attributes:
        model: "": the server's first.
    """

    messages: list[Message] = []
    model: str = ""

    @property
    def system(self) -> str:
        first = self.messages[0] if self.messages else {}
        return str(first.get("content", "")) if first.get("role") == "system" else ""

    def set_system(self, text: str) -> None:
        """Replace the system message; "": remove it."""
        if self.system:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def ask(self, text: str, images: list[str]) -> None:
        """Add a question.

        Args:
            images: URLs of images and videos, data URLs among them.
        """
        content: Any = text
        if images:
            kinds = ["video_url" if _is_video(url) else "image_url" for url in images]
            media = [{"type": kind, kind: {"url": url}} for kind, url in zip(kinds, images, strict=True)]
            content = [*media, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})

    def answer(self, answer: StreamedAnswer) -> None:
        """Add what the model has said."""
        message: Message = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        self.messages.append(message)

    def tool_result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def take_back(self) -> bool:
        """Remove the last question and all that followed; False: there is none."""
        asked = [at for at, message in enumerate(self.messages) if message.get("role") == "user"]
        if not asked:
            return False
        del self.messages[asked[-1] :]
        return True

    def clear(self) -> None:
        """Keep the system message only."""
        self.messages = self.messages[:1] if self.system else []


def save(conversation: Conversation, file: Path) -> None:
    """Write a conversation, readable by its owner only.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, msgspec.json.format(msgspec.json.encode(conversation), indent=2).decode() + "\n")


def load(file: Path) -> Conversation:
    """Read a saved conversation.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Conversation)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is not a saved conversation: {error}") from error


def image_url(source: str) -> str:
    """An image or video for ``ask``: a URL as it is, a file as a data URL.

    Raises:
        ValueError: the file cannot be read, is too large, or no image or video by its name.
    """
    if source.startswith(("http://", "https://", "data:")):
        return source
    file = Path(source).expanduser()
    kind = "video/mp4" if _is_video(file.name) else mimetypes.guess_type(file.name)[0]
    if kind is None or not kind.startswith(("image/", "video/")):
        raise ValueError(
            f"{source} is not an image or video: its name should end in .png, .jpg, .webp or .gif, or in "
            f"{', '.join(VIDEO_NAMES)}"
        )
    try:
        size = file.stat().st_size
        if size > IMAGE_BYTES:
            raise ValueError(f"{source} has {size:,} bytes; the limit is {IMAGE_BYTES:,}")
        return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
    except OSError as error:
        raise ValueError(f"image {source}: {error.strerror or error}") from error


def _is_video(url: str) -> bool:
    return url.startswith("data:video/") or url.partition("?")[0].lower().endswith(VIDEO_NAMES)


CONNECT_S = 10.0
SILENCE_S = 600.0  # between two pieces of an answer: a long prompt may wait for a worker
RESUME_S = 60.0  # for which a broken stream is asked for again
RESUME_PAUSE_S = 0.5
ERROR_BYTES = 65_536
BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError)


class ServerRefused(ValueError):
    """The server answered with an error."""


class ChatClient:
    """
    Args:
        url: of the server, with or without /v1.
        key: bearer token; "": none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self._base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url}: expected http://HOST:PORT")
        self._headers = [(b"Content-Type", b"application/json"), (b"Host", parts.netloc.rpartition("@")[2].encode())]
        if key:
            self._headers.append((b"Authorization", f"Bearer {key}".encode()))
        self._pool = httpcore2.AsyncConnectionPool(max_connections=2)

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def models(self) -> list[str]:
        """Names of the models that are served.

        Raises:
            ServerRefused: the server refuses to say.
            ValueError: it cannot be reached, or is none.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                response = await self._pool.request("GET", f"{self._base}/v1/models", headers=self._headers)
        except (*BROKEN, TimeoutError) as error:
            raise ValueError(f"no answer from {self._base}: {error or 'timeout'}") from error
        if response.status != 200:
            raise ServerRefused(message_of(response.status, response.content))
        try:
            return [str(each["id"]) for each in msgspec.json.decode(response.content)["data"]]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ValueError(f"{self._base} is not an OpenAI-compatible server: /v1/models is not a list") from error

    async def ask(self, body: dict[str, Any], answer: StreamedAnswer) -> AsyncGenerator[AnswerDelta]:
        """Ask for a chat completion; ``answer`` grows with what is yielded.

        A stream that breaks is continued, if the server numbers its events and keeps answers, as Penstock does.

        Raises:
            ServerRefused: the server refuses the request.
            ValueError: the server reports an error, or cannot be reached.
        """
        content = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        request = "POST", f"{self._base}/v1/chat/completions", self._headers, content
        deadline = 0.0
        loop = asyncio.get_running_loop()
        while not answer.complete:
            before = answer.last_event
            try:
                async with aclosing(self._stream(*request, answer)) as parts:
                    async for part in parts:
                        yield part
                if answer.complete or answer.finish:
                    return
                broken: Exception = ValueError("the connection was closed before the answer's end")
            except BROKEN as error:
                broken = error
            if not answer.last_event:
                raise ValueError(f"{self._base}: {broken or type(broken).__name__}") from broken
            if answer.last_event != before or not deadline:
                deadline = loop.time() + RESUME_S
            if loop.time() > deadline:
                raise ValueError(f"the answer broke off, and cannot be continued: {broken}") from broken
            await asyncio.sleep(RESUME_PAUSE_S)
            answer.restart()
            headers = [*self._headers, (b"Last-Event-ID", answer.last_event.encode())]
            request = "GET", f"{self._base}/v1/requests/{answer.request_id}/stream", headers, b""

    async def _stream(
        self, method: str, url: str, headers: list[tuple[bytes, bytes]], content: bytes, answer: StreamedAnswer
    ) -> AsyncGenerator[AnswerDelta]:
        limits = {"timeout": {"connect": CONNECT_S, "read": SILENCE_S, "write": CONNECT_S, "pool": CONNECT_S}}
        async with self._pool.stream(method, url, headers=headers, content=content, extensions=limits) as response:
            if response.status != 200:
                data = b""
                async for piece in response.aiter_stream():
                    data += piece
                    if len(data) > ERROR_BYTES:
                        break
                raise ServerRefused(message_of(response.status, data[:ERROR_BYTES]))
            async for piece in response.aiter_stream():
                for part in answer.feed(piece):
                    yield part


def message_of(status: int, content: bytes) -> str:
    """An error as the server words it."""
    hint = " (here: --key KEY, or $OPENAI_API_KEY)" if status == 401 else ""
    try:
        error = msgspec.json.decode(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error) + hint
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"the server answered {status}: {content[:200].decode(errors='replace')}"
