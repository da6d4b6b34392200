"""Copies the tokens of launched steps to the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.workers.engines.base import EngineError
from penstock.workers.engines.core.sequence import Sampled
from penstock.workers.engines.native.cuda.upload import new_event
from penstock.workers.engines.native.model.pool import out_of_memory
from penstock.workers.engines.native.model.sampler import Chosen


class Pending:
    """Implements ``penstock.workers.engines.core.sequence.PendingStep``."""

    def __init__(self, finish: Callable[[], list[Sampled]]) -> None:
        self._finish = finish

    def result(self) -> list[Sampled]:
        """Wait for the device.

        Raises:
            EngineError: the device is lost.
        """
        with device_errors():
            return self._finish()


class Late:
    """A step whose tokens are drawn later; implements ``penstock.workers.engines.core.sequence.PendingStep``.

    What a constraint allows depends on the tokens of the step before, which are not known when this one is launched.

    Args:
        draw: starts drawing the tokens.
    """

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


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise failures of the device as ``EngineError``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    except RuntimeError as error:  # torch has no narrower type for a lost device
        raise EngineError(f"the step failed: {error}") from error


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
