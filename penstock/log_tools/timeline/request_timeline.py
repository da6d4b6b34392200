"""One request's stored messages, folded into an ordered list of typed events. Pure: no broker, no clock.

Used by everything that reads a request back from the log: ``penstock inspect`` prints the events, ``penstock trace``
makes spans of them, ``penstock leases`` lists the leases of their handoffs.

    timeline = RequestTimeline(request.id)
    timeline.add_request(request)
    timeline.add_work("decode", "worker-0", stored_ns, job)
    timeline.add_end(done, stored_ns)
    for event in timeline.events():
        match event: ...

``penstock.log_tools.timeline.read`` fills one from a broker. ``at_ns`` of an event is Unix time. It comes from the
clock of the process that caused the event (gateway, router, worker), or from the broker that stored the message if that
has no time of its own. Each class says which.
"""

from collections.abc import Iterable

import msgspec

from penstock.schemas.block_hashes import DIGEST_BYTES
from penstock.schemas.done import Done, Returned
from penstock.schemas.jobs import Decision, Job, LowerTiers, Revoke, WorkMessage, with_candidates
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import COUNTS, PROMPT, TokenItem
from penstock.schemas.trace import Stamps
from penstock.schemas.transfer import WINDOWS, Encoded, Handoff, Prefilled


class RequestAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The gateway accepted the request (gateway clock).

    ``prompt_tokens``, ``prompt_blocks`` and ``media`` are counts of the original request; a compact timeline empties
    the prompt, its digests and the media of ``request``.
    """

    at_ns: int
    request: GenerateRequest
    prompt_tokens: int
    prompt_blocks: int  # full blocks of ``request.block_size`` tokens
    media: int


class RequestQueued(msgspec.Struct, frozen=True, tag="queued"):
    """A router began to look for a worker (router clock)."""

    at_ns: int
    attempt: int
    router: str


class RequestRouted(msgspec.Struct, frozen=True, tag="routed"):
    """A router chose a worker, or a route of several (router clock).

    A compact timeline empties ``decision.candidates``; the counts stay.
    """

    at_ns: int
    attempt: int
    decision: Decision
    resumed_tokens: int  # output tokens of earlier attempts that this attempt starts after, all choices together
    candidates: int
    excluded: int  # candidates that could not be chosen
    overlap_blocks: int | None = None  # best of the chosen workers; None: the decision has no score table
    score: float | None = None  # of the same workers; lower is better
    lower_tiers: tuple[LowerTiers, ...] = ()  # of the candidates


class RequestContinued(msgspec.Struct, frozen=True, tag="continued"):
    """A later attempt continues at another worker (router clock)."""

    at_ns: int
    attempt: int
    worker: str
    previous_worker: str  # of the previous attempt; "": that attempt is not in the log
    reason: str  # "worker_lost", "worker_lost: ..." (how its process ended), "returned: ..."
    resumed_tokens: int


class StageAssigned(msgspec.Struct, frozen=True, tag="assigned"):
    """A message for one stage was stored in a worker's queue (broker clock)."""

    at_ns: int
    attempt: int
    role: str  # "aggregated", "encode", "prefill", "decode"
    worker: str


class MediaEncoded(msgspec.Struct, frozen=True, tag="encoded"):
    """An encode worker made the embeddings of the request's media (broker clock: when the result was stored)."""

    at_ns: int
    attempt: int
    worker: str
    started_ns: int  # worker clock; 0: unknown
    stamps: Stamps | None


class PromptPrefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """A prefill worker computed the prompt and each choice's first token (broker clock: when the result was stored)."""

    at_ns: int
    attempt: int
    worker: str
    started_ns: int  # worker clock; 0: unknown
    first_token_ns: int  # worker clock; 0: unknown
    cached_tokens: int  # of the prompt, found in the worker's cache
    stamps: Stamps | None


class BlocksHandedOff(msgspec.Struct, frozen=True, tag="handed_off"):
    """A worker offered its blocks to the worker of the next stage, under a lease (broker clock)."""

    at_ns: int
    attempt: int
    source: str
    target: str
    target_role: str
    ticket: str
    pool: str  # "kv", "embeds"
    blocks: int
    bytes: int  # 0: the size of a block is unknown
    backend: str
    lease_ns: int  # Unix time at which the lease ends


class TransferReported(msgspec.Struct, frozen=True, tag="transfer"):
    """One line of the handoff ledger about one of the request's tickets (clock of the worker that wrote it)."""

    at_ns: int
    line: Handoff


class TokensStored(msgspec.Struct, frozen=True, tag="tokens"):
    """One item of a token batch was stored (broker clock). ``choice`` as in ``penstock.schemas.tokens``."""

    at_ns: int
    attempt: int
    worker: str
    choice: int
    first: int  # position of the first token
    count: int
    finish: str = ""  # why the choice ended; "": it did not end here


class AttemptReturned(msgspec.Struct, frozen=True, tag="returned"):
    """A worker returned the request, unstarted or unfinished (broker clock)."""

    at_ns: int
    attempt: int
    worker: str
    reason: str
    poison: bool = False  # the engine failed while it ran this request
    crashed: str = ""  # reporter, if the worker could not report since its process or engine had ended


class AttemptRevoked(msgspec.Struct, frozen=True, tag="revoked"):
    """A router ordered a worker to stop this attempt and those before it (broker clock)."""

    at_ns: int
    attempt: int
    worker: str


class RequestDone(msgspec.Struct, frozen=True, tag="done"):
    """The terminal event was stored (broker clock). A compact timeline empties tokens and files of ``done``."""

    at_ns: int
    done: Done


TimelineEvent = (
    RequestAccepted
    | RequestQueued
    | RequestRouted
    | RequestContinued
    | StageAssigned
    | MediaEncoded
    | PromptPrefilled
    | BlocksHandedOff
    | TransferReported
    | TokensStored
    | AttemptReturned
    | AttemptRevoked
    | RequestDone
)


_OWNER_ENDS = frozenset({"released", "expired"})  # written by the owner of the blocks


class TicketLease(msgspec.Struct):
    """One ticket and its latest ledger line.

    Attributes:
        ended: the owner has released the blocks.
        quarantined: blocks of the reader that cannot be used yet.
    """

    offer: Handoff
    last: Handoff
    ended: bool = False
    quarantined: int = 0

    def is_open(self, now_ns: int) -> bool:
        """Whether some worker still holds blocks. An owner that died writes no end: its lease ends with its time."""
        return bool(self.quarantined) or (not self.ended and now_ns <= self.offer.lease_ns)

    def apply(self, line: Handoff) -> None:
        """Count one more line about this ticket."""
        if line.state in _OWNER_ENDS:
            self.ended = True
        if line.state == "quarantined":
            self.quarantined = line.blocks
        elif line.state == "settled":
            self.quarantined = 0
        if line.at_ns >= self.last.at_ns:
            self.last = line


def ticket_leases(lines: Iterable[Handoff]) -> dict[str, TicketLease]:
    """Leases by ticket id, from ledger lines in stream order.

    The lines of two workers about one ticket may cross, so lines before the offer wait for it. A ticket without an
    offer has no lease.
    """
    leases: dict[str, TicketLease] = {}
    early: dict[str, list[Handoff]] = {}
    for line in lines:
        lease = leases.get(line.ticket)
        if line.state == "offered":
            lease = leases[line.ticket] = TicketLease(line, line)
            for earlier in early.pop(line.ticket, ()):
                lease.apply(earlier)
        elif lease is None:
            early.setdefault(line.ticket, []).append(line)
        else:
            lease.apply(line)
    return leases


class StageRun(msgspec.Struct):
    """One worker's part in one attempt.

    Attributes:
        assigned_ns: when its message was stored.
        result: its output for the next stage; None: none, or not yet.
        handed_off: the handoff to the next stage.
        revoked: a router revoked the attempt.
    """

    attempt: int
    role: str
    worker: str
    assigned_ns: int
    result: MediaEncoded | PromptPrefilled | None = None
    handed_off: BlocksHandedOff | None = None
    revoked: bool = False


class RequestTimeline:
    """Everything in the log about one request.

    Feed messages of one stream in their stream order; the streams may interleave in any way. A message that was stored
    twice counts once.

    Args:
        compact: keep counts instead of prompts, score tables and tokens, so that many unfinished requests fit into
            memory (about 3 kB each).
    Attributes:
        done: the terminal event; None: the request has not ended.
        stages: one entry per worker and attempt, in the order of their messages.
        routed: the routers' decisions, in the order of their messages.
        held: how many requests the router held at each decision, by attempt, where its job says so.
        returned: attempts that a worker returned, by number.
        handoffs: the ledger's lines, in stream order.
        damaged: messages about it that are left out, because they are not as they were stored: stream and sequence.
        begins: when the oldest message of a stream was stored that has none about it though it had (Unix, ns); 0: the
            stream is empty.
        lost_end: why its end is not known though it is over, or may be; "": it is known, or the request runs.
    """

    def __init__(self, request_id: str, *, compact: bool = False) -> None:
        self.request_id = request_id
        self.accepted: RequestAccepted | None = None
        self.done: Done | None = None
        self.stages: list[StageRun] = []
        self.routed: list[RequestRouted] = []
        self.held: dict[int, int] = {}
        self.returned: dict[int, AttemptReturned] = {}
        self.handoffs: list[Handoff] = []
        self.damaged: list[str] = []
        self.begins: dict[str, int] = {}
        self.lost_end = ""
        self._compact = compact
        self._done_ns = 0
        self._work: list[tuple[int, TimelineEvent]] = []  # with the time at which its message was stored
        self._tokens: list[TokensStored] = []

    @property
    def request(self) -> GenerateRequest:
        """The request as it was accepted.

        Raises:
            ValueError: ``add_request`` was not called.
        """
        if self.accepted is None:
            raise ValueError(f"the log does not have request {self.request_id}, only later messages about it")
        return self.accepted.request

    # --- messages in ---

    def add_request(self, request: GenerateRequest) -> None:
        """The accepted request, from REQUESTS, a job or the record of the request."""
        prompt, blocks, media = request.prompt_tokens, len(request.digests) // DIGEST_BYTES, len(request.media)
        if request.prompt_length and request.block_size:  # of a record, which lacks the names of the blocks, too
            blocks = request.prompt_length // request.block_size
        kept = _without_content(request) if self._compact else request
        self.accepted = RequestAccepted(request.created_ns, kept, prompt, blocks, media)

    def add_work(self, role: str, worker: str, stored_ns: int, message: WorkMessage) -> None:
        """A message in WORK for this worker. Leave out the kept copies of jobs (``penstock.schemas.subjects.KEPT``)."""
        if isinstance(message, Revoke):
            for stage in self.stages:
                if stage.attempt <= message.attempt and stage.worker == worker:
                    stage.revoked = True
            self._append(stored_ns, AttemptRevoked(stored_ns, message.attempt, worker))
            return
        if any((stage.attempt, stage.role) == (message.attempt, role) for stage in self.stages):
            return  # stored again, after the broker's duplicate window
        if isinstance(message, Job):
            self._add_decision(message, stored_ns)
        else:
            self._add_result(role, worker, stored_ns, message)
        self.stages.append(StageRun(message.attempt, role, worker, stored_ns))
        self._append(stored_ns, StageAssigned(stored_ns, message.attempt, role, worker))

    def add_handoff(self, line: Handoff) -> None:
        """A line of the handoff ledger about one of the request's tickets."""
        self.handoffs.append(line)

    def add_tokens(self, worker: str, stored_ns: int, item: TokenItem) -> None:
        """An item of a token batch. Items of overtaken attempts count too: the timeline shows what was stored."""
        if item.choice == COUNTS:
            return
        count = len(item.logprobs or ()) if item.choice == PROMPT else len(item.tokens) >> 2
        finish = item.finish.reason if item.finish is not None else ""
        self._tokens.append(TokensStored(stored_ns, item.attempt, worker, item.choice, item.first, count, finish))

    def add_end(self, event: Done | Returned, stored_ns: int) -> None:
        """The terminal event, or the end of one attempt."""
        if isinstance(event, Returned):
            self.returned[event.attempt] = AttemptReturned(
                stored_ns, event.attempt, event.worker, event.reason, event.poison, event.crashed
            )
        elif self.done is None:
            self.done = _without_output(event) if self._compact else event
            self._done_ns = stored_ns

    # --- events out ---

    def events(self) -> list[TimelineEvent]:
        """All events, oldest first.

        Clocks of several machines differ, so time alone does not order them: the request's acceptance comes first, a
        decision never after its job was stored, and the terminal event never before a stage or a token.
        """
        keyed = [(key, event) for key, event in self._work]
        keyed += [(event.at_ns, event) for event in self._tokens]
        keyed += [(event.at_ns, event) for event in self.returned.values()]
        last = max((key for key, _ in keyed), default=0)
        if self.done is not None:
            keyed.append((max(self._done_ns, last), RequestDone(self._done_ns, self.done)))
        keyed += [(line.at_ns, TransferReported(line.at_ns, line)) for line in self.handoffs]
        keyed.sort(key=lambda pair: pair[0])  # stable: what one message caused stays together
        events = [event for _, event in keyed]
        return events if self.accepted is None else [self.accepted, *events]

    def leases(self) -> dict[str, TicketLease]:
        """The leases of the request's handoffs, by ticket."""
        return ticket_leases(self.handoffs)

    def transfers(self, ticket: str) -> list[Handoff]:
        """The ledger lines about one ticket, ordered by the workers' clocks."""
        return sorted((line for line in self.handoffs if line.ticket == ticket), key=lambda line: line.at_ns)

    # --- events of a message ---

    def _append(self, key_ns: int, *events: TimelineEvent) -> None:
        self._work += [(key_ns, event) for event in events]

    def _add_decision(self, job: Job, stored_ns: int) -> None:
        decision, attempt = with_candidates(job).decision, job.attempt
        resumed = sum(len(part) // 4 for part in job.resume)
        routed = _routed(attempt, decision, resumed, self._compact)
        if job.inputs is not None and job.inputs.lower_tiers and not self._compact:
            routed = msgspec.structs.replace(routed, lower_tiers=job.inputs.lower_tiers)
        before = self.stages[-1].worker if self.stages else ""
        self.routed.append(routed)
        if job.inputs is not None:
            self.held[attempt] = job.inputs.held
        # By the router's clock they may lie after the moment in which the broker stored the job.
        queued_ns = min(decision.at_ns - decision.waited_ns, stored_ns)
        self._append(queued_ns, RequestQueued(decision.at_ns - decision.waited_ns, attempt, decision.router))
        self._append(min(decision.at_ns, stored_ns), routed)
        if attempt > 1:
            continued = RequestContinued(decision.at_ns, attempt, decision.chosen, before, decision.reason, resumed)
            self._append(min(decision.at_ns, stored_ns), continued)

    def _add_result(self, role: str, worker: str, stored_ns: int, message: Encoded | Prefilled) -> None:
        source, attempt = message.ticket.worker, message.attempt
        result: MediaEncoded | PromptPrefilled
        if isinstance(message, Prefilled):
            result = PromptPrefilled(
                stored_ns, attempt, source, message.started_ns, message.first_token_ns, message.cached, message.stamps
            )
        else:
            result = MediaEncoded(stored_ns, attempt, source, message.started_ns, message.stamps)
        offer = _handed_off(message, role, worker, stored_ns)
        for stage in self.stages:
            if (stage.attempt, stage.worker) == (attempt, source) and stage.result is None:
                stage.result, stage.handed_off = result, offer
                break
        self._append(stored_ns, result, offer)


def _routed(attempt: int, decision: Decision, resumed: int, compact: bool) -> RequestRouted:
    computing = {stage.worker for stage in decision.route if stage.role != "encode"} or {decision.chosen}
    chosen = [each for each in decision.candidates if each.worker in computing and not each.excluded]
    return RequestRouted(
        decision.at_ns,
        attempt,
        msgspec.structs.replace(decision, candidates=()) if compact else decision,
        resumed,
        len(decision.candidates),
        sum(bool(each.excluded) for each in decision.candidates),
        max((each.overlap_blocks for each in chosen), default=None),
        min((each.score for each in chosen), default=None),
    )


def _handed_off(message: Encoded | Prefilled, role: str, worker: str, stored_ns: int) -> BlocksHandedOff:
    ticket = message.ticket
    blocks, pools = len(ticket.blocks) // 4, ticket.endpoint.pools
    held = ((ticket.pool, blocks), (WINDOWS, len(ticket.windows) // 4))
    return BlocksHandedOff(
        stored_ns,
        message.attempt,
        ticket.worker,
        worker,
        role,
        ticket.id,
        ticket.pool,
        blocks,
        sum(count * pools[name].block_bytes for name, count in held if name in pools),
        ticket.endpoint.backend,
        ticket.lease_ns,
    )


def _without_content(request: GenerateRequest) -> GenerateRequest:
    diffusion = request.diffusion and request.diffusion.without_texts()
    embedding = request.embedding and request.embedding.without_texts()
    return msgspec.structs.replace(request, prompt=b"", digests=b"", media=(), diffusion=diffusion, embedding=embedding)


def _without_output(done: Done) -> Done:
    choices = tuple(msgspec.structs.replace(each, tokens=b"", files=(), logprobs=()) for each in done.choices)
    return msgspec.structs.replace(done, choices=choices, submitted=b"", scores=())
