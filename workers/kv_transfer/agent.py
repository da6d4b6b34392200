"""The interface to the library that moves the bytes: one agent, called from one thread.

Each library implements these few calls; deadlines, quarantine, checks and renewal are implemented once, above them.
"""

from typing import Any, Protocol

from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer.blocks import CopyOp


class PeerLost(Exception):
    """The peer or the connection to it has ended."""


class TransferRejected(Exception):
    """The library rejects the peer's metadata or these addresses; nothing was moved."""


class Agent(Protocol):
    endpoint: Endpoint
    events: tuple[int, ...]  # file descriptors, readable when ``progress`` has something to do; may be empty

    def add(self, peer: Endpoint) -> None:
        """Load a peer that is not loaded.

        Raises:
            PeerLost: it cannot be reached.
            TransferRejected: its metadata does not match its name.
        """

    def remove(self, name: str) -> None:
        """Forget a peer, known or not. Its transfers must have ended: their end could not be observed afterwards."""

    def post(self, op: str, peer: str, move: CopyOp) -> Any:
        """Start a "READ" or "WRITE"; may copy everything before it returns. Returns its handle.

        Raises:
            PeerLost, TransferRejected: nothing of it was started.
        """

    def done(self, handle: Any) -> bool:
        """Whether it has completed.

        Raises:
            PeerLost: it has failed; no more bytes are moved.
        """

    def release(self, handle: Any) -> None:
        """Release a handle. A transfer that is not done keeps moving bytes until the agent is closed."""

    def register(self, address: int, size: int) -> None:
        """Register CPU memory as a target of own reads, until the agent is closed."""

    def progress(self) -> None:
        """Drive peers' transfers and connections."""

    def close(self) -> None:
        """Close it and its connections: afterwards none of its transfers moves bytes, and no peer reaches its pools."""
