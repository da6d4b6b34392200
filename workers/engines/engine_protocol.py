"""The engine protocol: the interface between a worker and anything that generates tokens.

Everything here is synchronous and used from one thread, the engine thread. No NATS, no torch.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.infra.model.adapter import AdapterFolder
from penstock.infra.process.class_queue import StartShare
from penstock.schemas.done import Usage
from penstock.schemas.errors import Code
from penstock.schemas.fleet import GpuUse
from penstock.schemas.kv import KvEvent
from penstock.schemas.requests import Constraint, Sampling, Stop
from penstock.schemas.tokens import Logprob
from penstock.schemas.transfer import Memory


class RequestError(Exception):
    """This sequence cannot be served; its neighbours are not affected. ``code`` is a penstock.schemas.errors.Code
    value.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EngineError(Exception):
    """The engine is broken; the worker requeues its requests and exits."""


class EngineAway(EngineError):
    """What the engine needs does not answer now: another start may help."""


class NodeLost(EngineError):
    """A machine of an engine over several is gone, or did not come: no request is to blame, and a restart may help."""


class EngineInfo(msgspec.Struct, frozen=True):
    """Fixed properties of an engine. Sizes are in tokens or blocks.

    An engine with attention data parallelism has ``dp_size`` ranks, each with an equal share of blocks and slots and a
    prefix cache of its own: a sequence runs on one of them.
    """

    name: str
    block_size: int
    total_blocks: int  # of all ranks
    slots: int  # sequences that run at once, on all ranks
    max_model_len: int  # prompt + output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_events: bool
    load_seconds: float = 0.0
    dp_size: int = 1
    handoff_layout: str = ""  # of engines that move KV themselves; only engines with the same text can exchange KV
    connector: str = ""  # of engines that move KV themselves: what does so there
    connector_tokens: int = 0  # of the longest prompt that fits its buffers; 0: it has none, or does not say
    handoff_memory: str = "cpu"  # where that KV is: ``penstock.schemas.transfer.Memory.kind``
    logits_processors: tuple[str, ...] = ()  # names that ``Sampling.logits_processors`` may have
    max_batched_tokens: int = 0  # computed per step, on each rank; 0: unknown
    pair_only: bool = False  # of a prefill or decode worker: it cannot compute the other stage
    constraints: tuple[
        str, ...
    ] = ()  # marks of the constraints that it applies, see ``penstock.schemas.requests.Constraint``
    ignored_options: tuple[str, ...] = ()  # of clients, without effect here; gateways name them in answers
    media_with_kv: bool = False  # it takes the media of a prompt also where it fetches the prompt's KV
    quantization: str = ""  # of weights as they are loaded; "": as their files have them


class MediaSpan(NamedTuple):
    """Where the embeddings of one medium go: in place of ``tokens`` placeholder tokens from ``position`` on."""

    position: int
    tokens: int
    digest: bytes  # blake3 of the raw bytes
    slots: Seq[int] = ()  # of the embedding pool, see VisionEngine; held by the caller until the sequence has ended
    # Without slots, the sequence needs KV from elsewhere (``reservation``) and fails if it loses that.
    grid: Seq[int] = ()  # as ``Media.grid``
    seconds: float = 0.0  # as ``Media.seconds``


class RowToFill(NamedTuple):
    """A row of sliding-window layers that a transfer fills.

    Attributes:
        position: of the block in the prompt.
        block: of whose tokens it is.
    """

    position: int
    block: int
    row: int


class HeldRows(NamedTuple):
    """Rows of sliding-window layers, of the last of some blocks, as long as they have these generations."""

    rows: Seq[int] = ()
    generations: Seq[int] = ()


NO_ROWS = HeldRows()


class BlockReservation(msgspec.Struct, eq=False):
    """Blocks held for a prompt whose KV comes from elsewhere; shared by the sequences of its choices.

    ``blocks[:have]`` were in the cache, the others and ``tails`` are to be filled. It is released once all
    ``users`` have started or were cancelled, or earlier if running sequences need the blocks: then the prompt is
    computed here after all.
    """

    digests: list[bytes]  # of the prompt's full blocks
    blocks: list[int]
    have: int
    tails: list[int]  # for the prompt's last block, if it is not full: one copy for each choice, which continues in it
    users: int = 1
    filled: bool = False  # adopted
    named: int = 0  # leading ``blocks`` that are in the cache under their names; of the others it has other copies
    loaded: int = 0  # the last of ``have`` came from host memory
    window: list[int] = []  # of these blocks it holds rows of sliding-window layers
    fills: list[RowToFill] = []


class SequenceRequest(msgspec.Struct):
    """One choice of one request. ``key`` identifies it to the caller; the engine only returns it."""

    key: object
    prompt: Seq[int]
    sampling: Sampling
    stop: Stop
    choice: int = 0
    generated: Seq[int] = ()  # tokens of earlier attempts: context, and counted as output
    digests: Seq[bytes] = ()  # of the prompt's full blocks, if the caller has them
    root: bytes = b""  # parent of the first block
    extra: Mapping[int, bytes] = {}  # hashes of the media in a block, by block position; part of its name
    media: Seq[MediaSpan] = ()
    pin: bool = False  # when it has ended, its prompt's blocks stay until ``release_pinned``: see ``PinnedPrompt``
    reservation: BlockReservation | None = None  # adopted: nothing of its prompt is computed here
    opaque: bytes = (
        b""  # from the ``PinnedPrompt`` of the engine that computed the prompt; this one fetches the KV by itself
    )
    score: int = 0  # report log-probabilities of prompt tokens from this position (at least 1) on; 0: of none
    rank: int = 0  # data-parallel rank to run on; ignored without ranks
    trace: Mapping[str, str] | None = None  # W3C headers for the engine's own spans; None: it is not traced
    client_request_id: str = ""  # the client's own id for it
    constraint: Constraint | None = None  # what its whole output must match
    adapter: str = ""  # id of its LoRA adapter, which was added (``AdapterEngine``); "": none
    handoff: str = ""  # of a prefill stage: names the handoff of the request in this attempt, for all its choices
    share: StartShare = StartShare()  # in which it waits for its start
    salt: str = ""  # sequences with different ones share no cached KV
    no_store: bool = False  # its KV goes to no disk
    chat: bytes = b""  # that its prompt was made of, see ``GenerateRequest``
    falls_back: bool = False  # another model may run its request: a failure before the first token is not final
    patience_s: float = 0.0  # of one that falls back: for so long it waits for a busy server; 0: for as long as it may


class Output(msgspec.Struct, frozen=True):
    """One new token of one sequence. ``finish``: "", "stop" or "length"; ``stop_token``: the id that ended it.

    The stopping EOS or stop token itself is included as a token.
    """

    key: object
    token: int
    finish: str = ""
    logprob: Logprob | None = None
    stop_token: int | None = None


class Failure(NamedTuple):
    """A sequence that ended without a token, by an error of its own."""

    key: object
    code: str
    message: str


class Started(NamedTuple):
    """A sequence that was admitted in this step, with the prompt tokens that came from the prefix cache."""

    key: object
    cached_tokens: int


class PinnedPrompt(NamedTuple):
    """A sequence with ``pin`` has ended: the blocks of its prompt, and their generations at this time.

    An engine that computes a prompt while the next one waits for it reports this at the start, with the sequence and
    the request's other choices among ``StepResult.handed``.
    """

    key: object
    blocks: list[int]
    generations: list[int]
    opaque: bytes = b""  # of an engine that moves KV by itself: what the next worker's engine needs, instead of blocks
    windows: HeldRows = NO_ROWS


class Scored(NamedTuple):
    """Log-probabilities of a sequence's prompt tokens ``first`` .., with the ``sampling.prompt_logprobs`` best.

    Each position is reported once, in order, and all of them no later than the sequence's first output. A position that
    was taken from the prefix cache has none: of a sequence with ``score`` the cache is not used from there on.
    """

    key: object
    first: int
    logprobs: Seq[Logprob]


class SequenceMeasurements(NamedTuple):
    """Measurements of a sequence, reported before or with its end: see ``penstock.schemas.trace.Stamps``."""

    key: object
    values: Mapping[str, float]
    preemptions: int = 0


class SequenceCounts(NamedTuple):
    """What a server counted of a sequence, whose tokens are not those of its output; before or with its end."""

    key: object
    usage: Usage


class StepResult(msgspec.Struct):
    outputs: list[Output]
    events: list[KvEvent]  # of rank 0, in the order they happened
    started: list[Started]
    failures: list[Failure]
    computed_tokens: int  # scheduled in this step, prompt and decode
    pinned: Seq[PinnedPrompt] = ()
    scored: Seq[Scored] = ()
    others: Mapping[int, list[KvEvent]] = {}  # events of the other ranks, by rank
    measured: Seq[SequenceMeasurements] = ()
    handed: Seq[object] = ()  # keys of sequences of which the next worker's engine draws all tokens
    counted: Seq[SequenceCounts] = ()
    ahead_s: float | None = None  # how long it still ran after the next launch; 0: it had ended; None: no launch

    @property
    def empty(self) -> bool:
        """The step did nothing."""
        if self.computed_tokens or self.outputs or self.events or self.started or self.failures:
            return False
        return not (self.pinned or self.scored or self.others or self.measured or self.handed)


class EngineStats(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    used_blocks: int  # referenced by running sequences
    cached_blocks: int  # unreferenced, still reusable
    free_blocks: int  # neither
    pinned_blocks: int = 0  # of the used ones: kept for a handoff, in either direction
    preemptions: int = 0
    hit_tokens: int = 0  # prompt tokens taken from the cache, since start
    prompt_tokens: int = 0  # prompt tokens admitted, since start
    drafts: int = 0  # sequences in steps that verified proposed tokens, since start
    draft_tokens: int = 0  # proposed, since start
    accepted_tokens: int = 0  # of these
    host_blocks: int = 0  # KV blocks kept in host memory
    loaded_blocks: int = 0  # copied back from there, since start
    disk_blocks: int = 0  # KV blocks kept in files
    disk_read_blocks: int = 0  # read from there, since start
    disk_written_blocks: int = 0
    disk_lost_blocks: int = 0  # that left host memory before they were written
    load_s: float = 0.0  # to copy a block from host memory to the device; 0: unknown
    disk_read_s: float = 0.0  # to read one from a file; 0: unknown
    compute_s: float = 0.0  # to compute one, of a prompt; 0: unknown
    logits_errors: int = 0  # calls of logits processors that failed, since start
    reserved_blocks: int = 0  # of the pinned ones: for KV that is being read from other workers
    slots: int = 0  # sequences that it takes at once, where that changes; 0: as in ``EngineInfo``
    gpus: tuple[GpuUse, ...] = ()  # of its other machines


class Engine(Protocol):
    """Called from the engine thread only, except ``info``, which is immutable."""

    info: EngineInfo
    kv_transfer: "KvTransfer | None"  # None: it cannot take KV blocks from other workers

    @property
    def vision(self) -> "VisionEngine | None":
        """None: it takes no images."""

    @property
    def grammars(self) -> "Grammars | None":
        """None: it compiles constraints by itself, or takes none (see ``EngineInfo.constraints``)."""

    @property
    def adapters(self) -> "AdapterEngine | None":
        """None: it applies no LoRA adapters."""

    @property
    def weights(self) -> "WeightsEngine | None":
        """None: its weights stay as they are, on the device."""

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here (too long, bad option, an adapter that was not added).
        """

    def cancel(self, key: object) -> bool:
        """Drop a sequence at once and free its blocks; False: unknown (it may just have finished)."""

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""

    def step(self) -> StepResult:
        """One batch of prefill chunks and decode tokens.

        Raises:
            EngineError: nothing more can be expected of this engine.
        """

    @property
    def blocked(self) -> bool:
        """``step`` cannot continue until blocks that are pinned for a handoff become free."""

    def stats(self) -> EngineStats: ...

    def dump(self, rank: int = 0) -> list[KvEvent]:
        """All names in a rank's prefix cache as ``Stored`` events, parents before children."""

    def memory(self) -> dict[str, Memory]:
        """Pools that other workers may read and write, by name; they stay in place until ``close``. Empty: none."""

    def release_pinned(self, key: object) -> bool:
        """Free the blocks of a ``PinnedPrompt``; False: unknown (already freed)."""

    def close(self) -> None: ...


class GrammarStats(NamedTuple):
    """Constraints since the engine's start: ``cached`` were compiled already; ``seconds``: spent compiling the rest."""

    cached: int
    compiled: int
    seconds: float


class Grammars(Protocol):
    """The additional interface of an engine that applies constraints. It may be called from any thread."""

    def stats(self) -> GrammarStats: ...

    def known(self, constraint: Constraint) -> object | None:
        """A compiled constraint; None: compile it. ``Engine.submit`` finds it while the result is referenced."""

    def compile(self, constraint: Constraint, size_bytes: int = 0) -> object:
        """Compile a constraint. ``Engine.submit`` finds it as long as the result is referenced.

        Args:
            size_bytes: of the compiled grammar; 0: it is estimated.
        Raises:
            RequestError: it cannot be compiled.
        """


class AdapterEngine(Protocol):
    """The additional interface of an engine that applies LoRA adapters, different ones and none in one batch.

    Attributes:
        slots: adapters of which sequences run at once.
        max_rank: of an adapter.
        loaded: ids of those with which a sequence can start at once; read in any thread.
    """

    slots: int
    max_rank: int

    @property
    def loaded(self) -> tuple[str, ...]: ...

    def prepare(self, folder: AdapterFolder, identity: str) -> object:
        """Read an adapter into host memory; in any thread.

        Raises:
            AdapterError: it does not fit the model.
        """

    def add(self, identity: str, prepared: object) -> None:
        """Take requests with an adapter from now on; in the engine thread.

        Raises:
            AdapterError: the engine does not take it.
        """

    def remove(self, identity: str) -> None:
        """Take no more requests with an adapter; those that were submitted run to their end. In the engine thread."""


class WeightsEngine(Protocol):
    """The additional interface of an engine whose weights change, or leave the device, while it runs. Engine thread.

    Attributes:
        stays: why they cannot leave the device, as far as that is known before; "": they can.
    """

    stays: str

    def hold(self) -> None:
        """Begin no further step until ``proceed``; sequences stay where they are."""

    def proceed(self) -> None: ...

    @property
    def settled(self) -> bool:
        """Whether it is held, and no step is in flight whose tokens are not returned yet."""

    def read(self, folder: Path) -> Any:
        """Read and check the weights of another folder, in any thread, while this engine computes.

        Raises:
            RequestError: they cannot be used in the place of these.
        """

    def replace(self, read: Any, root_of: Callable[[object, int], bytes]) -> None:
        """Compute with the weights that were read from now on, while it is ``settled``.

        Its prefix cache is emptied. Sequences that run keep their tokens, and what was computed of them is computed
        again.

        Args:
            read: of ``read``.
            root_of: the new parent of a sequence's first block, by its key and the number of its generated tokens.
        Raises:
            RequestError: these weights cannot be used in the place of the present ones, which stay.
            EngineError: the device is lost.
        """

    def sleep(self) -> None:
        """Move the weights to host memory, and free the KV cache, while it is ``settled``. It stays held.

        Raises:
            RequestError: this engine cannot; it is as before.
        """

    def wake(self) -> None:
        """Bring the weights back; ``proceed`` may be called then.

        Raises:
            EngineError: they or the KV cache no longer fit.
        """


class FoundBlocks(NamedTuple):
    """Blocks that hold a prefix, as long as they have these generations."""

    blocks: list[int]
    generations: list[int]
    windows: HeldRows = NO_ROWS


class KvTransfer(Protocol):
    """The additional interface of an engine whose pool (see ``memory``) accepts KV blocks from other workers.

    Called from the engine thread only, except ``find``.

    Attributes:
        prompts_end: called in that thread with the keys of pinned sequences when the step that completes their prompts
            is planned; None: not called.
        prompts_written: called in that thread with these prompts and a number of leading layers, each time that step
            has written the KV of more of them, and with 0 once it has written all; None: not called. The blocks are
            not pinned yet: they belong to the prompt only as long as they have these generations.
    """

    prompts_end: Callable[[list[object]], None] | None
    prompts_written: Callable[[list[PinnedPrompt], int], None] | None

    def reserve(self, digests: Seq[bytes], tails: int, users: int, tokens: int = 0) -> BlockReservation | None:
        """Hold blocks for the KV of these names, cached or to be filled; None: too few are available now.

        Args:
            digests: names of the prompt's full blocks.
            tails: copies of its last block, which is not full: one per sequence that continues in it, or 0.
            users: sequences that will start with the reservation.
            tokens: of the prompt, after which windows of sliding layers end; 0: of its full blocks.

        Raises:
            RequestError: there are never so many rows.
        """

    def adopt(self, reservation: BlockReservation) -> None:
        """The blocks were filled: enter them into the cache. They stay held until the reservation is released."""

    def release(self, reservation: BlockReservation) -> None:
        """Free a reservation (adopted or not) that no sequence was given."""

    def find(self, digests: Seq[bytes]) -> FoundBlocks:
        """The blocks of the longest cached prefix of these names. From any thread, also in the middle of a step."""

    def pin(self, key: object, found: FoundBlocks) -> int:
        """Hold found blocks until ``Engine.release_pinned``; returns how many, the leading ones that are still there.

        None where running sequences would lack them.
        """


def kv_transfer_of(engine: Engine) -> KvTransfer:
    """The capability of an engine that is known to have it: its worker's role needs it."""
    assert engine.kv_transfer is not None, f"engine {engine.info.name} cannot receive KV blocks"
    return engine.kv_transfer


class MediaReservation(msgspec.Struct, eq=False):
    """Slots of the embedding pool held for media, in their order. ``have``: what was in the cache already."""

    digests: list[bytes]
    slots: list[list[int]]
    have: list[bool]


class VisionEngine(Protocol):
    """The additional interface of an engine whose model takes images; an encode worker's engine has little else.

    Embeddings lie in the pool "embeds" of ``Engine.memory``: slots of a fixed number of rows, one row per placeholder
    token. A medium with more tokens takes several slots. ``prepare`` may be called from any thread, the rest only from
    the engine thread.
    """

    slot_tokens: int  # placeholder tokens per slot

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium into what ``encode`` takes.

        Raises:
            RequestError: it cannot be decoded, or is of a kind or shape that the model does not take.
        """

    def reserve(self, media: Seq[tuple[bytes, int]]) -> MediaReservation | None:
        """Hold slots for (digest, tokens) each, cached or to be filled; None: too few are available now.

        Raises:
            RequestError: the pool is too small for them.
        """

    def encode(self, reservation: MediaReservation, prepared: Mapping[int, object]) -> None:
        """Compute the embeddings of media (by their number in the reservation) into their slots, and adopt them.

        Raises:
            RequestError: a medium does not fit its slots.
            EngineError: the device is lost.
        """

    def adopt(self, reservation: MediaReservation) -> None:
        """All slots were filled by a transfer: enter their media into the cache."""

    def release(self, reservation: MediaReservation) -> None:
        """Release the slots; adopted media stay in the cache until their slots are needed."""

    def generations(self, reservation: MediaReservation) -> list[int]:
        """Generations of all slots, flattened in order; a slot's changes when it gets a new owner."""


def vision_of(engine: Engine) -> VisionEngine:
    """The capability of an engine that is known to have it: its model takes images."""
    assert engine.vision is not None, f"engine {engine.info.name} takes no images"
    return engine.vision


def adapter_missing(identity: str) -> str:
    """Why a request with an adapter cannot run."""
    return (
        f"LoRA adapter {identity} is no longer served: it was replaced or unloaded after the request was accepted; "
        "send the request again"
    )


def check_vocabulary(request: SequenceRequest, vocab_size: int) -> None:
    """
    Raises:
        RequestError: a token id is outside the vocabulary.
    """
    highest = max(max(request.prompt, default=0), max(request.generated, default=0))
    if highest >= vocab_size:
        raise RequestError(Code.invalid_request, f"token id {highest} is outside the vocabulary of {vocab_size}")


def check_length(prompt_len: int, generated: int, *, max_tokens: int, max_model_len: int) -> None:
    """Check that at least one more token can be generated. All sizes are in tokens.

    Args:
        generated: tokens of earlier attempts.

    Raises:
        RequestError: the prompt is empty or too long, or nothing is left to generate.
    """
    if not prompt_len:
        raise RequestError(Code.invalid_request, "the prompt has no tokens; give at least one")
    if max_tokens <= generated:
        raise RequestError(
            Code.invalid_request, f"max_tokens is {max_tokens} and {generated} are generated already: nothing to do"
        )
    length = prompt_len + generated
    if length >= max_model_len:
        raise RequestError(
            Code.context_length_exceeded,
            f"{length} tokens leave no room for a new one: this model takes {max_model_len}, output included",
        )
