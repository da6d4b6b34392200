"""The interface between a session and what runs its requests.

Three exist: ``token_runner`` (the engine thread), ``pipeline_runner`` (images and videos) and ``embedding_runner``.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory_storage import MemoryStreams
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import Tasks
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import control, fleet, jobs, requests
from penstock.schemas.kv import KvDump
from penstock.schemas.transfer import Encoded, Prefilled
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.session.lease import Lease, Outbox
from penstock.workers.session.requests import RequestTable, RunningRequest
from penstock.workers.session.terminal_events import Reporter, TerminalEvents

StageInput = Prefilled | Encoded


class ServedModel(msgspec.Struct):
    """A worker's model, apart from the engine. ``revision`` changes with its weights."""

    name: str
    aliases: tuple[str, ...]
    revision: str
    detokenizer: Detokenizer | None
    connection: str  # name of the worker's NATS connection
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    tokenizer: str = ""  # digest
    source: str = ""  # as in ``Registration``


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The parts of a session that its runner uses."""

    id: str  # worker id, new in each session
    epoch: int
    bus: Bus
    publisher: Publisher
    model: ServedModel
    settings: WorkerSettings
    metrics: WorkerMetrics
    tasks: Tasks
    lease: Lease
    outbox: Outbox
    reporter: Reporter
    requests: RequestTable
    terminal: TerminalEvents
    memory: MemoryStreams


class RequestRunner(Protocol):
    """Runs the requests of one session. Used from the event loop.

    Attributes:
        slots: requests that run at once.
        queue: requests taken beyond them.
    """

    slots: int
    queue: int

    # --- start and stop ---

    async def open(self) -> None:
        """Called before the first job can arrive.

        Raises:
            ServingError: the broker does not provide what the runner needs.
        """

    async def fence(self) -> None:
        """The lease is lost and every request removed: return when the next session may begin."""

    async def close(self) -> None:
        """No more jobs arrive: end what is under way. Background tasks are cancelled afterwards."""

    def registration(self, state: fleet.WorkerState) -> fleet.Registration: ...

    # --- requests ---

    def admit(self, job: jobs.Job, request: requests.GenerateRequest, delivery: Any) -> RunningRequest:
        """The state of a new request.

        Raises:
            Exception: this worker cannot run it; the request ends with ``invalid_request`` and the message.
        """

    async def run(self, running: RunningRequest, stage_input: StageInput | None) -> None:
        """Start a request, or continue from the output of the previous stage."""

    def stop_early(self, running: RunningRequest) -> None:
        """End a request, whose ``cancelled`` was just set, at the next step."""

    def accepts_stop(self, running: RunningRequest) -> bool:
        """False: the next stage has the request and stops it."""

    def free(self, running: RunningRequest, cancel: bool) -> None:
        """Free what is kept for a removed request; ``cancel``: stop computing it."""

    def release_input(self, stage_input: StageInput) -> None:
        """The previous stage's output is not needed: its request does not run here."""

    async def not_begun(self) -> list[RunningRequest]:
        """Cancel and return the requests of which nothing was computed here; any other worker may start them."""

    # --- upkeep and control ---

    @property
    def holds_leases(self) -> bool:
        """Whether blocks are pinned for other workers; draining waits for them."""

    def housekeeping(self, now: float) -> None:
        """Called several times a second."""

    async def dump(self, page: int) -> KvDump:
        """A page of the names in the prefix cache; empty for a worker without one."""

    def release(self, order: control.Release) -> control.Ok:
        """A reader no longer needs blocks that are pinned for it."""

    async def push(self, order: control.Push) -> control.Pushed:
        """Write blocks that are pinned for a reader into its memory."""

    def pin_prefix(self, order: control.PinPrefix) -> control.PrefixPinned:
        """Pin blocks of the prefix cache for another worker."""

    async def rest(self, order: control.Sleep | control.Wake) -> control.Ok:
        """Move the weights to host memory, or back."""

    async def profile(self, order: control.RecordTrace) -> control.RecordedTrace:
        """Record a trace of the engine's steps."""
