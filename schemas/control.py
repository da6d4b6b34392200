"""Core (unstored) messages: cancel, and request/reply with one worker."""

import msgspec

from schemas.transfer import Endpoint
from schemas.wire import decoder


class Cancel(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client is gone or gave up. Repeated by its gateway until the terminal event is seen."""

    request: str
    reason: str = "cancelled"


class DumpKv(msgspec.Struct, frozen=True, omit_defaults=True, tag="dump_kv"):
    """Answered with KvDump."""

    page: int = 0


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs, give the rest back, leave. Answered with Ok at once."""


class Release(msgspec.Struct, frozen=True, omit_defaults=True, tag="release"):
    """The reader needs the pinned blocks of a ticket no longer. Answered with Ok."""

    ticket: str
    reader: str = ""


class Push(msgspec.Struct, frozen=True, omit_defaults=True, tag="push"):
    """Write blocks of a ticket into mine: where reading is slow or dangerous (TCP). Answered with Pushed, when done."""

    ticket: str
    reader: str
    endpoint: Endpoint  # of the reader
    take: bytes  # positions in the ticket, packed u32
    blocks: bytes  # where they go, packed u32
    timeout_s: float


class Pushed(msgspec.Struct, frozen=True, omit_defaults=True):
    """``cause`` is empty when everything has arrived. ``settled``: nothing will be written any more."""

    cause: str = ""
    message: str = ""
    bytes: int = 0
    seconds: float = 0.0
    settled: bool = True


class Ok(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str = ""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway has seen of a request that runs; ``attempt`` below 1: nothing yet."""

    attempt: int = -1
    tokens: int = 0  # of all choices


WorkerControl = DumpKv | Drain | Release | Push

decode_cancel = decoder(Cancel)
decode_worker = decoder(WorkerControl)  # type: ignore[arg-type, var-annotated]
decode_ok = decoder(Ok)
decode_progress = decoder(Progress)
decode_pushed = decoder(Pushed)
