"""The peers that are loaded into the agent, and when one may be removed again.

A peer is loaded once, until it ends: loading and removing per request would leak a file descriptor each time. After an
error it is removed before it is loaded again, but only when all its transfers have ended: afterwards the library could
not report their end. Metadata are compared with their digest first, because one damaged blob makes a name unusable
until the agent is closed.
"""

from dataclasses import dataclass

from blake3 import blake3

from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer.agent import Agent, PeerLost, TransferRejected
from penstock.workers.kv_transfer.base import TransferError

DIGEST_BYTES = 16


def digest(metadata: bytes) -> bytes:
    """The value of ``Endpoint.digest``."""
    return blake3(metadata).digest(length=DIGEST_BYTES)


@dataclass(slots=True)
class _Peer:
    digest: bytes
    posted: int = 0  # transfers that have not ended
    stuck: int = 0  # of these, those whose deadline has passed
    ending: bool = False  # lost or forgotten: removed as soon as nothing of it is posted


class LoadedPeers:
    """The peers of one agent; used in its thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def load(self, peer: Endpoint) -> None:
        """Make sure that transfers with this peer can be posted.

        Raises:
            TransferError: refused (damaged metadata), or peer_lost (it ended, or an earlier transfer has not).
        """
        loaded = self._peers.get(peer.agent)
        if loaded is not None and loaded.ending:
            raise TransferError("peer_lost", f"agent {peer.agent} was lost, and transfers with it have not ended yet")
        if loaded is not None and loaded.stuck:
            raise TransferError("peer_lost", f"agent {peer.agent} is stuck: a transfer with it has not ended")
        if loaded is not None and loaded.digest == peer.digest:
            return
        if not peer.metadata or digest(peer.metadata) != peer.digest:
            raise TransferError("refused", f"agent {peer.agent}: its metadata were damaged on the way")
        if loaded is not None:
            raise TransferError("refused", f"agent {peer.agent} has other metadata than before; a name is used once")
        self._agent.remove(peer.agent)
        try:
            self._agent.add(peer)
        except PeerLost as error:
            self._agent.remove(peer.agent)
            raise TransferError("peer_lost", f"agent {peer.agent} cannot be reached: {error}") from error
        except TransferRejected as error:
            self._agent.remove(peer.agent)
            raise TransferError("refused", f"agent {peer.agent}: {error}") from error
        self._peers[peer.agent] = _Peer(peer.digest)

    def usable(self, name: str) -> bool:
        """Whether a transfer may be posted now, after an earlier ``load``."""
        return name in self._peers and not self._peers[name].ending

    def posted(self, name: str) -> None:
        self._peers[name].posted += 1

    def stuck(self, name: str) -> None:
        """The deadline of a posted transfer has passed."""
        self._peers[name].stuck += 1

    def ended(self, name: str, *, stuck: bool = False, lost: bool = False) -> None:
        """A posted transfer has completed or failed."""
        peer = self._peers[name]
        peer.posted -= 1
        peer.stuck -= stuck
        peer.ending |= lost
        self._remove(name)

    def lost(self, name: str) -> None:
        """The peer has ended or must be loaded again; unknown names are ignored."""
        if peer := self._peers.get(name):
            peer.ending = True
            self._remove(name)

    def _remove(self, name: str) -> None:
        if self._peers[name].ending and not self._peers[name].posted:
            del self._peers[name]
            self._agent.remove(name)
