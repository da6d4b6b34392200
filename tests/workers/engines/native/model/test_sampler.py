import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.sequence import Sequence
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.sampler import gumbel, key, narrow, penalise, sample
from tests.properties import examples

VOCAB = 50
CPU = torch.device("cpu")


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **options: Any) -> Sequence:
    start, done = prompt or [1, 2, 3], output or []
    more = {name: options.pop(name) for name in ("choice", "stops", "stoppable") if name in options}
    return Sequence(
        key=None,
        tokens=start + done,
        prompt_len=len(start),
        sampling=Sampling(**options),
        stop=Stop(100),
        choice=more.pop("choice", 0),
        digests=[],
        root=b"",
        **more,
    )


def noise(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def tokens(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    return [token for token, _ in sample(logits, sequences)]


class AllocatedBytes(TorchDispatchMode):
    """Of the tensors that operations return: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and (storage := each.untyped_storage()).data_ptr() not in self._live:
                self._live[storage.data_ptr()] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage.data_ptr())
        return result

    def _freed(self, address: int) -> None:
        self.now -= self._live.pop(address)


@pytest.mark.parametrize("rows", [3, 32])
def test_drawing_takes_no_more_memory_than_the_pools_leave(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all rows ask for all there is. And rows that are drawn in parts get the same tokens."""
    vocab = 1 << 12
    logits = noise(5, rows, vocab)

    def asked() -> list[Sequence]:
        every = {"top_p": 0.9, "min_p": 0.01, "top_k": vocab // 2, "logprobs": 3, "presence_penalty": 0.5}
        return [sequence(temperature=1.0, seed=row, **every if row % 2 else {"top_p": 0.9}) for row in range(rows)]

    whole = sample(logits, asked())
    monkeypatch.setattr(sampler, "DRAWN_LOGITS", 5 * vocab)
    given = asked()
    sampler.count(given, logits)  # kept with the sequences
    with AllocatedBytes() as allocated:
        assert sample(logits, given) == whole
    counted = sampler.memory_bytes(rows, vocab) - logits.nbytes  # which are there
    assert counted / 2 < allocated.most < counted


def test_greedy_takes_the_best() -> None:
    logits = noise(0, 4)
    assert tokens(logits, [sequence(temperature=0) for _ in range(4)]) == logits.argmax(-1).tolist()


def test_logits_given_are_not_changed() -> None:
    logits = noise(0)
    before = logits.clone()
    sample(logits, [sequence(logit_bias={3: 5.0}, presence_penalty=1.0, top_k=3, stops=frozenset({4}), stoppable=9)])
    assert torch.equal(logits, before)


@given(
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 100),
    others=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=5),
    place=st.integers(0, 5),
)
@examples(40)
def test_a_draw_depends_on_seed_choice_position_and_logits_only(
    seed: int, choice: int, others: list[float], place: int
) -> None:
    options = {"seed": seed, "choice": choice, "temperature": 0.9, "top_p": 0.9, "top_k": 20}
    logits = noise(1, len(others) + 1)
    place = min(place, len(others))
    alone = tokens(logits[place : place + 1], [sequence(output=[5, 6], **options)])
    batch = [sequence(temperature=t, seed=7, top_k=9) for t in others]
    batch.insert(place, sequence(prompt=[9], output=[8, 8], **options))  # other tokens, same position
    assert tokens(logits, batch)[place] == alone[0]


def test_seed_choice_and_position_each_change_the_draws() -> None:
    flat = torch.zeros(1, VOCAB)
    draws = {
        name: [tokens(flat, [sequence(output=[0] * i, **o)])[0] for i in range(20)]
        for name, o in {"a": {"seed": 1}, "b": {"seed": 2}, "c": {"seed": 1, "choice": 1}}.items()
    }
    assert draws["a"] != draws["b"] != draws["c"] != draws["a"]
    assert len(set(draws["a"])) > 8


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0])
    n = 20_000
    batch = [sequence(seed=seed) for seed in range(n)]
    counts = torch.bincount(torch.tensor(tokens(logits.expand(n, -1), batch)), minlength=5)
    chances = logits.softmax(-1) * n
    assert float(((counts - chances) ** 2 / chances).sum()) < 23.5  # chi-square, 4 degrees: 1 in 10,000


def test_temperature_sharpens() -> None:
    logits = torch.tensor([1.0, 0.0]).expand(4000, -1)
    for temperature in (0.25, 1.0, 4.0):
        ones = sum(tokens(logits, [sequence(seed=s, temperature=temperature) for s in range(4000)]))
        assert ones / 4000 == pytest.approx(1 / (1 + math.exp(1 / temperature)), abs=0.03)


def test_noise_is_finite_and_standard() -> None:
    values = gumbel([key(s, 0, 0) for s in range(40)], 50_000, CPU)
    assert torch.isfinite(values).all()
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


def _started_where_the_first_output_is(output: int) -> int:
    """SplitMix64 backwards."""
    word, value = 1 << 64, output
    for shift, factor in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        value = value * pow(factor, -1, word) % word
        undone = value
        for _ in range(64 // shift):
            undone = value ^ (undone >> shift)
        value = undone
    return (value - 0x9E3779B97F4A7C15) % word


@pytest.mark.parametrize(("output", "value"), [(0, 43.67), (2**63, 0.367), (2**64 - 1, -2.81)])
def test_no_hash_makes_infinite_noise(output: int, value: float) -> None:
    start = _started_where_the_first_output_is(output)
    assert float(gumbel([start], 1, CPU)) == pytest.approx(value, abs=0.01)


def test_noise_is_the_published_splitmix64() -> None:
    # First outputs of SplitMix64 started at 1234567 (Rosetta Code).
    top = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = [-math.log(-math.log1p(-(n >> 1) / 2**63)) for n in top]
    assert gumbel([1234567], 4, CPU)[0].tolist() == pytest.approx(expected, rel=1e-5)


@given(st.integers(0, 1000), st.integers(1, 60))
@examples(40)
def test_top_k_keeps_the_k_best(seed: int, k: int) -> None:
    logits = noise(seed)
    kept = torch.isfinite(narrow(logits, [sequence(top_k=k)])[0])
    assert set(kept.nonzero().flatten().tolist()) == set(logits[0].topk(min(k, VOCAB)).indices.tolist())


@given(st.integers(0, 1000), st.floats(0.01, 0.99), st.integers(0, 60))
@examples(60)
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, p: float, k: int) -> None:
    logits = noise(seed)
    kept = torch.isfinite(narrow(logits, [sequence(top_p=p, top_k=k)])[0])
    chances = logits[0].double().softmax(-1)
    if k:
        chances[chances < chances.topk(min(k, VOCAB)).values[-1]] = 0
        chances /= chances.sum()
    inside = chances[kept]
    assert inside.sum() >= p - 1e-6
    assert inside.sum() - inside.min() < p + 1e-6
    assert chances[~kept].max() <= inside.min()


def test_top_p_of_nothing_keeps_the_best() -> None:
    logits = noise(4)
    assert torch.isfinite(narrow(logits, [sequence(top_p=0.0)])[0]).nonzero().flatten().tolist() == [logits.argmax()]


@given(st.integers(0, 1000), st.floats(0.001, 1))
@examples(40)
def test_min_p_is_relative_to_the_best(seed: int, p: float) -> None:
    logits = noise(seed)
    kept = torch.isfinite(narrow(logits, [sequence(min_p=p)])[0])
    chances = logits[0].double().softmax(-1)
    assert kept[chances >= chances.max() * p * 1.0001].all()
    assert not kept[chances < chances.max() * p * 0.9999].any()


def test_each_row_is_narrowed_by_its_own_options() -> None:
    options: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 7, "top_p": 0.9}]
    logits = noise(3, len(options))
    together = narrow(logits, [sequence(**o) for o in options])
    for row, o in enumerate(options):
        assert torch.equal(together[row], narrow(logits[row : row + 1], [sequence(**o)])[0])


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=30),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.4]),
)
@examples(60)
def test_penalties_are_those_of_a_plain_loop(
    prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    options = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "temperature": 0,
    }
    whole, grown = sequence(prompt, output, **options), sequence(prompt, [], **options)
    logits = noise(5)
    for token in output:  # one token after the other, as in a run
        sample(logits, [grown])
        grown.tokens.append(token)
    plain = logits[0].tolist()
    for token in set(prompt + output):
        plain[token] *= 1 / repetition if plain[token] > 0 else repetition
    for token in set(output):
        plain[token] -= presence + frequency * output.count(token)
    best = max(range(VOCAB), key=lambda token: plain[token])
    assert tokens(logits, [whole]) == tokens(logits, [grown]) == [best]
    unpenalised = sequence(prompt[:1], output[:1], temperature=0)
    for row in penalise(logits.expand(3, -1), [whole, unpenalised, grown])[::2].tolist():
        assert row == pytest.approx(plain, abs=1e-4)
    assert penalise(logits, [unpenalised]).tolist() == logits.tolist()


def test_bias_forces_and_forbids() -> None:
    logits = noise(0, 2)
    best = int(logits[0].argmax())
    drawn = tokens(logits, [sequence(temperature=0, logit_bias={best: -100.0}), sequence(logit_bias={11: 100.0})])
    assert drawn == [int(logits[0].topk(2).indices[1]), 11]


def test_bias_of_a_token_that_does_not_exist_changes_nothing() -> None:
    logits = noise(0)
    assert tokens(logits, [sequence(temperature=0, logit_bias={VOCAB: 100.0})]) == logits.argmax(-1).tolist()


def test_stops_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 50
    stops = frozenset({4, 9})
    drawn = [tokens(logits, [sequence(output=[0] * n, seed=n, stops=stops, stoppable=3 + 5)])[0] for n in range(10)]
    assert not stops & set(drawn[:5])
    assert drawn[5:] == [4] * 5


def test_logprobs_are_of_the_untouched_distribution() -> None:
    logits = noise(2, 3)
    wanted = logits.log_softmax(-1)
    batch = [
        sequence(logprobs=3, temperature=0.3, logit_bias={0: 100.0}, presence_penalty=2.0),
        sequence(temperature=0),
        sequence(logprobs=0, top_k=2),
    ]
    (token, first), (_, second), (_, third) = sample(logits, batch)
    assert token == 0
    assert first is not None
    assert first.logprob == pytest.approx(float(wanted[0, 0]), abs=1e-5)
    top = wanted[0].topk(3)
    assert [token for token, _ in first.top] == top.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert second is None
    assert third is not None
    assert third.top == ()
