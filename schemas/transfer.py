"""Handoff between stages: which blocks are where, under which lease. No pickled descriptors, and never the data.

The owner of blocks pins them under a lease and sends a ``Ticket``. The receiver moves the blocks over the transfer
backend (NIXL) and releases the ticket. Everything that happens to a ticket is a line of the ledger (``Handoff``).
"""

import msgspec

from penstock.schemas.trace import Stamps
from penstock.schemas.wire import decoder

KV, WINDOWS = "kv", "kv_windows"  # pools: of all layers, or without those with sliding windows, which are in the second


class Memory(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pool of equal blocks in one worker's memory."""

    base: int  # address of block 0
    block_bytes: int
    blocks: int
    kind: str = "cpu"  # or "cuda"
    device: int = 0
    generations: int = 0  # address of one u32 per block, incremented when the block is reused; 0: there are none
    # dtype and shape of a block, layers first, KV heads last but one. Blocks move between equal layouts, and between
    # layouts that differ only in the number of heads, if all ranks together have equally many.
    layout: str = ""
    first_head: int = 0  # of all of a block's KV heads, those here
    all_heads: int = 0  # of a block; 0: all are here

    @property
    def layers(self) -> int:
        """Layers in a block, in order and of equal size; 0: the layout does not say."""
        first = self.layout.partition("(")[2].partition(",")[0].strip()
        layers = int(first) if first.isdecimal() else 0
        return layers if layers and self.block_bytes % layers == 0 else 0

    @property
    def whole_block(self) -> tuple[str, int]:
        """Layout and bytes of a block with all of its heads: blocks move between workers where these are equal."""
        if not self.all_heads:
            return self.layout, self.block_bytes
        outer, heads, size = self.layout.rsplit(",", 2)
        return f"{outer},{self.all_heads},{size}", self.block_bytes // int(heads) * self.all_heads


MIXED = "mixed"  # in place of a quantization: KV of others is as good


class Endpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to reach the pools of one incarnation of a worker."""

    agent: str  # unique to this incarnation
    backend: str  # "nixl", "loopback"
    version: str = ""  # of the backend
    pools: dict[str, Memory] = {}  # by name: "kv", "kv_windows", "embeds"
    metadata: bytes = b""  # of the backend
    digest: bytes = b""  # blake3 of ``metadata``, 16 bytes; checked before the backend loads it
    host: str = ""  # boot id and PID namespace; processes with equal ones can read each other's memory
    rdma: bool = False
    address: str = ""  # host name, for people
    ranks: "tuple[Endpoint, ...]" = ()  # the others of one engine, with the same blocks and other heads of them
    quantization: str = ""  # of the weights that compute KV; "": as their files have them. Equal where KV is exchanged

    @property
    def gpu(self) -> bool:
        """Whether KV is known to be in the memory of a GPU."""
        return "kv" in self.pools and self.pools["kv"].kind == "cuda"


PREFIX = (
    "prefix"  # in a ticket's id, in place of a stage: blocks of the prefix cache, which a worker reads for a prompt
)


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Pinned blocks of one request. Void once the lease has ended or a block's generation has changed."""

    id: str  # "<request>:<attempt>:<stage that reads>"
    worker: str  # the owner of the blocks
    endpoint: Endpoint
    pool: str
    blocks: bytes  # ids, packed u32, in the order of their content
    generations: bytes  # of these blocks, packed u32
    lease_ns: int  # Unix time after which the blocks may be reused
    windows: bytes = b""  # likewise, in the pool ``WINDOWS``: what the last of these blocks have in sliding windows
    window_generations: bytes = b""


class Encoded(msgspec.Struct, frozen=True, omit_defaults=True, tag="encoded"):
    """The embeddings of a request's media can be read, in the order of its media."""

    request: str
    attempt: int
    job: msgspec.Raw  # the Job for the receiving stage
    ticket: Ticket
    started_ns: int = 0  # when its encoding began
    stamps: Stamps | None = None  # of a traced request


class Prefilled(msgspec.Struct, frozen=True, omit_defaults=True, tag="prefilled"):
    """The KV of the prompt's full blocks can be read, and the first token of each choice was streamed.

    The first tokens are in ``resume`` of the job. All choices share the prompt's blocks.
    """

    request: str
    attempt: int
    job: msgspec.Raw
    ticket: Ticket
    cached: int = 0  # prompt tokens that prefill found in its cache
    started_ns: int = 0
    first_token_ns: int = 0
    opaque: bytes = b""  # engine-owned handoff state (TensorRT-LLM)
    stamps: Stamps | None = None  # of a traced request


class Handoff(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the handoff ledger.

    States of the owner: "offered", "released", "expired". Of the reader: "leased" (it has begun), "read", "failed",
    "quarantined" (its blocks cannot be used until the backend certainly no longer writes to them), "settled".
    """

    ticket: str
    state: str
    source: str  # the owner
    target: str
    at_ns: int
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    cause: str = ""  # of a failure: "peer_lost", "timeout", "stale", "refused", "unavailable", "cancelled", ...
    message: str = ""
    lease_ns: int = 0  # with "offered"
    pool: str = ""


class Handoffs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ledger lines of one worker, in order."""

    worker: str
    events: tuple[Handoff, ...]


decode_ledger = decoder(Handoffs)
