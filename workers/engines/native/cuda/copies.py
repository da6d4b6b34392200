"""Copies between host and device without waiting: lists of integers to it, and the tokens of launched steps from it.

Also says how far a step has come.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.workers.engines.core.sequence import Sampled
from penstock.workers.engines.native.model.attention import AttentionParams, Paged
from penstock.workers.engines.native.model.pool import device_errors
from penstock.workers.engines.native.model.sampler import Chosen

ALIGN = 16  # of each list, in integers: kernels are compiled for aligned pointers
BUFFERS = 3  # copies that may be under way


def new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


class Upload:
    """Collects the lists of a step between ``begin`` and ``send``, then copies all of them at once.

    Args:
        capacity: integers of all lists of one step.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._capacity = capacity
        self._pinned = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(BUFFERS)
        ]
        self._arrays = [pinned.numpy() for pinned in self._pinned]
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._current = 0
        self._used = 0

    def begin(self) -> None:
        """Start the lists of the next step."""
        self._current = (self._current + 1) % BUFFERS
        self._used = 0
        event = self._copied[self._current]
        if event is not None:
            event.synchronize()  # the copy from this buffer, some steps ago

    def put(self, values: "list[int] | np.ndarray[tuple[int, ...], np.dtype[np.int32]]", offset: int = -1) -> Tensor:
        """Add a list; returns the part of the device buffer that will have it.

        Args:
            offset: where in the buffer; the next list follows it. -1: after the last list.
        """
        start = self._used if offset < 0 else offset
        count = len(values)
        self._arrays[self._current][start : start + count] = values
        self._used = max(self._used, start + -(-count // ALIGN) * ALIGN)
        return self.device[start : start + count]

    def room(self) -> int:
        """Integers that one more list can have."""
        return self._capacity - self._used - ALIGN

    def send(self) -> None:
        """Start the copy."""
        if self.device.device.type != "cuda":
            self.device[: self._used] = self._pinned[self._current][: self._used]
            return
        self.device[: self._used].copy_(self._pinned[self._current][: self._used], non_blocking=True)
        event = self._copied[self._current] = self._copied[self._current] or new_event()
        event.record()


class Written(NamedTuple):
    """Implements ``penstock.workers.engines.core.sequence.Waypoint``. ``event``: None on a CPU."""

    layers: int
    event: torch.cuda.Event | None

    def wait(self) -> None:
        if self.event is not None:
            with device_errors():
                self.event.synchronize()


class WrittenLayers:
    """Implements ``Paged`` over another: notes where the leading layers, and all, have written their KV.

    Args:
        layers: of the pool.
        others: the step writes another pool, too, so that the last of these layers is not the end.
    """

    def __init__(self, paged: Paged, layers: int, noted: Callable[[int], None], *, others: bool) -> None:
        self._paged, self._noted = paged, noted
        self._leading, self._last = leading_layers(layers), layers - 1 if not others else -1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        attended = self._paged.attend(layer, query, key, value, params)
        if layer == self._leading - 1:
            self._noted(self._leading)
        elif layer == self._last:
            self._noted(0)
        return attended


def leading_layers(layers: int) -> int:
    """How many are read before the others are computed: these take about as long as the transfer does."""
    return layers - max(1, layers // 8)


class Pending:
    """Implements ``penstock.workers.engines.core.sequence.PendingStep``."""

    waypoints: Sequence[Written] = ()

    def __init__(self, finish: Callable[[], list[Sampled]]) -> None:
        self._finish = finish

    def result(self) -> list[Sampled]:
        """Wait for the device.

        Raises:
            EngineError: the device is lost.
        """
        with device_errors():
            return self._finish()


class LateStep:
    """A step whose tokens are drawn later; implements ``penstock.workers.engines.core.sequence.PendingStep``.

    What a constraint allows depends on the tokens of the step before, which are not known when this one is launched.

    Args:
        draw: starts drawing the tokens.
    """

    waypoints: Sequence[Written] = ()

    def __init__(self, draw: Callable[[], Pending]) -> None:
        self._draw = draw
        self._drawn: Pending | None = None

    def draw(self) -> Pending:
        """Start drawing the tokens, unless that was done. It must be done before the next step is launched."""
        if self._drawn is None:
            self._drawn = self._draw()
        return self._drawn

    def result(self) -> list[Sampled]:
        """As ``Pending.result``."""
        with device_errors(), torch.inference_mode():
            drawn = self.draw()
        return drawn.result()


class HostCopies:
    """Copies sampled tokens to the host.

    Args:
        max_tokens: maximum number of tokens per step.
        in_flight: number of steps whose results may be outstanding; each has a buffer.
    """

    def __init__(self, max_tokens: int, in_flight: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [torch.zeros(max_tokens, dtype=torch.int32, pin_memory=self._cuda) for _ in range(in_flight)]
        self._next = 0

    def start(
        self, sampled: Tensor | Chosen | None, order: list[int], after: Callable[[], None] | None = None
    ) -> Pending:
        """Start the copy.

        Args:
            sampled: (n,) int32, or with log-probabilities; None: nothing was sampled.
            order: indices into ``sampled`` in the order to return; empty: the order of ``sampled``.
            after: called when the step has ended.
        """
        if isinstance(sampled, Chosen):
            sampled = sampled.moved()
        elif sampled is not None:
            self._next = (self._next + 1) % len(self._buffers)
            buffer = self._buffers[self._next][: len(sampled)]
            buffer.copy_(sampled, non_blocking=True)
            sampled = buffer
        event = new_event() if self._cuda else None
        if event is not None:
            event.record()

        def finish() -> list[Sampled]:
            if event is not None:
                event.synchronize()
            if after is not None:
                after()
            if sampled is None:
                return []
            results: list[Sampled]
            if isinstance(sampled, Chosen):
                results = sampled.sampled()
            else:
                results = [(token, None) for token in sampled.tolist()]
            return [results[row] for row in order] if order else results

        return Pending(finish)
