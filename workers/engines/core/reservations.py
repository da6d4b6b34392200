"""KV blocks at a handoff: reserved for prompts that arrive, held for prompts that other workers fetch. Pure."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from penstock.workers.engines.base import HeldPrompt, Reservation
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.sequence import Sequence


class Reservations:
    """Implements ``penstock.workers.engines.base.KvTransfer``: blocks for prompts whose KV comes from another worker.

    Args:
        headroom: blocks that must stay available: one for each running sequence to grow into, and those that the first
            waiting sequence without a reservation needs.
    """

    def __init__(self, blocks: BlockManager, headroom: Callable[[], int]) -> None:
        self._blocks = blocks
        self._headroom = headroom
        self._expected = 0  # sequences that reservations were made for, and that have not started
        self.reserved_blocks = 0

    def reserve(self, digests: Seq[bytes], tails: int, users: int) -> Reservation | None:
        """Hold the blocks of a prompt, cached or to be filled; None: too few are available now."""
        hits = self._blocks.match(digests, len(digests))
        fresh = len(digests) - len(hits) + tails
        if self._blocks.left(hits, fresh) < self._expected + self._headroom():
            return None
        table = self._blocks.take(hits, fresh)
        assert table is not None
        full = len(digests)
        self.reserved_blocks += len(table)
        self._expected += users
        return Reservation(list(digests), table[:full], len(hits), table[full:], users)

    def adopt(self, reservation: Reservation) -> None:
        """The blocks are filled: enter them into the prefix cache."""
        reservation.filled = True
        if self._blocks.prefix_cache:
            reservation.named = self._blocks.name(
                reservation.blocks, reservation.digests, reservation.have, len(reservation.blocks)
            )

    def release(self, reservation: Reservation) -> None:
        """Free the blocks that no sequence has taken; a second call does nothing."""
        table = reservation.blocks + reservation.tails
        self.reserved_blocks -= len(table)
        self._expected -= reservation.users
        self._blocks.release(table)
        reservation.blocks, reservation.tails, reservation.users = [], [], 0

    def take_tail(self, reservation: Reservation) -> None:
        """A sequence starts and continues in one of the copies of the prompt's last block."""
        reservation.tails.pop()
        self.reserved_blocks -= 1

    def release_user(self, reservation: Reservation) -> None:
        """One of its users has started or was cancelled; the last one releases it."""
        if not reservation.users:  # it was released before
            return
        reservation.users -= 1
        self._expected -= 1
        if not reservation.users:
            self.release(reservation)


class HeldBlocks:
    """Blocks of prompts whose sequences have ended, kept until another worker has fetched them."""

    def __init__(self, blocks: BlockManager, block_size: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._tables: dict[object, list[int]] = {}
        self._new: list[HeldPrompt] = []  # not yet reported

    def __contains__(self, key: object) -> bool:
        return key in self._tables

    @property
    def block_count(self) -> int:
        return sum(map(len, self._tables.values()))

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    @property
    def tables(self) -> list[list[int]]:
        return list(self._tables.values())

    @property
    def keys(self) -> list[object]:
        return list(self._tables)

    def hold(self, sequence: Sequence) -> None:
        """Keep the blocks of its prompt beyond its end."""
        table = self._blocks.share(sequence.blocks[: -(-sequence.prompt_len // self._block_size)])
        self._tables[sequence.key] = table
        generations = self._blocks.generations
        self._new.append(HeldPrompt(sequence.key, table, [generations[block] for block in table]))

    def release(self, key: object) -> bool:
        """Free the blocks of an ended sequence; False: it holds none."""
        table = self._tables.pop(key, None)
        if table is None:
            return False
        self._blocks.release(table)
        return True

    def take_new(self) -> list[HeldPrompt]:
        """Blocks held since the last call."""
        new, self._new = self._new, []
        return new
