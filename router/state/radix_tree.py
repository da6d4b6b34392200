"""A radix tree of prompt blocks with the holders of each: runs of blocks as nodes, found by any of their keys.

A key names a whole prefix, since block digests are chained, so a flat dict from key to node is all that a search
needs. A node is a run of consecutive blocks. Its ``mask`` has a bit for each holder of the whole run; holders of only
its first blocks are in ``partial`` by their number. So a holder that gets or loses blocks at the end of a run costs no
node of its own, nor does one that continues a run which nothing follows: a match looks at runs, not at blocks.

Nodes are numbers, their properties are in lists, and keys have 60 bits: nothing in here is an object that Python's
garbage collector has to visit (a full collection of 8 million of them takes a second), and a key takes 32 bytes.

The order of eviction is that of use: a node was used when blocks of it were stored, by any holder, or when blocks
after it were. Leaves go first: by age, those of one age by their first keys (``LeafAges``). It never depends on
matches.
"""

from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

NOTHING = -1
_SLACK = 1 << 12  # ages without leaves that are kept beyond as many as have some


class LeafAges:
    def __init__(self) -> None:
        self.by_age: dict[int, dict[int, None]] = {}
        self._ages: list[int] = []  # a heap of those in ``by_age``, and of some that are not any more
        self._queued: set[int] = set()  # the same
        self._victims: list[int] = []  # leaves of this age, the next one last
        self._victims_age = NOTHING

    def add(self, node: int, age: int) -> None:
        leaves = self.by_age.get(age)
        if leaves is not None:
            leaves[node] = None
        else:
            self.by_age[age] = {node: None}
            if age not in self._queued:
                self._queued.add(age)
                heappush(self._ages, age)
                if len(self._ages) > 2 * len(self.by_age) + _SLACK:
                    self._ages = sorted(self.by_age)
                    self._queued = set(self._ages)
        if age <= self._victims_age:
            self._victims_age, self._victims = age, []

    def remove(self, node: int, age: int) -> None:
        leaves = self.by_age[age]
        del leaves[node]
        if not leaves:
            del self.by_age[age]

    def first_key_changed(self, age: int) -> None:
        """A node of this age has another first key now."""
        if age == self._victims_age:
            self._victims = []

    def oldest(self, chunks: Sequence[Sequence[int]]) -> int:
        """The next leaf to evict. NOTHING: there is none.

        Of several of the same age, the one with the largest first key: when a sweep or a snapshot came in between must
        not matter.

        Args:
            chunks: the keys of each node.
        """
        while self._victims and self._victims[-1] not in self.by_age.get(self._victims_age, ()):
            self._victims.pop()
        if not self._victims:
            while self._ages and self._ages[0] not in self.by_age:
                self._queued.remove(heappop(self._ages))
            self._victims_age = self._ages[0] if self._ages else NOTHING
            self._victims = sorted(self.by_age.get(self._victims_age, ()), key=lambda node: chunks[node][0])
        return self._victims[-1] if self._victims else NOTHING


KEY_MASK = (1 << 60) - 1  # ints below 2^60 take 32 bytes, larger ones 48
NODE_BLOCKS = 1024  # at most, which bounds what a split moves
_SETTLED_AT_ONCE = 2
_MOST_NODES = 1 << 24  # in a snapshot
_STEP = 2_000  # nodes
_SLOTS = 1 << 14
SLOT = _SLOTS - 1
_SHARED_MASKS = 1 << 16
_AGES = 1 << 12  # distinguished within ``max_blocks`` stored blocks
_NONE: dict[int, int] = {}


def _shards() -> list[dict[int, int]]:
    """A dict for each slot of a key's low bits.

    One dict of 2 million keys takes 56 ms to grow, and nothing is placed meanwhile; the slowest of these takes 0.1 ms
    (``python -m tests.perf.tuning shards``). Each has 8 to 16 slots, so they do not all grow at the same time either.
    """
    shards: list[dict[int, int]] = []
    while len(shards) < _SLOTS:
        width = 8 + len(shards) * 8 // _SLOTS
        shards += [{}] * min(width, _SLOTS - len(shards))
    return shards


class Node(NamedTuple):
    """A node at one moment; see ``RadixTree``."""

    chunk: tuple[int, ...]
    mask: int
    partial: dict[int, int]
    parent: int
    age: int


class RadixTree:
    """
    Args:
        max_blocks: about as many blocks are kept by the user; decides how finely ages are distinguished.

    Attributes:
        shards: key -> node, in the dict of the key's slot.
        chunks: by node, the keys of its blocks; (): the number is free.
        masks: by node, the holders of all its blocks.
        partial: by node, for numbers of its first blocks, the holders of only these.
        children: by node, how many nodes follow it.
        blocks: in all nodes, including blocks without a holder that are followed by held ones.
    """

    def __init__(self, max_blocks: int) -> None:
        self.shards = _shards()
        self.chunks: list[tuple[int, ...]] = []
        self.masks: list[int] = []
        self.partial: dict[int, dict[int, int]] = {}
        self.parents = array("q")
        self.children = array("q")
        self.ages = array("q")
        self.blocks = 0
        self.clock = 0  # blocks stored, repeats included
        self._per_age = max(1, max_blocks // _AGES)
        self._free: list[int] = []
        self._leaves = LeafAges()
        self._shared: dict[int, int] = {}  # one int object per mask, not per node
        self._sweeping = 0  # bits that the present sweep clears
        self._shards_left = 0
        self._unsettled: list[int] = []
        self._unswept: list[int] = []
        self._frozen_from = self._frozen_to = 0
        self._frozen: dict[int, Node] | None = None  # nodes as they were, of those that changed meanwhile

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self.chunks) - len(self._free)

    def find(self, key: int) -> int:
        """The node that has ``key`` (60 bits), or NOTHING."""
        return self.shards[key & SLOT].get(key, NOTHING)

    def held(self, node: int, bit: int) -> int:
        """The number of leading blocks of ``node`` that ``bit`` holds."""
        if self.masks[node] & bit:
            return len(self.chunks[node])
        return next((count for count, mask in self.partial.get(node, _NONE).items() if mask & bit), 0)

    def set_held(self, node: int, bit: int, count: int) -> None:
        """``bit`` holds the first ``count`` blocks of ``node``. Call ``settle`` when blocks were lost."""
        if self._frozen is not None:
            self._keep(node)
        if self.masks[node] & bit:
            self.masks[node] = self._share(self.masks[node] ^ bit)
        elif node in self.partial:
            self._clear_partial(node, bit)
        self._add_held(node, bit, count)

    def _add_held(self, node: int, bits: int, count: int) -> None:
        """``bits``, which hold nothing of ``node``, get its first ``count`` blocks."""
        if count == len(self.chunks[node]):
            self.masks[node] = self._share(self.masks[node] | bits)
        elif count and bits:
            partial = self.partial.setdefault(node, {})
            partial[count] = self._share(partial.get(count, 0) | bits)

    def _clear_partial(self, node: int, bits: int) -> None:
        partial = self.partial[node]
        for count, mask in [each for each in partial.items() if each[1] & bits]:
            if mask & ~bits:
                partial[count] = self._share(mask & ~bits)
            else:
                del partial[count]
        if not partial:
            del self.partial[node]

    def grow(self, node: int, last: int, key: int, bit: int) -> bool:
        """Add one block to ``node``, as a decoding worker does; False: only ``insert`` can add it, or it is there.

        Args:
            last: what it has to follow.
        """
        chunk, shard = self.chunks[node], self.shards[key & SLOT]
        grows = self.masks[node] == bit and chunk[-1] == last and not self.children[node]
        if not grows or len(chunk) >= NODE_BLOCKS or key in shard:
            return False
        if self._frozen is not None:
            self._keep(node)
        shard[key] = node
        self.chunks[node] += (key,)
        self.blocks += 1
        self.clock += 1
        if self.ages[node] != self.clock // self._per_age:
            self.touch(node)
        return True

    def insert(self, keys: list[int], node: int, before: int, bit: int) -> tuple[int, int]:
        """Add blocks that ``bit`` holds: those of ``keys`` up to the first known one, and at most a node full.

        Args:
            keys: at least one; the first is not in the tree.
            node: has the block ``before`` the first one; NOTHING: unknown, or the first one begins a prompt.
        Returns: the node that they are in, and their number.
        """
        chunk: tuple[int, ...] = ()
        if node >= 0:
            chunk = self.chunks[node]
            if chunk[-1] != before:
                node = self.split(node, chunk.index(before) + 1)
                chunk = ()
            elif not self.masks[node] & bit or self.children[node] or len(chunk) >= NODE_BLOCKS:
                chunk = ()
        if chunk:
            if self._frozen is not None:
                self._keep(node)
            self.touch(node)
        else:
            node = self._new(node, bit)
        if len(keys) > NODE_BLOCKS - len(chunk):
            keys = keys[: NODE_BLOCKS - len(chunk)]
        shards = self.shards
        owners = [shards[key & SLOT].setdefault(key, node) for key in keys]
        count = owners.count(node)
        if count < len(keys):
            count = next(at for at, other in enumerate(owners) if other != node)
            for key, other in zip(keys[count:], owners[count:], strict=True):
                if other == node:
                    shards[key & SLOT].pop(key, None)
            keys = keys[:count]
        self.chunks[node] = chunk + tuple(keys)
        self.blocks += count
        if others := self.masks[node] ^ bit:
            self.masks[node] = bit
            self._add_held(node, others, len(chunk))
        return node, count

    def release(self, node: int, bit: int, keep: int) -> None:
        """Reduce what ``bit`` holds of ``node`` to the first ``keep`` blocks, and remove blocks without a holder."""
        if self.masks[node] != bit or self.children[node] or node in self.partial:
            self.set_held(node, bit, keep)
            self.settle(node)
            return
        self.evict(node, keep)

    def split(self, node: int, at: int) -> int:
        """Give the first ``at`` blocks to a new node, the parent of ``node``; at least one on either side."""
        if self._frozen is not None:
            self._keep(node)
        chunk, mask = self.chunks[node], self.masks[node]
        front = self._number()
        parent = self.parents[node]
        self.chunks[front], self.chunks[node] = chunk[:at], chunk[at:]
        self.masks[front], self.parents[front], self.parents[node] = mask, parent, front
        self.ages[front], self.children[front] = self.ages[node], 1
        for key in chunk[:at]:
            self.shards[key & SLOT][key] = front
        for count, bits in self.partial.pop(node, _NONE).items():
            self._add_held(front, bits, min(count, at))
            if count > at:
                self._add_held(node, bits, count - at)
        if self._sweeping:
            self._unswept.append(front)
        self._leaves.first_key_changed(self.ages[node])
        return front

    def touch(self, node: int) -> None:
        """Mark ``node`` as used now."""
        age = self.clock // self._per_age
        if self.ages[node] != age:
            if self._frozen is not None:
                self._keep(node)
            if not self.children[node]:
                self._leaves.remove(node, self.ages[node])
                self._leaves.add(node, age)
            self.ages[node] = age

    def settle(self, node: int) -> None:
        """Remove blocks without a holder from the end of ``node``, and then from the nodes before it.

        The latter are left to ``sweep`` if they are many.
        """
        for _ in range(_SETTLED_AT_ONCE):
            if node < 0 or self.children[node] or not self.chunks[node]:
                return
            partial = self.partial.get(node)
            keep = len(self.chunks[node]) if self.masks[node] else max(partial) if partial else 0
            self.truncate(node, keep)
            if keep:
                return
            node = self._delete(node)
        if node >= 0:
            self._unsettled.append(node)

    def truncate(self, node: int, keep: int) -> None:
        """Keep the first ``keep`` blocks of a leaf. 0 leaves an empty node, which has to be removed: see ``evict``."""
        chunk = self.chunks[node]
        if keep == len(chunk):
            return
        if self._frozen is not None:
            self._keep(node)
        for key in chunk[keep:]:
            self.shards[key & SLOT].pop(key, None)
        self.blocks -= len(chunk) - keep
        self.chunks[node] = chunk[:keep]
        partial = self.partial.pop(node, _NONE)
        if not keep:
            self.masks[node] = 0
            return
        for count, bits in partial.items():
            self._add_held(node, bits, min(count, keep))

    def evict(self, node: int, keep: int) -> None:
        """Keep the first ``keep`` blocks of a leaf, even if others are held."""
        self.truncate(node, keep)
        self.settle(node if keep else self._delete(node))

    def oldest(self) -> int:
        """The least recently used leaf. NOTHING: the tree is empty."""
        return self._leaves.oldest(self.chunks)

    @property
    def settled(self) -> bool:
        """Whether ``settle`` has left no nodes for ``sweep``."""
        return not self._unsettled

    def begin_sweep(self, bits: int) -> None:
        """From now on ``sweep`` removes the holders ``bits``, which store nothing any more."""
        self._sweeping, self._shards_left, self._unswept = bits, _SLOTS if bits else 0, []

    def sweep(self, limit: int) -> bool:
        """Visit at most about ``limit`` nodes and blocks; True: the holders of this sweep hold nothing any more."""
        shards, bits, unswept = self.shards, self._sweeping, self._unswept
        while limit > 0 and (unswept or self._shards_left or self._unsettled):
            before = self.blocks
            if self._unsettled:
                self.settle(self._unsettled.pop())
            elif unswept:
                self._clear(unswept.pop(), bits)
            else:
                shard = shards[self._shards_left - 1]
                while self._shards_left and shards[self._shards_left - 1] is shard:
                    self._shards_left -= 1
                unswept.extend({*shard.values()})
                limit -= len(shard) // 8
            limit -= 1 + before - self.blocks
        if unswept or self._shards_left or self._unsettled:
            return False
        self._sweeping = 0
        return True

    def freeze(self) -> Iterator[tuple[int, Node]]:
        """All nodes as they are now, with their numbers; what changes is kept as it was until ``thaw``."""
        self._frozen = {}
        self._frozen_from, self._frozen_to = 0, len(self.chunks)
        return self._frozen_nodes(self._frozen)

    def _frozen_nodes(self, kept: dict[int, Node]) -> Iterator[tuple[int, Node]]:
        for node in range(self._frozen_to):
            frozen = kept.pop(node, None) or self._node(node)
            self._frozen_from = node + 1
            if frozen.chunk:
                yield node, frozen

    def thaw(self) -> None:
        """End the last ``freeze``: its nodes were read, or are not needed."""
        self._frozen = None

    def load(self, node: int, chunk: tuple[int, ...], mask: int, parent: int, age: int) -> None:
        """Add a node of another tree under its number. ``link`` when all are there.

        Raises:
            ValueError: its number is not possible.
        """
        if not 0 <= node < _MOST_NODES:
            raise ValueError(f"node {node} of at most {_MOST_NODES}")
        while len(self.chunks) <= node:
            self._number_at_end()
        self.chunks[node], self.parents[node], self.ages[node] = chunk, parent, age
        self.masks[node] = self._share(mask)
        for key in chunk:
            self.shards[key & SLOT][key] = node
        self.blocks += len(chunk)

    def link(self) -> Iterator[None]:
        """Finish loading, in steps of less than 1 ms."""
        for node in range(len(self.chunks)):
            if self.chunks[node] and (parent := self.parents[node]) >= 0:
                self.children[parent] += 1
            if node % _STEP == 0:
                yield
        for node, chunk in enumerate(self.chunks):
            if not chunk:
                self._free.append(node)
            elif not self.children[node]:
                self._leaves.add(node, self.ages[node])
                if not self.masks[node]:
                    self._unsettled.append(node)
            if node % _STEP == 0:
                yield

    def _keep(self, node: int) -> None:
        """Called before a change of a node: keep a copy, if ``freeze`` has not reached the node yet."""
        if self._frozen is not None and self._frozen_from <= node < self._frozen_to and node not in self._frozen:
            self._frozen[node] = self._node(node)

    def _node(self, node: int) -> Node:
        partial = dict(self.partial.get(node, {}))
        return Node(self.chunks[node], self.masks[node], partial, self.parents[node], self.ages[node])

    def _share(self, mask: int) -> int:
        if len(self._shared) >= _SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _new(self, parent: int, mask: int) -> int:
        node = self._number()
        self.masks[node], self.parents[node], self.children[node] = mask, parent, 0
        if parent >= 0:
            if not self.children[parent]:
                self._leaves.remove(parent, self.ages[parent])
            self.children[parent] += 1
        self.ages[node] = age = self.clock // self._per_age
        self._leaves.add(node, age)
        return node

    def _number(self) -> int:
        if not self._free:
            return self._number_at_end()
        if self._frozen is not None:
            self._keep(self._free[-1])
        return self._free.pop()

    def _number_at_end(self) -> int:
        self.chunks.append(())
        self.masks.append(0)
        self.parents.append(NOTHING)
        self.children.append(0)
        self.ages.append(0)
        return len(self.chunks) - 1

    def _delete(self, node: int) -> int:
        """Free an empty leaf. Returns: its parent."""
        self.masks[node], parent, age = 0, self.parents[node], self.ages[node]
        self._leaves.remove(node, age)
        self._free.append(node)
        if parent >= 0:
            if self._frozen is not None:
                self._keep(parent)
            self.children[parent] -= 1
            self.ages[parent] = age = max(age, self.ages[parent])
            if not self.children[parent]:
                self._leaves.add(parent, age)
        return parent

    def _clear(self, node: int, bits: int) -> None:
        """Remove the holders ``bits`` from a node, which may be free by now."""
        if self._frozen is not None:
            self._keep(node)
        if self.masks[node] & bits:
            self.masks[node] = self._share(self.masks[node] & ~bits)
        if node in self.partial:
            self._clear_partial(node, bits)
        if self.chunks[node] and not self.masks[node]:
            self.settle(node)
