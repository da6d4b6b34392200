"""Core (unstored) messages: cancel, and request/reply with one worker."""

import msgspec

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
    """Free blocks pinned for a hand-over. Answered with Ok."""

    ticket: str


class Ok(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str = ""


WorkerControl = DumpKv | Drain | Release

decode_cancel = decoder(Cancel)
decode_worker = decoder(WorkerControl)  # type: ignore[arg-type, var-annotated]
decode_ok = decoder(Ok)
