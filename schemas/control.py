"""Messages that are not stored: cancel, and request/reply with one worker or gateway."""

import signal

import msgspec

from penstock.schemas.jobs import EarlierWorker
from penstock.schemas.transfer import Endpoint, Ticket
from penstock.schemas.wire import decoder


class Cancel(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client left or cancelled. The gateway repeats this message until it has read the terminal event."""

    request: str
    reason: str = "cancelled"


class DumpKv(msgspec.Struct, frozen=True, omit_defaults=True, tag="dump_kv"):
    """Answered with KvDump."""

    page: int = 0


HURRY = signal.SIGUSR2  # to a draining worker: return running requests, and exit
LEAVE = signal.SIGUSR2  # to a gateway: accept no connections, and exit when the last one has closed
LEAVE_S = 900.0  # for that; then as after SIGTERM
DRAINED = 3  # exit status of a worker that was drained with ``stay_down``


class Drain(msgspec.Struct, frozen=True, omit_defaults=True, tag="drain"):
    """Finish running requests, return the others, exit. Answered with Ok at once.

    ``stay_down``: exit with status ``DRAINED``, so that supervisors do not start the worker again.
    """

    stay_down: bool = False


class Sleep(msgspec.Struct, frozen=True, omit_defaults=True, tag="sleep"):
    """Finish running requests, move the weights to host memory and drop the KV cache. Answered with Ok afterwards.

    ``within_s``: limit for running requests to finish; if they do not, the worker stays awake.
    """

    within_s: float = 60.0


class Wake(msgspec.Struct, frozen=True, omit_defaults=True, tag="wake"):
    """Bring the weights back. Answered with Ok at once; the registration says when it is awake."""


class RecordTrace(msgspec.Struct, frozen=True, omit_defaults=True, tag="record_trace"):
    """Record a trace of the engine's steps for some seconds, while it serves. Then answered with RecordedTrace."""

    seconds: float = 2.0


class RecordedTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The path of a gzipped Chrome trace; ``error``: the reason if there is none."""

    host: str = ""
    path: str = ""
    error: str = ""


class Release(msgspec.Struct, frozen=True, omit_defaults=True, tag="release"):
    """The reader no longer needs the pinned blocks of a ticket. Answered with Ok."""

    ticket: str
    reader: str = ""


class Push(msgspec.Struct, frozen=True, omit_defaults=True, tag="push"):
    """Write a ticket's blocks into the reader's, where reads are slow or dangerous (TCP). Answered with Pushed."""

    ticket: str
    reader: str
    endpoint: Endpoint  # of the reader
    take: bytes  # positions in the ticket, packed u32
    blocks: bytes  # where they go, packed u32
    timeout_s: float
    window_take: bytes = b""  # the same for ``Ticket.windows``
    window_blocks: bytes = b""


class Pushed(msgspec.Struct, frozen=True, omit_defaults=True):
    """``cause`` is empty if everything arrived. ``settled``: no more will be written."""

    cause: str = ""
    message: str = ""
    bytes: int = 0
    seconds: float = 0.0
    settled: bool = True


class Reserve(msgspec.Struct, frozen=True, omit_defaults=True, tag="reserve"):
    """The prefill of a prompt ends with the current step: reserve blocks for its KV. The answer is ignored.

    They stay reserved until the request arrives, the owner releases the ticket, or the step should have ended a second
    ago.

    This and ``Fetch`` go to the control subject of the worker's id with "-announced" after it.
    """

    ticket: str  # its id, when there will be one
    owner: str
    digests: bytes  # names of the prompt's full blocks
    tails: int  # copies of its last block, if that is not full: one for each choice
    users: int  # choices that continue
    tokens: int = 0  # of the prompt
    ends_s: float = 0.0  # from now until that step ends at the latest, by the owner's recent prompts; 0: unknown


class Fetch(msgspec.Struct, frozen=True, omit_defaults=True, tag="fetch"):
    """The prompt's KV is complete: read it into the reserved blocks, if there are any. The answer is ignored.

    With ``layers``, only the KV of this many leading layers is complete, the blocks are not pinned yet, and another
    message follows.
    """

    ticket: Ticket
    layers: int = 0  # sent only to workers whose registration has ``reads_layers``


class PinPrefix(msgspec.Struct, frozen=True, omit_defaults=True, tag="pin_prefix"):
    """Pin cached blocks of a prompt for a reader that lacks them. Answered with PrefixPinned at once."""

    ticket: str  # its id
    reader: str
    digests: bytes  # names of the prompt's leading blocks, from the first one on
    lease_s: float


class PrefixPinned(msgspec.Struct, frozen=True, omit_defaults=True):
    """``ticket``: for the leading blocks that are cached here; None: there are none, for the reason ``cause``."""

    ticket: Ticket | None = None
    cause: str = ""


class Ok(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str = ""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a running request, as its gateway has received it. ``attempt`` below 1: nothing yet."""

    attempt: int = -1
    tokens: int = 0  # of all choices
    worker: str = ""  # that streamed last
    earlier_workers: tuple[EarlierWorker, ...] = ()  # that streamed before it


OperatorOrder = Drain | Sleep | Wake | RecordTrace  # on ``Subjects.drain``, where no other is taken
WorkerControl = DumpKv | Release | Push | Reserve | Fetch | PinPrefix | OperatorOrder

decode_cancel = decoder(Cancel)
decode_worker = decoder(WorkerControl)  # type: ignore[arg-type, var-annotated]
decode_ok = decoder(Ok)
decode_progress = decoder(Progress)
decode_pushed = decoder(Pushed)
decode_recorded_trace = decoder(RecordedTrace)
decode_pinned = decoder(PrefixPinned)
