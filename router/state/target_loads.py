"""The load of each target, and how fast it turned out to be. No clock, no NATS.

A row of ``TargetLoads`` is one target: a worker, or one attention data-parallel rank of it. ``arrays.LoadColumns`` has
the same as arrays.

``LearnedCosts`` is the speed of each target in computing prompts and in decoding, learnt from measured times. All
targets of a model together give the time of a prompt as ``a + b · tokens``, by least squares over recent prompts. A
target's slowness is the time that its prompts took over the time that they should have taken, relative to the median of
the model's targets. It begins at 1, moves with ``PRIOR`` prompts, forgets after ``MEMORY`` prompts, and counts as 1
while it is within ``NOISE`` of it: equally fast targets must not look different because of what else they had to do.

Decoding is learnt in the same way, from the time between a computed prompt and the end of its request. Its tokens are
those of the context that the target read in each step. How many tokens a request generated is not known, which is the
same for all targets on average; what is left of it is within ``DECODE_NOISE``.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from penstock.router.state.holders import Depths, TargetId
from penstock.router.state.prefix_index import ActivePrefixes
from penstock.schemas.fleet import Registration

ENCODE = "encode"  # the role that computes no part of a prompt


class ExpectedLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """The load of one target, including requests that are still on their way to it."""

    requests: int = 0
    sequences: int = 0
    active_blocks: int = 0  # prompt blocks of its active requests; cached blocks count where they were computed
    prefill_tokens: float = 0.0  # prompt tokens still to compute
    computing: int = 0  # sequences whose prompt is known not to be computed yet
    slowness: float = 1.0  # time per prompt token, relative to the other targets of the model
    context_blocks: int = 0  # prompt blocks of its active sequences, shared ones counted for each
    decode_slowness: float = 1.0  # time per step, relative to the other targets of the model
    served_tokens: int = 0  # of prompts that this router sent there lately; more if another router prefers it


class RoutingTarget(msgspec.Struct, frozen=True):
    """A worker, or one attention data-parallel rank of it, that requests can be sent to."""

    id: TargetId
    registration: Registration
    load: ExpectedLoad

    @property
    def capacity(self) -> int:
        """Further sequences that it accepts."""
        return max(0, self.registration.slots + self.registration.queue - self.load.sequences)


def serves(registration: Registration, model: str) -> bool:
    """Whether the worker serves ``model``, by name or alias."""
    return model == registration.model or model in registration.aliases


class TargetColumns(msgspec.Struct, gc=False):
    """What the cost of a request at a target depends on. Where arrays of many targets are meant, each field is one.

    Attributes:
        block_size: in tokens.
        total_blocks: of the KV cache.
        slots: for sequences that run at once.
        limit: of all sequences, those that wait at the target included.
        active_blocks: distinct prompt blocks of unfinished requests.
        context_blocks: the same with shared blocks counted for every sequence, as a decode step reads them.
        prefill_tokens: uncached prompt tokens that are not computed yet.
        computing: sequences whose prompt is not computed yet.
        slowness: time per prompt token, relative to the model's other targets.
        decode_slowness: time per step, likewise.
        served_tokens: of prompts that this router sent there lately, and more if another router prefers the target.
    """

    block_size: int = 0
    total_blocks: int = 0
    slots: int = 0
    limit: int = 0
    sequences: int = 0
    active_blocks: int = 0
    context_blocks: int = 0
    prefill_tokens: int = 0
    computing: int = 0
    slowness: float = 1.0
    decode_slowness: float = 1.0
    served_tokens: int = 0


SERVED_REQUESTS = 64  # for each target, after which ``served_tokens`` is halved


class Task(NamedTuple):
    """A request at one target, from its placement to its end.

    Attributes:
        keys: of the full blocks of its prompt; empty: unknown, ``blocks`` is how many count.
        uncached_tokens: prompt tokens that the target has to compute.
        sequences: generated from the prompt.
        context: blocks of the whole prompt, cached or not.
        at_ns: when it was placed; 0: unknown, nothing is learnt from it.
    """

    request: str
    target: TargetId
    keys: Sequence[int]
    blocks: int
    uncached_tokens: int
    sequences: int = 1
    context: int = 0
    at_ns: int = 0


class TargetLoads:
    """Capacity and load of all targets.

    Attributes:
        changed: rows that changed since ``LoadColumns`` read them last.
        estimates: arguments of ``estimate`` by row; ``prefill_tokens`` comes without them.
    """

    def __init__(self) -> None:
        self._rows: dict[TargetId, int] = {}
        self._free: list[int] = []
        # By row: changing a field is several times cheaper than an array's element. Counts are integers, which score
        # tables need.
        self._values: list[TargetColumns] = []
        self.changed: set[int] = set()
        self.estimates: dict[int, tuple[float, int, int]] = {}
        self._sent = 0  # prompts since ``served_tokens`` was halved
        self._prefixes = ActivePrefixes()
        self.tasks: dict[tuple[str, TargetId], Task] = {}
        self.learned = LearnedCosts()
        self.learned_decode = LearnedCosts(DECODE_NOISE)
        self._decoding: dict[tuple[str, TargetId], tuple[int, float]] = {}  # since when, and how much context there was
        self._models: dict[TargetId, str] = {}
        self._means: dict[str, int] = {}  # cache: by model, mean of ``served_tokens``, with which a target begins
        self._computed_ns: dict[TargetId, int] = {}  # when the last prompt was computed
        self._computing: dict[TargetId, dict[int, dict[str, Task]]] = {}  # by last key of the prompt and request

    def row(self, target: TargetId) -> int | None:
        """The row of a target; None: it is unknown."""
        return self._rows.get(target)

    def block_size(self, target: TargetId) -> int:
        return int(self._values[self._rows[target]].block_size)

    def estimate(self, target: TargetId, tokens: float, at_ns: int, most: int) -> None:
        """Add prompt tokens whose computation no event will report; their backlog is now at most ``most``."""
        row = self._rows.get(target)
        if row is None:
            return
        self.changed.add(row)
        if most:
            self.estimates[row] = tokens, at_ns, most
        else:
            self.estimates.pop(row, None)

    def load(self, row: int) -> TargetColumns:
        """All columns of one target."""
        return self._values[row]

    def loads(self, rows: Iterable[int]) -> list[TargetColumns]:
        """``load`` of each row."""
        values = self._values
        return [values[row] for row in rows]

    def put(self, target: TargetId, *, block_size: int, blocks: int, slots: int, limit: int, model: str = "") -> bool:
        """Add a target, or change its capacity; True: it is new."""
        row = self._rows.get(target)
        new = row is None
        if row is None:
            row = self._rows[target] = self._free.pop() if self._free else len(self._rows)
            if row == len(self._values):
                self._values.append(TargetColumns())
            self._values[row] = TargetColumns(served_tokens=self._mean_served(model))
        values = self._values[row]
        values.block_size, values.total_blocks, values.slots, values.limit = block_size, blocks, slots, limit
        self.changed.add(row)
        self._models[target] = model
        return new

    def remove(self, target: TargetId) -> list[Task]:
        """Remove a target and return its tasks."""
        row = self._rows.pop(target, None)
        if row is None:
            return []
        self._free.append(row)
        self._means.clear()
        self.estimates.pop(row, None)
        lost = [task for (_, at), task in self.tasks.items() if at == target]
        for task in lost:
            del self.tasks[task.request, target]
            self._decoding.pop((task.request, target), None)
        self._computing.pop(target, None)
        self._models.pop(target, None)
        self._computed_ns.pop(target, None)
        self.learned.forget(target)
        self.learned_decode.forget(target)
        self._prefixes.forget(target)
        return lost

    def add(self, task: Task) -> bool:
        """A request was sent to its target; unknown targets are ignored.

        Returns: whether ``stored`` will find when its prompt is computed, so that it counts in ``prefill_tokens`` until
            then.
        """
        row = self._rows.get(task.target)
        if row is None or (task.request, task.target) in self.tasks:
            return False
        self.tasks[task.request, task.target] = task
        values = self._values[row]
        self.changed.add(row)
        values.sequences += task.sequences
        values.context_blocks += task.context * task.sequences
        values.active_blocks += self._prefixes.add(task.target, task.keys) if task.keys else task.blocks
        if task.uncached_tokens < values.block_size or not task.keys:
            if not task.uncached_tokens:
                self._decodes(task, task.at_ns)
            return False
        self._computing.setdefault(task.target, {}).setdefault(task.keys[-1], {})[task.request] = task
        values.prefill_tokens += task.uncached_tokens
        values.computing += task.sequences
        return True

    def count(self, target: TargetId, sequences: int, blocks: int, context: int) -> None:
        """Add a request of which only this is known, or take it away (``sequences`` and ``blocks`` negative).

        Args:
            context: as in ``Task``.
        """
        row = self._rows.get(target)
        if row is None:
            return
        values = self._values[row]
        values.sequences += sequences
        values.context_blocks += context * sequences
        values.active_blocks += blocks
        self.changed.add(row)

    def is_computing(self, target: TargetId) -> bool:
        """Whether ``stored`` may find prompts of this target to be computed."""
        return bool(self._computing.get(target))

    def silent(self, before_ns: int) -> list[TargetId]:
        """Targets with prompts to compute, by ``uncomputed``, that have computed none since then."""
        computed_ns = self._computed_ns.get
        return [target for target, among in self._computing.items() if among and computed_ns(target, 0) <= before_ns]

    def uncomputed(self, target: TargetId) -> list[Task]:
        """The tasks whose prompt is not computed yet, as far as KV events will report it."""
        return [task for among in self._computing.get(target, {}).values() for task in among.values()]

    def computed_ns(self, target: TargetId) -> int:
        """When a target computed a prompt last; 0: not yet."""
        return self._computed_ns.get(target, 0)

    def stored(self, target: TargetId, keys: Sequence[int], now_ns: int = 0) -> list[Task]:
        """Handle KV events: ``target`` now holds these blocks. Returns the tasks whose prompt is thereby computed.

        Args:
            now_ns: 0: unknown, nothing is learnt from it.
        """
        computing = self._computing.get(target)
        if not computing or computing.keys().isdisjoint(keys):
            return []
        done = [task for key in keys if key in computing for task in computing[key].values()]
        for task in done:
            self._computed(task)
        began_ns = max(min(task.at_ns for task in done), self._computed_ns.get(target, 0))
        if 0 < began_ns < now_ns:
            tokens = sum(task.uncached_tokens for task in done)
            slowness = self.learned.computed(self._models[target], target, tokens, (now_ns - began_ns) / 1e9)
            row = self._rows[target]
            self._values[row].slowness = slowness
            self.changed.add(row)
        for task in done:
            self._decodes(task, now_ns)
        if now_ns:
            self._computed_ns[target] = now_ns
        return done

    def end(self, request: str, target: TargetId, now_ns: int = 0) -> Task | None:
        """A request ended, or left for its next stage.

        Args:
            now_ns: 0: unknown, or it was not served to its end; nothing is learnt from it.
        """
        task = self.tasks.pop((request, target), None)
        if task is None:
            return None
        self._computed(task)
        row = self._rows[target]
        values = self._values[row]
        since_ns, context = self._decoding.pop((request, target), (0, 0.0))
        if 0 < since_ns < now_ns:
            seconds = (now_ns - since_ns) / 1e9
            values.decode_slowness = self.learned_decode.computed(self._models[target], target, context, seconds)
        values.sequences -= task.sequences
        values.context_blocks -= task.context * task.sequences
        values.active_blocks -= self._prefixes.remove(target, task.keys) if task.keys else task.blocks
        self.changed.add(row)
        return task

    def prefixes(self, keys: Sequence[int]) -> Depths:
        """Leading blocks of a prompt that active requests have, by target; to be read at once."""
        return self._prefixes.match(keys)

    def shares_at_most(self, keys: Sequence[int], blocks: int) -> bool:
        """``ActivePrefixes.at_most`` for ``prefixes``."""
        return self._prefixes.at_most(keys, blocks)

    def sweep(self, limit: int) -> bool:
        """As ``ActivePrefixes.sweep``."""
        return self._prefixes.sweep(limit)

    def served_tokens(self, target: TargetId) -> int:
        row = self._rows.get(target)
        return 0 if row is None else int(self._values[row].served_tokens)

    def sent(self, target: TargetId, tokens: int) -> None:
        """Count a prompt that this router sent to a target in ``served_tokens``."""
        row = self._rows.get(target)
        if row is None:
            return
        self._means.clear()
        self._values[row].served_tokens += tokens
        self.changed.add(row)
        self._sent += 1
        if self._sent >= SERVED_REQUESTS * len(self._rows):
            self._sent = 0
            for each in self._rows.values():
                self._values[each].served_tokens //= 2
                self.changed.add(each)

    def _mean_served(self, model: str) -> int:
        """The initial ``served_tokens`` of a new target, so that it is not sent all requests until it has caught up."""
        mean = self._means.get(model)
        if mean is None:
            others = [self.served_tokens(target) for target, at in self._models.items() if at == model]
            mean = self._means[model] = sum(others) // len(others) if others else 0
        return mean

    def _decodes(self, task: Task, now_ns: int) -> None:
        """Count a request as decoding: its prompt is computed."""
        if now_ns:
            values = self._values[self._rows[task.target]]
            self._decoding[task.request, task.target] = now_ns, values.context_blocks * values.block_size

    def _computed(self, task: Task) -> None:
        among = self._computing.get(task.target, {})
        waiting = among.get(task.keys[-1]) if task.keys else None
        if waiting is None or waiting.pop(task.request, None) is None:
            return
        if not waiting:
            del among[task.keys[-1]]
        row = self._rows[task.target]
        values = self._values[row]
        values.prefill_tokens -= task.uncached_tokens
        values.computing -= task.sequences
        self.changed.add(row)


class TargetSum:
    """The active requests of one target, and its prefill backlog as a leaky bucket."""

    __slots__ = ("at_ns", "backlog", "names", "requests", "uncached_tokens")

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # oldest first
        self.requests = self.uncached_tokens = 0
        self.backlog = 0.0
        self.at_ns = 0

    def prefill_tokens(self, now_ns: int, tokens_per_s: float) -> float:
        if not self.backlog:
            return 0.0
        drained = max(0, now_ns - self.at_ns) * tokens_per_s / 1e9
        return min(max(0.0, self.backlog - drained), float(self.uncached_tokens))


class TargetSums:
    """The ``TargetSum`` of each target that has active requests.

    Args:
        loads: gets the estimated backlogs.
        tokens_per_s: at which these drain.
    """

    def __init__(self, loads: TargetLoads, tokens_per_s: float) -> None:
        self.by_target: dict[TargetId, TargetSum] = {}
        self._loads = loads
        self._tokens_per_s = tokens_per_s

    def add(self, target_id: TargetId, request: str, uncached_tokens: int, now_ns: int) -> None:
        held = self.by_target.get(target_id)
        if held is None:
            held = self.by_target[target_id] = TargetSum()
        if uncached_tokens or held.backlog:
            left = held.prefill_tokens(now_ns, self._tokens_per_s)
            held.backlog, held.at_ns = left + uncached_tokens, max(now_ns, held.at_ns)
        held.names[request] = None
        held.requests += 1
        if uncached_tokens:
            held.uncached_tokens += uncached_tokens
            self._loads.estimate(target_id, held.backlog, held.at_ns, held.uncached_tokens)

    def remove(self, target_id: TargetId, request: str, uncached_tokens: int) -> None:
        held = self.by_target[target_id]
        held.names.pop(request, None)  # two of its stages may have been here
        held.requests -= 1
        if uncached_tokens:
            held.uncached_tokens -= uncached_tokens
            self._loads.estimate(target_id, held.backlog, held.at_ns, held.uncached_tokens)
        if not held.requests:
            del self.by_target[target_id]

    def backlogs(self) -> tuple[tuple[str, int, float, int], ...]:
        """As in ``LoadState``."""
        return tuple((*target_id, held.backlog, held.at_ns) for target_id, held in sorted(self.by_target.items()))


MEMORY = 200
PRIOR = 20
NOISE = 0.2
DECODE_NOISE = 0.35
MEDIAN_EVERY = 32  # prompts of a model
SLOWEST, FASTEST = 8.0, 0.125
_FADE = 1 - 1 / MEMORY
_FIT_FADE = 1 - 1 / (10 * MEMORY)


class _Fit:
    """Sums for a least squares line through (tokens, seconds), where old points fade."""

    __slots__ = ("count", "products", "seconds", "squares", "tokens")

    def __init__(self) -> None:
        self.count = self.tokens = self.seconds = self.squares = self.products = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.count = self.count * _FIT_FADE + 1
        self.tokens = self.tokens * _FIT_FADE + tokens
        self.seconds = self.seconds * _FIT_FADE + seconds
        self.squares = self.squares * _FIT_FADE + tokens * tokens
        self.products = self.products * _FIT_FADE + tokens * seconds

    def expected(self, tokens: float) -> float:
        """Seconds for a prompt with this many tokens to compute, by the mean of all targets."""
        spread = self.count * self.squares - self.tokens * self.tokens
        mean = self.seconds / self.count
        if spread <= 1e-9 * self.squares * self.count:
            return mean
        slope = max(0.0, (self.count * self.products - self.tokens * self.seconds) / spread)
        return max(mean + slope * (tokens - self.tokens / self.count), 0.05 * mean)


class LearnedCosts:
    """Slowness by target.

    Args:
        noise: so close to 1 it counts as 1.

    Attributes:
        samples: prompts that were learnt from.
    """

    def __init__(self, noise: float = NOISE) -> None:
        self.samples = 0
        self._noise = noise
        self._fits: dict[str, _Fit] = {}  # by model
        self._ratios: dict[str, dict[TargetId, float]] = {}  # by model: time over expected time
        self._medians: dict[str, float] = {}
        self._targets: dict[TargetId, tuple[float, float]] = {}  # seconds that prompts took, and should have taken

    def computed(self, model: str, target: TargetId, tokens: float, seconds: float) -> float:
        """A target computed ``tokens`` of prompts in ``seconds``; returns its slowness from now on."""
        fit = self._fits.setdefault(model, _Fit())
        fit.add(tokens, seconds)
        self.samples += 1
        took, expected = self._targets.get(target, (0.0, 0.0))
        took, expected = took * _FADE + seconds, expected * _FADE + fit.expected(tokens)
        self._targets[target] = took, expected
        prior = PRIOR * fit.seconds / fit.count
        if prior <= 0:
            return 1.0
        ratios = self._ratios.setdefault(model, {})
        ratios[target] = (took + prior) / (expected + prior)
        if self.samples % MEDIAN_EVERY == 0 or model not in self._medians:
            self._medians[model] = median(ratios.values())
        slowness = min(max(ratios[target] / self._medians[model], FASTEST), SLOWEST)
        return 1.0 if abs(slowness - 1) < self._noise else slowness

    def expected(self, model: str, tokens: int, least_samples: int) -> float | None:
        """Seconds that a prompt with this many tokens to compute takes, by the mean of the model's targets.

        None: it would rest on fewer samples.
        """
        fit = self._fits.get(model)
        return fit.expected(tokens) if fit is not None and fit.count >= least_samples else None

    def forget(self, target: TargetId) -> None:
        self._targets.pop(target, None)
        for ratios in self._ratios.values():
            ratios.pop(target, None)
