"""A batch by itself: the lines of its input, what its log says of them, its files, and how both APIs show it. Pure.

Every line of the input has exactly one line in the output file or in the error file, whatever ends the batch.
"""

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

from penstock.gateway.apis.embeddings import EMBEDDINGS_PATH
from penstock.gateway.apis.messages.objects import MessageErrorBody, message_error
from penstock.gateway.base.chat_objects import error_body, serving_error
from penstock.gateway.base.event_stream import within_lines
from penstock.gateway.base.request_bodies import (
    BOM,
    CHAT,
    COMPLETION,
    MESSAGE,
    RESPONSE,
    decode_body,
    decode_json,
    invalid,
)
from penstock.schemas.batches import (
    BATCH,
    DAY_S,
    LONGEST_S,
    Batch,
    BatchMessage,
    BatchResults,
    BatchStatus,
    BatchTaken,
    LineError,
    LineResult,
    StoredFile,
)
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import EMBEDDING

ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    EMBEDDINGS_PATH: EMBEDDING,
}
MESSAGES_PATH = "/v1/messages"
RUN = {**ENDPOINTS, MESSAGES_PATH: MESSAGE}
MAX_LINES = 50_000
MAX_ERRORS = 100  # of an input, that are shown
MAX_CUSTOM_ID = 512  # characters
MAX_METADATA = 16
_SECONDS = {"h": 3600, "d": DAY_S}
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")

_json = msgspec.json.encode


class Line(NamedTuple):
    """A line of the input: its body is between these two places."""

    custom_id: str
    start: int
    end: int


class _Input(Struct):
    custom_id: str
    method: str
    url: str
    body: Raw


class _Prompts(Struct):
    prompt: Raw = Raw()
    stream: bool | None = None


_input = msgspec.json.Decoder(_Input).decode
_prompts = msgspec.json.Decoder(_Prompts).decode
_list = msgspec.json.Decoder(list[Raw]).decode


def read_input(data: bytes, endpoint: str) -> list[Line] | list[LineError]:
    """The lines of an input file, or what is wrong with it. Empty lines count as none.

    Args:
        endpoint: the path that each line must have.
    """
    lines: list[Line] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    start, number = len(BOM) if data.startswith(BOM) else 0, 0
    while start < len(data) and len(errors) < MAX_ERRORS:
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        text, at, start = data[start:end].strip(), start, end + 1
        number += 1
        if not text:
            continue
        try:
            line: _Input = decode_json(_input, text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            errors.append(LineError("invalid_json_line", f"{error}"[:400], number))
            continue
        if problem := _problem(line, endpoint, seen):
            errors.append(LineError(problem[0], problem[2], number, problem[1]))
            continue
        if len(lines) == MAX_LINES:
            return [LineError("too_many_lines", f"the input has more than {MAX_LINES:,} lines; make several batches")]
        seen.add(line.custom_id)
        lines.append(Line(line.custom_id, at, end))
    if not lines and not errors:
        return [LineError("empty_file", "the input file has no lines")]
    return errors or lines


def _problem(line: _Input, endpoint: str, seen: set[str]) -> tuple[str, str, str] | None:
    """Code, field and text."""
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        return "invalid_custom_id", "custom_id", f"custom_id needs 1 to {MAX_CUSTOM_ID} characters"
    if line.custom_id in seen:
        return "duplicate_custom_id", "custom_id", f"custom_id {line.custom_id[:80]!r} is used by an earlier line"
    if line.method != "POST":
        return "invalid_method", "method", f"method {line.method[:20]!r} must be 'POST'"
    if line.url != endpoint:
        return "mismatched_endpoint", "url", f"url {line.url[:80]!r} is not the batch's endpoint, {endpoint!r}"
    if not bytes(line.body).lstrip().startswith(b"{"):
        return "invalid_body", "body", "body must be an object"
    return None


def body_of(data: bytes, line: Line) -> bytes:
    """The body of a line that ``read_input`` found.

    Raises:
        ServingError: it asks for what a batch cannot do.
    """
    body = bytes(decode_json(_input, data[line.start : line.end].strip()).body)
    try:
        fields = _prompts(body)
        several = bytes(fields.prompt).lstrip().startswith(b"[") and _has_several(bytes(fields.prompt))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # refused like any other body
    if fields.stream:
        raise invalid("stream", "the lines of a batch are not streamed; leave stream out")
    if several:
        raise invalid("prompt", "a line of a batch takes one prompt; write a line for each")
    return body


def _has_several(prompt: bytes) -> bool:
    prompts = _list(prompt)
    return len(prompts) > 1 and bytes(prompts[0]).lstrip()[:1] in (b'"', b"[")


class _Answer(Struct):
    status_code: int
    request_id: str
    body: Raw


class _Reason(Struct):
    code: str
    message: str


class _Output(Struct):
    id: str
    custom_id: str
    response: _Answer | None
    error: _Reason | None


def answered(number: int, line: Line, request_id: str, body: bytes) -> LineResult:
    """The result of a line whose request succeeded."""
    output = _Output(f"batch_req_{request_id}", line.custom_id, _Answer(200, request_id, Raw(body)), None)
    return LineResult(number, True, _json(output))


def refused(number: int, line: Line, request_id: str, error: ServingError) -> LineResult:
    """The result of a line whose request failed, or could not be accepted."""
    answer = _Answer(error.code.status, request_id, Raw(_json(error_body(error))))
    return LineResult(number, False, _json(_Output(f"batch_req_{request_id}", line.custom_id, answer, None)))


REASONS = {
    BatchStatus.cancelled: _Reason("batch_cancelled", "the batch was cancelled before this request had ended"),
    BatchStatus.expired: _Reason("batch_expired", "the batch expired before this request had ended"),
}


def unanswered(number: int, line: Line, batch: str, status: BatchStatus) -> LineResult:
    """The result of a line that had none when its batch ended.

    Args:
        status: that the batch ends with, cancelled or expired.
    """
    output = _Output(f"batch_req_{batch.removeprefix('batch_')}_{number + 1}", line.custom_id, None, REASONS[status])
    return LineResult(number, False, _json(output))


class BatchProgress:
    """The fold of a batch's log.

    Attributes:
        taken: the requests of lines that have no result yet, by line.
        ended: lines with a result.
        completed, failed: how many of these succeeded, and how many did not.
    """

    def __init__(self) -> None:
        self.taken: dict[int, str] = {}
        self.ended: set[int] = set()
        self.completed = 0
        self.failed = 0

    def push(self, message: BatchMessage) -> None:
        if isinstance(message, BatchTaken):
            self.taken.update((line, request) for line, request in message.lines if line not in self.ended)
        elif isinstance(message, BatchResults):
            for result in message.results:
                if result.line not in self.ended:
                    self.ended.add(result.line)
                    self.taken.pop(result.line, None)
                    self.completed += result.ok
                    self.failed += not result.ok


class Files(NamedTuple):
    """Contents of the two files of a batch, as JSON lines; b"": there is none."""

    output: bytes
    errors: bytes
    completed: int
    failed: int
    unanswered: int


def files_of(messages: Iterable[BatchMessage], lines: list[Line], batch: str, status: BatchStatus) -> Files:
    """
    Args:
        messages: of the batch's log, from its beginning on.
        status: that the batch ends with.
    """
    first: dict[int, LineResult] = {}
    for message in messages:
        if isinstance(message, BatchResults):
            for result in message.results:
                first.setdefault(result.line, result)
    without = len(lines) - len(first)
    for number, line in enumerate(lines):
        if number not in first:
            first[number] = unanswered(number, line, batch, status)
    ordered = [first[number] for number in range(len(lines))]
    output = b"".join([within_lines(each.text) + b"\n" for each in ordered if each.ok])
    errors = b"".join([within_lines(each.text) + b"\n" for each in ordered if not each.ok])
    completed = sum(each.ok for each in ordered)
    return Files(output, errors, completed, len(ordered) - completed, without)


# --- what clients send and get ---


class ExpiresAfter(Struct):
    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(Struct):
    """A body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


decode_create = msgspec.json.Decoder(CreateBatch).decode


def window_s(text: str) -> int:
    """Seconds of a completion window.

    Raises:
        ServingError: invalid_request.
    """
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match is not None else 0
    if not 3600 <= seconds <= LONGEST_S:
        raise invalid("completion_window", f"completion_window {text[:20]!r} must be from '1h' to '30d', as in '24h'")
    return seconds


def kept_s(after: ExpiresAfter | None, at: str) -> int:
    """
    Raises:
        ServingError: invalid_request.
    """
    if after is None:
        return LONGEST_S
    if not 3600 <= after.seconds <= LONGEST_S:
        raise invalid(at, f"{at} must be from 3600 to {LONGEST_S} seconds")
    return after.seconds


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """
    Raises:
        ServingError: invalid_request.
    """
    pairs = metadata or {}
    if len(pairs) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in pairs.items()):
        raise invalid(
            "metadata", f"metadata takes {MAX_METADATA} pairs, of keys up to 64 and values up to 512 characters"
        )


class FileObject(Struct):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(Struct):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class BatchError(Struct):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    total: int
    completed: int
    failed: int


class BatchObject(Struct):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    output_file_id: str | None
    error_file_id: str | None
    errors: BatchErrors | None
    metadata: dict[str, str] | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    object: Literal["batch"] = "batch"


class BatchList(Struct):
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


_NS = 1_000_000_000
_TIMED = [each for each in BatchStatus if each is not BatchStatus.validating]


def file_object(file: StoredFile) -> FileObject:
    return FileObject(file.id, file.size, file.created_ns // _NS, file.expires_ns // _NS, file.name, file.purpose)


def batch_object(batch: Batch) -> BatchObject:
    times = {status: at // _NS for status, at in batch.times.items()}
    errors = [BatchError(each.code, each.message, each.line or None, each.param or None) for each in batch.errors]
    return BatchObject(
        batch.id,
        batch.endpoint,
        batch.input_file,
        batch.window,
        batch.status,
        batch.created_ns // _NS,
        batch.expires_ns // _NS,
        RequestCounts(batch.total, batch.completed, batch.failed),
        batch.output_file or None,
        batch.error_file or None,
        BatchErrors(errors) if errors else None,
        batch.metadata,
        **{f"{status.value}_at": times.get(status) for status in _TIMED},  # type: ignore[arg-type]
    )


def entered(batch: Batch, status: BatchStatus, now_ns: int) -> Batch:
    """The batch in another status."""
    return msgspec.structs.replace(batch, status=status, times={**batch.times, status: now_ns})


# --- what clients of Anthropic's send and get ---

MESSAGE_BATCH = "msgbatch_"  # how ids begin there
RESULTS_KEPT_S = 29 * DAY_S
_MESSAGE_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class MessageBatchLine(Struct):
    custom_id: str
    params: Raw


class CreateMessageBatch(Struct):
    """A body of ``POST /v1/messages/batches``. ``params``: a body of ``POST /v1/messages``."""

    requests: list[MessageBatchLine]


_decode_message_batch = msgspec.json.Decoder(CreateMessageBatch).decode


def message_input(body: bytes) -> bytes:
    """The input file of a batch of messages.

    Raises:
        ServingError: invalid_request.
    """
    asked = decode_body(_decode_message_batch, body).requests
    if not 0 < len(asked) <= MAX_LINES:
        raise invalid("requests", f"there are {len(asked)} requests; a batch takes 1 to {MAX_LINES:,}")
    seen: set[str] = set()
    lines = []
    for number, each in enumerate(asked):
        at = f"requests.{number}"
        if not _MESSAGE_ID.fullmatch(each.custom_id):
            raise invalid(f"{at}.custom_id", "custom_id takes 1 to 64 letters, digits, '-' and '_'")
        if each.custom_id in seen:
            raise invalid(f"{at}.custom_id", f"custom_id {each.custom_id!r} is used by an earlier request")
        if not bytes(each.params).lstrip().startswith(b"{"):
            raise invalid(f"{at}.params", "params must be an object")
        seen.add(each.custom_id)
        params = Raw(msgspec.json.format(bytes(each.params), indent=-1))  # on one line
        lines.append(_json(_Input(each.custom_id, "POST", MESSAGES_PATH, params)))
    return b"\n".join(lines) + b"\n"


class MessageBatchCounts(Struct):
    processing: int
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct):
    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: datetime.datetime
    expires_at: datetime.datetime
    cancel_initiated_at: datetime.datetime | None
    ended_at: datetime.datetime | None
    archived_at: datetime.datetime | None
    results_url: str | None
    type: Literal["message_batch"] = "message_batch"


class MessageBatchPage(Struct):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def message_batch_id(name: str) -> str:
    return MESSAGE_BATCH + name.removeprefix(BATCH)


def message_batch(batch: Batch, base_url: str) -> MessageBatch:
    """As Anthropic's API shows a batch: until it has ended, its requests count as processing.

    Args:
        base_url: where the results are.
    """
    ended, name = batch.status.ended, message_batch_id(batch.id)
    at = {status: datetime.datetime.fromtimestamp(ns / 1e9, datetime.UTC) for status, ns in batch.times.items()}
    counts = MessageBatchCounts(batch.total)
    if ended:
        counts = MessageBatchCounts(0, batch.completed, batch.failed - batch.unanswered)
        if batch.status is BatchStatus.expired:
            counts.expired = batch.unanswered
        else:
            counts.canceled = batch.unanswered
    status: Literal["in_progress", "canceling", "ended"] = "ended" if ended else "in_progress"
    if batch.status is BatchStatus.cancelling:
        status = "canceling"
    return MessageBatch(
        name,
        status,
        counts,
        datetime.datetime.fromtimestamp(batch.created_ns / 1e9, datetime.UTC),
        datetime.datetime.fromtimestamp(batch.expires_ns / 1e9, datetime.UTC),
        at.get(BatchStatus.cancelling),
        at.get(batch.status) if ended else None,
        None,
        f"{base_url}{MESSAGES_PATH}/batches/{name}/results" if ended else None,
    )


class _Succeeded(Struct, tag_field="type", tag="succeeded"):
    message: Raw


class _Errored(Struct, tag_field="type", tag="errored"):
    error: MessageErrorBody


class _Canceled(Struct, tag_field="type", tag="canceled"):
    pass


class _Expired(Struct, tag_field="type", tag="expired"):
    pass


class MessageBatchResult(Struct):
    """A line of ``GET /v1/messages/batches/{id}/results``."""

    custom_id: str
    result: _Succeeded | _Errored | _Canceled | _Expired


class _Failed(Struct):
    error: _Reason


_read_output = msgspec.json.Decoder(_Output).decode
_read_failed = msgspec.json.Decoder(_Failed).decode


def message_results(*files: bytes) -> bytes:
    """The lines of a batch's output and error file, as Anthropic's API has them."""
    lines = []
    for line in b"".join(files).splitlines():
        output = _read_output(line)
        answer = output.response
        result: _Succeeded | _Errored | _Canceled | _Expired
        if answer is None:
            expired = output.error is not None and output.error.code == REASONS[BatchStatus.expired].code
            result = _Expired() if expired else _Canceled()
        elif answer.status_code == 200:
            result = _Succeeded(answer.body)
        else:
            failed = _read_failed(answer.body).error
            result = _Errored(message_error(serving_error(failed.code, failed.message), answer.request_id))
        lines.append(within_lines(_json(MessageBatchResult(output.custom_id, result))) + b"\n")
    return b"".join(lines)


# --- forms ---


def next_to_drive(free: Iterable[Batch], driven: Mapping[str, int], most: int) -> Batch | None:
    """The batch that a gateway should take: of the tenant with the fewest that it drives, the oldest.

    Args:
        free: batches that no gateway drives.
        driven: how many this gateway drives, by tenant.
        most: of one tenant, so that one with many leaves room to the others.
    """
    able = (each for each in free if driven.get(each.tenant, 0) < most)
    return min(able, key=lambda each: (driven.get(each.tenant, 0), each.created_ns, each.id), default=None)


class FileForm(NamedTuple):
    """A form of ``POST /v1/files``. ``fields``: all parts but the file."""

    name: str
    content: bytes
    fields: dict[str, str]


_PARAMETER = re.compile(r';\s*([a-zA-Z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^;\s]*))')


def read_form(content_type: str, body: bytes) -> FileForm:
    """
    Raises:
        ServingError: invalid_request: not multipart/form-data, damaged, or without a part "file".
    """
    kind, _, _ = content_type.partition(";")
    boundary = _parameters(content_type).get("boundary", "")
    if kind.strip().lower() != "multipart/form-data" or not 0 < len(boundary) <= 200:
        raise invalid(None, "send the file as multipart/form-data, with the parts 'file' and 'purpose'")
    mark = b"\r\n--" + boundary.encode("latin-1")
    name, content, fields = "", None, {}
    body = b"\r\n" + body
    at = body.find(mark)
    while at >= 0:
        start = at + len(mark)
        if body[start : start + 2] == b"--":
            break
        head_end = body.find(b"\r\n\r\n", start)
        at = body.find(mark, head_end)
        if head_end < 0 or at < 0:
            raise invalid(None, "the form was cut off")
        disposition = _disposition(body[start:head_end])
        if disposition.get("name") == "file":
            name, content = disposition.get("filename", ""), body[head_end + 4 : at]
        elif "name" in disposition and at - head_end < 4096:
            fields[disposition["name"]] = body[head_end + 4 : at].decode(errors="replace")
    if content is None:
        raise invalid("file", "the form has no part 'file'")
    return FileForm(name[-200:] or "file", content, fields)


def _disposition(head: bytes) -> dict[str, str]:
    for line in head.decode(errors="replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            return _parameters(value)
    return {}


def _parameters(value: str) -> dict[str, str]:
    found = _PARAMETER.findall(value)
    return {key.lower(): re.sub(r"\\(.)", r"\1", quoted) if quoted else plain for key, quoted, plain in found}


def too_large(size: str, limit: int) -> ServingError:
    return ServingError(Code.body_too_large, f"the file has {size} bytes; the limit is {limit}", param="file")
