"""A worker's registration: its lease, capabilities and load. The key is the worker id, its TTL ``LEASE_S``.

A worker also registers the names of its parsers (``--reasoning-parser``, ``--tool-call-parser``), which are rows of
``penstock.infra.text.parsers.families``.

``revisions`` chooses the workers of a model that may answer a prompt: those with its tokenizer, and of these one
revision at a time. It depends on the registrations alone, so that every gateway and router gets the same result.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from penstock.schemas.requests import EMBEDDING, SCORE
from penstock.schemas.transfer import Endpoint
from penstock.schemas.wire import decoder

LEASE_S = 3.0
RENEW_S = 0.75
DIFFUSION = "diffusion"  # the role that makes images and videos
EMBED = "embed"  # the role that makes vectors of texts, or scores of pairs of them
APART = frozenset({DIFFUSION, EMBED})  # roles that generate no tokens; their models need no gateway's tokenizer


class WorkerState(enum.StrEnum):
    ready = "ready"
    draining = "draining"


class GpuUse(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A GPU that a worker's engine sees, with the usage of all processes on it.

    Attributes:
        id: the beginning of its UUID, which identifies workers that share it.
        total_bytes, used_bytes: its memory; ``total_bytes`` 0: unknown.
        busy_percent: share of the driver's last sampling period (up to a second) in which a kernel ran; -1: unknown,
            for example on a part of a GPU (MIG).
        error: the reason if it could not be read; "": it was read.
        host: name of its machine; "": the worker's.
    """

    id: str = ""
    total_bytes: int = 0
    used_bytes: int = 0
    busy_percent: int = -1
    error: str = ""
    host: str = ""


class ConnectorUse(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The resources that a worker uses for handoffs of KV and embeddings. -1: unknown, since the engine moves its KV.

    Attributes:
        name: "nixl", or the engine's own connector.
        registered_bytes: memory of the block pools on all ranks, which other workers can read or write.
        buffer_bytes: further memory registered for transfers.
        transfers: running transfers from or to this worker that it drives itself.
        leases: handoffs whose reader has not released them yet.
        pinned_blocks: blocks kept for those readers.
        reserved_blocks: blocks allocated for KV that is being read.
        quarantined_blocks: blocks that a failed transfer may still write.
        buffer_tokens: length of the longest prompt that fits the buffers of an engine that copies KV there first.
    """

    name: str
    registered_bytes: int = -1
    buffer_bytes: int = -1
    transfers: int = -1
    leases: int = 0
    pinned_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    buffer_tokens: int = 0


class Load(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The engine's load at the last renewal. Routers read ``steps`` and ``work_ns``: they track load from the log."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    steps: int = -1  # of the engine that did something, since start; -1: unknown
    slowest_step_ms: int = 0  # of the last 30 to 60 s; 0: none, or unknown
    quiet_ms: int = 0  # since the engine did something, while it has something to do; 0 also if that is unknown
    latency_us: int = 0  # from one token of a sequence to the next; prefill: a prompt; 0: too few lately, or unknown
    engine_us: int = 0  # that the engine spends on each such token, or prompt; 0: as in ``latency_us``
    work_ns: int = 0  # that it spends on a token, those of prompts included
    decode_us: int = 0  # of a step that computes no prompt; 0: there were too few, or unknown
    core_wait_percent: int = 0  # of the last seconds, that a thread waited for a core, the longest one; 0 also: unknown
    gpus: tuple[GpuUse, ...] = ()  # read every few seconds; empty: none, or without nvidia-ml-py
    connector: ConnectorUse | None = None  # None: it hands nothing off


class Diffuser(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a diffusion worker generates, its defaults and its limits."""

    kind: str  # "image" or "video"
    pipeline: str  # class name in model_index.json
    width: int  # pixels; default
    height: int
    steps: int
    formats: tuple[str, ...]  # the first is the default
    max_pixels: int  # width x height
    max_steps: int
    multiple: int = 8  # of width and height
    max_images: int = 1  # per request
    frames: int = 1
    max_frames: int = 1
    frame_step: int = 1  # a video has 1 + k * frame_step frames
    frame_rate: float = 0.0
    negative: bool = True  # takes a negative prompt
    guidance: bool = True  # takes a guidance scale


class Embedder(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an embed worker makes, and its limits."""

    dimensions: int  # of its vectors
    max_tokens: int  # of one input
    vocab_size: int  # token ids of inputs are below it
    pooling: str = ""  # how a vector is made of the tokens': "mean", "cls", "lasttoken", ...
    matryoshka: tuple[int, ...] = ()  # the shorter vectors it was trained for; empty: unknown
    prompts: tuple[str, ...] = ()  # names of what can be put before a text
    default_dimensions: int = 0  # of vectors whose request names no number; 0: ``dimensions``
    scores: bool = False  # it makes no vectors: it scores pairs of texts, so an input is a pair


class LoraAdapter(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A LoRA adapter of a worker."""

    name: str
    digest: str = ""  # of what it computes; "": it cannot be served here
    root: str = ""  # its folder, as whoever loaded it named it
    revision: int = 0  # of its entry in the ``adapters`` bucket, which the worker has followed; 0: it is in its flags
    loaded: bool = False  # in a slot of the device: a request with it can start at once
    error: str = ""  # why it cannot be served here

    @property
    def id(self) -> str:
        """As in ``GenerateRequest.lora``."""
        return adapter_id(self.name, self.digest)


def adapter_id(name: str, digest: str) -> str:
    return f"{name}@{digest}"


def adapter_name(identity: str) -> str:
    """The name in an adapter's id, for clients; "": of no adapter."""
    return identity.partition("@")[0]


class AdapterEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter loaded or unloaded while workers run: a key of the ``adapters`` bucket.

    Attributes:
        model: canonical name of the model that it belongs to.
        path: its folder, within a folder that its workers allow (``--lora-folder``).
        unloaded: it is not served, although a worker's flags name it.
        flagged: a worker's flags named it when it was loaded or unloaded.
    """

    name: str
    model: str
    path: str = ""
    unloaded: bool = False
    flagged: bool = False


FINISH = "finish"  # what becomes of requests that run when weights change: they end first, on the old ones,
CONTINUE = "continue"  # or continue with the new ones; of a pause: they pause


class TensorSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trainer's tensors that workers receive; ``client.weights`` sends them.

    Attributes:
        number: number of the update.
        backend: ``nccl``, ``gloo`` or ``nixl``.
        address, port: the trainer's ``torch.distributed.TCPStore``.
        ranks: rank of each worker, by its id, from 1. The trainer is rank 0.
    """

    number: int
    backend: str
    address: str
    port: int
    ranks: dict[str, int]


class WeightsEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's last request about a model's weights while workers run: a key of the ``weights`` bucket.

    Attributes:
        update: number of the latest update, counted from 1; 0: there was none.
        path: its folder, within a folder that the workers allow (``--weights-folder``).
        base: revision that the workers' flags name. Workers that were started with another one ignore the entry.
        revision: revision that the folder must have; "": no worker has reported it yet.
        before: the revision that it replaced.
        running: ``FINISH`` or ``CONTINUE``.
        paused: likewise; "": the model is not paused.
        within_s: seconds for running requests to finish, after which the update or pause fails.
        source: tensors to receive and keep without serving them; None: there are none.
        received: the weights are this revision's tensors received from a trainer, not those of a folder.
    """

    model: str
    update: int = 0
    path: str = ""
    base: str = ""
    revision: str = ""
    before: str = ""
    running: str = FINISH
    paused: str = ""
    within_s: float = 120.0
    source: TensorSource | None = None
    received: bool = False


class WeightsState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The state of a worker's weights, which may change or leave the device while it runs.

    Attributes:
        update: number of the last update that it has applied; 0: its weights are those of its flags.
        base: revision of its flags' weights.
        entry: revision of the entry in the ``weights`` bucket that it has followed; 0: none.
        error: the reason if it could not apply that entry; "": it has.
        paused: it starts no request, because of that entry or because it lacks the tensors of the last update.
        asleep: its weights are in host memory, and it has no KV cache. It wakes up for a request.
        before: revision whose running requests the last update continued; "": none.
        seconds: duration of the last update, or of the last move to or from host memory.
        receives: it accepts a trainer's tensors.
        received: revision of received tensors that it does not serve yet; "": none.
    """

    update: int = 0
    base: str = ""
    entry: int = 0
    error: str = ""
    paused: bool = False
    asleep: bool = False
    before: str = ""
    seconds: float = 0.0
    receives: bool = False
    received: str = ""


FIXED = WeightsState()  # of a worker whose weights stay as they are


class Registration(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A worker's identity, capabilities and load."""

    worker: str  # unique per process start
    model: str
    role: str
    engine: str
    epoch: int  # ns since 1970 when its cache was made
    block_size: int
    total_blocks: int  # of each rank
    slots: int  # sequences it runs at once, on each rank
    max_model_len: int  # prompt + output, tokens
    state: WorkerState = WorkerState.ready
    aliases: tuple[str, ...] = ()
    revision: str = ""  # of weights and configuration; the root of block names
    kv_events: bool = True
    load: Load = Load()
    dp_size: int = 1  # attention data-parallel ranks; the router treats each as a separate target
    transfer: Endpoint | None = None  # for workers that hand off blocks
    host: str = ""
    pid: int = 0
    name: str = ""  # the same across restarts
    queue: int = 0  # jobs that it takes beyond its slots, on each rank
    connection: str = ""  # name of its broker connection, as in disconnect events
    vision: bool = False  # encodes images itself
    diffusion: Diffuser | None = None  # of role "diffusion"
    logits_processors: tuple[str, ...] = ()  # names that requests may use
    reasoning_parser: str = ""  # "": unknown
    tool_call_parser: str = ""
    max_batched_tokens: int = 0  # per step, on each rank; 0: unknown
    tokenizer: str = ""  # digest of the tokenizer; "": no tokenizer
    silent_cache: bool = False  # reuses KV across requests without ``kv_events``: routers predict what it caches
    embedder: Embedder | None = None  # of role "embed"
    pair_only: bool = False  # a prefill or decode worker whose engine cannot compute the other stage
    ignored_options: tuple[str, ...] = ()  # of clients that its engine does not apply; answers name them
    device: str = ""  # what it computes on, as in "2x NVIDIA H100 80GB HBM3"; "": unknown
    inbox: str = ""  # subjects below it, by request: where contents of its jobs may be sent; "": it asks for them
    source: str = ""  # of the model: folder on ``host``, a bundled model, or Hugging Face id; "": it does not say
    adapters: tuple[LoraAdapter, ...] = ()  # that it serves, and those that it could not load
    adapter_slots: int = 0  # adapters of which sequences run at once; 0: it takes none
    reads_packed: bool = False  # requests whose prompts are packed (``PackedRequest``); False: earlier builds
    weights: WeightsState = FIXED
    tier_costs: tuple[float, ...] = ()  # to bring a block back from host memory, and disk, where computing it is 1
    moves_prefixes: bool = False  # reads prefixes from workers that do so too, and has them read its own
    reserves: bool = False  # takes ``control.Reserve`` and ``control.Fetch``; False: earlier builds, and other roles
    reads_layers: bool = False  # takes ``control.Fetch`` of leading layers; False: earlier builds

    @property
    def rests(self) -> str:
        """The reason why a ready worker starts no request for now; "": it does."""
        return "asleep" if self.weights.asleep else "paused" if self.weights.paused else ""

    @property
    def leaves(self) -> bool:
        return self.state is WorkerState.draining

    @property
    def lasting_name(self) -> str:
        """The same across restarts, also of a worker without a name."""
        return self.name or self.worker.rpartition("-")[0]

    @property
    def output(self) -> str:
        """As ``GenerateRequest.output``: the output of a worker with a role in ``APART``; "": tokens."""
        if self.role == EMBED:
            return SCORE if self.embedder is not None and self.embedder.scores else EMBEDDING
        return self.diffusion.kind if self.role == DIFFUSION and self.diffusion is not None else ""


def same_but_load(old: Registration, new: Registration) -> bool:
    """Whether a renewal changed at most the load, as nearly all do."""
    return msgspec.structs.replace(old, load=new.load) == new


def removal_headers(revision: int) -> dict[str, str]:
    """Headers of an empty message that removes a key if it is still at ``revision``. The removal marker expires."""
    return {
        "KV-Operation": "PURGE",
        "Nats-Rollup": "sub",
        "Nats-TTL": "5",
        "Nats-Expected-Last-Subject-Sequence": str(revision),
    }


decode = decoder(Registration)
decode_adapter = decoder(AdapterEntry)
decode_weights = decoder(WeightsEntry)


NONE = "none"
AUTO = "auto"


NO_TOKENS = ("encode", EMBED)  # roles whose workers may serve a language model's name and generate nothing


class Revisions(NamedTuple):
    """Revisions of one model and tokenizer.

    Attributes:
        serving: the revision for new requests: that of the ready worker with the latest update of its weights, and of
            these the one that registered first; None: no worker is ready.
        present: all revisions that have a ready worker.
        continued: revisions whose running requests the latest update continued, each with the revision that does.
    """

    serving: str | None
    present: frozenset[str]
    continued: Mapping[str, str] = {}


def run_together(workers: Iterable[Registration]) -> bool:
    """Whether workers of one model can run requests (even if they are full now): one alone, or two as a pair."""
    ready = [each for each in workers if each.state is WorkerState.ready and each.role != "encode"]
    return any(not each.pair_only for each in ready) or {"prefill", "decode"} <= {each.role for each in ready}


def reads(registration: Registration, tokenizer: str) -> bool:
    """Whether the worker's tokenizer is the prompt's. Older builds do not register theirs and count as equal."""
    return not tokenizer or not registration.tokenizer or registration.tokenizer == tokenizer


def revisions(workers: Iterable[Registration], tokenizer: str) -> Revisions:
    """Pick the serving revision.

    Args:
        workers: of one model.
        tokenizer: digest of the tokenizer that made the prompts; "": unknown.
    """
    ready = [w for w in workers if w.state is WorkerState.ready and w.role not in NO_TOKENS and reads(w, tokenizer)]
    first = min(ready, key=lambda worker: (-worker.weights.update, worker.epoch, worker.worker), default=None)
    continued = {each.weights.before: each.revision for each in ready if each.weights.before}
    serving = first.revision if first is not None else None
    return Revisions(serving, frozenset(each.revision for each in ready), continued)
