"""Copies the tokens of launched steps to the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from workers.engines.base import EngineError
from workers.engines.core.sequence import Sampled
from workers.engines.native.cuda.upload import new_event
from workers.engines.native.pool import out_of_memory
from workers.engines.native.sampler import Chosen


class Pending:
    """Implements ``workers.engines.core.sequence.PendingStep``."""

    def __init__(self, finish: Callable[[], list[Sampled]]) -> None:
        self._finish = finish

    def result(self) -> list[Sampled]:
        """Wait for the device.

        Raises:
            EngineError: the device is lost.
        """
        with failing():
            return self._finish()


@contextmanager
def failing() -> Iterator[None]:
    """Turn failures of the device into ``EngineError``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    except RuntimeError as error:  # torch has no narrower type for a lost device
        raise EngineError(f"the step failed: {error}") from error


class Returns:
    """Copies drawn tokens to the host.

    Args:
        most: maximum number of tokens per step.
        in_flight: number of steps whose results may be outstanding; each has a buffer.
    """

    def __init__(self, most: int, in_flight: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [torch.zeros(most, dtype=torch.int32, pin_memory=self._cuda) for _ in range(in_flight)]
        self._turn = 0

    def give(self, drawn: Tensor | Chosen | None, order: list[int], after: Callable[[], None] | None = None) -> Pending:
        """Start the copy.

        Args:
            drawn: (n,) int32, or with log-probabilities; None: nothing was drawn.
            order: indices into ``drawn``, in the order to return; empty: as drawn.
            after: called when the step is done.
        """
        if isinstance(drawn, Chosen):
            drawn = drawn.moved()
        elif drawn is not None:
            self._turn = (self._turn + 1) % len(self._buffers)
            here = self._buffers[self._turn][: len(drawn)]
            here.copy_(drawn, non_blocking=True)
            drawn = here
        event = new_event() if self._cuda else None
        if event is not None:
            event.record()

        def finish() -> list[Sampled]:
            if event is not None:
                event.synchronize()
            if after is not None:
                after()
            if drawn is None:
                return []
            sampled = drawn.sampled() if isinstance(drawn, Chosen) else [Sampled(token) for token in drawn.tolist()]
            return [sampled[row] for row in order] if order else sampled

        return Pending(finish)
