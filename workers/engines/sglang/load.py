"""What the ranks' schedulers say of their load (``get_loads``). Pure."""

from collections.abc import Iterable
from typing import Any


class RankLoads:
    """The latest load of each rank. Written in the loop thread, read in the engine thread.

    Attributes:
        used_tokens: held by running requests, by rank.
        running: requests, by rank.
        slots: requests that run at once, by rank.
        preemptions: of ended requests, since start.
    """

    def __init__(self) -> None:
        self.used_tokens: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.preemptions = 0

    def take(self, loads: Iterable[Any]) -> None:
        """Take what ``get_loads`` has returned: an object for each rank."""
        for load in loads:
            rank = int(load.dp_rank)
            self.used_tokens[rank] = int(load.num_used_tokens)
            self.running[rank] = int(load.num_running_reqs)
            self.slots[rank] = int(load.max_running_requests)

    def used_blocks(self, block_size: int) -> int:
        """Blocks that running requests hold, on all ranks."""
        return sum(-(-tokens // block_size) for tokens in list(self.used_tokens.values()))
