"""The mock's model: the next token is a checksum of all tokens before it, and of the media among them.

So every worker continues a sequence with the same tokens, wherever it was interrupted, and tests can check that.

How long a step would take on a GPU: the polynomial model of NVIDIA Dynamo's engine simulator (``mocker``).

Fitted there to a vLLM-like engine; the coefficients agree with the results of ai-dynamo 1.6.1, request by request.
"""

import math
import os
import signal
import struct
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from zlib import crc32

from tokenizers import Tokenizer

from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.schemas.tokens import Logprob
from penstock.schemas.transfer import Memory
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.sequence import Sampled, ScheduledSequence, Sequence, scored_to
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.mock.memory import MockBlocks, MockVisionEncoder, seen
from penstock.workers.engines.mock.play import is_played, recorded_token

FREE_TOKENS = 8  # drawn before the answer is brought to its end
CLOSING = ("</think>", "</tool_call>", '"', "]", "}", '"}', '"]', "}]", "}}", "]}", "0", ",", '",')


def closing_tokens(tokenizer: Tokenizer, ends: Seq[int]) -> list[int]:
    """The tokens that bring an answer in JSON to its end, best first."""
    found = [*ends]
    for text in CLOSING:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) == 1:
            found.append(tokens[0])
    return found


class ConstrainedDraws:
    """
    Args:
        closing: tokens that are preferred once an answer is long enough, best first.
    """

    def __init__(self, closing: Seq[int]) -> None:
        self._closing = closing

    def token(self, state: int, mask: bytearray, drawn: int, wanted: int) -> int:
        """The token that ``state`` stands for.

        Args:
            mask: allowed tokens, a bit each, lowest first.
            drawn: tokens of the answer so far.
            wanted: what the mock would draw without the constraint.
        """
        if drawn >= FREE_TOKENS:
            for token in self._closing:
                if _allows(mask, token):
                    return token
        if _allows(mask, wanted):
            return wanted
        start = (state >> 3) % len(mask)
        place = next((at for at in range(start, len(mask)) if mask[at]), -1)
        if place < 0:
            place = next((at for at in range(start) if mask[at]), -1)
        if place < 0:
            return wanted
        bits = mask[place]
        return 8 * place + (bits & -bits).bit_length() - 1


def _allows(mask: bytearray, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def prefill_seconds(sequences: int, before: int, now: int) -> float:
    """The prefill part of a step.

    Args:
        sequences: that compute prompt tokens in this step.
        before: sum of their tokens computed earlier (or cached).
        now: sum of their prompt tokens computed in this step.
    """
    if not sequences:
        return 0.0
    tokens = sequences * ((before + now) // sequences - before // sequences)
    if tokens <= 0:
        return 0.0
    return (4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142) / 1e3


def decode_seconds(context: int, capacity: int) -> float:
    """The decode part of a step; it depends on how full the pool is, not on the batch size.

    Args:
        context: sum of the lengths of decoding sequences, tokens; 0: none decodes.
        capacity: of the KV pool, tokens.
    """
    if not context:
        return 0.0
    share = min(1.0, context / capacity)
    return max(1.0, -25.74 * share * share + 54.01 * share + 5.74) / 1e3


def step_seconds(plan: Iterable[ScheduledSequence], capacity: int) -> float:
    """The duration of one step.

    A sequence's first token comes from its prefill; generated tokens that are computed again cost only a decode.
    """
    sequences = before = now = context = 0
    for scheduled in plan:
        prompt, start, end = scheduled.sequence.prompt_len, scheduled.start, scheduled.start + scheduled.count
        if start < prompt:
            sequences += 1
            before += start
            now += min(end, prompt) - start
        if scheduled.samples and end > prompt:
            context += end
    return prefill_seconds(sequences, before, now) + decode_seconds(context, capacity)


GREEDY = Sampling(temperature=0.0)
LOWEST_RANK = 64  # from here on, all tokens are equally unlikely

_pack = struct.Struct("<I").pack


class MockVocabulary:
    """The ids that the mock may draw.

    Raises:
        ValueError: none is left.
    """

    def __init__(self, size: int, excluded: Iterable[int] = ()) -> None:
        barred = frozenset(excluded)
        self.allowed = array("I", (token for token in range(size) if token not in barred))
        if not self.allowed:
            raise ValueError(f"all {size} token ids are excluded")

    def token(self, state: int, barred: Collection[int] = ()) -> int:
        """The token that ``state`` stands for, or the next allowed one that is not ``barred`` (if there is any)."""
        allowed = self.allowed
        count = len(allowed)
        index = state % count
        token = allowed[index]
        if token in barred:
            for step in range(1, count):
                other = allowed[(index + step) % count]
                if other not in barred:
                    return other
        return token

    def logprob(self, token: int, wanted: int) -> Logprob:
        """``token`` has half of the probability, and each next best half of the rest."""
        allowed = self.allowed
        top = [token]
        index = 0
        while len(top) < min(wanted, len(allowed)):
            other = allowed[(token + index) % len(allowed)]
            index += 1
            if other != token:
                top.append(other)
        ranked = tuple((other, -math.log(2) * rank) for rank, other in enumerate(top[:wanted], 1))
        return Logprob(-math.log(2), ranked, 1)

    def score(self, state: int, token: int, wanted: int) -> Logprob:
        """As ``logprob`` of the token that ``state`` stands for, but reported for ``token``."""
        best = self.token(state)
        rank = 1 if token == best else self._rank(best, token)
        return Logprob(-math.log(2) * min(rank, LOWEST_RANK), self.logprob(best, wanted).top, rank)

    def _rank(self, best: int, token: int) -> int:
        """The rank of a token other than the best, in the order of ``logprob``; excluded tokens come last."""
        allowed = self.allowed
        count = len(allowed)
        at = bisect_left(allowed, token)
        if at == count or allowed[at] != token:
            return count + 1
        behind = (at - best) % count
        return behind + 2 - ((bisect_left(allowed, best) - best) % count < behind)


def seed_state(sampling: Sampling, choice: int) -> int:
    """The state before any token: greedy choices are alike, drawn ones differ by seed and choice."""
    return crc32(struct.pack("<QI", sampling.seed, choice)) if sampling.temperature > 0 else 0


def start_state(sampling: Sampling, choice: int, media: int | None, adapter: str = "") -> int:
    """As ``seed_state``; ``media``: what ``memory.seen`` makes of the sequence's embeddings, None: it has none.
    ``adapter``: id of its LoRA adapter."""
    state = seed_state(sampling, choice)
    state = crc32(adapter.encode(), state) if adapter else state
    return state if media is None else crc32(_pack(media), state)


def expected_tokens(
    tokens: Seq[int],
    count: int,
    vocabulary: MockVocabulary,
    *,
    sampling: Sampling = GREEDY,
    choice: int = 0,
    barred: Collection[int] = (),
    barred_tokens: int = 0,
    media: Seq[bytes] = (),
    adapter: str = "",
) -> list[int]:
    """The ``count`` tokens that follow ``tokens``, without any engine.

    Args:
        barred: ids that cannot be drawn yet (EOS and stop ids below ``min_tokens``), for the first ``barred_tokens``.
        adapter: id of the LoRA adapter.
        media: embeddings of the media in the prompt, in order: ``memory.embedding`` of each one's raw bytes.
    """
    state = crc32(pack_tokens(tokens), start_state(sampling, choice, seen(media) if media else None, adapter))
    result = []
    for position in range(count):
        token = vocabulary.token(state, barred if position < barred_tokens else ())
        state = crc32(_pack(token), state)
        result.append(token)
    return result


_LENGTH_TOKENS = 64  # of a prompt's end, which decide how long its answer is


class MockExecutor:
    """Implements ``penstock.workers.engines.core.sequence.Executor``.

    Args:
        capacity: of the KV pool, tokens.
        speedup: how many times faster than a GPU a step is; 0: it takes no time.
        sleep: waits this many seconds.
        blocks: memory that is read and written as a model's would be; None: there is none.
        encoder: of images; owned by the engine.
        closing: see ``ConstrainedDraws``.
        crash_token: the process is ended by SIGSEGV when a prompt with it is computed; -1: none.
        lengths: of answers without a constraint, in tokens: at least, at most; None: they run to ``max_tokens``.
        end: the token that ends them, an EOS of the model.
    Attributes:
        stays: as in ``WeightStore``; its pages keep their addresses.
        plays: sequences may play a recording: the engine's ``hold`` is a ``Player``'s.
        written: called with the number of leading layers whose KV is in ``blocks`` while the last step of a prompt
            computes the others; None: not called.
    """

    def __init__(
        self,
        vocabulary: MockVocabulary,
        capacity: int,
        *,
        speedup: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
        blocks: MockBlocks | None = None,
        encoder: MockVisionEncoder | None = None,
        closing: Seq[int] = (),
        crash_token: int = -1,
        lengths: tuple[int, int] | None = None,
        end: int = -1,
    ) -> None:
        self._vocabulary = vocabulary
        self._lengths = lengths
        self._end = end
        self._crash_token = crash_token
        self._constrained = ConstrainedDraws(closing)
        self._capacity = capacity
        self._blocks = blocks
        self._encoder = encoder
        self.plays = False
        self.stays = ""
        self.written: Callable[[int], None] | None = None
        self._admitted = 0  # sequences with a smaller ``arrived`` have been here since their admission
        self._speedup = speedup
        self._sleep = sleep

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        seconds = 0.0
        if self._speedup:
            simulated = [scheduled for scheduled in plan if not is_played(scheduled)] if self.plays else plan
            seconds = step_seconds(simulated, self._capacity) / self._speedup if simulated else 0.0
        ending = self.written is not None and any(each.samples and each.sequence.pin for each in plan)
        layers = self._blocks.layers if self._blocks is not None and ending else 0
        last_s = seconds / layers if layers > 1 else 0.0
        if seconds:
            self._sleep(seconds - last_s)
        if self._crash_token >= 0:
            self._crash(plan)
        if self._blocks is not None:
            self._remember(self._blocks, plan)
            if layers > 1 and self.written is not None:
                with self._blocks.without_last_layer(plan):
                    self.written(layers - 1)
                    if last_s:
                        self._sleep(last_s)
        for scheduled in scoring:
            self._score(scheduled)
        sampled: list[Sampled] = []
        allowed = self._vocabulary.allowed
        count = len(allowed)
        for scheduled in plan:
            if not scheduled.samples:
                continue
            sequence = scheduled.sequence
            state = sequence.state  # checksum of everything known; tokens are never taken back
            if not isinstance(state, int):
                media = self._seen(sequence) if sequence.media else None
                of = sequence.adapter.id if sequence.adapter is not None else ""
                state = crc32(pack_tokens(sequence.tokens), start_state(sequence.sampling, sequence.choice, media, of))
            token = allowed[state % count]
            if self._lengths is not None and sequence.constraint is None and self._ends(sequence, self._lengths):
                token = self._end
            if token in sequence.stops and len(sequence.tokens) < sequence.stoppable:
                token = self._vocabulary.token(state, sequence.stops)
            if sequence.constraint is not None:
                sequence.constraint.follow(sequence.tokens)
                token = self._constrained.token(state, sequence.constraint.mask(), sequence.output_len, token)
            recorded = recorded_token(sequence) if self.plays else None
            if recorded is not None:
                token = recorded[0]
            sequence.state = crc32(_pack(token), state)
            wanted = sequence.sampling.logprobs
            if wanted is None:
                logprob = None
            else:
                logprob = (recorded[1] if recorded else None) or self._vocabulary.logprob(token, wanted)
            sampled.append((token, logprob))
        return sampled

    def _ends(self, sequence: Sequence, lengths: tuple[int, int]) -> bool:
        """Whether the next token ends the answer. Any worker that continues it comes to the same length."""
        if self._end not in sequence.stops or sequence.output_len < lengths[0] - 1:
            return False
        prompt = sequence.tokens[max(0, sequence.prompt_len - _LENGTH_TOKENS) : sequence.prompt_len]
        drawn = crc32(pack_tokens(prompt), seed_state(sequence.sampling, sequence.choice))
        return sequence.output_len + 1 >= lengths[0] + drawn % (lengths[1] - lengths[0] + 1)

    def _crash(self, plan: list[ScheduledSequence]) -> None:
        """End this process as a defect in an engine's native code would, if a prompt asks for it."""
        for sequence in (scheduled.sequence for scheduled in plan):
            if self._crash_token in sequence.tokens[: sequence.prompt_len]:
                os.kill(os.getpid(), signal.SIGSEGV)

    def _score(self, scheduled: ScheduledSequence) -> None:
        """Score a prompt's tokens against those that the mock would draw greedily, ignoring images."""
        sequence = scheduled.sequence
        tokens, first = sequence.tokens, sequence.score
        wanted = sequence.sampling.prompt_logprobs or 0
        state = crc32(pack_tokens(tokens[:first]))
        for token in tokens[first : scored_to(scheduled)]:
            sequence.scores.append(self._vocabulary.score(state, token, wanted))
            state = crc32(_pack(token), state)

    def _remember(self, blocks: MockBlocks, plan: list[ScheduledSequence]) -> None:
        for scheduled in plan:  # before all writes: no sequence may read what this step writes
            sequence = scheduled.sequence
            if sequence.arrived >= self._admitted:
                self._admitted = sequence.arrived + 1
                if scheduled.start:
                    blocks.check(sequence, scheduled.start)
        for scheduled in plan:
            blocks.write(scheduled.sequence, scheduled.start, scheduled.start + scheduled.count)

    def _seen(self, sequence: Sequence) -> int:
        """A model depends on images through its KV; without KV memory, the embeddings themselves are read."""
        if self._blocks is not None:
            return self._blocks.seen(sequence)
        assert self._encoder is not None
        return seen([self._encoder.read(span.slots) for span in sequence.media])

    def read(self, folder: Path) -> None:
        """It has no weights: its tokens stay the same. This and the following: ``core.engine.WeightStore``."""
        if not (folder / "config.json").is_file():
            raise RequestError(Code.invalid_request, f"there is no model in {folder}")

    def replace(self, read: None) -> None:
        pass

    def sleep(self) -> None:
        """It has nothing to move."""

    def wake(self) -> "MockExecutor":
        return self

    def memory(self) -> dict[str, Memory]:
        return {} if self._blocks is None else {"kv": self._blocks.memory()}

    def close(self) -> None:
        """Free the memory."""
        if self._blocks is not None:
            self._blocks.close()
