"""EAGLE-3 heads: their proposals are those of plain torch, and answers those without."""

import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from penstock.infra.model import modeldir
from penstock.schemas.block_hashes import chain, split
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.eagle import HeadRuns, HeadView
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from tests.adapters import write_adapter
from tests.demo_model import template
from tests.demo_model.eagle import PlainHead, hidden_states, random_head
from tests.demo_model.task_mix import cases
from tests.properties import examples, some
from tests.workers.engines.core import test_speculation as core
from tests.workers.engines.native import models, pictures
from tests.workers.engines.native.model.test_adapters import add
from tests.workers.engines.native.model.test_adapters import asked as asked_of
from tests.workers.engines.native.models import CONFIGS, VOCAB, prompt, reference, request, run, tokens
from tests.workers.engines.native.test_handoff import ROOT, handed_off, prefilled

TRAINED = Path(__file__).parents[4] / "data" / "demo-eagle"
LAYERS = CONFIGS["llama"].num_hidden_layers
IDS = [0, 1, 2]  # the tiny models have three layers, so that the defaults (2, 1, 0) would do, too
FORMS: dict[str, dict[str, Any]] = {
    "sglang": {"proposed": 100, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}},
    "vllm": {"form": "vllm", "proposed": 60, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": IDS},
    "speculators": {"form": "speculators", "own_embedding": True, "proposed": 200, "norm_before_residual": True},
    "bin": {"form": "bin", "proposed": 128},
    "shared": {"hidden": 64},
    "narrow": {"hidden": 32, "head_dim": 8, "proposed": 90, "target_hidden_size": 64},
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("heads")

    def folder(name: str, **changed: Any) -> Path:
        path = root / f"{name}-{abs(hash(str(sorted(changed.items()))))}"
        if not path.exists():
            random_head(path, **{"vocab": VOCAB, "inputs": 64} | FORMS[name] | changed)
        return path

    return folder


def engine_of(model: Path, head: Path | str, **options: Any) -> ScheduledEngine:
    given: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "block_size": 8, "num_speculative_tokens": 3} | options
    return build(str(model), NativeOptions(speculative_model=str(head), **given))


class Proposed(NamedTuple):
    """What was proposed for a sequence in a step; ``base``: the first token that the head has seen."""

    sequence: Sequence
    known: list[int]
    draft: list[int]
    base: int


@contextmanager
def proposals(engine: ScheduledEngine) -> Iterator[list[Proposed]]:
    drafter: Any = engine._speculation.drafter  # type: ignore[union-attr]
    found: list[Proposed] = []
    propose = drafter.propose

    def record(plan: Any, limits: Any) -> Any:
        drafts = propose(plan, limits)
        for scheduled, draft in zip(plan, drafts, strict=True):
            if draft:
                sequence = scheduled.sequence
                found.append(Proposed(sequence, list(sequence.tokens), list(draft), sequence.drafter_state.base))
        return drafts

    drafter.propose = record
    yield found
    drafter.propose = propose


def plain_head(model: Path, head: Path) -> tuple[PlainHead, torch.Tensor, list[int]]:
    """A head in plain torch, the token of each of its logits, and the layers whose inputs it takes."""
    target = reference(model)
    config = json.loads((head / "config.json").read_text())
    if (head / "pytorch_model.bin").exists():
        found = torch.load(head / "pytorch_model.bin", weights_only=True)
    else:
        found = load_file(head / "model.safetensors")
    weights = {name.replace("layers.0.", "midlayer."): value for name, value in found.items()}
    weights.setdefault("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    weights.setdefault("lm_head.weight", target.lm_head.weight.detach())
    places = torch.arange(len(weights["lm_head.weight"]))
    if "d2t" in weights:
        places = places + weights["d2t"]
    layers = config.get("eagle_aux_hidden_state_layer_ids") or [2, LAYERS // 2, LAYERS - 3]
    if "eagle_config" in config:
        layers = [each + 1 for each in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return PlainHead(weights, config | config.get("transformer_layer_config", {})), places, layers


def expected(model: Path, head: Path, sequence: Sequence, known: list[int], count: int, first: int = 0) -> list[int]:
    """What a head proposes behind known tokens, if it sees those from ``first`` on."""
    plain, places, layers = plain_head(model, head)
    states = hidden_states(reference(model), torch.tensor([known[:-1]]), layers)[0, first:]
    fused, behind, found = plain.fused(states), known[first + 1 :], []
    for number in range(count):
        logits, after = plain(fused, torch.tensor(behind))
        every = torch.full((reference(model).config.vocab_size,), float("-inf"))
        every[places] = logits[-1].detach()
        sampling = sequence.sampling
        if sampling.temperature:
            key = sampler.key(sampling.seed, sequence.choice, len(known) + number - sequence.prompt_len)
            every = every / sampling.temperature + sampler.gumbel([key], len(every), every.device)[0]
        found.append(int(every.argmax()))
        fused, behind = torch.cat([fused, after[-1:]]), [*behind, found[-1]]
    return found


def check_seen(model: Path, head: Path, found: list[Proposed]) -> None:
    """Proposals are those of plain torch over what the head has seen."""
    for sequence, known, draft, base in found:
        assert draft == expected(model, head, sequence, known, len(draft), base)


def asked(count: int = 4, length: int = 26) -> list[SequenceRequest]:
    return [
        request(n, prompt(9 + 4 * n, n), length + n, Sampling(temperature=0.8 * (n % 2), seed=n)) for n in range(count)
    ]


@pytest.mark.parametrize("name", some(FORMS, "speculators", "vllm"))
@pytest.mark.parametrize("options", [{}, {"max_batched_tokens": 7}], ids=str)
def test_proposals_are_those_of_plain_torch_in_every_published_form(
    name: str, options: dict[str, Any], model_dir: Callable[[str], Path], heads: Callable[..., Path]
) -> None:
    model, head = model_dir("llama"), heads(name)
    plain = tokens(run(engine_of(model, ""), asked()))
    native = engine_of(model, head, **options)
    with proposals(native) as found:
        assert tokens(run(native, asked())) == plain
    assert len(found) > 10
    assert not any(each.base for each in found)
    check_seen(model, head, found)
    stats = native.stats()
    assert stats.draft_tokens == sum(len(each.draft) for each in found)
    assert stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize(
    "options",
    some(
        [
            {"kv_blocks": 12, "max_running": 4},
            {"prefix_cache": False},
            {"num_speculative_tokens": 9},
            {"num_speculative_tokens": 1},
            {"max_batched_tokens": 5, "block_size": 4},
        ],
        {"kv_blocks": 12, "max_running": 4},
        {"max_batched_tokens": 5, "block_size": 4},
    ),
    ids=str,
)
def test_answers_are_those_without_a_head(
    options: dict[str, Any], model_dir: Callable[[str], Path], heads: Callable[..., Path]
) -> None:
    model, head = model_dir("llama"), heads("sglang")
    plain = tokens(run(engine_of(model, ""), asked()))
    native = engine_of(model, head, **options)
    for _ in range(2):  # the second time from the prefix cache
        with proposals(native) as found:
            assert tokens(run(native, asked())) == plain
        check_seen(model, head, found)
    stats = native.stats()
    assert stats.draft_tokens > 0
    assert ("kv_blocks" in options) == (stats.preemptions > 0)
    assert (stats.hit_tokens > 0) == options.get("prefix_cache", True)


def test_a_next_turn_sees_the_whole_conversation(model_dir: Callable[[str], Path], heads: Callable[..., Path]) -> None:
    model, head = model_dir("llama"), heads("vllm")
    native = engine_of(model, head)
    first = prompt(21)
    (answer,) = tokens(run(native, [request(0, first, 30)])).values()
    with proposals(native) as found:
        run(native, [request(1, (*first, *answer, *prompt(7, 3)), 12)])
    assert native.stats().hit_tokens >= 40
    assert found
    assert {each.base for each in found} == {0}


def test_proposals_continue_where_a_prompt_was_prefilled_elsewhere(
    model_dir: Callable[[str], Path], heads: Callable[..., Path]
) -> None:
    model, head = model_dir("llama"), heads("sglang")
    for length in (24, 29):
        source, target = engine_of(model, ""), engine_of(model, head)
        run(source, [request("before", prompt(9, 5), 3)])
        words, sampling = prompt(length), Sampling(temperature=0.7, seed=length)
        whole = tokens(run(engine_of(model, ""), [request(0, words, 20, sampling)]))[0]
        pinned, first = prefilled(source, request(0, words, 1, sampling, root=ROOT))
        digests = split(chain(pack_tokens(array("I", words)), 8, ROOT))
        item = handed_off(source, target, pinned, digests, length % 8 > 0)
        adopted = {"root": ROOT, "digests": digests, "generated": [first], "reservation": item.reservation}
        with proposals(target) as found:
            rest = tokens(run(target, [request(0, words, 20, sampling, **adopted)]))[0]
        assert [first, *rest] == whole
        assert {each.base for each in found} == {length}
        check_seen(model, head, found)
        again = tokens(run(target, [request(1, words, 20, sampling, root=ROOT)]))[1]
        assert again == whole


def test_an_answer_continues_with_a_head_where_another_engine_stopped(
    model_dir: Callable[[str], Path], heads: Callable[..., Path]
) -> None:
    model, sampling = model_dir("llama"), Sampling(temperature=0.9, seed=4)
    whole = tokens(run(engine_of(model, ""), [request(0, prompt(11), 30, sampling)]))[0]
    native = engine_of(model, heads("narrow"))
    rest = tokens(run(native, [request(0, prompt(11), 30, sampling, generated=whole[:8])]))[0]
    assert rest == whole[8:]
    assert native.stats().draft_tokens


@pytest.mark.parametrize(
    ("sampling", "proposes"),
    [
        (Sampling(temperature=0.9, seed=4, repetition_penalty=1.3), False),
        (Sampling(temperature=0.9, seed=4, presence_penalty=0.5), False),
        (Sampling(temperature=0.9, seed=4, logit_bias={17: 4.0, 18: -4.0}, top_k=20, min_p=0.01), True),
        (Sampling(temperature=0.0, logprobs=3), True),
    ],
    ids=str,
)
def test_sampling_options_keep_their_effect(
    sampling: Sampling, proposes: bool, model_dir: Callable[[str], Path], heads: Callable[..., Path]
) -> None:
    model = model_dir("llama")
    stop = Stop(25, min_tokens=9, token_ids=(3, 4, 5, 6, 7))
    native = engine_of(model, heads("sglang"))
    found, plain = (
        run(native, [SequenceRequest("a", prompt(12), sampling, stop)])["a"],
        run(engine_of(model, ""), [SequenceRequest("a", prompt(12), sampling, stop)])["a"],
    )
    assert [each.token for each in found] == [each.token for each in plain]
    assert bool(native.stats().draft_tokens) == proposes
    for one, other in zip(found, plain, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "name", some(["qwen3", "mixtral", "deepseek_v3", "gpt_oss", "gemma3"], "deepseek_v3", "gemma3")
)
def test_heads_of_other_architectures(name: str, model_dir: Callable[[str], Path], heads: Callable[..., Path]) -> None:
    """Also of those with a latent in place of keys, and with sliding windows."""
    model = model_dir(name)
    native = engine_of(model, heads("sglang"))
    assert (native.scheduler.kv_cache.windows is not None) == (name in ("gpt_oss", "gemma3"))
    found = tokens(run(native, [request(n, prompt(n), 30) for n in (9, 33)]))
    assert found == {n: models.expected(model, prompt(n), 30) for n in (9, 33)}
    assert native.stats().draft_tokens


def test_heads_work_with_adapters(model_dir: Callable[[str], Path], heads: Callable[..., Path], tmp_path: Path) -> None:
    model, head = model_dir("llama"), heads("sglang")
    adapted = engine_of(model, head, max_loras=1)
    adapter = add(adapted, write_adapter(tmp_path / "poet", model))
    plain = engine_of(model, "", max_loras=1)
    add(plain, tmp_path / "poet")
    asked_for = [asked_of("poet", 30, adapter), asked_of("", 30)]
    assert tokens(run(adapted, asked_for)) == tokens(run(plain, asked_for))
    assert adapted.stats().draft_tokens


def changed(folder: Path, source: Path, tensors: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """A copy of a head with other tensors (None: without them) and another configuration."""
    folder.mkdir()
    held = load_file(source / "model.safetensors") | tensors
    save_file({name: value for name, value in held.items() if value is not None}, folder / "model.safetensors")
    written = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return folder


REFUSED: dict[str, tuple[dict[str, torch.Tensor | None], dict[str, Any], str]] = {
    "fc": ({"fc.weight": torch.ones(64, 96)}, {}, r"fc.weight takes 96 values.*3 hidden states of 64"),
    "fc missing": ({"fc.weight": None}, {}, "lacks fc.weight"),
    "vocabulary": ({}, {"vocab_size": 300}, r"300 tokens.*256.*same tokenizer"),
    "d2t missing": ({"d2t": None}, {}, r"100 of 256 tokens and lacks d2t"),
    "d2t outside": ({"d2t": torch.full((100,), 200)}, {}, r"d2t does not name.*256"),
    "d2t twice": ({"d2t": -torch.arange(100)}, {}, "d2t does not name"),
    "draft vocabulary": ({}, {"draft_vocab_size": 90}, r"100 tokens.*config.json it has 90"),
    "lm_head missing": ({"lm_head.weight": None}, {}, "lacks lm_head.weight"),
    "layer outside": ({}, {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, r"layers \[0, 1, 4\].*0 to 2"),
    "layers of its own": ({}, {"num_hidden_layers": 2}, "2 layers"),
    "variant": ({}, {"norm_before_fc": True}, "norm_before_fc"),
    "norms of queries": ({"midlayer.self_attn.q_norm.weight": torch.ones(16)}, {}, "q_norm"),
    "size": ({"midlayer.mlp.up_proj.weight": torch.ones(95, 64)}, {}, r"\[95, 64\].*\[96, 64\]"),
    "hidden": ({}, {"hidden_size": 32}, r"no embed_tokens.weight.*\[256, 64\], not \[256, 32\]"),
    "rope": ({}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "values": ({"fc.weight": torch.full((64, 192), float("nan"))}, {}, "NaN"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_cannot_be_used_are_refused(
    name: str, model_dir: Callable[[str], Path], heads: Callable[..., Path], tmp_path: Path
) -> None:
    tensors, config, message = REFUSED[name]
    head = changed(tmp_path / "head", heads("sglang"), tensors, **config)
    with pytest.raises(UnsupportedModel, match=message):
        engine_of(model_dir("llama"), head)


def test_a_batch_invariant_engine_refuses_a_head(model_dir: Callable[[str], Path], heads: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match="batch_invariant"):
        engine_of(model_dir("llama"), heads("sglang"), batch_invariant=True)


def test_a_trained_head_is_right_far_more_often_than_a_random_one(tmp_path: Path) -> None:
    """``tests.demo_model.eagle`` trained it on hidden states of transformers: ours must be of the same places."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(modeldir.DEMO / "tokenizer.json"))
    samples = [sample for task in ("facts", "counting", "unknown", "copying") for sample in cases(task, 3, 11)]
    asked_for = [
        request(n, tokenizer.encode(template.prompt(each.messages), add_special_tokens=False), 30, stop=Stop(30))
        for n, each in enumerate(samples)
    ]
    shares = []
    for head in (TRAINED, random_head(tmp_path / "head", vocab=1280, inputs=256)):
        native = engine_of(modeldir.DEMO, head, kv_blocks=200, block_size=16, num_speculative_tokens=1)
        run(native, asked_for)
        stats = native.stats()
        shares.append(stats.accepted_tokens / stats.draft_tokens)
    trained, at_random = shares
    assert trained > 0.4
    assert at_random < 0.05


def test_pictures_do_not_disturb_a_head(tmp_path: Path) -> None:
    head = random_head(tmp_path / "head", vocab=1280, inputs=256)
    options = {"device": "cpu", "kv_blocks": 64, "embed_slots": 8, "max_batched_tokens": 40}
    native = build(str(pictures.DIRECTORY), NativeOptions(speculative_model=str(head), **options))  # type: ignore[arg-type]
    words = pictures.prompt(2)
    item = pictures.asking(0, words, pictures.encoded(native, (1, 2)).slots, (1, 2), block_size=32)
    assert tokens(run(native, [item]))[0] == pictures.expected(words, (1, 2))
    assert native.stats().draft_tokens


class Slots:
    """A drafter that notes what each slot of a head was made of, and what it attends to; it guesses tokens."""

    def __init__(self, seed: int, wrong: float) -> None:
        self._guess = core.Guess(seed, wrong)
        self._content: dict[tuple[int, int], tuple[int, ...]] = {}  # of a slot's place: tokens whose states it has seen
        self._rows: list[tuple[int, ...]] = []  # of the target's last step, likewise
        self.runs: HeadRuns
        self.first: set[int] = set()  # tokens that heads begin with

    def propose(self, plan: list[ScheduledSequence], limits: list[int]) -> list[list[int]]:
        proposing = [0] * len(plan)
        for due in self.runs.take(plan, limits):
            shifted, base = due.view.shifted, due.view.base
            for slot in range(due.start, due.start + due.slots):
                seen = self._rows[due.row + slot - due.start]
                assert len(seen) == base + slot + 1
                assert all(self._at(due.view, each) == seen[: base + each + 1] for each in range(slot))
                self._content[shifted.blocks[slot // core.SIZE], slot % core.SIZE] = seen
            assert shifted.tokens[: slot + 1] == [*seen, shifted.tokens[slot]][base + 1 :]
            if due.limit:
                assert [*seen, shifted.tokens[slot]] == plan[due.number].sequence.tokens
                proposing[due.number] = due.limit
                self.first.add(base)
        drafts = self._guess.propose(plan, proposing)
        self.runs.planned(plan, drafts)
        self._rows = [
            tuple([*scheduled.sequence.tokens, *draft][: position + 1])
            for scheduled, draft in zip(plan, drafts, strict=True)
            for position in range(scheduled.start, scheduled.start + scheduled.count + len(draft))
        ]
        return drafts

    def _at(self, view: HeadView, slot: int) -> tuple[int, ...]:
        return self._content[view.shifted.blocks[slot // core.SIZE], slot % core.SIZE]

    def close(self) -> None: ...


@examples(100)
@given(
    st.integers(0, 1000),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.integers(1, 9),
    st.sampled_from((12, 20, 60)),
    st.sampled_from((1, 7, 64)),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 1), st.integers(1, 20), st.integers(0, 4), st.booleans()),
        max_size=8,
    ),
)
def test_slots_attend_to_states_of_their_own_sequence_only(
    seed: int,
    wrong: float,
    proposed: int,
    blocks: int,
    budget: int,
    prefix_cache: bool,
    requests: list[tuple[int, int, int, int, bool]],
) -> None:
    """However sequences are chunked, preempted, cancelled and found in the cache."""
    drafter = Slots(seed, wrong)
    rig = core.Rig(drafter, proposed, blocks=blocks, budget=budget, prefix_cache=prefix_cache)
    drafter.runs = HeadRuns(rig.manager.generations, core.SIZE)
    for key, (length, salt, size, steps, cancelled) in enumerate(requests):
        stops = (core.STOP,) if key % 2 else ()
        rig.engine.submit(core.request(key, core.prompt(length, salt), size, token_ids=stops, root=core.ROOT))
        for _ in range(steps):
            rig.step()
        if cancelled:
            rig.engine.cancel(key)
    rig.run()
    assert not prefix_cache or drafter.first <= {0}
