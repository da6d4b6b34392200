"""Files and batches of requests, shared by all gateways.

Keys of the ``batches`` bucket are ``<tenant>.<id>``; a value is a ``StoredFile`` or a ``Batch``. The contents of files
are objects under the same names, in an object store of the same name.

``<namespace>.batches.<tenant>.<batch>`` is the log of one batch: the request of each line, and its result.
Only the gateway that opened the log last appends to it: each message names the sequence of the one before.
"""

import enum

import msgspec

from penstock.schemas.wire import decoder

FILE, BATCH = "file-", "batch_"  # prefixes of ids
DAY_S = 86_400
LONGEST_S = 30 * DAY_S  # a batch may run, and a file be kept


class BatchStatus(enum.StrEnum):
    """OpenAI's names."""

    validating = "validating"
    in_progress = "in_progress"
    finalizing = "finalizing"
    cancelling = "cancelling"
    completed = "completed"
    failed = "failed"
    expired = "expired"
    cancelled = "cancelled"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({BatchStatus.completed, BatchStatus.failed, BatchStatus.expired, BatchStatus.cancelled})


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True, tag="file"):
    """
    Attributes:
        size: bytes of the content.
        expires_ns: Unix time at which it is discarded.
    """

    id: str
    tenant: str
    name: str
    purpose: str
    size: int
    created_ns: int
    expires_ns: int


class LineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why the input of a batch cannot be run. ``line``: counted from 1; 0: the error is not in a line."""

    code: str
    message: str
    line: int = 0
    param: str = ""


class Batch(msgspec.Struct, frozen=True, omit_defaults=True, tag="batch"):
    """
    Attributes:
        endpoint: path of the requests.
        window: as the client gave it, such as "24h".
        expires_ns: Unix time after which lines get no more results.
        keep_s: seconds for which its output is kept.
        key: id of the API key that made it; "": none.
        driver: the gateway that runs it; "": any may take it.
        times: Unix time at which it entered each status.
        unanswered: number of ``failed`` lines that had no result when it ended.
    """

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str
    created_ns: int
    expires_ns: int
    status: BatchStatus = BatchStatus.validating
    keep_s: int = LONGEST_S
    key: str = ""
    driver: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str = ""
    error_file: str = ""
    metadata: dict[str, str] | None = None
    errors: tuple[LineError, ...] = ()
    times: dict[BatchStatus, int] = {}
    unanswered: int = 0


class BatchOpened(msgspec.Struct, frozen=True, tag="opened"):
    """This gateway drives the batch from now on."""

    driver: str


class BatchTaken(msgspec.Struct, frozen=True, tag="taken"):
    """Requests that are about to be submitted: lines, counted from 0, with ids. The last id of a line counts."""

    lines: tuple[tuple[int, str], ...]


class LineResult(msgspec.Struct, frozen=True, array_like=True):
    """``text``: a line of the output file (``ok``), or of the error file, without its end."""

    line: int
    ok: bool
    text: bytes


class BatchResults(msgspec.Struct, frozen=True, tag="ended"):
    """Results of lines. The first result of a line counts."""

    results: tuple[LineResult, ...]


BatchMessage = BatchOpened | BatchTaken | BatchResults
decode_entry = decoder(StoredFile | Batch)  # type: ignore[arg-type]
decode_message = decoder(BatchOpened | BatchTaken | BatchResults)  # type: ignore[arg-type]
