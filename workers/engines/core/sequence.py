"""State of one sequence, shared by scheduler and executor, and the plan of a step that the one gives to the other."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from penstock.infra.process.class_queue import StartShare
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.tokens import Logprob
from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.blocks import BlockFetch
from penstock.workers.engines.engine_protocol import BlockReservation, MediaSpan

if TYPE_CHECKING:
    from penstock.workers.engines.constraints.token_mask import Matcher
    from penstock.workers.engines.logits.registry import Chain


class LoadedAdapter(NamedTuple):
    """A LoRA adapter in host memory.

    Attributes:
        id: equal ids mean equal matrices.
        matrices: as the executor takes them.
    """

    id: str
    matrices: object


@dataclass(slots=True, eq=False)
class Sequence:
    """One running or waiting choice. Owned by the scheduler; executors read it.

    A dataclass, not a struct: several fields change with each token, which costs a struct three times as much.
    """

    key: object
    tokens: list[int]  # prompt, then everything generated
    prompt_len: int
    sampling: Sampling
    stop: Stop
    choice: int
    digests: list[bytes]  # of full blocks of ``tokens``, as far as they were needed yet
    root: bytes
    # Pool blocks in order, only appended to; a new list at each admission; empty while waiting.
    blocks: list[int] = field(default_factory=list)
    # Rows of sliding-window layers, by number of the block; before ``first_row`` they are invalid.
    rows: list[int] = field(default_factory=list)
    first_row: int = 0
    computed: int = 0  # leading tokens whose KV is in ``blocks``, once the planned steps are done
    length: int = 0  # of ``tokens``, with those that planned steps will draw
    step: int = 0  # number of the last plan it is in
    lockstep: bool = False  # a step depends on the token drawn by the step before in more than its last input
    ended: bool = False  # its blocks are kept until the step that still uses them is done
    draft: Seq[int] = ()  # proposed tokens after ``tokens``, in the step that verifies them
    cached: int = 0  # prompt tokens found in the cache at first admission
    named: int = 0  # leading blocks that are in the prefix cache under their digest
    state: object = None  # for the executor: random generator, penalties, ...
    drafter_state: object = None  # for a ``Drafter``
    positions: object = None  # for the executor: those that the model gives to the prompt's tokens
    playing: object = None  # for an engine that plays a recording
    client_request_id: str = ""
    share: StartShare = field(default_factory=StartShare)  # in which it waits
    arrived: int = 0  # admission order
    started: bool = False  # was admitted before; since then possibly preempted
    stops: frozenset[int] = frozenset()  # EOS and stop ids that end it once more than ``stop.min_tokens`` are out
    stoppable: int = 0  # ``tokens`` must be longer than this for a stop id to count
    limit: int = 0  # length of ``tokens`` at which it ends: "length", or more than the pool holds
    extra: Mapping[int, bytes] = field(default_factory=dict)  # hashes of the media in a block, by block position
    media: Seq[MediaSpan] = ()
    pin: bool = False  # see SequenceRequest
    reservation: BlockReservation | None = None
    no_store: bool = False  # see SequenceRequest
    fetches: tuple[BlockFetch, ...] = ()  # that it waits for, or needs to start
    adapter: "LoadedAdapter | None" = None
    adapter_slot: int = -1  # of the device, while it runs; -1: it has no adapter
    passed: int = 0  # times that others went before it, because no slot was free for its adapter
    processors: "Chain | None" = None  # of its logits
    constraint: "Matcher | None" = None  # on its output
    score: int = 0  # the next prompt position to be scored; ``prompt_len``: none is wanted any more
    # Of the prompt, from ``score`` on, by the executor; a new list in each step, taken by the scheduler.
    scores: list[Logprob] = field(default_factory=list)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


class ScheduledSequence(msgspec.Struct, frozen=True):
    """``count`` tokens of ``sequence`` from position ``start`` are computed in this step.

    ``samples``: the last of them is the newest known token, so the next token is drawn from its logits. With
    ``sequence.draft``, the proposed tokens follow it and are counted, and a token is drawn from the logits of each.
    Blocks for positions up to ``start + count`` are in ``sequence.blocks`` already.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool


def scored_to(scheduled: ScheduledSequence) -> int:
    """The prompt position after the last whose log-probability follows from a scheduled sequence's logits."""
    return min(scheduled.start + scheduled.count + 1, scheduled.sequence.prompt_len)


Sampled = tuple[int, Logprob | None]  # a drawn token; its log-probabilities, if they are wanted


class Waypoint(Protocol):
    """The point at which a launched step has written the KV of ``layers`` leading layers; 0: of all."""

    @property
    def layers(self) -> int: ...

    def wait(self) -> None:
        """
        Raises:
            EngineError: the device is lost.
        """


class PendingStep(Protocol):
    """A step that an ``OverlapExecutor`` has begun.

    Attributes:
        waypoints: the known ones, in order, if the step completes a prompt that is handed off.
    """

    @property
    def waypoints(self) -> Seq[Waypoint]: ...

    def result(self) -> list[Sampled]:
        """What ``Executor.execute`` returns, once the step is done; KV is in its blocks then, too.

        Raises:
            EngineError: the device is lost.
        """


class OverlapExecutor(Protocol):
    """An executor that takes the next plan while it computes one. It computes them in order.

    A sequence's last token may not be known yet when it is launched (``start + count > len(tokens)``): then it is the
    one that the step before draws for it. A token with a ``constraint`` is drawn when the next step is launched or the
    result is asked for: by then the tokens before it are known.
    """

    def launch(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> PendingStep:
        """Begin a step; for the arguments and errors see ``Executor.execute``."""

    def memory(self) -> dict[str, Memory]: ...

    def close(self) -> None: ...


class Executor(Protocol):
    """The model side of an engine: computes a plan, keeps KV in pool blocks 0 .. total_blocks - 1."""

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        """Compute every sequence; one ``Sampled`` for each with ``samples``, in plan order, and one per proposed token.

        Args:
            scoring: those of the plan that get ``scores``, of positions ``score`` .. ``scored_to(scheduled)``.
        Raises:
            EngineError: the device is lost.
        """

    def memory(self) -> dict[str, Memory]:
        """Pools that other processes may read and write, without generations; empty: none."""

    def close(self) -> None: ...
