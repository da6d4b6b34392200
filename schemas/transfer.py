"""Hand-over between stages: what lies where, under which lease. Never pickled descriptors.

Sent only by disaggregated workers.
"""

import msgspec


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Pinned blocks of one request in the pool of ``worker``; void when generation or lease has passed."""

    id: str
    worker: str
    agent: str  # transfer agent, its name carries the worker's incarnation
    generation: int
    lease_ns: int  # Unix time after which the blocks may be reused
    base: int  # address of the pool
    block_bytes: int
    blocks: tuple[int, ...]
    device: int = 0
    memory: str = "cpu"  # "cpu" or "cuda"
    metadata: bytes = b""  # of the agent, if the reader may not have it


class Encoded(msgspec.Struct, frozen=True, omit_defaults=True, tag="encoded"):
    """Embeddings of a request's media are ready to be read."""

    request: str
    attempt: int
    job: msgspec.Raw  # the Job for the receiving stage
    ticket: Ticket
    shape: tuple[int, ...]
    dtype: str


class Prefilled(msgspec.Struct, frozen=True, omit_defaults=True, tag="prefilled"):
    """The prompt's KV is ready to be read, and the first token was streamed."""

    request: str
    attempt: int
    job: msgspec.Raw
    ticket: Ticket
    first_tokens: tuple[bytes, ...] = ()  # per choice, packed u32
    opaque: bytes = b""  # engine-owned hand-over state (TensorRT-LLM)


class HandOff(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the hand-off ledger."""

    ticket: str
    request: str
    state: str  # "offered", "leased", "read", "released", "failed", "expired"
    source: str
    target: str
    at_ns: int
    blocks: int = 0
    bytes: int = 0
    error: str = ""
