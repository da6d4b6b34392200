"""The engine model written down plainly: one pass at a time, one object per block. The reference of the fast engine."""

from dataclasses import dataclass, field

from penstock.measure.simulation.engine import decode_ns, prefill_ns


@dataclass(eq=False)
class Block:
    key: int | None = None  # None: not full yet
    users: int = 0
    idle_since: int = 0


@dataclass(eq=False)
class Sequence:
    index: int
    prompt_tokens: int
    output_tokens: int
    keys: list[int]
    generated: int = 0
    computed: int = 0
    cached_tokens: int | None = None
    blocks: list[Block] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.prompt_tokens + self.generated

    def key(self, number: int) -> int:
        return self.keys[number] if number < len(self.keys) else (1 << 59) + (self.index << 24) + number


@dataclass
class Pass:
    duration_ns: int
    first: list[int]
    ended: list[int]
    rejected: list[int]
    held: frozenset[int]  # keys after the pass


class NaiveEngine:
    def __init__(self, blocks: int, block_size: int, max_sequences: int, max_batched_tokens: int) -> None:
        self.capacity, self.size = blocks, block_size
        self.max_sequences, self.max_batched_tokens = max_sequences, max_batched_tokens
        self.blocks: list[Block] = []  # held ones, in the order in which they were published
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self.clock = 0

    def find(self, key: int) -> Block | None:
        return next((block for block in self.blocks if block.key == key), None)

    def in_use(self) -> int:
        return sum(block.users > 0 for block in self.blocks)

    def take(self, prefix: list[Block], fresh: int) -> list[Block] | None:
        spare = [block for block in self.blocks if not block.users and block not in prefix]
        if fresh > self.capacity - len(self.blocks) + len(spare):
            return None
        for block in sorted(spare, key=lambda block: block.idle_since):
            if len(self.blocks) + fresh <= self.capacity:
                break
            self.blocks.remove(block)
        for block in prefix:
            block.users += 1
        new = [Block(users=1) for _ in range(fresh)]
        self.blocks += new
        return prefix + new

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):
            block.users -= 1
            if block.key is None:
                self.blocks.remove(block)
            elif not block.users:
                self.clock += 1
                block.idle_since = self.clock
        sequence.blocks = []

    def extend(self, sequence: Sequence, tokens: int, prefix: list[Block]) -> bool:
        have = len(sequence.blocks)
        need = -(-tokens // self.size) - have - len(prefix)
        taken = self.take(prefix, max(0, need))
        if taken is None:
            return False
        sequence.blocks += taken
        sequence.computed = tokens
        for number in range(tokens // self.size):
            block = sequence.blocks[number]
            if block.key is None:
                block.key = sequence.key(number)
                self.blocks.remove(block)  # in the order of publication
                self.blocks.append(block)
        return True

    def preempt(self) -> Sequence:
        victim = self.running.pop()
        self.preemptions += 1
        self.release(victim)
        victim.computed = 0
        self.waiting.insert(0, victim)
        return victim

    def step(self) -> Pass | None:
        budget, preempted = self.max_batched_tokens, False
        work: list[tuple[int, int]] = []  # prompt tokens before and after, of sequences that computed some
        at = 0
        while at < len(self.running):
            sequence, before = self.running[at], self.running[at].computed
            tokens = min(sequence.known - before, budget)
            fits = True
            while not self.extend(sequence, before + tokens, []):
                preempted = True
                if self.preempt() is sequence:
                    fits = False
                    break
            if fits:
                budget -= tokens
                work.append((min(before, sequence.prompt_tokens), min(sequence.computed, sequence.prompt_tokens)))
                at += 1
        rejected = []
        while not preempted and self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            total = -(-sequence.known // self.size)
            if sequence.cached_tokens is None and total > self.capacity:
                rejected.append(self.waiting.pop(0).index)
                continue
            prefix: list[Block] = []
            for number in range(sequence.known // self.size):
                block = self.find(sequence.key(number))
                if block is None:
                    break
                prefix.append(block)
            active = sum(block.users > 0 for block in prefix)
            limit = (sequence.known - 1) // self.size
            prefix, active = prefix[:limit], min(active, limit)
            if total - active > self.capacity - self.in_use() or not budget:
                break
            cached = len(prefix) * self.size
            tokens = min(sequence.known - cached, budget)
            if not self.extend(sequence, cached + tokens, prefix):
                break
            budget -= tokens
            work.append((min(cached, sequence.prompt_tokens), min(sequence.computed, sequence.prompt_tokens)))
            if sequence.cached_tokens is None:
                sequence.cached_tokens = cached
            self.running.append(self.waiting.pop(0))
        work = [(before, after) for before, after in work if after > before]
        duration = 0
        if work:
            count = len(work)
            duration = prefill_ns(count, sum(a for _, a in work) // count, sum(b for b, _ in work) // count)
        ready = [each for each in self.running if each.computed == each.known]
        decoding = [each for each in ready if each.generated]
        if decoding:
            duration += decode_ns(sum(each.known for each in decoding), self.capacity * self.size)
        if not ready and not work and not rejected:
            progress = preempted or budget < self.max_batched_tokens
            return self.step() if progress else None  # it takes no time
        first = [each.index for each in ready if not each.generated]
        for each in ready:
            each.generated += 1
        ended = [each for each in ready if each.generated == each.output_tokens]
        for each in ended:
            self.release(each)
            self.running.remove(each)
        held = frozenset(block.key for block in self.blocks if block.key is not None)
        return Pass(duration, first, [each.index for each in ended], rejected, held)
