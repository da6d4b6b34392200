"""Sampling: the next token of each sequence from the logits of one position.

A draw is a pure function of (seed, choice, output position) and the logits. Its noise is a hash, not the state of a
generator, so a sequence gets the same tokens alone, in any batch, after preemption and on another worker.

Order: logits processors and constraints, whose result counts as the model's own logits; then, as in vLLM, bias and
forbidden tokens, penalties, temperature, min_p, top_k, top_p.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.schemas.tokens import Logprob
from penstock.workers.engines.core.sequence import Sampled, Sequence
from penstock.workers.engines.logits import apply

_NEVER = float("-inf")


class Allowed(NamedTuple):
    """The tokens that may be drawn in some rows.

    Attributes:
        rows: (n,) int64, the constrained rows, ascending.
        bits: (n, words) int32, a bit per token, lowest first.
        every: all rows are constrained.
    """

    rows: Tensor
    bits: Tensor
    every: bool

    def apply(self, logits: Tensor) -> Tensor:
        """The logits with minus infinity for every other token; ``logits`` is not changed.

        Where the processors had left none of the allowed tokens, all of these are equally likely.
        """
        part = logits if self.every else logits[self.rows]
        allowed = self._unpacked(logits.shape[-1])
        narrowed = part.masked_fill(~allowed, _NEVER)
        lost = narrowed.amax(dim=-1, keepdim=True) == _NEVER
        narrowed = narrowed.masked_fill(allowed & lost, 0.0)
        return narrowed if self.every else logits.index_copy(0, self.rows, narrowed)

    def _unpacked(self, vocab: int) -> Tensor:
        """(n, vocab) bool."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.bits.device)
        spread = (self.bits[:, :, None] >> shifts) & 1
        return spread.view(len(self.bits), -1)[:, :vocab].bool()


_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # constants of SplitMix64, doi:10.1145/2660193.2660195
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_SCORED_ROWS = 64  # whose logits exist as float32 at once
DRAWN_LOGITS = 1 << 23  # of the rows that are drawn at once
DRAW_BYTES = 50  # that the draw of a row takes per logit, when all are sorted for top_p
COPIES = 3  # of a step's logits: as computed; allowed by constraints and processors; with biases and penalties


@dataclass(slots=True)
class TokenCounts:
    """Which tokens are in a prompt, and how often each is in the first ``seen`` tokens after it.

    Kept in ``Sequence.state``.
    """

    prompt: Tensor  # (vocab,) bool
    output: Tensor  # (vocab,) int32
    seen: int = field(default=0)


@dataclass(slots=True)
class Chosen:
    """Drawn tokens and requested log-probabilities, on the device that computed them."""

    tokens: Tensor  # (rows,) int64
    asked: list[tuple[int, int]]  # (row, how many of the best)
    logprobs: tuple[Tensor, Tensor, Tensor] | None  # of those rows: the token's, ids of the best, values of the best

    def moved(self) -> "Chosen":
        """A copy on the host, complete once the work queued on the device so far is done."""
        copied = None
        if self.logprobs is not None:
            chosen, ids, values = (_pinned(part) for part in self.logprobs)
            copied = (chosen, ids, values)
        return Chosen(_pinned(self.tokens), self.asked, copied)

    def sampled(self) -> list[Sampled]:
        logprobs: dict[int, Logprob] = {}
        if self.logprobs is not None:
            columns = (part.tolist() for part in self.logprobs)
            for (row, k), logprob, ids, values in zip(self.asked, *columns, strict=True):
                logprobs[row] = Logprob(logprob, _possible(ids[:k], values[:k]))
        return [(token, logprobs.get(row)) for row, token in enumerate(self.tokens.tolist())]


def _pinned(part: Tensor) -> Tensor:
    if not part.is_cuda:
        return part
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def place(values: Seq[int] | Seq[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers on a device, copied without waiting for the device's queue."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def sample(logits: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
    """Draw one token for each sequence.

    Args:
        logits: (len(sequences), vocab), any float type; not changed.
    """
    return choose(logits, sequences, [len(sequence.tokens) for sequence in sequences]).sampled()


def choose(
    logits: Tensor,
    sequences: Seq[Sequence],
    lengths: Seq[int],
    allowed: Allowed | None = None,
    pick: Callable[[Tensor], Tensor] | None = None,
) -> Chosen:
    """As ``sample``, without waiting for the device.

    Args:
        lengths: of the sequences; the last token may still be unknown, unless the logits depend on it (processors,
            penalties).
        allowed: tokens of the rows whose output is constrained.
        pick: draws (rows,) int64 from (rows, vocab) float32 logits with biases and penalties; None: as ``draw`` does.
    """
    raw = process(logits.float(), sequences)
    if allowed is not None:
        raw = allowed.apply(raw)
    shaped = shape(raw, sequences, lengths)
    tokens = _picked(shaped, sequences, lengths) if pick is None else pick(shaped)
    return Chosen(tokens, *_logprobs(raw, tokens, sequences))


def _picked(shaped: Tensor, sequences: Seq[Sequence], lengths: Seq[int]) -> Tensor:
    tokens = shaped.argmax(dim=-1)
    random = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    for part in _parts(random, shaped):
        rows = place(part, torch.int64, shaped.device)
        drawn = draw(shaped[rows], [sequences[row] for row in part], [lengths[row] for row in part])
        tokens.index_copy_(0, rows, drawn)
    return tokens


def _parts(rows: list[int], logits: Tensor) -> Iterator[list[int]]:
    """The rows that are processed at once: of a large vocabulary not all, as the memory for that would be lacking."""
    step = max(1, DRAWN_LOGITS // logits.shape[-1])
    return (rows[start : start + step] for start in range(0, len(rows), step))


def memory_bytes(rows: int, vocab: int) -> int:
    """Of the logits of so many rows and of drawing from them, at most."""
    return COPIES * rows * vocab * 4 + min(rows * vocab, max(DRAWN_LOGITS, vocab)) * DRAW_BYTES


def score(logits: Tensor, tokens: Seq[int], wanted: int) -> list[Logprob]:
    """Log-probabilities of given tokens by the model alone: no processor, bias, penalty or temperature.

    Args:
        logits: (len(tokens), vocab), any float type, each row of the position before the token.
        wanted: number of best tokens per row.
    """
    scores: list[Logprob] = []
    for at in range(0, len(tokens), _SCORED_ROWS):
        logprobs = logits[at : at + _SCORED_ROWS].float().log_softmax(dim=-1)
        own = logprobs.gather(-1, torch.tensor(tokens[at : at + _SCORED_ROWS], device=logits.device)[:, None])
        ranks = (logprobs > own).sum(dim=-1) + 1
        best = logprobs.topk(min(wanted, logprobs.shape[-1]), dim=-1)
        columns = (own.squeeze(-1).tolist(), best.indices.tolist(), best.values.tolist(), ranks.tolist())
        scores += [Logprob(value, _possible(ids, top), rank) for value, ids, top, rank in zip(*columns, strict=True)]
    return scores


def process(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Logits after the sequences' processors; the same tensor if there are none."""
    chains = [(row, s, s.processors) for row, s in enumerate(sequences) if s.processors is not None]
    if not chains:
        return logits
    logits = logits.clone()
    edits = [e for row, s, chain in chains for e in apply.run(chain, apply.ReadOnly(s.tokens), logits[row])]
    apply.account(edits)
    return logits


def shape(logits: Tensor, sequences: Seq[Sequence], lengths: Seq[int]) -> Tensor:
    """Apply bias, min_tokens (stop ids that would come too early) and penalties; the same tensor if none is set."""
    biases = [(row, token, bias) for row, s in enumerate(sequences) for token, bias in s.sampling.logit_bias.items()]
    short = [length < s.stoppable for s, length in zip(sequences, lengths, strict=True)]
    early = [(row, token, _NEVER) for row, s in enumerate(sequences) if short[row] for token in s.stops]
    if early:
        early = _without_only_choices(logits, early, sequences, short)
    penalised = [row for row, s in enumerate(sequences) if _has_penalty(s)]
    if not (biases or early or penalised):
        return logits
    logits = logits.clone()
    _add(logits, biases + early)
    for part in _parts(penalised, logits):
        rows = place(part, torch.int64, logits.device)
        logits.index_copy_(0, rows, penalise(logits[rows], [sequences[row] for row in part]))
    return logits


def draw(logits: Tensor, sequences: Seq[Sequence], lengths: Seq[int]) -> Tensor:
    """Draw one token per row after temperature, min_p, top_k and top_p, by the Gumbel-max trick.

    Args:
        logits: (n, vocab) float32.
    Returns: (n,) int64.
    """
    temperatures = _column([max(s.sampling.temperature, 1e-5) for s in sequences], logits)
    filtered = narrow(logits / temperatures, sequences)
    keys = [key(s.sampling.seed, s.choice, length - s.prompt_len) for s, length in zip(sequences, lengths, strict=True)]
    return (filtered + gumbel(keys, logits.shape[-1], logits.device)).argmax(dim=-1)


def narrow(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Set what min_p, then top_k, then top_p exclude to minus infinity; the best token always stays."""
    vocab = logits.shape[-1]
    if any(s.sampling.min_p > 0 for s in sequences):
        best = logits.max(dim=-1, keepdim=True).values
        logits = logits.masked_fill(
            logits < best + _column([s.sampling.min_p for s in sequences], logits).log(), _NEVER
        )
    ks = [min(s.sampling.top_k, vocab) if s.sampling.top_k > 0 else vocab for s in sequences]
    ps = [s.sampling.top_p for s in sequences]
    if min(ks) == vocab and min(ps) >= 1:
        return logits
    # Only as many candidates as the widest row needs are sorted; equal logits go by token id.
    wide = max(ks)
    if wide < vocab:
        ordered, ids = logits.topk(wide, dim=-1)
    else:
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    outside = torch.arange(wide, device=logits.device) >= _column(ks, logits)
    ordered = ordered.masked_fill(outside, _NEVER)
    if min(ps) < 1:
        mass = ordered.softmax(dim=-1, dtype=torch.float64)
        before = mass.cumsum(dim=-1) - mass
        cut = before >= _column(ps, mass)
        cut[:, 0] = False
        ordered = ordered.masked_fill(cut, _NEVER)
    return torch.full_like(logits, _NEVER).scatter(-1, ids, ordered)


def penalise(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Repetition penalty over prompt and output, presence and frequency penalties over the output.

    Args:
        logits: (len(sequences), vocab) float32.
    """
    prompts, outputs = count(sequences, logits)
    factors = _column([s.sampling.repetition_penalty for s in sequences], logits)
    used = outputs > 0
    lowered = torch.where(logits > 0, logits / factors, logits * factors)
    logits = torch.where(prompts | used, lowered, logits)
    frequency = _column([s.sampling.frequency_penalty for s in sequences], logits)
    presence = _column([s.sampling.presence_penalty for s in sequences], logits)
    return logits - frequency * outputs - presence * used


def count(sequences: Seq[Sequence], like: Tensor) -> tuple[Tensor, Tensor]:
    """Bring the sequences' counts up to date with their tokens: by few operations for all of them together.

    Args:
        sequences: each once. One with penalties draws a single token in a step, as the next depends on it.
    Returns: (len(sequences), vocab) bool and int32 of ``TokenCounts``.
    """
    vocab, device = like.shape[-1], like.device
    counts, places = [], list[int]()
    for row, sequence in enumerate(sequences):
        found = sequence.state
        if not isinstance(found, TokenCounts):
            prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
            prompt[place(sorted(set(sequence.tokens[: sequence.prompt_len])), torch.int64, device)] = True
            output = torch.zeros(vocab, dtype=torch.int32, device=device)
            found = sequence.state = TokenCounts(prompt, output, sequence.prompt_len)
        places += [row * vocab + token for token in sequence.tokens[found.seen :]]
        found.seen = len(sequence.tokens)
        counts.append(found)
    outputs = torch.stack([each.output for each in counts])
    if places:
        at = place(places, torch.int64, device)
        outputs.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
        torch._foreach_copy_([each.output for each in counts], list(outputs.unbind()))
    return torch.stack([each.prompt for each in counts]), outputs


def key(seed: int, choice: int, position: int) -> int:
    """The key of a draw: 64 well-mixed bits."""
    return _mix(_mix(_mix(seed & _MASK) + choice) + position)


def gumbel(keys: Seq[int], vocab: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise; entry t of row r comes from output t of SplitMix64 started at ``keys[r]``.

    Returns: (len(keys), vocab) float32.
    """
    start = place([_signed(key) for key in keys], torch.int64, device)[:, None]
    steps = torch.arange(1, vocab + 1, dtype=torch.int64, device=device)
    bits = start + steps * _signed(_GAMMA)
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX2)
    bits = bits ^ _shift(bits, 31)
    # Small values decide the maximum and keep their precision as floats; neither end may give an infinity.
    uniform = (_shift(bits, 1).float() * 2.0**-63).clamp(2.0**-63, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _logprobs(
    logits: Tensor, tokens: Tensor, sequences: Seq[Sequence]
) -> tuple[list[tuple[int, int]], tuple[Tensor, Tensor, Tensor] | None]:
    """Log-probabilities for the rows that request them, before bias, penalties and temperature."""
    asked = [(row, s.sampling.logprobs) for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
    if not asked:
        return [], None
    most, found = min(max(k for _, k in asked), logits.shape[-1]), []
    for part in _parts([row for row, _ in asked], logits):
        rows = place(part, torch.int64, logits.device)
        logprobs = logits[rows].log_softmax(dim=-1)
        best = logprobs.topk(most, dim=-1)
        found.append((logprobs.gather(-1, tokens[rows, None]).squeeze(-1), best.indices, best.values))
    chosen, ids, values = (torch.cat(column) for column in zip(*found, strict=True))
    return asked, (chosen, ids, values)


def _possible(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """(token, log-probability), best first, without tokens that a processor excluded: JSON has no minus infinity."""
    if values and values[-1] == _NEVER:
        return tuple((token, value) for token, value in zip(ids, values, strict=True) if value != _NEVER)
    return tuple(zip(ids, values, strict=True))


def _without_only_choices(
    logits: Tensor, early: list[tuple[int, int, float]], sequences: Seq[Sequence], short: list[bool]
) -> list[tuple[int, int, float]]:
    """Bans of stop ids, except in rows where the processors left nothing else to draw."""
    rows = [row for row, s in enumerate(sequences) if s.processors is not None and short[row]]
    stuck = set()
    for row in rows:
        others = logits[row].clone()
        _add(others[None], [(0, token, _NEVER) for token in sequences[row].stops])
        if others.max() == _NEVER:
            stuck.add(row)
    return [ban for ban in early if ban[0] not in stuck] if stuck else early


def _has_penalty(sequence: Sequence) -> bool:
    s = sequence.sampling
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def _add(logits: Tensor, changes: list[tuple[int, int, float]]) -> None:
    """Add (row, token, bias) in place; token ids outside the vocabulary are skipped."""
    fit = [change for change in changes if 0 <= change[1] < logits.shape[-1]]
    if fit:
        rows, tokens, biases = zip(*fit, strict=True)
        where = (place(rows, torch.int64, logits.device), place(tokens, torch.int64, logits.device))
        logits.index_put_(where, place(biases, logits.dtype, logits.device), accumulate=True)


def _column(values: Seq[float], like: Tensor) -> Tensor:
    return place(values, like.dtype, like.device)[:, None]
