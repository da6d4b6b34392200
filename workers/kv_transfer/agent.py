"""What a transport needs of the library that moves the bytes: one agent, called from one thread.

The library fills in these few calls; deadlines, quarantine, checks and renewal are made once, above them.
"""

from typing import Any, Protocol

from schemas.transfer import Endpoint
from workers.kv_transfer.blocks import CopyOp


class PeerLost(Exception):
    """The peer has ended, or the connection to it has."""


class TransferRejected(Exception):
    """The library does not take the peer's metadata or these addresses; nothing was moved."""


class Agent(Protocol):
    endpoint: Endpoint
    events: tuple[int, ...]  # file descriptors, readable when ``progress`` has something to do; may be empty

    def add(self, peer: Endpoint) -> None:
        """Load a peer that is not loaded.

        Raises:
            PeerLost: it cannot be reached.
            TransferRejected: its metadata is not what it says.
        """

    def remove(self, name: str) -> None:
        """Forget a peer, known or not. Its transfers must have ended: nothing would tell their end afterwards."""

    def post(self, op: str, peer: str, move: CopyOp) -> Any:
        """Start a "READ" or "WRITE"; may copy everything before it returns. Returns its handle.

        Raises:
            PeerLost, TransferRejected: nothing of it is under way.
        """

    def done(self, handle: Any) -> bool:
        """Whether it has ended well.

        Raises:
            PeerLost: it has ended otherwise; no byte of it moves any more.
        """

    def release(self, handle: Any) -> None:
        """Give a handle back. One that is not done goes on moving bytes until the agent is closed."""

    def register(self, address: int, size: int) -> None:
        """Make CPU memory known as a target of own reads, for as long as the agent lives."""

    def progress(self) -> None:
        """Let peers' transfers and connections go on."""

    def close(self) -> None:
        """End it, its connections too: afterwards nothing it has posted moves, and no peer reaches its pools."""
